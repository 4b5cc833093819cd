//! Programs we run, and the features of theirs we need.

use super::{Check, as_root, try_run};

/// Oldest QEMU the engine has been tried with.
const OLDEST_QEMU: (u32, u32) = (7, 2);
/// What a machine is made of.
const DEVICES: [&str; 4] = ["virtio-blk-device", "virtio-serial-device", "virtserialport", "virtio-rng-device"];

pub(super) async fn checks() -> Vec<Check> {
    vec![
        qemu().await,
        program("qemu-img", "qemu-img", &["--version"], "qemu-utils").await,
        program("bubblewrap", "bwrap", &["--version"], "bubblewrap").await,
        program("mmdebstrap", "mmdebstrap", &["--version"], "mmdebstrap").await,
        program("apt", "apt-get", &["--version"], "apt").await,
        program("e2fsprogs", "mkfs.ext4", &["-V"], "e2fsprogs").await,
    ]
}

async fn program(name: &'static str, program: &str, arguments: &[&str], package: &str) -> Check {
    let remedy = as_root(&format!("apt-get install --yes {package}"));
    // Tools of the system administrator are not on every user's path.
    let found = match try_run(program, arguments).await {
        Err(_) => {
            try_run(&format!("/usr/sbin/{program}"), arguments).await.map_err(|_| format!("{program} is not installed"))
        }
        found => found,
    };
    match found {
        Ok(output) if output.status.success() => {
            let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
            Check::ok(name, String::from_utf8_lossy(&text).lines().next().unwrap_or(program).trim())
        }
        Ok(output) => Check::fail(name, format!("{program} does not work: {}", output.status), remedy),
        Err(why) => Check::fail(name, why, remedy),
    }
}

async fn qemu() -> Check {
    const NAME: &str = "qemu";
    let remedy = as_root("apt-get install --yes qemu-system-x86");
    let program = "qemu-system-x86_64";
    let text = match try_run(program, &["--version"]).await {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        Ok(output) => return Check::fail(NAME, format!("{program} does not work: {}", output.status), remedy),
        Err(why) => return Check::fail(NAME, why, remedy),
    };
    let line = text.lines().next().unwrap_or_default().trim().to_owned();
    match version(&line) {
        Some(version) if version >= OLDEST_QEMU => {}
        _ => return Check::fail(NAME, format!("{line} is older than {}.{}", OLDEST_QEMU.0, OLDEST_QEMU.1), remedy),
    }
    let help = async |what: &str| match try_run(program, &[what, "help"]).await {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => String::new(),
    };
    if !help("-machine").await.lines().any(|line| line.starts_with("microvm")) {
        return Check::fail(NAME, format!("{line} has no machine type microvm"), remedy);
    }
    let devices = help("-device").await;
    let missing: Vec<_> = DEVICES.into_iter().filter(|device| !devices.contains(&format!("\"{device}\""))).collect();
    if !missing.is_empty() {
        return Check::fail(NAME, format!("{line} lacks {}", missing.join(", ")), remedy);
    }
    Check::ok(NAME, format!("{line}, with microvm and its devices"))
}

fn version(line: &str) -> Option<(u32, u32)> {
    let mut parts = line.split("version ").nth(1)?.split(|character: char| !character.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_as_distributions_print_it() {
        assert_eq!(version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)"), Some((7, 2)));
        assert_eq!(version("QEMU emulator version 10.0.2"), Some((10, 0)));
        assert_eq!(version("something else"), None);
    }
}
