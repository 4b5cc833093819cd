use std::{io, path::PathBuf};

use stockade_model::{SandboxId, SandboxState};

/// What can go wrong with records.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database was written by a newer Stockade.
    #[error(
        "database {} has version {database}, this build knows versions up to {build}: \
         start the newer stockade again, or use another data directory",
        path.display()
    )]
    NewerDatabase {
        /// The file.
        path: PathBuf,
        /// The version it has.
        database: i64,
        /// The newest version this build knows.
        build: i64,
    },
    /// The database cannot be opened or created.
    #[error("cannot open database {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
    /// The database could not be brought to this build's version.
    #[error("cannot migrate database {}", path.display())]
    Migrate {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// The secret file cannot be read or made.
    #[error("cannot use secret file {}", path.display())]
    Secret {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The secret file is not the one the database was written with.
    #[error(
        "secret file {} does not belong to the database beside it: restore the file it was made with",
        path.display()
    )]
    ForeignSecret {
        /// The file.
        path: PathBuf,
    },
    /// The sandbox is not in a state in which this change is possible.
    #[error("sandbox {id} is not {expected}, or does not exist")]
    WrongState {
        /// Which sandbox.
        id: SandboxId,
        /// The state the change starts from.
        expected: SandboxState,
    },
    /// A cursor that no list gave out.
    #[error("the cursor is not one that a list of this order gave")]
    BadCursor,
    /// A record cannot be read back.
    #[error("{what} in the database is damaged: {why}")]
    Damaged {
        /// Which record and column.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// The database failed.
    #[error("database failed to {action}")]
    Database {
        /// What was being done.
        action: &'static str,
        /// Why.
        #[source]
        source: sqlx::Error,
    },
}

impl StoreError {
    /// Whether the database only had no time: nothing was written, and trying again may succeed.
    pub fn is_busy(&self) -> bool {
        /// `SQLITE_BUSY`, in the low byte of extended codes too.
        const BUSY: i32 = 5;
        let Self::Database { source, .. } = self else { return false };
        match source {
            sqlx::Error::PoolTimedOut => true,
            sqlx::Error::Database(error) => {
                error.code().and_then(|code| code.parse::<i32>().ok()).is_some_and(|code| code & 0xff == BUSY)
            }
            _ => false,
        }
    }

    /// For `map_err`.
    pub(crate) fn database(action: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| Self::Database { action, source }
    }

    pub(crate) fn damaged(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Damaged { what: what.into(), why: why.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_time_is_worth_another_try() {
        assert!(StoreError::database("write")(sqlx::Error::PoolTimedOut).is_busy());
        assert!(!StoreError::database("write")(sqlx::Error::RowNotFound).is_busy());
        assert!(!StoreError::BadCursor.is_busy());
    }
}
