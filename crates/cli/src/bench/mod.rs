//! `stockade bench`: measures this host with throwaway servers of its own.
//!
//! ```text
//! no server                  the network, direct and through a gateway, from a network namespace
//! server with the pool off   restore -> first output, in turn with the bare emulator's restore
//!                            command and file round trips, transfers, memory of idle sandboxes
//!                            one flow and first connections from a guest, through the gateway and without
//!                            snapshots, forks, pauses and resumes, beside the bare emulator's own halts
//! server with emulators      the same restores, forks and resumes where an emulator has been started ahead of need
//!   that wait
//! server with a pool         claim -> first output, first connection; creates per second at 1, 4, 16 in flight
//! ```
//!
//! With `--idle N` nothing of that, but requests on an empty server and beside N idle sandboxes. With `--e2b PYTHON`
//! nothing of that, but our own API and E2B's SDK in turn.
//!
//! Both sides of a ratio are measured in turn, so that noise of the host hits both.

use std::{path::Path, time::Duration};

use tokio::time;

use crate::{
    args::{Accel, Bench, Common},
    failure::{FAILED, Failure},
    local_paths::default_data_dir,
    server::engine::engine_failure,
    ui::Ui,
};

mod bare;
mod crowd;
mod e2b;
mod lifecycle;
mod measure;
mod network;
mod report;
mod rounds;
mod server;

use measure::Samples;
use network::guest::{self, World};
use report::{Host, Measure, Report};
use server::{Kept, Shared, Throwaway};

const POOL: usize = 4;
/// Emulators that wait, where some do.
const WAITING: usize = 8;
/// Sandboxes whose memory is looked at.
const IDLE_SANDBOXES: usize = 8;
/// How long they are left alone before.
const IDLE_FOR: Duration = Duration::from_secs(5);
const TRANSFERS: usize = 5;
const IN_FLIGHT: [usize; 3] = [1, 4, 16];
/// Between two samples: what the last one left to do is done, and the guests are quiet.
const PAUSE: Duration = Duration::from_millis(200);

/// Measures everything and tells it; exit code 1 if anything failed on the way.
pub(crate) async fn bench(common: &Common, args: Bench, ui: Ui) -> Result<u8, Failure> {
    let data_dir = common.data_dir.clone().unwrap_or_else(default_data_dir);
    let cache = common.template_cache.clone().unwrap_or_else(|| data_dir.join("cache"));
    let shared = Shared::new(&data_dir, cache)?;
    let accel = match args.accel {
        Accel::Auto => "auto",
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    };
    let n = args.n;
    // Not after minutes of measuring.
    let file = args.json_file.flatten();
    file.as_deref().map(report::check_writable).transpose()?;
    if let Some(python) = &args.e2b {
        return tell(bench_e2b(&shared, accel, python, n, ui).await?, file.as_deref(), ui);
    }
    // First: it needs no server, and nothing else should run beside it.
    let mut measures = if args.idle.is_none() { network::measure(ui).await? } else { Vec::new() };
    ui.note("starting a server without a pool (the first time this builds the base template)");
    let world = World::start()?;
    let server = Throwaway::start(&shared, accel, Kept::default(), &world.arguments()).await?;
    let host = Host::look(&server).await?;
    if let Some(count) = args.idle {
        let measured = crowd::measure(&server, count, n, ui).await;
        server.stop().await?;
        return tell(Report::new(host, n, measured?), file.as_deref(), ui);
    }
    let outcome = without_pool(&server, n, ui, &mut measures).await;
    server.stop().await?;
    let others = async {
        outcome?;
        with_waiting(&shared, accel, n, ui, &mut measures).await?;
        with_pool(&shared, accel, &world, n, ui, &mut measures).await
    };
    let outcome = others.await;
    // What was measured before something failed is worth telling.
    let code = tell(Report::new(host, n, measures), file.as_deref(), ui)?;
    outcome.map(|()| code)
}

