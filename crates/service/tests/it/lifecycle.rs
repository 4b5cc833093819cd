use std::time::Duration;

use futures::StreamExt;
use stockade_engine::{EngineError, GuestClient};
use stockade_model::{EndCause, SandboxId, SandboxState, Secret};
use stockade_service::ServiceError;
use stockade_wire::{
    event::Event,
    process::{Exit, StartRequest},
};

use crate::support::{TestServer, labels, request, within};

fn shell(command: &str) -> StartRequest {
    serde_json::from_value(serde_json::json!({ "command": { "shell": command } })).expect("a request")
}

/// What a shell command prints.
pub(crate) async fn run(guest: &GuestClient, command: &str) -> String {
    let mut events = guest.start(&shell(command)).await.expect("started").events;
    let mut printed = Vec::new();
    while let Some(event) = within(events.next()).await {
        match event.expect("the stream holds") {
            Event::Stdout(bytes) => printed.extend(bytes),
            Event::Exit(_) => break,
            _ => {}
        }
    }
    String::from_utf8(printed).expect("text")
}

#[tokio::test]
async fn a_created_sandbox_answers_and_knows_who_it_is() {
    let t = TestServer::start().await;
    let mut wanted = request();
    wanted.metadata = labels([("run", "1")]);
    wanted.env = labels([("TOKEN", "s3cret"), ("BOTH", "sandbox")]);
    let sandbox = t.try_create(wanted).await.expect("created");
    assert_eq!(sandbox.state, SandboxState::Running);
    assert_eq!(sandbox.deadline.duration_since(sandbox.started_at.expect("started")).as_secs(), 300);
    t.service.guest(&t.who, &sandbox.id).await.expect("guest").health().await.expect("healthy");

    let guest = t.service.guest(&t.who, &sandbox.id).await.expect("guest");
    let printed = run(&guest, "echo $FROM $BOTH $TOKEN").await;
    assert_eq!(printed, "template sandbox s3cret\n");

    let record = t.get(&sandbox.id).await;
    assert_eq!((record.env, record.metadata), (sandbox.env, sandbox.metadata));
    let states: Vec<_> = t.service.events(&t.who, &sandbox.id).await.expect("events").iter().map(|e| e.state).collect();
    assert_eq!(states, [SandboxState::Creating, SandboxState::Running]);
}

#[tokio::test]
async fn the_second_kill_finds_nothing_and_the_record_stays() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    t.kill(&sandbox.id).await.expect("killed");
    assert!(t.host.machines().is_empty(), "nothing is left when kill returns");
    assert!(matches!(t.kill(&sandbox.id).await, Err(ServiceError::SandboxEnded { .. })));
    assert!(matches!(t.kill(&SandboxId::random()).await, Err(ServiceError::SandboxNotFound { .. })));
    let ending = t.get(&sandbox.id).await.ending.expect("ending");
    assert_eq!(ending.cause, EndCause::Killed { key: t.who.key.clone() });
    let gone = within(t.service.guest(&t.who, &sandbox.id)).await;
    assert!(matches!(gone, Err(ServiceError::SandboxEnded { .. })), "{gone:?}");
    let gone = within(t.service.extend(&t.who, &sandbox.id, Duration::from_secs(9))).await;
    assert!(matches!(gone, Err(ServiceError::SandboxEnded { .. })), "{gone:?}");
}

#[tokio::test]
async fn a_kill_cuts_streams_and_never_as_a_success() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let guest = t.service.guest(&t.who, &sandbox.id).await.expect("guest");
    let mut events = guest.start(&shell("exec sleep 1000")).await.expect("started").events;
    t.kill(&sandbox.id).await.expect("killed");
    let mut last = None;
    while let Some(event) = within(events.next()).await {
        last = Some(event);
    }
    let is_success = |exit: &Exit| exit.code.is_some();
    assert!(
        matches!(&last, Some(Err(_))) || matches!(&last, Some(Ok(Event::Exit(exit))) if !is_success(exit)),
        "{last:?}"
    );
}

