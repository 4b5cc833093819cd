//! Values that were made, until shortly before they expire. One task makes a value however many wait for it, and goes
//! on when the one who asked first goes away.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{FutureExt as _, future::BoxFuture, future::Shared};
use stockade_gateway::broker::SecretError;
use stockade_model::{SandboxId, Secret, WorkspaceId};
use tokio::sync::Semaphore;

use super::Fresh;

const MOST_VALUES: usize = 16_384;
/// Made at a time.
const MOST_TASKS: usize = 64;
/// Made at a time for one sandbox: a guest makes up hosts under a wildcard faster than values are made.
const MOST_TASKS_OF_ONE: usize = 8;
/// A failure counts for this long, so that a guest that tries again at once does not ask the maker as often.
const FAILED_FOR: Duration = Duration::from_secs(1);

/// What a value depends on.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Key {
    pub(crate) secret: String,
    /// Of what the maker is told; a change of it is another secret.
    pub(crate) version: u64,
    pub(crate) workspace: Option<WorkspaceId>,
    pub(crate) sandbox: Option<SandboxId>,
    /// What the sandbox's metadata says where that tells apart who gets what.
    pub(crate) said: Option<String>,
    pub(crate) host: Option<String>,
}

#[derive(Clone)]
struct Value {
    secret: Secret,
    until: Instant,
}

type Made = Result<Value, SecretError>;

