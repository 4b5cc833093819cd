//! Directories put away in an object store: a directory of this host, or S3.
//!
//! ```text
//! <prefix>/<id>/<number>     one object per file
//! <prefix>/<id>.json         names, lengths, checksums and rights; written last, removed first
//! ```
//!
//! What has no manifest is not there: a put that was cut off leaves objects nobody sees, which the next put or
//! remove of the same id takes away. Every file's checksum is taken while it is read and compared when it comes
//! back; a directory comes back whole or not at all.

use std::{
    collections::BTreeSet,
    io,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use futures::{StreamExt, TryStreamExt};
use object_store::{
    ObjectStore, PutPayload, aws::AmazonS3Builder, buffered::BufWriter, local::LocalFileSystem,
    path::Path as ObjectPath,
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stockade_model::SnapshotId;
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncWriteExt},
};

const BUFFER_BYTES: usize = 1 << 20;
const MANIFEST: &str = ".json";
const PARTIAL: &str = ".partial";

/// Why a directory was not put away or did not come back.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The address names no store this build knows.
    #[error("{} is not an archive: expected a directory or s3://BUCKET/PREFIX", stockade_model::quoted(url))]
    BadUrl {
        /// As given, without what may be secret.
        url: String,
    },
    /// Nothing of this id is there.
    #[error("there is no archive of {id}")]
    Missing {
        /// Which.
        id: SnapshotId,
    },
    /// What came back is not what was put away.
    #[error("archive of {id} is damaged: {file} {reason}")]
    Damaged {
        /// Which.
        id: SnapshotId,
        /// The file in it.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The object store failed.
    #[error("cannot {action} in the archive")]
    Store {
        /// What was tried.
        action: String,
        /// What it said.
        #[source]
        source: object_store::Error,
    },
    /// This host failed.
    #[error("cannot {action}")]
    Host {
        /// What was tried.
        action: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Where directories are put away. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Archive {
    store: Arc<dyn ObjectStore>,
    prefix: ObjectPath,
    /// Where the objects are files of this host: what is written is made durable.
    directory: Option<PathBuf>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    /// Each directory before what is in it.
    entries: Vec<Entry>,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Below the directory, its parts separated by `/`.
    name: String,
    what: What,
    mode: u32,
    uid: u32,
    gid: u32,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum What {
    Directory,
    Link { to: String },
    File { bytes: u64, sha256: String },
}

impl Manifest {
    fn bytes(&self) -> u64 {
        let bytes = |entry: &Entry| if let What::File { bytes, .. } = entry.what { bytes } else { 0 };
        self.entries.iter().map(bytes).sum()
    }
}

/// Bucket and prefix; `None`: a directory.
fn parse(url: &str) -> Result<Option<(&str, &str)>, ArchiveError> {
    let Some(rest) = url.strip_prefix("s3://") else {
        if url.contains("://") || url.is_empty() {
            return Err(ArchiveError::BadUrl { url: url.split('?').next().unwrap_or_default().to_owned() });
        }
        return Ok(None);
    };
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || bucket.contains(['@', ':']) {
        return Err(ArchiveError::BadUrl { url: "s3://...".to_owned() });
    }
    Ok(Some((bucket, prefix)))
}

impl Archive {
    /// In a directory of this host, which is made if it is not there.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn at_directory(directory: &Path) -> Result<Self, ArchiveError> {
        let make = host(format!("make {}", directory.display()));
        std::fs::create_dir_all(directory)
            .and_then(|()| std::fs::set_permissions(directory, rights(0o700)))
            .map_err(make)?;
        let store = LocalFileSystem::new_with_prefix(directory).map_err(store("open a directory"))?;
        let directory = directory.canonicalize().map_err(host("find the archive"))?;
        Ok(Self { store: Arc::new(store), prefix: ObjectPath::default(), directory: Some(directory) })
    }

    /// At `s3://BUCKET/PREFIX`, with what the environment says (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP`, ...), or in a directory.
    ///
    /// # Errors
    /// It is no such address.
    pub fn at(url: &str) -> Result<Self, ArchiveError> {
        let Some((bucket, prefix)) = parse(url)? else { return Self::at_directory(Path::new(url)) };
        let built = AmazonS3Builder::from_env().with_bucket_name(bucket).build();
        let built = built.map_err(store("open a bucket"))?;
        Ok(Self { store: Arc::new(built), prefix: ObjectPath::from(prefix), directory: None })
    }

    /// Whether [`at`](Self::at) would take it, as far as that can be known without touching anything.
    ///
    /// # Errors
    /// It is no such address.
    pub fn check(url: &str) -> Result<(), ArchiveError> {
        parse(url).map(drop)
    }

    /// Puts a directory's files away; returns their bytes. Repeatable: the same id is written over.
    ///
    /// # Errors
    /// The directory cannot be read or the store fails; nothing is there then.
    pub async fn put(&self, id: &SnapshotId, directory: &Path) -> Result<u64, ArchiveError> {
        self.remove(id).await?;
        let mut manifest = Manifest { entries: entries(directory)? };
        for (number, entry) in manifest.entries.iter_mut().enumerate() {
            if let What::File { .. } = entry.what {
                entry.what = self.put_file(id, number, &directory.join(&entry.name), &entry.name).await?;
            }
        }
        let bytes = manifest.bytes();
        let manifest = serde_json::to_vec(&manifest).map_err(|error| host("write a manifest")(error.into()))?;
        let path = self.manifest(id);
        self.store.put(&path, PutPayload::from(manifest)).await.map_err(store("write a manifest"))?;
        self.make_durable(&path).await?;
        Ok(bytes)
    }

    async fn put_file(&self, id: &SnapshotId, number: usize, from: &Path, name: &str) -> Result<What, ArchiveError> {
        let path = self.object(id, number);
        let mut file = File::open(from).await.map_err(host(format!("read {}", from.display())))?;
        let mut writer = BufWriter::new(Arc::clone(&self.store), path.clone());
        let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; BUFFER_BYTES]);
        let copied = async {
            loop {
                let length = file.read(&mut buffer).await?;
                if length == 0 {
                    return Ok::<_, io::Error>(());
                }
                hash.update(&buffer[..length]);
                bytes += length as u64;
                writer.write_all(&buffer[..length]).await?;
            }
        };
        // What a failed write leaves in some stores their own rules for unfinished uploads take away: this writer
        // cannot take it back once it has failed.
        let copied = match copied.await {
            Ok(()) => writer.shutdown().await,
            Err(error) => Err(error),
        };
        copied.map_err(host(format!("put {} away", from.display())))?;
        let found = self.store.head(&path).await.map_err(store("look at what was written"))?;
        if found.size != bytes {
            let reason = format!("has {} of {bytes} bytes", found.size);
            return Err(ArchiveError::Damaged { id: id.clone(), file: name.to_owned(), reason });
        }
        self.make_durable(&path).await?;
        Ok(What::File { bytes, sha256: hex(&hash.finalize()) })
    }

    /// Brings a directory back; it must not exist and appears whole or not at all. The archive stays.
    ///
    /// # Errors
    /// It is not there, is not what was put away, or the host or the store fails.
    pub async fn get(&self, id: &SnapshotId, directory: &Path) -> Result<(), ArchiveError> {
        let manifest = self.read_manifest(id).await?.ok_or_else(|| ArchiveError::Missing { id: id.clone() })?;
        let mut partial = directory.as_os_str().to_owned();
        partial.push(PARTIAL);
        let partial = PathBuf::from(partial);
        remove_directory(&partial).await?;
        let brought = async {
            let made = tokio::fs::create_dir(&partial).await;
            made.map_err(host(format!("make {}", partial.display())))?;
            let mut directories = BTreeSet::from([String::new()]);
            for (number, entry) in manifest.entries.iter().enumerate() {
                self.get_entry(id, number, entry, &partial, &mut directories).await?;
            }
            for below in &directories {
                sync(&partial.join(below)).await?;
            }
            let renamed = tokio::fs::rename(&partial, directory).await;
            renamed.map_err(host(format!("make {}", directory.display())))?;
            sync(directory.parent().unwrap_or(directory)).await
        };
        let brought = brought.await;
        if brought.is_err() {
            remove_directory(&partial).await?;
        }
        brought
    }

    /// `directories`: those that were made here; nothing is written elsewhere.
    async fn get_entry(
        &self,
        id: &SnapshotId,
        number: usize,
        entry: &Entry,
        directory: &Path,
        directories: &mut BTreeSet<String>,
    ) -> Result<(), ArchiveError> {
        let damaged = |reason: String| ArchiveError::Damaged { id: id.clone(), file: entry.name.clone(), reason };
        let (parent, name) = entry.name.rsplit_once('/').unwrap_or(("", &entry.name));
        // A manifest is input like any other.
        if !directories.contains(parent) || ["", ".", ".."].contains(&name) || name.contains('\0') {
            return Err(damaged("has a name that leads elsewhere".to_owned()));
        }
        let to = directory.join(&entry.name);
        let write = |error| host(format!("write {}", to.display()))(error);
        match &entry.what {
            What::Directory => {
                tokio::fs::create_dir(&to).await.map_err(write)?;
                directories.insert(entry.name.clone());
            }
            What::Link { to: target } => {
                // Its rights are those of what it leads to.
                return tokio::fs::symlink(target, &to).await.map_err(write);
            }
            What::File { bytes, sha256 } => {
                self.get_file(&self.object(id, number), &to, *bytes, sha256, &damaged).await?;
            }
        }
        std::os::unix::fs::chown(&to, Some(entry.uid), Some(entry.gid)).map_err(write)?;
        std::fs::set_permissions(&to, rights(entry.mode)).map_err(write)
    }

    async fn get_file(
        &self,
        object: &ObjectPath,
        to: &Path,
        expected: u64,
        sha256: &str,
        damaged: &(impl Fn(String) -> ArchiveError + Sync),
    ) -> Result<(), ArchiveError> {
        let write = |error| host(format!("write {}", to.display()))(error);
        let object = match self.store.get(object).await {
            Err(object_store::Error::NotFound { .. }) => return Err(damaged("is missing".to_owned())),
            object => object.map_err(store("read a file"))?,
        };
        let mut stream = object.into_stream();
        let mut out = File::create_new(to).await.map_err(write)?;
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(store("read a file"))?;
            bytes += piece.len() as u64;
            if bytes > expected {
                return Err(damaged(format!("has more than {expected} bytes")));
            }
            hash.update(&piece);
            out.write_all(&piece).await.map_err(write)?;
        }
        if bytes != expected {
            return Err(damaged(format!("has {bytes} of {expected} bytes")));
        }
        if hex(&hash.finalize()) != sha256 {
            return Err(damaged("has another checksum".to_owned()));
        }
        out.flush().await.map_err(write)?;
        out.sync_all().await.map_err(write)
    }

    /// Bytes of an archive; `None`: there is none.
    ///
    /// # Errors
    /// The store fails, or its manifest cannot be read.
    pub async fn bytes(&self, id: &SnapshotId) -> Result<Option<u64>, ArchiveError> {
        let manifest = self.read_manifest(id).await?;
        Ok(manifest.map(|manifest| manifest.bytes()))
    }

    /// Removes an archive and whatever of it is half there. Repeatable.
    ///
    /// # Errors
    /// The store fails.
    pub async fn remove(&self, id: &SnapshotId) -> Result<(), ArchiveError> {
        self.delete(&self.manifest(id)).await?;
        let below = self.prefix.child(id.as_str());
        let objects: Vec<_> = self.store.list(Some(&below)).try_collect().await.map_err(store("list files"))?;
        for object in objects {
            self.delete(&object.location).await?;
        }
        if let Some(directory) = &self.directory {
            // Its empty directory; gone already, or not ours.
            std::fs::remove_dir(directory.join(id.as_str())).ok();
        }
        Ok(())
    }

    /// The ids of everything there is, whole or not.
    ///
    /// # Errors
    /// The store fails.
    pub async fn ids(&self) -> Result<BTreeSet<SnapshotId>, ArchiveError> {
        let prefix = (self.prefix != ObjectPath::default()).then_some(&self.prefix);
        let found = self.store.list_with_delimiter(prefix).await.map_err(store("list archives"))?;
        let objects = found.objects.iter().map(|object| &object.location);
        let names = found.common_prefixes.iter().chain(objects).filter_map(ObjectPath::filename);
        let id = |name: &str| name.strip_suffix(MANIFEST).unwrap_or(name).parse().ok();
        Ok(names.filter_map(id).collect())
    }

    async fn read_manifest(&self, id: &SnapshotId) -> Result<Option<Manifest>, ArchiveError> {
        let object = match self.store.get(&self.manifest(id)).await {
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            object => object.map_err(store("read a manifest"))?,
        };
        let text = object.bytes().await.map_err(store("read a manifest"))?;
        let damaged = |error: serde_json::Error| ArchiveError::Damaged {
            id: id.clone(),
            file: "its manifest".to_owned(),
            reason: format!("cannot be read: {error}"),
        };
        serde_json::from_slice(&text).map(Some).map_err(damaged)
    }

    async fn delete(&self, path: &ObjectPath) -> Result<(), ArchiveError> {
        match self.store.delete(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            deleted => deleted.map_err(store("delete")),
        }
    }

    fn object(&self, id: &SnapshotId, number: usize) -> ObjectPath {
        self.prefix.child(id.as_str()).child(number.to_string())
    }

    fn manifest(&self, id: &SnapshotId) -> ObjectPath {
        self.prefix.child(format!("{id}{MANIFEST}"))
    }

    /// S3 has written what it has acknowledged; a file system has not.
    async fn make_durable(&self, path: &ObjectPath) -> Result<(), ArchiveError> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let file = path.parts().fold(directory.clone(), |file, part| file.join(part.as_ref()));
        sync(&file).await?;
        sync(file.parent().unwrap_or(directory)).await
    }
}

