//! Reading a file: opened with the user's rights, then read in pieces as the link takes them.

use std::{
    collections::VecDeque,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{BufMut, Bytes, BytesMut};
use http_body::{Body, Frame};
use hyper::{Request, Response, body::Incoming};
use stockade_wire::{ErrorBody, ErrorCode, files::EntryInfo};
use tokio::task::JoinHandle;

use super::{absolute, entry};
use crate::{
    Agent,
    account::Names,
    bulk,
    failure::{Result, failed, invalid},
    http::{Query, Reply},
};

/// What one trip to a blocking thread reads: enough that the trip costs little, small enough to hold two.
const PIECE: usize = 256 << 10;
const FRAME: usize = 32 << 10;

pub(super) async fn answer(agent: &Agent, request: Request<Incoming>) -> Result<Response<Reply>> {
    let query = Query::parse(request.uri().query())?;
    let account = agent.account(query.text("user"))?;
    let path = absolute(query.text("path").unwrap_or_default(), &account.home)?;
    let offset = query.parsed("offset")?.unwrap_or(0);
    let length = query.parsed("length")?.unwrap_or(u64::MAX);
    let opened = bulk::quick_as(&account, move || {
        let (file, info) = open(&path)?;
        let piece = read_piece(&file, offset, length).map_err(failed(format_args!("read '{path}'")))?;
        Ok((file, info, piece))
    });
    let (file, info, piece) = opened.await?;
    let head = serde_json::to_vec(&info).unwrap_or_default();
    let mut first = BytesMut::with_capacity(4 + head.len() + piece.len().min(FRAME));
    first.put_u32(head.len() as u32);
    first.put_slice(&head);
    let mut body = FileBody { file: Arc::new(file), offset, left: length, frames: VecDeque::new(), next: None };
    body.frames.push_back(first.freeze());
    body.take(piece);
    Ok(Response::new(Reply::stream(body)))
}

/// Opens a regular file. Others are refused before they are opened: opening a device or a pipe has effects,
/// and reading one may never end.
fn open(path: &str) -> Result<(File, EntryInfo)> {
    let at = Path::new(path);
    let metadata = std::fs::metadata(at).map_err(entry::missing(at))?;
    check_regular(path, &metadata)?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(at)
        .map_err(failed(format_args!("open '{path}'")))?;
    let metadata = file.metadata().map_err(failed(format_args!("look at '{path}'")))?;
    check_regular(path, &metadata)?;
    Ok((file, entry::entry(at, &metadata, &Names::load())))
}

pub(super) fn check_regular(path: &str, metadata: &std::fs::Metadata) -> Result<()> {
    if metadata.is_dir() {
        return Err(ErrorBody::new(ErrorCode::IsADirectory, format!("path '{path}' is a directory")));
    }
    if !metadata.is_file() {
        return Err(invalid(format!("path '{path}' is a device, pipe or socket, not a regular file")));
    }
    Ok(())
}

fn read_piece(file: &File, offset: u64, left: u64) -> io::Result<Bytes> {
    let mut piece = vec![0; PIECE.min(usize::try_from(left).unwrap_or(PIECE))];
    let mut filled = 0;
    while filled < piece.len() {
        match file.read_at(&mut piece[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    piece.truncate(filled);
    if filled < PIECE / 2 {
        piece.shrink_to_fit();
    }
    Ok(piece.into())
}

struct FileBody {
    file: Arc<File>,
    offset: u64,
    left: u64,
    frames: VecDeque<Bytes>,
    next: Option<JoinHandle<io::Result<Bytes>>>,
}

impl FileBody {
    /// Cuts a piece into frames, so that other streams get their turn, and reads ahead unless it was the last.
    fn take(&mut self, mut piece: Bytes) {
        let is_last = piece.len() < PIECE;
        self.offset = self.offset.saturating_add(piece.len() as u64);
        self.left -= piece.len() as u64;
        while !piece.is_empty() {
            self.frames.push_back(piece.split_to(piece.len().min(FRAME)));
        }
        if !is_last && self.left > 0 {
            let (file, offset, left) = (self.file.clone(), self.offset, self.left);
            self.next = Some(tokio::task::spawn_blocking(move || read_piece(&file, offset, left)));
        }
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let body = self.get_mut();
        if body.frames.is_empty()
            && let Some(next) = &mut body.next
        {
            let piece = ready!(Pin::new(next).poll(context)).map_err(io::Error::other)??;
            body.next = None;
            body.take(piece);
        }
        Poll::Ready(body.frames.pop_front().map(|frame| Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.next.is_none()
    }
}
