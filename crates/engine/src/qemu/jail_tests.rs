//! What a program in the emulator's place can see and do.
//!
//! The test program itself is put into a jail as if it were the emulator: [`probe`] runs there, tries
//! everything it should not be able to do, and leaves a report in its own directory.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        linux::net::SocketAddrExt,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr as UnixAddress, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use nix::{fcntl::OFlag, mount::MsFlags, sched::CloneFlags, sys::signal::Signal, unistd::Pid};
use serde::{Deserialize, Serialize};

use super::{
    jail::{Jail, Mount, NOBODY, ProcessLimits},
    machine_dir::give_to_nobody,
    memory::SealedMemory,
    runtime_root::RuntimeRoot,
};

/// What the probe is told about the world outside.
#[derive(Deserialize, Serialize)]
struct Outside {
    tcp: SocketAddr,
    abstract_socket: String,
    secret_file: PathBuf,
    pid: i32,
    memory_fd: i32,
}

#[derive(Debug, Deserialize, Serialize)]
struct Report {
    uid: u32,
    gid: u32,
    pid: u32,
    /// Lines of `/proc/self/status`.
    status: BTreeMap<String, String>,
    top_level: Vec<String>,
    files_outside_usual_places: Vec<String>,
    processes: Vec<String>,
    interfaces: Vec<String>,
    descriptors: Vec<i32>,
    environment: Vec<String>,
    core_limit: u64,
    /// What was tried: what came of it, `ok` or the error.
    attempts: BTreeMap<String, String>,
}

const REPORT: &str = "/machine/report.json";
const OUTSIDE: &str = "/machine/outside.json";

#[test]
#[ignore = "the program that the jail test puts into the jail"]
fn probe() {
    let Ok(outside) = fs::read(OUTSIDE) else { return };
    let outside: Outside = serde_json::from_slice(&outside).expect("valid");
    let mut attempts = BTreeMap::new();
    let mut attempt = |name: &str, result: std::io::Result<()>| {
        attempts.insert(name.to_owned(), result.map_or_else(|error| error.to_string(), |()| "ok".to_owned()));
    };
    for path in ["/etc/passwd", "/root", "/home", "/var", "/run", "/sys", "/proc/1/root/etc"] {
        attempt(&format!("see {path}"), fs::metadata(path).map(drop));
    }
    attempt("see a file of the data directory", fs::metadata(&outside.secret_file).map(drop));
    for directory in ["/", "/usr", "/template", "/layers", "/tmp", "/dev", "/firmware", "/boot", "/proc"] {
        attempt(&format!("write to {directory}"), fs::write(Path::new(directory).join("new"), "x"));
    }
    attempt("write to own directory", fs::write("/machine/new", "x"));
    attempt("change the template", fs::write("/template/root.ext4", "x"));
    attempt("change a layer", fs::write("/layers/own.qcow2", "x"));
    attempt("take over a layer", fs::hard_link("/layers/own.qcow2", "/machine/own.qcow2"));
    attempt("open a layer", fs::set_permissions("/layers/own.qcow2", fs::Permissions::from_mode(0o666)));
    attempt("set a host's kernel parameter", fs::write("/proc/sys/kernel/hostname", "x"));
    attempt("use sysrq", fs::OpenOptions::new().write(true).open("/proc/sysrq-trigger").map(drop));
    attempt("reach the host's network", TcpStream::connect_timeout(&outside.tcp, Duration::from_secs(2)).map(drop));
    let address = UnixAddress::from_abstract_name(&outside.abstract_socket).expect("valid");
    attempt("reach a host's socket", UnixStream::connect_addr(&address).map(drop));
    let host_process = Pid::from_raw(outside.pid);
    attempt("signal a host's process", nix::sys::signal::kill(host_process, None::<Signal>).map_err(Into::into));
    attempt("become root", nix::unistd::setuid(0.into()).map_err(Into::into));
    attempt("make a user namespace", in_child(|| nix::sched::unshare(CloneFlags::CLONE_NEWUSER)));
    attempt("make a mount namespace", in_child(|| nix::sched::unshare(CloneFlags::CLONE_NEWNS)));
    attempt(
        "mount over a directory",
        nix::mount::mount(Some("x"), "/tmp", Some("tmpfs"), MsFlags::empty(), None::<&str>).map_err(Into::into),
    );
    let shared = format!("/proc/self/fd/{}", outside.memory_fd);
    let write = fs::OpenOptions::new().write(true).open(shared).and_then(|file| {
        use std::os::unix::fs::FileExt;
        file.write_all_at(b"poison", 0)
    });
    attempt("change shared memory", write);

    let names = |path: &str| -> Vec<String> {
        let entries = fs::read_dir(path).expect("listed");
        entries.map(|entry| entry.expect("read").file_name().to_string_lossy().into_owned()).collect()
    };
    let status = fs::read_to_string("/proc/self/status").expect("read");
    let status = status.lines().filter_map(|line| line.split_once(":\t"));
    let devices = fs::read_to_string("/proc/self/net/dev").expect("read");
    let mut limit = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    // SAFETY: `limit` lives through the call.
    unsafe { libc::getrlimit(libc::RLIMIT_CORE, &mut limit) };
    let report = Report {
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        pid: std::process::id(),
        status: status.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect(),
        top_level: names("/"),
        files_outside_usual_places: ["/dev", "/tmp", "/boot", "/template"]
            .into_iter()
            .flat_map(|directory| names(directory).into_iter().map(move |name| format!("{directory}/{name}")))
            .collect(),
        processes: names("/proc").into_iter().filter(|name| name.parse::<u32>().is_ok()).collect(),
        interfaces: devices.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect(),
        descriptors: names("/proc/self/fd").iter().filter_map(|name| name.parse().ok()).collect(),
        environment: std::env::vars().map(|(key, _)| key).collect(),
        core_limit: limit.rlim_max,
        attempts,
    };
    fs::write(REPORT, serde_json::to_vec(&report).expect("serialised")).expect("written");
}

