//! Which processes there are.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use stockade_wire::{
    ErrorBody, ErrorCode,
    process::{ProcessInfo, ProcessList},
};
use tokio::sync::oneshot;

use super::{Process, pump::Ended};
use crate::failure::{Result, invalid};

/// Processes that may run at once.
const MAX_RUNNING: usize = 1024;
/// Ended processes kept for late readers. At this number the oldest goes, else they stay for good: an exit
/// code costs little.
const MAX_ENDED: usize = 256;
/// Output kept of all ended processes together.
const MAX_ENDED_BYTES: u64 = 8 << 20;

/// Names a process in a route.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Selector {
    Pid(u32),
    Tag(String),
}

impl Selector {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if let Some(tag) = text.strip_prefix("tag:") {
            let tag = percent_encoding::percent_decode_str(tag).decode_utf8();
            return tag.map(|tag| Self::Tag(tag.into_owned())).map_err(|_| invalid("tag is not valid UTF-8"));
        }
        text.parse().map(Self::Pid).map_err(|_| invalid(format!("'{text}' is not a process id")))
    }
}

/// The table of processes.
#[derive(Default)]
pub(crate) struct Processes {
    inner: Mutex<Inner>,
    reaper: Arc<()>,
}

#[derive(Default)]
struct Inner {
    by_pid: HashMap<u32, Arc<Process>>,
    /// Tag → process; 0 while it is starting.
    tags: BTreeMap<String, u32>,
    starting: usize,
    ended: VecDeque<Arc<Process>>,
    /// Children not yet reaped: where to tell their end.
    children: HashMap<i32, oneshot::Sender<Ended>>,
    /// Children that process 1 has reaped while some start was under way: one of them may be its child.
    unclaimed: HashMap<i32, Ended>,
}

/// A place in the table for a process about to start; given back unless the start succeeds.
pub(super) struct Place<'a> {
    processes: &'a Processes,
    tag: Option<String>,
    is_taken: bool,
}

impl Processes {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held by the one reaper there is; `None` if there is one.
    pub(super) fn reaper_token(&self) -> Option<Arc<()>> {
        let _inner = self.lock();
        (Arc::strong_count(&self.reaper) == 1).then(|| self.reaper.clone())
    }

    pub(super) fn reserve(&self, tag: Option<&str>) -> Result<Place<'_>> {
        let mut inner = self.lock();
        let running = inner.by_pid.len() - inner.ended.len() + inner.starting;
        if running >= MAX_RUNNING {
            return Err(ErrorBody::new(ErrorCode::LimitReached, format!("{MAX_RUNNING} processes run already")));
        }
        if let Some(tag) = tag {
            if let Some(pid) = inner.tags.get(tag)
                && inner.by_pid.get(pid).is_none_or(|process| process.log.exit().is_none())
            {
                return Err(ErrorBody::new(
                    ErrorCode::AlreadyExists,
                    format!("a process with tag '{tag}' runs already"),
                ));
            }
            inner.tags.insert(tag.to_owned(), 0);
        }
        inner.starting += 1;
        Ok(Place { processes: self, tag: tag.map(str::to_owned), is_taken: false })
    }

    /// Whether any is known, running or ended.
    pub(crate) fn are_any(&self) -> bool {
        !self.lock().by_pid.is_empty()
    }

    pub(super) fn list(&self) -> ProcessList {
        let inner = self.lock();
        let mut processes: Vec<ProcessInfo> = inner.by_pid.values().map(|process| process.describe()).collect();
        processes.sort_by_key(|process| (process.started_unix_ms, process.pid));
        ProcessList { processes }
    }

    pub(super) fn find(&self, selector: &Selector) -> Result<Arc<Process>> {
        let inner = self.lock();
        let (pid, name) = match selector {
            Selector::Pid(pid) => (Some(pid), format!("process {pid}")),
            Selector::Tag(tag) => (inner.tags.get(tag), format!("process with tag '{tag}'")),
        };
        pid.and_then(|pid| inner.by_pid.get(pid))
            .cloned()
            .ok_or_else(|| ErrorBody::new(ErrorCode::NoSuchProcess, format!("no {name}")))
    }

    /// Notes that a process has ended and forgets the oldest if there are too many.
    pub(super) fn ended(&self, process: &Arc<Process>) {
        let mut inner = self.lock();
        if !process.is_remembered {
            inner.forget(process);
            return;
        }
        inner.ended.push_back(process.clone());
        while inner.ended.len() > MAX_ENDED {
            if let Some(oldest) = inner.ended.pop_front() {
                inner.forget(&oldest);
            }
        }
        let mut kept = 0;
        for ended in inner.ended.iter().rev() {
            kept += ended.log.kept_bytes();
            if kept > MAX_ENDED_BYTES {
                ended.log.forget();
            }
        }
    }

    /// A child's end, whenever it comes: it may have been reaped before its start was done.
    pub(super) fn claim(&self, pid: i32) -> oneshot::Receiver<Ended> {
        let mut inner = self.lock();
        let (sender, receiver) = oneshot::channel();
        match inner.unclaimed.remove(&pid) {
            Some(ended) => drop(sender.send(ended)),
            None => drop(inner.children.insert(pid, sender)),
        }
        receiver
    }

    /// Children to be waited for.
    pub(super) fn children(&self) -> Vec<i32> {
        self.lock().children.keys().copied().collect()
    }

    /// Calls `wait` for a child if it is ours and not yet reaped; no other child can take its id meanwhile.
    pub(super) fn reap(&self, pid: i32, wait: impl FnOnce() -> Option<Ended>) {
        let mut inner = self.lock();
        if inner.children.contains_key(&pid)
            && let Some(ended) = wait()
            && let Some(sender) = inner.children.remove(&pid)
        {
            let _ = sender.send(ended);
        }
    }

    /// As process 1: reaps any child, an orphan as well.
    pub(super) fn reap_any(&self, pid: i32, wait: impl FnOnce() -> Option<Ended>) {
        let mut inner = self.lock();
        let Some(ended) = wait() else { return };
        if let Some(sender) = inner.children.remove(&pid) {
            let _ = sender.send(ended);
        } else if inner.starting > 0 {
            inner.unclaimed.insert(pid, ended);
        }
    }
}

impl Inner {
    /// A start is over, one way or the other.
    fn end_start(&mut self) {
        self.starting -= 1;
        if self.starting == 0 {
            self.unclaimed.clear();
        }
    }
}

impl Inner {
    fn forget(&mut self, process: &Arc<Process>) {
        let pid = process.info.pid;
        if self.by_pid.get(&pid).is_some_and(|known| Arc::ptr_eq(known, process)) {
            self.by_pid.remove(&pid);
            self.tags.retain(|_, tagged| *tagged != pid);
        }
    }
}

impl Place<'_> {
    /// The start succeeded. An ended process that had the same id is forgotten.
    pub(super) fn take(mut self, process: Arc<Process>) {
        let mut inner = self.processes.lock();
        let pid = process.info.pid;
        if let Some(old) = inner.by_pid.get(&pid).cloned() {
            inner.forget(&old);
            inner.ended.retain(|ended| !Arc::ptr_eq(ended, &old));
        }
        if let Some(tag) = &self.tag {
            inner.tags.insert(tag.clone(), pid);
        }
        inner.by_pid.insert(pid, process);
        inner.end_start();
        self.is_taken = true;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.is_taken {
            return;
        }
        let mut inner = self.processes.lock();
        inner.end_start();
        if let Some(tag) = &self.tag {
            inner.tags.remove(tag);
        }
    }
}
