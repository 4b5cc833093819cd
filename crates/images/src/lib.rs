//! Root file systems and templates: from Debian's archive to something an engine can restore.
//!
//! ```text
//! Debian's cloud kernel --+--> boot files (vmlinuz, initramfs with the agent) --+
//!                         |                                                     +--> warm template
//! recipe of `base` -------+--> root disk (ext4) --------------------------------+    (engine boots it once)
//! ```
//!
//! Everything is kept in a cache directory under a name that says all it depends on (see `cache`), so
//! nothing is made twice and a change of the recipe, the agent, the kernel, the emulator or the shape
//! makes exactly what depends on it anew.

use std::{
    fs,
    path::{Path, PathBuf},
};

use stockade_engine::{Engine, Startup, TemplateBoot};
use stockade_model::MachineShape;
use stockade_wire::machine::Identity;

mod base;
mod cache;
pub mod code_interpreter;
mod debian;
mod digest;
mod error;
pub mod initramfs;
mod kernel;
mod program;
pub mod progress;

pub use base::{BuildMode, RootDisk};
pub use error::ImageError;
pub use kernel::{Kernel, KernelInfo};
pub use progress::Progress;

use cache::Cache;
use digest::Digest;
use progress::{Step, Unit};

/// Builds and keeps images. Cheap to clone; may be used by several processes at once.
#[derive(Clone, Debug)]
pub struct Images {
    cache: Cache,
}

/// What every machine boots from, whatever its disk.
#[derive(Clone, Debug)]
pub struct BootFiles {
    directory: PathBuf,
    kernel: Kernel,
    digest: String,
}

impl BootFiles {
    /// The kernel's compressed image.
    pub fn vmlinuz(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// The initramfs with the agent.
    pub fn initramfs(&self) -> PathBuf {
        self.directory.join("initramfs")
    }

    /// The kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Over kernel and initramfs.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Makes `directory` hold `vmlinuz` and `initramfs` (hard links where possible). Files of another
    /// build are replaced, each by a rename.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub async fn install(&self, directory: &Path) -> Result<(), ImageError> {
        fs::create_dir_all(directory).map_err(ImageError::host(format!("create {}", directory.display())))?;
        for name in ["vmlinuz", "initramfs"] {
            let (target, new) = (directory.join(name), directory.join(format!(".{name}.new")));
            let _ = fs::remove_file(&new);
            cache::link_file(&self.directory.join(name), &new).await?;
            fs::rename(&new, &target).map_err(ImageError::host(format!("create {}", target.display())))?;
            // A rename onto another link of the same file does nothing and leaves both names.
            let _ = fs::remove_file(&new);
        }
        Ok(())
    }
}

/// What a template of ours is: another digest means that it has to be made anew.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The root file system.
    pub disk: RootDisk,
    /// Processors, memory and disk of its machines.
    pub shape: MachineShape,
    /// What its machines have in common; see [`TemplateBoot::introduction`].
    pub introduction: Identity,
    /// What runs in it when its memory is kept.
    pub startup: Option<Startup>,
}

impl Recipe {
    /// The digest a template's record carries.
    pub fn digest(&self, boot: &BootFiles) -> String {
        // The rest of it is of the moment.
        let Identity { files, network, default_user, .. } = &self.introduction;
        let digest = Digest::default()
            .field("boot", &boot.digest)
            .field("disk", self.disk.digest())
            .field("introduction", format!("{files:?} {network:?} {default_user}"));
        match &self.startup {
            Some(startup) => digest.field("startup", format!("{:?} {:?}", startup.start, startup.ready)).finish(),
            None => digest.finish(),
        }
    }
}

