//! Starts one program: everything is prepared in the agent, the child between fork and exec makes system
//! calls and nothing else.

use std::{
    arch::asm,
    ffi::CString,
    fs::File,
    io::{self, Read},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use stockade_wire::{ErrorBody, ErrorCode};

use super::cgroup::Cgroup;
use crate::{account::Account, failure::check};

/// All a child needs, ready to use.
pub(super) struct Plan<'a> {
    /// Files to try one after the other.
    pub(super) candidates: Vec<CString>,
    pub(super) argv: Vec<CString>,
    pub(super) env: Vec<CString>,
    pub(super) cwd: CString,
    pub(super) account: &'a Account,
    /// Becomes standard input, output and error.
    pub(super) stdio: [RawFd; 3],
    /// Standard input is to be the controlling terminal.
    pub(super) is_terminal: bool,
    pub(super) cgroup: Option<&'a Cgroup>,
    /// Lowers what the agent has reserved for itself (its OOM score, its file limit).
    pub(super) is_machine: bool,
}

/// From `linux/sched.h`; the library's constant is cut to 32 bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What a child needs between fork and exec, and then some.
const CHILD_STACK: usize = 32 << 10;

/// Where the child failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
enum Stage {
    Setup = 1,
    Group = 2,
    User = 3,
    Directory = 4,
    Exec = 5,
}

/// What became of a child.
pub(super) enum Spawned {
    /// It is in its program.
    Running(i32),
    /// It could not get there; it has been waited for.
    Failed(Report),
}

/// Stage and error of a failed child.
pub(super) type Report = [u8; REPORT_BYTES];

const REPORT_BYTES: usize = 5;

impl Plan<'_> {
    /// Starts the program and waits until it runs. The child is in the process's cgroup from its first
    /// instruction; where the users' share of processes is used up, it is born in the agent's group and moves (the
    /// limit does not hold for moves, which are slow), so that a fork bomb cannot keep anyone out.
    pub(super) fn spawn(&self) -> io::Result<Spawned> {
        let (report, report_child) = pipe()?;
        let mover = self.cgroup.map(|group| path_of(group.procs_path()));
        let mut raw = Raw::new(self, report_child.as_raw_fd());
        let blocked = SignalBlock::all()?;
        let pid = match (self.cgroup, &mover) {
            (Some(group), Some(mover)) => match raw.fork(Some(group.directory_fd())) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    raw.mover = Some(mover);
                    raw.fork(None)
                }
                other => other,
            },
            _ => raw.fork(None),
        };
        drop(blocked);
        let pid = pid?;
        drop(report_child);
        // The writing end is closed by now in parent and child: this does not wait.
        let mut failure = Report::default();
        match File::from(report).read_exact(&mut failure) {
            Ok(()) => {
                // SAFETY: a null status is allowed. Should the reaper have been faster, there is no such child.
                unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
                Ok(Spawned::Failed(failure))
            }
            Err(_) => Ok(Spawned::Running(pid)),
        }
    }
}

/// What a failed child's report means, in terms of what was asked.
pub(super) fn explain(report: Report, program: &str, cwd: &str, user: &str) -> ErrorBody {
    let [stage, errno @ ..] = report;
    let error = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
    let words = error.to_string();
    let words = words.split(" (os error").next().unwrap_or_default().to_lowercase();
    let code = |usual| match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN) => ErrorCode::OutOfMemory,
        Some(libc::E2BIG | libc::ENAMETOOLONG) => ErrorCode::TooLong,
        _ => usual,
    };
    if stage == Stage::Directory as u8 {
        let message = match error.raw_os_error() {
            Some(libc::ENOENT) => format!("cwd '{cwd}' does not exist"),
            Some(libc::ENOTDIR) => format!("cwd '{cwd}' is not a directory"),
            _ => format!("cannot enter cwd '{cwd}': {words}"),
        };
        ErrorBody::new(code(ErrorCode::BadCwd), message)
    } else if stage == Stage::Exec as u8 {
        let message = match error.raw_os_error() {
            Some(libc::ENOENT) => format!("program '{program}' does not exist"),
            Some(libc::E2BIG) => "command and environment are too long for the kernel".to_owned(),
            _ => format!("cannot execute '{program}': {words}"),
        };
        ErrorBody::new(code(ErrorCode::CannotExecute), message)
    } else if stage == Stage::User as u8 {
        ErrorBody::new(code(ErrorCode::PermissionDenied), format!("cannot become user '{user}': {words}"))
    } else {
        ErrorBody::new(code(ErrorCode::Internal), format!("cannot prepare the process: {words}"))
    }
}

/// The plan as system calls want it. Owns the pointer arrays; the strings stay with the plan.
struct Raw<'a> {
    plan: &'a Plan<'a>,
    argv: Vec<*const libc::c_char>,
    env: Vec<*const libc::c_char>,
    report: RawFd,
    /// Where the child moves itself if it could not be born in its cgroup.
    mover: Option<&'a CString>,
}

impl<'a> Raw<'a> {
    fn new(plan: &'a Plan<'a>, report: RawFd) -> Self {
        Self { plan, argv: pointers(&plan.argv), env: pointers(&plan.env), report, mover: None }
    }

