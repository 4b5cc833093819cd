//! From a start request to a running process.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::Arc,
    time::Duration,
};

use stockade_wire::{
    ErrorBody, ErrorCode,
    event::Output,
    process::{Command, ProcessInfo, PtySize, StartRequest, Tool},
};
use tokio::{
    io::Interest,
    sync::{Mutex, watch},
};

use super::{
    Process, Reader,
    cgroup::Cgroup,
    check_env,
    input::Input,
    log::Log,
    pump::{self, Source},
    reaper,
    spawn::{self, Plan, Spawned},
};
use crate::{
    Agent,
    account::Account,
    agent::unix_ms,
    bulk,
    failure::{Result, check, code_of, failed, invalid},
    fd::watched,
    files,
};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const DEFAULT_TERM: &str = "xterm-256color";
/// A tag travels in a URL.
const MAX_TAG: usize = 1024;
const REHEARSAL_MS: u64 = 30_000;
/// A program of the template's; how it ends is its own affair.
const TEMPLATES_REHEARSAL: &str = "/usr/local/lib/stockade/rehearsal";
const BASH: &str = "/bin/bash";
/// The agent's, also where no path leads to it any more.
const OWN_PROGRAM: &str = "/proc/self/exe";

impl Agent {
    /// Starts a process and gives a reader from its first byte. Once begun it happens whole, whatever
    /// becomes of the request.
    pub(crate) async fn start_process(&self, request: StartRequest) -> Result<Reader> {
        self.start_whole(request, true).await
    }

    /// Runs a command that does nothing, through all a command goes through, and forgets it: an emulator translates
    /// what it has not run yet, and the first command would have to wait for that. The shell becomes a program, so that
    /// both have run. Before, what the template brings for the same purpose: only it knows what its services do first.
    pub(crate) async fn rehearse(&self) -> Result<Reader> {
        let echo = StartRequest::new(Command::Shell(format!(
            "if [ -x {TEMPLATES_REHEARSAL} ]; then {TEMPLATES_REHEARSAL} </dev/null >/dev/null 2>&1; fi; exec /bin/echo"
        )));
        let request = StartRequest { timeout_ms: Some(REHEARSAL_MS), ..echo };
        self.start_whole(request, false).await
    }

    async fn start_whole(&self, request: StartRequest, is_remembered: bool) -> Result<Reader> {
        let agent = self.clone();
        match tokio::spawn(async move { start(&agent, request, is_remembered).await }).await {
            Ok(result) => result,
            Err(_) => Err(ErrorBody::new(ErrorCode::Internal, "the agent failed at this start")),
        }
    }
}

async fn start(agent: &Agent, request: StartRequest, is_remembered: bool) -> Result<Reader> {
    validate(&request)?;
    let processes = &agent.shared().processes;
    let place = processes.reserve(request.tag.as_deref())?;
    let (blocking_agent, blocking_request) = (agent.clone(), request.clone());
    let begun = bulk::quick(move || begin(&blocking_agent, &blocking_request)).await?;
    let ended = processes.claim(begun.pid);
    // Where the agent is not process 1, a child that ended before this has had its SIGCHLD already.
    reaper::sweep_one(processes, begun.pid);
    let (input, sources) = begun.pipes.agent_side().map_err(failed("set up the process's pipes"))?;
    let time = request.timeout_ms.map(Duration::from_millis);
    let process = Arc::new(Process {
        info: info(request, begun.pid, begun.user, begun.cwd),
        log: Log::new(),
        input,
        cgroup: begun.cgroup,
        has_ended: watch::channel(false).0,
        is_remembered,
        agent: agent.clone(),
    });
    let reader = process.attach(Some(0));
    place.take(process.clone());
    let ended_process = process.clone();
    let on_exit = move || ended_process.agent.shared().processes.ended(&ended_process);
    tokio::spawn(pump::run(process, sources, ended, time, on_exit));
    Ok(reader)
}

/// A process that runs its program.
struct Begun {
    pid: i32,
    pipes: Pipes,
    cgroup: Option<Cgroup>,
    user: String,
    cwd: String,
}

