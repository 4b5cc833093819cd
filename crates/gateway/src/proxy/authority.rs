//! The deployment's certificate authority, trusted inside sandboxes only. It signs one certificate per intercepted
//! name; all leaves of a process share a key.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
};
use stockade_model::Secret;

const MAX_LEAVES: usize = 4_096;
const CA_DAYS: i64 = 3_650;
const LEAF_DAYS: i64 = 30;
/// Guests restored from an old snapshot may have an old clock for a moment.
const BACKDATED_HOURS: i64 = 24;
const RENEW_AFTER_DAYS: i64 = 15;

/// Why there is no authority or no leaf.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The certificate or key cannot be made or read.
    #[error("the certificate authority's certificate or key cannot be used")]
    Certificate(#[from] rcgen::Error),
    /// TLS refuses it.
    #[error("TLS refuses a certificate of the authority")]
    Tls(#[from] rustls::Error),
    /// A time out of range.
    #[error("the system's clock is out of range")]
    Clock,
}

/// Signs leaves.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    certificate: CertificateDer<'static>,
    leaf_key: KeyPair,
    leaves: Mutex<HashMap<String, (Arc<ServerConfig>, jiff::Timestamp)>>,
}

impl CertificateAuthority {
    /// A new authority: its certificate and its key, both as PEM, to be stored by the caller.
    pub fn generate(name: &str) -> Result<(String, Secret), AuthorityError> {
        let mut params = CertificateParams::default();
        let mut subject = DistinguishedName::new();
        subject.push(DnType::CommonName, name);
        params.distinguished_name = subject;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        set_validity(&mut params, CA_DAYS)?;
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        Ok((certificate.pem(), Secret::new(key.serialize_pem())))
    }

    /// The authority of a stored certificate and key.
    pub fn from_pem(certificate_pem: &str, key_pem: &Secret) -> Result<Self, AuthorityError> {
        let key = KeyPair::from_pem(key_pem.expose())?;
        let issuer = Issuer::from_ca_cert_pem(certificate_pem, key)?;
        let certificate =
            <CertificateDer<'static> as rustls::pki_types::pem::PemObject>::from_pem_slice(certificate_pem.as_bytes())
                .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
        Ok(Self {
            issuer,
            certificate_pem: certificate_pem.to_owned(),
            certificate,
            leaf_key: KeyPair::generate()?,
            leaves: Mutex::default(),
        })
    }

    /// The certificate guests trust.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// OpenSSL's checksum of its subject, under which directories of certificates list it; `None`: its subject is not
    /// just a common name.
    pub fn subject_hash(&self) -> Option<String> {
        let (_, certificate) = x509_parser::parse_x509_certificate(&self.certificate).ok()?;
        let subject = certificate.subject();
        if subject.iter().count() != 1 {
            return None;
        }
        let name = subject.iter_common_name().next()?.as_str().ok()?;
        let canonical = name.split_ascii_whitespace().collect::<Vec<_>>().join(" ").to_ascii_lowercase();
        let length = u8::try_from(canonical.len()).ok().filter(|length| *length < 100)?;
        // A set of one sequence of the name's identifier (2.5.4.3) and its value as UTF-8.
        let mut bytes = vec![0x31, length + 9, 0x30, length + 7, 6, 3, 0x55, 4, 3, 0x0c, length];
        bytes.extend(canonical.bytes());
        let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &bytes);
        let first = digest.as_ref().first_chunk::<4>()?;
        Some(format!("{:08x}", u32::from_le_bytes(*first)))
    }

    /// How to be `name` towards a guest.
    pub(crate) fn server_config(&self, name: &str) -> Result<Arc<ServerConfig>, AuthorityError> {
        let now = jiff::Timestamp::now();
        let mut leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((config, renew)) = leaves.get(name)
            && *renew > now
        {
            return Ok(Arc::clone(config));
        }
        if leaves.len() >= MAX_LEAVES {
            leaves.clear();
        }
        let config = Arc::new(self.issue(name)?);
        let renew = now + jiff::SignedDuration::from_hours(24 * RENEW_AFTER_DAYS);
        leaves.insert(name.to_owned(), (Arc::clone(&config), renew));
        Ok(config)
    }

    fn leaf(&self, name: &str) -> Result<rcgen::Certificate, AuthorityError> {
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        let mut subject = DistinguishedName::new();
        // A common name takes 64 characters at most; clients read the alternative name.
        if name.len() <= 64 {
            subject.push(DnType::CommonName, name);
        }
        params.distinguished_name = subject;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, LEAF_DAYS)?;
        Ok(params.signed_by(&self.leaf_key, &self.issuer)?)
    }

    fn issue(&self, name: &str) -> Result<ServerConfig, AuthorityError> {
        let leaf = self.leaf(name)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone(), self.certificate.clone()], key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn set_validity(params: &mut CertificateParams, days: i64) -> Result<(), AuthorityError> {
    let at = |hours: i64| {
        let time = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(hours);
        let date = time.to_zoned(jiff::tz::TimeZone::UTC).date();
        Ok::<_, AuthorityError>(rcgen::date_time_ymd(date.year().into(), date.month() as u8, date.day() as u8))
    };
    params.not_before = at(-BACKDATED_HOURS)?;
    params.not_after = at(24 * days)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_authority_signs_hosts_alone_and_for_a_month() {
        let (certificate, key) = CertificateAuthority::generate("Stockade Test CA").expect("made");
        let authority = CertificateAuthority::from_pem(&certificate, &key).expect("read");
        let (_, own) = x509_parser::parse_x509_certificate(&authority.certificate).expect("a certificate");
        let constraints = own.basic_constraints().expect("readable").expect("there").value;
        assert!(constraints.ca && constraints.path_len_constraint == Some(0), "nobody signs in its name");
        let leaf = authority.leaf("api.example").expect("signed");
        let (_, leaf) = x509_parser::parse_x509_certificate(leaf.der()).expect("a certificate");
        assert!(!leaf.is_ca());
        let names = leaf.subject_alternative_name().expect("readable").expect("there").value;
        assert_eq!(names.general_names, [x509_parser::extensions::GeneralName::DNSName("api.example")]);
        let day = 24 * 3600;
        let (from, to) = (leaf.validity().not_before.timestamp(), leaf.validity().not_after.timestamp());
        let now = jiff::Timestamp::now().as_second();
        assert!(from <= now - day + day / 2 && to > now + 28 * day && to - from <= 33 * day, "{from} {now} {to}");
    }

    #[test]
    fn the_subjects_checksum_is_the_one_openssl_computes() {
        let (certificate, key) = CertificateAuthority::generate("Stockade  Test CA").expect("made");
        let authority = CertificateAuthority::from_pem(&certificate, &key).expect("read");
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ca.pem");
        std::fs::write(&path, certificate).expect("written");
        let openssl =
            std::process::Command::new("openssl").args(["x509", "-noout", "-hash", "-in"]).arg(&path).output();
        let Ok(output) = openssl else { return };
        assert_eq!(authority.subject_hash().as_deref(), Some(String::from_utf8_lossy(&output.stdout).trim()));
    }
}
