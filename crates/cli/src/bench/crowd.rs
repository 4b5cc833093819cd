//! The service beside many idle sandboxes: the same requests before they are there and while they are.

use futures::{StreamExt as _, stream};
use tokio::time::{self, Instant};

use super::{IDLE_FOR, PAUSE, measure::Samples, memory_measures, report::Measure, rounds, server::Throwaway};
use crate::{failure::Failure, ui::Ui};

const IN_FLIGHT: usize = 4;

pub(super) async fn measure(server: &Throwaway, count: usize, n: usize, ui: Ui) -> Result<Vec<Measure>, Failure> {
    ui.note(&format!("requests on an otherwise empty server: {n} each"));
    let mut measures = requests(server, 0, n).await?;
    ui.note(&format!("{count} idle sandboxes, {IN_FLIGHT} in flight"));
    let create = |_| rounds::create(&server.client);
    let made: Vec<_> = stream::iter(0..count).map(create).buffer_unordered(IN_FLIGHT).collect().await;
    let mut creates = Samples::default();
    made.iter().for_each(|made| creates.push(made.as_ref().map(|(_, elapsed)| *elapsed)));
    measures.push(Measure::new(format!("create of {count}, {IN_FLIGHT} in flight"), "ms", creates));
    time::sleep(IDLE_FOR).await;
    measures.extend(at_rest(server, count).await);
    ui.note(&format!("requests beside them: {n} each"));
    measures.extend(requests(server, count, n).await?);
    Ok(measures)
}

/// What they take while nothing happens.
async fn at_rest(server: &Throwaway, count: usize) -> [Measure; 3] {
    let (before, begin) = (server.cpu_seconds(), Instant::now());
    time::sleep(2 * IDLE_FOR).await;
    let used = (server.cpu_seconds() - before) / begin.elapsed().as_secs_f64() * 100.0;
    let each = format!("each of {count} idle:");
    let [private, proportional] = memory_measures(&each, server.memory());
    [Measure::single(format!("{each} processor"), "%", used / count.max(1) as f64), private, proportional]
}

/// One sandbox more, and what is asked of it.
async fn requests(server: &Throwaway, beside: usize, n: usize) -> Result<Vec<Measure>, Failure> {
    let client = &server.client;
    let (id, _) = rounds::create(client).await?;
    rounds::exec_round_trip(client, &id).await?;
    let (mut first, mut exec, mut stat, mut list) =
        (Samples::default(), Samples::default(), Samples::default(), Samples::default());
    for _ in 0..n {
        time::sleep(PAUSE).await;
        first.push(rounds::start(client).await.map(|start| start.output));
        exec.push(rounds::exec_round_trip(client, &id).await);
        stat.push(rounds::stat_round_trip(client, &id).await);
        let begin = std::time::Instant::now();
        let listed = client.sandboxes(&crate::client::ListQuery::default()).await;
        list.push(listed.map(|_| rounds::milliseconds(begin)));
    }
    client.kill(&id).await?;
    let name = |what: &str| format!("beside {beside} idle: {what}");
    Ok(vec![
        Measure::new(name("restore to first output"), "ms", first),
        Measure::new(name("exec round trip (true)"), "ms", exec),
        Measure::new(name("file stat round trip"), "ms", stat),
        Measure::new(name("list of all sandboxes"), "ms", list),
    ])
}
