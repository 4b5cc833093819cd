use std::collections::BTreeSet;

use futures::StreamExt;

use crate::support::{TestServer, request, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_creates_at_sixteen_in_flight_all_work_and_share_nothing() {
    for pool_size in [0, 8] {
        let t = TestServer::start_with(move |config| config.pool_size = pool_size).await;
        let made: Vec<_> = futures::stream::iter(0..100)
            .map(|_| t.create_in_background(request()))
            .buffer_unordered(16)
            .map(|made| made.expect("joined").expect("created"))
            .collect()
            .await;
        let machines: BTreeSet<_> = made.iter().map(|sandbox| sandbox.machine.clone().expect("machine")).collect();
        assert_eq!(machines.len(), 100, "no machine has two owners");
        futures::stream::iter(&made)
            .for_each_concurrent(16, async |sandbox| t.kill(&sandbox.id).await.expect("killed"))
            .await;
        within(t.service.shutdown()).await;
        assert!(t.host.machines().is_empty());
    }
}
