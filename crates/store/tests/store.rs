//! Records against a model of a few lines, and databases that must not be opened.

use std::{collections::BTreeMap, path::Path, time::Duration};

use jiff::Timestamp;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use stockade_model::{
    EndCause, Ending, LifeRules, Lineage, MachineId, MachineShape, Sandbox, SandboxId, SandboxState, Template,
    TemplateId, TemplateState, WorkspaceId,
};
use stockade_store::{Idempotency, Inserted, SandboxQuery, SecretFile, Store, StoreError, TemplateRecord};

async fn open(dir: &Path) -> Result<Store, StoreError> {
    Store::open(&dir.join("stockade.db"), SecretFile::open_or_create(&dir.join("secret"))?).await
}

fn sandbox(store: &Store, workspace: &WorkspaceId, label: u8) -> Sandbox {
    let id = SandboxId::random();
    let now = Timestamp::from_millisecond(Timestamp::now().as_millisecond()).expect("in range");
    Sandbox {
        access_token: store.access_token(&id),
        id,
        workspace: workspace.clone(),
        template: TemplateId::random(),
        template_name: "base".to_owned(),
        state: SandboxState::Creating,
        shape: MachineShape { vcpus: 2, memory_mib: 512, disk_mib: 4096 },
        machine: Some(MachineId::random()),
        metadata: BTreeMap::from([("label".to_owned(), label.to_string())]),
        env: BTreeMap::from([("TOKEN".to_owned(), "sup3r-s3cret".to_owned())]),
        created_at: now,
        started_at: None,
        deadline: now + Duration::from_secs(300),
        lifetime: Duration::from_secs(300),
        remaining: None,
        tier: None,
        saved: None,
        idle_since: None,
        rules: LifeRules::default(),
        lineage: Lineage::default(),
        ending: None,
    }
}

fn ending(cause: EndCause) -> Ending {
    let at = Timestamp::from_millisecond(1_700_000_000_000).expect("in range");
    Ending { at, cause, detail: "because".to_owned() }
}

fn same(one: &Sandbox, other: &Sandbox) -> bool {
    // `Secret` has no debug text, on purpose.
    format!("{one:?}") == format!("{other:?}") && one.access_token.matches(other.access_token.expose())
}

#[derive(Clone, Debug)]
enum Action {
    Insert { mine: bool, label: u8, key: Option<u8> },
    Run(usize),
    Deadline(usize, u32),
    BeginEnd(usize, bool),
    Finish(usize),
    Purge,
    Reopen,
    List { label: Option<u8>, limit: u32, ascending: bool },
}

fn action() -> impl Strategy<Value = Action> {
    let nth = 0..12usize;
    prop_oneof![
        4 => (any::<bool>(), 0..3u8, prop::option::weighted(0.3, 0..3u8))
            .prop_map(|(mine, label, key)| Action::Insert { mine, label, key }),
        3 => nth.clone().prop_map(Action::Run),
        2 => (nth.clone(), any::<u32>()).prop_map(|(nth, seconds)| Action::Deadline(nth, seconds)),
        2 => (nth.clone(), any::<bool>()).prop_map(|(nth, expired)| Action::BeginEnd(nth, expired)),
        2 => nth.prop_map(Action::Finish),
        1 => Just(Action::Purge),
        1 => Just(Action::Reopen),
        3 => (prop::option::of(0..3u8), 1..4u32, any::<bool>())
            .prop_map(|(label, limit, ascending)| Action::List { label, limit, ascending }),
    ]
}

/// The model: sandboxes in order, and who used which key.
struct World {
    dir: tempfile::TempDir,
    store: Store,
    spaces: [WorkspaceId; 2],
    sandboxes: Vec<(Sandbox, Option<Ending>)>,
    keys: BTreeMap<(WorkspaceId, String), SandboxId>,
}

