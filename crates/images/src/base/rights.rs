//! Who may make root file systems, and how.

use std::{fs, path::Path};

use nix::unistd::{Uid, User, geteuid};

use crate::{ImageError, program::Program};

/// How this process can build a Debian root file system.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BuildMode {
    /// As root, in mount and process namespaces of its own where the kernel allows.
    Root,
    /// As an ordinary user with a range of subordinate ids.
    UserNamespace,
    /// As an ordinary user with the owners of files made up (fakeroot and fakechroot).
    FakeRoot,
}

impl BuildMode {
    /// The best mode that works here.
    ///
    /// # Errors
    /// [`ImageError::NoRights`] says what is missing.
    pub fn choose() -> Result<Self, ImageError> {
        let user = geteuid();
        if user.is_root() {
            return Ok(Self::Root);
        }
        match why_no_user_namespace(user) {
            None => Ok(Self::UserNamespace),
            Some(_) if in_path("fakeroot") && in_path("fakechroot") => Ok(Self::FakeRoot),
            Some(why) => Err(ImageError::NoRights { why }),
        }
    }

    /// mmdebstrap in this mode.
    pub(super) async fn mmdebstrap(self) -> Program {
        const ACTION: &str = "build the base root file system";
        match self {
            Self::Root => {
                // Its mounts must not be seen from outside, and go, like its processes, when it goes:
                // what is mounted in the tree includes the host's /dev/shm.
                let isolate =
                    ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private", "--"];
                let trial = Program::new("unshare", "util-linux", "make namespaces").args(isolate).arg("true");
                let program = if trial.output().await.is_ok() {
                    // unshare itself ends with us, even if we are killed.
                    Program::new("setpriv", "util-linux", ACTION)
                        .args(["--pdeathsig=KILL", "--", "unshare"])
                        .args(isolate)
                        .arg("mmdebstrap")
                } else {
                    Program::new("mmdebstrap", "mmdebstrap", ACTION)
                };
                program.arg("--mode=root")
            }
            Self::UserNamespace => Program::new("mmdebstrap", "mmdebstrap", ACTION).arg("--mode=unshare"),
            Self::FakeRoot => Program::new("mmdebstrap", "mmdebstrap", ACTION).arg("--mode=fakechroot"),
        }
    }
}

fn why_no_user_namespace(user: Uid) -> Option<String> {
    let name = User::from_uid(user).ok().flatten().map(|user| user.name).unwrap_or_default();
    for file in ["/etc/subuid", "/etc/subgid"] {
        let text = fs::read_to_string(file).unwrap_or_default();
        let owners = text.lines().filter_map(|line| line.split(':').next());
        if !owners.clone().any(|owner| owner == name || owner == user.to_string()) {
            return Some(format!(
                "{file} gives user {name:?} no range of ids (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name})"
            ));
        }
    }
    if !in_path("newuidmap") {
        return Some("newuidmap is not installed (apt-get install uidmap)".to_owned());
    }
    let closed = |path: &str| fs::read_to_string(path).is_ok_and(|text| text.trim() == "0");
    for path in ["/proc/sys/kernel/unprivileged_userns_clone", "/proc/sys/user/max_user_namespaces"] {
        if closed(path) {
            return Some(format!("the kernel gives ordinary users no user namespaces ({path} is 0)"));
        }
    }
    None
}

fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).exists())
        || Path::new("/usr/sbin").join(program).exists()
}
