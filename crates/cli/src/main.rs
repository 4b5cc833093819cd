//! The `stockade` program.

fn main() -> std::process::ExitCode {
    stockade_cli::main()
}
