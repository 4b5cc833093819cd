//! Which request goes where.

use std::convert::Infallible;

use hyper::{Method, Request, Response, body::Incoming};
use stockade_wire::{ErrorBody, ErrorCode, route};

use crate::{
    Agent,
    failure::{Result, invalid},
    files, http,
    http::{Query, Reply},
    identity, ports,
    process::Selector,
    stats, watch,
};

/// Answers one request; errors become answers too.
pub(crate) async fn answer(
    agent: Agent,
    request: Request<Incoming>,
) -> std::result::Result<Response<Reply>, Infallible> {
    let path = request.uri().path().to_owned();
    if ![route::HEALTH, route::IDENTITY, route::SYNC, route::REHEARSAL, route::STATS].contains(&path.as_str()) {
        agent.note_use();
    }
    let result = if let Some(rest) = path.strip_prefix(route::PROCESSES).and_then(|rest| rest.strip_prefix('/')) {
        one_process(&agent, rest, request).await
    } else if let Some(port) = path.strip_prefix(route::PORTS).and_then(|rest| rest.strip_prefix('/')) {
        ports::connect(port, request).await
    } else {
        whole(&agent, &path, request).await
    };
    Ok(result.unwrap_or_else(|error| http::error(&error)))
}

async fn whole(agent: &Agent, path: &str, request: Request<Incoming>) -> Result<Response<Reply>> {
    let is_get = request.method() == Method::GET;
    let is_post = request.method() == Method::POST;
    match path {
        route::HEALTH if is_get => http::json(&agent.info()),
        route::IDENTITY if is_post => {
            identity::introduce(agent, http::read_json(request).await?)?;
            Ok(http::done())
        }
        route::SYNC if is_post => {
            crate::bulk::run(|| {
                // SAFETY: sync has no preconditions.
                unsafe { libc::sync() };
                Ok(())
            })
            .await?;
            Ok(http::done())
        }
        route::REHEARSAL if is_post => Ok(Response::new(Reply::Output(agent.rehearse().await?))),
        route::STATS if is_get => http::json(&stats::sample(agent)?),
        route::PROCESSES if is_post => {
            let reader = agent.start_process(http::read_json(request).await?).await?;
            Ok(Response::new(Reply::Output(reader)))
        }
        route::PROCESSES if is_get => http::json(&agent.list_processes()),
        route::WATCH if is_post => watch::start(agent, http::read_json(request).await?).await,
        _ => files::answer(agent, path, request).await,
    }
}

async fn one_process(agent: &Agent, rest: &str, request: Request<Incoming>) -> Result<Response<Reply>> {
    let (selector, verb) = rest.split_once('/').ok_or_else(|| unknown(rest))?;
    let selector = Selector::parse(selector)?;
    let query = Query::parse(request.uri().query())?;
    let process = agent.find_process(&selector)?;
    match (request.method(), verb) {
        (&Method::GET, route::EVENTS) => {
            let reader = process.attach(query.parsed("after")?);
            return Ok(Response::new(Reply::Output(reader)));
        }
        (&Method::POST, route::STDIN) => process.write_input(request.into_body(), query.flag("close")?).await?,
        (&Method::POST, route::SIGNAL) => process.signal(http::read_json(request).await?)?,
        (&Method::POST, route::RESIZE) => process.resize(http::read_json(request).await?)?,
        _ => return Err(unknown(verb)),
    }
    Ok(http::done())
}

/// No such route, or not with this method.
pub(crate) fn unknown(path: &str) -> ErrorBody {
    if path.len() > 200 {
        invalid("no such route")
    } else {
        ErrorBody::new(ErrorCode::NotFound, format!("no route '{path}'"))
    }
}
