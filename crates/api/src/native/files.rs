//! Files: bytes in both directions, and what there is.

use axum::{
    Json as JsonBody,
    body::Body,
    extract::State,
    http::{HeaderMap, Method, StatusCode},
    response::Response,
};
use serde::{Deserialize, Serialize};
use stockade_engine::guest::WriteFile;
use stockade_wire::files::{
    EntryInfo, EntryKind, ListRequest, MakeDirRequest, PathRequest, RemoveRequest, RenameRequest, SetAttributesRequest,
    SymlinkRequest, WatchRequest,
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{download, exec::check_text, guest, sandbox_id, show_unix_ms, stream, upload};
use crate::{
    ApiError, AppState,
    auth::Caller,
    extract::{Json, Path, Query},
};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(read, write, remove))
        .routes(routes!(stat))
        .routes(routes!(list))
        .routes(routes!(make_dir))
        .routes(routes!(rename))
        .routes(routes!(symlink))
        .routes(routes!(attributes))
        .routes(routes!(watch))
}

/// One entry: a link is a link, whatever it points to.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = Entry)]
struct EntryView {
    name: String,
    /// Absolute path in the guest.
    path: String,
    /// `file`, `directory`, `symlink` or `other`.
    #[schema(value_type = String)]
    kind: EntryKind,
    size_bytes: u64,
    /// Permission bits, octal.
    #[schema(example = "0644")]
    mode: String,
    owner: String,
    group: String,
    uid: u32,
    gid: u32,
    #[schema(format = DateTime)]
    modified_at: String,
    /// Where a link points, as written in it.
    link_target: Option<String>,
}

impl From<EntryInfo> for EntryView {
    fn from(info: EntryInfo) -> Self {
        Self {
            name: info.name,
            path: info.path,
            kind: info.kind,
            size_bytes: info.size,
            mode: format!("{:04o}", info.mode),
            owner: info.owner,
            group: info.group,
            uid: info.uid,
            gid: info.gid,
            modified_at: show_unix_ms(info.modified_unix_ms),
            link_target: info.link_target,
        }
    }
}

/// A directory's entries, by name; parents before children.
#[derive(Debug, Serialize, utoipa::ToSchema)]
struct EntryList {
    items: Vec<EntryView>,
}

/// Length and encoding are the guest's to judge; what cannot be a path at all is told here.
fn check_path(name: &str, path: String) -> Result<String, ApiError> {
    check_text(name, path, usize::MAX)
}

/// The path of a file to be written: the kernel would make nothing of a directory's, and neither do we.
fn file_path(path: String) -> Result<String, ApiError> {
    let path = check_path("path", path)?;
    if path.ends_with('/') || matches!(path.rsplit('/').next(), Some("." | "..")) {
        let message = format!("path '{path}' names a directory, not a file");
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "is_a_directory", message)
            .hint("name the file in it, or make the directory with POST /v1/sandboxes/{id}/files/mkdir"));
    }
    Ok(path)
}

fn check_user(user: Option<String>) -> Result<Option<String>, ApiError> {
    user.map(|user| check_text("user", user, 256)).transpose()
}

/// Octal permission bits such as `0644`.
fn mode_bits(mode: Option<&str>) -> Result<Option<u32>, ApiError> {
    let Some(text) = mode else {
        return Ok(None);
    };
    let is_octal = (1..=5).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let bits = u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= 0o7777);
    bits.map(Some)
        .ok_or_else(|| ApiError::invalid("`mode` must be octal permission bits such as \"0644\", at most 7777"))
}

/// Names one path.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PathParams {
    /// Absolute, `~`, `~/x`, or relative to the user's home.
    path: String,
    /// With whose rights; by default the template's user.
    user: Option<String>,
}

impl PathParams {
    fn request(self) -> Result<PathRequest, ApiError> {
        Ok(PathRequest { path: check_path("path", self.path)?, user: check_user(self.user)? })
    }
}

