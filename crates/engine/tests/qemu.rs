//! Real machines under QEMU.

mod support;

use stockade_engine::{Engine, Machine, MachineExit};
use support::{Rig, hello};

#[tokio::test]
async fn a_machine_is_restored_answers_and_leaves_nothing_behind() {
    let rig = Rig::new().await;
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    hello(&machine).await;
    let usage = machine.usage().expect("read");
    assert!(usage.private_bytes > 1 << 20 && usage.proportional_bytes >= usage.private_bytes, "{usage:?}");
    assert!(usage.cpu_micros > 0 && usage.disk_bytes > 0, "{usage:?}");
    machine.kill().await.expect("killed");
    machine.kill().await.expect("killing again is fine");
    assert_eq!(machine.exited().await, MachineExit::Killed);
    assert!(rig.machine_dirs().is_empty());
    assert!(rig.engine.sweep(&Default::default()).await.expect("swept").is_empty());
}
