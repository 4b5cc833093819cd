//! What is left of a server and its machines on the host.

use std::{
    fmt,
    fs::{self, read_dir},
    path::{Path, PathBuf},
};

use serde_json::Value;

/// Everything on the host that belongs to one data directory.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Leftovers {
    /// Processes that name the directory, or see it in a mount namespace of their own.
    pub processes: Vec<(i32, String)>,
    /// Mounts below the directory in this process's namespace.
    pub mounts: Vec<String>,
    /// Control groups of its machines.
    pub cgroups: Vec<PathBuf>,
    /// Files of machines.
    pub files: Vec<PathBuf>,
}

impl Leftovers {
    /// Looks for all of it. `cgroup_prefix` as found by [`cgroup_prefix`] while machines ran.
    pub fn of(data_dir: &Path, cgroup_prefix: Option<&str>) -> Self {
        let own_mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let name = data_dir.to_string_lossy();
        Self {
            processes: processes(data_dir),
            mounts: own_mounts.lines().filter(|line| line.contains(&*name)).map(str::to_owned).collect(),
            cgroups: cgroup_prefix.map(|prefix| cgroups(|group| group.starts_with(prefix))).unwrap_or_default(),
            files: files(&data_dir.join("machines")),
        }
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:#?}")
    }
}

/// Processes other than this one that belong to a data directory.
pub(crate) fn processes(data_dir: &Path) -> Vec<(i32, String)> {
    let name = data_dir.to_string_lossy();
    let own_namespace = fs::read_link("/proc/self/ns/mnt").ok();
    let own_pid = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in read_dir("/proc").into_iter().flatten().flatten() {
        let pid = entry.file_name().to_string_lossy().into_owned();
        let Ok(number) = pid.parse() else { continue };
        let read = |file: &str| fs::read(entry.path().join(file)).unwrap_or_default();
        let command = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        // A process that has ended and waits to be reaped has neither.
        let in_other_namespace = fs::read_link(entry.path().join("ns/mnt")).ok() != own_namespace;
        let sees_it = in_other_namespace && String::from_utf8_lossy(&read("mountinfo")).contains(&*name);
        if pid != own_pid && (command.contains(&*name) || sees_it) {
            found.push((number, command));
        }
    }
    found
}

/// What the names of a data directory's control groups begin with, if a machine of it runs in one.
pub(crate) fn cgroup_prefix(data_dir: &Path) -> Option<String> {
    let records = read_dir(data_dir.join("machines")).into_iter().flatten().flatten().filter_map(|machine| {
        serde_json::from_slice::<Value>(&fs::read(machine.path().join("machine.json")).ok()?).ok()
    });
    // `stockade-<digest of the data directory>-<machine>`
    let prefix = |record: Value| {
        let group = record["cgroup"]["directories"][0].as_str()?;
        let name = Path::new(group).file_name()?.to_str()?;
        Some(name[..=name.rfind('-')?].to_owned())
    };
    records.filter_map(prefix).next()
}

fn cgroups(is_wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = pending.pop() {
        for entry in read_dir(directory).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if is_wanted(&entry.file_name().to_string_lossy()) {
                found.push(entry.path());
            }
            pending.push(entry.path());
        }
    }
    found
}

fn files(directory: &Path) -> Vec<PathBuf> {
    read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
