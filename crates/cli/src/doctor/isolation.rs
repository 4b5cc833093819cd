//! What walls a guest in: KVM, namespaces, cgroups.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::unistd::{AccessFlags, access};

use super::{Check, as_root, try_run};
use crate::{args::Accel, server::engine};

const SLOWER: &str = "sandboxes run emulated: about 10 times slower, and the jail is the wall, not the processor";

/// By booting the guests' own kernel on it, which takes a moment where it does not work.
pub(super) async fn kvm(data_dir: &Path) -> Check {
    const NAME: &str = "kvm";
    let device = Path::new("/dev/kvm");
    if !device.exists() {
        let finding = format!("there is no /dev/kvm; {SLOWER}");
        return Check::warn(NAME, finding, as_root("modprobe --all kvm_intel kvm_amd"));
    }
    if access(device, AccessFlags::R_OK | AccessFlags::W_OK).is_err() {
        let finding = format!("this user may not open /dev/kvm; {SLOWER}");
        return Check::warn(NAME, finding, as_root("usermod --append --groups kvm $USER"));
    }
    let kernel_dir = data_dir.join("kernel");
    if !kernel_dir.join("initramfs").exists() {
        let finding = "/dev/kvm is there; whether a guest runs on it is tried once there is a kernel";
        return Check::warn(NAME, finding, "stockade up, then stockade doctor");
    }
    let place = match tempfile::TempDir::with_prefix("stockade-doctor-") {
        Ok(place) => place,
        Err(error) => return Check::warn(NAME, format!("cannot be tried: {error}"), "free some space in /tmp"),
    };
    match engine::open(place.path(), &kernel_dir, Accel::Kvm, 0).await {
        Ok(_) => Check::ok(NAME, "a guest's kernel runs on it"),
        Err(failure) => {
            let finding = format!("{failure}; {SLOWER}");
            Check::warn(NAME, finding, "nothing to do here; on real hardware enable virtualisation in the firmware")
        }
    }
}

/// By making a jail like the emulator's.
pub(super) async fn namespaces() -> Check {
    const NAME: &str = "namespaces";
    let jail = ["--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"];
    let links =
        ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev"];
    let arguments: Vec<&str> = jail.into_iter().chain(links).chain(["/usr/bin/true"]).collect();
    let why = match try_run("bwrap", &arguments).await {
        Ok(output) if output.status.success() => {
            return Check::ok(NAME, "a jail with namespaces of its own can be made");
        }
        Ok(output) => format!("no jail can be made: {}", String::from_utf8_lossy(&output.stderr).trim()),
        Err(why) => return Check::fail(NAME, why, as_root("apt-get install --yes bubblewrap")),
    };
    Check::fail(NAME, why, as_root(namespace_remedy()))
}

fn namespace_remedy() -> &'static str {
    let setting =
        |name: &str| fs::read_to_string(Path::new("/proc/sys").join(name)).map(|value| value.trim().to_owned());
    if setting("kernel/unprivileged_userns_clone").is_ok_and(|value| value == "0") {
        return "sysctl --write kernel.unprivileged_userns_clone=1";
    }
    if setting("kernel/apparmor_restrict_unprivileged_userns").is_ok_and(|value| value == "1") {
        return "sysctl --write kernel.apparmor_restrict_unprivileged_userns=0";
    }
    "sysctl --write user.max_user_namespaces=15000"
}

pub(super) fn cgroups() -> Check {
    const NAME: &str = "cgroups";
    let remedy = "systemd-run --user --scope --property=Delegate=yes stockade up";
    let unlimited = "memory and processor limits of machines cannot be enforced";
    let Some(own) = own_cgroup() else {
        return Check::warn(
            NAME,
            format!("no cgroup file system with memory and cpu controllers; {unlimited}"),
            as_root("mount --types cgroup2 none /sys/fs/cgroup"),
        );
    };
    if own.iter().all(|directory| access(directory, AccessFlags::W_OK).is_ok()) {
        let paths: Vec<_> = own.iter().map(|directory| directory.display().to_string()).collect();
        return Check::ok(NAME, format!("{} can be written", paths.join(" and ")));
    }
    Check::warn(NAME, format!("this user may not make cgroups; {unlimited}"), remedy)
}

/// The directories our own cgroups would be made in: one of v2, or one per controller of v1.
fn own_cgroup() -> Option<Vec<PathBuf>> {
    let memberships = fs::read_to_string("/proc/self/cgroup").ok()?;
    let find = |controllers: &str| {
        let of = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            let names = parts.next()?;
            let path = parts.next()?;
            names.split(',').any(|name| name == controllers).then(|| path.trim_start_matches('/').to_owned())
        };
        memberships.lines().find_map(of)
    };
    if let Ok(controllers) = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers")
        && ["memory", "cpu"].iter().all(|wanted| controllers.split_whitespace().any(|have| have == *wanted))
    {
        return Some(vec![Path::new("/sys/fs/cgroup").join(find("")?)]);
    }
    let v1 = |controller: &str| {
        let directory = Path::new("/sys/fs/cgroup").join(controller);
        let own = directory.join(find(controller)?);
        // In a container the path may be that of the host.
        Some(if own.exists() { own } else { directory }).filter(|directory| directory.exists())
    };
    Some(vec![v1("memory")?, v1("cpu")?])
}
