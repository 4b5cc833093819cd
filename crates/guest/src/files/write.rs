//! Writing a file.
//!
//! In place: what is there is truncated and written; an existing file keeps mode and owner, and who watches
//! sees one file: created, changed (its owner), written. Atomic: a file beside it takes the bytes and then its
//! name; an existing file's mode and owner go with the name. Pieces are gathered up to [`PIECE`], so that
//! a small file costs one trip to a blocking thread and its watchers see one write.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::{Request, Response, body::Incoming};
use stockade_wire::{ErrorBody, ErrorCode, files::EntryInfo};

use super::{absolute, attributes, entry, read::check_regular};
use crate::{
    Agent,
    account::{Account, Names},
    bulk,
    failure::{Result, failed, invalid},
    http,
    http::{Query, Reply},
};

const PIECE: usize = 256 << 10;
/// A piece this small goes into the page cache at once.
const SMALL: usize = 64 << 10;
/// How a temporary file's name begins; a random number follows.
const TEMPORARY: &str = ".stockade-";

struct Order {
    path: String,
    account: Account,
    is_atomic: bool,
    mode: Option<u32>,
    attributes: Option<BTreeMap<String, String>>,
}

pub(super) async fn answer(agent: &Agent, request: Request<Incoming>) -> Result<Response<Reply>> {
    let query = Query::parse(request.uri().query())?;
    let account = agent.account(query.text("user"))?;
    let attributes = query.text("attributes").map(serde_json::from_str).transpose();
    let order = Order {
        path: absolute(query.text("path").unwrap_or_default(), &account.home)?,
        account: account.clone(),
        is_atomic: query.flag("atomic")?,
        mode: query.parsed("mode")?,
        attributes: attributes.map_err(|error| invalid(format!("`attributes` is malformed: {error}")))?,
    };
    if order.mode.is_some_and(|mode| mode > 0o7777) {
        return Err(invalid("`mode` is over 07777"));
    }
    let mut body = request.into_body();
    let (mut piece, mut is_last) = next_piece(&mut body).await?;
    let mut target = bulk::quick_as(&account, move || Target::open(order)).await?;
    loop {
        let is_small = piece.len() <= SMALL;
        let work = move || {
            target.write(&piece)?;
            Ok(target)
        };
        target = if is_small { bulk::quick(work).await? } else { bulk::run(work).await? };
        if is_last {
            break;
        }
        (piece, is_last) = next_piece(&mut body).await?;
    }
    http::json(&bulk::quick_as(&account, move || target.finish()).await?)
}

/// Up to [`PIECE`] bytes and whether they were the last.
async fn next_piece(body: &mut Incoming) -> Result<(BytesMut, bool)> {
    let mut piece = BytesMut::new();
    while piece.len() < PIECE {
        let Some(frame) = body.frame().await else { return Ok((piece, true)) };
        let frame = frame.map_err(|error| invalid(format!("the file's content broke off: {error}")))?;
        if let Ok(data) = frame.into_data() {
            piece.extend_from_slice(&data);
        }
    }
    Ok((piece, false))
}

/// A file being written. Dropped before it is finished, a temporary file is removed.
struct Target {
    order: Order,
    file: File,
    temporary: Option<Temporary>,
    /// The file was not there before.
    is_new: bool,
}

struct Temporary {
    path: PathBuf,
    /// What gets replaced: the path asked for, or what it leads to.
    replaces: PathBuf,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Target {
    fn open(order: Order) -> Result<Self> {
        make_parents(Path::new(&order.path))?;
        if order.is_atomic { Self::open_beside(order) } else { Self::open_in_place(order) }
    }

    fn open_in_place(order: Order) -> Result<Self> {
        let path = &order.path;
        let mode = order.mode.unwrap_or(0o666);
        let opened = options().create_new(true).mode(mode).open(path);
        let mut is_new = false;
        let file = match opened {
            Ok(file) => {
                is_new = true;
                claim(&file, &order.account).map_err(failed(format_args!("set the owner of '{path}'")))?;
                exact_mode(&file, order.mode).map_err(failed(format_args!("set the mode of '{path}'")))?;
                file
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => open_existing(&order)?,
            Err(error) => return Err(failed(format_args!("create '{path}'"))(error)),
        };
        Ok(Self { order, file, temporary: None, is_new })
    }

    fn open_beside(order: Order) -> Result<Self> {
        let path = Path::new(&order.path);
        let existing = match fs::canonicalize(path) {
            Ok(real) => Some(real),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(format_args!("look at '{}'", order.path))(error)),
        };
        let replaces = existing.clone().unwrap_or_else(|| path.to_owned());
        let directory = replaces.parent().unwrap_or(Path::new("/"));
        let temporary = directory.join(format!("{TEMPORARY}{:016x}", random()));
        // Who may not write the file may not replace it either, whatever the directory allows.
        let before = existing.map(|real| check_writable(&order.path, &real)).transpose()?;
        let file = options()
            .create_new(true)
            .mode(order.mode.unwrap_or(0o666))
            .open(&temporary)
            .map_err(failed(format_args!("create a file beside '{}'", order.path)))?;
        let target = Self { order, file, temporary: Some(Temporary { path: temporary, replaces }), is_new: false };
        target.inherit(before.as_ref())?;
        Ok(target)
    }

    /// Gives a temporary file the mode and owner of the file it will replace.
    fn inherit(&self, before: Option<&fs::Metadata>) -> Result<()> {
        let action = || failed(format!("set mode and owner of '{}'", self.order.path));
        let Some(before) = before else {
            return exact_mode(&self.file, self.order.mode).map_err(action());
        };
        let own = self.file.metadata().map_err(action())?;
        if (own.uid(), own.gid()) != (before.uid(), before.gid()) {
            fchown(&self.file, Some(before.uid()), Some(before.gid())).map_err(action())?;
        }
        self.file.set_permissions(before.permissions()).map_err(action())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Err(error) = self.file.write_all(bytes) else { return Ok(()) };
        self.take_back();
        Err(match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => {
                ErrorBody::new(ErrorCode::NoSpace, format!("no space left on the disk for '{}'", self.order.path))
            }
            _ => failed(format_args!("write '{}'", self.order.path))(error),
        })
    }

