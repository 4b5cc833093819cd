//! A program of the operator's that makes a value: asked on its standard input, answering on its standard output.
//!
//! It is started by its path with the arguments the operator wrote, without a shell and without the server's
//! environment, in a process group of its own that ends with it.

use std::{path::PathBuf, process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};
use zeroize::Zeroizing;

use super::{Asked, Fresh, read_answer};

const LARGEST_ANSWER: usize = 64 << 10;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A program and its arguments.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub(crate) struct Command {
    program: PathBuf,
    arguments: Vec<String>,
}

impl TryFrom<Vec<String>> for Command {
    type Error = &'static str;

    fn try_from(words: Vec<String>) -> Result<Self, Self::Error> {
        let mut words = words.into_iter();
        let program = PathBuf::from(words.next().ok_or("a command needs at least the path of a program")?);
        if !program.is_absolute() {
            return Err("a command starts with the absolute path of a program");
        }
        Ok(Self { program, arguments: words.collect() })
    }
}

/// Ends what the program left running, also if nobody waits for it any more.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // Mostly nobody is left.
        let _ = killpg(self.0, Signal::SIGKILL);
    }
}

impl Command {
    pub(crate) async fn make(&self, asked: &Asked, patience: Duration) -> Result<Fresh, String> {
        match timeout(patience, self.run(asked)).await {
            Ok(made) => made,
            Err(_) => Err(format!("the operator's command did not end within {patience:?}")),
        }
    }

    async fn run(&self, asked: &Asked) -> Result<Fresh, String> {
        let mut child = tokio::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .env("PATH", PATH)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // It may say what must not be in our log.
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| format!("the operator's command cannot be started: {error}"))?;
        let _group = child.id().and_then(|id| i32::try_from(id).ok()).map(|id| Group(Pid::from_raw(id)));
        let question = serde_json::to_vec(asked).map_err(|error| error.to_string())?;
        let mut stdin = child.stdin.take().ok_or("no standard input")?;
        let mut stdout = child.stdout.take().ok_or("no standard output")?.take(LARGEST_ANSWER as u64 + 1);
        let ask = async move {
            // It need not read what it does not care about.
            let _ = stdin.write_all(&question).await;
        };
        let mut answer = Zeroizing::new(Vec::new());
        let ((), read) = tokio::join!(ask, stdout.read_to_end(&mut answer));
        read.map_err(|error| format!("the operator's command cannot be read: {error}"))?;
        if answer.len() > LARGEST_ANSWER {
            return Err(format!("the operator's command wrote more than {LARGEST_ANSWER} bytes"));
        }
        let status = child.wait().await.map_err(|error| format!("the operator's command: {error}"))?;
        if !status.success() {
            return Err(format!("the operator's command failed: {status}"));
        }
        read_answer(&answer).map_err(|problem| format!("the operator's command: {problem}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Asked {
        let metadata = Some([("team".to_owned(), "red".to_owned())].into());
        Asked { secret: "s".to_owned(), host: "api.example".to_owned(), workspace: None, sandbox: None, metadata }
    }

    fn command(script: &str) -> Command {
        Command::try_from(vec!["/bin/sh".to_owned(), "-c".to_owned(), script.to_owned()]).expect("a command")
    }

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_command_is_asked_on_its_input_and_answers_on_its_output() {
        let script = r#"read -r q; case "$q" in *'"host":"api.example"'*'"team":"red"'*) ;; *) exit 9;; esac
                        printf '{"value": "made-%s", "expires_in": 60}' "${HOME:-bare}""#;
        let fresh = command(script).make(&asked(), LONG).await.expect("a value");
        assert_eq!((fresh.value.expose(), fresh.lifetime), ("made-bare", Duration::from_secs(60)));
    }

    #[tokio::test]
    async fn a_command_that_fails_babbles_or_hangs_gives_no_value_and_is_not_quoted() {
        for script in
            ["echo sk-hidden; exit 3", "echo sk-hidden >&2; exit 3", "echo sk-hidden", "yes sk-hidden", "kill -9 $$"]
        {
            let problem = command(script).make(&asked(), LONG).await.expect_err(script);
            assert!(problem.contains("command") && !problem.contains("hidden"), "{problem}");
        }
        let missing = Command::try_from(vec!["/nowhere/mint".to_owned()]).expect("a path");
        assert!(missing.make(&asked(), LONG).await.expect_err("missing").contains("cannot be started"));
        assert!(Command::try_from(vec!["mint".to_owned()]).is_err());
        assert!(Command::try_from(Vec::new()).is_err());
    }

    #[tokio::test]
    async fn what_a_late_command_started_ends_with_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let note = directory.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", note.display());
        let problem = command(&script).make(&asked(), Duration::from_millis(1500)).await.expect_err("late");
        assert!(problem.contains("did not end"), "{problem}");
        let pid = std::fs::read_to_string(&note).expect("it started");
        let status = format!("/proc/{}/stat", pid.trim());
        // A killed process is a zombie until its new parent has looked.
        let alive = || std::fs::read_to_string(&status).is_ok_and(|stat| !stat.contains(") Z "));
        while alive() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
