//! The server's certificate: signed by a CA of our own, or the operator's.
//!
//! Our CA is made at first start and kept in `<data dir>/tls`: `ca.key` (0600, written first) and `ca.pem`
//! (written last: where it is, the pair is whole). Clients are told to trust `ca.pem`, so it is never
//! replaced behind their back. It may sign for nothing but the base domain, `localhost` and loopback
//! addresses (name constraints), so a stolen key is of little use elsewhere.
//!
//! The leaf has no file: its key is made at each start and lives in memory. It is renewed long before it
//! expires, without a restart.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

const DAY: Duration = Duration::from_secs(24 * 3600);
const CA_LIFE: Duration = DAY.saturating_mul(3650);
/// Clients refuse leaves that live longer than 398 or 825 days; short ones prove that renewal works.
const LEAF_LIFE: Duration = DAY.saturating_mul(90);
/// A leaf with less than this left is renewed.
const LEAF_MARGIN: Duration = DAY.saturating_mul(30);
/// Clocks of clients may be behind ours.
const BACKDATE: Duration = DAY;

/// Where the server's certificate comes from.
#[derive(Clone, Debug)]
pub enum Tls {
    /// Our own CA, kept in this directory.
    OwnCa {
        /// `<data dir>/tls`; made if missing.
        directory: PathBuf,
    },
    /// The operator's, for `*.e2b.<base>`, `*.<base>` and `<base>`.
    Files {
        /// PEM, leaf first.
        certificate: PathBuf,
        /// PEM.
        key: PathBuf,
    },
}

impl Tls {
    /// Whether what is there can be used for a base domain; makes nothing.
    ///
    /// # Errors
    /// A file cannot be read, or not be used.
    pub fn check(&self, base_domain: &str) -> Result<(), TlsError> {
        match self {
            Self::OwnCa { directory } => load_own_ca(directory, base_domain).map(drop),
            Self::Files { certificate, key } => load_files(certificate, key).map(drop),
        }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// A file is there and not what it should be.
    #[error("{}: {problem}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would mend it.
        problem: String,
    },
    /// A certificate could not be made.
    #[error("cannot make a certificate")]
    Make(#[source] rcgen::Error),
    /// The TLS library refused a certificate or key.
    #[error("cannot use the certificate")]
    Refused(#[source] rustls::Error),
}

/// A certificate that can be swapped while the server runs.
#[derive(Debug)]
pub(crate) struct Certificate {
    current: RwLock<(Arc<CertifiedKey>, SystemTime)>,
    source: Source,
}

enum Source {
    OwnCa { issuer: Box<Issuer<'static, KeyPair>>, pem: PathBuf, base_domain: String },
    Files,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OwnCa { .. } => "OwnCa",
            Self::Files => "Files",
        })
    }
}

impl Certificate {
    /// Reads or makes all that is needed.
    pub(crate) fn load(tls: &Tls, base_domain: &str) -> Result<Arc<Self>, TlsError> {
        let (current, source) = match tls {
            Tls::OwnCa { directory } => {
                let (issuer, pem) = load_or_make_ca(directory, base_domain)?;
                let leaf = make_leaf(&issuer, base_domain)?;
                (leaf, Source::OwnCa { issuer: Box::new(issuer), pem, base_domain: base_domain.to_owned() })
            }
            Tls::Files { certificate, key } => (load_files(certificate, key)?, Source::Files),
        };
        Ok(Arc::new(Self { current: RwLock::new(current), source }))
    }

    /// The file clients must trust, where the CA is ours.
    pub(crate) fn ca_file(&self) -> Option<&Path> {
        match &self.source {
            Source::OwnCa { pem, .. } => Some(pem),
            Source::Files => None,
        }
    }

    /// Renews our leaf if it is time.
    pub(crate) fn renew_if_due(&self, now: SystemTime) -> Result<bool, TlsError> {
        let Source::OwnCa { issuer, base_domain, .. } = &self.source else {
            return Ok(false);
        };
        let expires = self.current.read().unwrap_or_else(PoisonError::into_inner).1;
        if expires.duration_since(now).is_ok_and(|left| left > LEAF_MARGIN) {
            return Ok(false);
        }
        let leaf = make_leaf(issuer, base_domain)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = leaf;
        Ok(true)
    }

    /// The TLS side of the server: HTTP/2 and HTTP/1.1 by ALPN.
    pub(crate) fn server_config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, TlsError> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Refused)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::clone(self) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).0))
    }
}

fn load_files(certificate: &Path, key: &Path) -> Result<(Arc<CertifiedKey>, SystemTime), TlsError> {
    let unusable = |path: &Path, problem: String| TlsError::Unusable { path: path.to_owned(), problem };
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| unusable(certificate, format!("not a readable PEM certificate chain: {error}")))?;
    if chain.is_empty() {
        return Err(unusable(certificate, "holds no certificate".into()));
    }
    let der = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| unusable(key, format!("not a readable PEM private key: {error}")))?;
    let certified = CertifiedKey::from_der(chain, der, &ring::default_provider())
        .map_err(|error| unusable(key, format!("does not fit {}: {error}", certificate.display())))?;
    Ok((Arc::new(certified), SystemTime::UNIX_EPOCH))
}

