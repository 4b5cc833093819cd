//! The guest's kernel: Debian's cloud image, unpacked, never installed.
//!
//! In the cache it is a directory `kernel-<digest of the wish>/`:
//!
//! ```text
//! vmlinuz
//! lib/modules/<release>/kernel/...    the modules a guest needs and what they depend on
//! lib/modules/<release>/modules.{builtin,builtin.modinfo,order}
//! kernel.json                         [`KernelInfo`]
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    ImageError,
    cache::Cache,
    debian::Archive,
    digest::{self, Digest},
    program::Program,
    progress::{Progress, Step, Unit},
};

/// Raise to fetch the kernel anew.
const REVISION: u32 = 1;
/// Depends on the newest image of its kind.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// Loaded by the agent before it can see the root disk, in this order: what the disk, the link and the NIC need, and what
/// lets the agent end connections that a restore has cut off.
const AT_BOOT: [&str; 8] =
    ["virtio_mmio", "virtio_blk", "virtio_console", "virtio-rng", "crc32c_generic", "ext4", "virtio_net", "tcp_diag"];
/// On the root disk, for `modprobe`.
const ON_DISK: [&str; 8] = ["overlay", "fuse", "virtiofs", "tun", "veth", "bridge", "loop", "af_packet"];
/// Those the cloud kernel may have built in or left out without harm.
const OPTIONAL: [&str; 4] = ["virtiofs", "loop", "af_packet", "bridge"];

/// A kernel in the cache.
#[derive(Clone, Debug)]
pub struct Kernel {
    directory: PathBuf,
    info: KernelInfo,
}

/// What is known of a kernel.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct KernelInfo {
    /// As `uname -r` says it in the guest.
    pub release: String,
    /// The version of the Debian package.
    pub package_version: String,
    /// Modules to load at boot, in order, relative to `lib/modules/<release>`.
    pub boot_modules: Vec<String>,
    /// Over the image and every module.
    pub digest: String,
}

impl Kernel {
    /// The compressed image.
    pub fn image(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// What is known of it.
    pub fn info(&self) -> &KernelInfo {
        &self.info
    }

    /// Holds `lib/modules/<release>`.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The modules to load at boot: name and content, in order.
    pub(crate) fn boot_modules(&self) -> Result<Vec<(String, Vec<u8>)>, ImageError> {
        let modules = module_directory(&self.directory, &self.info.release);
        let load = |relative: &String| {
            let path = modules.join(relative);
            let name = relative.rsplit('/').next().unwrap_or(relative).to_owned();
            Ok((name, fs::read(&path).map_err(ImageError::host(format!("read {}", path.display())))?))
        };
        self.info.boot_modules.iter().map(load).collect()
    }

    fn open(directory: &Path) -> Result<Self, ImageError> {
        let path = directory.join("kernel.json");
        let text = fs::read(&path).map_err(ImageError::host(format!("read {}", path.display())))?;
        let info =
            serde_json::from_slice(&text).map_err(|_| ImageError::Answer { what: path.display().to_string() })?;
        Ok(Self { directory: directory.to_owned(), info })
    }
}

/// The kernel from the cache, fetched from Debian if it is not there.
pub(crate) async fn ensure(cache: &Cache, progress: &dyn Progress) -> Result<Kernel, ImageError> {
    let wish = Digest::default()
        .field("revision", REVISION.to_string())
        .field("package", PACKAGE)
        .field("boot", AT_BOOT.join(" "))
        .field("disk", ON_DISK.join(" "))
        .finish();
    let name = format!("kernel-{wish}");
    let directory = cache
        .ensure(&name, progress, async |staging: &Path| {
            let scratch = staging.join("scratch");
            fs::create_dir(&scratch).map_err(ImageError::host(format!("create {}", scratch.display())))?;
            fetch(&scratch, staging, progress).await?;
            fs::remove_dir_all(&scratch).map_err(ImageError::host(format!("remove {}", scratch.display())))
        })
        .await?;
    Kernel::open(&directory)
}

async fn fetch(scratch: &Path, into: &Path, progress: &dyn Progress) -> Result<(), ImageError> {
    let archive = Archive::open(scratch, progress).await?;
    let package = archive
        .depends(PACKAGE)
        .await?
        .into_iter()
        .find(|name| name.starts_with("linux-image-"))
        .ok_or_else(|| ImageError::Answer { what: format!("what {PACKAGE} depends on") })?;
    let (file, package_version) = archive.download(&package, progress).await?;
    let unpacked = scratch.join("unpacked");
    Program::new("dpkg-deb", "dpkg", format!("unpack {}", file.display()))
        .arg("-x")
        .args([&file, &unpacked])
        .output()
        .await?;
    let release = package.trim_start_matches("linux-image-").to_owned();
    // The package makes its dependency list when it is installed, which it is not.
    Program::new("depmod", "kmod", "list the kernel's modules").arg("-b").arg(&unpacked).arg(&release).output().await?;
    let boot_modules = keep_modules(&unpacked, into, &release, progress)?;
    let image = unpacked.join(format!("boot/vmlinuz-{release}"));
    copy(&image, &into.join("vmlinuz"))?;
    let digest = digest_of(into, &release)?;
    let info = KernelInfo { release, package_version, boot_modules, digest };
    let text = serde_json::to_vec_pretty(&info).expect("plain data becomes JSON");
    fs::write(into.join("kernel.json"), text).map_err(ImageError::host("write kernel.json"))
}

/// Copies the wanted modules; returns those for boot in load order.
fn keep_modules(
    unpacked: &Path,
    into: &Path,
    release: &str,
    progress: &dyn Progress,
) -> Result<Vec<String>, ImageError> {
    let source = module_directory(unpacked, release);
    let target = module_directory(into, release);
    let read = |name: &str| {
        fs::read_to_string(source.join(name)).map_err(ImageError::host(format!("read {name} of kernel {release}")))
    };
    let (dependencies, built_in) = (read("modules.dep")?, read("modules.builtin")?);
    let tree = ModuleTree::parse(&dependencies, &built_in);
    let missing = |name: &str| ImageError::Kernel { version: release.to_owned(), what: format!("module {name}") };
    let mut boot = Vec::new();
    for name in AT_BOOT {
        tree.resolve(name, &mut boot).ok_or_else(|| missing(name))?;
    }
    let mut all = boot.clone();
    for name in ON_DISK {
        if tree.resolve(name, &mut all).is_none() && !OPTIONAL.contains(&name) {
            return Err(missing(name));
        }
    }
    let mut step = Step::begin(progress, "choosing kernel modules", Unit::Items);
    for module in &all {
        copy(&source.join(module), &target.join(module))?;
        step.advance(1, module);
    }
    for name in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        copy(&source.join(name), &target.join(name))?;
    }
    Ok(boot)
}

