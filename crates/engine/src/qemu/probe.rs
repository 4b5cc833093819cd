//! Whether KVM really works here. To be replaced by the real probe.

use std::path::Path;

use super::Host;

/// What came of trying KVM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum KvmVerdict {
    /// A stock kernel runs.
    Works,
    /// It does not; why.
    Unusable(String),
}

pub(crate) async fn kvm(_host: &Host, _runtime_dir: &Path) -> KvmVerdict {
    KvmVerdict::Unusable("not tried".to_owned())
}
