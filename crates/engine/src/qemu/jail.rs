//! The wall around the emulator.
//!
//! Made in two steps. In the child, before it becomes bubblewrap ([`Preparation`]): it lowers its limits
//! and, when the server runs as root, becomes nobody. Nobody cannot reach into a private data directory, so the few directories the emulator may see are first
//! bound to fixed names in a mount namespace of the child's own. Then bubblewrap: all namespaces
//! unshared, no capability, an assembled root with the emulator and its libraries only, read-only, the
//! machine's own directory as the one place it may write to.
//!
//! The emulator does not die with the server: machines survive its restart.

use std::{
    ffi::CString,
    io,
    os::{fd::RawFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use tokio::process::Command;

/// Who the emulator is, seen from the host, when the server is root.
pub(crate) const NOBODY: u32 = 65534;

/// Where [`Preparation`] gathers what the emulator may see. Exists everywhere; hidden for the child alone.
const STAGE: &str = "/tmp";

/// One thing the emulator may see.
#[derive(Clone, Debug)]
pub(crate) struct Mount {
    /// The directory or file on the host.
    pub(crate) source: PathBuf,
    /// Its place in the jail; exists in the assembled root.
    pub(crate) target: String,
    /// Whether the emulator may change it.
    pub(crate) is_writable: bool,
}

impl Mount {
    pub(crate) fn new(source: PathBuf, target: &str, is_writable: bool) -> Self {
        Self { source, target: target.to_owned(), is_writable }
    }
}

/// A program to be run in a jail.
#[derive(Debug)]
pub(crate) struct Jail<'a> {
    /// The program that makes the namespaces.
    pub(crate) bubblewrap: &'a Path,
    /// The assembled root.
    pub(crate) root: &'a Path,
    /// What is added to it.
    pub(crate) mounts: Vec<Mount>,
    /// Whether it may use `/dev/kvm`.
    pub(crate) with_kvm: bool,
    /// Where bubblewrap reports the program's process id.
    pub(crate) info: RawFd,
    /// Descriptors the program inherits, under the same numbers; all others are closed.
    pub(crate) inherited: Vec<RawFd>,
    /// Limits per process.
    pub(crate) limits: ProcessLimits,
}

/// What one process may take, with or without control groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessLimits {
    pub(crate) address_space_bytes: u64,
    pub(crate) file_bytes: u64,
    pub(crate) open_files: u64,
}

