//! Process 1: from the kernel's initial file system to a machine that serves its link.
//!
//! ```text
//! mounts -> modules -> root disk found, mounted, grown -> switch root -> mounts -> cgroups -> serve
//! ```
//!
//! What fails is said on the console, process 1 ends, the kernel panics, and the emulator ends with it: the host reads
//! the console and reports the line.

mod disk;
mod group;
mod modules;
mod mount;
mod system;

use std::{io, time::Duration};

use crate::{Agent, port::Port, serve};

/// The name of the link's port.
const LINK_PORT: &str = "stockade.link";
const DEVICE_PATIENCE: Duration = Duration::from_secs(20);
const DEVICE_INTERVAL: Duration = Duration::from_millis(5);
/// Threads for file work: enough that one file system that stands still does not stop the others.
const BLOCKING_THREADS: usize = 16;
const STACK_BYTES: usize = 512 << 10;

/// What went wrong on the way, and in doing what.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}")]
pub struct InitError {
    action: String,
    #[source]
    source: io::Error,
}

/// For `map_err`.
fn cannot(action: impl Into<String>) -> impl FnOnce(io::Error) -> InitError {
    let action = action.into();
    move |source| InitError { action, source }
}

/// Becomes the machine's first process. Returns only on failure.
///
/// # Errors
/// The step that failed; the machine is of no use then.
pub fn run() -> Result<std::convert::Infallible, InitError> {
    mount::early()?;
    modules::load_all()?;
    let disk = disk::find()?;
    mount::root(&disk)?;
    disk::grow(&disk, mount::NEW_ROOT)?;
    mount::switch_root()?;
    mount::late()?;
    system::set_up()?;
    group::set_up()?;
    serve_link()
}

fn serve_link() -> Result<std::convert::Infallible, InitError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_stack_size(STACK_BYTES)
        .build()
        .map_err(cannot("start the runtime"))?;
    runtime.block_on(async {
        let agent = Agent::machine();
        let mut port = wait_for(|| Port::find(LINK_PORT)).map_err(cannot(format!("open port {LINK_PORT}")))?;
        loop {
            port.connected().await.map_err(cannot("wait for the host"))?;
            if let Err(error) = serve(&mut port, agent.clone()).await {
                say(&format!("link: {error}"));
            }
        }
    })
}

/// Looks again and again for something a driver is about to find.
fn wait_for<T>(mut look: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    let deadline = std::time::Instant::now() + DEVICE_PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if std::time::Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("not there after {DEVICE_PATIENCE:?}")));
        }
        std::thread::sleep(DEVICE_INTERVAL);
    }
}

/// A line on the console.
pub fn say(line: &str) {
    eprintln!("stockade-guest: {line}");
}