fn load_or_make_ca(directory: &Path, base_domain: &str) -> Result<(Issuer<'static, KeyPair>, PathBuf), TlsError> {
    let (pem_path, key_path) = ca_files(directory);
    match load_own_ca(directory, base_domain)? {
        Some(ca) => Ok((ca, pem_path)),
        // A key alone is what a crash between the two writes leaves: nobody trusts it yet.
        None => Ok((make_ca(directory, &pem_path, &key_path, base_domain)?, pem_path)),
    }
}

fn ca_files(directory: &Path) -> (PathBuf, PathBuf) {
    (directory.join("ca.pem"), directory.join("ca.key"))
}

fn load_own_ca(directory: &Path, base_domain: &str) -> Result<Option<Issuer<'static, KeyPair>>, TlsError> {
    let (pem_path, key_path) = ca_files(directory);
    let pem = read_if_there(&pem_path)?;
    pem.map(|pem| load_ca(&pem, &pem_path, &key_path, base_domain)).transpose()
}

fn load_ca(pem: &str, pem_path: &Path, key_path: &Path, base: &str) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let again = format!("or remove {} to have a new CA made (clients must then trust it anew)", pem_path.display());
    let unusable = |path: &Path, problem: &str| TlsError::Unusable {
        path: path.to_owned(),
        problem: format!("{problem}; put the right one back, {again}"),
    };
    let key_text = read_if_there(key_path)?.ok_or_else(|| unusable(key_path, "the CA's private key is missing"))?;
    let key = KeyPair::from_pem(&key_text).map_err(|_| unusable(key_path, "not a PEM private key"))?;
    check_ca(pem, &key, base).map_err(|problem| unusable(pem_path, problem))?;
    Issuer::from_ca_cert_pem(pem, key).map_err(|_| unusable(pem_path, "not a CA certificate"))
}

/// What `from_ca_cert_pem` does not look at: key, expiry, and whether the base domain is permitted.
fn check_ca(pem: &str, key: &KeyPair, base_domain: &str) -> Result<(), &'static str> {
    use x509_parser::{extensions::GeneralName, pem::parse_x509_pem};
    let (_, block) = parse_x509_pem(pem.as_bytes()).map_err(|_| "not a PEM certificate")?;
    let ca = block.parse_x509().map_err(|_| "not an X.509 certificate")?;
    if ca.public_key().raw != rcgen::PublicKeyData::subject_public_key_info(key) {
        return Err("does not belong to the key beside it");
    }
    if !ca.validity().is_valid() {
        return Err("has expired, or the host's clock is wrong");
    }
    let constraints = ca.name_constraints().map_err(|_| "has malformed name constraints")?;
    let permitted = constraints.and_then(|found| found.value.permitted_subtrees.as_ref());
    let is_permitted = permitted.is_none_or(|trees| {
        trees.iter().any(|tree| {
            matches!(tree.base, GeneralName::DNSName(name) if base_domain == name || base_domain.ends_with(&format!(".{name}")))
        })
    });
    if is_permitted { Ok(()) } else { Err("was made for another base domain and may not sign for this one") }
}

fn make_ca(
    directory: &Path,
    pem_path: &Path,
    key_path: &Path,
    base_domain: &str,
) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::OrganizationName, "Stockade");
    // Telling apart the CAs of several servers in one trust store.
    params.distinguished_name.push(DnType::CommonName, format!("Stockade CA for {base_domain}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    params.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![
            GeneralSubtree::DnsName(base_domain.to_owned()),
            GeneralSubtree::DnsName("localhost".to_owned()),
            GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([127, 0, 0, 0], 8)),
            GeneralSubtree::IpAddress(CidrSubnet::from_v6_prefix(std::net::Ipv6Addr::LOCALHOST.octets(), 128)),
        ],
        excluded_subtrees: Vec::new(),
    });
    set_validity(&mut params, CA_LIFE);
    let key = KeyPair::generate().map_err(TlsError::Make)?;
    let pem = params.self_signed(&key).map_err(TlsError::Make)?.pem();

    fs::create_dir_all(directory).map_err(file_error("make the directory", directory))?;
    write_whole(key_path, key.serialize_pem().as_bytes(), 0o600)?;
    write_whole(pem_path, pem.as_bytes(), 0o644)?;
    tracing::info!(file = %pem_path.display(), "made a certificate authority; clients that use HTTPS must trust it");
    Ok(Issuer::new(params, key))
}