/// What depends on what, by the kernel's own list.
struct ModuleTree<'a> {
    /// Module name → (path, what it needs, farthest first).
    modules: BTreeMap<String, (&'a str, Vec<&'a str>)>,
    built_in: BTreeSet<String>,
}

impl<'a> ModuleTree<'a> {
    /// `path: needed needed ...`, where each needed one comes before what it needs itself.
    fn parse(dependencies: &'a str, built_in: &str) -> Self {
        let modules = dependencies
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(path, needs)| (module_name(path), (path, needs.split_whitespace().rev().collect())))
            .collect();
        Self { modules, built_in: built_in.lines().map(module_name).collect() }
    }

    /// Appends a module behind all it needs. `None`: there is no such module. One that is built in
    /// needs nothing.
    fn resolve(&self, name: &str, order: &mut Vec<String>) -> Option<()> {
        let name = module_name(name);
        if self.built_in.contains(&name) {
            return Some(());
        }
        let (path, needs) = self.modules.get(&name)?;
        for module in needs.iter().chain([path]) {
            if !order.iter().any(|known| known == module) {
                order.push((*module).to_owned());
            }
        }
        Some(())
    }
}

/// The kernel takes dash and underscore for the same.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.trim_end_matches(".ko").replace('-', "_")
}

fn module_directory(root: &Path, release: &str) -> PathBuf {
    root.join("lib/modules").join(release)
}

fn copy(from: &Path, to: &Path) -> Result<(), ImageError> {
    let action = || format!("copy {} to {}", from.display(), to.display());
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(ImageError::host(action()))?;
    }
    fs::copy(from, to).map(drop).map_err(ImageError::host(action()))
}

fn digest_of(directory: &Path, release: &str) -> Result<String, ImageError> {
    let of = |path: &Path| digest::of_file(path).map_err(ImageError::host(format!("read {}", path.display())));
    let mut digest = Digest::default().field("vmlinuz", of(&directory.join("vmlinuz"))?);
    let root = module_directory(directory, release);
    let mut pending = vec![root.clone()];
    let mut files = BTreeSet::new();
    while let Some(next) = pending.pop() {
        for entry in fs::read_dir(&next).map_err(ImageError::host(format!("list {}", next.display())))? {
            let path = entry.map_err(ImageError::host(format!("list {}", next.display())))?.path();
            if path.is_dir() {
                pending.push(path);
            } else {
                files.insert(path);
            }
        }
    }
    for file in files {
        let name = file.strip_prefix(&root).unwrap_or(&file).to_string_lossy().into_owned();
        digest = digest.field(&name, of(&file)?);
    }
    Ok(digest.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEPENDENCIES: &str = "kernel/fs/ext4/ext4.ko: kernel/lib/crc16.ko kernel/fs/mbcache.ko kernel/fs/jbd2/jbd2.ko\n\
                                kernel/fs/jbd2/jbd2.ko:\n\
                                kernel/net/a.ko: kernel/net/b.ko kernel/net/c.ko\n\
                                kernel/net/b.ko: kernel/net/c.ko\n\
                                kernel/net/c.ko:\n\
                                kernel/drivers/virtio-rng.ko:\n";

    #[test]
    fn a_module_is_loaded_after_everything_it_needs_and_once() {
        let tree = ModuleTree::parse(DEPENDENCIES, "kernel/fs/mbcache.ko\n");
        let mut order = Vec::new();
        for name in ["b", "a", "a", "virtio_rng"] {
            tree.resolve(name, &mut order).expect("it is listed");
        }
        assert_eq!(order, ["kernel/net/c.ko", "kernel/net/b.ko", "kernel/net/a.ko", "kernel/drivers/virtio-rng.ko"]);
    }

    #[test]
    fn built_in_modules_need_no_loading_and_unknown_ones_are_refused() {
        let tree = ModuleTree::parse(DEPENDENCIES, "kernel/drivers/virtio/virtio_mmio.ko\n");
        let mut order = Vec::new();
        assert_eq!(tree.resolve("virtio-mmio", &mut order), Some(()));
        assert!(order.is_empty());
        assert_eq!(tree.resolve("nonsense", &mut order), None);
    }
}
