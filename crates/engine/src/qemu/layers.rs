//! The layers of a machine's root disk.
//!
//! ```text
//! own layer       <id>.qcow2, written by the machine alone
//! frozen layers   <id>.qcow2, what it or its ancestors had written when a snapshot was taken; never change
//! template        disk.qcow2 over root.ext4
//! ```
//!
//! A layer has one name everywhere, unique for ever. It is made in the machine's `layers/`, which is the
//! server's alone; the emulator reads it there (`/layers`, read-only) and writes its own one through a
//! second name in `/machine`. When a snapshot freezes it, that second name and the right to write go
//! away, and it is *linked* into the snapshot's directory and from there into `layers/` of every machine
//! started from it. So nothing is ever copied, and a layer is gone when the last machine or snapshot that
//! needs it is.
//!
//! In each layer's header is the bare name of the layer below, so that the layers of a snapshot are one
//! disk for every tool, once `/template` is there. The emulator never goes by it: it is told the whole
//! chain, because what stands in a header was written by an emulator.
//!
//! A chain of more than [`MOST_FROZEN`] layers is shortened when the next snapshot is taken, while the guest
//! still runs: the emulator copies the upper layers into the machine's own ([`merge_from`]).

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::memory;

/// With more frozen layers than this a chain is shortened.
pub(crate) const MOST_FROZEN: usize = 8;
/// More layers than any snapshot of ours has.
pub(crate) const MOST_LAYERS: usize = 4 * MOST_FROZEN;
const ID_DIGITS: usize = 24;

/// A layer's name without its ending.
#[derive(Clone, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "String")]
pub(crate) struct LayerId(String);

impl LayerId {
    pub(crate) fn random() -> io::Result<Self> {
        Ok(Self(memory::random_hex(ID_DIGITS)?))
    }

    /// Its file's name, in all directories.
    pub(crate) fn file_name(&self) -> String {
        format!("{}.qcow2", self.0)
    }

    /// Its block node's name; QEMU takes 31 characters.
    pub(crate) fn node(&self) -> String {
        format!("layer-{}", self.0)
    }
}

impl TryFrom<String> for LayerId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if text.len() == ID_DIGITS && text.bytes().all(is_digit) {
            return Ok(Self(text));
        }
        Err("a layer's name has 24 hexadecimal digits".to_owned())
    }
}

/// A layer that does not change any more.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct FrozenLayer {
    pub(crate) id: LayerId,
    pub(crate) bytes: u64,
    pub(crate) digest: String,
}

/// A machine's layers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct DiskChain {
    /// The lowest first. A layer whose snapshot was not finished has no checksum yet.
    pub(crate) frozen: Vec<Frozen>,
    pub(crate) own: LayerId,
    /// The layer that the machine is about to write to instead: a snapshot is being taken.
    pub(crate) next: Option<LayerId>,
}

/// A frozen layer of a machine.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Frozen {
    pub(crate) id: LayerId,
    pub(crate) known: Option<FrozenLayer>,
}

impl From<&FrozenLayer> for Frozen {
    fn from(layer: &FrozenLayer) -> Self {
        Self { id: layer.id.clone(), known: Some(layer.clone()) }
    }
}

impl DiskChain {
    pub(crate) fn new(frozen: &[FrozenLayer]) -> io::Result<Self> {
        Ok(Self { frozen: frozen.iter().map(Frozen::from).collect(), own: LayerId::random()?, next: None })
    }

    /// Brings it in line with what the emulator says: which layer it writes to and how many are below.
    /// Returns the layers that are not part of the chain (any more).
    pub(crate) fn reconcile(&mut self, top: &str, below: usize) -> Result<Vec<LayerId>, String> {
        let mut unused = Vec::new();
        match self.next.take() {
            Some(next) if next.node() == top => self.switch(next),
            Some(next) => unused.push(next),
            None => {}
        }
        if self.own.node() != top {
            return Err(format!("its disk's top layer is {top}, not {}", self.own.node()));
        }
        // Shortening takes out the upper ones, all at once.
        if below > self.frozen.len() {
            return Err(format!("its disk has {below} lower layers, not {}", self.frozen.len()));
        }
        unused.extend(self.frozen.drain(below..).map(|layer| layer.id));
        Ok(unused)
    }

    /// The own layer is frozen, `next` is the own one.
    pub(crate) fn switch(&mut self, next: LayerId) {
        let frozen = std::mem::replace(&mut self.own, next);
        self.frozen.push(Frozen { id: frozen, known: None });
        self.next = None;
    }
}

