//! Lists in order of creation. A cursor is `a` or `d` (oldest or newest first) and the sequence number
//! of the last row seen: numbers are never used twice, so each sandbox that is there all the while
//! comes exactly once, whatever comes and goes between pages.

use std::collections::BTreeMap;

use sqlx::{QueryBuilder, Sqlite};
use stockade_model::{Sandbox, SandboxState, WorkspaceId};

use crate::{
    Store, StoreError,
    rows::{self, get},
};

/// Which sandboxes; all conditions hold.
#[derive(Clone, Debug, Default)]
pub struct SandboxQuery {
    /// In one of these states; empty: in any.
    pub states: Vec<SandboxState>,
    /// With all of these labels.
    pub metadata: BTreeMap<String, String>,
    /// Made from the template of this id or name.
    pub template: Option<String>,
    /// Oldest first.
    pub ascending: bool,
    /// At most this many.
    pub limit: u32,
    /// The cursor of the page before.
    pub cursor: Option<String>,
}

/// One page.
#[derive(Clone, Debug)]
pub struct SandboxPage {
    /// The sandboxes.
    pub items: Vec<Sandbox>,
    /// Present if there is more.
    pub cursor: Option<String>,
}

impl Store {
    /// Lists a workspace's sandboxes.
    ///
    /// # Errors
    /// The cursor is not one of this order, or the database fails.
    pub async fn list_sandboxes(
        &self,
        workspace: &WorkspaceId,
        query: &SandboxQuery,
    ) -> Result<SandboxPage, StoreError> {
        let mut sql = select(workspace, query)?;
        let rows = sql.build().fetch_all(&self.read).await.map_err(StoreError::database("list sandboxes"))?;
        let limit = query.limit as usize;
        let mut cursor = None;
        if rows.len() > limit && limit > 0 {
            let last: i64 = get(&rows[limit - 1], "sequence")?;
            cursor = Some(format!("{}{last}", order_letter(query.ascending)));
        }
        let items = rows.iter().take(limit).map(|row| Ok(rows::sandbox(row, &self.secret)?.0));
        Ok(SandboxPage { items: items.collect::<Result<_, StoreError>>()?, cursor })
    }
}

fn select<'q>(workspace: &'q WorkspaceId, query: &'q SandboxQuery) -> Result<QueryBuilder<'q, Sqlite>, StoreError> {
    let mut sql = QueryBuilder::new("SELECT * FROM sandboxes s WHERE s.workspace = ");
    sql.push_bind(workspace.as_str());
    if !query.states.is_empty() {
        sql.push(" AND s.state IN (");
        let mut words = sql.separated(", ");
        for state in &query.states {
            words.push_bind(state.as_str());
        }
        sql.push(")");
    }
    if let Some(template) = &query.template {
        sql.push(" AND (s.template = ")
            .push_bind(template)
            .push(" OR s.template_name = ")
            .push_bind(template)
            .push(")");
    }
    for (key, value) in &query.metadata {
        sql.push(
            " AND EXISTS (SELECT 1 FROM sandbox_labels l WHERE l.sandbox = s.sequence AND l.workspace = s.workspace",
        )
        .push(" AND l.key = ")
        .push_bind(key)
        .push(" AND l.value = ")
        .push_bind(value)
        .push(")");
    }
    if let Some(cursor) = &query.cursor {
        let last = parse_cursor(cursor, query.ascending).ok_or(StoreError::BadCursor)?;
        sql.push(if query.ascending { " AND s.sequence > " } else { " AND s.sequence < " }).push_bind(last);
    }
    sql.push(if query.ascending { " ORDER BY s.sequence" } else { " ORDER BY s.sequence DESC" });
    sql.push(" LIMIT ").push_bind(i64::from(query.limit) + 1);
    Ok(sql)
}

pub(crate) fn order_letter(ascending: bool) -> char {
    if ascending { 'a' } else { 'd' }
}

pub(crate) fn parse_cursor(cursor: &str, ascending: bool) -> Option<i64> {
    let digits = cursor.strip_prefix(order_letter(ascending))?;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse().ok()
}
