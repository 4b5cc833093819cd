//! Files, with the rights of the user a request names. Every operation runs on a blocking thread that has
//! taken these rights ([`crate::bulk`]).

mod attributes;
mod change;
mod entry;
mod list;
mod read;
mod remove;
mod write;

use hyper::{Method, Request, Response, body::Incoming};
use serde::Serialize;
use stockade_wire::{files as wire, route};

pub(crate) use entry::describe;

use crate::{
    Agent,
    account::Account,
    bulk,
    failure::{Result, invalid},
    http,
    http::Reply,
    routes,
};

/// Answers the routes about files.
pub(crate) async fn answer(agent: &Agent, path: &str, request: Request<Incoming>) -> Result<Response<Reply>> {
    let answer = match (request.method(), path) {
        (&Method::GET, route::FILES) => return read::answer(agent, request).await,
        (&Method::PUT, route::FILES) => write::answer(agent, request).await,
        (&Method::POST, _) => answer_json(agent, path, request).await,
        _ => return Err(routes::unknown(path)),
    };
    agent.settle_watches().await;
    answer
}

/// Those that take and give JSON.
async fn answer_json(agent: &Agent, path: &str, request: Request<Incoming>) -> Result<Response<Reply>> {
    match path {
        route::STAT => {
            let wire::PathRequest { path, user } = http::read_json(request).await?;
            with(agent, user.as_deref(), &path, |path, _| entry::stat(path)).await
        }
        route::LIST => {
            let wire::ListRequest { path, user, depth } = http::read_json(request).await?;
            list::answer(agent, user.as_deref(), &path, depth).await
        }
        route::MKDIR => {
            let wire::MakeDirRequest { path, user, parents, mode } = http::read_json(request).await?;
            with(agent, user.as_deref(), &path, move |path, _| change::make_dir(path, parents, mode)).await
        }
        route::RENAME => {
            let wire::RenameRequest { from, to, user } = http::read_json(request).await?;
            let to = absolute(&to, &agent.account(user.as_deref())?.home)?;
            with(agent, user.as_deref(), &from, move |from, _| change::rename(from, &to)).await
        }
        route::REMOVE => {
            let wire::RemoveRequest { path, user, recursive, missing_ok } = http::read_json(request).await?;
            let account = agent.account(user.as_deref())?;
            let path = absolute(&path, &account.home)?;
            // A large tree takes its time.
            bulk::run_as(&account, move || remove::remove(&path, recursive, missing_ok)).await?;
            Ok(http::done())
        }
        route::SYMLINK => {
            let wire::SymlinkRequest { target, path, user } = http::read_json(request).await?;
            with(agent, user.as_deref(), &path, move |path, _| change::symlink(&target, path)).await
        }
        route::ATTRIBUTES => {
            let request: wire::SetAttributesRequest = http::read_json(request).await?;
            let path = request.path.clone();
            let user = request.user.clone();
            with(agent, user.as_deref(), &path, move |path, _| change::set_attributes(path, &request)).await
        }
        _ => Err(routes::unknown(path)),
    }
}

/// Runs a short operation on a path with a user's rights and answers with what it gives.
async fn with<T, F>(agent: &Agent, user: Option<&str>, path: &str, operation: F) -> Result<Response<Reply>>
where
    T: Serialize + Send + 'static,
    F: FnOnce(&str, &Account) -> Result<T> + Send + 'static,
{
    let account = agent.account(user)?;
    let path = absolute(path, &account.home)?;
    let user = account.clone();
    http::json(&bulk::quick_as(&account, move || operation(&path, &user)).await?)
}

/// A path as a request gives it, made absolute: `/x`, `~`, `~/x`, or relative to the home. Steps to where one is, and
/// back, are taken by name, as a shell's `cd` does; what comes back is one spelling of the path.
pub(crate) fn absolute(path: &str, home: &str) -> Result<String> {
    if path.is_empty() {
        return Err(invalid("the path is empty"));
    }
    if path.contains('\0') {
        return Err(invalid("the path contains a NUL byte"));
    }
    if path.starts_with('/') {
        return Ok(cleaned(path));
    }
    let rest = match path.strip_prefix('~') {
        Some("") => "",
        Some(rest) if rest.starts_with('/') => rest,
        _ => path,
    };
    Ok(cleaned(&format!("{home}/{rest}")))
}

/// Without empty steps, `.` and `..`; a slash at the end, too, would make the kernel follow a link.
fn cleaned(path: &str) -> String {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_absolute_or_start_at_home() {
        let resolve = |path| absolute(path, "/home/user").expect("a good path");
        assert_eq!(resolve("/etc//passwd/"), "/etc/passwd");
        assert_eq!(resolve("./x/../y/."), "/home/user/y");
        assert_eq!(resolve("../../../x"), "/x");
        assert_eq!(resolve("/.."), "/");
        assert_eq!(resolve("~"), "/home/user");
        assert_eq!(resolve("~/"), "/home/user");
        assert_eq!(resolve("~/a b"), "/home/user/a b");
        assert_eq!(resolve("~other"), "/home/user/~other");
        assert_eq!(resolve("a/../b"), "/home/user/b");
        assert_eq!(resolve("/"), "/");
        assert_eq!(absolute("x", "/").expect("a good path"), "/x");
        assert!(absolute("", "/").is_err());
        assert!(absolute("a\0b", "/").is_err());
    }
}
