//! Files: bytes in, bytes out, and what entries look like.

mod common;

use std::{
    collections::BTreeMap,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
};

use bytes::Bytes;
use common::{Guest, argv, bytes, content, refusal};
use stockade_engine::{
    EngineError,
    guest::{ReadFile, WriteFile},
};
use stockade_wire::{
    ErrorCode,
    files::{
        EntryInfo, EntryKind, EntryList, ListRequest, MakeDirRequest, PathRequest, RemoveRequest, RenameRequest,
        SetAttributesRequest, SymlinkRequest,
    },
};

fn write(path: String) -> WriteFile {
    WriteFile { path, ..WriteFile::default() }
}

async fn list(guest: &Guest, name: &str, depth: u32) -> Result<EntryList, EngineError> {
    guest.client.list(&ListRequest { path: guest.path(name), user: None, depth }).await
}

async fn stat(guest: &Guest, name: &str) -> EntryInfo {
    let request = PathRequest { path: guest.path(name), user: None };
    guest.client.stat(&request).await.expect("described")
}

#[tokio::test]
async fn every_byte_value_and_none_come_back() {
    let guest = Guest::start().await;
    let all: Vec<u8> = (0..=255).collect();
    let info = guest.write("deep/er/all", all.clone()).await;
    assert_eq!((info.size, info.kind, info.mode), (256, EntryKind::File, 0o644));
    assert_eq!(guest.read("deep/er/all").await, all);
    guest.write("empty", "").await;
    assert_eq!(guest.read("empty").await, b"");
}

#[tokio::test]
async fn large_files_and_parts_of_them_are_exact() {
    let guest = Guest::start().await;
    let large: Bytes = (0..5_000_000u32).flat_map(u32::to_le_bytes).collect();
    let pieces: Vec<_> = large.chunks(100_001).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
    let written = guest.client.write_file(&write(guest.path("large")), Box::pin(futures::stream::iter(pieces))).await;
    assert_eq!(written.expect("written").size, 20_000_000);
    assert!(guest.read("large").await == large);
    for (offset, length, end) in
        [(0, Some(0), 0), (1, Some(10), 11), (262_143, Some(262_146), 524_289), (19_999_990, None, 20_000_000)]
    {
        let request = ReadFile { path: guest.path("large"), user: None, offset, length };
        let part = content(guest.client.read_file(&request).await.expect("opened")).await;
        assert!(part == large[offset as usize..end], "{offset}+{length:?}");
    }
    let beyond = ReadFile { path: guest.path("large"), user: None, offset: u64::MAX, length: None };
    assert!(matches!(refusal(guest.client.read_file(&beyond).await.map(|_| ())).0, ErrorCode::InvalidArgument));
}

#[tokio::test]
async fn names_that_are_not_plain_are_the_same_bytes_everywhere() {
    let guest = Guest::start().await;
    let text = std::fs::read_to_string(guest.input("file_names.json")).expect("read");
    let names: Vec<String> = serde_json::from_str(&text).expect("a list");
    for name in &names {
        guest.write(&format!("names/{name}"), name.clone()).await;
        assert_eq!(guest.read(&format!("names/{name}")).await, name.as_bytes());
    }
    let mut expected = names.clone();
    expected.sort();
    let found: Vec<_> =
        list(&guest, "names", 1).await.expect("listed").entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!(found, expected);
}

#[tokio::test]
async fn a_name_that_is_not_utf_8_is_listed_and_marked() {
    let guest = Guest::start().await;
    std::fs::create_dir(guest.path("d")).expect("made");
    let name = std::ffi::OsStr::from_bytes(b"bad\xff.txt");
    std::fs::write(std::path::Path::new(&guest.path("d")).join(name), "x").expect("written");
    let entries = list(&guest, "d", 1).await.expect("listed").entries;
    assert_eq!((entries[0].name.as_str(), entries[0].lossy), ("bad\u{fffd}.txt", true));
}

