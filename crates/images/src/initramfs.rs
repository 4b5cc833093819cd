//! The initramfs: the guest agent as `/init` and the modules it loads to see its disk.
//!
//! ```text
//! /init                 the agent
//! /modules/<name>.ko    as they come from the kernel package
//! /modules/order        file names, one a line, in load order
//! /dev /proc /sys /newroot /run /tmp, /dev/console
//! ```
//!
//! The format is `newc`: per entry a header of 6 + 13 × 8 characters in hexadecimal, the name with a NUL,
//! the content, each padded to 4 bytes; the end is an entry named `TRAILER!!!`. Nothing depends on when
//! or where it is written: the same input gives the same bytes. It is not compressed, since a machine
//! reads it once per template.

const DIRECTORIES: [&str; 7] = ["dev", "modules", "newroot", "proc", "run", "sys", "tmp"];

/// Writes the archive. `modules`: file name and content, in load order.
pub fn build(agent: &[u8], modules: &[(String, Vec<u8>)]) -> Vec<u8> {
    let size = agent.len() + modules.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() + 64 * 1024;
    let mut archive = Archive { bytes: Vec::with_capacity(size), entries: 0 };
    for name in DIRECTORIES {
        archive.add(name, 0o040_755, (0, 0), b"");
    }
    // The kernel opens it for the agent's first messages.
    archive.add("dev/console", 0o020_600, (5, 1), b"");
    archive.add("init", 0o100_755, (0, 0), agent);
    let mut order = String::new();
    for (name, bytes) in modules {
        archive.add(&format!("modules/{name}"), 0o100_644, (0, 0), bytes);
        order.push_str(name);
        order.push('\n');
    }
    archive.add("modules/order", 0o100_644, (0, 0), order.as_bytes());
    archive.add("TRAILER!!!", 0, (0, 0), b"");
    archive.bytes
}

struct Archive {
    bytes: Vec<u8>,
    entries: usize,
}

impl Archive {
    fn add(&mut self, name: &str, mode: usize, device: (usize, usize), content: &[u8]) {
        self.entries += 1;
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        // inode, mode, uid, gid, links, mtime, size, device of the file system (2), device (2), name, checksum
        let header = [self.entries, mode, 0, 0, links, 0, content.len(), 0, 0, device.0, device.1, name.len() + 1, 0];
        self.bytes.extend(b"070701");
        for field in header {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use super::*;

    fn modules() -> Vec<(String, Vec<u8>)> {
        vec![("z.ko".into(), b"first".to_vec()), ("a.ko".into(), b"second!".to_vec())]
    }

    #[test]
    fn the_same_input_gives_the_same_bytes_and_another_agent_gives_others() {
        assert_eq!(build(b"agent", &modules()), build(b"agent", &modules()));
        assert_ne!(build(b"agent", &modules()), build(b"agent2", &modules()));
    }

    #[test]
    fn cpio_reads_back_what_was_written() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let unpack = Command::new("cpio")
            .args(["--extract", "--quiet", "--no-absolute-filenames", "--nonmatching", "dev/console"])
            .current_dir(scratch.path())
            .stdin(Stdio::piped())
            .spawn();
        let Ok(mut unpack) = unpack else {
            // cpio is no part of a minimal Debian; the guest's kernel reads the archive in every system test.
            return;
        };
        unpack.stdin.take().expect("piped").write_all(&build(b"agent", &modules())).expect("cpio reads");
        assert!(unpack.wait().expect("cpio ends").success());
        let read = |name: &str| std::fs::read_to_string(scratch.path().join(name)).expect(name);
        assert_eq!(read("init"), "agent");
        assert_eq!(read("modules/order"), "z.ko\na.ko\n");
        assert_eq!(read("modules/a.ko"), "second!");
    }

    #[test]
    fn every_entry_starts_at_a_multiple_of_four() {
        let bytes = build(b"abc", &modules());
        let mut at = 0;
        let mut names = Vec::new();
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).expect("hexadecimal digits");
                usize::from_str_radix(text, 16).expect("a number")
            };
            let (size, name_size) = (field(6), field(11));
            names.push(String::from_utf8_lossy(&bytes[at + 110..at + 109 + name_size]).into_owned());
            at = (at + 110 + name_size).next_multiple_of(4);
            at = (at + size).next_multiple_of(4);
        }
        assert_eq!(names.first().map(String::as_str), Some("dev"));
        assert_eq!(names.last().map(String::as_str), Some("TRAILER!!!"));
    }
}
