//! Builds the guest agent and hands it to the CLI as bytes.
//!
//! The agent is another program for another machine: linked statically, with a profile of its own. So it
//! is built by a cargo of its own, in a target directory of its own (the outer cargo holds the lock on
//! the shared one), which debug and release builds of the CLI share. `STOCKADE_GUEST_BINARY=PATH` takes a
//! ready-made agent instead.

use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=STOCKADE_GUEST_BINARY");
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    let agent = match env::var_os("STOCKADE_GUEST_BINARY") {
        Some(path) => {
            println!("cargo::rerun-if-changed={}", Path::new(&path).display());
            PathBuf::from(path)
        }
        // Not watched: it is newer than the start of this script, so that the next build would run it once more and
        // link the CLI again for nothing. Its sources are.
        None => build_agent(&out_dir)?,
    };
    fs::copy(&agent, out_dir.join("stockade-guest"))
        .map_err(|error| format!("cannot copy the guest agent {}: {error}", agent.display()))?;
    Ok(())
}

fn build_agent(out_dir: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let crate_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo sets CARGO_MANIFEST_DIR")?);
    let root = crate_dir.ancestors().nth(2).ok_or("the crate lies two folders below the workspace")?;
    for input in ["crates/guest", "crates/wire", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(input).display());
    }
    // OUT_DIR is <target>/<profile>/build/<package>/out.
    let target_dir = out_dir.ancestors().nth(4).ok_or("OUT_DIR lies within a target directory")?.join("guest-agent");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .current_dir(root)
        .args(["build", "--profile", "guest", "--package", "stockade-guest", "--bin", "stockade-guest"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target_dir)
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    // What the outer cargo was told is not meant for the agent; clippy's wrapper would even keep it from
    // being compiled.
    for variable in [
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
        "CARGO_BUILD_TARGET_DIR",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        cargo.env_remove(variable);
    }
    let status = cargo.status().map_err(|error| format!("cannot start cargo for the guest agent: {error}"))?;
    if !status.success() {
        return Err(format!("the guest agent did not build ({status}); its errors are above").into());
    }
    Ok(target_dir.join(TARGET).join("guest/stockade-guest"))
}