#[test]
fn random_operations_read_back_as_the_model_says() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let mut runner = TestRunner::new(Config { cases: 60, max_shrink_iters: 200, ..Config::default() });
    runner
        .run(&prop::collection::vec(action(), 1..40), |actions| {
            runtime.block_on(async {
                let dir = tempfile::tempdir().expect("temp dir");
                let store = open(dir.path()).await.expect("opened");
                let spaces =
                    [store.default_workspace().await.expect("made"), store.workspace("b").await.expect("made")];
                let mut world = World { dir, store, spaces, sandboxes: Vec::new(), keys: BTreeMap::new() };
                for action in actions {
                    world.step(action).await;
                    world.check().await;
                }
            });
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

impl World {
    async fn step(&mut self, action: Action) {
        match action {
            Action::Insert { mine, label, key } => self.insert(mine, label, key).await,
            Action::Run(nth) => {
                let Some(nth) = self.nth(nth) else { return };
                let (sandbox, _) = &mut self.sandboxes[nth];
                let (started, deadline) = (sandbox.created_at, sandbox.deadline + Duration::from_millis(7));
                let done = self.store.mark_running(&sandbox.id, started, deadline).await;
                assert_eq!(done.is_ok(), sandbox.state == SandboxState::Creating);
                if done.is_ok() {
                    (sandbox.state, sandbox.started_at) = (SandboxState::Running, Some(started));
                    sandbox.deadline = deadline;
                }
            }
            Action::Deadline(nth, seconds) => {
                let Some(nth) = self.nth(nth) else { return };
                let (sandbox, _) = &mut self.sandboxes[nth];
                let deadline = sandbox.created_at + Duration::from_secs(seconds.into());
                let changed = Sandbox { deadline, ..sandbox.clone() };
                let done = self.store.put_life(&changed, SandboxState::Running, sandbox.created_at).await;
                assert_eq!(done.is_ok(), sandbox.state == SandboxState::Running);
                if done.is_ok() {
                    *sandbox = changed;
                }
            }
            Action::BeginEnd(nth, expired) => {
                let Some(nth) = self.nth(nth) else { return };
                let (sandbox, intended) = &mut self.sandboxes[nth];
                let wanted = ending(if expired { EndCause::Expired } else { EndCause::OutOfMemory });
                let done = self.store.begin_end(&sandbox.id, &wanted).await;
                assert_eq!(done.is_ok(), !sandbox.state.is_final());
                if done.is_ok() {
                    sandbox.state = SandboxState::Killing;
                    intended.get_or_insert(wanted);
                }
            }
            Action::Finish(nth) => self.finish(nth).await,
            Action::Purge => {
                let gone = self.sandboxes.iter().filter(|(sandbox, _)| sandbox.state.is_final()).count();
                let purged = self.store.purge_ended(Timestamp::now()).await.expect("purged");
                assert_eq!(purged, gone as u64);
                self.sandboxes.retain(|(sandbox, _)| !sandbox.state.is_final());
            }
            Action::Reopen => {
                self.store.close().await;
                self.store = open(self.dir.path()).await.expect("opened again");
            }
            Action::List { label, limit, ascending } => self.list(label, limit, ascending).await,
        }
    }

    async fn insert(&mut self, mine: bool, label: u8, key: Option<u8>) {
        let workspace = &self.spaces[usize::from(mine)];
        let new = sandbox(&self.store, workspace, label);
        let key = key.map(|key| Idempotency { key: key.to_string(), digest: vec![label] });
        let inserted = self.store.insert_sandbox(&new, key.as_ref()).await.expect("inserted");
        let used = key.and_then(|key| {
            self.keys.get(&(workspace.clone(), key.key.clone())).cloned().ok_or(key.key).map_or_else(
                |free| {
                    self.keys.insert((workspace.clone(), free), new.id.clone());
                    None
                },
                Some,
            )
        });
        match (inserted, used) {
            (Inserted::New, None) => self.sandboxes.push((new, None)),
            (Inserted::Existing(record), Some(first)) => assert_eq!(record.sandbox, first),
            other => panic!("{other:?}"),
        }
    }

    async fn finish(&mut self, nth: usize) {
        let Some(nth) = self.nth(nth) else { return };
        let (sandbox, intended) = &mut self.sandboxes[nth];
        let state = if sandbox.state == SandboxState::Creating { SandboxState::Failed } else { SandboxState::Gone };
        let end = ending(EndCause::CreateFailed);
        self.store.finish(&sandbox.id, state, &end).await.expect("finished");
        if !sandbox.state.is_final() {
            (sandbox.state, sandbox.ending) = (state, Some(end));
            *intended = None;
            if state == SandboxState::Failed {
                self.keys.retain(|_, id| *id != sandbox.id);
            }
        }
    }

    async fn list(&self, label: Option<u8>, limit: u32, ascending: bool) {
        let mut query = SandboxQuery { limit, ascending, ..SandboxQuery::default() };
        query.metadata.extend(label.map(|label| ("label".to_owned(), label.to_string())));
        let mut expected: Vec<_> = self.sandboxes.iter().map(|(sandbox, _)| sandbox).collect();
        expected.retain(|sandbox| {
            sandbox.workspace == self.spaces[0]
                && label.is_none_or(|label| sandbox.metadata["label"] == label.to_string())
        });
        if !ascending {
            expected.reverse();
        }
        let mut seen = Vec::new();
        loop {
            let page = self.store.list_sandboxes(&self.spaces[0], &query).await.expect("a page");
            assert!(page.items.len() <= limit as usize);
            seen.extend(page.items);
            query.cursor = page.cursor;
            if query.cursor.is_none() {
                break;
            }
        }
        assert_eq!(seen.len(), expected.len());
        assert!(seen.iter().zip(expected).all(|(one, other)| same(one, other)));
    }

    async fn check(&self) {
        for (sandbox, _) in &self.sandboxes {
            let read = self.store.sandbox(&sandbox.workspace, &sandbox.id).await.expect("read").expect("there");
            assert!(same(&read, sandbox), "{read:?} {sandbox:?}");
            let other = self.spaces.iter().find(|space| **space != sandbox.workspace).expect("two");
            assert!(self.store.sandbox(other, &sandbox.id).await.expect("read").is_none());
            assert!(self.store.events(other, &sandbox.id).await.expect("read").is_empty());
            let last = self.store.events(&sandbox.workspace, &sandbox.id).await.expect("read");
            assert_eq!(last.last().map(|event| event.state), Some(sandbox.state));
        }
        let unfinished = self.store.unfinished().await.expect("read");
        let expected: Vec<_> = self.sandboxes.iter().filter(|(sandbox, _)| !sandbox.state.is_final()).collect();
        assert_eq!(unfinished.len(), expected.len());
        for (one, other) in unfinished.iter().zip(expected) {
            assert!(same(&one.0, &other.0) && one.1 == other.1);
        }
    }

    fn nth(&self, nth: usize) -> Option<usize> {
        (!self.sandboxes.is_empty()).then(|| nth % self.sandboxes.len())
    }
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_both_versions_are_named() {
    let dir = tempfile::tempdir().expect("temp dir");
    open(dir.path()).await.expect("opened").close().await;
    let url = format!("sqlite://{}", dir.path().join("stockade.db").display());
    let pool = sqlx::SqlitePool::connect(&url).await.expect("connected");
    sqlx::query(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) VALUES (99, 'later', 1, x'00', 0)",
    )
    .execute(&pool)
    .await
    .expect("a later version was here");
    pool.close().await;
    let error = open(dir.path()).await.err().expect("refused");
    let StoreError::NewerDatabase { database: 99, build, .. } = &error else { panic!("{error:?}") };
    let text = error.to_string();
    assert!(text.contains("99") && text.contains(&format!("up to {build}")) && text.contains("stockade.db"), "{text}");
}

#[tokio::test]
async fn a_secret_file_of_another_deployment_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    open(dir.path()).await.expect("opened").close().await;
    std::fs::remove_file(dir.path().join("secret")).expect("lost");
    assert!(matches!(open(dir.path()).await.err().expect("refused"), StoreError::ForeignSecret { .. }));
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let dir = tempfile::tempdir().expect("temp dir");
    std::fs::write(dir.path().join("stockade.db"), "not a database, but quite long enough to look at".repeat(40))
        .expect("written");
    assert!(matches!(open(dir.path()).await.err().expect("refused"), StoreError::Open { .. }));
}

#[tokio::test]
async fn no_secret_is_in_the_database_in_clear() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path()).await.expect("opened");
    let workspace = store.default_workspace().await.expect("made");
    let key = stockade_model::Secret::new("e2b_0123456789abcdef0123456789abcdef01234567");
    store.insert_api_key(&workspace, "key", &key).await.expect("kept");
    let one = sandbox(&store, &workspace, 1);
    store.insert_sandbox(&one, None).await.expect("inserted");
    store.close().await;
    for entry in std::fs::read_dir(dir.path()).expect("listed") {
        let path = entry.expect("entry").path();
        if path.ends_with("secret") {
            continue;
        }
        let bytes = std::fs::read(&path).expect("read");
        for secret in ["sup3r-s3cret", "0123456789abcdef0123456789abcdef01234567", one.access_token.expose()] {
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{secret} in {}", path.display());
        }
    }
}