/// A process with threads cannot leave its user namespace in any case: a child with one thread tries.
fn in_child(act: impl FnOnce() -> nix::Result<()>) -> std::io::Result<()> {
    // SAFETY: the child makes one system call and exits.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Child => {
            let code = act().map_or_else(|error| error as i32, |()| 0);
            // SAFETY: ends the child at once, without running what the parent would run at exit.
            unsafe { libc::_exit(code) }
        }
        nix::unistd::ForkResult::Parent { child } => match nix::sys::wait::waitpid(child, None)? {
            nix::sys::wait::WaitStatus::Exited(_, 0) => Ok(()),
            nix::sys::wait::WaitStatus::Exited(_, code) => Err(std::io::Error::from_raw_os_error(code)),
            other => Err(std::io::Error::other(format!("{other:?}"))),
        },
    }
}

async fn run_probe() -> (Report, Vec<i32>) {
    let base = tempfile::tempdir().expect("a directory");
    let path = |name: &str| base.path().join(name);
    let program = std::env::current_exe().expect("this program");
    let root = RuntimeRoot::assemble(&path("runtime"), &program, &path("none"), &[]).await.expect("assembled");
    fs::create_dir(path("template")).expect("created");
    fs::set_permissions(path("template"), fs::Permissions::from_mode(0o755)).expect("set");
    fs::write(path("template/root.ext4"), "root").expect("written");
    fs::create_dir(path("layers")).expect("created");
    fs::set_permissions(path("layers"), fs::Permissions::from_mode(0o755)).expect("set");
    // As a layer is before it is frozen: nobody's, and no second name to write to it by.
    fs::write(path("layers/own.qcow2"), "layer").expect("written");
    give_to_nobody(&path("layers/own.qcow2")).expect("given");
    fs::write(path("secret"), "secret").expect("written");
    fs::write(path("memory"), vec![1; 8192]).expect("written");
    let (memory, _) = SealedMemory::load(&path("memory")).expect("loaded");

    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let abstract_socket = format!("stockade-jail-test-{}", std::process::id());
    let address = UnixAddress::from_abstract_name(&abstract_socket).expect("valid");
    let _unix = UnixListener::bind_addr(&address).expect("bound");
    // A descriptor somebody forgot to close on exec.
    let (leak, _keep) = nix::unistd::pipe2(OFlag::empty()).expect("made");

    let machine = path("machine");
    fs::create_dir(&machine).expect("created");
    let outside = Outside {
        tcp: listener.local_addr().expect("bound"),
        abstract_socket,
        secret_file: path("secret"),
        pid: i32::try_from(std::process::id()).expect("small"),
        memory_fd: memory.file().as_raw_fd(),
    };
    fs::write(machine.join("outside.json"), serde_json::to_vec(&outside).expect("serialised")).expect("written");
    give_to_nobody(&machine).expect("given");

    let (info, info_write) = nix::unistd::pipe2(OFlag::O_CLOEXEC).expect("made");
    let mount = |name: &str, is_writable| Mount { source: path(name), target: format!("/{name}"), is_writable };
    let jail = Jail {
        bubblewrap: Path::new("/usr/bin/bwrap"),
        root: &root.path,
        mounts: vec![mount("template", false), mount("layers", false), mount("machine", true)],
        with_kvm: false,
        info: info_write.as_raw_fd(),
        inherited: vec![memory.file().as_raw_fd()],
        limits: ProcessLimits { address_space_bytes: 1 << 36, file_bytes: 1 << 20, open_files: 64 },
    };
    let arguments = ["--exact", "qemu::jail_tests::probe", "--ignored", "--test-threads=1"].map(str::to_owned);
    let mut command = jail.command(&root.program, &arguments).expect("prepared");
    let output = command.stdin(Stdio::null()).output().await.expect("bwrap runs; apt-get install bubblewrap");
    drop((info, leak));
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report = fs::read(machine.join("report.json")).unwrap_or_else(|_| panic!("the probe left no report: {said}"));
    (serde_json::from_slice(&report).expect("valid"), vec![memory.file().as_raw_fd()])
}

