//! Makes a restored machine one of its own.
//!
//! This is on the path of every create, under emulation too: no process is started and everything may be done again.
//! An emulator translates what runs for the first time, so the way is short: names go to memory where the root file
//! system links them there, files are [held](crate::held) open, and what was done when the template booted is not done
//! again.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    sync::PoisonError,
};

use base64::Engine as _;
use stockade_wire::{
    ErrorBody, ErrorCode,
    machine::{self, Identity, Introduction},
};

use crate::{
    Agent,
    failure::{Result, check, failed, invalid},
    network,
};

/// Takes what it is told of itself.
pub(crate) fn introduce(agent: &Agent, introduction: Introduction) -> Result<()> {
    match introduction {
        Introduction::Identity(identity) => take(agent, identity),
        Introduction::Time(unix_time_ns) if agent.is_machine() => set_clock(unix_time_ns),
        Introduction::Time(_) => Ok(()),
    }
}

/// Takes an identity. Where the agent is only hosted, this sets environment and defaults alone.
fn take(agent: &Agent, mut identity: Identity) -> Result<()> {
    validate(&identity)?;
    if agent.is_machine() {
        set_clock(identity.unix_time_ns)?;
        let entropy = base64::engine::general_purpose::STANDARD
            .decode(&identity.entropy)
            .map_err(|_| invalid("entropy is not base64"))?;
        add_entropy(agent, &entropy)?;
        set_names(agent, &identity)?;
        for (path, text) in &identity.files {
            write(agent, Path::new(path), text)?;
        }
        // Who it was before is there, or is told so by the first command.
        if identity.default_user != agent.settings().default_user {
            crate::account::find(&identity.default_user)?;
        }
        if let Some(network) = &identity.network {
            let mut env = take_network(agent, network)?;
            env.append(&mut identity.env);
            identity.env = env;
        }
        if agent.has_processes() && Path::new(FOR_SERVICES).exists() {
            tell_services(&identity)?;
        }
    }
    let mut settings = agent.shared().settings.write().unwrap_or_else(PoisonError::into_inner);
    settings.env = identity.env;
    settings.default_user = identity.default_user;
    settings.default_cwd = identity.default_cwd;
    Ok(())
}

/// Returns what processes are told of it in their environment.
fn take_network(agent: &Agent, told: &machine::Network) -> Result<network::Trusted> {
    if told.reset_connections && agent.shared().held.may_have_connections() {
        // Where the kernel cannot, the gateway resets them as soon as they are used.
        network::reset_connections().ok();
    }
    let Some(authority) = &told.authority else { return Ok(network::Trusted::new()) };
    // What a machine trusts goes with its memory: it is done once, not again in each of its forks and resumes.
    let mut known = agent.shared().trusted.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, variables)) = known.as_ref().filter(|(known, _)| known == authority) {
        return Ok(variables.clone());
    }
    let variables = network::trust(authority).map_err(failed("trust the deployment's certificate authority"))?;
    *known = Some((authority.clone(), variables.clone()));
    Ok(variables)
}

fn validate(identity: &Identity) -> Result<()> {
    let name = &identity.hostname;
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if name.is_empty() || name.len() > 64 || !name.bytes().all(is_name_byte) {
        return Err(invalid(format!("'{name}' is not a host name")));
    }
    let id = &identity.machine_id;
    if id.len() != 32 || !id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(invalid(format!("'{id}' is not a machine id")));
    }
    if let Some(path) = identity.files.keys().find(|path| !path.starts_with('/') || path.contains('\0')) {
        return Err(invalid(format!("'{path}' is not an absolute path")));
    }
    crate::process::check_env(&identity.env)
}

/// For what was started before the machine had an identity, as part of its template: root alone can read it. A service
/// that wants to be told makes the file; to write it is a third of what a fork has to be told.
const FOR_SERVICES: &str = "/run/stockade/identity.json";

fn tell_services(identity: &Identity) -> Result<()> {
    let text = serde_json::json!({
        "sandbox_id": identity.sandbox_id,
        "template_id": identity.template_id,
        "env": identity.env,
    });
    let (path, new) = (Path::new(FOR_SERVICES), Path::new("/run/stockade/identity.json.new"));
    let attempt = || -> io::Result<()> {
        // Never readable by others, never half of it.
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(new)?;
        file.write_all(text.to_string().as_bytes())?;
        fs::rename(new, path)
    };
    attempt().map_err(failed(format_args!("write {FOR_SERVICES}")))
}

