//! `stockade code run | contexts`.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};

use super::Context;
use crate::{
    args,
    client::{CodeEvent, CodeRequest},
    failure::{FAILED, Failure},
    ui::table,
};

const TIMED_OUT: u8 = 124;

pub(super) async fn code(context: &Context, args: args::Code) -> Result<u8, Failure> {
    match args {
        args::Code::Run(args) => run(context, args).await,
        args::Code::Contexts(args) => contexts(context, &args.sandbox).await.map(|()| 0),
    }
}

async fn contexts(context: &Context, sandbox: &str) -> Result<(), Failure> {
    let contexts = context.client.code_contexts(sandbox).await?;
    context.ui.data(&json!({"items": contexts}), || {
        let row = |context: &crate::client::CodeContext| {
            vec![context.id.clone(), context.language.clone(), context.cwd.clone()]
        };
        table(&["ID", "LANGUAGE", "DIRECTORY"], &contexts.iter().map(row).collect::<Vec<_>>())
    })
}

/// Output goes where the code sent it, results to standard output; exit code 1 if the code failed.
async fn run(context: &Context, args: args::CodeRun) -> Result<u8, Failure> {
    let code = match args.code {
        Some(code) => code,
        None => {
            let mut code = String::new();
            io::stdin().read_to_string(&mut code).map_err(|error| Failure::host("read standard input", error))?;
            code
        }
    };
    let request = CodeRequest {
        code,
        language: args.language,
        context: args.context,
        env: args.env.into_iter().collect(),
        timeout_seconds: args.timeout,
    };
    let mut files = args.save.map(Files::new).transpose()?;
    let mut run = context.client.run_code(&args.sandbox, &request).await?;
    let mut exit = 0;
    loop {
        let (event, line) = run.next().await?;
        if context.ui.json {
            write(&mut io::stdout().lock(), &line)?;
        }
        match event {
            CodeEvent::Stdout { text } if !context.ui.json => write(&mut io::stdout().lock(), &text)?,
            CodeEvent::Stderr { text } if !context.ui.json => write(&mut io::stderr().lock(), &text)?,
            CodeEvent::Result { is_main, data } => {
                let text = data.get("text/plain").and_then(Value::as_str);
                // R shows its values beside the main result. Of a picture the text says nothing.
                let is_text = is_main || data.keys().all(|kind| kind.starts_with("text/"));
                if let (Some(text), true, false) = (text, is_text, context.ui.json) {
                    write(&mut io::stdout().lock(), &format!("{text}\n"))?;
                }
                if let Some(files) = &mut files {
                    files.keep(context, &data)?;
                }
            }
            CodeEvent::Error { name, value, traceback } => {
                exit = if name == "Timeout" { TIMED_OUT } else { FAILED };
                if !context.ui.json {
                    let text = if traceback.is_empty() { format!("{name}: {value}") } else { traceback };
                    write(&mut io::stderr().lock(), &format!("{text}\n"))?;
                }
                // The stream of code whose time is up has no other end.
                if exit == TIMED_OUT {
                    return Ok(exit);
                }
            }
            CodeEvent::End => return Ok(exit),
            CodeEvent::Stdout { .. } | CodeEvent::Stderr { .. } | CodeEvent::Other => {}
        }
    }
}

fn write(out: &mut impl io::Write, text: &str) -> Result<(), Failure> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::host("write", error)),
        _ => Ok(()),
    }
}

/// Results that are no text, each in a file of its own.
struct Files {
    directory: PathBuf,
    count: usize,
}

impl Files {
    fn new(directory: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&directory)
            .map_err(|error| Failure::host(format!("create {}", directory.display()), error))?;
        Ok(Self { directory, count: 0 })
    }

    fn keep(&mut self, context: &Context, data: &BTreeMap<String, Value>) -> Result<(), Failure> {
        self.count += 1;
        for (mime, value) in data {
            let Some((ending, is_binary)) = ending(mime) else { continue };
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let bytes = if is_binary { BASE64.decode(text.trim()).unwrap_or_default() } else { text.into_bytes() };
            let path: &Path = &self.directory.join(format!("result-{}.{ending}", self.count));
            fs::write(path, bytes).map_err(|error| Failure::host(format!("write {}", path.display()), error))?;
            context.ui.note(&format!("wrote {}", path.display()));
        }
        Ok(())
    }
}

/// A file's ending for a MIME type, and whether its content travels as base64.
fn ending(mime: &str) -> Option<(&'static str, bool)> {
    Some(match mime {
        "image/png" => ("png", true),
        "image/jpeg" => ("jpeg", true),
        "application/pdf" => ("pdf", true),
        "image/svg+xml" => ("svg", false),
        "text/html" => ("html", false),
        "text/markdown" => ("md", false),
        "text/latex" => ("tex", false),
        "application/json" => ("json", false),
        _ => return None,
    })
}