/// Read a file. `Range` is honoured; the bytes are streamed.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files", tag = "files", params(("id" = String, Path), PathParams),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, body = Vec<u8>, content_type = "application/octet-stream"),
    )
)]
async fn read(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<PathParams>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let request = params.request()?;
    let guest = guest(&state, &caller, &id).await?;
    download::respond(&guest, request, method == Method::HEAD, &headers).await
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WriteParams {
    /// The path; missing parents are made.
    path: String,
    user: Option<String>,
    /// Octal permission bits of a new file; by default 0666 less the umask.
    mode: Option<String>,
    /// Readers see the old file or the whole new one, nothing between.
    #[serde(default)]
    atomic: bool,
}

/// Write a file: the body is its content, of any length.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files", tag = "files", params(("id" = String, Path), WriteParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = EntryView))
)]
async fn write(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<WriteParams>,
    headers: HeaderMap,
    body: Body,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = WriteFile {
        path: file_path(params.path)?,
        user: check_user(params.user)?,
        atomic: params.atomic,
        mode: mode_bits(params.mode.as_deref())?,
        attributes: None,
    };
    let guest = guest(&state, &caller, &id).await?;
    let (stream, watch) = upload::start(body, &headers);
    let info = watch.finish(guest.write_file(&request, stream).await).await?;
    Ok(JsonBody(info.into()))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct RemoveParams {
    path: String,
    user: Option<String>,
    /// A directory with all it holds. False: only a file, a link or an empty directory.
    #[serde(default)]
    recursive: bool,
}

/// Remove a file, a link, or a directory.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/files", tag = "files", params(("id" = String, Path), RemoveParams),
    responses((status = 204))
)]
async fn remove(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<RemoveParams>,
) -> Result<StatusCode, ApiError> {
    let request = RemoveRequest {
        path: check_path("path", params.path)?,
        user: check_user(params.user)?,
        recursive: params.recursive,
        missing_ok: false,
    };
    guest(&state, &caller, &id).await?.remove(&request).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Describe a path. A link is described itself.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/stat", tag = "files", params(("id" = String, Path), PathParams),
    responses((status = 200, body = EntryView))
)]
async fn stat(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<PathParams>,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = params.request()?;
    let info = guest(&state, &caller, &id).await?.stat(&request).await?;
    Ok(JsonBody(info.into()))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListParams {
    path: String,
    user: Option<String>,
    /// How many levels, by default 1. Links are not entered.
    depth: Option<u32>,
}

/// List a directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/list", tag = "files", params(("id" = String, Path), ListParams),
    responses((status = 200, body = EntryList))
)]
async fn list(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<ListParams>,
) -> Result<JsonBody<EntryList>, ApiError> {
    let depth = params.depth.unwrap_or(1);
    if depth == 0 {
        return Err(ApiError::invalid("`depth` must be at least 1"));
    }
    let request = ListRequest { path: check_path("path", params.path)?, user: check_user(params.user)?, depth };
    let list = guest(&state, &caller, &id).await?.list(&request).await?;
    Ok(JsonBody(EntryList { items: list.entries.into_iter().map(EntryView::from).collect() }))
}

/// A directory to make.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct MakeDirBody {
    path: String,
    #[serde(default)]
    user: Option<String>,
    /// Make missing parents too. An existing directory is an error either way.
    #[serde(default)]
    parents: bool,
    /// Octal permission bits, by default 0755.
    #[serde(default)]
    mode: Option<String>,
}

/// Make a directory.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/mkdir", tag = "files", params(("id" = String, Path)),
    request_body = MakeDirBody, responses((status = 200, body = EntryView))
)]
async fn make_dir(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(body): Json<MakeDirBody>,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = MakeDirRequest {
        path: check_path("path", body.path)?,
        user: check_user(body.user)?,
        parents: body.parents,
        mode: mode_bits(body.mode.as_deref())?,
    };
    let info = guest(&state, &caller, &id).await?.make_dir(&request).await?;
    Ok(JsonBody(info.into()))
}