/// Without a pool and, where there is code to run, with one.
async fn bench_e2b(shared: &Shared, accel: &str, python: &Path, n: usize, ui: Ui) -> Result<Report, Failure> {
    let has_code = e2b::packages(python).await?.have_code_interpreter();
    let kernels: &[_] = if has_code { &["--with", "code-interpreter"] } else { &[] };
    ui.note("starting a server without a pool (the first time this builds its templates)");
    let server = Throwaway::start(shared, accel, Kept::default(), kernels).await?;
    let host = Host::look(&server).await?;
    let measured = e2b::measure(&server, python, n, ui).await;
    server.stop().await?;
    let mut measures = measured?;
    if has_code {
        ui.note("starting a server with a pool");
        let server = Throwaway::start(shared, accel, Kept { machines: 1, emulators: 0 }, kernels).await?;
        // One of each template.
        let measured = e2b::measure_pooled(&server, python, 2, n, ui).await;
        server.stop().await?;
        measures.extend(measured?);
    }
    Ok(Report::new(host, n, measures))
}

async fn without_pool(server: &Throwaway, n: usize, ui: Ui, measures: &mut Vec<Measure>) -> Result<(), Failure> {
    measures.extend(restores(server, "restore", n, ui).await?);
    measures.extend(round_trips(server, n, ui).await?);
    measures.extend(guest::throughput(server, ui).await?);
    measures.extend(guest::first_connections(server, 0, n, ui).await?);
    measures.extend(idle_memory(server, ui).await?);
    lifecycle::measure(server, n, ui, measures).await
}

async fn with_waiting(
    shared: &Shared,
    accel: &'static str,
    n: usize,
    ui: Ui,
    measures: &mut Vec<Measure>,
) -> Result<(), Failure> {
    ui.note("starting a server with emulators that wait");
    let server = Throwaway::start(shared, accel, Kept { machines: 0, emulators: WAITING }, &[]).await?;
    let stages = async {
        measures.extend(restores(&server, "restore, an emulator waiting", n, ui).await?);
        lifecycle::measure_waiting(&server, n, ui, measures).await
    };
    let outcome = stages.await;
    server.stop().await?;
    outcome
}

async fn with_pool(
    shared: &Shared,
    accel: &'static str,
    world: &World,
    n: usize,
    ui: Ui,
    measures: &mut Vec<Measure>,
) -> Result<(), Failure> {
    ui.note("starting a server with a pool");
    let kept = Kept { machines: POOL, emulators: 0 };
    let server = Throwaway::start(shared, accel, kept, &world.arguments()).await?;
    let stages = async {
        measures.extend(claims(&server, n, ui).await?);
        measures.extend(guest::first_connections(&server, POOL, n, ui).await?);
        for in_flight in IN_FLIGHT {
            measures.extend(creates(&server, n, in_flight, ui).await?);
        }
        Ok(())
    };
    let outcome = stages.await;
    server.stop().await?;
    outcome
}

fn tell(report: Report, file: Option<&Path>, ui: Ui) -> Result<u8, Failure> {
    report.tell(file, ui)?;
    Ok(if report.failures() > 0 { FAILED } else { 0 })
}

/// A failed start counts once, as one to the first output.
fn push_start(start: Result<rounds::Start, Failure>, answer: &mut Samples, output: &mut Samples) {
    if let Ok(start) = &start {
        answer.push(Ok::<_, Failure>(start.answer));
    }
    output.push(start.map(|start| start.output));
}

/// `of` begins the rows' names.
async fn restores(server: &Throwaway, of: &str, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("{of}, ours and the bare emulator's in turn: {n} each"));
    let (mut answer, mut output) = (Samples::default(), Samples::default());
    let (mut bare_reply, mut bare_output) = (Samples::default(), Samples::default());
    let emulator = bare::Emulator::of(server).await?;
    // The first one reads files from disk.
    rounds::start(&server.client).await?;
    for _ in 0..n {
        server.quiet(0).await?;
        push_start(rounds::start(&server.client).await, &mut answer, &mut output);
        server.quiet(0).await?;
        bare_reply.push(emulator.restore().await);
        time::sleep(PAUSE).await;
        bare_output.push(emulator.first_output().await);
    }
    let answer_ratio = answer.median() / bare_reply.median();
    let output_ratio = output.median() / bare_output.median();
    Ok(vec![
        Measure::new(of, "ms", answer),
        Measure::new(format!("{of}: bare emulator to first reply"), "ms", bare_reply),
        Measure::single(format!("{of}: ours / bare to first reply (medians)"), "x", answer_ratio),
        Measure::new(format!("{of}: to first output"), "ms", output),
        Measure::new(format!("{of}: bare emulator to first output"), "ms", bare_output),
        Measure::single(format!("{of}: to first output, ours / bare (medians)"), "x", output_ratio),
    ])
}

