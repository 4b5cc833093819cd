//! Conditions in a query that several routes take, read alike.

use std::collections::BTreeMap;

use crate::ApiError;

/// Items of a page, where the query does not say.
pub(super) const DEFAULT_LIMIT: u32 = 100;
const MAX_LIMIT: u32 = 1000;

/// Refuses a parameter that was there before, unless it may be `repeated`.
pub(super) fn once(seen: &mut Vec<String>, name: &str, repeated: &str) -> Result<(), ApiError> {
    if name != repeated && seen.iter().any(|before| before == name) {
        return Err(ApiError::invalid(format!("query: `{name}` is there twice")));
    }
    seen.push(name.to_owned());
    Ok(())
}

/// Takes in `KEY=VALUE`, a condition on labels.
pub(super) fn add_label(labels: &mut BTreeMap<String, String>, name: &str, value: &str) -> Result<(), ApiError> {
    let (key, value) = value
        .split_once('=')
        .ok_or_else(|| ApiError::invalid(format!("query: `{name}` must be KEY=VALUE, percent-encoded as one value")))?;
    if labels.insert(key.to_owned(), value.to_owned()).is_some_and(|before| before != value) {
        return Err(ApiError::invalid(format!("query: `{name}` asks for two values of one key")));
    }
    Ok(())
}

/// Whether the oldest come first.
pub(super) fn ascending(value: &str) -> Result<bool, ApiError> {
    match value {
        "asc" => Ok(true),
        "desc" => Ok(false),
        _ => Err(ApiError::invalid("query: `order` must be `asc` or `desc`")),
    }
}

/// Items of a page.
pub(super) fn limit(value: &str) -> Result<u32, ApiError> {
    let limit = value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
    limit.ok_or_else(|| ApiError::invalid(format!("query: `limit` must be a number from 1 to {MAX_LIMIT}")))
}

/// `known`: the parameters there are.
pub(super) fn unknown(known: &str) -> ApiError {
    ApiError::invalid(format!("query: unknown parameter, expected one of {known}"))
}
