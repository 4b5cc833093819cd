//! `stockade policy | secret | audit`.

use std::io::{Read as _, Write as _};

use serde_json::{Value, json};
use stockade_model::Secret;

use super::{Context, sandboxes::local_time};
use crate::{
    args::{self, Audit, Network},
    failure::{BAD_USAGE, Failure},
    ui::{printable, table},
};

/// Records the server gives at once.
const LARGEST_PAGE: u32 = 1_000;

/// What the options ask for, as a whole network or as a change of one; `None`: nothing is said.
pub(super) fn spec(network: &Network) -> Option<Value> {
    let Network { allow_out, deny_out, no_internet, secrets } = network;
    let mut said = serde_json::Map::new();
    if !allow_out.is_empty() || !deny_out.is_empty() || *no_internet {
        said.insert("internet".to_owned(), json!(!no_internet));
        said.insert("allow".to_owned(), json!(allow_out));
        said.insert("deny".to_owned(), json!(deny_out));
    }
    if !secrets.is_empty() {
        let uses = secrets.iter().map(|(env, secret)| json!({"env": env, "secret": secret}));
        said.insert("secrets".to_owned(), uses.collect());
    }
    (!said.is_empty()).then(|| said.into())
}

pub(super) async fn policy(context: &Context, args: args::Policy) -> Result<(), Failure> {
    match args {
        args::Policy::Get(one) => {
            let network = context.client.network(&one.sandbox).await?;
            context.ui.data(&network, || pretty(&network["network"]))
        }
        args::Policy::Explain { sandbox, request, method } => {
            let explained = context.client.explain(&sandbox, &method, &request).await?;
            context.ui.data(&explained, || explain(&explained))
        }
        args::Policy::Default(of) => {
            let default = context.client.default_network(of.template.as_deref()).await?;
            context.ui.data(&default, || pretty(&default["network"]))
        }
        args::Policy::SetDefault { of, file, network } => {
            let spec = read_or_spec(file.as_deref(), &network)?;
            let default = context.client.set_default_network(of.template.as_deref(), &spec).await?;
            context.ui.data(&default, || format!("set for the {}", default["from"].as_str().unwrap_or_default()))
        }
        args::Policy::ClearDefault(of) => {
            context.client.clear_default_network(of.template.as_deref()).await?;
            let default = context.client.default_network(of.template.as_deref()).await?;
            context.ui.data(&default, || format!("now from the {}", default["from"].as_str().unwrap_or_default()))
        }
        args::Policy::Set { sandbox, file, network } => {
            let said = read_or_spec(file.as_deref(), &network)?;
            let network = match file {
                Some(_) => context.client.set_network(&sandbox, &said).await?,
                None => context.client.change_network(&sandbox, &said).await?,
            };
            context.ui.data(&network, || format!("revision {}", network["revision"]))
        }
    }
}

fn read_or_spec(file: Option<&std::path::Path>, network: &Network) -> Result<Value, Failure> {
    match file {
        Some(path) => read_spec(path),
        None => spec(network).ok_or_else(|| {
            Failure::new("invalid_argument", "nothing is said about the network")
                .hint("say what to allow or deny, or take it from a file; `echo '{}' | … --file -` opens the web again")
                .exit(BAD_USAGE)
        }),
    }
}

fn read_spec(path: &std::path::Path) -> Result<Value, Failure> {
    let mut text = String::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text))
    };
    read.map_err(|error| Failure::host(format!("read {}", path.display()), error))?;
    serde_json::from_str(&text).map_err(|error| {
        Failure::new("malformed_json", format!("{} is not JSON: {error}", path.display()))
            .hint("`stockade policy get SANDBOX` prints what a sandbox has")
    })
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

fn explain(explained: &Value) -> String {
    let text = |name: &str| explained[name].as_str().map(printable);
    let allowed = explained["allowed"] == true;
    let mut lines = vec![
        ("verdict", Some(if allowed { "allow" } else { "deny" }.to_owned())),
        ("why", text("reason")),
        ("rule", text("rule")),
        ("request", text("http_rule")),
        ("mode", text("mode").filter(|_| allowed)),
    ];
    let secrets = explained["secrets"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let secrets: Vec<_> = secrets.map(printable).collect();
    lines.push(("secrets", (!secrets.is_empty()).then(|| secrets.join(" "))));
    lines.into_iter().filter_map(|(name, value)| Some(format!("{name:<10}{}\n", value?))).collect()
}

pub(super) async fn secret(context: &Context, args: args::Secret) -> Result<(), Failure> {
    match args {
        args::Secret::Set { name, hosts, oauth } => {
            let value = read_value()?;
            let secret = context.client.put_secret(&name, &value, &hosts, client(&oauth)).await?;
            context.ui.data(&secret, || format!("version {}", secret["version"]))
        }
        args::Secret::Ls => {
            let secrets = context.client.secrets().await?;
            context.ui.data(&secrets, || {
                let rows: Vec<_> = secrets["items"].as_array().into_iter().flatten().map(secret_row).collect();
                table(&["NAME", "SOURCE", "VERSION", "HOSTS", "UPDATED"], &rows)
            })
        }
        args::Secret::Rm { names } => {
            for name in &names {
                context.client.remove_secret(name).await?;
            }
            context.ui.data(&json!({"removed": names}), || names.iter().map(|name| format!("{name}\n")).collect())
        }
    }
}

/// The client of a token endpoint the options describe.
fn client(oauth: &args::OAuth) -> Option<Value> {
    let args::OAuth { token_url, client_id, scopes, audience, form } = oauth;
    let auth = if *form { "form" } else { "basic" };
    let mut client = json!({"token_url": token_url.as_ref()?, "client_id": client_id, "scopes": scopes, "auth": auth});
    if let Some(audience) = audience {
        client["audience"] = audience.as_str().into();
    }
    Some(client)
}

/// Not an argument: those are seen by everybody on the host and kept by shells.
fn read_value() -> Result<Secret, Failure> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).map_err(|error| Failure::host("read the value", error))?;
    let value = text.strip_suffix('\n').unwrap_or(&text);
    if value.is_empty() {
        return Err(Failure::new("no_value", "standard input holds no value")
            .hint("printf %s \"$VALUE\" | stockade secret set NAME --host HOST"));
    }
    Ok(Secret::new(value))
}

