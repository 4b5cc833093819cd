//! Debian's archive: where it is, and single packages from it.
//!
//! The guest is Debian 12 whatever the host is. Where the host itself gets packages of that release from
//! Debian, its mirror is used; elsewhere Debian's public address. Everything here works in a state
//! directory of its own: it needs no root and does not touch (or trip over) the host's package lists.

use std::path::{Path, PathBuf};

use crate::{
    ImageError,
    program::Program,
    progress::{Progress, Step, Unit},
};

/// Debian 12.
pub(crate) const SUITE: &str = "bookworm";
pub(crate) const ARCHITECTURE: &str = "amd64";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const PUBLIC: [(&str, &str); 3] = [
    ("http://deb.debian.org/debian", "bookworm"),
    ("http://deb.debian.org/debian", "bookworm-updates"),
    ("http://deb.debian.org/debian-security", "bookworm-security"),
];

/// Lines for a `sources.list`, checked against Debian's own keys only.
pub(crate) async fn sources() -> Result<Vec<String>, ImageError> {
    if !Path::new(KEYRING).exists() {
        return Err(ImageError::MissingProgram { program: KEYRING, package: "debian-archive-keyring" });
    }
    let listed = Program::new("apt-get", "apt", "read the host's package sources")
        .args(["indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages"])
        .output()
        .await
        .unwrap_or_default();
    Ok(choose_sources(&listed))
}

fn choose_sources(listed: &str) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for line in listed.lines() {
        let [uri, release, "main"] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        // Others publish under Debian's release names too; their keys would not pass.
        let is_debian = PUBLIC.iter().any(|(_, suite)| *suite == release) && uri.contains("debian");
        let line = source_line(uri, release);
        if is_debian && uri.starts_with("http") && !chosen.contains(&line) {
            chosen.push(line);
        }
    }
    let has_release = chosen.iter().any(|line| line.ends_with(" bookworm main"));
    let has_security = chosen.iter().any(|line| line.ends_with(" bookworm-security main"));
    if has_release && has_security {
        return chosen;
    }
    PUBLIC.iter().map(|(uri, suite)| source_line(uri, suite)).collect()
}

fn source_line(uri: &str, suite: &str) -> String {
    format!("deb [signed-by={KEYRING}] {uri} {suite} main")
}

/// The host's proxy settings for programs that do not read its apt configuration.
pub(crate) async fn proxy_options() -> Vec<String> {
    let dump = Program::new("apt-config", "apt", "read apt's configuration").arg("dump").output().await;
    let is_proxy = |line: &&str| {
        ["Acquire::http::Proxy", "Acquire::https::Proxy"].iter().any(|name| line.starts_with(name))
            && !line.contains("\"\"")
    };
    dump.unwrap_or_default().lines().filter(is_proxy).map(str::to_owned).collect()
}

/// A private view of the archive.
pub(crate) struct Archive {
    directory: PathBuf,
}

impl Archive {
    /// Fetches the package lists into `directory`, which must exist.
    pub(crate) async fn open(directory: &Path, progress: &dyn Progress) -> Result<Self, ImageError> {
        let archive = Self { directory: directory.to_owned() };
        let create =
            |path: PathBuf| std::fs::create_dir_all(&path).map_err(ImageError::host(format!("create {path:?}")));
        create(directory.join("state/lists/partial"))?;
        create(directory.join("cache/archives/partial"))?;
        let write = |name: &str, text: &str| {
            std::fs::write(directory.join(name), text).map_err(ImageError::host(format!("write {name} for apt")))
        };
        write("status", "")?;
        write("sources.list", &(sources().await?.join("\n") + "\n"))?;
        let mut step = Step::begin(progress, "fetching Debian's package lists", Unit::Bytes);
        archive
            .apt("apt-get", "fetch Debian's package lists")
            // A mirror that fails must be an error, not a warning about old lists.
            .args(["update", "--error-on=any"])
            .run(|line| report_fetched(&mut step, line))
            .await?;
        Ok(archive)
    }

    /// What a package depends on, as apt prints it.
    pub(crate) async fn depends(&self, package: &str) -> Result<Vec<String>, ImageError> {
        let text = self
            .apt("apt-cache", format!("look up {package}"))
            .args(["depends", "--no-recommends", "--no-suggests", package])
            .output()
            .await?;
        Ok(text.lines().filter_map(|line| line.trim().strip_prefix("Depends: ")).map(str::to_owned).collect())
    }

