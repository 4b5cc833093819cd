//! Users and groups, read from `/etc/passwd` and `/etc/group` by ourselves: a static program has no
//! name service.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt as _,
    sync::{Mutex, PoisonError},
};

use stockade_wire::{ErrorBody, ErrorCode};

use crate::failure::Result;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// Somebody commands run as and files belong to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Account {
    /// Login name.
    pub(crate) name: String,
    /// User id.
    pub(crate) uid: u32,
    /// Primary group.
    pub(crate) gid: u32,
    /// All groups, the primary one included.
    pub(crate) groups: Vec<u32>,
    /// Home directory.
    pub(crate) home: String,
    /// Login shell.
    pub(crate) shell: String,
    /// The agent must change into it; false where it already is this user.
    pub(crate) is_foreign: bool,
}

/// Finds an account by name (or, failing that, by decimal id).
pub(crate) fn find(name: &str) -> Result<Account> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    // Looked at before the tables are read: a change in between is seen the next time.
    let versions = [version_of(PASSWD), version_of(GROUP)];
    if known.versions != versions || known.accounts.len() >= MOST_KNOWN {
        *known = Known { versions, accounts: Vec::new() };
    }
    if let Some((_, account)) = known.accounts.iter().find(|(asked, _)| asked == name) {
        return Ok(account.clone());
    }
    let account = look_up(name)?;
    known.accounts.push((name.to_owned(), account.clone()));
    Ok(account)
}

/// Accounts that were found, as long as the tables are the same: every command asks for one.
static KNOWN: Mutex<Known> = Mutex::new(Known { versions: [None; 2], accounts: Vec::new() });

const MOST_KNOWN: usize = 32;

struct Known {
    versions: [Option<Version>; 2],
    /// By what was asked for.
    accounts: Vec<(String, Account)>,
}

/// Device, inode, size, and when content and inode were last changed.
type Version = (u64, u64, u64, [i64; 4]);

fn version_of(path: &str) -> Option<Version> {
    let now = fs::metadata(path).ok()?;
    Some((now.dev(), now.ino(), now.len(), [now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec()]))
}

fn look_up(name: &str) -> Result<Account> {
    let passwd = read(PASSWD)?;
    let line = passwd
        .lines()
        .filter_map(Line::parse)
        .find(|line| line.name == name)
        .or_else(|| {
            let uid: u32 = name.parse().ok()?;
            passwd.lines().filter_map(Line::parse).find(|line| line.uid == uid)
        })
        .ok_or_else(|| ErrorBody::new(ErrorCode::UnknownUser, format!("user '{name}' does not exist")))?;
    Ok(Account {
        name: line.name.to_owned(),
        uid: line.uid,
        gid: line.gid,
        groups: groups_of(line.name, line.gid, &read(GROUP).unwrap_or_default()),
        home: if line.home.is_empty() { "/" } else { line.home }.to_owned(),
        shell: if line.shell.is_empty() { "/bin/sh" } else { line.shell }.to_owned(),
        is_foreign: true,
    })
}

/// The account of a user id, if it has a name.
pub(crate) fn name_of(uid: u32) -> Option<String> {
    let passwd = read(PASSWD).ok()?;
    passwd.lines().filter_map(Line::parse).find(|line| line.uid == uid).map(|line| line.name.to_owned())
}

/// A user id or group id given by name or in digits.
pub(crate) fn user_id(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    find(name).map(|account| account.uid)
}

/// A group id given by name or in digits.
pub(crate) fn group_id(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let groups = read(GROUP)?;
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
        })
        .next()
        .ok_or_else(|| ErrorBody::new(ErrorCode::UnknownUser, format!("group '{name}' does not exist")))
}

/// Names of ids, for listings; read once per listing.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// Reads both files; what cannot be read has no names.
    pub(crate) fn load() -> Self {
        Self { users: names_in(&read(PASSWD).unwrap_or_default()), groups: names_in(&read(GROUP).unwrap_or_default()) }
    }

    /// The user's name, or its id in digits.
    pub(crate) fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// The group's name, or its id in digits.
    pub(crate) fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

/// Both files have the name in the first field and the id in the third.
fn names_in(text: &str) -> HashMap<u32, String> {
    let mut names = HashMap::new();
    for line in text.lines() {
        let mut fields = line.split(':');
        if let (Some(name), Some(Ok(id))) = (fields.next(), fields.nth(1).map(str::parse)) {
            names.entry(id).or_insert_with(|| name.to_owned());
        }
    }
    names
}

struct Line<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1)?;
        Some(Self { name, uid, gid, home, shell: fields.next().unwrap_or_default() })
    }
}

fn groups_of(name: &str, primary: u32, text: &str) -> Vec<u32> {
    let mut groups = vec![primary];
    for line in text.lines() {
        let mut fields = line.split(':').skip(2);
        let (Some(Ok(gid)), Some(members)) = (fields.next().map(str::parse), fields.next()) else { continue };
        if !groups.contains(&gid) && members.split(',').any(|member| member.trim() == name) {
            groups.push(gid);
        }
    }
    groups
}

/// Names need not be UTF-8; a name that is not is no name anyone can ask for.
fn read(path: &str) -> Result<String> {
    let bytes: io::Result<Vec<u8>> = fs::read(path);
    let bytes = bytes.map_err(crate::failure::failed(format_args!("read {path}")))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_the_primary_one_and_those_that_list_the_name() {
        let text = "root:x:0:\nsudo:x:27:user,other\nplugdev:x:46:username\nuser:x:1000:user\nbroken\n";
        assert_eq!(groups_of("user", 1000, text), [1000, 27]);
    }

    #[test]
    fn a_line_without_a_shell_or_with_rubbish_does_not_confuse_the_rest() {
        assert!(Line::parse("rubbish").is_none());
        assert!(Line::parse(":x:1:1:::").is_none());
        let line = Line::parse("user:x:1000:1001:,,,:/home/user:/bin/bash").expect("a good line");
        assert_eq!((line.uid, line.gid, line.home, line.shell), (1000, 1001, "/home/user", "/bin/bash"));
        assert_eq!(Line::parse("u:x:1:2::/h").expect("no shell").shell, "");
    }

    #[test]
    fn an_unknown_user_is_named_in_the_error() {
        let error = find("no-such-user").expect_err("nobody has this name");
        assert_eq!(error.code, ErrorCode::UnknownUser);
        assert!(error.message.contains("no-such-user"));
    }
}
