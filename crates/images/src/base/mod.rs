//! The `base` template's root file system: a Debian 12 userland as an ext4 image.
//!
//! mmdebstrap installs the packages, `setup.sh` runs inside, and `mke2fs -d` writes the tree into an image
//! while owners, modes, links and extended attributes are as the guest will see them: as root in namespaces
//! of our own, as an ordinary user in a user namespace. The image is just large enough; a machine's disk is
//! larger, and the agent grows the file system when the template boots.
//!
//! In the cache it is a directory `disk-<digest of recipe and kernel>/` with `root.ext4`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::sys::statvfs::statvfs;

use crate::{
    ImageError,
    cache::{Cache, allocated_bytes},
    debian,
    digest::Digest,
    kernel::Kernel,
    program::Program,
    progress::{Progress, Step, Unit},
};

mod messages;
mod rights;

pub use rights::BuildMode;

/// Everything `base` is made of. A change of any field makes a new template.
const RECIPE: Recipe = Recipe {
    revision: 1,
    suite: debian::SUITE,
    packages: &[
        "bash",
        "build-essential",
        "bzip2",
        "ca-certificates",
        "coreutils",
        "curl",
        "e2fsprogs",
        "file",
        "git",
        "iproute2",
        "jq",
        "kmod",
        "less",
        "nodejs",
        "npm",
        "openssh-client",
        "procps",
        "python3",
        "python3-pip",
        "python3-venv",
        "ripgrep",
        "sudo",
        "tar",
        "unzip",
        "wget",
        "xz-utils",
        "zip",
    ],
    // Nobody reads manuals in a sandbox; licences stay.
    dpkg_options: &[
        "path-exclude=/usr/share/doc/*",
        "path-include=/usr/share/doc/*/copyright",
        "path-exclude=/usr/share/man/*",
        "path-exclude=/usr/share/info/*",
        "path-exclude=/usr/share/locale/*",
        "path-include=/usr/share/locale/locale.alias",
        // The image is written afterwards in one piece, and a sandbox has nothing to gain from it either.
        "force-unsafe-io",
    ],
    setup: include_str!("setup.sh"),
    image: include_str!("image.sh"),
};

/// Space a build takes at its peak: packages, tree, image.
const NEEDED_MIB: u64 = 3072;

struct Recipe {
    /// Raise to build anew without another change, for example for newer packages.
    revision: u32,
    suite: &'static str,
    packages: &'static [&'static str],
    dpkg_options: &'static [&'static str],
    /// Runs inside the tree.
    setup: &'static str,
    /// Runs outside and writes the image.
    image: &'static str,
}

impl Recipe {
    fn digest(&self, kernel: &Kernel) -> String {
        Digest::default()
            .field("revision", self.revision.to_string())
            .field("suite", self.suite)
            .field("packages", self.packages.join(" "))
            .field("dpkg options", self.dpkg_options.join(" "))
            .field("setup", self.setup)
            .field("image", self.image)
            .field("kernel", &kernel.info().digest)
            .finish()
    }
}

/// A root file system in the cache. Never written to.
#[derive(Clone, Debug)]
pub struct RootDisk {
    path: PathBuf,
    digest: String,
}

