//! What happened to a sandbox, as log entries: each change of its state, with the cause of its end. E2B's own logs are
//! those of its in-guest server; what a guest writes to its console is at our `/v1/sandboxes/{id}/logs`.

use std::collections::BTreeMap;

use axum::{
    Extension, Json,
    extract::{Path, State},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stockade_model::EndCause;
use stockade_service::{Principal, SandboxEvent};

use super::{super::error::HttpError, JsonResult, Query, sandbox_id};
use crate::AppState;

const MAX_ENTRIES: usize = 1000;
const MAX_SEARCH_CHARACTERS: usize = 256;

/// How much an entry matters, the least first.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Direction {
    #[default]
    Forward,
    Backward,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Entry {
    timestamp: Timestamp,
    message: String,
    level: Level,
    fields: BTreeMap<&'static str, String>,
}

impl From<SandboxEvent> for Entry {
    fn from(SandboxEvent { at, state, tier, ending }: SandboxEvent) -> Self {
        let mut fields = BTreeMap::from([("logger", "stockade".to_owned()), ("state", state.to_string())]);
        let mut message = format!("sandbox is {state}");
        if let Some(tier) = tier {
            message.push_str(&format!(" ({tier})"));
            fields.insert("tier", tier.to_string());
        }
        let mut level = Level::Info;
        if let Some(ending) = ending {
            let why = if ending.detail.is_empty() { words(&ending.cause) } else { &ending.detail };
            message.push_str(&format!(": {why}"));
            if is_fault(&ending.cause) {
                level = Level::Error;
            }
        }
        Self { timestamp: at, message, level, fields }
    }
}

/// An end about which there is no more to say.
fn words(cause: &EndCause) -> &'static str {
    match cause {
        EndCause::Killed { .. } => "it was ended on request",
        EndCause::Expired => "its time was up",
        EndCause::Idle => "it was not used for as long as its rules say",
        EndCause::Promoted { .. } => "a copy took its place",
        EndCause::GuestEnded => "its guest powered off",
        EndCause::OutOfMemory => "the host ran out of memory",
        EndCause::Crashed => "its machine failed",
        EndCause::HostLost => "its host was lost",
        EndCause::CreateFailed => "it could not be made",
    }
}

/// Whether an end is one that nobody asked for.
fn is_fault(cause: &EndCause) -> bool {
    match cause {
        EndCause::Killed { .. } | EndCause::Expired | EndCause::Idle | EndCause::Promoted { .. } => false,
        EndCause::GuestEnded
        | EndCause::OutOfMemory
        | EndCause::Crashed
        | EndCause::HostLost
        | EndCause::CreateFailed => true,
    }
}

/// Which entries are asked for, in which order.
#[derive(Debug)]
struct Wanted {
    /// Forward: nothing before it. Backward: nothing after it.
    from: Option<Timestamp>,
    limit: usize,
    direction: Direction,
    level: Level,
    search: String,
}

impl Wanted {
    fn of(&self, mut entries: Vec<Entry>) -> Vec<Entry> {
        entries.retain(|entry| {
            let is_in_time = self.from.is_none_or(|from| match self.direction {
                Direction::Forward => entry.timestamp >= from,
                Direction::Backward => entry.timestamp <= from,
            });
            is_in_time && entry.level >= self.level && entry.message.contains(&self.search)
        });
        if self.direction == Direction::Backward {
            entries.reverse();
        }
        entries.truncate(self.limit);
        entries
    }
}

fn limit(asked: Option<i64>) -> Result<usize, HttpError> {
    let asked = asked.unwrap_or(MAX_ENTRIES as i64);
    usize::try_from(asked)
        .ok()
        .filter(|limit| *limit <= MAX_ENTRIES)
        .ok_or_else(|| HttpError::bad_request(format!("limit is {asked}; 0 to {MAX_ENTRIES} are possible")))
}

fn instant(name: &str, milliseconds: Option<i64>) -> Result<Option<Timestamp>, HttpError> {
    let instant = milliseconds.map(Timestamp::from_millisecond).transpose();
    instant.map_err(|error| HttpError::bad_request(format!("{name} is no time: {error}")))
}