#[tokio::test]
async fn an_idempotency_key_is_forgotten_after_a_day() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path()).await.expect("opened");
    let workspace = store.default_workspace().await.expect("made");
    let key = Idempotency { key: "k".to_owned(), digest: store.request_digest(b"request") };
    store.insert_sandbox(&sandbox(&store, &workspace, 1), Some(&key)).await.expect("inserted");
    let hours = |hours: u64| Timestamp::now() + Duration::from_secs(hours * 3600);
    assert_eq!(store.purge_idempotency(hours(23)).await.expect("purged"), 0);
    assert!(store.idempotency(&workspace, "k").await.expect("read").is_some());
    assert_eq!(store.purge_idempotency(hours(25)).await.expect("purged"), 1);
    assert!(store.idempotency(&workspace, "k").await.expect("read").is_none());
}

#[tokio::test]
async fn a_newer_template_of_a_name_replaces_the_older_one_and_own_ones_come_before_everyones() {
    let dir = tempfile::tempdir().expect("temp dir");
    let store = open(dir.path()).await.expect("opened");
    let mine = store.default_workspace().await.expect("made");
    let theirs = store.workspace("theirs").await.expect("made");
    let put = async |workspace: Option<&WorkspaceId>| {
        let template = Template {
            id: TemplateId::random(),
            workspace: workspace.cloned(),
            name: "base".to_owned(),
            state: TemplateState::Ready,
            shape: MachineShape { vcpus: 1, memory_mib: 256, disk_mib: 1024 },
            recipe_digest: "abc".to_owned(),
            env: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
            default_user: "user".to_owned(),
            default_cwd: Some("/srv".to_owned()),
            created_at: Timestamp::from_millisecond(1_700_000_000_000).expect("in range"),
        };
        let record = TemplateRecord { template: template.clone(), directory: "/somewhere".into(), built: None };
        store.put_template(&record).await.expect("kept");
        store.put_template(&record).await.expect("kept again");
        template
    };
    let (old, new) = (put(None).await, put(None).await);
    let found = async |workspace, name: &str| store.template(workspace, name).await.expect("read").expect("there");
    assert_eq!(found(&mine, "base").await.template, new);
    assert_eq!(found(&mine, old.id.as_str()).await.template.state, TemplateState::Replaced);
    let own = put(Some(&mine)).await;
    assert_eq!(found(&mine, "base").await.template, own);
    assert_eq!(found(&theirs, "base").await.template, new);
    assert!(store.template(&theirs, own.id.as_str()).await.expect("read").is_none());
    assert_eq!(store.templates(&theirs).await.expect("read").len(), 1);
}

