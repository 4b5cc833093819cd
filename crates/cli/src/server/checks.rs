//! What can be seen to be wrong before anything is made: a server that will not start leaves nothing behind.

use std::path::{Path, PathBuf};

use stockade_api::Tls;
use stockade_service::NetworkConfig;
use stockade_store::Archive;

use super::{data_dir::DataDir, engine::UNSUPPORTED};
use crate::{
    args::{Accel, Up},
    failure::{BAD_USAGE, Failure, chain},
};

/// Arguments that make sense.
pub(super) struct Checked {
    pub(super) data_dir: PathBuf,
    pub(super) network: NetworkConfig,
    pub(super) tls: Tls,
}

/// Looks at all that was typed. Whether the ports are free shows when they are taken.
pub(super) fn check(data_dir: &Path, args: &Up) -> Result<Checked, Failure> {
    let base_domain =
        stockade_api::check_base_domain(&args.base_domain).map_err(|error| bad("--base-domain", &error))?;
    if args.http == args.https && args.http.port() != 0 {
        let message = format!("--http and --https are the same address, {}", args.http);
        return Err(Failure::new("invalid_argument", message).hint("HTTPS needs a port of its own").exit(BAD_USAGE));
    }
    if let Some(url) = &args.archive {
        Archive::check(url).map_err(|error| bad("--archive", &error))?;
    }
    if args.accel == Accel::Kvm {
        check_kvm(Path::new(KVM))?;
    }
    let network = args.network.as_deref().map(read_network).transpose()?.unwrap_or_default();
    let data_dir = DataDir::check(data_dir)?;
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(certificate), Some(key)) => Tls::Files { certificate: certificate.clone(), key: key.clone() },
        _ => Tls::OwnCa { directory: data_dir.join("tls") },
    };
    tls.check(&base_domain).map_err(|error| Failure::new("cannot_serve", chain(&error)))?;
    Ok(Checked { data_dir, network, tls })
}

const KVM: &str = "/dev/kvm";

/// Whether KVM can be there at all. Whether a guest really runs on it shows once there is a kernel to try it with.
fn check_kvm(device: &Path) -> Result<(), Failure> {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(device);
    opened.map(drop).map_err(|error| {
        let shown = device.display();
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "load the kvm module, or enable nested virtualisation if this host is itself a virtual machine"
            }
            std::io::ErrorKind::PermissionDenied => "add this user to the group of the device",
            _ => "`stockade doctor` says what this host has",
        };
        Failure::new(UNSUPPORTED, format!("--accel kvm cannot be honoured: {shown} cannot be opened: {error}"))
            .hint(format!("{hint}; --accel auto emulates where there is no KVM"))
    })
}

fn bad(option: &str, error: &dyn std::error::Error) -> Failure {
    Failure::new("invalid_argument", format!("{option}: {}", chain(error))).exit(BAD_USAGE)
}

fn read_network(path: &Path) -> Result<NetworkConfig, Failure> {
    let text = std::fs::read(path).map_err(|error| Failure::host(format!("read {}", path.display()), error))?;
    stockade_api::parse_json(&text).map_err(|error| {
        Failure::new("bad_network_file", format!("{}: {error}", path.display()))
            .hint("docs/network.md describes the file")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_that_cannot_be_there_is_refused_with_the_way_out() {
        let place = tempfile::TempDir::new().expect("a directory");
        let device = place.path().join("kvm");
        let refused = check_kvm(&device).expect_err("there is none");
        assert_eq!((refused.code.as_str(), refused.exit), (UNSUPPORTED, crate::failure::FAILED));
        assert!(refused.message.starts_with("--accel kvm cannot be honoured: "), "{refused}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("--accel auto")));
        std::fs::write(&device, "").expect("a file");
        assert_eq!(check_kvm(&device), Ok(()), "whether it serves shows later");
    }
}
