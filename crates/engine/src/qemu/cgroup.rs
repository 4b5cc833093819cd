//! One control group a machine: what it may take of the host, what it took, and the one handle by which
//! all of its processes are found and ended.
//!
//! Version 1 has one tree per controller, version 2 one for all. Groups are made below the group this
//! process runs in (so its own limits hold for its machines too) and are called
//! `stockade-<digest of the data directory>-<machine>`, so that a sweep finds those without a record.
//!
//! Without the right to make groups a machine runs without: limits per process remain, the warning says so.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

const MOUNT: &str = "/sys/fs/cgroup";
/// Controllers of version 1 a machine is put in; `memory` first: it answers questions about the machine.
const V1_CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
const CPU_PERIOD_MICROS: u64 = 100_000;
/// How far below its mount a group is looked for.
const SEARCH_DEPTH: usize = 6;

/// What a machine may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CgroupLimits {
    pub(crate) memory_bytes: u64,
    /// Processor time per wall time, in hundredths.
    pub(crate) cpu_percent: u64,
    pub(crate) processes: u64,
}

/// Where groups can be made.
#[derive(Clone, Debug)]
pub(crate) struct Cgroups {
    prefix: String,
    layout: Layout,
}

#[derive(Clone, Debug)]
enum Layout {
    /// The parent group in each controller's tree.
    V1(Vec<PathBuf>),
    /// The parent group.
    V2(PathBuf),
    /// No group can be made; why.
    None(String),
}

/// One machine's group: its directory in each tree.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Cgroup {
    directories: Vec<PathBuf>,
}

impl Cgroups {
    /// Finds out where groups can be made. `owner` tells data directories apart.
    pub(crate) fn detect(owner: &str) -> Self {
        let prefix = format!("stockade-{owner}-");
        let layout = match fs::read_to_string("/proc/self/cgroup") {
            Ok(text) => detect_layout(Path::new(MOUNT), &text),
            Err(error) => Layout::None(format!("/proc/self/cgroup cannot be read: {error}")),
        };
        Self { prefix, layout }
    }

    /// Why machines run without limits for all their processes together; `None`: they do not.
    pub(crate) fn missing(&self) -> Option<&str> {
        match &self.layout {
            Layout::None(reason) => Some(reason),
            Layout::V1(_) | Layout::V2(_) => None,
        }
    }

    /// The group a machine of this name would have.
    pub(crate) fn name(&self, machine: &str) -> Cgroup {
        let name = format!("{}{machine}", self.prefix);
        let directories = match &self.layout {
            Layout::V1(parents) => parents.iter().map(|parent| parent.join(&name)).collect(),
            Layout::V2(parent) => vec![parent.join(&name)],
            Layout::None(_) => Vec::new(),
        };
        Cgroup { directories }
    }

    /// Makes a machine's group. An empty one where none can be made.
    pub(crate) fn create(&self, machine: &str, limits: &CgroupLimits) -> io::Result<Cgroup> {
        let group = self.name(machine);
        let made = group.directories.iter().try_for_each(|directory| {
            fs::create_dir(directory)?;
            apply_limits(directory, limits, matches!(self.layout, Layout::V2(_)))
        });
        if let Err(error) = made {
            group.remove_directories();
            return Err(error);
        }
        Ok(group)
    }

    /// Groups of this data directory that exist, by machine name, with or without a record.
    pub(crate) fn leftovers(&self) -> Vec<(String, Cgroup)> {
        let mut found = std::collections::BTreeMap::<String, Cgroup>::new();
        let mut roots: Vec<PathBuf> = V1_CONTROLLERS.iter().map(|name| Path::new(MOUNT).join(name)).collect();
        if !roots.iter().any(|root| root.is_dir()) {
            roots = vec![PathBuf::from(MOUNT)];
        }
        for root in roots {
            find_groups(&root, &self.prefix, SEARCH_DEPTH, &mut |machine, directory| {
                found.entry(machine).or_default().directories.push(directory);
            });
        }
        found.into_iter().collect()
    }
}