enum Slot {
    Ready(Value),
    Failed(SecretError, Instant),
    Pending(Shared<BoxFuture<'static, Made>>, SandboxId),
}

/// See the module.
pub(crate) struct Cache {
    slots: Mutex<HashMap<Key, Slot>>,
    tasks: Arc<Semaphore>,
}

impl Cache {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { slots: Mutex::default(), tasks: Arc::new(Semaphore::new(MOST_TASKS)) })
    }

    /// The value for a request of `sandbox`; `make` is called if there is none that can still be used.
    pub(crate) async fn value(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        key: Key,
        make: impl FnOnce() -> BoxFuture<'static, Result<Fresh, String>>,
    ) -> Result<Secret, SecretError> {
        let name = key.secret.clone();
        let pending = match self.look(sandbox, key, make)? {
            Looked::Ready(secret) => return Ok(secret),
            Looked::Pending(pending) => pending,
        };
        let value = pending.await?;
        if value.until <= Instant::now() {
            return Err(SecretError::Unavailable { name, problem: "its value expired before it was used".to_owned() });
        }
        Ok(value.secret)
    }

    fn look(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        key: Key,
        make: impl FnOnce() -> BoxFuture<'static, Result<Fresh, String>>,
    ) -> Result<Looked, SecretError> {
        let now = Instant::now();
        let mut slots = self.slots();
        match slots.get(&key) {
            Some(Slot::Ready(value)) if value.until > now => return Ok(Looked::Ready(value.secret.clone())),
            Some(Slot::Failed(error, until)) if *until > now => return Err(error.clone()),
            Some(Slot::Pending(pending, _)) => return Ok(Looked::Pending(pending.clone())),
            _ => {}
        }
        let of_this_one = slots.values().filter(|slot| matches!(slot, Slot::Pending(_, whose) if whose == sandbox));
        if of_this_one.count() >= MOST_TASKS_OF_ONE {
            let problem = "too many values are being made for this sandbox; try again in a moment".to_owned();
            return Err(SecretError::Unavailable { name: key.secret, problem });
        }
        make_room(&mut slots, now);
        let pending = self.start(key.clone(), make());
        slots.insert(key, Slot::Pending(pending.clone(), sandbox.clone()));
        Ok(Looked::Pending(pending))
    }

    fn start(
        self: &Arc<Self>,
        key: Key,
        make: BoxFuture<'static, Result<Fresh, String>>,
    ) -> Shared<BoxFuture<'static, Made>> {
        let (cache, name) = (Arc::clone(self), key.secret.clone());
        let task = tokio::spawn(async move {
            // The semaphore is never closed.
            let _turn = cache.tasks.acquire().await;
            let fresh = std::panic::AssertUnwindSafe(make).catch_unwind().await;
            let fresh = fresh.unwrap_or_else(|_| Err("the server failed; its log says why".to_owned()));
            let made = fresh
                .map(|fresh| Value { until: Instant::now() + fresh.usable(), secret: fresh.value })
                .map_err(|problem| SecretError::Unavailable { name: key.secret.clone(), problem });
            cache.settle(key, &made);
            made
        });
        let stopping =
            move |_| Err(SecretError::Unavailable { name: name.clone(), problem: "the server is stopping".to_owned() });
        task.map(move |joined| joined.unwrap_or_else(stopping)).boxed().shared()
    }

    fn settle(&self, key: Key, made: &Made) {
        let slot = match made {
            Ok(value) => Slot::Ready(value.clone()),
            Err(error) => Slot::Failed(error.clone(), Instant::now() + FAILED_FOR),
        };
        self.slots().insert(key, slot);
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Looked {
    Ready(Secret),
    Pending(Shared<BoxFuture<'static, Made>>),
}

fn make_room(slots: &mut HashMap<Key, Slot>, now: Instant) {
    if slots.len() < MOST_VALUES {
        return;
    }
    slots.retain(|_, slot| match slot {
        Slot::Ready(value) => value.until > now,
        Slot::Failed(_, until) => *until > now,
        Slot::Pending(..) => true,
    });
    if slots.len() >= MOST_VALUES {
        slots.retain(|_, slot| matches!(slot, Slot::Pending(..)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    fn key(host: &str) -> Key {
        let host = Some(host.to_owned());
        Key { secret: "s".to_owned(), version: 1, workspace: None, sandbox: None, said: None, host }
    }

    fn fresh(text: &str, seconds: u64) -> Result<Fresh, String> {
        Ok(Fresh { value: Secret::new(text), lifetime: Duration::from_secs(seconds) })
    }

    #[tokio::test]
    async fn a_value_is_made_once_for_all_who_wait_and_kept_until_it_is_about_to_expire() {
        let (cache, sandbox, made) = (Cache::new(), SandboxId::random(), Arc::new(AtomicUsize::new(0)));
        let go = Arc::new(Notify::new());
        let ask = |seconds| {
            let (cache, sandbox, made, go) = (cache.clone(), sandbox.clone(), made.clone(), go.clone());
            async move {
                let make = move || {
                    async move {
                        let count = made.fetch_add(1, Ordering::SeqCst);
                        go.notified().await;
                        fresh(&format!("v{count}"), seconds)
                    }
                    .boxed()
                };
                cache.value(&sandbox, key("a"), make).await.map(|secret| secret.expose().to_owned())
            }
        };
        let waiters: Vec<_> = (0..10).map(|_| tokio::spawn(ask(3600))).collect();
        // The one who asked first goes away.
        while made.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        waiters[0].abort();
        go.notify_one();
        for waiter in waiters.into_iter().skip(1) {
            assert_eq!(waiter.await.expect("ran").expect("a value"), "v0");
        }
        assert_eq!(ask(3600).await.expect("a value"), "v0");
        assert_eq!(made.load(Ordering::SeqCst), 1);
        // One whose time has come is made anew.
        if let Some(Slot::Ready(value)) = cache.slots().get_mut(&key("a")) {
            value.until = Instant::now();
        }
        go.notify_one();
        assert_eq!(ask(3600).await.expect("a value"), "v1");
    }

    #[tokio::test]
    async fn a_failure_is_an_error_even_if_there_was_a_value_before() {
        let (cache, sandbox) = (Cache::new(), SandboxId::random());
        let made = cache.value(&sandbox, key("a"), || async { fresh("old", 3600) }.boxed()).await;
        assert_eq!(made.expect("a value").expose(), "old");
        if let Some(Slot::Ready(value)) = cache.slots().get_mut(&key("a")) {
            value.until = Instant::now();
        }
        let failed = cache.value(&sandbox, key("a"), || async { Err("no".to_owned()) }.boxed()).await;
        assert!(failed.is_err());
        let never = || async { panic!("a failure is remembered for a moment") }.boxed();
        assert!(cache.value(&sandbox, key("a"), never).await.is_err());
        let dead = cache.value(&sandbox, key("b"), || async { panic!("a maker with a bug") }.boxed()).await;
        assert!(dead.is_err());
    }

    #[tokio::test]
    async fn a_sandbox_does_not_keep_others_from_their_values() {
        let (cache, greedy, other) = (Cache::new(), SandboxId::random(), SandboxId::random());
        let tasks: Vec<_> = (0..MOST_TASKS_OF_ONE)
            .map(|at| {
                let (cache, greedy) = (cache.clone(), greedy.clone());
                let hang = || std::future::pending().boxed();
                tokio::spawn(async move { cache.value(&greedy, key(&format!("h{at}")), hang).await })
            })
            .collect();
        while cache.slots().len() < MOST_TASKS_OF_ONE {
            tokio::task::yield_now().await;
        }
        assert!(cache.value(&greedy, key("more"), || std::future::pending().boxed()).await.is_err());
        assert!(cache.value(&other, key("other"), || async { fresh("v", 60) }.boxed()).await.is_ok());
        tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