fn set_clock(unix_time_ns: u64) -> Result<()> {
    let time = libc::timespec {
        tv_sec: (unix_time_ns / 1_000_000_000) as i64,
        tv_nsec: (unix_time_ns % 1_000_000_000) as i64,
    };
    // SAFETY: `time` lives over the call.
    let result = unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) };
    check(result.into()).map(drop).map_err(failed("set the clock"))
}

const MAX_ENTROPY: usize = 512;
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;

/// Credits the bytes and has the generator take a new key from them at once: siblings restored from
/// the same memory would otherwise all draw the same numbers for a while.
fn add_entropy(agent: &Agent, entropy: &[u8]) -> Result<()> {
    if entropy.len() < 32 || entropy.len() > MAX_ENTROPY {
        return Err(invalid(format!("entropy must be 32 to {MAX_ENTROPY} bytes")));
    }
    #[repr(C)]
    struct PoolInfo {
        bits: i32,
        bytes: i32,
        pool: [u8; MAX_ENTROPY],
    }
    let mut info = PoolInfo { bits: entropy.len() as i32 * 8, bytes: entropy.len() as i32, pool: [0; MAX_ENTROPY] };
    info.pool[..entropy.len()].copy_from_slice(entropy);
    let fd = agent.shared().held.random().map_err(failed("open the random generator"))?;
    // SAFETY: `info` is laid out as struct rand_pool_info and lives over the call.
    let added = unsafe { libc::ioctl(fd, RNDADDENTROPY, &raw const info) };
    check(added.into()).map_err(failed("add to the random pool"))?;
    // SAFETY: this request takes no argument.
    let reseeded = unsafe { libc::ioctl(fd, RNDRESEEDCRNG) };
    check(reseeded.into()).map(drop).map_err(failed("re-key the random generator"))
}

const MACHINE_ID: &str = "/etc/machine-id";

/// A machine that is what it was, after a pause or a rollback, keeps its names and the id programs know it by.
fn set_names(agent: &Agent, identity: &Identity) -> Result<()> {
    let (name, id) = (&identity.hostname, &identity.machine_id);
    let is_itself = nix::unistd::gethostname().is_ok_and(|host| host.as_os_str() == name.as_str());
    if is_itself && fs::metadata(MACHINE_ID).is_ok_and(|id| id.len() > 0) {
        return Ok(());
    }
    // SAFETY: pointer and length are those of a live string.
    let result = unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) };
    check(result.into()).map_err(failed("set the host name"))?;
    write(agent, Path::new("/etc/hostname"), &format!("{name}\n"))?;
    write(agent, Path::new(MACHINE_ID), &format!("{id}\n"))?;
    if agent.shared().resolves_own_name {
        return Ok(());
    }
    let hosts = fs::read_to_string(HOSTS).unwrap_or_default();
    write(agent, Path::new(HOSTS), &hosts_with(&hosts, name))
}

const HOSTS: &str = "/etc/hosts";
/// The address Debian gives a machine's own name that has no other.
const OWN_ADDRESS: &str = "127.0.1.1";

/// The table with the machine's name in it. What else is there is somebody's work and stays.
fn hosts_with(hosts: &str, name: &str) -> String {
    let others = hosts.lines().filter(|line| line.split_whitespace().next() != Some(OWN_ADDRESS));
    let mut text: String = others.map(|line| format!("{line}\n")).collect();
    text.push_str(&format!("{OWN_ADDRESS}\t{name}\n"));
    text
}

fn write(agent: &Agent, path: &Path, text: &str) -> Result<()> {
    agent.shared().held.write(path, text, agent.was_used()).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC) => ErrorBody::new(ErrorCode::NoSpace, format!("no space to write {}", path.display())),
        _ => failed(format_args!("write {}", path.display()))(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_hosts_keeps_what_people_put_there() {
        let theirs = "# mine\n127.0.0.1\tlocalhost\n127.0.1.1\tsomebody-else\n10.1.2.3 db";
        let text = hosts_with(theirs, "sbx1");
        assert_eq!(text, "# mine\n127.0.0.1\tlocalhost\n10.1.2.3 db\n127.0.1.1\tsbx1\n");
        assert_eq!(hosts_with(&text, "sbx1"), text);
    }
}