impl Cgroup {
    /// Moves processes into the group. Takes some milliseconds on a kernel that has to wait for readers.
    pub(crate) fn join(&self, pids: &[i32]) -> io::Result<()> {
        for directory in &self.directories {
            let path = directory.join("cgroup.procs");
            let mut file = OpenOptions::new().write(true).open(&path)?;
            for pid in pids {
                file.write_all(pid.to_string().as_bytes())
                    .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))?;
            }
        }
        Ok(())
    }

    /// Ids of the processes in it.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .directories
            .iter()
            .filter_map(|directory| fs::read_to_string(directory.join("cgroup.procs")).ok())
            .flat_map(|text| text.lines().filter_map(|line| line.trim().parse().ok()).collect::<Vec<i32>>())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Whether the kernel killed a process of it for lack of memory.
    pub(crate) fn was_out_of_memory(&self) -> bool {
        let killed = |file: PathBuf| {
            fs::read_to_string(file).is_ok_and(|text| {
                text.lines().filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count.trim() != "0")
            })
        };
        let mut directories = self.directories.iter();
        directories.any(|path| killed(path.join("memory.events")) || killed(path.join("memory.oom_control")))
    }

    /// Kills all that is in it now.
    pub(crate) fn kill(&self) {
        for directory in &self.directories {
            // Version 2 from Linux 5.14 on; elsewhere the file is not there.
            let _ = fs::write(directory.join("cgroup.kill"), "1");
        }
        for pid in self.processes() {
            // A process of this group; it cannot leave it and its id is not reused while it is listed.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }

    /// Ends all of its processes and removes it. Repeatable.
    pub(crate) async fn destroy(&self, patience: Duration) -> io::Result<()> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            if self.remove_directories() {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                let names: Vec<_> = self.directories.iter().map(|path| path.display().to_string()).collect();
                let reason = format!("{} still has processes {:?}", names.join(", "), self.processes());
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            self.kill();
            // The kernel tells nobody when a group of version 1 becomes empty.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Whether all are gone now.
    fn remove_directories(&self) -> bool {
        self.directories.iter().fold(true, |gone, directory| match fs::remove_dir(directory) {
            Ok(()) => gone,
            Err(error) => gone && error.kind() == io::ErrorKind::NotFound,
        })
    }
}

fn apply_limits(directory: &Path, limits: &CgroupLimits, is_v2: bool) -> io::Result<()> {
    let set = |file: &str, value: String| {
        fs::write(directory.join(file), value)
            .map_err(|error| io::Error::new(error.kind(), format!("{}/{file}: {error}", directory.display())))
    };
    let quota = limits.cpu_percent * CPU_PERIOD_MICROS / 100;
    let has = |file: &str| directory.join(file).exists();
    if is_v2 {
        set("memory.max", limits.memory_bytes.to_string())?;
        if has("memory.swap.max") {
            set("memory.swap.max", "0".to_owned())?;
        }
        set("cpu.max", format!("{quota} {CPU_PERIOD_MICROS}"))?;
        return set("pids.max", limits.processes.to_string());
    }
    if has("memory.limit_in_bytes") {
        set("memory.limit_in_bytes", limits.memory_bytes.to_string())?;
    }
    if has("cpu.cfs_quota_us") {
        set("cpu.cfs_period_us", CPU_PERIOD_MICROS.to_string())?;
        set("cpu.cfs_quota_us", quota.to_string())?;
    }
    if has("pids.max") {
        set("pids.max", limits.processes.to_string())?;
    }
    Ok(())
}

fn detect_layout(mount: &Path, own_groups: &str) -> Layout {
    let own = |controller: &str| own_group(own_groups, controller);
    if mount.join("memory").is_dir() {
        let parents: Option<Vec<PathBuf>> = V1_CONTROLLERS
            .iter()
            .map(|name| own(name).map(|path| mount.join(name).join(path.trim_start_matches('/'))))
            .collect();
        return match parents {
            Some(parents) => match parents.iter().find_map(|parent| why_not_writable(parent)) {
                None => Layout::V1(parents),
                Some(reason) => Layout::None(reason),
            },
            None => Layout::None(format!("not all of {V1_CONTROLLERS:?} are available as control groups")),
        };
    }
    let Some(path) = own("") else { return Layout::None("no control groups are mounted".to_owned()) };
    let parent = mount.join(path.trim_start_matches('/'));
    if let Some(reason) = why_not_writable(&parent) {
        return Layout::None(reason);
    }
    match enable_v2_controllers(&parent) {
        Ok(()) => Layout::V2(parent),
        Err(error) => Layout::None(format!("{}: {error}", parent.display())),
    }
}

/// A group with members cannot give controllers to children: this process moves to a child of its own first.
fn enable_v2_controllers(parent: &Path) -> io::Result<()> {
    let control = parent.join("cgroup.subtree_control");
    let wanted = "+memory +cpu +pids";
    if fs::write(&control, wanted).is_ok() {
        return Ok(());
    }
    let own = parent.join("stockade-server");
    match fs::create_dir(&own) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    fs::write(own.join("cgroup.procs"), "0")?;
    fs::write(&control, wanted)
}

/// The path of this process's group, from `/proc/self/cgroup`; an empty controller means version 2.
fn own_group<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_wanted = if controller.is_empty() {
            id == "0" && controllers.is_empty()
        } else {
            controllers.split(',').any(|name| name == controller)
        };
        is_wanted.then_some(path)
    })
}