/// What is in a directory and below, each directory before what is in it.
fn entries(directory: &Path) -> Result<Vec<Entry>, ArchiveError> {
    let mut found = Vec::new();
    let mut pending = vec![String::new()];
    while let Some(below) = pending.pop() {
        let place = directory.join(&below);
        let read = || host(format!("read {}", place.display()));
        for entry in std::fs::read_dir(&place).map_err(read())? {
            let entry = entry.map_err(read())?;
            let odd = |what: &str| {
                let problem = format!("{} {what}", entry.path().display());
                read()(io::Error::new(io::ErrorKind::InvalidData, problem))
            };
            let name = entry.file_name().into_string().map_err(|_| odd("has a name that is not UTF-8"))?;
            let name = if below.is_empty() { name } else { format!("{below}/{name}") };
            let metadata = entry.metadata().map_err(read())?;
            let what = if metadata.is_dir() {
                pending.push(name.clone());
                What::Directory
            } else if metadata.is_symlink() {
                let to = std::fs::read_link(entry.path()).map_err(read())?.into_os_string().into_string();
                What::Link { to: to.map_err(|_| odd("leads to what is not UTF-8"))? }
            } else if metadata.is_file() {
                What::File { bytes: 0, sha256: String::new() }
            } else {
                return Err(odd("is neither a file nor a directory"));
            };
            let (mode, uid, gid) = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
            found.push(Entry { name, what, mode, uid, gid });
        }
    }
    found.sort_by(|one, other| one.name.split('/').cmp(other.name.split('/')));
    Ok(found)
}