impl Images {
    /// Opens a cache directory; creates it if it is not there.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn open(cache_directory: &Path) -> Result<Self, ImageError> {
        Ok(Self { cache: Cache::open(cache_directory)? })
    }

    /// Where things are kept.
    pub fn cache_directory(&self) -> &Path {
        self.cache.root()
    }

    /// Kernel and initramfs, the latter with this agent. The kernel is fetched from Debian the first time.
    ///
    /// # Errors
    /// No network, no space, a missing program: see [`ImageError::hint`].
    pub async fn boot_files(&self, agent: &[u8], progress: &dyn Progress) -> Result<BootFiles, ImageError> {
        let kernel = kernel::ensure(&self.cache, progress).await?;
        let initramfs = initramfs::build(agent, &kernel.boot_modules()?);
        let digest = Digest::default().field("kernel", &kernel.info().digest).field("initramfs", &initramfs).finish();
        let directory = self
            .cache
            .ensure(&format!("boot-{digest}"), progress, async |staging: &Path| {
                cache::link_file(&kernel.image(), &staging.join("vmlinuz")).await?;
                fs::write(staging.join("initramfs"), &initramfs).map_err(ImageError::host("write the initramfs"))
            })
            .await?;
        Ok(BootFiles { directory, kernel, digest })
    }

    /// The root disk of `base`, built the first time: about two minutes and 200 MB from Debian's mirror.
    ///
    /// # Errors
    /// As for [`Images::boot_files`]; [`ImageError::NoRights`] where this user cannot build one.
    pub async fn base_disk(&self, kernel: &Kernel, progress: &dyn Progress) -> Result<RootDisk, ImageError> {
        base::ensure(&self.cache, &base::BASE, kernel, progress, async || Ok(None)).await
    }

    /// The root disk of `code-interpreter`, built the first time: a few minutes and 700 MB from Debian's mirror
    /// and Python's package index.
    ///
    /// # Errors
    /// As for [`Images::base_disk`].
    pub async fn code_interpreter_disk(
        &self,
        kernel: &Kernel,
        progress: &dyn Progress,
    ) -> Result<RootDisk, ImageError> {
        let fetch = async || code_interpreter::fetch(&self.cache, progress).await.map(Some);
        base::ensure(&self.cache, &code_interpreter::RECIPE, kernel, progress, fetch).await
    }

    /// Makes `directory` a template of this recipe: taken from the cache if this engine has booted it
    /// before, else booted once and kept. `directory` must not exist; it appears whole or not at all.
    ///
    /// # Errors
    /// What the engine says, and whatever keeps files from being written.
    pub async fn warm_template(
        &self,
        engine: &dyn Engine,
        boot: &BootFiles,
        recipe: &Recipe,
        directory: &Path,
        progress: &dyn Progress,
    ) -> Result<(), ImageError> {
        let (info, shape) = (engine.info(), recipe.shape);
        let key = Digest::default()
            .field("recipe", recipe.digest(boot))
            .field("engine", info.name)
            .field("version", &info.version)
            .field("accelerator", info.accelerator.to_string())
            .field("shape", format!("{} {} {}", shape.vcpus, shape.memory_mib, shape.disk_mib))
            .finish();
        let kind = if recipe.startup.is_some() { "started_template" } else { "template" };
        let name = format!("{kind}-{key}");
        let lock = self.cache.lock(progress).await?;
        let cached = self.cache.root().join(&name);
        if self.cache.find(&name).is_some()
            && let Err(error) = engine.check_template(&cached).await
        {
            tracing::info!(%error, "the cached template is of no use here; it is booted anew");
            fs::remove_dir_all(&cached).map_err(ImageError::host(format!("remove {}", cached.display())))?;
        }
        if self.cache.find(&name).is_none() {
            let step = Step::begin(progress, "booting the template", Unit::Items);
            let boot = TemplateBoot {
                root_disk: recipe.disk.path().to_owned(),
                shape,
                introduction: Some(recipe.introduction.clone()),
                startup: recipe.startup.clone(),
                directory: cached.clone(),
            };
            engine.boot_template(&boot, &|detail| step.tell(detail)).await?;
            self.cache.prune(&name, &lock);
        }
        cache::link_tree(&cached, directory).await
    }
}