#[tokio::test]
async fn of_many_kills_at_once_one_succeeds() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let kills = futures::future::join_all((0..20).map(|_| t.kill(&sandbox.id))).await;
    assert_eq!(kills.iter().filter(|kill| kill.is_ok()).count(), 1);
    assert!(kills.iter().all(|kill| matches!(kill, Ok(()) | Err(ServiceError::SandboxEnded { .. }))), "{kills:?}");
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn each_way_to_end_is_told_apart() {
    use stockade_engine::MachineExit;
    let t = TestServer::start().await;
    let ends = [
        (MachineExit::GuestEnded("Kernel panic".to_owned()), EndCause::GuestEnded, "Kernel panic"),
        (MachineExit::OutOfMemory, EndCause::OutOfMemory, ""),
        (MachineExit::Crashed("signal 9".to_owned()), EndCause::Crashed, "signal 9"),
    ];
    for (exit, cause, detail) in ends {
        let sandbox = t.create().await;
        t.host.end(sandbox.machine.as_ref().expect("machine"), exit);
        // Whoever asks in the very moment is told the same.
        let refused = within(t.service.guest(&t.who, &sandbox.id)).await;
        let told = |refused: &ServiceError| match refused {
            ServiceError::SandboxEnded { ending, .. } => Some(ending.cause.clone()),
            _ => None,
        };
        assert_eq!(refused.as_ref().err().and_then(told), Some(cause.clone()), "{refused:?}");
        let ending = t.wait_for(&sandbox.id, SandboxState::Gone).await.ending.expect("ending");
        assert_eq!((ending.cause, ending.detail.as_str()), (cause, detail));
        crate::support::eventually("remains removed", || t.host.machines().is_empty()).await;
        assert!(matches!(t.kill(&sandbox.id).await, Err(ServiceError::SandboxEnded { .. })));
    }
}

#[tokio::test]
async fn strangers_and_unknown_ids_get_the_same_answers() {
    let t = TestServer::start().await;
    let mine = t.create().await;
    let ended = t.create().await;
    t.kill(&ended.id).await.expect("killed");
    let stranger = t.stranger().await;
    for id in [&mine.id, &ended.id, &SandboxId::random()] {
        let (s, who) = (&t.service, &stranger);
        let minute = Duration::from_secs(60);
        let answers = [
            s.get(who, id).await.err(),
            s.kill(who, id).await.err(),
            s.set_lifetime(who, id, minute).await.err(),
            s.set_lifetime(who, id, Duration::ZERO).await.err(),
            s.extend(who, id, minute).await.err(),
            s.guest(who, id).await.err(),
            s.console(who, id).await.err(),
            s.usage(who, id).await.err(),
            s.metrics(who, id, None, None).await.err(),
            s.events(who, id).await.err(),
        ];
        for (nth, answer) in answers.into_iter().enumerate() {
            let same = matches!(&answer, Some(ServiceError::SandboxNotFound { id: named }) if *named == id.to_string());
            assert!(same, "{nth}: {answer:?}");
        }
    }
    assert_eq!(t.get(&mine.id).await.deadline, mine.deadline);
    let private = t.add_template(Some(&t.who.workspace), "private").await;
    for name in ["private", private.as_str()] {
        assert!(t.service.template(&t.who, name).await.is_ok());
        let refused = t.service.template(&stranger, name).await;
        assert!(matches!(refused, Err(ServiceError::TemplateNotFound { .. })));
    }
}

#[tokio::test]
async fn the_access_token_opens_its_own_sandbox_only() {
    let t = TestServer::start().await;
    let (one, other) = (t.create().await, t.create().await);
    let by = |id: &SandboxId, token: Option<Secret>| {
        let (service, id) = (t.service.clone(), id.clone());
        async move { within(service.guest_by_token(&id, token.as_ref())).await.map(|(sandbox, _)| sandbox.id) }
    };
    assert_eq!(by(&one.id, Some(one.access_token.clone())).await.expect("mine"), one.id);
    assert_eq!(by(&one.id, None).await.expect("checked elsewhere"), one.id);
    for wrong in [other.access_token.clone(), Secret::new(""), Secret::new("x")] {
        assert!(matches!(by(&one.id, Some(wrong)).await, Err(ServiceError::WrongToken)));
    }
    t.kill(&one.id).await.expect("killed");
    let ended = by(&one.id, Some(one.access_token.clone())).await;
    assert!(matches!(ended, Err(ServiceError::SandboxEnded { .. })), "{ended:?}");
    assert!(matches!(by(&SandboxId::random(), None).await, Err(ServiceError::SandboxNotFound { .. })));
}