    /// Makes a child that borrows the agent's memory until it is in its program (as `vfork` does): copying
    /// page tables is what a fork costs, and under emulation it costs most.
    fn fork(&self, cgroup: Option<RawFd>) -> io::Result<i32> {
        let mut stack = vec![0u128; CHILD_STACK / size_of::<u128>()];
        // SAFETY: all zero is a valid value of this plain struct.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
        arguments.exit_signal = libc::SIGCHLD as u64;
        arguments.stack = stack.as_mut_ptr() as u64;
        arguments.stack_size = CHILD_STACK as u64;
        if let Some(cgroup) = cgroup {
            arguments.flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = cgroup as u64;
        }
        let result: isize;
        // SAFETY: the child runs on a stack of its own and never returns from `run_child`. This thread stands
        // still until the child has executed its program or ended, so `self`, the stack and the
        // arguments outlive the child's use of them. The child makes system calls only.
        unsafe {
            asm!(
                "syscall",
                "test rax, rax",
                "jnz 2f",
                "xor ebp, ebp",
                "mov rdi, {raw}",
                "call {run}",
                "ud2",
                "2:",
                raw = in(reg) ptr::from_ref(self),
                run = in(reg) run_child as extern "C" fn(*const Raw<'_>) -> !,
                inlateout("rax") libc::SYS_clone3 as isize => result,
                in("rdi") &raw const arguments,
                in("rsi") size_of::<libc::clone_args>(),
                out("rcx") _,
                out("r11") _,
            );
        }
        match result {
            error @ ..0 => Err(io::Error::from_raw_os_error(-error as i32)),
            pid => Ok(pid as i32),
        }
    }

    /// In the child: joins the cgroup by hand.
    fn move_into(&self, procs: &CString) {
        // SAFETY: plain system calls on a C string that is alive.
        unsafe {
            let fd = libc::open(procs.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            if fd < 0 || libc::write(fd, c"0".as_ptr().cast(), 1) != 1 {
                self.fail(Stage::Group);
            }
        }
    }

    /// In the child: becomes the program or reports why not.
    fn become_program(&self) -> ! {
        // SAFETY: this is the only thread of a forked child. Every call below is a system call on
        // memory prepared before the fork; nothing allocates or takes a lock.
        unsafe {
            let plan = self.plan;
            if let Some(procs) = self.mover {
                self.move_into(procs);
            }
            libc::setsid();
            if plan.is_machine {
                lower_reserves();
            }
            for signal in [libc::SIGPIPE, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGCHLD] {
                libc::signal(signal, libc::SIG_DFL);
            }
            for (target, source) in plan.stdio.iter().enumerate() {
                if libc::dup2(*source, target as RawFd) < 0 {
                    self.fail(Stage::Setup);
                }
            }
            if plan.is_terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                self.fail(Stage::Setup);
            }
            self.change_user();
            libc::umask(0o022);
            if libc::chdir(plan.cwd.as_ptr()) < 0 {
                self.fail(Stage::Directory);
            }
            let none: libc::sigset_t = std::mem::zeroed();
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            self.exec()
        }
    }

    /// SAFETY: only in the child. The raw calls, since the library's wrappers would look for other threads.
    unsafe fn change_user(&self) {
        let account = self.plan.account;
        if !account.is_foreign && !self.plan.is_machine {
            return;
        }
        let (uid, gid, groups) = (account.uid, account.gid, &account.groups);
        // SAFETY: as the caller promises; the slice is alive.
        let is_changed = unsafe {
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) == 0
                && libc::syscall(libc::SYS_setresgid, gid, gid, gid) == 0
                && libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0
        };
        if !is_changed {
            self.fail(Stage::User);
        }
    }

    /// Tries the candidates as a shell would: one that cannot be executed counts only if none can.
    fn exec(&self) -> ! {
        let mut worst = libc::ENOENT;
        for candidate in &self.plan.candidates {
            // SAFETY: the arrays end with null and their strings are alive.
            unsafe { libc::execve(candidate.as_ptr(), self.argv.as_ptr(), self.env.as_ptr()) };
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => worst = libc::EACCES,
                other => self.fail_with(Stage::Exec, other),
            }
        }
        self.fail_with(Stage::Exec, worst)
    }

    fn fail(&self, stage: Stage) -> ! {
        self.fail_with(stage, errno())
    }

    fn fail_with(&self, stage: Stage, error: i32) -> ! {
        let mut report = [stage as u8; REPORT_BYTES];
        report[1..].copy_from_slice(&error.to_ne_bytes());
        // SAFETY: a write from a live array, then the child's end.
        unsafe {
            libc::write(self.report, report.as_ptr().cast(), report.len());
            libc::_exit(127)
        }
    }
}

/// SAFETY: only in the child of a fork.
unsafe fn lower_reserves() {
    let files = libc::rlimit { rlim_cur: 1024, rlim_max: 524_288 };
    let scheduling = libc::sched_param { sched_priority: 0 };
    // SAFETY: plain system calls on live memory.
    unsafe {
        libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const scheduling);
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"100".as_ptr().cast(), 3);
            libc::close(fd);
        }
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn path_of(path: std::path::PathBuf) -> CString {
    use std::os::unix::ffi::OsStringExt;
    CString::new(path.into_os_string().into_vec()).unwrap_or_default()
}

/// Where a child begins.
extern "C" fn run_child(raw: *const Raw<'_>) -> ! {
    // SAFETY: it comes from `Raw::fork`, which waits.
    unsafe { &*raw }.become_program()
}

/// A pipe whose ends are closed on exec: reader, writer.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for both.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    // SAFETY: both were just opened and nothing else knows them.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

pub(super) fn set_nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: flag changes on a descriptor the caller holds.
    unsafe {
        let flags = check(libc::fcntl(fd, libc::F_GETFL).into())? as libc::c_int;
        check(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK).into()).map(drop)
    }
}

/// No signal reaches this thread while it lives; the child inherits that until its handlers are reset.
struct SignalBlock(libc::sigset_t);

impl SignalBlock {
    fn all() -> io::Result<Self> {
        // SAFETY: both sets are plain memory that the calls fill.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) {
                0 => Ok(Self(before)),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        }
    }
}

impl Drop for SignalBlock {
    fn drop(&mut self) {
        // SAFETY: restores the set that was in force.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}