async fn sync(path: &Path) -> Result<(), ArchiveError> {
    let synced = async { File::open(path).await?.sync_all().await };
    synced.await.map_err(host(format!("write {} out", path.display())))
}

async fn remove_directory(path: &Path) -> Result<(), ArchiveError> {
    match tokio::fs::remove_dir_all(path).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(host(format!("remove {}", path.display()))),
    }
}

fn rights(mode: u32) -> std::fs::Permissions {
    std::fs::Permissions::from_mode(mode)
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn store(action: &'static str) -> impl FnOnce(object_store::Error) -> ArchiveError {
    move |source| ArchiveError::Store { action: action.to_owned(), source }
}

fn host(action: impl Into<String>) -> impl FnOnce(io::Error) -> ArchiveError {
    let action = action.into();
    move |source| ArchiveError::Host { action, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place {
        temp: tempfile::TempDir,
        archive: Archive,
        id: SnapshotId,
        from: PathBuf,
    }

    fn place() -> Place {
        let temp = tempfile::tempdir().expect("a directory");
        let archive = Archive::at_directory(&temp.path().join("archive")).expect("an archive");
        let from = temp.path().join("from");
        std::fs::create_dir(&from).expect("made");
        std::fs::write(from.join("memory"), vec![7; 23 << 20]).expect("written");
        std::fs::write(from.join("layer.qcow2"), b"layer").expect("written");
        std::fs::write(from.join("empty"), b"").expect("written");
        std::fs::set_permissions(from.join("empty"), rights(0o440)).expect("set");
        std::fs::create_dir_all(from.join("deep/er")).expect("made");
        std::fs::write(from.join("deep/er/file"), b"deep").expect("written");
        std::os::unix::fs::symlink("../layer.qcow2", from.join("deep/link")).expect("linked");
        Place { archive, id: SnapshotId::random(), from, temp }
    }

    #[tokio::test]
    async fn a_directory_comes_back_as_it_was_and_again() {
        let Place { temp, archive, id, from } = place();
        assert!(matches!(archive.get(&id, &temp.path().join("to")).await, Err(ArchiveError::Missing { .. })));
        for round in 0..2 {
            let bytes = archive.put(&id, &from).await.expect("put away");
            assert_eq!(bytes, (23 << 20) + 5 + 4);
            assert_eq!(archive.bytes(&id).await.expect("known"), Some(bytes));
            assert_eq!(archive.ids().await.expect("a list"), [id.clone()].into());
            let to = temp.path().join(format!("to-{round}"));
            archive.get(&id, &to).await.expect("brought back");
            for name in ["memory", "layer.qcow2", "empty", "deep/er/file", "deep/link"] {
                assert!(std::fs::read(to.join(name)).expect("there") == std::fs::read(from.join(name)).expect("there"));
                let mode = |path: &Path| std::fs::metadata(path).expect("there").mode();
                assert_eq!(mode(&to.join(name)), mode(&from.join(name)));
            }
            assert!(archive.get(&id, &to).await.is_err(), "it is there already");
        }
        archive.remove(&id).await.expect("removed");
        archive.remove(&id).await.expect("removed again");
        assert!(archive.ids().await.expect("a list").is_empty());
        assert_eq!(std::fs::read_dir(temp.path().join("archive")).expect("there").count(), 0);
    }

    #[tokio::test]
    async fn damage_is_found_named_and_leaves_nothing() {
        type Spoil = fn(&Path);
        let spoils: [(&str, Spoil); 4] = [
            ("another checksum", |file| std::fs::write(file, b"lager").expect("written")),
            ("has 3 of 5 bytes", |file| std::fs::write(file, b"lay").expect("written")),
            ("more than 5 bytes", |file| std::fs::write(file, b"layers").expect("written")),
            ("is missing", |file| std::fs::remove_file(file).expect("removed")),
        ];
        for (reason, spoil) in spoils {
            let Place { temp, archive, id, from } = place();
            archive.put(&id, &from).await.expect("put away");
            // After deep, deep/er, deep/er/file, deep/link and empty.
            spoil(&temp.path().join("archive").join(id.as_str()).join("5"));
            let refused = archive.get(&id, &temp.path().join("to")).await.expect_err(reason).to_string();
            assert!(refused.contains("layer.qcow2") && refused.contains(reason), "{refused}");
            let left: Vec<_> = std::fs::read_dir(temp.path()).expect("there").collect();
            assert_eq!(left.len(), 2, "{left:?}");
        }
    }

    #[tokio::test]
    async fn a_manifest_cannot_lead_out_of_its_directory() {
        let Place { temp, archive, id, from } = place();
        archive.put(&id, &from).await.expect("put away");
        for name in ["../escaped", "/etc/escaped", "..", "", "link/escaped"] {
            let entry = |name: &str, what: serde_json::Value| serde_json::json!({"name": name, "what": what, "mode": 0o755, "uid": 0, "gid": 0});
            let link = entry("link", serde_json::json!({"link": {"to": "/etc"}}));
            let manifest = serde_json::json!({"entries": [link, entry(name, "directory".into())]}).to_string();
            std::fs::write(temp.path().join(format!("archive/{id}.json")), manifest).expect("written");
            let refused = archive.get(&id, &temp.path().join("to")).await.expect_err(name);
            assert!(refused.to_string().contains("leads elsewhere"), "{refused}");
        }
        std::fs::write(temp.path().join(format!("archive/{id}.json")), "{").expect("written");
        assert!(matches!(archive.bytes(&id).await, Err(ArchiveError::Damaged { .. })));
    }

    #[test]
    fn addresses_are_read_and_nonsense_is_refused() {
        for bad in ["", "ftp://x", "s3://", "s3://user:secret@host/x"] {
            let refused = Archive::at(bad).expect_err(bad).to_string();
            assert!(!refused.contains("secret"), "{refused}");
        }
    }
}