fn make_leaf(issuer: &Issuer<'_, KeyPair>, base: &str) -> Result<(Arc<CertifiedKey>, SystemTime), TlsError> {
    let names = [format!("*.e2b.{base}"), format!("api.e2b.{base}"), format!("*.{base}"), base.to_owned()];
    let loopback = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    let names: Vec<String> = names.into_iter().chain(loopback).collect();
    let mut params = CertificateParams::new(names).map_err(TlsError::Make)?;
    // The subject is not a name anyone checks; a base domain of over 64 characters would not fit.
    params.distinguished_name.push(DnType::CommonName, "Stockade");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let expires = set_validity(&mut params, LEAF_LIFE);
    let key = KeyPair::generate().map_err(TlsError::Make)?;
    let leaf = params.signed_by(&key, issuer).map_err(TlsError::Make)?;
    let der = PrivateKeyDer::try_from(key.serialize_der()).expect("a key made here is PKCS #8");
    let certified = CertifiedKey::from_der(vec![leaf.der().clone()], der, &ring::default_provider());
    Ok((Arc::new(certified.map_err(TlsError::Refused)?), expires))
}

fn set_validity(params: &mut CertificateParams, life: Duration) -> SystemTime {
    let now = SystemTime::now();
    let expires = now + life;
    params.not_before = (now - BACKDATE).into();
    params.not_after = expires.into();
    expires
}

fn read_if_there(path: &Path) -> Result<Option<String>, TlsError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error("read", path)(error)),
    }
}

/// Writes beside the file and renames: a crash leaves the old file or the whole new one.
fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> Result<(), TlsError> {
    use io::Write as _;
    let beside = path.with_extension("new");
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(file_error("remove", &beside)(error)),
        _ => {}
    }
    // `create_new`, so that the mode is ours and not that of a file somebody put there.
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&beside)
        .map_err(file_error("create", &beside))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(file_error("write", &beside))?;
    fs::rename(&beside, path).map_err(file_error("rename into place", path))
}

fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File { action, path, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const BASE: &str = "stockade.localhost";

    fn own(directory: &Path) -> Tls {
        Tls::OwnCa { directory: directory.join("tls") }
    }

    #[test]
    fn the_ca_is_made_once_and_its_key_is_private() {
        let dir = tempfile::tempdir().expect("a directory");
        Certificate::load(&own(dir.path()), BASE).expect("first start");
        let pem = fs::read(dir.path().join("tls/ca.pem")).expect("ca.pem");
        let mode = fs::metadata(dir.path().join("tls/ca.key")).expect("ca.key").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        Certificate::load(&own(dir.path()), BASE).expect("second start");
        assert_eq!(fs::read(dir.path().join("tls/ca.pem")).expect("ca.pem"), pem);
        assert_eq!(fs::read_dir(dir.path().join("tls")).expect("the directory").count(), 2);
    }

    #[test]
    fn a_key_left_by_a_crash_is_replaced_but_a_lost_key_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let (pem, key) = (dir.path().join("tls/ca.pem"), dir.path().join("tls/ca.key"));
        Certificate::load(&own(dir.path()), BASE).expect("first start");
        fs::remove_file(&pem).expect("crash before ca.pem");
        Certificate::load(&own(dir.path()), BASE).expect("made anew");
        fs::remove_file(&key).expect("the key is lost");
        let error = Certificate::load(&own(dir.path()), BASE).expect_err("no key");
        assert!(error.to_string().contains("ca.key"), "{error}");
        assert!(!key.exists());
    }

    #[test]
    fn a_foreign_key_or_base_domain_is_named() {
        let (one, two) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("two"));
        Certificate::load(&own(one.path()), BASE).expect("one");
        Certificate::load(&own(two.path()), BASE).expect("two");
        let other = Certificate::load(&own(one.path()), "other.example").expect_err("another base");
        assert!(other.to_string().contains("another base domain"), "{other}");
        Certificate::load(&own(one.path()), "deeper.stockade.localhost").expect("below the base");
        fs::copy(two.path().join("tls/ca.key"), one.path().join("tls/ca.key")).expect("copy");
        let error = Certificate::load(&own(one.path()), BASE).expect_err("a foreign key");
        assert!(error.to_string().contains("does not belong"), "{error}");
    }

    #[test]
    fn a_leaf_is_renewed_before_it_expires_and_not_sooner() {
        let dir = tempfile::tempdir().expect("a directory");
        let certificate = Certificate::load(&own(dir.path()), BASE).expect("start");
        let now = SystemTime::now();
        assert!(!certificate.renew_if_due(now + DAY * 59).expect("no need"));
        assert!(certificate.renew_if_due(now + DAY * 61).expect("renewed"));
        assert!(certificate.renew_if_due(now + DAY * 1000).expect("renewed"));
    }

    #[test]
    fn the_operators_own_certificate_is_used() {
        let dir = tempfile::tempdir().expect("a directory");
        let made = rcgen::generate_simple_self_signed(vec![BASE.to_owned()]).expect("a certificate");
        let (certificate, key) = (dir.path().join("c.pem"), dir.path().join("k.pem"));
        fs::write(&certificate, made.cert.pem()).expect("write");
        fs::write(&key, made.signing_key.serialize_pem()).expect("write");
        let tls = Tls::Files { certificate: certificate.clone(), key };
        let loaded = Certificate::load(&tls, BASE).expect("loaded");
        assert_eq!(loaded.ca_file(), None);
        loaded.server_config().expect("usable");
        let tls = Tls::Files { certificate: certificate.clone(), key: certificate };
        assert!(Certificate::load(&tls, BASE).is_err());
    }
}
