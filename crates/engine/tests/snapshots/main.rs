//! Snapshots of real machines under QEMU, and machines started from them.

mod capacity;
mod crash;
mod disks;
mod generations;
mod refusals;
mod spares;
mod streams;
#[path = "../support/mod.rs"]
mod support;

use std::{fs, path::Path};

use futures::StreamExt;
use stockade_engine::{
    GuestClient, Machine,
    guest::{ReadFile, WriteFile},
    qemu::QemuMachine,
};
use support::{Lines, Rig, error_text};

async fn running(rig: &Rig) -> QemuMachine {
    let machine = rig.start().await;
    machine.resume().await.expect("resumed");
    machine
}

/// The counting process of a machine is past a number, goes on and skips none; where it is now.
async fn counts_on(machine: &QemuMachine, past: u64) -> u64 {
    let guest = machine.guest().await.unwrap_or_else(|error| panic!("{}", error_text(error)));
    let mut lines = Lines::attach(&guest, "count").await;
    let first = lines.number().await;
    assert!(first > past, "{first} is not past {past}");
    for next in first + 1..first + 60 {
        assert_eq!(lines.number().await, next);
    }
    first + 59
}

async fn write(guest: &GuestClient, path: &str, bytes: &[u8]) {
    let user = Some("root".to_owned());
    let request = WriteFile { path: path.to_owned(), user, ..WriteFile::default() };
    let pieces: Vec<_> = bytes.chunks(32 << 10).map(|piece| Ok(bytes::Bytes::copy_from_slice(piece))).collect();
    let written = guest.write_file(&request, Box::pin(futures::stream::iter(pieces))).await;
    written.unwrap_or_else(|error| panic!("{path}: {}", error_text(error)));
}

/// A file's contents; `None`: there is none.
async fn read(guest: &GuestClient, path: &str) -> Option<Vec<u8>> {
    let request = ReadFile { path: path.to_owned(), user: Some("root".to_owned()), ..ReadFile::default() };
    let mut body = guest.read_file(&request).await.ok()?.body;
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        bytes.extend_from_slice(&piece.expect("whole"));
    }
    Some(bytes)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
