//! Runs the programs a build is made of: apt, mmdebstrap, dpkg-deb, depmod.

use std::{
    collections::VecDeque,
    ffi::OsStr,
    io,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, Command},
};

use crate::ImageError;

const KEPT_LINES: usize = 12;
const MAX_LINE_BYTES: usize = 4096;
/// How long a program that is told to stop may clean up.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Program {
    name: &'static str,
    package: &'static str,
    action: String,
    command: Command,
}

impl Program {
    /// `package` is what to install where the program is missing; `action` completes "cannot ...".
    pub(crate) fn new(name: &'static str, package: &'static str, action: impl Into<String>) -> Self {
        let mut command = Command::new(name);
        // An ordinary user's PATH often lacks the sbin folders, where depmod and mke2fs are.
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"));
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        Self { name, package, action: action.into(), command }
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn current_dir(mut self, directory: &Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Runs it to the end and returns its standard output. Dropping the future stops the program and
    /// everything it started.
    pub(crate) async fn output(self) -> Result<String, ImageError> {
        let mut text = String::new();
        self.run(|line| {
            text.push_str(line);
            text.push('\n');
        })
        .await?;
        Ok(text)
    }

    /// Runs it to the end and passes on every line it writes to either output.
    pub(crate) async fn run(mut self, mut on_line: impl FnMut(&str)) -> Result<(), ImageError> {
        let child = self.command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => ImageError::MissingProgram { program: self.name, package: self.package },
            _ => ImageError::Host { action: format!("start {}", self.name), source },
        })?;
        let mut group = Group { child, ended: false };
        let mut stdout = Lines::new(group.child.stdout.take());
        let mut stderr = Lines::new(group.child.stderr.take());
        let (mut last_output, mut last_errors) = (VecDeque::new(), VecDeque::new());
        let read_error = || ImageError::host(format!("read the output of {}", self.name));
        loop {
            let (line, last) = tokio::select! {
                line = stdout.next(), if !stdout.ended => (line.map_err(read_error())?, &mut last_output),
                line = stderr.next(), if !stderr.ended => (line.map_err(read_error())?, &mut last_errors),
                else => break,
            };
            let Some(line) = line else { continue };
            on_line(&line);
            if last.len() == KEPT_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
        let status = group.child.wait().await.map_err(ImageError::host(format!("wait for {}", self.name)))?;
        group.ended = true;
        if status.success() {
            return Ok(());
        }
        Err(ImageError::Program {
            action: self.action,
            program: self.name,
            status: status.to_string(),
            last_lines: Vec::from(if last_errors.is_empty() { last_output } else { last_errors }).join("\n"),
        })
    }
}

/// Lines of one output; bytes that are not UTF-8 are replaced, over-long lines cut.
struct Lines<R> {
    reader: Option<BufReader<R>>,
    buffer: Vec<u8>,
    ended: bool,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    fn new(pipe: Option<R>) -> Self {
        Self { ended: pipe.is_none(), reader: pipe.map(BufReader::new), buffer: Vec::new() }
    }

    /// `None` at the end. What has been read of a line stays in the buffer when this is cancelled.
    async fn next(&mut self) -> io::Result<Option<String>> {
        let Some(reader) = &mut self.reader else { return Ok(None) };
        if reader.read_until(b'\n', &mut self.buffer).await? == 0 && self.buffer.is_empty() {
            self.ended = true;
            return Ok(None);
        }
        let mut bytes = std::mem::take(&mut self.buffer);
        bytes.truncate(MAX_LINE_BYTES);
        Ok(Some(String::from_utf8_lossy(&bytes).trim_end().to_owned()))
    }
}

/// A program and what it started. Stops them all unless it has ended by itself.
struct Group {
    child: Child,
    ended: bool,
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(pid) = self.child.id().filter(|_| !self.ended) else { return };
        let Ok(pid) = i32::try_from(pid) else { return };
        // mmdebstrap unmounts and removes its work on SIGTERM, so it gets the time for it. Nothing here
        // can await: this is a future being dropped, at Ctrl-C.
        let _ = killpg(Pid::from_raw(pid), Signal::SIGTERM);
        let deadline = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_program_is_named_with_its_package() {
        let error = Program::new("stockade-no-such-program", "no-such-package", "try").output().await;
        let error = error.expect_err("there is no such program");
        assert_eq!(error.to_string(), "stockade-no-such-program is not installed");
        assert_eq!(error.hint().as_deref(), Some("install it: apt-get install no-such-package"));
    }

    #[tokio::test]
    async fn a_failure_carries_the_last_lines() {
        let error = Program::new("sh", "dash", "count").args(["-c", "seq 100 >&2; seq 7; exit 3"]).output().await;
        let text = error.expect_err("it exits 3").to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!((lines[0], lines[1]), ("cannot count: sh ended with exit status: 3", "89"));
        assert_eq!(lines.last(), Some(&"100"));
    }

    #[tokio::test]
    async fn dropping_the_future_stops_the_whole_group() {
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let pids = scratch.path().join("pids");
        let script = "sleep 1000 & echo $! $$ > pids; echo ready; wait";
        {
            let mut ready = false;
            let run = Program::new("sh", "dash", "sleep").args(["-c", script]).current_dir(scratch.path());
            let (told, mut tell) = tokio::sync::mpsc::channel(1);
            let run = run.run(move |_| {
                let _ = told.try_send(());
            });
            tokio::pin!(run);
            while !ready {
                tokio::select! {
                    _ = &mut run => panic!("it sleeps"),
                    heard = tell.recv() => ready = heard.is_some(),
                }
            }
        }
        let pids = std::fs::read_to_string(pids).expect("the script wrote its pids");
        // Killed and not yet reaped by its new parent is as good as gone.
        let runs = |pid: &str| {
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !(state.is_empty() || state.contains(") Z"))
        };
        // A signal that is sent has yet to arrive.
        let ended = async {
            while pids.split_whitespace().any(runs) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        assert_eq!(pids.split_whitespace().count(), 2);
        tokio::time::timeout(std::time::Duration::from_secs(10), ended).await.expect("all of the group end");
    }
}
