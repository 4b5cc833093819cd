//! Kernel modules the initial file system brings along, in the order of `/modules/order` (one file name a
//! line).

use std::{
    fs::{self, File},
    io,
};

use nix::kmod::{ModuleInitFlags, finit_module};

use super::{InitError, cannot};

const DIRECTORY: &str = "/modules";

pub(super) fn load_all() -> Result<(), InitError> {
    let order = match fs::read_to_string(format!("{DIRECTORY}/order")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(cannot(format!("read {DIRECTORY}/order")))?,
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        let path = format!("{DIRECTORY}/{name}");
        let file = File::open(&path).map_err(cannot(format!("open {path}")))?;
        match finit_module(&file, c"", ModuleInitFlags::empty()) {
            Ok(()) | Err(nix::Error::EEXIST) => {}
            Err(errno) => return Err(cannot(format!("load module {name}"))(errno.into())),
        }
    }
    Ok(())
}