/// The part that may block: the directory and the program may lie on a file system that stands still.
fn begin(agent: &Agent, request: &StartRequest) -> Result<Begun> {
    let account = agent.account(request.user.as_deref())?;
    let settings = agent.settings();
    let wanted_cwd = request.cwd.as_deref().filter(|cwd| !cwd.is_empty()).or(settings.default_cwd.as_deref());
    let cwd = files::absolute(wanted_cwd.unwrap_or("~"), &account.home)?;
    let env = environment(&account, &settings.env, request);
    let argv = argv(&request.command);
    let cgroup = agent.cgroups().map(super::Cgroups::take).transpose().map_err(out_of("make the process's cgroup"))?;
    let pipes = Pipes::make(request).map_err(out_of("make the process's pipes"))?;
    if agent.is_machine() {
        pipes.give_to(account.uid, account.gid).map_err(out_of("give the process its pipes"))?;
    }
    let candidates = match &request.command {
        Command::Tool(_) if !agent.is_machine() => return Err(invalid("the agent's tools are for machines")),
        Command::Tool(_) => vec![OWN_PROGRAM.to_owned()],
        _ => candidates(&argv[0], &env),
    };
    let plan = Plan {
        candidates: c_strings(candidates.into_iter())?,
        argv: c_strings(argv.iter().cloned())?,
        env: c_strings(env.iter().map(|(key, value)| format!("{key}={value}")))?,
        cwd: CString::new(cwd.as_str()).map_err(|_| invalid("cwd contains a NUL byte"))?,
        account: &account,
        stdio: pipes.child_side(),
        is_terminal: pipes.is_terminal(),
        cgroup: cgroup.as_ref(),
        is_machine: agent.is_machine(),
    };
    let failure = match plan.spawn() {
        Ok(Spawned::Running(pid)) => return Ok(Begun { pid, pipes, cgroup, user: account.name, cwd }),
        Ok(Spawned::Failed(report)) => spawn::explain(report, &argv[0], &cwd, &account.name),
        Err(error) => out_of("start a process")(error),
    };
    if let (Some(cgroups), Some(cgroup)) = (agent.cgroups(), &cgroup) {
        cgroups.discard(cgroup.path());
    }
    Err(failure)
}

/// Resources the guest may be out of, told as such.
fn out_of(action: &'static str) -> impl FnOnce(io::Error) -> ErrorBody {
    move |error| match code_of(&error) {
        ErrorCode::OutOfMemory => ErrorBody::new(
            ErrorCode::OutOfMemory,
            format!("cannot {action}: the guest has no memory or processes left"),
        ),
        _ => failed(action)(error),
    }
}

fn validate(request: &StartRequest) -> Result<()> {
    match &request.command {
        Command::Argv(argv) if argv.first().is_none_or(String::is_empty) => {
            return Err(invalid("the command names no program"));
        }
        Command::Argv(argv) if argv.iter().any(|argument| argument.contains('\0')) => {
            return Err(invalid("an argument contains a NUL byte"));
        }
        Command::Shell(text) | Command::Tool(Tool::Connect(text)) if text.contains('\0') => {
            return Err(invalid("the command contains a NUL byte"));
        }
        _ => {}
    }
    if request.tag.as_ref().is_some_and(|tag| tag.is_empty() || tag.len() > MAX_TAG) {
        return Err(invalid(format!("a tag has 1 to {MAX_TAG} bytes")));
    }
    if request.timeout_ms == Some(0) {
        return Err(invalid("a timeout of 0 would end the process before it starts; leave it out for none"));
    }
    check_env(&request.env)
}

fn argv(command: &Command) -> Vec<String> {
    match command {
        Command::Argv(argv) => argv.clone(),
        Command::Shell(text) if fs::exists(BASH).unwrap_or(false) => {
            [BASH, "-l", "-c", text].map(str::to_owned).to_vec()
        }
        Command::Shell(text) => ["/bin/sh", "-c", text].map(str::to_owned).to_vec(),
        Command::Tool(tool) => tool.argv(),
    }
}

fn environment(
    account: &Account,
    sandbox: &BTreeMap<String, String>,
    request: &StartRequest,
) -> BTreeMap<String, String> {
    let basic = [
        ("PATH", DEFAULT_PATH),
        ("HOME", &account.home),
        ("USER", &account.name),
        ("LOGNAME", &account.name),
        ("SHELL", &account.shell),
    ];
    let mut env: BTreeMap<_, _> = basic.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    if request.pty.is_some() {
        env.insert("TERM".to_owned(), DEFAULT_TERM.to_owned());
    }
    env.extend(sandbox.iter().map(|(key, value)| (key.clone(), value.clone())));
    env.extend(request.env.iter().map(|(key, value)| (key.clone(), value.clone())));
    env
}

/// The files a program's name may mean, as `execvp` would look for them.
fn candidates(program: &str, env: &BTreeMap<String, String>) -> Vec<String> {
    if program.contains('/') {
        return vec![program.to_owned()];
    }
    let path = env.get("PATH").map_or(DEFAULT_PATH, String::as_str);
    let directory = |entry: &str| if entry.is_empty() { format!("./{program}") } else { format!("{entry}/{program}") };
    path.split(':').map(directory).collect()
}

