//! Directories.

use std::{fs, path::Path};

use tokio::{sync::mpsc, task::spawn_blocking};

use super::{Copy, Remote, Signals, local};
use crate::{
    client::{ExecEvent, ExecInput, ExecRequest, ExecSession},
    commands::attend::code_of_signal,
    copy::{
        channel::{ChannelReader, ChannelWriter, QUEUE},
        pack::pack,
        unpack::unpack,
    },
    failure::Failure,
    ui::printable,
};

/// So much of what the guest's tar complains about is shown.
const MAX_COMPLAINT_BYTES: usize = 4 << 10;

impl Copy<'_> {
    pub(super) async fn upload_tree(&self, from: &Path, to: &Remote, signals: &mut Signals) -> Result<(), Failure> {
        let target = if to.path.is_empty() { "." } else { &to.path };
        self.context.client.make_dir(&to.sandbox, target, self.user.as_deref()).await?;
        let session = self.tar(&to.sandbox, &["-xpof", "-", "-C", target], true).await?;
        let (pieces, mut queue) = mpsc::channel(QUEUE);
        let root = from.to_owned();
        let packing = spawn_blocking(move || pack(&root, ChannelWriter::new(pieces)));
        let input = session.input();
        let feeding = tokio::spawn(async move {
            while let Some(piece) = queue.recv().await {
                if input.send(ExecInput::Stdin(piece)).await.is_err() {
                    return;
                }
            }
        });
        // Closing the input of a tar that got half a stream would make it a success: it is closed only
        // once all is packed.
        let input = session.input();
        let finish = async {
            let skipped = packing.await.map_err(|error| Failure::new("internal", error.to_string()))??;
            // Both ends of the connection broke if this fails; the session tells.
            let _ = feeding.await;
            let _ = input.send(ExecInput::CloseStdin).await;
            Ok(skipped)
        };
        let mut running = Running::new(self, &to.sandbox, session);
        tokio::pin!(finish);
        let mut skipped = None;
        let result = loop {
            tokio::select! {
                finished = &mut finish, if skipped.is_none() => match finished {
                    Ok(list) => skipped = Some(list),
                    Err(failure) => break Err(failure),
                },
                ended = running.next_output(signals) => match ended {
                    Ok(Some(_)) => {}
                    Ok(None) => break Ok(()),
                    Err(failure) => break Err(failure),
                },
            }
        };
        running.end(result).await?;
        self.note_skipped(&skipped.unwrap_or_default());
        Ok(())
    }

    pub(super) async fn download_tree(&self, from: &Remote, to: &Path, signals: &mut Signals) -> Result<(), Failure> {
        fs::create_dir_all(to).map_err(local("make", to))?;
        let source = if from.path.is_empty() { "." } else { &from.path };
        let session = self.tar(&from.sandbox, &["-cf", "-", "-C", source, "."], false).await?;
        let (pieces, queue) = mpsc::channel(QUEUE);
        let root = to.to_owned();
        let unpacking = spawn_blocking(move || {
            let mut reader = ChannelReader::new(queue);
            let skipped = unpack(&root, &mut reader)?;
            // Padding behind the end of the archive.
            std::io::copy(&mut reader, &mut std::io::sink())
                .map_err(|error| Failure::host("read the archive", error))?;
            Ok::<_, Failure>(skipped)
        });
        let mut running = Running::new(self, &from.sandbox, session);
        let result = loop {
            match running.next_output(signals).await {
                Ok(Some(piece)) => {
                    // It stopped at an error, which it will tell.
                    if pieces.send(piece).await.is_err() {
                        break Ok(());
                    }
                }
                Ok(None) => break Ok(()),
                Err(failure) => break Err(failure),
            }
        };
        drop(pieces);
        let unpacked = unpacking.await.map_err(|error| Failure::new("internal", error.to_string()))?;
        running.end(result.and(unpacked.as_ref().map(drop).map_err(Clone::clone))).await?;
        self.note_skipped(&unpacked?);
        Ok(())
    }

    async fn tar(&self, sandbox: &str, arguments: &[&str], stdin: bool) -> Result<ExecSession, Failure> {
        let argv = ["tar"].iter().chain(arguments).map(|&part| part.to_owned()).collect();
        let request = ExecRequest { argv, user: self.user.clone(), stdin, ..ExecRequest::default() };
        self.context.client.exec(sandbox, &request).await
    }
}

/// The guest's tar.
struct Running<'a> {
    copy: &'a Copy<'a>,
    sandbox: &'a str,
    session: ExecSession,
    pid: Option<u32>,
    complaint: Vec<u8>,
    has_ended: bool,
}

impl<'a> Running<'a> {
    fn new(copy: &'a Copy<'a>, sandbox: &'a str, session: ExecSession) -> Self {
        Self { copy, sandbox, session, pid: None, complaint: Vec::new(), has_ended: false }
    }

    /// What it wrote; `None` once it has ended well. Cancel-safe.
    async fn next_output(&mut self, signals: &mut Signals) -> Result<Option<bytes::Bytes>, Failure> {
        loop {
            let event = tokio::select! {
                event = self.session.next() => event.map_err(no_tar)?,
                number = signals.next() => {
                    return Err(Failure::new("interrupted", "interrupted; part of the copy may be there").exit(code_of_signal(number)));
                }
            };
            match event {
                ExecEvent::Started { pid } => self.pid = Some(pid),
                ExecEvent::Stdout(data) => return Ok(Some(data)),
                ExecEvent::Stderr(data) => {
                    let room = MAX_COMPLAINT_BYTES.saturating_sub(self.complaint.len());
                    self.complaint.extend_from_slice(&data[..data.len().min(room)]);
                }
                ExecEvent::Missed { bytes } => {
                    return Err(Failure::new(
                        "output_lost",
                        format!("{bytes} bytes of the archive were lost on the way"),
                    ));
                }
                ExecEvent::Exit(exit) => {
                    self.has_ended = true;
                    return if exit.code == Some(0) { Ok(None) } else { Err(self.tar_failed()) };
                }
            }
        }
    }

    fn tar_failed(&self) -> Failure {
        let complaint = printable(String::from_utf8_lossy(&self.complaint).trim());
        Failure::new("copy_failed", format!("tar in the sandbox failed: {complaint}"))
    }

    /// Passes the result on; a tar that still runs then is ended.
    async fn end(self, result: Result<(), Failure>) -> Result<(), Failure> {
        if let (Err(_), false, Some(pid)) = (&result, self.has_ended, self.pid) {
            // It ends with its sandbox at the latest.
            let _ = self.copy.context.client.signal(self.sandbox, pid, libc::SIGKILL).await;
        }
        result
    }
}

fn no_tar(failure: Failure) -> Failure {
    if failure.code == "cannot_execute" {
        failure.hint("directories are copied by `tar`, which the sandbox's template must have")
    } else {
        failure
    }
}
