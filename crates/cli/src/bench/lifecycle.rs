//! Snapshots, forks and tiers, each beside what the bare emulator takes in the same run.

use std::time::{Duration, Instant};

use futures::future::join_all;
use serde_json::json;
use tokio::time;

use super::{
    PAUSE,
    bare::Emulator,
    measure::Samples,
    report::Measure,
    rounds::{create, milliseconds, output_of},
    server::Throwaway,
};
use crate::{client::Client, failure::Failure, ui::Ui};

/// Memory a program in the source has filled, in MiB. The last one leaves the guest what it needs.
const CHANGED_MIB: [u32; 3] = [5, 100, 300];
const CHILDREN: [usize; 3] = [1, 8, 32];
const CHILDREN_WAITED_FOR: [usize; 2] = [1, 8];
const DEPTHS: [usize; 3] = [1, 5, 10];
/// Rounds of what takes long.
const FEW: usize = 5;
const STILL_FOR: Duration = Duration::from_secs(10);
/// Sandboxes that are looked at while nothing happens: more than one, or what they share would seem to be its own.
const STILL: usize = 2;
/// After their start or halt; the guests' first seconds are not idle.
const SETTLED: Duration = Duration::from_secs(5);

pub(super) async fn measure(server: &Throwaway, n: usize, ui: Ui, measures: &mut Vec<Measure>) -> Result<(), Failure> {
    let emulator = Emulator::of(server).await?;
    let few = n.min(FEW);
    measures.extend(bare(&emulator, n, ui).await?);
    for mib in CHANGED_MIB {
        measures.extend(snapshots(server, mib, n, ui).await?);
    }
    for count in CHILDREN {
        let rounds = if count == 1 { n } else { few.min(3) };
        measures.extend(forks(server, &format!("fork of {count}"), count, rounds, ui).await?);
    }
    for (tier, name) in [("standby", "standby"), ("hibernated", "hibernation")] {
        measures.extend(tiers(server, tier, name, n, ui).await?);
    }
    measures.extend(depths(server, few, ui).await?);
    measures.extend(standby(server, ui).await?);
    Ok(())
}

/// What takes an emulator, where some wait.
pub(super) async fn measure_waiting(
    server: &Throwaway,
    n: usize,
    ui: Ui,
    measures: &mut Vec<Measure>,
) -> Result<(), Failure> {
    for count in CHILDREN_WAITED_FOR {
        let rounds = if count == 1 { n } else { n.min(FEW) };
        let of = format!("fork of {count}, emulators waiting");
        // Those that are missing are started the next time.
        forks(server, &of, count, 1, ui).await?;
        measures.extend(forks(server, &of, count, rounds, ui).await?);
    }
    measures.extend(tiers(server, "hibernated", "hibernation, an emulator waiting", n, ui).await?);
    server.quiet(0).await?;
    measures.push(private_memory("waiting emulator", server.memory_of_waiting()));
    Ok(())
}

fn private_memory(of: &str, held: Vec<Result<(f64, f64), String>>) -> Measure {
    let mut private = Samples::default();
    held.into_iter().for_each(|memory| private.push(memory.map(|(private, _)| private)));
    Measure::new(format!("{of}: private memory"), "MiB", private)
}

async fn bare(emulator: &Emulator, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("the bare emulator: {n} restores and halts"));
    let (mut restore, mut pause, mut wake) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..n {
        time::sleep(PAUSE).await;
        match emulator.times().await {
            Ok(times) => {
                restore.push(Ok::<_, Failure>(times.restore));
                pause.push(Ok::<_, Failure>(times.snapshot_pause));
                wake.push(Ok::<_, Failure>(times.wake));
            }
            Err(failure) => restore.push(Err(failure)),
        }
    }
    Ok(vec![
        Measure::new("bare emulator: restore to first reply, again", "ms", restore),
        Measure::new("bare emulator: halt, device state, go on", "ms", pause),
        Measure::new("bare emulator: halted to first reply", "ms", wake),
    ])
}

/// A sandbox in which a program holds so much memory of its own.
async fn holder(client: &Client, mib: u32) -> Result<String, Failure> {
    let (id, _) = create(client).await?;
    let program =
        format!("import os, time\nheld = os.urandom({mib} << 20)\nprint('held', flush=True)\ntime.sleep(1e6)");
    client.write_file(&id, "hold.py", &Default::default(), program.into()).await?;
    let line =
        "setsid python3 hold.py > held 2>&1 < /dev/null & until grep -q held held; do sleep 0.1; done; echo ready";
    output_of(client, &id, &["sh", "-c", line]).await?;
    Ok(id)
}

async fn snapshots(server: &Throwaway, mib: u32, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("snapshots with {mib} MiB changed: {n}"));
    let client = &server.client;
    let id = holder(client, mib).await?;
    let (mut pause, mut whole, mut size) = (Samples::default(), Samples::default(), 0.0);
    for _ in 0..n {
        time::sleep(PAUSE).await;
        let begin = Instant::now();
        let taken = client.snapshot(&id, &json!({})).await?;
        whole.push(Ok::<_, Failure>(milliseconds(begin)));
        pause.push(Ok::<_, Failure>(taken.paused_seconds * 1e3));
        size = taken.memory_bytes as f64 / f64::from(1 << 20);
        client.delete_snapshot(&taken.id).await?;
    }
    client.kill(&id).await?;
    server.settle(0).await?;
    Ok(vec![
        Measure::new(format!("snapshot, {mib} MiB written: pause of the source"), "ms", pause),
        Measure::new(format!("snapshot, {mib} MiB written: until durable"), "ms", whole),
        Measure::single(format!("snapshot, {mib} MiB written: memory it holds"), "MiB", size),
    ])
}

