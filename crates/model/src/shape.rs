use std::fmt;

use serde::{Deserialize, Serialize};

/// Processors, memory and disk of a machine. Belongs to the template.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
pub struct MachineShape {
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Root disk in MiB; sparse on the host.
    pub disk_mib: u64,
}

/// What makes the guest's instructions run.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The processor itself, through `/dev/kvm`.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
    /// None: the test engine, without any isolation.
    None,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
            Self::None => "none",
        })
    }
}

/// How strong the wall around a guest is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IsolationClass {
    /// A machine with its own kernel behind hardware virtualisation, the emulator jailed.
    HardwareVm,
    /// A machine with its own kernel under software emulation, the emulator jailed. QEMU's project
    /// does not call software emulation a security boundary: the jail is the wall.
    EmulatedVm,
    /// No wall at all; tests only.
    None,
}
