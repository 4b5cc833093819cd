//! Makes a new migration a reason to build again.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