async fn entries(state: &AppState, who: &Principal, id: &str) -> Result<Vec<Entry>, HttpError> {
    let events = state.service.events(who, &sandbox_id(id)?).await?;
    Ok(events.into_iter().map(Into::into).collect())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FirstQuery {
    /// Milliseconds since the epoch.
    start: Option<i64>,
    limit: Option<i64>,
}

/// A line of a log as the first version has them beside the entries.
#[derive(Serialize)]
struct Line {
    timestamp: Timestamp,
    line: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FirstReply {
    logs: Vec<Line>,
    log_entries: Vec<Entry>,
}

/// The first version: from a time on, oldest first.
pub(super) async fn first(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Query(query): Query<FirstQuery>,
) -> JsonResult<FirstReply> {
    let wanted = Wanted {
        from: instant("start", query.start)?,
        limit: limit(query.limit)?,
        direction: Direction::Forward,
        level: Level::Debug,
        search: String::new(),
    };
    let log_entries = wanted.of(entries(&state, &who, &id).await?);
    let line = |entry: &Entry| Line {
        timestamp: entry.timestamp,
        line: serde_json::json!({ "level": entry.level, "message": entry.message, "logger": "stockade" }).to_string(),
    };
    Ok(Json(FirstReply { logs: log_entries.iter().map(line).collect(), log_entries }))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SecondQuery {
    /// Milliseconds since the epoch.
    cursor: Option<i64>,
    limit: Option<i64>,
    direction: Option<Direction>,
    level: Option<Level>,
    search: Option<String>,
}

#[derive(Serialize)]
pub(super) struct SecondReply {
    logs: Vec<Entry>,
}

/// The second version: from a time on or back, by level and by text.
pub(super) async fn second(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Query(query): Query<SecondQuery>,
) -> JsonResult<SecondReply> {
    let search = query.search.unwrap_or_default();
    if search.chars().count() > MAX_SEARCH_CHARACTERS {
        return Err(HttpError::bad_request(format!("search has more than {MAX_SEARCH_CHARACTERS} characters")));
    }
    let wanted = Wanted {
        from: instant("cursor", query.cursor)?,
        limit: limit(query.limit)?,
        direction: query.direction.unwrap_or_default(),
        level: query.level.unwrap_or(Level::Debug),
        search,
    };
    Ok(Json(SecondReply { logs: wanted.of(entries(&state, &who, &id).await?) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(second: i64, message: &str, level: Level) -> Entry {
        let timestamp = Timestamp::from_second(second).expect("a time");
        Entry { timestamp, message: message.to_owned(), level, fields: BTreeMap::new() }
    }

    fn seconds(wanted: &Wanted) -> Vec<i64> {
        let entries = vec![
            entry(1, "sandbox is creating", Level::Info),
            entry(2, "sandbox is running", Level::Info),
            entry(3, "sandbox is gone: its guest powered off", Level::Error),
        ];
        wanted.of(entries).into_iter().map(|entry| entry.timestamp.as_second()).collect()
    }

    fn everything() -> Wanted {
        Wanted {
            from: None,
            limit: MAX_ENTRIES,
            direction: Direction::Forward,
            level: Level::Debug,
            search: String::new(),
        }
    }

    #[test]
    fn entries_are_chosen_by_time_level_text_and_number() {
        let at = |second| Timestamp::from_second(second).ok();
        assert_eq!(seconds(&everything()), [1, 2, 3]);
        assert_eq!(seconds(&Wanted { from: at(2), ..everything() }), [2, 3]);
        assert_eq!(seconds(&Wanted { from: at(2), direction: Direction::Backward, ..everything() }), [2, 1]);
        assert_eq!(seconds(&Wanted { limit: 1, direction: Direction::Backward, ..everything() }), [3]);
        assert_eq!(seconds(&Wanted { level: Level::Warn, ..everything() }), [3]);
        assert_eq!(seconds(&Wanted { search: "running".into(), ..everything() }), [2]);
        assert!(seconds(&Wanted { limit: 0, ..everything() }).is_empty());
    }

    #[test]
    fn limits_and_times_outside_of_what_is_possible_are_named() {
        assert_eq!(limit(None).ok(), Some(1000));
        assert!(limit(Some(-1)).is_err_and(|error| error.message.contains("limit is -1")));
        assert!(limit(Some(1001)).is_err());
        assert!(instant("start", Some(i64::MAX)).is_err_and(|error| error.message.starts_with("start is no time")));
    }
}