impl RootDisk {
    /// The ext4 image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Over all it was made from.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// The disk from the cache, built if it is not there.
pub(crate) async fn ensure(cache: &Cache, kernel: &Kernel, progress: &dyn Progress) -> Result<RootDisk, ImageError> {
    let digest = RECIPE.digest(kernel);
    let build = async |staging: &Path| build(&RECIPE, kernel, staging, progress).await;
    let directory = cache.ensure(&format!("disk-{digest}"), progress, build).await?;
    Ok(RootDisk { path: directory.join("root.ext4"), digest })
}

async fn build(recipe: &Recipe, kernel: &Kernel, staging: &Path, progress: &dyn Progress) -> Result<(), ImageError> {
    check_space(staging)?;
    let mode = BuildMode::choose()?;
    let image = staging.join("root.ext4");
    // A user namespace does not see into this user's directories: the image is made beside the tree and
    // handed out by mmdebstrap.
    let (image_in_hook, temporary) = match mode {
        BuildMode::Root => (image.display().to_string(), Some(staging)),
        BuildMode::UserNamespace | BuildMode::FakeRoot => ("$1/root.ext4".to_owned(), None),
    };
    let modules = kernel.directory().join("lib/modules");
    let mut program = mode
        .mmdebstrap()
        .await
        .args(["--verbose", "--variant=minbase", "--format=null"])
        // The image is written before mmdebstrap would clean up; setup.sh does it.
        .arg("--skip=cleanup")
        .arg(format!("--architectures={}", debian::ARCHITECTURE))
        .arg(format!("--include={}", recipe.packages.join(",")))
        .args(recipe.dpkg_options.iter().map(|option| format!("--dpkgopt={option}")))
        .args(debian::proxy_options().await.iter().map(|option| format!("--aptopt={option}")))
        .arg(format!("--customize-hook=copy-in {} /usr/lib", quote(&modules.to_string_lossy())))
        .arg(format!("--customize-hook={}", depmod_hook(&kernel.info().release)))
        .arg(format!("--customize-hook={}", setup_hook(recipe)))
        .arg(format!("--customize-hook=image=\"{image_in_hook}\"\n{}", recipe.image));
    if mode != BuildMode::Root {
        program = program.arg(format!("--customize-hook=download /root.ext4 {}", quote(&image.to_string_lossy())));
    }
    if let Some(temporary) = temporary {
        program = program.env("TMPDIR", temporary);
    }
    // The target is not used by the format; the mirrors are lines for sources.list.
    program = program.arg(recipe.suite).arg("/dev/null").args(debian::sources().await?);
    let mut messages = messages::Messages::new(progress);
    program.run(|line| messages.read(line)).await?;
    messages.finish();
    if mode != BuildMode::Root {
        Program::new("fallocate", "util-linux", "make the image sparse")
            .arg("--dig-holes")
            .arg(&image)
            .output()
            .await?;
    }
    let bytes = allocated_bytes(&image).map_err(ImageError::host(format!("read {}", image.display())))?;
    let mut step = Step::begin(progress, "writing the root file system", Unit::Bytes);
    step.advance(bytes, "root.ext4");
    // On the disk before its name says that it is whole.
    fs::File::open(&image)
        .and_then(|file| file.sync_all())
        .map_err(ImageError::host(format!("write {}", image.display())))
}

fn check_space(path: &Path) -> Result<(), ImageError> {
    let stat = statvfs(path).map_err(|error| ImageError::host(format!("read {}", path.display()))(error.into()))?;
    let available_mib = stat.blocks_available() * stat.fragment_size() / (1 << 20);
    if available_mib >= NEEDED_MIB {
        return Ok(());
    }
    Err(ImageError::NoSpace { path: path.to_owned(), needed_mib: NEEDED_MIB, available_mib })
}

fn depmod_hook(release: &str) -> String {
    format!("chown -R 0:0 \"$1/usr/lib/modules\" && chroot \"$1\" depmod {release}")
}

fn setup_hook(recipe: &Recipe) -> String {
    format!("chroot \"$1\" /bin/sh <<'END-OF-SETUP'\n{}\nEND-OF-SETUP", recipe.setup)
}

/// For a shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_are_valid_shell_and_end_at_the_first_failure() {
        for script in [RECIPE.setup, RECIPE.image] {
            let checked =
                std::process::Command::new("sh").args(["-n", "-c", script]).status().expect("there is a shell");
            assert!(checked.success());
            assert!(script.contains("\nset -eu\n"));
        }
    }

    #[test]
    fn packages_are_sorted_and_listed_once() {
        assert!(RECIPE.packages.is_sorted_by(|one, next| one < next));
    }

    #[test]
    fn a_quoted_path_is_one_word_again() {
        let nasty = "/a b/it's $HOME";
        let said = std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quote(nasty))]).output();
        assert_eq!(said.expect("there is a shell").stdout, nasty.as_bytes());
    }
}
