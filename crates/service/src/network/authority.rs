//! The deployment's own certificate authority, for hosts the gateway answers for, and the authorities it believes.
//!
//! It is not the API server's: that one is trusted by people's programs on their own machines, this one by programs in
//! sandboxes alone. A stolen key of one is of no use against the other.
//!
//! ```text
//! network-ca/ca.pem   the certificate guests trust
//!            ca.key   its key (0600)
//! ```

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustls::{RootCertStore, pki_types::CertificateDer, pki_types::pem::PemObject};
use stockade_gateway::CertificateAuthority;
use stockade_model::Secret;

const NAME: &str = "Stockade Sandbox CA";

/// Reads the authority, or makes one.
pub(super) fn open_or_create(directory: &Path) -> io::Result<CertificateAuthority> {
    let (certificate, key) = (directory.join("ca.pem"), directory.join("ca.key"));
    if !key.exists() {
        let (certificate_pem, key_pem) = CertificateAuthority::generate(NAME).map_err(io::Error::other)?;
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        write(&certificate, certificate_pem.as_bytes(), 0o644)?;
        // The key last: half an authority is made anew.
        write(&key, key_pem.expose().as_bytes(), 0o600)?;
    }
    let named = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let mode = fs::metadata(&key).map_err(|error| named(&key, error))?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(io::Error::other(format!(
            "others may read {} (mode {:04o}): chmod 600 it",
            key.display(),
            mode & 0o7777
        )));
    }
    let certificate_pem = fs::read_to_string(&certificate).map_err(|error| named(&certificate, error))?;
    let key_pem = Secret::new(fs::read_to_string(&key).map_err(|error| named(&key, error))?);
    CertificateAuthority::from_pem(&certificate_pem, &key_pem).map_err(io::Error::other)
}

/// Appears whole or not at all.
fn write(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(new, path)
}

/// Whom hosts have to be signed by: the host's own authorities, Mozilla's where the host has none, and the operator's.
pub(super) fn upstream_roots(more: &[PathBuf]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let native = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(native.certs);
    if roots.is_empty() {
        roots.roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    for path in more {
        let wrong = |error: String| format!("trusted_certificates: {}: {error}", path.display());
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
        }
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_made_once_and_a_key_that_others_can_read_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = directory.path().join("network-ca");
        let first = open_or_create(&place).expect("made");
        let again = open_or_create(&place).expect("read");
        assert_eq!(first.certificate_pem(), again.certificate_pem());
        let key = place.join("ca.key");
        assert_eq!(fs::metadata(&key).expect("there").permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).expect("changed");
        let error = open_or_create(&place).err().expect("refused").to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }
}