async fn round_trips(server: &Throwaway, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note("round trips and transfers on a live sandbox");
    let client = &server.client;
    let (id, _) = rounds::create(client).await?;
    time::sleep(PAUSE).await;
    let (mut exec, mut stat) = (Samples::default(), Samples::default());
    rounds::exec_round_trip(client, &id).await?;
    for _ in 0..n * 5 {
        exec.push(rounds::exec_round_trip(client, &id).await);
        stat.push(rounds::stat_round_trip(client, &id).await);
    }
    let (mut up, mut down) = (Samples::default(), Samples::default());
    for _ in 0..TRANSFERS {
        match rounds::transfer(client, &id).await {
            Ok((upload, download)) => {
                up.push(Ok::<_, Failure>(upload));
                down.push(Ok::<_, Failure>(download));
            }
            Err(failure) => up.push(Err(failure)),
        }
    }
    client.kill(&id).await?;
    server.settle(0).await?;
    Ok(vec![
        Measure::new("exec round trip (true)", "ms", exec),
        Measure::new("file stat round trip", "ms", stat),
        Measure::new("upload, 32 MiB file", "MB/s", up),
        Measure::new("download, 32 MiB file", "MB/s", down),
    ])
}

/// What idle sandboxes hold, and as many machines of the bare emulator.
async fn idle_memory(server: &Throwaway, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("memory of {IDLE_SANDBOXES} idle sandboxes, then of as many bare machines"));
    let mut ids = Vec::new();
    for _ in 0..IDLE_SANDBOXES {
        ids.push(rounds::create(&server.client).await?.0);
    }
    time::sleep(IDLE_FOR).await;
    let mut measures = Vec::from(memory_measures("idle sandbox,", server.memory()));
    for id in ids {
        server.client.kill(&id).await?;
    }
    server.settle(0).await?;

    let emulator = bare::Emulator::of(server).await?;
    let mut machines = Vec::new();
    for _ in 0..IDLE_SANDBOXES {
        machines.push(emulator.start().await?);
    }
    time::sleep(IDLE_FOR).await;
    let pids = machines.iter().filter_map(|machine| machine.pid().and_then(|pid| i32::try_from(pid).ok()));
    measures.extend(memory_measures("bare emulator: idle,", pids.map(server::memory_of).collect()));
    for machine in machines {
        machine.end().await.map_err(|error| engine_failure(&error))?;
    }
    Ok(measures)
}

/// The two rows of a report; `of` begins their names.
fn memory_measures(of: &str, held: Vec<Result<(f64, f64), String>>) -> [Measure; 2] {
    let (mut private, mut proportional) = (Samples::default(), Samples::default());
    for memory in held {
        private.push(memory.clone().map(|(private, _)| private));
        proportional.push(memory.map(|(_, proportional)| proportional));
    }
    [
        Measure::new(format!("{of} private memory"), "MiB", private),
        Measure::new(format!("{of} proportional memory"), "MiB", proportional),
    ]
}

async fn claims(server: &Throwaway, n: usize, ui: Ui) -> Result<[Measure; 2], Failure> {
    ui.note(&format!("claims from the pool: {n}"));
    let (mut answer, mut output) = (Samples::default(), Samples::default());
    server.settle_pool(POOL).await?;
    rounds::start(&server.client).await?;
    for _ in 0..n {
        server.quiet_pool(POOL).await?;
        push_start(rounds::start(&server.client).await, &mut answer, &mut output);
    }
    Ok([Measure::new("claim", "ms", answer), Measure::new("claim to first output", "ms", output)])
}

async fn creates(server: &Throwaway, n: usize, in_flight: usize, ui: Ui) -> Result<[Measure; 2], Failure> {
    // 100 by default at the widest.
    let count = (n * 5).min(n * 2 + in_flight * 4).max(in_flight);
    ui.note(&format!("{count} creates, {in_flight} in flight"));
    server.quiet_pool(POOL).await?;
    let burst = rounds::burst(server, count, in_flight).await?;
    Ok([
        Measure::new(format!("create, {in_flight} in flight"), "ms", burst.latency),
        Measure::single(format!("creates per second, {in_flight} in flight"), "1/s", burst.per_second),
    ])
}