#[tokio::test]
async fn paths_that_lead_nowhere_say_what_is_wrong() {
    let guest = Guest::start().await;
    guest.write("file", "x").await;
    let read = async |path: String| {
        refusal(guest.client.read_file(&ReadFile { path, ..ReadFile::default() }).await.map(|_| ()))
    };
    let (code, message) = read(guest.path("missing")).await;
    assert_eq!((code, message), (ErrorCode::NotFound, format!("path '{}' does not exist", guest.path("missing"))));
    assert_eq!(read(guest.path("")).await.0, ErrorCode::IsADirectory);
    assert_eq!(read(guest.path("file/x")).await.0, ErrorCode::NotADirectory);
    assert_eq!(read("a\0b".to_owned()).await.0, ErrorCode::InvalidArgument);
    assert_eq!(read(String::new()).await.0, ErrorCode::InvalidArgument);
    assert_eq!(read("x/".repeat(3000)).await.0, ErrorCode::TooLong);
    assert_eq!(read(guest.path(&"n".repeat(300))).await.0, ErrorCode::TooLong);
    let written = guest.client.write_file(&write(guest.path("")), bytes("x")).await;
    assert_eq!(refusal(written).0, ErrorCode::IsADirectory);
    let under_file = guest.client.write_file(&write(guest.path("file/x")), bytes("x")).await;
    assert_eq!(refusal(under_file).0, ErrorCode::NotADirectory);
}

#[tokio::test]
async fn pipes_and_devices_are_refused_at_once() {
    let guest = Guest::start().await;
    guest.run(argv(["mkfifo", &guest.path("pipe")])).await;
    for path in [guest.path("pipe"), "/dev/zero".to_owned(), "/dev/full".to_owned()] {
        let read = guest.client.read_file(&ReadFile { path: path.clone(), ..ReadFile::default() }).await;
        assert_eq!(refusal(read.map(|_| ())).0, ErrorCode::InvalidArgument, "{path}");
        for atomic in [false, true] {
            let request = WriteFile { atomic, ..write(path.clone()) };
            assert_eq!(refusal(guest.client.write_file(&request, bytes("x")).await).0, ErrorCode::InvalidArgument);
        }
    }
    assert_eq!(stat(&guest, "pipe").await.kind, EntryKind::Other);
}

#[tokio::test]
async fn overwriting_keeps_mode_and_owner_in_place_and_atomically() {
    let guest = Guest::start().await;
    for atomic in [false, true] {
        let path = guest.path("tool");
        std::fs::write(&path, "#!/bin/sh\necho a much longer old text\n").expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).expect("set");
        let before = std::fs::metadata(&path).expect("there");
        let request = WriteFile { atomic, ..write(path.clone()) };
        let info = guest.client.write_file(&request, bytes("#!/bin/sh\necho new\n")).await.expect("written");
        assert_eq!((info.mode, info.uid), (0o750, before.uid()));
        assert_eq!(guest.run(argv([&path])).await.text(), "new\n");
        let after = std::fs::metadata(&path).expect("there");
        assert_eq!(after.ino() == before.ino(), !atomic, "in place is the same file");
    }
    assert_eq!(list(&guest, "", 1).await.expect("listed").entries.len(), 1, "no temporary file is left");
}

#[tokio::test]
async fn an_atomic_write_that_breaks_off_leaves_the_old_file_alone() {
    let guest = Guest::start().await;
    guest.write("f", "old").await;
    let broken = futures::stream::iter([Ok(Bytes::from(vec![b'x'; 600_000])), Err(std::io::Error::other("gone"))]);
    let request = WriteFile { atomic: true, ..write(guest.path("f")) };
    guest.client.write_file(&request, Box::pin(broken)).await.expect_err("the body failed");
    assert_eq!(guest.read("f").await, b"old");
    // The server learns of the end a moment after the client.
    while list(&guest, "", 1).await.expect("listed").entries.len() > 1 {}
}