/// A new name.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct RenameBody {
    from: String,
    /// Missing parents are made.
    to: String,
    #[serde(default)]
    user: Option<String>,
}

/// Rename or move.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/rename", tag = "files", params(("id" = String, Path)),
    request_body = RenameBody, responses((status = 200, body = EntryView))
)]
async fn rename(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(body): Json<RenameBody>,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = RenameRequest {
        from: check_path("from", body.from)?,
        to: check_path("to", body.to)?,
        user: check_user(body.user)?,
    };
    let info = guest(&state, &caller, &id).await?.rename(&request).await?;
    Ok(JsonBody(info.into()))
}

/// A symbolic link to make.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct SymlinkBody {
    /// What the link says.
    target: String,
    /// Where the link is.
    path: String,
    #[serde(default)]
    user: Option<String>,
}

/// Make a symbolic link.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/symlink", tag = "files", params(("id" = String, Path)),
    request_body = SymlinkBody, responses((status = 200, body = EntryView))
)]
async fn symlink(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(body): Json<SymlinkBody>,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = SymlinkRequest {
        target: check_path("target", body.target)?,
        path: check_path("path", body.path)?,
        user: check_user(body.user)?,
    };
    let info = guest(&state, &caller, &id).await?.symlink(&request).await?;
    Ok(JsonBody(info.into()))
}

/// What to change; absent fields stay.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
struct AttributesBody {
    /// A link is followed.
    path: String,
    #[serde(default)]
    user: Option<String>,
    /// Octal permission bits.
    #[serde(default)]
    mode: Option<String>,
    /// By name or number.
    #[serde(default)]
    owner: Option<String>,
    /// By name or number.
    #[serde(default)]
    group: Option<String>,
}

/// Change permissions and owner.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/attributes", tag = "files", params(("id" = String, Path)),
    request_body = AttributesBody, responses((status = 200, body = EntryView))
)]
async fn attributes(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Json(body): Json<AttributesBody>,
) -> Result<JsonBody<EntryView>, ApiError> {
    let request = SetAttributesRequest {
        path: check_path("path", body.path)?,
        user: check_user(body.user)?,
        mode: mode_bits(body.mode.as_deref())?,
        owner: body.owner.map(|owner| check_text("owner", owner, 256)).transpose()?,
        group: body.group.map(|group| check_text("group", group, 256)).transpose()?,
    };
    let info = guest(&state, &caller, &id).await?.set_attributes(&request).await?;
    Ok(JsonBody(info.into()))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WatchParams {
    path: String,
    user: Option<String>,
    /// Also all directories below, those made later included.
    #[serde(default)]
    recursive: bool,
}

/// Watch a directory: one JSON object a line, `watching` first.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/watch", tag = "files", params(("id" = String, Path), WatchParams),
    responses((status = 200, body = stream::Line<'static>, content_type = "application/x-ndjson"))
)]
async fn watch(
    State(state): State<AppState>,
    caller: Caller,
    Path(id): Path<String>,
    Query(params): Query<WatchParams>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let request = WatchRequest {
        path: check_path("path", params.path)?,
        user: check_user(params.user)?,
        recursive: params.recursive,
        entry: false,
    };
    let events = guest(&state, &caller, &id).await?.watch(&request).await?;
    Ok(stream::response(events, stream::Format::accepted(&headers), stream::Kind::Watch, &state, sandbox_id(&id)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_nothing_else() {
        let bits = |text| mode_bits(Some(text)).ok().flatten();
        assert_eq!(
            (bits("0644"), bits("755"), bits("07777"), bits("0")),
            (Some(0o644), Some(0o755), Some(0o7777), Some(0))
        );
        for bad in ["", "8", "0o644", "+644", "-1", "10000", "777777", "u+x"] {
            assert_eq!(bits(bad), None, "{bad:?}");
        }
    }
}