fn why_not_writable(directory: &Path) -> Option<String> {
    match nix::unistd::access(directory, nix::unistd::AccessFlags::W_OK) {
        Ok(()) => None,
        Err(error) => Some(format!("no group can be made in {}: {error}", directory.display())),
    }
}

fn find_groups(directory: &Path, prefix: &str, depth: usize, found: &mut dyn FnMut(String, PathBuf)) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name();
        match name.to_string_lossy().strip_prefix(prefix) {
            Some(machine) => found(machine.to_owned(), entry.path()),
            None if depth > 1 => find_groups(&entry.path(), prefix, depth - 1, found),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "9:name=systemd:/\n8:pids:/a\n4:memory:/a/b\n2:cpu,cpuacct:/c\n0::/\n";

    #[test]
    fn own_groups_are_found_in_both_versions() {
        assert_eq!(own_group(V1, "memory"), Some("/a/b"));
        assert_eq!(own_group(V1, "cpu"), Some("/c"));
        assert_eq!(own_group("0::/user.slice/x.service\n", ""), Some("/user.slice/x.service"));
        assert_eq!(own_group("0::/\n", "memory"), None);
    }

    #[test]
    fn version_2_gets_its_limits_and_version_1_its_own() {
        let mount = tempfile::tempdir().expect("a directory");
        let limits = CgroupLimits { memory_bytes: 1 << 30, cpu_percent: 150, processes: 64 };
        apply_limits(mount.path(), &limits, true).expect("applied");
        let read = |name: &str| fs::read_to_string(mount.path().join(name)).expect(name);
        assert_eq!((read("memory.max").as_str(), read("pids.max").as_str()), ("1073741824", "64"));
        assert_eq!(read("cpu.max"), "150000 100000");

        for file in ["memory.limit_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"] {
            fs::write(mount.path().join(file), "").expect("written");
        }
        apply_limits(mount.path(), &limits, false).expect("applied");
        assert_eq!((read("cpu.cfs_quota_us").as_str(), read("cpu.cfs_period_us").as_str()), ("150000", "100000"));
    }

    #[test]
    fn without_any_mount_the_reason_is_told() {
        let mount = tempfile::tempdir().expect("a directory");
        let Layout::None(reason) = detect_layout(mount.path(), "") else { panic!("no layout is possible") };
        assert!(reason.contains("no control groups"), "{reason}");
    }
}