#[tokio::test]
async fn an_atomic_write_through_a_link_replaces_what_it_leads_to() {
    let guest = Guest::start().await;
    guest.write("real", "old").await;
    symlink("real", guest.path("link")).expect("linked");
    let request = WriteFile { atomic: true, ..write(guest.path("link")) };
    guest.client.write_file(&request, bytes("new")).await.expect("written");
    assert_eq!(guest.read("real").await, b"new");
    assert_eq!(stat(&guest, "link").await.kind, EntryKind::Symlink);
}

#[tokio::test]
async fn a_mode_asked_for_is_exact_and_attributes_replace_the_old_set() {
    let guest = Guest::start().await;
    let attributes = |pairs: &[(&str, &str)]| -> Option<BTreeMap<String, String>> {
        Some(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    };
    let request =
        WriteFile { mode: Some(0o666), attributes: attributes(&[("a", "1"), ("b", "2")]), ..write(guest.path("f")) };
    let info = guest.client.write_file(&request, bytes("x")).await.expect("written");
    assert_eq!((info.mode, info.attributes), (0o666, attributes(&[("a", "1"), ("b", "2")]).unwrap_or_default()));
    let request = WriteFile { attributes: attributes(&[("b", "3")]), ..write(guest.path("f")) };
    guest.client.write_file(&request, bytes("y")).await.expect("written");
    assert_eq!(stat(&guest, "f").await.attributes, attributes(&[("b", "3")]).unwrap_or_default());
}

#[tokio::test]
async fn links_are_listed_as_links_and_never_entered() {
    let guest = Guest::start().await;
    let script = guest.input("file_links_make.sh");
    guest.run(argv(["sh", &script, &guest.path("tree")])).await;
    let entries = list(&guest, "tree", 1).await.expect("listed").entries;
    let kinds: BTreeMap<_, _> = entries.iter().map(|entry| (entry.name.as_str(), entry.kind)).collect();
    assert_eq!(kinds.len(), 6);
    assert_eq!(kinds["real"], EntryKind::Directory);
    for link in ["to_file", "to_dir", "dangling", "absolute", "loop"] {
        assert_eq!(kinds[link], EntryKind::Symlink, "{link}");
    }
    let to_dir = entries.iter().find(|entry| entry.name == "to_dir").expect("listed");
    assert_eq!(to_dir.link_target.as_deref(), Some("real"));
    assert_eq!(to_dir.resolved.as_ref().expect("leads somewhere").kind, EntryKind::Directory);
    let dangling = entries.iter().find(|entry| entry.name == "dangling").expect("listed");
    assert_eq!(dangling.resolved, None);
    let deep: Vec<_> =
        list(&guest, "tree", 9).await.expect("listed").entries.into_iter().map(|entry| entry.path).collect();
    assert!(!deep.iter().any(|path| path.contains("to_dir/")), "{deep:?}");
    let at = |name: &str| deep.iter().position(|path| path.ends_with(name)).expect("listed");
    assert!(at("/real") < at("/real/file.txt") && at("/real/inner") < at("/real/inner/deep.txt"));
    assert_eq!(refusal(list(&guest, "missing", 1).await).0, ErrorCode::NotFound);
    assert_eq!(refusal(list(&guest, "tree/real/file.txt", 1).await).0, ErrorCode::NotADirectory);
}

#[tokio::test]
async fn three_thousand_small_files_are_all_there() {
    let guest = Guest::start().await;
    for n in 0..3000 {
        guest.write(&format!("many/{n}"), format!("{n}")).await;
    }
    assert_eq!(list(&guest, "many", 1).await.expect("listed").entries.len(), 3000);
}

#[tokio::test]
async fn directories_are_made_renamed_and_removed() {
    let guest = Guest::start().await;
    let make = async |name: &str, parents| {
        guest.client.make_dir(&MakeDirRequest { path: guest.path(name), user: None, parents, mode: None }).await
    };
    assert_eq!(refusal(make("a/b", false).await).0, ErrorCode::NotFound);
    assert_eq!(make("a/b", true).await.expect("made").mode, 0o755);
    assert_eq!(refusal(make("a/b", true).await).0, ErrorCode::AlreadyExists);
    guest.write("a/b/f", "x").await;
    let rename = async |from: &str, to: &str| {
        guest.client.rename(&RenameRequest { from: guest.path(from), to: guest.path(to), user: None }).await
    };
    assert_eq!(rename("a/b", "x/y/z").await.expect("moved").path, guest.path("x/y/z"));
    assert_eq!(refusal(rename("a/b", "q").await).0, ErrorCode::NotFound);
    let remove = async |name: &str, recursive, missing_ok| {
        guest.client.remove(&RemoveRequest { path: guest.path(name), user: None, recursive, missing_ok }).await
    };
    assert_eq!(refusal(remove("x", false, false).await).0, ErrorCode::NotEmpty);
    remove("x", true, false).await.expect("removed");
    assert_eq!(refusal(remove("x", true, false).await).0, ErrorCode::NotFound);
    remove("x", true, true).await.expect("nothing to remove is no error");
}

#[tokio::test]
async fn removing_a_tree_never_follows_a_link_out_of_it() {
    let guest = Guest::start().await;
    guest.write("keep/precious", "x").await;
    std::fs::create_dir_all(guest.path("tree/deep")).expect("made");
    for link in ["tree/link", "tree/deep/link"] {
        symlink(guest.path("keep"), guest.path(link)).expect("linked");
    }
    symlink(guest.path("keep"), guest.path("top")).expect("linked");
    for name in ["tree", "top"] {
        let request = RemoveRequest { path: guest.path(name), user: None, recursive: true, missing_ok: false };
        guest.client.remove(&request).await.expect("removed");
    }
    assert_eq!(guest.read("keep/precious").await, b"x");
    assert_eq!(list(&guest, "", 1).await.expect("listed").entries.len(), 1);
}

#[tokio::test]
async fn links_modes_and_home_paths_work() {
    let guest = Guest::start().await;
    let home = WriteFile { path: "~/in/home".to_owned(), ..WriteFile::default() };
    assert_eq!(guest.client.write_file(&home, bytes("x")).await.expect("written").path, guest.path("in/home"));
    let relative = PathRequest { path: "in/home".to_owned(), user: None };
    assert_eq!(guest.client.stat(&relative).await.expect("described").path, guest.path("in/home"));
    let link = SymlinkRequest { target: "in/home".to_owned(), path: guest.path("link"), user: None };
    assert_eq!(guest.client.symlink(&link).await.expect("linked").link_target.as_deref(), Some("in/home"));
    assert_eq!(refusal(guest.client.symlink(&link).await).0, ErrorCode::AlreadyExists);
    let mode =
        SetAttributesRequest { path: guest.path("link"), user: None, mode: Some(0o4711), owner: None, group: None };
    guest.client.set_attributes(&mode).await.expect("changed");
    assert_eq!(stat(&guest, "in/home").await.mode, 0o4711);
    let owner = SetAttributesRequest { owner: Some("nobody-here".to_owned()), mode: None, ..mode };
    assert_eq!(refusal(guest.client.set_attributes(&owner).await).0, ErrorCode::UnknownUser);
}

/// HTTP/2 takes many frames without content for an attack; none may get onto the link.
#[tokio::test]
async fn thousands_of_empty_pieces_do_not_end_the_session() {
    let guest = Guest::start().await;
    let pieces = || futures::stream::iter(["", "a", "", "", "b", ""].map(|piece| Ok(piece.into())));
    for _ in 0..500 {
        guest.client.write_file(&write(guest.path("pieces")), Box::pin(pieces())).await.expect("written");
    }
    assert_eq!(std::fs::read(guest.path("pieces")).expect("read"), b"ab");
    assert!(guest.client.is_open());
}