impl Jail<'_> {
    /// The command that runs `program` with `arguments` in the jail.
    pub(crate) fn command(&self, program: &str, arguments: &[String]) -> io::Result<Command> {
        let as_root = nix::unistd::geteuid().is_root();
        let preparation = Preparation::new(self, as_root)?;
        let mut command = Command::new(self.bubblewrap);
        command.args(self.bubblewrap_arguments(as_root)).arg("--").arg(program).args(arguments);
        command.env_clear();
        // SAFETY: `run` only makes system calls on memory that was allocated before the fork.
        unsafe { command.pre_exec(move || preparation.run()) };
        Ok(command)
    }

    fn bubblewrap_arguments(&self, as_root: bool) -> Vec<String> {
        let mut list: Vec<String> = Vec::with_capacity(64);
        let mut add = |words: &[&str]| list.extend(words.iter().map(|word| (*word).to_owned()));
        let nobody = NOBODY.to_string();
        add(&["--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]);
        add(&["--unshare-cgroup-try", "--disable-userns", "--uid", &nobody, "--gid", &nobody]);
        // As process 1 the emulator's end is the end of its namespace, and its host id is the one reported.
        add(&["--cap-drop", "ALL", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "machine"]);
        add(&["--info-fd", &self.info.to_string()]);
        let stage = |index: usize, source: &Path| match as_root {
            true => staged(index),
            false => source.display().to_string(),
        };
        add(&["--ro-bind", &stage(0, self.root), "/", "--proc", "/proc"]);
        for device in ["/dev/null", "/dev/urandom"] {
            add(&["--dev-bind", device, device]);
        }
        if self.with_kvm {
            let source = if as_root { format!("{STAGE}/kvm") } else { "/dev/kvm".to_owned() };
            add(&["--dev-bind", &source, "/dev/kvm"]);
        }
        for (index, mount) in self.mounts.iter().enumerate() {
            let how = if mount.is_writable { "--bind" } else { "--ro-bind" };
            add(&[how, &stage(index + 1, &mount.source), &mount.target]);
        }
        add(&["--chdir", "/"]);
        list
    }
}

fn staged(index: usize) -> String {
    format!("{STAGE}/{index}")
}

/// What the child does before it becomes bubblewrap: system calls only, everything is allocated here.
struct Preparation {
    server: libc::pid_t,
    /// Source, its staged name, whether it is a directory. Empty unless the server is root.
    staging: Vec<(CString, CString, bool)>,
    as_root: bool,
    kvm: Option<CString>,
    inherited: Vec<RawFd>,
    limits: [(libc::__rlimit_resource_t, u64); 4],
}

impl Preparation {
    fn new(jail: &Jail<'_>, as_root: bool) -> io::Result<Self> {
        let c_string = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
        let mut staging = Vec::new();
        if as_root {
            let sources = std::iter::once(jail.root).chain(jail.mounts.iter().map(|mount| mount.source.as_path()));
            for (index, source) in sources.enumerate() {
                staging.push((c_string(source)?, c_string(Path::new(&staged(index)))?, source.is_dir()));
            }
        }
        let mut inherited = jail.inherited.clone();
        inherited.push(jail.info);
        Ok(Self {
            server: nix::unistd::getpid().as_raw(),
            staging,
            as_root,
            kvm: if jail.with_kvm && as_root { Some(c_string(&Path::new(STAGE).join("kvm"))?) } else { None },
            inherited,
            limits: [
                (libc::RLIMIT_AS, jail.limits.address_space_bytes),
                (libc::RLIMIT_FSIZE, jail.limits.file_bytes),
                (libc::RLIMIT_NOFILE, jail.limits.open_files),
                (libc::RLIMIT_CORE, 0),
            ],
        })
    }

    fn run(&self) -> io::Result<()> {
        self.end_with_server()?;
        if self.as_root {
            self.stage()?;
            self.become_nobody()?;
            // A change of user forgets it.
            self.end_with_server()?;
        }
        for (resource, value) in self.limits {
            let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
            // SAFETY: `limit` lives through the call.
            check(unsafe { libc::setrlimit(resource, &limit) } as isize)?;
        }
        // SAFETY: system calls on numbers only.
        unsafe {
            libc::umask(0o077);
            libc::setsid();
            check(libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) as isize)?;
            for fd in &self.inherited {
                check(libc::fcntl(*fd, libc::F_SETFD, 0) as isize)?;
            }
            // From here on it has the machine's name among its arguments, and outlives the server.
            check(libc::prctl(libc::PR_SET_PDEATHSIG, 0) as isize)
        }
    }

    /// Until it is bubblewrap, this process looks like the server: no sweep would find it if the server died.
    /// The thread that forked waits for the end of all this, so its end is the server's.
    fn end_with_server(&self) -> io::Result<()> {
        // SAFETY: system calls on numbers only.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) as isize)?;
            if libc::getppid() != self.server {
                libc::_exit(1);
            }
        }
        Ok(())
    }

    /// Binds what the emulator may see to fixed names nobody can reach.
    fn stage(&self) -> io::Result<()> {
        const MOST: usize = 16;
        let mut sources = [-1; MOST];
        if self.staging.len() > MOST {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (stage, none) = (c"/tmp".as_ptr(), std::ptr::null());
        // SAFETY: all strings end in a zero byte and live through the calls; no memory is written to.
        unsafe {
            check(libc::unshare(libc::CLONE_NEWNS) as isize)?;
            check(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) as isize)?;
            // Opened before the stage hides what lies below it, after the namespace has been left.
            for ((source, _, _), fd) in self.staging.iter().zip(&mut sources) {
                *fd = libc::open(source.as_ptr(), libc::O_PATH | libc::O_CLOEXEC);
                check(*fd as isize)?;
            }
            let options = c"mode=0755,size=64k".as_ptr();
            check(libc::mount(c"stage".as_ptr(), stage, c"tmpfs".as_ptr(), 0, options.cast()) as isize)?;
            for ((_, target, is_directory), fd) in self.staging.iter().zip(sources) {
                if *is_directory {
                    check(libc::mkdir(target.as_ptr(), 0o755) as isize)?;
                } else {
                    check(libc::mknod(target.as_ptr(), libc::S_IFREG | 0o644, 0) as isize)?;
                }
                let source = DescriptorPath::new(fd);
                let bind = libc::MS_BIND;
                check(libc::mount(source.as_ptr(), target.as_ptr(), none, bind, none.cast()) as isize)?;
            }
            if let Some(kvm) = &self.kvm {
                // A node of our own: the host's may be closed to nobody.
                libc::umask(0);
                check(libc::mknod(kvm.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(10, 232)) as isize)?;
            }
        }
        Ok(())
    }

    fn become_nobody(&self) -> io::Result<()> {
        // The raw calls: glibc's change all threads, and after a fork there is one.
        // SAFETY: system calls on numbers only.
        unsafe {
            check(libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) as isize)?;
            check(libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY) as isize)?;
            check(libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) as isize)
        }
    }
}

/// `/proc/self/fd/<n>` without allocation.
struct DescriptorPath([u8; 32]);

impl DescriptorPath {
    fn new(fd: RawFd) -> Self {
        let mut bytes = [0; 32];
        let prefix = b"/proc/self/fd/";
        bytes[..prefix.len()].copy_from_slice(prefix);
        let mut digits = [0; 10];
        let mut count = 0;
        let mut rest = fd.unsigned_abs();
        loop {
            digits[count] = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            count += 1;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        for index in 0..count {
            bytes[prefix.len() + index] = digits[count - 1 - index];
        }
        Self(bytes)
    }

    fn as_ptr(&self) -> *const libc::c_char {
        self.0.as_ptr().cast()
    }
}

fn check(result: isize) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptors_path_is_spelled_right() {
        for fd in [0, 7, 10, 4711, i32::MAX] {
            let path = DescriptorPath::new(fd);
            let end = path.0.iter().position(|byte| *byte == 0).expect("ends");
            assert_eq!(std::str::from_utf8(&path.0[..end]), Ok(format!("/proc/self/fd/{fd}").as_str()));
        }
    }
}
