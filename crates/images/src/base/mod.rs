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
    cache::{Cache, allocated_bytes, link_tree},
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
pub(crate) const BASE: Recipe = Recipe {
    kind: "disk",
    revision: 1,
    suite: debian::SUITE,
    packages: &[&[
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
        "libnss-myhostname",
        "netbase",
        "nodejs",
        "npm",
        "openssh-client",
        "procps",
        "python3",
        "python3-pip",
        "python3-venv",
        "ripgrep",
        "rsync",
        "sudo",
        "tar",
        "unzip",
        "wget",
        "xz-utils",
        "zip",
    ]],
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
    needed_mib: 3072,
    addition: None,
};

pub(crate) struct Recipe {
    /// What its entries in the cache are called, up to the dash: kinds do not push each other out.
    pub(crate) kind: &'static str,
    /// Raise to build anew without another change, for example for newer packages.
    pub(crate) revision: u32,
    pub(crate) suite: &'static str,
    /// Debian packages, in lists of their own for what is added to another recipe.
    pub(crate) packages: &'static [&'static [&'static str]],
    pub(crate) dpkg_options: &'static [&'static str],
    /// Runs inside the tree.
    pub(crate) setup: &'static str,
    /// Runs outside and writes the image.
    pub(crate) image: &'static str,
    /// Space a build takes at its peak: packages, tree, image.
    pub(crate) needed_mib: u64,
    pub(crate) addition: Option<Addition>,
}

/// What a recipe does once its own setup is done.
pub(crate) struct Addition {
    /// The directory in the tree's `/tmp` where the files are, and what was fetched under `fetched`.
    pub(crate) directory: &'static str,
    /// Path below that directory, and text.
    pub(crate) files: &'static [(&'static str, &'static str)],
    /// Runs outside, with the tree as `"$1"`, before the packages are set up.
    pub(crate) prepare: &'static str,
    /// Runs inside the tree and removes the directory.
    pub(crate) setup: &'static str,
}

impl Addition {
    /// Makes the directory as it is copied into the tree.
    async fn gather(&self, fetched: Option<&Path>, staging: &Path) -> Result<PathBuf, ImageError> {
        let directory = staging.join(self.directory);
        fs::create_dir(&directory).map_err(ImageError::host(format!("create {}", directory.display())))?;
        for (name, text) in self.files {
            let path = directory.join(name);
            fs::create_dir_all(path.parent().unwrap_or(&directory))
                .and_then(|()| fs::write(&path, text))
                .map_err(ImageError::host(format!("write {}", path.display())))?;
        }
        if let Some(fetched) = fetched {
            link_tree(fetched, &directory.join("fetched")).await?;
        }
        Ok(directory)
    }
}

