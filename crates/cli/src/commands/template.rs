//! `stockade template ls | info | build | rm`.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{Context, sandboxes::local_time};
use crate::{
    args,
    client::Template,
    copy::pack::pack,
    failure::{FAILED, Failure},
    ui::table,
};

/// The exit code.
pub(super) async fn template(context: &Context, args: args::Template) -> Result<u8, Failure> {
    match args {
        args::Template::Ls => {
            let templates = context.client.templates().await?;
            context.ui.data(&json!({"items": templates}), || {
                let rows: Vec<_> = templates.iter().map(row).collect();
                table(&["NAME", "ID", "STATE", "VCPUS", "MEMORY", "DISK", "CREATED"], &rows)
            })
        }
        args::Template::Info { template } => {
            let template = context.client.template(&template).await?;
            context.ui.data(&template, || describe(&template))
        }
        args::Template::Build(args) => build(context, args).await,
        args::Template::Rm { templates } => return rm(context, templates).await,
    }?;
    Ok(0)
}

/// Deletes each; the ones that failed are named, and make the exit code 1.
async fn rm(context: &Context, names: Vec<String>) -> Result<u8, Failure> {
    let mut deleted = Vec::new();
    let mut code = 0;
    for name in names {
        match context.client.remove_template(&name).await {
            Ok(()) => deleted.push(name),
            Err(failure) => {
                context.ui.failure(&failure);
                code = FAILED;
            }
        }
    }
    context.ui.data(&json!({"deleted": deleted}), || deleted.iter().map(|name| format!("{name}\n")).collect())?;
    Ok(code)
}

const POLL: Duration = Duration::from_millis(200);

/// Uploads what is to be copied, begins the build, and follows it to its end.
async fn build(context: &Context, args: args::TemplateBuild) -> Result<(), Failure> {
    let mut text = String::new();
    let read = if args.spec.as_os_str() == "-" {
        io::stdin().read_to_string(&mut text).map(drop)
    } else {
        fs::File::open(&args.spec).and_then(|mut file| file.read_to_string(&mut text).map(drop))
    };
    let source = match args.spec.as_os_str() == "-" {
        true => "standard input".to_owned(),
        false => args.spec.display().to_string(),
    };
    read.map_err(|error| Failure::host(format!("read {source}"), error))?;
    let mut spec: Value = serde_json::from_str(&text).map_err(|error| {
        Failure::new("invalid_spec", format!("{source} is not JSON: {error}"))
            .hint("`stockade template build --help` shows a spec")
    })?;
    if !spec.is_object() {
        let message = format!("{source} does not hold a JSON object");
        return Err(Failure::new("invalid_spec", message).hint("`stockade template build --help` shows a spec"));
    }
    if args.force {
        spec["force"] = Value::Bool(true);
    }
    let beside = args.spec.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = args.context.as_deref().unwrap_or(beside);
    for step in spec["steps"].as_array_mut().into_iter().flatten() {
        if let Some(copy) = step.get_mut("copy").filter(|copy| copy.get("upload").is_none()) {
            upload(context, directory, copy).await?;
        }
    }
    let mut build = context.client.start_build(&spec).await?;
    let mut seen = 0;
    loop {
        for line in build["log"].as_array().into_iter().flatten() {
            seen += 1;
            if context.ui.json {
                println!("{line}");
            } else {
                // The log is the command's progress; its result is the template's name.
                let _ = writeln!(io::stderr(), "{}", line["message"].as_str().unwrap_or_default());
            }
        }
        let is_drained = build["log"].as_array().is_none_or(Vec::is_empty);
        let id = build["id"].as_str().unwrap_or_default().to_owned();
        match build["state"].as_str() {
            Some("ready") if is_drained => {
                return context.ui.data(&build, || build["name"].as_str().unwrap_or_default().to_owned());
            }
            Some("failed") if is_drained => {
                let failure = &build["failure"];
                let (step, message) = (failure["step"].as_str(), failure["message"].as_str());
                let message = format!("step {}: {}", step.unwrap_or("?"), message.unwrap_or("it failed"));
                return Err(Failure::new("build_failed", message));
            }
            Some("ready" | "failed") => {}
            _ => tokio::time::sleep(POLL).await,
        }
        build = context.client.build(&id, seen).await?;
    }
}

/// Packs a copy step's source and names the upload in the step.
async fn upload(context: &Context, directory: &Path, copy: &mut Value) -> Result<(), Failure> {
    let Some(source) = copy.get("source").and_then(Value::as_str).map(str::to_owned) else {
        return Err(Failure::new("invalid_spec", "a copy step has no source"));
    };
    let path = directory.join(&source);
    let failed = |error: io::Error| Failure::host(format!("read {}", path.display()), error);
    let mut archive = Vec::new();
    if fs::metadata(&path).map_err(failed)?.is_dir() {
        for skipped in pack(&path, &mut archive)? {
            context.ui.note(&format!("left out {}: it is no file, directory or link", skipped.display()));
        }
        copy["source"] = json!(".");
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut builder = tar::Builder::new(&mut archive);
        builder.append_path_with_name(&path, &name).and_then(|()| builder.finish()).map_err(failed)?;
        drop(builder);
        copy["source"] = json!(name);
    }
    let digest: String = Sha256::digest(&archive).iter().map(|byte| format!("{byte:02x}")).collect();
    context.client.upload(&digest, archive).await?;
    copy["upload"] = json!(digest);
    Ok(())
}

fn row(template: &Template) -> Vec<String> {
    vec![
        template.name.clone(),
        template.id.clone(),
        template.state.clone(),
        template.shape.vcpus.to_string(),
        format!("{} MiB", template.shape.memory_mib),
        format!("{} MiB", template.shape.disk_mib),
        local_time(&template.created_at),
    ]
}

fn describe(template: &Template) -> String {
    let shape = &template.shape;
    let lines = [
        ("id", template.id.clone()),
        ("name", template.name.clone()),
        ("state", template.state.clone()),
        ("shape", format!("{} vCPU, {} MiB memory, {} MiB disk", shape.vcpus, shape.memory_mib, shape.disk_mib)),
        ("user", template.default_user.clone()),
        ("created", local_time(&template.created_at)),
    ];
    lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}
