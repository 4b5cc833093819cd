//! From columns to types and back.

use std::{collections::BTreeMap, fmt::Display, str::FromStr, time::Duration};

use jiff::Timestamp;
use sqlx::{Decode, Row, Sqlite, Type, sqlite::SqliteRow};
use stockade_model::{Ending, MachineShape, Sandbox, SandboxId, SandboxState, Tier};

use crate::{SecretFile, StoreError};

pub(crate) fn millis(at: Timestamp) -> i64 {
    at.as_millisecond()
}

/// A deadline must not come early by being cut to milliseconds.
pub(crate) fn millis_rounded_up(at: Timestamp) -> i64 {
    let ms = at.as_millisecond();
    if Timestamp::from_millisecond(ms).is_ok_and(|cut| cut < at) { ms + 1 } else { ms }
}

pub(crate) fn instant(ms: i64, column: &str) -> Result<Timestamp, StoreError> {
    Timestamp::from_millisecond(ms).map_err(|error| StoreError::damaged(column, error))
}

pub(crate) fn get<'r, T>(row: &'r SqliteRow, column: &str) -> Result<T, StoreError>
where
    T: Decode<'r, Sqlite> + Type<Sqlite>,
{
    row.try_get(column).map_err(|error| StoreError::damaged(column, error))
}

/// An id, a state: whatever has a text of its own.
pub(crate) fn id<T>(row: &SqliteRow, column: &str) -> Result<T, StoreError>
where
    T: FromStr<Err: Display>,
{
    let text: &str = get(row, column)?;
    text.parse().map_err(|error: T::Err| StoreError::damaged(column, error))
}

/// An id that may be missing.
pub(crate) fn optional_id<T>(row: &SqliteRow, column: &str) -> Result<Option<T>, StoreError>
where
    T: FromStr<Err: Display>,
{
    let text: Option<&str> = get(row, column)?;
    text.map(str::parse).transpose().map_err(|error: T::Err| StoreError::damaged(column, error))
}

/// A tier that may be missing.
pub(crate) fn tier(row: &SqliteRow) -> Result<Option<Tier>, StoreError> {
    let Some(word) = get::<Option<&str>>(row, "tier")? else { return Ok(None) };
    let tier = Tier::ALL.into_iter().find(|tier| tier.as_str() == word);
    tier.map(Some).ok_or_else(|| StoreError::damaged("tier", word))
}

/// A length of time that may be missing.
fn optional_millis(row: &SqliteRow, column: &str) -> Result<Option<Duration>, StoreError> {
    let ms: Option<i64> = get(row, column)?;
    let read = |ms| u64::try_from(ms).map(Duration::from_millis).map_err(|error| StoreError::damaged(column, error));
    ms.map(read).transpose()
}

/// A length of time in whole milliseconds, rounded up.
pub(crate) fn duration_millis(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

pub(crate) fn json<T: serde::de::DeserializeOwned>(text: &[u8], column: &str) -> Result<T, StoreError> {
    serde_json::from_slice(text).map_err(|error| StoreError::damaged(column, error))
}

pub(crate) fn to_json<T: serde::Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("our types have string keys and no failing serialisers")
}

pub(crate) fn shape(row: &SqliteRow) -> Result<MachineShape, StoreError> {
    Ok(MachineShape {
        vcpus: get(row, "vcpus")?,
        memory_mib: number(row, "memory_mib")?,
        disk_mib: number(row, "disk_mib")?,
    })
}

pub(crate) fn number(row: &SqliteRow, column: &str) -> Result<u64, StoreError> {
    let number: i64 = get(row, column)?;
    u64::try_from(number).map_err(|error| StoreError::damaged(column, error))
}

/// SQLite has signed numbers; no machine has 2^63 MiB.
pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A sandbox and, while it is `killing`, the ending it will have.
pub(crate) fn sandbox(row: &SqliteRow, secret: &SecretFile) -> Result<(Sandbox, Option<Ending>), StoreError> {
    let sandbox_id: SandboxId = id(row, "id")?;
    let state: SandboxState = id(row, "state")?;
    let env = secret.open(sandbox_id.as_str(), get(row, "env")?)?;
    let env: BTreeMap<String, String> = json(&env, "env")?;
    let started: Option<i64> = get(row, "started_ms")?;
    let idle_since: Option<i64> = get(row, "idle_since_ms")?;
    let ending: Option<&str> = get(row, "ending")?;
    let ending: Option<Ending> = ending.map(|text| json(text.as_bytes(), "ending")).transpose()?;
    let (ending, intended) = if state.is_final() { (ending, None) } else { (None, ending) };
    let sandbox = Sandbox {
        workspace: id(row, "workspace")?,
        template: id(row, "template")?,
        template_name: get(row, "template_name")?,
        state,
        shape: shape(row)?,
        machine: optional_id(row, "machine")?,
        metadata: json(get::<&str>(row, "metadata")?.as_bytes(), "metadata")?,
        env,
        access_token: secret.access_token(&sandbox_id),
        created_at: instant(get(row, "created_ms")?, "created_ms")?,
        started_at: started.map(|ms| instant(ms, "started_ms")).transpose()?,
        deadline: instant(get(row, "deadline_ms")?, "deadline_ms")?,
        lifetime: Duration::from_millis(number(row, "lifetime_ms")?),
        remaining: optional_millis(row, "remaining_ms")?,
        tier: tier(row)?,
        saved: optional_id(row, "saved")?,
        idle_since: idle_since.map(|ms| instant(ms, "idle_since_ms")).transpose()?,
        rules: json(get::<&str>(row, "rules")?.as_bytes(), "rules")?,
        lineage: json(get::<&str>(row, "lineage")?.as_bytes(), "lineage")?,
        ending,
        id: sandbox_id,
    };
    Ok((sandbox, intended))
}