    /// Removes a new file that cannot be written, if its name still means it.
    fn take_back(&self) {
        let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        if self.is_new
            && let (Ok(own), Ok(named)) = (self.file.metadata(), fs::symlink_metadata(&self.order.path))
            && place(own) == place(named)
        {
            let _ = fs::remove_file(&self.order.path);
        }
    }

    fn finish(mut self) -> Result<EntryInfo> {
        let path = self.order.path.clone();
        if let Some(wanted) = &self.order.attributes {
            attributes::replace(&self.file, &path, wanted)?;
        }
        if let Some(temporary) = self.temporary.take() {
            fs::rename(&temporary.path, &temporary.replaces).map_err(failed(format_args!("replace '{path}'")))?;
            // Its name is gone: nothing is left to remove.
            std::mem::forget(temporary);
        }
        let metadata = self.file.metadata().map_err(failed(format_args!("look at '{path}'")))?;
        Ok(entry::entry(Path::new(&path), &metadata, &Names::load()))
    }
}

/// Never waits for the other side of a pipe.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    options
}

fn open_existing(order: &Order) -> Result<File> {
    let path = &order.path;
    match fs::metadata(path) {
        Ok(metadata) => check_regular(path, &metadata)?,
        // A link that leads nowhere: the file it names is made.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = options().create(true).truncate(false).mode(order.mode.unwrap_or(0o666)).open(path);
            return made.map_err(failed(format_args!("create what '{path}' leads to")));
        }
        Err(error) => return Err(failed(format_args!("look at '{path}'"))(error)),
    }
    let file = options().open(path).map_err(failed(format_args!("open '{path}'")))?;
    let metadata = file.metadata().map_err(failed(format_args!("look at '{path}'")))?;
    check_regular(path, &metadata)?;
    if metadata.size() > 0 {
        file.set_len(0).map_err(failed(format_args!("truncate '{path}'")))?;
    }
    Ok(file)
}

fn check_writable(path: &str, real: &Path) -> Result<fs::Metadata> {
    let metadata = fs::metadata(real).map_err(entry::missing(real))?;
    check_regular(path, &metadata)?;
    options().open(real).map_err(failed(format_args!("open '{path}'")))?;
    Ok(metadata)
}

/// The owner is right already; saying so is what the E2B clients' watchers wait for.
fn claim(file: &File, account: &Account) -> io::Result<()> {
    fchown(file, Some(account.uid), Some(account.gid))
}

/// A mode that was asked for is not subject to the umask.
fn exact_mode(file: &File, mode: Option<u32>) -> io::Result<()> {
    match mode {
        Some(mode) if file.metadata()?.mode() & 0o7777 != mode => {
            file.set_permissions(fs::Permissions::from_mode(mode))
        }
        _ => Ok(()),
    }
}

/// Makes missing directories on the way to a path: 0755, owned by who asks.
pub(super) fn make_parents(path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    if parent.is_dir() {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(parent);
    made.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => ErrorBody::new(
            ErrorCode::NotADirectory,
            format!("a part of '{}' is a file, not a directory", parent.display()),
        ),
        _ => failed(format_args!("make directory '{}'", parent.display()))(error),
    })
}

fn random() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: pointer and length are those of a live array. Should the call fail, the file's exclusive
    // creation still tells a clash.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    u64::from_ne_bytes(bytes)
}