#[tokio::test]
async fn senseless_requests_are_refused_before_anything_happens() {
    let t = TestServer::start_with(|config| config.max_lifetime = Duration::from_secs(3600)).await;
    let mut unknown = request();
    unknown.template = "nope".to_owned();
    assert!(matches!(t.try_create(unknown).await, Err(ServiceError::TemplateNotFound { .. })));
    type Spoil = fn(&mut stockade_service::CreateSandbox);
    let bad: [(&str, Spoil); 7] = [
        ("lifetime", |r| r.lifetime = Duration::ZERO),
        ("lifetime", |r| r.lifetime = Duration::from_secs(3601)),
        ("env", |r| r.env = labels([("A=B", "")])),
        ("env", |r| r.env = labels([("A", "\0")])),
        ("env", |r| r.env = [("A".to_owned(), "x".repeat(300_000))].into()),
        ("metadata", |r| r.metadata = labels([("", "x")])),
        ("idempotency_key", |r| r.idempotency_key = Some("k".repeat(256))),
    ];
    for (field, spoil) in bad {
        let mut wanted = request();
        spoil(&mut wanted);
        match t.try_create(wanted).await {
            Err(ServiceError::Invalid { field: named, problem }) => {
                assert_eq!(named, field, "{problem}");
                assert!(problem.len() < 200, "{problem}");
            }
            other => panic!("{field}: {other:?}"),
        }
    }
    t.host.set_full(true);
    let full = t.try_create(request()).await;
    assert!(matches!(full, Err(ServiceError::Engine(EngineError::NoCapacity { .. }))), "{full:?}");
    assert!(t.everything().await.is_empty());
    assert!(t.host.started().is_empty());
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_a_whole_sandbox() {
    use stockade_engine::fake::{Moment, Step};
    let t = TestServer::start().await;
    let mut hang = t.host.hang(Step::Resume, Moment::Before);
    let caller = t.create_in_background(request());
    within(hang.reached()).await;
    caller.abort();
    assert!(caller.await.expect_err("aborted").is_cancelled());
    hang.release();
    let id = t.everything().await[0].id.clone();
    t.wait_for(&id, SandboxState::Running).await;
    t.assert_nothing_stray().await;
}

#[tokio::test]
async fn a_sandbox_can_be_killed_while_it_is_being_made() {
    use stockade_engine::fake::{Moment, Step};
    for step in [Step::Start, Step::Resume, Step::Link, Step::Identity] {
        let t = TestServer::start().await;
        let mut hang = t.host.hang(step, Moment::Before);
        let caller = t.create_in_background(request());
        within(hang.reached()).await;
        let id = t.everything().await[0].id.clone();
        let kill = t.kill(&id);
        let release = async {
            tokio::task::yield_now().await;
            // The start cannot be cut short: the kill waits for it.
            hang.release();
        };
        let (killed, ()) = futures::future::join(kill, release).await;
        killed.unwrap_or_else(|error| panic!("{step:?}: {error}"));
        let told = within(caller).await.expect("joined");
        assert!(matches!(told, Err(ServiceError::SandboxEnded { .. })), "{step:?}: {told:?}");
        assert_eq!(t.cause(&id).await, EndCause::Killed { key: t.who.key.clone() }, "{step:?}");
        t.assert_nothing_stray().await;
    }
}

#[tokio::test]
async fn a_shutdown_leaves_sandboxes_running_and_takes_no_new_ones() {
    let mut t = TestServer::start_with(|config| config.pool_size = 2).await;
    let sandbox = t.create().await;
    within(t.service.shutdown()).await;
    assert!(matches!(t.try_create(request()).await, Err(ServiceError::Busy { .. })));
    assert_eq!(t.host.machines(), [sandbox.machine.clone().expect("machine")], "the pool is gone, the sandbox is not");
    t.restart().await;
    t.service.guest(&t.who, &sandbox.id).await.expect("guest").health().await.expect("healthy");
}

#[tokio::test]
async fn metrics_are_sampled_when_asked_for() {
    let t = TestServer::start().await;
    let sandbox = t.create().await;
    let samples = within(t.service.metrics(&t.who, &sandbox.id, None, None)).await.expect("samples");
    assert_eq!(samples.len(), 1);
    assert_eq!(within(t.service.metrics(&t.who, &sandbox.id, None, None)).await.expect("samples").len(), 1);
    let later = samples[0].at + Duration::from_secs(1);
    assert!(within(t.service.metrics(&t.who, &sandbox.id, Some(later), None)).await.expect("samples").is_empty());
}
