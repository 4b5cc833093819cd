//! Java's store of certificates: a JVM reads neither a bundle nor the environment.
//!
//! ```text
//! FEEDFEED | version 2 | count | entry... | SHA-1("changeit" in UTF-16, "Mighty Aphrodite", all before)
//! entry: kind 2, a certificate | alias | milliseconds since the epoch | "X.509" | length | DER
//! ```
//!
//! Numbers are big-endian; alias and kind of certificate follow their length in two bytes. Debian, Fedora and Alpine keep
//! such a file for all their JDKs. What is no such file, or has a password of its own, is somebody's: it stays as it is.

use std::{fs, io, path::Path};

use sha1::{Digest as _, Sha1};

const MAGIC_AND_VERSION: [u8; 8] = [0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2];
const DIGEST: usize = 20;

/// Adds a certificate, unless the store ends with it.
pub(super) fn append(store: &Path, der: &[u8]) -> io::Result<()> {
    let old = match fs::read(store) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        old => old?,
    };
    let Some(new) = with(&old, der) else { return Ok(()) };
    // A JVM never finds half of it.
    let beside = store.with_extension("stockade-new");
    fs::write(&beside, new)?;
    fs::set_permissions(&beside, fs::metadata(store)?.permissions())?;
    fs::rename(beside, store)
}

fn with(old: &[u8], der: &[u8]) -> Option<Vec<u8>> {
    let (content, digest) = old.split_at_checked(old.len().checked_sub(DIGEST)?)?;
    let (count, entries) = content.strip_prefix(&MAGIC_AND_VERSION)?.split_first_chunk()?;
    if seal(content) != digest || content.ends_with(der) {
        return None;
    }
    let count = u32::from_be_bytes(*count).checked_add(1)?;
    // An alias is there once: the certificate of another deployment has another one.
    let alias = format!("stockade-{:.8}", format!("{:x}", Sha1::digest(der)));
    let mut new = Vec::with_capacity(old.len() + der.len() + 64);
    new.extend(MAGIC_AND_VERSION);
    new.extend(count.to_be_bytes());
    new.extend(entries);
    new.extend(2_u32.to_be_bytes());
    text(&mut new, &alias);
    // When it was made is for people; the clock may not be set yet.
    new.extend(0_u64.to_be_bytes());
    text(&mut new, "X.509");
    new.extend(u32::try_from(der.len()).ok()?.to_be_bytes());
    new.extend(der);
    let digest = seal(&new);
    new.extend(digest);
    Some(new)
}

fn text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u16).to_be_bytes());
    to.extend(text.bytes());
}

fn seal(content: &[u8]) -> [u8; DIGEST] {
    let password: Vec<u8> = "changeit".bytes().flat_map(|byte| [0, byte]).collect();
    Sha1::new().chain_update(password).chain_update(b"Mighty Aphrodite").chain_update(content).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a JVM reads it: aliases and certificates.
    fn parse(store: &[u8]) -> Vec<(String, Vec<u8>)> {
        fn take<'a>(rest: &mut &'a [u8], length: usize) -> &'a [u8] {
            rest.split_off(..length).expect("long enough")
        }
        fn number(rest: &mut &[u8], bytes: usize) -> usize {
            take(rest, bytes).iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
        }
        fn text(rest: &mut &[u8]) -> String {
            let length = number(rest, 2);
            String::from_utf8(take(rest, length).to_vec()).expect("text")
        }
        let mut rest = store;
        assert_eq!((number(&mut rest, 4), number(&mut rest, 4)), (0xfeed_feed, 2));
        let entries = (0..number(&mut rest, 4))
            .map(|_| {
                assert_eq!(number(&mut rest, 4), 2);
                let (alias, _made, kind) = (text(&mut rest), number(&mut rest, 8), text(&mut rest));
                assert_eq!(kind, "X.509");
                let length = number(&mut rest, 4);
                (alias, take(&mut rest, length).to_vec())
            })
            .collect();
        assert_eq!(rest, seal(&store[..store.len() - DIGEST]));
        entries
    }

    fn empty() -> Vec<u8> {
        // Made by OpenJDK 17: its last key was deleted.
        let text = "feedfeed0000000200000000e2686e45fb43dfa4d992dd41ceb6b21c6330d792";
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal")).collect()
    }

    #[test]
    fn a_store_gets_the_certificate_once_and_keeps_what_it_had() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = directory.path().join("cacerts");
        append(&store, b"ours").expect("no Java here");
        assert!(!store.exists());
        fs::write(&store, empty()).expect("written");
        for der in [b"theirs", b"theirs", b"ours--", b"ours--"] {
            append(&store, der).expect("appended");
        }
        let entries = parse(&fs::read(&store).expect("read"));
        assert_eq!(entries.iter().map(|(_, der)| &der[..]).collect::<Vec<_>>(), [b"theirs", b"ours--"]);
        assert_ne!(entries[0].0, entries[1].0);
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 1);
    }

    #[test]
    fn what_is_no_such_store_stays_as_it_is() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = directory.path().join("cacerts");
        let with_another_password = [&empty()[..12], &[7; DIGEST]].concat();
        for other in [&b""[..], b"\x30\x82PKCS#12", &empty()[..31], &with_another_password] {
            fs::write(&store, other).expect("written");
            append(&store, b"ours").expect("left alone");
            assert_eq!(fs::read(&store).expect("read"), other);
        }
    }
}
