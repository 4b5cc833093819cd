use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use sqlx::{
    ConnectOptions, Row, SqlitePool,
    migrate::Migrator,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use stockade_model::WorkspaceId;

use crate::{SecretFile, StoreError, rows::millis};

static MIGRATIONS: Migrator = sqlx::migrate!();

/// How long a lock held by another process (a backup, a curious `sqlite3`) is waited for.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const READERS: u32 = 4;
/// Takes the write lock at once: a transaction that reads first and then writes could otherwise fail
/// because another process wrote in between.
pub(crate) const BEGIN: &str = "BEGIN IMMEDIATE";
const DEFAULT_WORKSPACE: &str = "default";

/// The records. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    pub(crate) write: SqlitePool,
    pub(crate) read: SqlitePool,
    pub(crate) secret: Arc<SecretFile>,
    directory: Arc<Path>,
}

impl Store {
    /// Opens the database, creates it if it does not exist, and brings it to this build's version.
    ///
    /// # Errors
    /// The file cannot be used, comes from a newer build, or belongs to another secret file.
    pub async fn open(database: &Path, secret: SecretFile) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Open { path: database.to_owned(), source };
        close_to_others(database).map_err(|error| fail(sqlx::Error::Io(error)))?;
        let options = SqliteConnectOptions::new()
            .filename(database)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging();
        let write = SqlitePoolOptions::new().max_connections(1).connect_with(options.clone()).await.map_err(fail)?;
        migrate(&write, database).await?;
        let readers = options.create_if_missing(false).read_only(true);
        let read = SqlitePoolOptions::new().max_connections(READERS).connect_with(readers).await.map_err(fail)?;
        let directory = database.parent().map(Path::to_owned).unwrap_or_default();
        let store = Self { write, read, secret: Arc::new(secret), directory: directory.into() };
        store.check_secret().await?;
        Ok(store)
    }

    /// The directory the database is in: the data directory.
    pub fn directory(&self) -> PathBuf {
        self.directory.to_path_buf()
    }

    /// Ends all connections; what was acknowledged is on the disk already.
    pub async fn close(&self) {
        self.read.close().await;
        self.write.close().await;
    }

    /// The workspace every deployment has; made if it is not there.
    ///
    /// # Errors
    /// The database fails.
    pub async fn default_workspace(&self) -> Result<WorkspaceId, StoreError> {
        self.workspace(DEFAULT_WORKSPACE).await
    }

    /// The workspace of a name; made if it is not there.
    ///
    /// # Errors
    /// The database fails.
    pub async fn workspace(&self, name: &str) -> Result<WorkspaceId, StoreError> {
        let fail = StoreError::database("make a workspace");
        let id: String = sqlx::query_scalar(
            "INSERT INTO workspaces (id, name, created_ms) VALUES (?, ?, ?)
             ON CONFLICT (name) DO UPDATE SET name = name RETURNING id",
        )
        .bind(WorkspaceId::random().as_str())
        .bind(name)
        .bind(millis(Timestamp::now()))
        .fetch_one(&self.write)
        .await
        .map_err(fail)?;
        id.parse().map_err(|error| StoreError::damaged("a workspace's id", error))
    }

    /// A digest of a request, for [`Idempotency`](crate::Idempotency): the same bytes give the same one.
    pub fn request_digest(&self, request: &[u8]) -> Vec<u8> {
        self.secret.digest(request)
    }

    async fn check_secret(&self) -> Result<(), StoreError> {
        let fingerprint: Vec<u8> = sqlx::query_scalar(
            "INSERT INTO meta (name, value) VALUES ('secret', ?)
             ON CONFLICT (name) DO UPDATE SET name = name RETURNING value",
        )
        .bind(self.secret.fingerprint())
        .fetch_one(&self.write)
        .await
        .map_err(StoreError::database("read which secret it belongs to"))?;
        if fingerprint != self.secret.fingerprint() {
            return Err(StoreError::ForeignSecret { path: self.secret.path().to_owned() });
        }
        Ok(())
    }
}

/// Makes the database its owner's alone. SQLite gives the files beside it the same mode.
fn close_to_others(database: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

    let mode = 0o600;
    std::fs::OpenOptions::new().create(true).append(true).mode(mode).open(database)?;
    for ending in ["", "-wal", "-shm"] {
        let mut name = database.as_os_str().to_owned();
        name.push(ending);
        match std::fs::set_permissions(&name, std::fs::Permissions::from_mode(mode)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Runs a transaction in a task of its own. The caller of a verb may go away in the middle; on the one connection
/// that writes, a half-done transaction would stand in everybody's way.
pub(crate) async fn to_the_end<T: Send + 'static>(
    transaction: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::spawn(transaction).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(StoreError::database("write: the server is ending")(sqlx::Error::PoolClosed)),
    }
}

async fn migrate(pool: &SqlitePool, path: &Path) -> Result<(), StoreError> {
    let build = MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0);
    let database = version(pool).await.map_err(|source| StoreError::Open { path: path.to_owned(), source })?;
    if database > build {
        return Err(StoreError::NewerDatabase { path: path.to_owned(), database, build });
    }
    MIGRATIONS.run(pool).await.map_err(|source| StoreError::Migrate { path: path.to_owned(), source })
}

async fn version(pool: &SqlitePool) -> sqlx::Result<i64> {
    let known = sqlx::query("SELECT 1 FROM sqlite_master WHERE name = '_sqlx_migrations'").fetch_optional(pool).await?;
    if known.is_none() {
        return Ok(0);
    }
    let row = sqlx::query("SELECT coalesce(max(version), 0) FROM _sqlx_migrations").fetch_one(pool).await?;
    row.try_get(0)
}