/// A caller that goes away in the middle of a change leaves nothing that stands in the next one's way.
#[tokio::test]
async fn writers_that_go_away_block_nobody() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path()).await.expect("opened");
    let workspace = store.default_workspace().await.expect("there is one");
    let mut last = sandbox(&store, &workspace, 0);
    for round in 0..200_u32 {
        let record = sandbox(&store, &workspace, 0);
        let (writer, written) = (store.clone(), record.clone());
        let write = async move { writer.insert_sandbox(&written, None).await };
        // After so many polls the caller is gone.
        let mut polls = 0;
        let mut write = std::pin::pin!(write);
        std::future::poll_fn(|context| {
            polls += 1;
            let done = write.as_mut().poll(context).is_ready();
            if done || polls > round % 4 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        last = record;
    }
    // Each of them was begun, so each is written.
    let next = sandbox(&store, &workspace, 1);
    let written = tokio::time::timeout(Duration::from_secs(20), store.insert_sandbox(&next, None)).await;
    assert_eq!(written.expect("nobody holds the lock").expect("written"), Inserted::New);
    assert!(store.sandbox(&workspace, &last.id).await.expect("read").is_some());
}

/// Another program that holds the lock (a backup) makes writers wait, then tells them so.
#[tokio::test]
async fn a_locked_database_is_busy_and_not_broken() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path()).await.expect("opened");
    let workspace = store.default_workspace().await.expect("there is one");
    let record = sandbox(&store, &workspace, 0);
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(dir.path().join("stockade.db"));
    let other = sqlx::SqlitePool::connect_with(options).await.expect("opened");
    let lock = other.begin_with("BEGIN IMMEDIATE").await.expect("locked");
    let error = store.insert_sandbox(&record, None).await.expect_err("locked");
    assert!(error.is_busy(), "{error:?}");
    lock.rollback().await.expect("unlocked");
    assert_eq!(store.insert_sandbox(&record, None).await.expect("written"), Inserted::New);
}

#[tokio::test]
async fn the_files_are_closed_to_others() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path()).await.expect("opened");
    let workspace = store.default_workspace().await.expect("there is one");
    store.insert_sandbox(&sandbox(&store, &workspace, 0), None).await.expect("written");
    for name in ["stockade.db", "stockade.db-wal", "stockade.db-shm"] {
        let mode = std::fs::metadata(dir.path().join(name)).expect("is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}
