use std::os::unix::fs::MetadataExt as _;

use proptest::prelude::*;

use super::*;

/// Asks one request after the other on one server; the kinds and bodies of the answers.
fn ask(requests: impl IntoIterator<Item = Packet>) -> Vec<(u8, Vec<u8>)> {
    let mut input = Packet::new(kind::INIT).u32(3).finish();
    requests.into_iter().for_each(|request| input.extend(request.finish()));
    let mut output = Vec::new();
    serve(&mut input.as_slice(), &mut output).expect("served");
    let mut answers = split(&output);
    let (first, version) = answers.remove(0);
    assert_eq!((first, &version[..4]), (kind::VERSION, &3_u32.to_be_bytes()[..]));
    answers
}

fn split(mut output: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let (mut answers, mut buffer) = (Vec::new(), Vec::new());
    while packet::read(&mut output, &mut buffer).expect("whole packets").is_some() {
        answers.push((buffer[0], buffer[1..].to_vec()));
    }
    answers
}

fn request(kind: u8) -> Packet {
    Packet::new(kind).u32(7)
}

fn open(path: &Path, flags: u32) -> Packet {
    request(kind::OPEN).path(path).u32(flags).u32(0)
}

fn handle(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

/// The code of a status.
fn code((kind, body): &(u8, Vec<u8>)) -> u32 {
    assert_eq!(*kind, kind::STATUS);
    u32::from_be_bytes(body[4..8].try_into().expect("four bytes"))
}

#[test]
fn a_file_is_written_at_any_offset_and_read_back() {
    let place = tempfile::tempdir().expect("a directory");
    let path = place.path().join("f");
    let answers = ask([
        open(&path, 1 | 2 | 8 | 16),
        request(kind::WRITE).string(&handle(0)).u64(3).string(b"def"),
        request(kind::WRITE).string(&handle(0)).u64(0).string(b"abc"),
        request(kind::READ).string(&handle(0)).u64(1).u32(100),
        request(kind::READ).string(&handle(0)).u64(6).u32(100),
        request(kind::FSETSTAT).string(&handle(0)).u32(1 | 4 | 8).u64(4).u32(0o640).u32(10).u32(20),
        request(kind::CLOSE).string(&handle(0)),
        request(kind::READ).string(&handle(0)).u64(0).u32(1),
    ]);
    assert_eq!(answers[0].0, kind::HANDLE);
    assert_eq!((code(&answers[1]), code(&answers[2])), (0, 0));
    assert_eq!((answers[3].0, &answers[3].1[8..]), (kind::DATA, &b"bcdef"[..]));
    assert_eq!(code(&answers[4]), 1, "the end");
    assert_eq!((code(&answers[5]), code(&answers[6]), code(&answers[7])), (0, 0, 4));
    // Before it is read, which is an access.
    let meta = fs::metadata(&path).expect("there");
    assert_eq!((meta.mode() & 0o7777, meta.atime(), meta.mtime()), (0o640, 10, 20));
    assert_eq!(fs::read(&path).expect("there"), b"abcd");
}

#[test]
fn names_are_made_moved_listed_and_removed() {
    let place = tempfile::tempdir().expect("a directory");
    let at = |name: &str| place.path().join(name);
    fs::write(at("a"), "1").expect("written");
    fs::write(at("b"), "22").expect("written");
    let posix = || request(kind::EXTENDED).string(b"posix-rename@openssh.com");
    let answers = ask([
        request(kind::MKDIR).path(&at("d")).u32(4).u32(0o700),
        request(kind::RENAME).path(&at("a")).path(&at("b")),
        posix().path(&at("a")).path(&at("b")),
        request(kind::SYMLINK).path(Path::new("b")).path(&at("l")),
        request(kind::READLINK).path(&at("l")),
        request(kind::REALPATH).path(&at("d/../l")),
        request(kind::REALPATH).path(&at("not-there")),
        request(kind::OPENDIR).path(place.path()),
        request(kind::READDIR).string(&handle(0)),
        request(kind::READDIR).string(&handle(0)),
        request(kind::REMOVE).path(&at("l")),
        request(kind::RMDIR).path(&at("d")),
        request(kind::STAT).path(&at("d")),
    ]);
    assert_eq!((code(&answers[0]), code(&answers[1]), code(&answers[2]), code(&answers[3])), (0, 4, 0, 0));
    let named = |answer: &(u8, Vec<u8>)| {
        assert_eq!(answer.0, kind::NAME);
        Body(&answer.1[8..]).path().expect("a path")
    };
    assert_eq!(named(&answers[4]), Path::new("b"));
    let real = place.path().canonicalize().expect("there");
    assert_eq!((named(&answers[5]), named(&answers[6])), (real.join("b"), real.join("not-there")));
    let listed = String::from_utf8_lossy(&answers[8].1).into_owned();
    assert_eq!(answers[8].1[4..8], 5_u32.to_be_bytes(), "., .., b, d, l");
    assert!(listed.contains("lrwxrwxrwx") && listed.contains("drwx------"), "{listed}");
    assert_eq!((code(&answers[9]), code(&answers[10]), code(&answers[11]), code(&answers[12])), (1, 0, 0, 2));
    assert_eq!(fs::read(at("b")).expect("there"), b"1");
}

#[test]
fn what_cannot_be_is_refused_with_its_reason_and_the_session_goes_on() {
    let place = tempfile::tempdir().expect("a directory");
    let there = place.path().join("there");
    fs::write(&there, "").expect("written");
    let answers = ask([
        open(&place.path().join("no/such"), 1),
        open(&there, 2 | 8 | 32),
        request(kind::OPEN).u32(1 << 30),
        request(99),
        request(kind::EXTENDED).string(b"other@example.com"),
        request(kind::READ).string(b"long handle").u64(0).u32(1),
        request(kind::EXTENDED).string(b"expand-path@openssh.com").string(b"~no-such-user-here/x"),
        request(kind::LSTAT).path(&there),
    ]);
    let codes: Vec<_> = answers[..7].iter().map(code).collect();
    assert_eq!(codes, [2, 4, 5, 8, 8, 4, 4]);
    assert_eq!(answers[7].0, kind::ATTRS);
}

#[test]
fn more_handles_than_there_may_be_are_refused() {
    let place = tempfile::tempdir().expect("a directory");
    let opens = (0..=MAX_HANDLES).map(|_| request(kind::OPENDIR).path(place.path()));
    let answers = ask(opens);
    assert!(answers[..MAX_HANDLES].iter().all(|answer| answer.0 == kind::HANDLE));
    assert_eq!(code(&answers[MAX_HANDLES]), 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_bytes_bring_it_down(bodies in prop::collection::vec((0_u8..=210, prop::collection::vec(any::<u8>(), 0..64)), 0..8)) {
        // Nothing is changed by what names no path of its own: kinds that take one are left out.
        let harmless = |kind: u8| matches!(kind, 1 | 4..=8 | 10 | 12 | 17 | 19 | 21..);
        let mut input = Vec::new();
        for (kind, body) in bodies.iter().filter(|(kind, _)| harmless(*kind)) {
            input.extend((body.len() as u32 + 1).to_be_bytes());
            input.push(*kind);
            input.extend(body);
        }
        let mut output = Vec::new();
        // An error ends the session; nothing else may.
        let _ = serve(&mut input.as_slice(), &mut output);
        split(&output);
    }
}
