//! Single files.

use std::{
    fs::{self, Metadata},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use futures::{StreamExt as _, pin_mut};
use reqwest::Body;
use tempfile::NamedTempFile;
use tokio::{
    fs::File,
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufWriter},
};
use tokio_util::io::ReaderStream;

use super::{Copy, Remote, local};
use crate::{client::WriteOptions, failure::Failure};

const PIECE_BYTES: usize = 256 << 10;

impl Copy<'_> {
    pub(super) async fn upload_file(&self, from: &Path, metadata: &Metadata, to: &Remote) -> Result<(), Failure> {
        let file = File::open(from).await.map_err(local("read", from))?;
        // The length of a pipe or a device is not known before its end, nor that of a file the kernel makes up.
        let length = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
        let mode = metadata.is_file().then(|| metadata.permissions().mode() & 0o777);
        self.upload_stream(file.take(length.unwrap_or(u64::MAX)), length, mode, to).await
    }

    pub(super) async fn upload_stdin(&self, to: &Remote) -> Result<(), Failure> {
        self.upload_stream(tokio::io::stdin(), None, None, to).await
    }

    async fn upload_stream(
        &self,
        data: impl AsyncRead + Send + 'static,
        length: Option<u64>,
        mode: Option<u32>,
        to: &Remote,
    ) -> Result<(), Failure> {
        let options = WriteOptions { user: self.user.clone(), mode, length };
        let body = Body::wrap_stream(ReaderStream::with_capacity(data, PIECE_BYTES));
        self.context.client.write_file(&to.sandbox, &to.path, &options, body).await
    }

    pub(super) async fn download_to_stdout(&self, from: &Remote) -> Result<(), Failure> {
        let write = |error| Failure::host("write to standard output", error);
        let mut out = tokio::io::stdout();
        self.download_stream(from, &mut out, write).await?;
        out.flush().await.map_err(write)
    }

    /// Writes beside the target and renames: an old file stays until the new one is whole.
    pub(super) async fn download_file(&self, from: &Remote, to: &Path) -> Result<(), Failure> {
        if fs::metadata(to).is_ok_and(|metadata| !metadata.is_file()) {
            // A device or a pipe is written, not replaced.
            let mut file = File::options().write(true).open(to).await.map_err(local("write", to))?;
            self.download_stream(from, &mut file, |error| local("write", to)(error)).await?;
            return file.flush().await.map_err(local("write", to));
        }
        let user = self.user.as_deref();
        let entry = self.context.client.stat(&from.sandbox, &from.path, user).await?;
        // A link's own mode says nothing about the file behind it.
        let mode = entry.filter(|entry| entry.kind == "file").map_or(0o644, |entry| entry.mode_bits());
        let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let temporary = NamedTempFile::new_in(directory).map_err(local("write", to))?;
        let copy = temporary.as_file().try_clone().map_err(local("write", to))?;
        let mut out = BufWriter::with_capacity(PIECE_BYTES, File::from_std(copy));
        self.download_stream(from, &mut out, |error| local("write", to)(error)).await?;
        out.flush().await.map_err(local("write", to))?;
        fs::set_permissions(temporary.path(), fs::Permissions::from_mode(mode)).map_err(local("write", to))?;
        temporary.persist(to).map(drop).map_err(|error| local("write", to)(error.error))
    }

    async fn download_stream(
        &self,
        from: &Remote,
        out: &mut (impl AsyncWrite + Unpin),
        failed: impl Fn(std::io::Error) -> Failure,
    ) -> Result<(), Failure> {
        let client = &self.context.client;
        let (length, body) = client.read_file(&from.sandbox, &from.path, self.user.as_deref()).await?;
        pin_mut!(body);
        let mut received = 0;
        while let Some(piece) = body.next().await {
            let piece = piece?;
            received += piece.len() as u64;
            out.write_all(&piece).await.map_err(&failed)?;
        }
        match length {
            Some(length) if length != received => {
                let message = format!("only {received} of {length} bytes of {:?} arrived", from.path);
                Err(Failure::new("connection_lost", message))
            }
            _ => Ok(()),
        }
    }
}