fn c_strings(strings: impl Iterator<Item = String>) -> Result<Vec<CString>> {
    strings.map(|text| CString::new(text).map_err(|_| invalid("the command contains a NUL byte"))).collect()
}

fn info(request: StartRequest, pid: i32, user: String, cwd: String) -> ProcessInfo {
    ProcessInfo {
        pid: pid as u32,
        tag: request.tag,
        command: request.command,
        user,
        cwd,
        env: request.env,
        pty: request.pty.is_some(),
        started_unix_ms: unix_ms(),
        exit: None,
    }
}

/// Both sides of what a process reads from and writes to.
enum Pipes {
    /// Agent's ends, then the child's.
    Three {
        stdin: Option<OwnedFd>,
        outputs: [OwnedFd; 2],
        child: [OwnedFd; 3],
    },
    Terminal {
        master: OwnedFd,
        slave: OwnedFd,
    },
}

impl Pipes {
    fn make(request: &StartRequest) -> io::Result<Self> {
        if let Some(size) = request.pty {
            return open_terminal(size);
        }
        let (stdin, stdin_child) = if request.stdin {
            let (reader, writer) = spawn::pipe()?;
            spawn::set_nonblocking(writer.as_raw_fd())?;
            (Some(writer), reader)
        } else {
            (None, OwnedFd::from(fs::File::open("/dev/null")?))
        };
        let (stdout, stdout_child) = spawn::pipe()?;
        let (stderr, stderr_child) = spawn::pipe()?;
        spawn::set_nonblocking(stdout.as_raw_fd())?;
        spawn::set_nonblocking(stderr.as_raw_fd())?;
        Ok(Self::Three { stdin, outputs: [stdout, stderr], child: [stdin_child, stdout_child, stderr_child] })
    }

    fn child_side(&self) -> [RawFd; 3] {
        match self {
            Self::Three { child, .. } => [child[0].as_raw_fd(), child[1].as_raw_fd(), child[2].as_raw_fd()],
            Self::Terminal { slave, .. } => [slave.as_raw_fd(); 3],
        }
    }

    /// Lets the process's user open them anew by name, as `tee /dev/stderr` does.
    fn give_to(&self, user: u32, group: u32) -> io::Result<()> {
        let ends: &[&OwnedFd] = match self {
            Self::Three { stdin: Some(_), child: [stdin, stdout, stderr], .. } => &[stdin, stdout, stderr],
            // Its input is the machine's `/dev/null`.
            Self::Three { child: [_, stdout, stderr], .. } => &[stdout, stderr],
            Self::Terminal { slave, .. } => &[slave],
        };
        ends.iter().try_for_each(|end| std::os::unix::fs::fchown(end, Some(user), Some(group)))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// Closes the child's ends and gives ours.
    fn agent_side(self) -> io::Result<(Input, Vec<Source>)> {
        match self {
            Self::Three { stdin, outputs: [stdout, stderr], child } => {
                drop(child);
                let input = match stdin {
                    Some(fd) => Input::Pipe(Mutex::new(Some(watched(fd, Interest::WRITABLE)?))),
                    None => Input::None,
                };
                let source = |output, fd| -> io::Result<Source> {
                    Ok(Source { output, fd: Arc::new(watched(fd, Interest::READABLE)?) })
                };
                Ok((input, vec![source(Output::Stdout, stdout)?, source(Output::Stderr, stderr)?]))
            }
            Self::Terminal { master, slave } => {
                drop(slave);
                let fd = Arc::new(watched(master, Interest::READABLE | Interest::WRITABLE)?);
                Ok((Input::Terminal(Mutex::new(()), Arc::downgrade(&fd)), vec![Source { output: Output::Pty, fd }]))
            }
        }
    }
}

/// Opens a pair of terminal ends without names: works whatever is mounted on `/dev/pts`.
fn open_terminal(size: PtySize) -> io::Result<Pipes> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: plain calls on descriptors checked before use and owned by nothing else.
    unsafe {
        let master = check(libc::open(c"/dev/ptmx".as_ptr(), flags | libc::O_NONBLOCK).into())?;
        let master = OwnedFd::from_raw_fd(master as RawFd);
        let unlocked: libc::c_int = 0;
        check(libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked).into())?;
        let slave = check(libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags).into())?;
        let slave = OwnedFd::from_raw_fd(slave as RawFd);
        set_size(master.as_raw_fd(), size)?;
        Ok(Pipes::Terminal { master, slave })
    }
}

pub(super) fn set_size(terminal: RawFd, size: PtySize) -> io::Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: `size` lives over the call.
    check(unsafe { libc::ioctl(terminal, libc::TIOCSWINSZ, &raw const size) }.into()).map(drop)
}
