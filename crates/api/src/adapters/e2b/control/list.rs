//! Lists of sandboxes.

use axum::{Extension, Json, extract::State, response::Response};
use http::{HeaderName, HeaderValue};
use jiff::Timestamp;
use serde::Deserialize;
use stockade_model::{Sandbox, SandboxState, shortened};
use stockade_service::{BUILD_LABEL, ListFilter, Page, Principal, ServiceError};

use super::{super::error::HttpError, Query, filter, paging, sandboxes::ListedSandbox};
use crate::AppState;

/// What the service gives at once.
const LARGEST_PAGE: u32 = 1000;

/// E2B's two states in our words.
const RUNNING: [SandboxState; 2] = [SandboxState::Running, SandboxState::Resuming];
const PAUSED: [SandboxState; 3] = [SandboxState::Pausing, SandboxState::Paused, SandboxState::Stopped];

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub(super) struct ListQuery {
    metadata: Option<String>,
    state: Option<String>,
    order: Option<String>,
    started_after: Option<String>,
    template: Option<String>,
    limit: Option<i64>,
    next_token: Option<String>,
}

/// A query in our words.
struct Wanted {
    filter: ListFilter,
    started_after: Option<Timestamp>,
}

impl ListQuery {
    fn wanted(self) -> Result<Wanted, HttpError> {
        let bad = |problem: String| HttpError::bad_request(problem);
        let metadata = filter::metadata(self.metadata.as_deref().unwrap_or_default())
            .map_err(|problem| bad(format!("metadata: {problem}")))?;
        let mut states = Vec::new();
        for state in self.state.iter().flat_map(|states| states.split(',')).filter(|state| !state.is_empty()) {
            match state {
                "running" => states.extend(RUNNING),
                "paused" => states.extend(PAUSED),
                other => return Err(bad(format!("state '{}' is neither running nor paused", shortened(other)))),
            }
        }
        if states.is_empty() {
            states.extend(RUNNING.into_iter().chain(PAUSED));
        }
        let ascending = match self.order.as_deref() {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => return Err(bad(format!("order '{}' is neither asc nor desc", shortened(other)))),
        };
        let started_after = self.started_after.map(|text| text.parse::<Timestamp>());
        let started_after = started_after
            .transpose()
            .map_err(|error| bad(format!("startedAfter is no time such as 2026-01-31T12:00:00Z: {error}")))?;
        if let Some(template) = self.template.as_deref().filter(|template| template.contains(':')) {
            return Err(bad(format!("template '{}' has a tag; filter by its name or id", shortened(template))));
        }
        let limit = paging::limit(self.limit)?;
        let filter = ListFilter {
            states,
            metadata,
            template: self.template,
            ascending,
            limit,
            cursor: self.next_token.filter(|token| !token.is_empty()),
        };
        Ok(Wanted { filter, started_after })
    }
}

impl Wanted {
    /// One page. Short pages are fine, an empty one before the end is not: clients stop at it.
    async fn page(mut self, state: &AppState, who: &Principal) -> Result<Page<Sandbox>, HttpError> {
        let empty = || Page { items: Vec::new(), cursor: None };
        loop {
            let mut page = match state.service.list(who, &self.filter).await {
                Ok(page) => page,
                Err(ServiceError::TemplateNotFound { .. }) => return Ok(empty()),
                Err(error) => return Err(error.into()),
            };
            // The builder's own.
            page.items.retain(|sandbox| !sandbox.metadata.contains_key(BUILD_LABEL));
            if let Some(after) = self.started_after {
                let before = page.items.len();
                page.items.retain(|sandbox| sandbox.started_at.unwrap_or(sandbox.created_at) > after);
                // Newest first: the rest is older still.
                if !self.filter.ascending && page.items.len() < before {
                    page.cursor = None;
                }
            }
            if !page.items.is_empty() || page.cursor.is_none() {
                return Ok(page);
            }
            self.filter.cursor = page.cursor;
        }
    }
}

pub(super) async fn list(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Query(query): Query<ListQuery>,
) -> Result<Response, HttpError> {
    let page = query.wanted()?.page(&state, &who).await?;
    let items: Vec<ListedSandbox> = page.items.iter().map(ListedSandbox::of).collect();
    let mut response = paging::answer(items, page.cursor.as_deref());
    let running = HeaderValue::from(count_running(&state, &who).await?);
    response.headers_mut().insert(HeaderName::from_static("x-total-running"), running);
    Ok(response)
}

/// How many sandboxes of the workspace run, whatever the page shows.
async fn count_running(state: &AppState, who: &Principal) -> Result<usize, HttpError> {
    let mut filter = ListFilter { states: RUNNING.to_vec(), limit: LARGEST_PAGE, ..ListFilter::default() };
    let mut count = 0;
    loop {
        let page = state.service.list(who, &filter).await?;
        count += page.items.iter().filter(|sandbox| !sandbox.metadata.contains_key(BUILD_LABEL)).count();
        match page.cursor {
            Some(cursor) => filter.cursor = Some(cursor),
            None => return Ok(count),
        }
    }
}

/// The first list call: all that run, in one answer.
pub(super) async fn list_running(
    State(state): State<AppState>,
    Extension(who): Extension<Principal>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Vec<ListedSandbox>>, HttpError> {
    let running = Some("running".to_owned());
    let query = ListQuery { metadata: query.metadata, state: running, ..ListQuery::default() };
    let Wanted { mut filter, .. } = query.wanted()?;
    filter.limit = LARGEST_PAGE;
    let mut items = Vec::new();
    loop {
        let page = state.service.list(&who, &filter).await?;
        let seen = page.items.iter().filter(|sandbox| !sandbox.metadata.contains_key(BUILD_LABEL));
        items.extend(seen.map(ListedSandbox::of));
        match page.cursor {
            Some(cursor) => filter.cursor = Some(cursor),
            None => return Ok(Json(items)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_queries_are_refused_by_name() {
        let refused = |query: ListQuery| query.wanted().err().expect("must be refused").message;
        let text = |text: &str| Some(text.to_owned());
        assert!(refused(ListQuery { limit: Some(0), ..ListQuery::default() }).contains("limit"));
        assert!(refused(ListQuery { limit: Some(101), ..ListQuery::default() }).contains("limit"));
        assert!(refused(ListQuery { state: text("gone"), ..ListQuery::default() }).contains("gone"));
        assert!(refused(ListQuery { order: text("up"), ..ListQuery::default() }).contains("up"));
        assert!(refused(ListQuery { template: text("a:b"), ..ListQuery::default() }).contains("tag"));
        assert!(refused(ListQuery { started_after: text("x"), ..ListQuery::default() }).contains("startedAfter"));
    }

    #[test]
    fn states_are_as_asked_for_and_both_by_default() {
        let states = |state: Option<&str>| {
            let query = ListQuery { state: state.map(str::to_owned), ..ListQuery::default() };
            query.wanted().unwrap_or_else(|error| panic!("{}", error.message)).filter.states
        };
        assert_eq!(states(Some("paused")), PAUSED);
        assert_eq!(states(Some("running")), RUNNING);
        let both = [RUNNING.as_slice(), &PAUSED].concat();
        assert_eq!(states(Some("running,paused")), both);
        assert_eq!(states(None), both);
    }
}
