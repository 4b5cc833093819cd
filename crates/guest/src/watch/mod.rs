//! Watches directories.
//!
//! One inotify instance and one task per watch. The kernel's queue is the only buffer: a reader that does not read
//! lets it overflow, and is told so ([`Event::Overflow`]). Blocking work (adding watches, scanning) happens with
//! the rights of the user who asked.

mod body;
mod inotify;
mod tree;

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use hyper::Response;
use stockade_wire::{
    ErrorBody, ErrorCode,
    event::{Event, EventCodec},
    files::WatchRequest,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use crate::{
    Agent,
    account::Account,
    bulk,
    failure::{Result, failed},
    files,
    http::Reply,
};
use body::Frames;
use inotify::Inotify;
use tree::Tree;

/// Watches at once; each is an inotify instance.
const MAX_WATCHES: usize = 256;
/// Batches of events on their way to the reader.
const BATCHES: usize = 4;
/// A reader hears something at least this often.
const SILENCE: Duration = Duration::from_secs(15);
/// How long an upload waits for a watch that is held up by its reader.
const SETTLE_PATIENCE: Duration = Duration::from_millis(200);

type Settle = oneshot::Sender<()>;

/// The watches there are, for [`Agent::settle_watches`].
#[derive(Default)]
pub(crate) struct Watches(Mutex<Vec<mpsc::Sender<Settle>>>);

/// Begins a watch. Changes made after this returned are reported.
pub(crate) async fn start(agent: &Agent, request: WatchRequest) -> Result<Response<Reply>> {
    let account = agent.account(request.user.as_deref())?;
    let root = files::absolute(&request.path, &account.home)?;
    let (settle_sender, settle) = mpsc::channel(BATCHES);
    agent.shared().watches.add(settle_sender)?;
    let built = bulk::run_as(&account, move || {
        let inotify = Inotify::new().map_err(failed("begin a watch"))?;
        let tree = Tree::build(inotify.raw(), &root, request.recursive, request.entry)?;
        Ok((inotify, tree))
    });
    let (inotify, tree) = built.await?;
    let inotify = inotify.watched().map_err(failed("begin a watch"))?;
    let (sender, frames) = mpsc::channel(BATCHES);
    // There is room: the channel is new.
    let _ = sender.try_send(frame(&Event::Watching));
    tokio::spawn(Watch { account, inotify, tree: Some(tree), sender }.run(settle));
    Ok(Response::new(Reply::stream(Frames(frames))))
}

impl Watches {
    fn add(&self, watch: mpsc::Sender<Settle>) -> Result<()> {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.retain(|watch| !watch.is_closed());
        if watches.len() >= MAX_WATCHES {
            return Err(ErrorBody::new(ErrorCode::LimitReached, format!("{MAX_WATCHES} watches stand already")));
        }
        watches.push(watch);
        Ok(())
    }

    fn all(&self) -> Vec<mpsc::Sender<Settle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Agent {
    /// Waits until every watch has handed on what happened until now, so that who has seen a change
    /// answered finds it reported.
    pub(crate) async fn settle_watches(&self) {
        for watch in self.shared().watches.all() {
            let (done, wait) = oneshot::channel();
            if watch.try_send(done).is_ok() {
                let _ = timeout(SETTLE_PATIENCE, wait).await;
            }
        }
    }
}

struct Watch {
    account: Account,
    inotify: Inotify<tokio::io::unix::AsyncFd<std::os::fd::OwnedFd>>,
    /// Away while a blocking thread works on it.
    tree: Option<Tree>,
    sender: mpsc::Sender<Bytes>,
}

impl Watch {
    /// Runs until the reader goes or the watched directory does.
    async fn run(mut self, mut settle: mpsc::Receiver<Settle>) {
        loop {
            let settled = tokio::select! {
                () = self.sender.closed() => return,
                settled = settle.recv() => settled,
                waited = timeout(SILENCE, self.inotify.readable()) => {
                    if waited.is_err() && self.sender.send(frame(&Event::KeepAlive)).await.is_err() {
                        return;
                    }
                    None
                }
            };
            if !self.drain().await {
                return;
            }
            if let Some(settled) = settled {
                let _ = settled.send(());
            }
        }
    }

    /// Hands on all the kernel has queued. `false`: the watch has ended.
    async fn drain(&mut self) -> bool {
        loop {
            let raw = match self.inotify.read() {
                Ok(Some(raw)) => raw,
                Ok(None) => {
                    if let Some(tree) = &mut self.tree {
                        tree.settle();
                    }
                    return true;
                }
                Err(_) => return false,
            };
            let Some(mut tree) = self.tree.take() else { return false };
            // At once where it can be: what comes and goes in a new directory before that is watched is lost.
            let work = bulk::quick_as(&self.account, move || {
                let events = tree.digest(&raw);
                Ok((tree, events))
            });
            let Ok((tree, events)) = work.await else { return false };
            let has_ended = tree.has_ended();
            self.tree = Some(tree);
            let mut batch = BytesMut::new();
            for event in &events {
                EventCodec::put(event, &mut batch);
            }
            if !batch.is_empty() && self.sender.send(batch.freeze()).await.is_err() || has_ended {
                return false;
            }
        }
    }
}

fn frame(event: &Event) -> Bytes {
    let mut frame = BytesMut::new();
    EventCodec::put(event, &mut frame);
    frame.freeze()
}
