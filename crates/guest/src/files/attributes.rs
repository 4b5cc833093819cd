//! Extended attributes of the `user.` namespace.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_char},
    fs::File,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    path::Path,
};

use crate::failure::{Result, check, failed, invalid};

const PREFIX: &str = "user.";
/// What is read of one value at most; ext4 holds less.
const MAX_VALUE: usize = 64 << 10;

/// Those of a path whose name and value are UTF-8; links are not followed.
pub(super) fn of(path: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else { return found };
    // SAFETY: the path ends with NUL; pointer and length come from `names`.
    for name in names(|space, length| unsafe { libc::llistxattr(path.as_ptr(), space, length) }) {
        let Ok(key) = CString::new(name.as_str()) else { continue };
        let mut value = vec![0; MAX_VALUE];
        let space = value.as_mut_ptr().cast();
        // SAFETY: both strings end with NUL; pointer and length are those of a live buffer.
        let length = unsafe { libc::lgetxattr(path.as_ptr(), key.as_ptr(), space, MAX_VALUE) };
        if length < 0 {
            continue;
        }
        value.truncate(length as usize);
        if let (Some(name), Ok(value)) = (name.strip_prefix(PREFIX), String::from_utf8(value)) {
            found.insert(name.to_owned(), value);
        }
    }
    found
}

/// Makes an open file have exactly these.
pub(super) fn replace(file: &File, path: &str, wanted: &BTreeMap<String, String>) -> Result<()> {
    let fd = file.as_raw_fd();
    // SAFETY: pointer and length come from `names`.
    for name in names(|space, length| unsafe { libc::flistxattr(fd, space, length) }) {
        if name.strip_prefix(PREFIX).is_some_and(|name| wanted.contains_key(name)) {
            continue;
        }
        let key = CString::new(name).unwrap_or_default();
        // SAFETY: the string ends with NUL.
        let result = unsafe { libc::fremovexattr(fd, key.as_ptr()) };
        check(result.into()).map_err(failed(format_args!("remove an attribute of '{path}'")))?;
    }
    for (name, value) in wanted {
        let key =
            CString::new(format!("{PREFIX}{name}")).map_err(|_| invalid("an attribute's name contains a NUL byte"))?;
        // SAFETY: the string ends with NUL; pointer and length are those of a live string.
        let result = unsafe { libc::fsetxattr(fd, key.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
        check(result.into()).map_err(failed(format_args!("set attribute '{name}' of '{path}'")))?;
    }
    Ok(())
}

/// What a list call gives, `user.` alone. Most files have none: the size is asked for before making room.
fn names(list: impl Fn(*mut c_char, usize) -> isize) -> Vec<String> {
    let size = list(std::ptr::null_mut(), 0);
    if size <= 0 {
        return Vec::new();
    }
    let mut bytes = vec![0u8; size as usize];
    let size = list(bytes.as_mut_ptr().cast(), bytes.len());
    bytes.truncate(size.max(0) as usize);
    let names = bytes.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect()
}
