//! `stockade run`: a sandbox for one command.
//!
//! The sandbox is ended on every way out: the command's end, a failure, the signals that end programs. Should this
//! program be killed outright, the sandbox's deadline ends it: it is kept only minutes away, and moved while
//! the command runs.

use std::{future::Future, time::Duration};

use serde_json::json;
use tokio::{
    task::{JoinError, JoinHandle},
    time,
};

use super::{
    Context,
    attend::{Role, Signals, code_of_signal},
    exec::{request, start_and_attend},
    network::spec,
};
use crate::{
    args::Run,
    client::{Client, CreateRequest, Sandbox},
    failure::Failure,
};

/// The deadline is never further away than this while the command runs, unless `--lifetime` says so.
const LIFETIME_SECONDS: f64 = 300.0;
const EXTEND_EVERY: Duration = Duration::from_secs(100);
/// How long the end of the sandbox may take before we leave it to its deadline.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates, runs, ends; the command's exit code.
pub(super) async fn run(context: &Context, args: Run) -> Result<u8, Failure> {
    let exec = request(&args.running, Vec::new())?;
    let mut signals = Signals::listen()?;
    let create = CreateRequest {
        template: args.making.template,
        lifetime_seconds: Some(args.making.lifetime.unwrap_or(LIFETIME_SECONDS)),
        metadata: args.making.metadata.into_iter().collect(),
        env: args.making.env.into_iter().collect(),
        rules: <_>::default(),
        network: spec(&args.making.network),
    };
    let sandbox = match create_unless_signalled(&context.client, create, &mut signals).await? {
        Created::Sandbox(sandbox) => sandbox,
        Created::Signalled(code) => return Ok(code),
    };
    if args.keep {
        context.ui.note(&format!("sandbox {}", sandbox.id));
    }
    let told = context.ui.event(&json!({"type": "sandbox", "id": sandbox.id}));
    let keeper = args.making.lifetime.is_none().then(|| keep_alive(context.client.clone(), sandbox.id.clone()));
    let result = match told {
        Ok(()) => start_and_attend(context, &sandbox.id, &exec, Role::Run, &mut signals).await,
        Err(failure) => Err(failure),
    };
    if let Some(keeper) = keeper {
        keeper.abort();
    }
    if !args.keep {
        end(context, &sandbox.id, &mut signals).await;
    }
    result
}

enum Created {
    Sandbox(Box<Sandbox>),
    Signalled(u8),
}

/// A create under way cannot be called back: on a signal it is waited for, and what it made is ended.
async fn create_unless_signalled(
    client: &Client,
    request: CreateRequest,
    signals: &mut Signals,
) -> Result<Created, Failure> {
    let mut create = {
        let client = client.clone();
        tokio::spawn(async move { client.create(&request).await })
    };
    let number = tokio::select! {
        created = &mut create => return joined(created).map(|sandbox| Created::Sandbox(Box::new(sandbox))),
        number = signals.next() => number,
    };
    let undo = async {
        if let Ok(sandbox) = joined(create.await) {
            // If this fails, the sandbox's deadline is near.
            let _ = client.kill(&sandbox.id).await;
        }
    };
    unless_signalled(undo, signals).await;
    Ok(Created::Signalled(code_of_signal(number)))
}

fn joined<T>(result: Result<Result<T, Failure>, JoinError>) -> Result<T, Failure> {
    result.map_err(|error| Failure::new("internal", error.to_string()))?
}

/// Ends the sandbox; says so where that fails, since it costs something until its deadline.
async fn end(context: &Context, id: &str, signals: &mut Signals) {
    let kill = async {
        match context.client.kill(id).await {
            Ok(()) => {}
            // It ended by itself; that is known already.
            Err(failure) if ["sandbox_not_found", "sandbox_ended", "not_found"].contains(&failure.code.as_str()) => {}
            Err(failure) => context.ui.note(&format!("warning: sandbox {id} is left to its deadline: {failure}")),
        }
    };
    unless_signalled(kill, signals).await;
}

/// Waits for the work, but not for ever, and not against a user who presses Ctrl-C again.
async fn unless_signalled(work: impl Future<Output = ()>, signals: &mut Signals) {
    tokio::select! {
        () = work => {}
        _ = signals.next() => {}
        () = time::sleep(KILL_TIMEOUT) => {}
    }
}

fn keep_alive(client: Client, id: String) -> JoinHandle<()> {
    tokio::spawn(async move {
        loop {
            time::sleep(EXTEND_EVERY).await;
            // One that fails is made up for by the next.
            let _ = client.extend(&id, LIFETIME_SECONDS).await;
        }
    })
}
