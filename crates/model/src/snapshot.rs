use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use crate::{MachineShape, SandboxId, SnapshotId, TemplateId, WorkspaceId};

/// A point in a sandbox's life, kept: its disk, and with `has_memory` all that ran as well.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Its id; also the name of its directory.
    pub id: SnapshotId,
    /// Whose it is.
    pub workspace: WorkspaceId,
    /// A name of the owner's choice; the newest snapshot of a name is meant by it.
    pub name: Option<String>,
    /// Labels of the owner's choice.
    pub labels: BTreeMap<String, String>,
    /// The sandbox it was taken of.
    pub sandbox: SandboxId,
    /// The snapshot that sandbox came from.
    pub parent: Option<SnapshotId>,
    /// The template below all of it.
    pub template: TemplateId,
    /// That template's name when the sandbox was made.
    pub template_name: String,
    /// Processors, memory and disk of the machines made from it.
    pub shape: MachineShape,
    /// Whether memory is in it; a machine from one without boots from its disk.
    pub has_memory: bool,
    /// Bytes of memory that differ from the template's.
    pub memory_bytes: u64,
    /// Bytes of its disk layers, those shared with others included.
    pub disk_bytes: u64,
    /// How long the sandbox stood still for it.
    pub paused: Duration,
    /// When it was taken.
    pub created_at: Timestamp,
    /// When it is deleted by itself.
    pub expires_at: Option<Timestamp>,
}
