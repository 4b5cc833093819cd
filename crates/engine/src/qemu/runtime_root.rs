//! The root directory of every jail: the emulator, the libraries it needs, its firmware, and empty
//! places for what is mounted. Nothing else of the host is in it.
//!
//! It is a copy, made once per emulator version: one mount instead of sixty, and an upgrade of the
//! host's packages does not change files under running machines.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tokio::process::Command;

use super::{command_line, config::joined, memory};
use crate::EngineError;

const FIRMWARE: [&str; 4] = ["bios-microvm.bin", "linuxboot_dma.bin", "pvh.bin", "kvmvapic.bin"];
const DIRECTORIES: [&str; 7] = ["proc", "dev", "machine", "layers", "template", "boot", "tmp"];
const MOUNT_POINTS: [&str; 3] = ["dev/null", "dev/urandom", "dev/kvm"];

/// An assembled root.
#[derive(Clone, Debug)]
pub(crate) struct RuntimeRoot {
    /// Where it is on the host.
    pub(crate) path: PathBuf,
    /// The emulator in it.
    pub(crate) program: String,
}

impl RuntimeRoot {
    /// Assembles the root for an emulator below `directory`, unless it is there already.
    pub(crate) async fn assemble(
        directory: &Path,
        emulator: &Path,
        firmware: &Path,
        modules: &[PathBuf],
    ) -> Result<Self, EngineError> {
        let emulator = fs::canonicalize(emulator)
            .map_err(EngineError::host(format!("find the emulator {}", emulator.display())))?;
        let mut files = vec![emulator.clone()];
        files.extend(modules.iter().cloned());
        for object in files.clone() {
            files.extend(libraries(&object).await?);
        }
        files.sort();
        files.dedup();
        let firmware: Vec<PathBuf> =
            FIRMWARE.iter().map(|name| firmware.join(name)).filter(|path| path.exists()).collect();

        let describe = || -> io::Result<String> {
            let mut text = format!("{DIRECTORIES:?} {MOUNT_POINTS:?}\n");
            for path in files.iter().chain(&firmware) {
                let metadata = fs::metadata(path)?;
                text +=
                    &format!("{} {} {}.{}\n", path.display(), metadata.len(), metadata.mtime(), metadata.mtime_nsec());
            }
            Ok(text)
        };
        let description = describe().map_err(EngineError::host("look at the emulator's files"))?;
        let digest = memory::bytes_digest(description.as_bytes());
        let root =
            Self { path: directory.join(format!("root-{}", &digest[..16])), program: emulator.display().to_string() };
        if !root.path.is_dir() {
            let target = root.path.clone();
            let work = move || build(&target, &files, &firmware);
            joined(tokio::task::spawn_blocking(work).await)
                .map_err(EngineError::host(format!("assemble {}", root.path.display())))?;
        }
        Ok(root)
    }
}

fn build(target: &Path, files: &[PathBuf], firmware: &[PathBuf]) -> io::Result<()> {
    let parent = target.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(parent)?;
    // A name of its own: another process may be assembling the same root.
    let temporary = tempfile::Builder::new().prefix("root.new-").tempdir_in(parent)?;
    for name in DIRECTORIES {
        fs::create_dir(temporary.path().join(name))?;
    }
    for name in MOUNT_POINTS {
        File::create(temporary.path().join(name))?;
    }
    for file in files {
        copy(file, &temporary.path().join(file.strip_prefix("/").map_err(io::Error::other)?))?;
    }
    let firmware_dir = temporary.path().join(command_line::FIRMWARE_DIR.trim_start_matches('/'));
    for file in firmware {
        let name = file.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        copy(file, &firmware_dir.join(name))?;
    }
    set_modes(temporary.path())?;
    match fs::rename(temporary.path(), target) {
        // The other one was first; theirs is as good.
        Err(_) if target.is_dir() => Ok(()),
        result => result,
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::copy(from, to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))
}

/// Whatever the umask was: nobody may enter and read.
fn set_modes(directory: &Path) -> io::Result<()> {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            set_modes(&entry.path())?;
        }
    }
    Ok(())
}

/// The libraries an emulator or module is linked with, the loader included.
async fn libraries(object: &Path) -> Result<Vec<PathBuf>, EngineError> {
    let output = Command::new("ldd").arg(object).output().await.map_err(EngineError::host("run ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.contains("not found")) {
        return Err(EngineError::Unsupported {
            missing: object.display().to_string(),
            why: format!("a library is missing: {}", line.trim()),
        });
    }
    Ok(parse_libraries(&text))
}

fn parse_libraries(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let line = line.split_once(" => ").map_or(line, |(_, path)| path);
        let path = line.trim().split_once(" (")?.0;
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    text.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_assembled_by_several_at_once_is_whole() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = directory.path().join("root-1");
        let program = [std::env::current_exe().expect("this program")];
        std::thread::scope(|scope| {
            let builders: Vec<_> = (0..4).map(|_| scope.spawn(|| build(&target, &program, &[]))).collect();
            builders.into_iter().for_each(|builder| builder.join().expect("ran").expect("assembled"));
        });
        assert!(DIRECTORIES.iter().all(|name| target.join(name).is_dir()));
        assert_eq!(fs::read_dir(directory.path()).expect("listed").count(), 1, "nothing else is left");
    }

    #[test]
    fn libraries_and_the_loader_are_read_from_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007f)\n\tlibz.so.1 => /lib/libz.so.1 (0x00007f)\n\t/lib64/ld.so.2 (0x0)\n";
        assert_eq!(parse_libraries(text), [PathBuf::from("/lib/libz.so.1"), PathBuf::from("/lib64/ld.so.2")]);
        assert!(parse_libraries("\tstatically linked\n").is_empty());
    }
}
