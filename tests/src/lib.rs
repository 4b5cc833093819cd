//! Drives the real `stockade` program and looks at what it leaves on the host.
//!
//! ```no_run
//! # async fn story() {
//! let server = stockade_system_tests::TestServer::start().await;
//! let sandbox = server.create("base").await;
//! assert_eq!(sandbox.shell("echo $((6 * 7))").await.stdout, b"42\n");
//! server.stop().await;
//! # }
//! ```
//!
//! Each test has a server of its own with a data directory of its own below `target/`. All share one
//! template cache there, so the base template is built once. `stockade` itself has to be built before:
//! `make test` does it.

mod host;
mod sandbox;
mod scan;
mod server;
mod world;

pub use host::Leftovers;
pub use sandbox::{Ran, Sandbox};
pub use scan::{Finding, Inodes, Needle, scan};
pub use server::{Ended, TestServer};
pub use world::{ACCESS_TOKEN, CLIENT_SECRET, MINT_BEARER, World};

use std::path::PathBuf;

/// Where cargo puts what it builds: found from where this program is.
pub fn target_directory() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    // <target>/<profile>/deps/<test>
    program.ancestors().nth(3).expect("tests lie three folders below the target directory").to_owned()
}

/// The root of the source tree.
pub fn source_directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace").to_owned()
}

/// The program under test, of the same profile as this test.
pub fn stockade_program() -> PathBuf {
    let program = std::env::current_exe().expect("a program has a path");
    let path = program.ancestors().nth(2).expect("tests lie in deps").join("stockade");
    assert!(path.exists(), "{} is not built: cargo build -p stockade-cli, or make test", path.display());
    path
}

/// What a test draws its random numbers from: `STOCKADE_SEED`, or a new one, which it prints.
pub fn seed() -> u64 {
    let given = std::env::var("STOCKADE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).expect("the kernel has random bytes");
        u64::from_le_bytes(bytes)
    });
    println!("STOCKADE_SEED={seed}");
    seed
}