impl Recipe {
    fn digest(&self, kernel: &Kernel) -> String {
        let mut digest = Digest::default()
            .field("revision", self.revision.to_string())
            .field("suite", self.suite)
            .field("packages", self.packages.concat().join(" "))
            .field("dpkg options", self.dpkg_options.join(" "))
            .field("setup", self.setup)
            .field("image", self.image)
            .field("kernel", &kernel.info().digest);
        if let Some(addition) = &self.addition {
            digest = digest.field("preparation", addition.prepare).field("added setup", addition.setup);
            for (name, text) in addition.files {
                digest = digest.field(name, text);
            }
        }
        digest.finish()
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

/// The disk from the cache, built if it is not there. `fetch` gives the directory that the recipe's addition
/// finds its files beside; it is called before the cache is locked for the build.
pub(crate) async fn ensure<F>(
    cache: &Cache,
    recipe: &Recipe,
    kernel: &Kernel,
    progress: &dyn Progress,
    fetch: F,
) -> Result<RootDisk, ImageError>
where
    F: AsyncFnOnce() -> Result<Option<PathBuf>, ImageError>,
{
    let digest = recipe.digest(kernel);
    let name = format!("{}-{digest}", recipe.kind);
    let directory = match cache.find(&name) {
        Some(directory) => directory,
        None => {
            check_space(cache.root(), recipe.needed_mib)?;
            let fetched = fetch().await?;
            let build = async |staging: &Path| build(recipe, kernel, fetched.as_deref(), staging, progress).await;
            cache.ensure(&name, progress, build).await?
        }
    };
    Ok(RootDisk { path: directory.join("root.ext4"), digest })
}

async fn build(
    recipe: &Recipe,
    kernel: &Kernel,
    fetched: Option<&Path>,
    staging: &Path,
    progress: &dyn Progress,
) -> Result<(), ImageError> {
    let added = match &recipe.addition {
        Some(addition) => Some(addition.gather(fetched, staging).await?),
        None => None,
    };
    let mode = BuildMode::choose()?;
    let image = staging.join("root.ext4");
    let mut messages = messages::Messages::new(progress);
    bootstrap(recipe, mode, kernel, added.as_deref(), &image, staging).await?.run(|line| messages.read(line)).await?;
    messages.finish();
    if let Some(added) = added {
        fs::remove_dir_all(&added).map_err(ImageError::host(format!("remove {}", added.display())))?;
    }
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

/// mmdebstrap with all it is to do, up to the image.
async fn bootstrap(
    recipe: &Recipe,
    mode: BuildMode,
    kernel: &Kernel,
    added: Option<&Path>,
    image: &Path,
    staging: &Path,
) -> Result<Program, ImageError> {
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
        .arg(format!("--include={}", recipe.packages.concat().join(",")))
        .args(recipe.dpkg_options.iter().map(|option| format!("--dpkgopt={option}")))
        .args(debian::proxy_options().await.iter().map(|option| format!("--aptopt={option}")))
        .arg(format!("--customize-hook=copy-in {} /usr/lib", quote(&modules.to_string_lossy())))
        .arg(format!("--customize-hook={}", depmod_hook(&kernel.info().release)))
        .arg(format!("--customize-hook={}", setup_hook(recipe.setup)));
    if let (Some(addition), Some(added)) = (&recipe.addition, added) {
        program = program
            .arg(format!("--essential-hook={}", addition.prepare))
            .arg(format!("--customize-hook=copy-in {} /tmp", quote(&added.to_string_lossy())))
            .arg(format!("--customize-hook={}", setup_hook(addition.setup)));
    }
    program = program.arg(format!("--customize-hook=image=\"{image_in_hook}\"\n{}", recipe.image));
    if mode != BuildMode::Root {
        program = program.arg(format!("--customize-hook=download /root.ext4 {}", quote(&image.to_string_lossy())));
    }
    if let Some(temporary) = temporary {
        program = program.env("TMPDIR", temporary);
    }
    // The target is not used by the format; the mirrors are lines for sources.list.
    Ok(program.arg(recipe.suite).arg("/dev/null").args(debian::sources().await?))
}

fn check_space(path: &Path, needed_mib: u64) -> Result<(), ImageError> {
    let stat = statvfs(path).map_err(|error| ImageError::host(format!("read {}", path.display()))(error.into()))?;
    let available_mib = stat.blocks_available() * stat.fragment_size() / (1 << 20);
    if available_mib >= needed_mib {
        return Ok(());
    }
    Err(ImageError::NoSpace { path: path.to_owned(), needed_mib, available_mib })
}

fn depmod_hook(release: &str) -> String {
    format!("chown -R 0:0 \"$1/usr/lib/modules\" && chroot \"$1\" depmod {release}")
}

fn setup_hook(script: &str) -> String {
    format!("chroot \"$1\" /bin/sh <<'END-OF-SETUP'\n{script}\nEND-OF-SETUP")
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
        for script in [BASE.setup, BASE.image, crate::code_interpreter::SETUP] {
            let checked =
                std::process::Command::new("sh").args(["-n", "-c", script]).status().expect("there is a shell");
            assert!(checked.success());
            assert!(script.contains("\nset -eu\n"));
        }
    }

    #[test]
    fn packages_are_sorted_and_listed_once() {
        for list in crate::code_interpreter::RECIPE.packages {
            assert!(list.is_sorted_by(|one, next| one < next));
        }
    }

    #[test]
    fn a_quoted_path_is_one_word_again() {
        let nasty = "/a b/it's $HOME";
        let said = std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quote(nasty))]).output();
        assert_eq!(said.expect("there is a shell").stdout, nasty.as_bytes());
    }
}