/// From which frozen layer on upwards a chain is merged, given what each holds, the lowest first: at least
/// the upper half, and on downwards as long as that is no more work than what is merged anyway. So each
/// byte is copied a few times in a machine's life, not at every shortening.
pub(crate) fn merge_from(bytes: &[u64]) -> usize {
    let mut from = bytes.len().div_ceil(2);
    let mut work: u64 = bytes[from..].iter().sum();
    while from > 0 && bytes[from - 1] <= work {
        from -= 1;
        work += bytes[from];
    }
    from
}

/// Makes an empty layer from the template's empty one.
pub(crate) fn create(empty: &Path, path: &Path, below: Option<&LayerId>) -> io::Result<()> {
    fs::copy(empty, path)?;
    memory::set_mode(path, 0o600)?;
    below.map_or(Ok(()), |below| name_below(path, below))
}

/// Writes into an empty layer what lies below it.
pub(crate) fn name_below(path: &Path, below: &LayerId) -> io::Result<()> {
    name_backing(&fs::OpenOptions::new().read(true).write(true).open(path)?, &below.file_name())
}

/// Writes another name of the layer below into a qcow2 header.
fn name_backing(file: &File, name: &str) -> io::Result<()> {
    const MAGIC: [u8; 4] = *b"QFI\xfb";
    /// The header's cluster; after the name there is nothing in it.
    const CLUSTER: u64 = 64 << 10;
    let mut header = [0; 20];
    file.read_exact_at(&mut header, 0)?;
    let [m0, m1, m2, m3, _, _, _, _, offset @ .., _, _, _, _] = header;
    let offset = u64::from_be_bytes(offset);
    if [m0, m1, m2, m3] != MAGIC || offset == 0 || offset + name.len() as u64 > CLUSTER {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not an empty layer as qemu-img makes it"));
    }
    let length = u32::try_from(name.len()).map_err(io::Error::other)?;
    file.write_all_at(name.as_bytes(), offset)?;
    file.write_all_at(&length.to_be_bytes(), 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(frozen: usize) -> DiskChain {
        let frozen = (0..frozen).map(|_| Frozen { id: LayerId::random().expect("random"), known: None }).collect();
        DiskChain { frozen, own: LayerId::random().expect("random"), next: None }
    }

    #[test]
    fn names_are_read_back_and_nothing_else_is() {
        let id = LayerId::random().expect("random");
        let text = serde_json::to_string(&id).expect("written");
        assert_eq!(serde_json::from_str::<LayerId>(&text).expect("read"), id);
        assert!(id.node().len() <= 31);
        for text in ["\"../../../../etc/passwd0\"", "\"\"", "\"0123456789ABCDEF01234567\""] {
            assert!(serde_json::from_str::<LayerId>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_unrecorded_switch_is_taken_in_and_one_that_did_not_happen_undone() {
        let mut disk = chain(1);
        let (own, next) = (disk.own.clone(), LayerId::random().expect("random"));
        disk.next = Some(next.clone());
        let mut not_switched = disk.clone();
        assert_eq!(disk.reconcile(&next.node(), 2).expect("known"), []);
        assert_eq!((&disk.own, &disk.frozen[1].id), (&next, &own));
        assert_eq!(not_switched.reconcile(&own.node(), 1).expect("known"), [next]);
        assert_eq!((&not_switched.own, not_switched.frozen.len()), (&own, 1));
    }

    #[test]
    fn merged_layers_leave_the_chain_and_foreign_ones_are_refused() {
        let mut disk = chain(5);
        let top = disk.own.node();
        let upper: Vec<LayerId> = disk.frozen[2..].iter().map(|layer| layer.id.clone()).collect();
        assert_eq!(disk.reconcile(&top, 2).expect("known"), upper);
        assert_eq!(disk.frozen.len(), 2);
        assert!(disk.reconcile(&top, 3).is_err());
        assert!(disk.reconcile("layer-x", 2).is_err());
    }

    #[test]
    fn a_large_old_layer_is_not_copied_again_and_again() {
        assert_eq!(merge_from(&[1000, 1, 1, 1, 1, 1, 1, 1, 1]), 1);
        assert_eq!(merge_from(&[1; 9]), 0);
        assert_eq!(merge_from(&[1, 1, 1, 1, 1000, 1, 1, 1, 1]), 5);
        assert_eq!(merge_from(&[]), 0);
    }
}