    /// Downloads one package; returns the file and its version.
    pub(crate) async fn download(
        &self,
        package: &str,
        progress: &dyn Progress,
    ) -> Result<(PathBuf, String), ImageError> {
        let into = self.directory.join("downloaded");
        std::fs::create_dir_all(&into).map_err(ImageError::host(format!("create {into:?}")))?;
        let mut step = Step::begin(progress, "fetching the kernel", Unit::Bytes);
        self.apt("apt-get", format!("download {package}"))
            .args(["download", package])
            .current_dir(&into)
            .run(|line| report_fetched(&mut step, line))
            .await?;
        let unclear = || ImageError::Answer { what: format!("what apt-get downloaded for {package}") };
        let entries = std::fs::read_dir(&into).map_err(ImageError::host(format!("list {into:?}")))?;
        let file = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .find(|name| name.starts_with(&format!("{package}_")) && name.ends_with(".deb"))
            .ok_or_else(unclear)?;
        // <package>_<version>_<architecture>.deb, a colon in the version written as %3a.
        let version = file.split('_').nth(1).ok_or_else(unclear)?.replace("%3a", ":");
        Ok((into.join(file), version))
    }

    fn apt(&self, program: &'static str, action: impl Into<String>) -> Program {
        let at = |option: &str, name: &str| format!("{option}={}", self.directory.join(name).display());
        Program::new(program, "apt", action).args([
            "-o".to_owned(),
            at("Dir::State", "state"),
            "-o".to_owned(),
            at("Dir::State::status", "status"),
            "-o".to_owned(),
            at("Dir::Cache", "cache"),
            "-o".to_owned(),
            at("Dir::Etc::SourceList", "sources.list"),
            "-o".to_owned(),
            "Dir::Etc::SourceParts=-".to_owned(),
            "-o".to_owned(),
            format!("APT::Architecture={ARCHITECTURE}"),
            "-o".to_owned(),
            "Acquire::Languages=none".to_owned(),
            // The directory is this user's; apt's own unprivileged user could not write to it.
            "-o".to_owned(),
            "APT::Sandbox::User=".to_owned(),
        ])
    }
}

/// Counts what a line of apt says it fetched.
pub(crate) fn report_fetched(step: &mut Step<'_>, line: &str) {
    if let Some((name, bytes)) = fetched(line) {
        step.advance(bytes, name);
    }
}

/// `Get:7 http://host/debian bookworm/main amd64 mawk amd64 1.3.4 [119 kB]` → (`mawk`, 119000).
pub(crate) fn fetched(line: &str) -> Option<(&str, u64)> {
    let rest = line.strip_prefix("Get:")?;
    let (rest, size) = rest.strip_suffix(']')?.rsplit_once(" [")?;
    let name = rest.split(' ').nth(4).unwrap_or("package lists");
    Some((name, bytes(size)?))
}

/// `171 MB`, `8,790 kB` → bytes.
pub(crate) fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.trim().split_once(' ')?;
    let number: f64 = number.replace(',', "").parse().ok()?;
    let factor = match unit {
        "B" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sizes of packages, for display")]
    Some((number * factor) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_debian_mirror_is_used_and_other_publishers_are_not() {
        let listed = "http://mirror.example/debian/ bookworm main\n\
                      http://mirror.example/debian/ bookworm contrib\n\
                      https://apt.example.com/ bookworm main\n\
                      http://mirror.example/debian-security/ bookworm-security main\n";
        let chosen = choose_sources(listed);
        assert_eq!(chosen.len(), 2, "{chosen:?}");
        assert!(chosen.iter().all(|line| line.contains("mirror.example/debian") && line.contains("signed-by")));
    }

    #[test]
    fn a_host_of_another_release_gets_debians_public_address() {
        for listed in
            ["", "http://archive.ubuntu.com/ubuntu/ noble main\n", "http://deb.debian.org/debian trixie main\n"]
        {
            let chosen = choose_sources(listed);
            assert_eq!(chosen.len(), 3);
            assert!(chosen[0].contains("deb.debian.org/debian bookworm main"), "{chosen:?}");
        }
    }

    #[test]
    fn lines_of_apt_are_read() {
        let line = "Get:7 http://deb.debian.org/debian bookworm/main amd64 mawk amd64 1.3.4.20200120-3.1 [119 kB]";
        assert_eq!(fetched(line), Some(("mawk", 119_000)));
        let line = "Get:5 http://deb.debian.org/debian bookworm/main amd64 Packages [8,790 kB]";
        assert_eq!(fetched(line), Some(("Packages", 8_790_000)));
        assert_eq!(fetched("Setting up mawk (1.3.4)"), None);
    }
}