fn secret_row(secret: &Value) -> Vec<String> {
    let hosts: Vec<_> = secret["hosts"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    vec![
        secret["name"].as_str().map(printable).unwrap_or_default(),
        secret["source"].as_str().map(printable).unwrap_or_default(),
        secret["version"].to_string(),
        printable(&hosts.join(" ")),
        secret["updated_at"].as_str().map(local_time).unwrap_or_default(),
    ]
}

pub(super) async fn audit(context: &Context, args: Audit) -> Result<(), Failure> {
    if args.follow {
        return follow(context, args.sandbox.as_deref()).await;
    }
    let mut conditions = vec![];
    conditions.extend(args.sandbox.map(|sandbox| ("sandbox", sandbox)));
    conditions.extend(args.verdict.map(|verdict| ("verdict", verdict)));
    if args.export {
        return export(context, &conditions).await;
    }
    conditions.push(("limit", args.limit.to_string()));
    let page = context.client.audit(&conditions).await?;
    context.ui.data(&page, || {
        let items = page["items"].as_array().into_iter().flatten();
        let rows: Vec<_> = items.rev().map(audit_row).collect();
        table(&["TIME", "SANDBOX", "KIND", "VERDICT", "WHERE", "WHY"], &rows)
    })
}

fn audit_row(record: &Value) -> Vec<String> {
    let text = |name: &str| record[name].as_str().map(printable).unwrap_or_default();
    let host = if record["name"].is_string() { text("name") } else { text("address") };
    let port = record["port"].as_u64().map(|port| format!(":{port}")).unwrap_or_default();
    let request = [text("method"), text("path")].join(" ");
    let secrets: Vec<_> = record["secrets"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut why = text("reason");
    if !secrets.is_empty() {
        why = format!("{why} (secret {})", printable(&secrets.join(" ")));
    }
    let place = format!("{host}{port} {request}");
    vec![local_time(&text("time")), text("sandbox"), text("kind"), text("verdict"), place.trim().to_owned(), why]
}

/// All pages; each record as it is streamed.
async fn export(context: &Context, conditions: &[(&str, String)]) -> Result<(), Failure> {
    let mut output = std::io::stdout();
    let mut cursor = None;
    loop {
        let place = cursor.map(|cursor| ("cursor", cursor));
        let asked: Vec<_> =
            conditions.iter().cloned().chain([("limit", LARGEST_PAGE.to_string())]).chain(place).collect();
        let page = context.client.audit(&asked).await?;
        let lines: String =
            page["items"].as_array().into_iter().flatten().map(|record| format!("{record}\n")).collect();
        let written = output.write_all(lines.as_bytes()).and_then(|()| output.flush());
        written.map_err(|error| Failure::host("write to standard output", error))?;
        cursor = page["cursor"].as_str().map(str::to_owned);
        if cursor.is_none() {
            return Ok(());
        }
    }
}

/// Lines as they come; they are JSON whatever was asked for.
async fn follow(context: &Context, sandbox: Option<&str>) -> Result<(), Failure> {
    let mut stream = context.client.follow_audit(sandbox).await?;
    let mut output = std::io::stdout();
    while let Some(piece) = stream.chunk().await.map_err(|error| context.client.stream_broken(&error))? {
        if piece.iter().all(|byte| *byte == b'\n') {
            continue;
        }
        let written = output.write_all(&piece).and_then(|()| output.flush());
        written.map_err(|error| Failure::host("write to standard output", error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_say_nothing_ask_for_nothing() {
        assert_eq!(spec(&Network::default()), None);
        let network = Network { no_internet: true, secrets: vec![("K".into(), "key".into())], ..Network::default() };
        let wanted = json!({"internet": false, "allow": [], "deny": [], "secrets": [{"env": "K", "secret": "key"}]});
        assert_eq!(spec(&network), Some(wanted));
    }

    #[test]
    fn an_explanation_reads_like_an_answer() {
        let explained =
            json!({"allowed": false, "mode": "refuse", "rule": null, "reason": "no rule allows it", "secrets": []});
        assert_eq!(explain(&explained), "verdict   deny\nwhy       no rule allows it\n");
    }
}
