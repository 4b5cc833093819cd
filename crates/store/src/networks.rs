//! What is kept of a sandbox's network, under the sandbox's id, or a snapshot's for what is made from it, and what
//! sandboxes start from that say nothing, under a subject of the service's.

use sqlx::sqlite::SqliteRow;

use crate::{Store, StoreError, rows::get};

/// A network as it is kept. Both texts are the service's.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NetworkRecord {
    /// Its policy and its tokens; kept sealed.
    pub settings: String,
    /// The names its guest knows.
    pub names: String,
}

impl Store {
    /// Writes or replaces a network.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_network(&self, subject: &str, record: &NetworkRecord) -> Result<(), StoreError> {
        sqlx::query("INSERT OR REPLACE INTO networks (subject, settings, names) VALUES (?, ?, ?)")
            .bind(subject)
            .bind(self.secret.seal(subject, record.settings.as_bytes()))
            .bind(&record.names)
            .execute(&self.write)
            .await
            .map(drop)
            .map_err(StoreError::database("write a network"))
    }

    /// Replaces the settings of a network that is there.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_network_settings(&self, subject: &str, settings: &str) -> Result<(), StoreError> {
        sqlx::query(
            "INSERT INTO networks (subject, settings, names) VALUES (?1, ?2, '')
             ON CONFLICT (subject) DO UPDATE SET settings = ?2",
        )
        .bind(subject)
        .bind(self.secret.seal(subject, settings.as_bytes()))
        .execute(&self.write)
        .await
        .map(drop)
        .map_err(StoreError::database("write a network's settings"))
    }

    /// Replaces the names of a network that is there.
    ///
    /// # Errors
    /// The database fails.
    pub async fn put_network_names(&self, subject: &str, names: &str) -> Result<(), StoreError> {
        sqlx::query("UPDATE networks SET names = ? WHERE subject = ?")
            .bind(names)
            .bind(subject)
            .execute(&self.write)
            .await
            .map(drop)
            .map_err(StoreError::database("write a network's names"))
    }

    /// Removes a network; false: there was none.
    ///
    /// # Errors
    /// The database fails.
    pub async fn remove_network(&self, subject: &str) -> Result<bool, StoreError> {
        let done = sqlx::query("DELETE FROM networks WHERE subject = ?")
            .bind(subject)
            .execute(&self.write)
            .await
            .map_err(StoreError::database("remove a network"))?;
        Ok(done.rows_affected() > 0)
    }

    /// The network of a sandbox or snapshot; `None`: it has none.
    ///
    /// # Errors
    /// The database fails, or what it holds is damaged.
    pub async fn network(&self, subject: &str) -> Result<Option<NetworkRecord>, StoreError> {
        let row = sqlx::query("SELECT settings, names FROM networks WHERE subject = ?")
            .bind(subject)
            .fetch_optional(&self.read)
            .await
            .map_err(StoreError::database("read a network"))?;
        row.map(|row| self.read_network(subject, &row)).transpose()
    }

    fn read_network(&self, subject: &str, row: &SqliteRow) -> Result<NetworkRecord, StoreError> {
        let settings = self.secret.open(subject, get(row, "settings")?)?;
        let settings = std::str::from_utf8(&settings).map_err(|error| StoreError::damaged("settings", error))?;
        Ok(NetworkRecord { settings: settings.to_owned(), names: get(row, "names")? })
    }
}
