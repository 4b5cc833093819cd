//! The link between host and guest when one side sees things late.

use serde_json::json;
use stockade_system_tests::{Sandbox, TestServer};

const DEATHS: usize = 3;

/// Keeps both processors from the kernel's own work most of the time, but not from the agent: what a host that takes
/// processors away does by chance. The agent then hears the new server's hello before the kernel says that the old
/// one has hung up.
const BUSY: &str = r#"
echo -1 > /proc/sys/kernel/sched_rt_runtime_us
for task in $(ls /proc/1/task); do chrt --fifo --pid 60 $task; done
cat > /tmp/busy.py <<'END'
import time
while True:
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        pass
    time.sleep(0.02)
END
for processor in 0 1; do
    setsid taskset --cpu-list $processor chrt --fifo 50 python3 /tmp/busy.py >/dev/null 2>&1 </dev/null &
done
"#;

#[tokio::test]
async fn a_machine_in_standby_hears_the_next_server_whatever_its_kernel_sees_first() {
    let mut server = TestServer::start().await;
    let id = server.create("base").await.id().to_owned();
    Sandbox::new(&server, &id).run(json!({ "shell": BUSY, "user": "root" })).await.expect_success();
    for _ in 0..DEATHS {
        Sandbox::new(&server, &id).verb("pause", json!({ "tier": "standby" })).await;
        server.send_kill();
        server.reap().await;
        server.start_again().await;
        Sandbox::new(&server, &id).verb("resume", json!({})).await;
        assert!(!server.log().contains("no answer in the guest's session"), "{}", server.log());
    }
    server.stop().await;
}
