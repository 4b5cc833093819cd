//! Memory of the templates that machines are made from.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use tokio::sync::OnceCell;

use super::{
    Host,
    config::joined,
    launch::millis,
    machine_dir::{MachineDir, MemoryBase},
    manifest::{MEMORY, Manifest},
    memory::SealedMemory,
};
use crate::EngineError;

/// With so many templates loaded, those without a machine are let go.
const MOST_IDLE_MEMORIES: usize = 4;

/// Memory of templates in use, by directory and checksum. Loaded once, shared by all their machines.
#[derive(Debug, Default)]
pub(crate) struct Memories {
    loaded: Mutex<HashMap<(PathBuf, String), Loading>>,
}

/// Memory that is loaded, or is being loaded for whoever came first.
type Loading = Arc<OnceCell<Arc<SealedMemory>>>;

impl Memories {
    /// The memory of a template, loaded if need be. Callers of the same template share one load.
    pub(crate) async fn get(
        &self,
        host: &Host,
        template: &Path,
        manifest: &Manifest,
    ) -> Result<Arc<SealedMemory>, EngineError> {
        let cell = {
            let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            // Templates that were removed need no memory for further machines.
            loaded.retain(|(directory, _), _| directory.exists());
            if loaded.len() >= MOST_IDLE_MEMORIES {
                let is_used = |memory: &Arc<SealedMemory>| Arc::strong_count(memory) > 1;
                loaded.retain(|_, loading| Arc::strong_count(loading) > 1 || loading.get().is_some_and(is_used));
            }
            let key = (template.to_owned(), manifest.digest(MEMORY).to_owned());
            loaded.entry(key).or_default().clone()
        };
        let memory = cell.get_or_try_init(|| load(host, template, manifest)).await?;
        Ok(memory.clone())
    }
}

/// From a machine that maps it already (this server was restarted), or from the template's file.
async fn load(host: &Host, template: &Path, manifest: &Manifest) -> Result<Arc<SealedMemory>, EngineError> {
    manifest.check_contents(template)?;
    let path = template.join(MEMORY);
    let holders = holders(host, template);
    let (expected, bytes) = (manifest.digest(MEMORY).to_owned(), manifest.shape.memory_mib << 20);
    let source = path.clone();
    let begin = Instant::now();
    let work = tokio::task::spawn_blocking(move || {
        for (pid, fd) in holders {
            if let Ok(Some(memory)) = SealedMemory::take_over(pid, fd, bytes, &expected) {
                return Ok((memory, expected));
            }
        }
        SealedMemory::load(&source)
    });
    let (memory, digest) =
        joined(work.await).map_err(EngineError::host(format!("load {} into memory", path.display())))?;
    manifest.expect(template, MEMORY, &digest)?;
    tracing::debug!(template = %template.display(), ms = millis(begin.elapsed()), "template memory loaded");
    Ok(Arc::new(memory))
}

/// Running machines of a template, by emulator and the descriptor it holds the memory under.
fn holders(host: &Host, template: &Path) -> Vec<(i32, i32)> {
    let Ok(entries) = std::fs::read_dir(&host.machines_dir) else { return Vec::new() };
    let record = |name: String| MachineDir::of(&host.machines_dir, &name.parse().ok()?).read_record().ok()?;
    entries
        .flatten()
        .filter_map(|entry| record(entry.file_name().to_string_lossy().into_owned()))
        .filter(|record| record.is_complete && record.template == template && record.boot_id == host.boot_id)
        .filter(|record| record.memory == MemoryBase::Template)
        .filter_map(|record| Some((record.processes?.emulator, record.memory_fd)))
        .filter(|(emulator, _)| emulator.is_alive())
        .map(|(emulator, fd)| (emulator.pid, fd))
        .collect()
}
