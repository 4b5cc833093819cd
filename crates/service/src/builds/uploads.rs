//! Archives that builds copy from.
//!
//! ```text
//! <data directory>/uploads/<workspace>/<digest>      kept for a day after its last use
//! ```

use std::{
    io,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use futures::{Stream, StreamExt as _};
use stockade_engine::EngineError;
use stockade_model::WorkspaceId;
use tokio::{fs, io::AsyncWriteExt as _};

use crate::{ServiceError, core::Core};

/// Largest archive.
const MOST_BYTES: u64 = 4 << 30;
/// The first header of a tar file, and where in it the word is.
const TAR_HEADER: usize = 512;
const TAR_MAGIC: std::ops::Range<usize> = 257..262;
const KEPT: Duration = Duration::from_secs(24 * 3600);

fn directory(core: &Core, workspace: &WorkspaceId) -> PathBuf {
    core.config.state_dir.join("uploads").join(workspace.as_str())
}

/// A digest as clients give it: hexadecimal, so that it can be a file's name.
fn check(digest: &str) -> Result<(), ServiceError> {
    if (32..=128).contains(&digest.len()) && digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    super::invalid("digest", "must be 32 to 128 hexadecimal digits".to_owned())
}

/// The archive, if it is there.
pub(super) async fn find(core: &Core, workspace: &WorkspaceId, digest: &str) -> Result<Option<PathBuf>, ServiceError> {
    check(digest)?;
    let path = directory(core, workspace).join(digest);
    let touch = {
        let path = path.clone();
        move || {
            let file = std::fs::File::open(path)?;
            file.set_times(std::fs::FileTimes::new().set_modified(SystemTime::now()))
        }
    };
    match tokio::task::spawn_blocking(touch).await.map_err(io::Error::other).and_then(|done| done) {
        Ok(()) => Ok(Some(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(EngineError::host(format!("read {}", path.display()))(error).into()),
    }
}

/// Keeps an archive; removes those that nobody has used for long.
pub(super) async fn keep<S>(core: &Core, workspace: &WorkspaceId, digest: &str, mut body: S) -> Result<(), ServiceError>
where
    S: Stream<Item = Result<Vec<u8>, io::Error>> + Send + Unpin,
{
    check(digest)?;
    let directory = directory(core, workspace);
    let fail = |error: io::Error| ServiceError::from(EngineError::host("keep an upload")(error));
    fs::create_dir_all(&directory).await.map_err(fail)?;
    remove_old(&directory).await.map_err(fail)?;
    let partial = directory.join(format!("{}.partial", super::random_uuid()));
    let write = async {
        let mut file = fs::File::create_new(&partial).await.map_err(fail)?;
        let (mut bytes, mut start) = (0, Vec::with_capacity(TAR_HEADER));
        while let Some(piece) = body.next().await {
            let piece = piece.map_err(|error| {
                tracing::debug!(%error, "an upload was cut off");
                ServiceError::Invalid { field: "body", problem: "was cut off".to_owned() }
            })?;
            bytes += piece.len() as u64;
            if bytes > MOST_BYTES {
                return super::invalid("body", format!("has over {MOST_BYTES} bytes, the most of one upload"));
            }
            start.extend_from_slice(&piece[..piece.len().min(TAR_HEADER - start.len())]);
            file.write_all(&piece).await.map_err(fail)?;
        }
        if !is_archive(&start) {
            return super::invalid("body", "is no archive: send a tar file, plain or compressed by gzip".to_owned());
        }
        file.sync_all().await.map_err(fail)?;
        fs::rename(&partial, directory.join(digest)).await.map_err(fail)
    };
    let kept = write.await;
    if kept.is_err() {
        // What is left of it goes with the next one at the latest.
        let _ = fs::remove_file(&partial).await;
    }
    kept
}

/// Whether something begins as an archive does. What is wrong further on, the build that unpacks it says.
fn is_archive(start: &[u8]) -> bool {
    start.starts_with(&[0x1f, 0x8b]) || start.get(TAR_MAGIC).is_some_and(|magic| magic == b"ustar")
}

/// Forgets an archive that cannot be used, so that it is sent again.
pub(super) async fn forget(core: &Core, workspace: &WorkspaceId, digest: &str) {
    let path = directory(core, workspace).join(digest);
    if let Err(error) = fs::remove_file(&path).await {
        tracing::warn!(path = %path.display(), %error, "an upload that cannot be used is left");
    }
}

async fn remove_old(directory: &std::path::Path) -> io::Result<()> {
    let mut entries = fs::read_dir(directory).await?;
    while let Some(entry) = entries.next_entry().await? {
        let modified = entry.metadata().await.and_then(|metadata| metadata.modified());
        if modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > KEPT)) {
            let _ = fs::remove_file(entry.path()).await;
        }
    }
    Ok(())
}