#[tokio::test]
async fn a_program_in_the_emulators_place_sees_and_reaches_nothing_of_the_host() {
    let (report, inherited) = run_probe().await;
    let status = |key: &str| report.status.get(key).map_or("", String::as_str);

    assert_eq!((report.uid, report.gid, report.pid), (NOBODY, NOBODY, 1), "{report:#?}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(set), "0000000000000000", "{set}");
    }
    assert_eq!(status("NoNewPrivs"), "1");
    assert_eq!(status("Groups").replace("65534", "").trim(), "", "no group but nobody's");
    assert_eq!(report.core_limit, 0);

    let known = ["boot", "dev", "firmware", "lib", "lib64", "layers", "machine", "proc", "template", "tmp", "usr"];
    let own_program = std::env::current_exe().expect("this program");
    let own_top = own_program.components().nth(1).expect("absolute").as_os_str().to_string_lossy().into_owned();
    for name in &report.top_level {
        assert!(known.contains(&name.as_str()) || *name == own_top, "/{name} is visible");
    }
    // The probe is this program: where it was built in /tmp, its own path is there.
    let mut files: Vec<_> =
        report.files_outside_usual_places.iter().filter(|path| !own_program.starts_with(path)).collect();
    files.sort();
    let expected = ["/dev/kvm", "/dev/null", "/dev/urandom", "/template/root.ext4"];
    assert_eq!(files, expected, "an empty file stands where /dev/kvm may be mounted");
    assert_eq!(report.processes, ["1"]);
    assert_eq!(report.interfaces, ["lo"]);
    assert!(report.environment.iter().all(|name| name == "PWD" || name.starts_with("RUST_TEST")), "{report:#?}");
    // Standard input, output and error, what was meant to be inherited, and the listing itself.
    eprintln!("{:#?}", report.attempts);
    let foreign: Vec<_> = report.descriptors.iter().filter(|fd| **fd > 2 && !inherited.contains(*fd)).collect();
    assert!(foreign.len() <= 1, "{foreign:?}");
    assert!(inherited.iter().all(|fd| report.descriptors.contains(fd)));

    for (name, outcome) in &report.attempts {
        assert_eq!(outcome == "ok", name == "write to own directory", "{name}: {outcome}");
    }
    assert!(report.attempts.len() >= 20);
}
