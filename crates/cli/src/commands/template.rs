//! `stockade template ls | info`.

use serde_json::json;

use super::{Context, sandboxes::local_time};
use crate::{args, client::Template, failure::Failure, ui::table};

pub(super) async fn template(context: &Context, args: args::Template) -> Result<(), Failure> {
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
    }
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
