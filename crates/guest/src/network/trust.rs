//! Whom programs in the guest trust: the deployment's own certificate authority, besides those they come with.
//!
//! The certificate is appended to the bundle most programs read, and the environment names the bundle to those that
//! read another by themselves. It is put where the distribution's tools look for local ones, too, so that a bundle
//! that is made anew still has it, and into the [store](keystore) of Java.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::symlink,
    path::Path,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use stockade_wire::machine::Authority;

use super::keystore;

/// Where distributions keep all certificates in one file: Debian and Alpine, Fedora, SUSE.
const BUNDLES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"];
/// Where their tools look for local ones.
const LOCAL: [&str; 2] = ["/usr/local/share/ca-certificates", "/etc/pki/ca-trust/source/anchors"];
const FILE: &str = "stockade.crt";
/// A directory of certificates by the checksum of their subject, as OpenSSL reads it.
const BY_SUBJECT: &str = "/etc/ssl/certs";
/// What Debian's JDKs look for there when they are installed.
const PEM: &str = "stockade.pem";
/// What the JDKs of distributions read: Debian and Alpine, Fedora.
const KEYSTORES: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/ca-trust/extracted/java/cacerts"];
/// Read the bundle.
const BUNDLE_VARIABLES: [&str; 9] = [
    "AWS_CA_BUNDLE",
    "CARGO_HTTP_CAINFO",
    "CURL_CA_BUNDLE",
    "DENO_CERT",
    "GIT_SSL_CAINFO",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
];
/// Adds one certificate to those it knows.
const EXTRA_VARIABLE: &str = "NODE_EXTRA_CA_CERTS";

/// What processes are told in their environment.
pub(crate) type Trusted = BTreeMap<String, String>;

/// Makes an authority trusted. May be done again; another authority is trusted besides.
pub(crate) fn trust(authority: &Authority) -> io::Result<Trusted> {
    let local = LOCAL.iter().map(Path::new).find(|directory| directory.is_dir()).unwrap_or(Path::new(LOCAL[0]));
    let file = local.join(FILE);
    if fs::read_to_string(&file).is_ok_and(|there| there == authority.certificate) {
        // Everything else was done with it.
    } else {
        let der = der(&authority.certificate)?;
        for store in KEYSTORES {
            keystore::append(Path::new(store), &der)?;
        }
        link_by_subject(&file, &authority.subject_hash)?;
        fs::create_dir_all(local)?;
        fs::write(&file, &authority.certificate)?;
    }
    let bundle = BUNDLES.iter().map(Path::new).find(|bundle| bundle.is_file()).unwrap_or(Path::new(BUNDLES[0]));
    append(bundle, &authority.certificate)?;
    let bundle = bundle.to_string_lossy();
    let mut variables: Trusted =
        BUNDLE_VARIABLES.iter().map(|name| ((*name).to_owned(), bundle.clone().into_owned())).collect();
    variables.insert(EXTRA_VARIABLE.to_owned(), file.to_string_lossy().into_owned());
    Ok(variables)
}

fn link_by_subject(file: &Path, hash: &str) -> io::Result<()> {
    let directory = Path::new(BY_SUBJECT);
    if !directory.is_dir() || hash.len() != 8 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    for name in [&format!("{hash}.0"), PEM] {
        let link = directory.join(name);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => symlink(file, link)?,
        }
    }
    Ok(())
}

/// A certificate without its armour.
fn der(pem: &str) -> io::Result<Vec<u8>> {
    let text: String = pem.lines().filter(|line| !line.starts_with('-')).map(str::trim).collect();
    STANDARD.decode(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Appends the certificate unless the bundle ends with it.
fn append(bundle: &Path, certificate: &str) -> io::Result<()> {
    if let Some(parent) = bundle.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = File::options().read(true).append(true).create(true).open(bundle)?;
    let length = file.seek(SeekFrom::End(0))?;
    let mut end = String::new();
    file.seek(SeekFrom::Start(length.saturating_sub(certificate.len() as u64)))?;
    // A bundle may hold comments in any encoding.
    let is_there = file.read_to_string(&mut end).is_ok() && end == certificate;
    if is_there { Ok(()) } else { file.write_all(format!("\n{certificate}").as_bytes()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_gets_the_certificate_once_and_keeps_what_it_had() {
        let directory = tempfile::tempdir().expect("a directory");
        let bundle = directory.path().join("certs/bundle.crt");
        append(&bundle, "-- ours --\n").expect("made");
        append(&bundle, "-- ours --\n").expect("there already");
        assert_eq!(fs::read_to_string(&bundle).expect("read"), "\n-- ours --\n");
        fs::write(&bundle, b"# \xff\n-- theirs --\n").expect("written");
        append(&bundle, "-- ours --\n").expect("appended");
        append(&bundle, "-- ours --\n").expect("there already");
        assert!(fs::read(&bundle).expect("read").ends_with(b"-- theirs --\n\n-- ours --\n"));
    }
}