/// `of` begins the rows' names.
async fn forks(server: &Throwaway, of: &str, count: usize, rounds: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("{of}: {rounds}"));
    let client = &server.client;
    let (id, _) = create(client).await?;
    output_of(client, &id, &["/bin/echo", "ready"]).await?;
    let (mut answer, mut together) = (Samples::default(), Samples::default());
    let (mut each, mut memory) = (Samples::default(), Samples::default());
    for _ in 0..rounds {
        server.quiet(1).await?;
        let parent = server.memory();
        let begin = Instant::now();
        let children = client.fork(&id, &json!({"count": count, "all_or_nothing": true})).await?;
        answer.push(Ok::<_, Failure>(milliseconds(begin)));
        let firsts = children.iter().map(|child| output_of(client, &child.id, &["/bin/echo", "ready"]));
        for first in join_all(firsts).await {
            first?;
        }
        together.push(Ok::<_, Failure>(milliseconds(begin)));
        each.push(Ok::<_, Failure>(milliseconds(begin) / count as f64));
        let private = |all: Vec<Result<(f64, f64), String>>| {
            all.into_iter()
                .collect::<Result<Vec<_>, _>>()
                .map(|all| all.iter().map(|(private, _)| private).sum::<f64>())
        };
        let held = private(server.memory()).and_then(|all| private(parent).map(|parent| (all - parent) / count as f64));
        memory.push(held);
        for killed in join_all(children.iter().map(|child| client.kill(&child.id))).await {
            killed?;
        }
    }
    client.kill(&id).await?;
    server.settle(0).await?;
    Ok(vec![
        Measure::new(format!("{of}: until each has answered"), "ms", answer),
        Measure::new(format!("{of}: to the last one's first output"), "ms", together),
        Measure::new(format!("{of}: the same, per child"), "ms", each),
        Measure::new(format!("{of}: private memory per child"), "MiB", memory),
    ])
}

/// `name`: how the rows call the tier.
async fn tiers(server: &Throwaway, tier: &str, name: &str, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("into {name} and back: {n}"));
    let client = &server.client;
    let (id, _) = create(client).await?;
    output_of(client, &id, &["/bin/echo", "ready"]).await?;
    let (mut down, mut up, mut output) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..n {
        server.quiet(1).await?;
        let begin = Instant::now();
        client.change(&id, "pause", &json!({"tier": tier})).await?;
        down.push(Ok::<_, Failure>(milliseconds(begin)));
        time::sleep(PAUSE).await;
        let begin = Instant::now();
        client.change(&id, "resume", &json!({"lifetime_seconds": 600})).await?;
        up.push(Ok::<_, Failure>(milliseconds(begin)));
        output_of(client, &id, &["/bin/echo", "ready"]).await?;
        output.push(Ok::<_, Failure>(milliseconds(begin)));
    }
    client.kill(&id).await?;
    server.settle(0).await?;
    Ok(vec![
        Measure::new(format!("pause into {name}"), "ms", down),
        Measure::new(format!("resume from {name}"), "ms", up),
        Measure::new(format!("resume from {name}: to first output"), "ms", output),
    ])
}

/// Forks of forks: each generation's fork, of which only the child lives on.
async fn depths(server: &Throwaway, rounds: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("forks of forks, {rounds} lines of {} generations", DEPTHS[DEPTHS.len() - 1]));
    let client = &server.client;
    let mut samples = DEPTHS.map(|_| Samples::default());
    for _ in 0..rounds {
        let (mut id, _) = create(client).await?;
        for depth in 1..=DEPTHS[DEPTHS.len() - 1] {
            output_of(client, &id, &["/bin/echo", "ready"]).await?;
            time::sleep(PAUSE).await;
            let begin = Instant::now();
            let child = client.fork(&id, &json!({"all_or_nothing": true})).await?.remove(0);
            output_of(client, &child.id, &["/bin/echo", "ready"]).await?;
            if let Some(at) = DEPTHS.iter().position(|wanted| *wanted == depth) {
                samples[at].push(Ok::<_, Failure>(milliseconds(begin)));
            }
            client.kill(&id).await?;
            id = child.id;
        }
        client.kill(&id).await?;
        server.settle(0).await?;
    }
    let name = |depth| format!("fork at depth {depth} to first output");
    Ok(DEPTHS.into_iter().zip(samples).map(|(depth, samples)| Measure::new(name(depth), "ms", samples)).collect())
}

/// What one in standby takes while nothing happens.
async fn standby(server: &Throwaway, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note("idle sandboxes, and sandboxes in standby");
    let client = &server.client;
    let mut ids = Vec::new();
    for _ in 0..STILL {
        ids.push(create(client).await?.0);
    }
    let mut measures = Vec::new();
    for name in ["idle sandbox", "standby"] {
        if name == "standby" {
            for id in &ids {
                client.change(id, "pause", &json!({"tier": "standby"})).await?;
            }
        }
        time::sleep(SETTLED).await;
        let (before, begin) = (server.cpu_seconds(), Instant::now());
        time::sleep(STILL_FOR).await;
        let used = (server.cpu_seconds() - before) / begin.elapsed().as_secs_f64() * 100.0 / STILL as f64;
        measures.push(Measure::single(format!("{name}: processor"), "%", used));
        measures.push(private_memory(name, server.memory()));
    }
    for id in ids {
        client.kill(&id).await?;
    }
    server.settle(0).await?;
    Ok(measures)
}
