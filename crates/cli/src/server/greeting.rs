//! What a server says when it is ready: data on standard output.

use std::{env, ffi::OsStr, fs, path::Path, time::Duration};

use serde_json::json;

use super::{data_dir::DataDir, self_check::Timing};
use crate::{
    commands::env::{e2b_variables, quoted},
    failure::Failure,
    local_paths::{Ready, default_data_dir},
    ui::Ui,
};

pub(super) fn greet(
    data_dir: &DataDir,
    ready: &Ready,
    timing: Option<&Timing>,
    took: Duration,
    ui: Ui,
) -> Result<(), Failure> {
    let value = json!({"ready": ready, "self_check": timing, "start_seconds": took.as_secs_f64()});
    ui.data(&value, || text(data_dir, ready, timing, took))
}

fn text(data_dir: &DataDir, ready: &Ready, timing: Option<&Timing>, took: Duration) -> String {
    let mut text = format!("ready in {:.1} s (pid {}, {})\n", took.as_secs_f64(), ready.pid, accel(&ready.accel));
    if let Some(Timing { create_ms, run_ms }) = timing {
        text.push_str(&format!("first sandbox: created in {create_ms:.0} ms, ran a command in {run_ms:.0} ms\n"));
    }
    let lines = [
        ("http", ready.http_url.clone()),
        ("https", ready.https_url.clone()),
        ("api key", ready.api_key_file.display().to_string()),
        ("ca", ready.ca_file.display().to_string()),
    ];
    let ssh = ready.ssh_addr.map(|address| {
        let key = ready.ssh_host_key.as_deref().unwrap_or_default();
        ("ssh", format!("{address} {key}"))
    });
    text.push('\n');
    lines.iter().chain(&ssh).for_each(|(name, value)| text.push_str(&format!("{name:<9}{value}\n")));
    // Clients look in the default place by themselves.
    let data_dir = data_dir.path();
    let option = if data_dir == default_data_dir() {
        String::new()
    } else {
        format!(" --data-dir {}", quoted(&data_dir.display().to_string()))
    };
    let search_path = env::var_os("PATH").unwrap_or_default();
    let stockade = env::current_exe().map_or_else(|_| "stockade".to_owned(), |program| call(&program, &search_path));
    text.push_str(&format!(
        "\nin another terminal:\n    {stockade} run{option} -- python3 -c 'print(6*7)'\n\nin Python (pip install e2b):\n"
    ));
    let key = format!("\"$(cat {})\"", quoted(&ready.api_key_file.display().to_string()));
    let variables = e2b_variables(ready, &key).into_iter().filter(|(name, _)| *name != "NODE_EXTRA_CA_CERTS");
    let assignments: Vec<_> = variables
        .map(|(name, value)| format!("{name}={}", if value == key { value } else { quoted(&value) }))
        .collect();
    let program =
        "from e2b import Sandbox; s = Sandbox.create(); print(s.commands.run(\"echo hello\").stdout); s.kill()";
    text.push_str(&format!("    {} \\\n        python3 -c '{program}'\n", assignments.join(" ")));
    text
}

/// How to call this program from a shell with that `PATH`: by its name if it is found there, else by its path.
fn call(program: &Path, search_path: &OsStr) -> String {
    let name = program.file_name().unwrap_or(OsStr::new("stockade"));
    let found = env::split_paths(search_path).map(|directory| directory.join(name)).find(|path| path.is_file());
    let same = |path: &Path| Some(fs::canonicalize(path).ok()? == fs::canonicalize(program).ok()?);
    let words = if found.as_deref().and_then(same) == Some(true) { Path::new(name) } else { program };
    quoted(&words.display().to_string())
}

fn accel(accel: &str) -> String {
    match accel {
        "kvm" => "hardware virtualisation by KVM".to_owned(),
        "tcg" => "software emulation: slower, and the jail is the wall".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn lines_to_paste_name_a_program_the_shell_finds() {
        let directory = tempfile::tempdir().expect("a directory");
        let (program, other, bin) =
            (directory.path().join("stockade"), directory.path().join("other"), directory.path().join("bin"));
        fs::write(&program, "").expect("a file");
        fs::write(&other, "").expect("a file");
        fs::create_dir(&bin).expect("a directory");
        let path = program.display().to_string();
        assert_eq!(call(&program, bin.as_os_str()), path, "nothing of that name is found");
        symlink(&other, bin.join("stockade")).expect("a link");
        assert_eq!(call(&program, bin.as_os_str()), path, "another program is found");
        fs::remove_file(bin.join("stockade")).expect("removed");
        symlink(&program, bin.join("stockade")).expect("a link");
        assert_eq!(call(&program, bin.as_os_str()), "stockade");
    }
}
