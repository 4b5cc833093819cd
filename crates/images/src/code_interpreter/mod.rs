//! The `code-interpreter` template: `base`, Jupyter kernels, the libraries data work is done with, and a
//! small service that runs code in the kernels (`stockade_code`, Python, port 49999 of the guest).
//!
//! The service and its default kernels are started before the template's memory is kept, so that every
//! sandbox has them warm.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use stockade_engine::Startup;
use stockade_wire::process::{Command, StartRequest};

use crate::{
    ImageError,
    base::{Addition, BASE, Recipe},
    cache::Cache,
    digest::Digest,
    program::Program,
    progress::{Progress, Step, Unit},
};

/// What Debian has of it: kernels' interpreters and what libraries from elsewhere link to.
const PACKAGES: &[&str] = &["default-jdk-headless", "fonts-dejavu-core", "r-base-core", "r-cran-irkernel"];

const REQUIREMENTS: &str = include_str!("requirements.txt");

pub(crate) const SETUP: &str = include_str!("setup.sh");

/// Files as they lie in the tree while it is set up.
const FILES: &[(&str, &str)] = &[
    ("requirements.txt", REQUIREMENTS),
    ("serve.sh", include_str!("serve.sh")),
    ("rehearse.sh", include_str!("rehearse.sh")),
    ("kernels/bash.json", include_str!("kernels/bash.json")),
    ("kernels/deno.json", include_str!("kernels/deno.json")),
    ("kernels/python3.json", include_str!("kernels/python3.json")),
    ("stockade_code/__init__.py", include_str!("stockade_code/__init__.py")),
    ("stockade_code/__main__.py", include_str!("stockade_code/__main__.py")),
    ("stockade_code/bash.py", include_str!("stockade_code/bash.py")),
    ("stockade_code/charts.py", include_str!("stockade_code/charts.py")),
    ("stockade_code/contexts.py", include_str!("stockade_code/contexts.py")),
    ("stockade_code/deno.js", include_str!("stockade_code/deno.js")),
    ("stockade_code/execution.py", include_str!("stockade_code/execution.py")),
    ("stockade_code/identity.py", include_str!("stockade_code/identity.py")),
    ("stockade_code/kernel.py", include_str!("stockade_code/kernel.py")),
    ("stockade_code/memory.py", include_str!("stockade_code/memory.py")),
    ("stockade_code/languages.py", include_str!("stockade_code/languages.py")),
    ("stockade_code/output.py", include_str!("stockade_code/output.py")),
    ("stockade_code/results.py", include_str!("stockade_code/results.py")),
];

/// Python packages are for the guest's Python, whatever the host's is.
const PLATFORM: &[&str] = &[
    "--implementation=cp",
    "--python-version=3.11",
    "--abi=cp311",
    "--abi=abi3",
    "--abi=none",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_27_x86_64",
    "--platform=manylinux_2_17_x86_64",
    "--platform=manylinux2014_x86_64",
    "--platform=manylinux2010_x86_64",
    "--platform=manylinux1_x86_64",
    "--platform=any",
];

/// Where the service listens in the guest.
pub const PORT: u16 = 49999;

/// Emulated, a start of the kernels and all they import takes about a minute.
const PATIENCE: Duration = Duration::from_secs(600);

pub(crate) const RECIPE: Recipe = Recipe {
    kind: "code_disk",
    packages: &[BASE.packages[0], PACKAGES],
    needed_mib: 10 * 1024,
    addition: Some(Addition {
        directory: "code-interpreter",
        files: FILES,
        // Java's packages link manuals, which are left out, and fail where there is no place for them.
        prepare: r#"mkdir -p "$1/usr/share/man/man1""#,
        setup: SETUP,
    }),
    ..BASE
};

/// What runs in the template when its memory is kept.
pub fn startup() -> Startup {
    let words = |words: &[&str]| Command::Argv(words.iter().map(|word| (*word).to_owned()).collect());
    let request = |command, tag: Option<&str>| StartRequest {
        user: Some("root".to_owned()),
        cwd: Some("/home/user".to_owned()),
        tag: tag.map(str::to_owned),
        ..StartRequest::new(command)
    };
    let health = format!("http://127.0.0.1:{PORT}/health");
    Startup {
        start: request(words(&["/usr/local/bin/stockade-code-interpreter"]), Some("code-interpreter")),
        ready: request(words(&["curl", "--silent", "--fail", "--output", "/dev/null", &health]), None),
        patience: PATIENCE,
    }
}

/// The Python packages, from the index the host's pip is set up for; each is checked against its digest.
pub(crate) async fn fetch(cache: &Cache, progress: &dyn Progress) -> Result<PathBuf, ImageError> {
    let digest = Digest::default().field("requirements", REQUIREMENTS).field("platform", PLATFORM.join(" ")).finish();
    let download = async |staging: &Path| {
        let requirements = staging.join("requirements.txt");
        fs::write(&requirements, REQUIREMENTS).map_err(ImageError::host("write the list of Python packages"))?;
        let mut step = Step::begin(progress, "fetching Python packages", Unit::Items);
        Program::new("python3", "python3-pip", "fetch the code interpreter's Python packages")
            .args(["-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes"])
            .args(["--only-binary=:all:", "--progress-bar=off"])
            .args(PLATFORM)
            .args(["--requirement".as_ref(), requirements.as_os_str(), "--dest".as_ref(), staging.as_os_str()])
            .run(|line| {
                if let Some(name) = line.strip_prefix("Collecting ") {
                    step.advance(1, name.split(['=', ' ']).next().unwrap_or(name));
                }
            })
            .await
    };
    cache.ensure(&format!("wheels-{digest}"), progress, download).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_python_package_is_pinned_by_its_digest() {
        let packages: Vec<_> = REQUIREMENTS.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(packages.len() > 50);
        assert!(packages.iter().all(|line| line.contains("==") && line.contains(" --hash=sha256:")));
        assert!(packages.is_sorted_by_key(|line| line.split("==").next()));
    }

    #[test]
    fn every_file_of_the_service_is_in_the_image() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/code_interpreter");
        for directory in ["kernels", "stockade_code"] {
            for entry in fs::read_dir(source.join(directory)).expect("it is there") {
                let name = format!("{directory}/{}", entry.expect("readable").file_name().to_string_lossy());
                let is_source = !name.contains("__pycache__");
                assert!(!is_source || FILES.iter().any(|(file, _)| *file == name), "{name} is missing");
            }
        }
    }
}
