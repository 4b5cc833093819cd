//! `stockade fork`: copies of a running sandbox, and a command in each of them.
//!
//! ```text
//! fork -> command in each copy, side by side, output line by line behind "[index] "
//!      -> score of each copy whose command succeeded -> table
//!      -> --keep-best: the best takes the sandbox's place, then the others end;  --rm: all end
//! ```
//!
//! Ctrl-C ends every copy and leaves the sandbox as it was.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::{Bytes, BytesMut};
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::time;

use super::{
    Context,
    attend::{Attended, Output, OutputLost, Signals, Stream, code_of_signal},
};
use stockade_model::quoted;

use crate::{
    args::Fork,
    client::{Client, ExecEvent, ExecRequest, Sandbox},
    failure::{FAILED, Failure, OWN_FAILURE},
    ui::table,
};

/// A longer line is shown in pieces.
const LONGEST_LINE: usize = 64 << 10;
/// Of what a scoring command prints the end is looked at.
const SCORE_BYTES: usize = 4 << 10;
/// How long the end of the copies may take before we leave them to their deadlines.
const KILL_TIMEOUT: Duration = Duration::from_secs(60);

/// A copy and what came of its command.
struct Copy {
    index: usize,
    sandbox: String,
    exit: u8,
    elapsed: Duration,
    score: Option<f64>,
    /// Why there is no exit code of the command, or no score.
    problem: Option<Failure>,
}

/// Forks, and runs what is to be run; the exit code.
pub(super) async fn fork(context: &Context, args: Fork) -> Result<u8, Failure> {
    let request = request(&args)?;
    let body = json!({"count": args.count, "lifetime_seconds": args.lifetime, "all_or_nothing": true});
    let Some(request) = request else {
        let children = context.client.fork(&args.sandbox, &body).await?;
        let ids = || children.iter().map(|child| format!("{}\n", child.id)).collect();
        return context.ui.data(&json!({"items": children}), ids).map(|()| 0);
    };
    // From here on a Ctrl-C waits until it is known what there is to end.
    let mut signals = Signals::listen()?;
    let children = context.client.fork(&args.sandbox, &body).await?;
    let output = Output::start(context.ui.json);
    let work = async {
        let mut copies = run_all(&context.client, &children, &request, &output).await;
        if let Some(line) = &args.score {
            score_all(&context.client, &mut copies, line, &request).await;
        }
        copies
    };
    let left = tokio::select! {
        copies = work => Ok(copies),
        number = signals.next() => Err(Some(code_of_signal(number))),
        () = output.closed() => Err(None),
    };
    match left {
        Ok(copies) => conclude(context, &args, copies, output).await,
        Err(code) => {
            end(context, children.iter().map(|child| child.id.as_str())).await;
            match code {
                Some(code) => Ok(code),
                None => output.finish().await.map_or_else(OutputLost::exit_code, |()| Ok(FAILED)),
            }
        }
    }
}

/// The command as a request; `None`: there is none.
fn request(args: &Fork) -> Result<Option<ExecRequest>, Failure> {
    let mut argv = Vec::with_capacity(args.command.len());
    for argument in &args.command {
        let text = argument
            .to_str()
            .ok_or_else(|| Failure::new("invalid_argument", format!("the argument {argument:?} is not UTF-8")))?;
        argv.push(text.to_owned());
    }
    let request = ExecRequest {
        argv,
        user: args.user.clone(),
        cwd: args.cwd.clone(),
        env: BTreeMap::new(),
        stdin: false,
        pty: None,
        timeout_seconds: args.timeout,
    };
    Ok((!request.argv.is_empty()).then_some(request))
}

async fn run_all(client: &Client, children: &[Sandbox], request: &ExecRequest, output: &Output) -> Vec<Copy> {
    let runs = children.iter().enumerate().map(async |(index, child)| {
        output.tell(json!({"type": "started", "index": index, "sandbox": child.id})).await;
        let begin = Instant::now();
        let mut printer = Printer::new(index, output);
        let ended = run(client, &child.id, request, async |stream, data| printer.put(stream, data).await).await;
        printer.finish().await;
        let elapsed = begin.elapsed();
        let (exit, problem) = match ended {
            Ok(exit) => (exit, None),
            Err(failure) => (failure.clone().of_exec().exit, Some(failure)),
        };
        output.tell(json!({"type": "exit", "index": index, "code": exit})).await;
        Copy { index, sandbox: child.id.clone(), exit, elapsed, score: None, problem }
    });
    join_all(runs).await
}

/// Runs a command to its end, handing on what it writes; its exit code.
async fn run(
    client: &Client,
    sandbox: &str,
    request: &ExecRequest,
    mut print: impl AsyncFnMut(Stream, Bytes),
) -> Result<u8, Failure> {
    let mut session = client.exec(sandbox, request).await?;
    loop {
        match session.next().await? {
            ExecEvent::Started { .. } => {}
            ExecEvent::Stdout(data) => print(Stream::Out, data).await,
            ExecEvent::Stderr(data) => print(Stream::Err, data).await,
            ExecEvent::Missed { bytes } => {
                let note = format!("warning: {bytes} bytes of output were lost: the reader was too slow\n");
                print(Stream::Err, Bytes::from(note)).await;
            }
            ExecEvent::Exit(exit) => return Ok(Attended::Exited(exit).exit_code()),
        }
    }
}

async fn score_all(client: &Client, copies: &mut [Copy], line: &str, request: &ExecRequest) {
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let request = ExecRequest { argv, ..request.clone() };
    let succeeded = copies.iter_mut().filter(|copy| copy.exit == 0);
    join_all(succeeded.map(async |copy| match score(client, &copy.sandbox, &request).await {
        Ok(score) => copy.score = Some(score),
        Err(failure) => copy.problem = Some(failure),
    }))
    .await;
}

async fn score(client: &Client, sandbox: &str, request: &ExecRequest) -> Result<f64, Failure> {
    let mut printed = BytesMut::new();
    let exit = run(client, sandbox, request, async |stream, data: Bytes| {
        if stream == Stream::Out {
            printed.extend_from_slice(&data);
            let excess = printed.len().saturating_sub(SCORE_BYTES);
            drop(printed.split_to(excess));
        }
    })
    .await?;
    if exit != 0 {
        return Err(Failure::new("score_failed", format!("the scoring command ended with {exit}")));
    }
    let text = String::from_utf8_lossy(&printed);
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
    let number = last.parse().ok().filter(|score: &f64| score.is_finite());
    number.ok_or_else(|| {
        Failure::new("score_failed", format!("the scoring command's last line is {}, not a number", quoted(last)))
    })
}

/// Which copy is the best: of those whose command succeeded, and that have a score if one is asked for.
fn best(copies: &[Copy], args: &Fork) -> Option<usize> {
    let mut candidates = copies.iter().filter(|copy| copy.exit == 0);
    if args.score.is_none() {
        return candidates.next().map(|copy| copy.index);
    }
    let sign = if args.lowest { -1.0 } else { 1.0 };
    let scored = candidates.filter_map(|copy| Some((copy.index, copy.score? * sign)));
    // Of equals the first.
    let better = |one: (usize, f64), other: (usize, f64)| if other.1 > one.1 { other } else { one };
    scored.reduce(better).map(|(index, _)| index)
}

/// Keeps the best or ends all, as asked for, and tells what there is then.
async fn conclude(context: &Context, args: &Fork, copies: Vec<Copy>, output: Output) -> Result<u8, Failure> {
    let kept = if args.keep_best { best(&copies, args) } else { None };
    if let Some(index) = kept {
        // The others end only once this has worked: until then the best is not safe.
        context.client.change(&copies[index].sandbox, "promote", &json!({})).await?;
    }
    let is_over = args.keep_best || args.rm;
    if is_over {
        let others = copies.iter().filter(|copy| Some(copy.index) != kept);
        end(context, others.map(|copy| copy.sandbox.as_str())).await;
    }
    let items: Vec<_> = copies.iter().map(|copy| item(copy, kept)).collect();
    let result = json!({"type": "result", "sandbox": args.sandbox, "kept": kept, "items": items});
    output.tell(result).await;
    if let Err(lost) = output.finish().await {
        return lost.exit_code();
    }
    for copy in &copies {
        if let Some(problem) = &copy.problem {
            context.ui.note(&format!("[{}] error: {problem}", copy.index));
        }
    }
    if !context.ui.json {
        context.ui.data(&(), || {
            let rows: Vec<_> = copies.iter().map(|copy| row(copy, kept, is_over)).collect();
            table(&["INDEX", "SANDBOX", "EXIT", "SECONDS", "SCORE", "STATE"], &rows)
        })?;
    }
    if args.keep_best {
        return match kept {
            Some(_) => Ok(0),
            None => {
                context.ui.note("error: no copy is worth keeping; the sandbox is as it was");
                Ok(FAILED)
            }
        };
    }
    Ok(if copies.iter().all(|copy| copy.exit == 0) { 0 } else { FAILED })
}

fn item(copy: &Copy, kept: Option<usize>) -> Value {
    let problem = copy.problem.as_ref().map(|problem| json!({"code": problem.code, "message": problem.message}));
    json!({"index": copy.index, "sandbox": copy.sandbox, "exit": copy.exit, "seconds": copy.elapsed.as_secs_f64(),
        "score": copy.score, "kept": kept == Some(copy.index), "error": problem})
}

fn row(copy: &Copy, kept: Option<usize>, is_over: bool) -> Vec<String> {
    let state = match kept {
        Some(index) if index == copy.index => "kept",
        _ if is_over => "ended",
        _ => "running",
    };
    let exit = if copy.exit == OWN_FAILURE && copy.problem.is_some() { "-".to_owned() } else { copy.exit.to_string() };
    vec![
        copy.index.to_string(),
        copy.sandbox.clone(),
        exit,
        format!("{:.1}", copy.elapsed.as_secs_f64()),
        copy.score.map_or_else(|| "-".to_owned(), |score| score.to_string()),
        state.to_owned(),
    ]
}

/// Ends sandboxes; says so where that fails, since they cost something until their deadlines.
async fn end<'a>(context: &Context, ids: impl Iterator<Item = &'a str>) {
    let kills = join_all(ids.map(async |id| match context.client.kill(id).await {
        Ok(()) => {}
        Err(failure) if ["sandbox_not_found", "sandbox_ended"].contains(&failure.code.as_str()) => {}
        Err(failure) => context.ui.note(&format!("warning: sandbox {id} is left to its deadline: {failure}")),
    }));
    if time::timeout(KILL_TIMEOUT, kills).await.is_err() {
        context.ui.note("warning: copies that have not ended yet are left to their deadlines");
    }
}

/// Prints one copy's output line by line, so that the copies' lines do not tear each other apart.
struct Printer<'a> {
    index: usize,
    output: &'a Output,
    out: BytesMut,
    err: BytesMut,
}

impl<'a> Printer<'a> {
    fn new(index: usize, output: &'a Output) -> Self {
        Self { index, output, out: BytesMut::new(), err: BytesMut::new() }
    }

    async fn put(&mut self, stream: Stream, data: Bytes) {
        let name = if stream == Stream::Out { "stdout" } else { "stderr" };
        let event = || json!({"type": name, "index": self.index, "data": BASE64_STANDARD.encode(&data)});
        self.output.tell_with(event).await;
        let rest = if stream == Stream::Out { &mut self.out } else { &mut self.err };
        rest.extend_from_slice(&data);
        let lines = whole_lines(rest, self.index);
        self.output.print(stream, lines).await;
    }

    /// What has no end of line yet.
    async fn finish(&mut self) {
        for (stream, rest) in [(Stream::Out, &mut self.out), (Stream::Err, &mut self.err)] {
            if !rest.is_empty() {
                rest.extend_from_slice(b"\n");
                self.output.print(stream, whole_lines(rest, self.index)).await;
            }
        }
    }
}

/// Takes the whole lines out of a buffer, each behind its copy's index.
fn whole_lines(rest: &mut BytesMut, index: usize) -> Bytes {
    let mut lines = BytesMut::new();
    loop {
        let end = match rest.iter().position(|byte| *byte == b'\n') {
            Some(end) if end < LONGEST_LINE => end + 1,
            _ if rest.len() >= LONGEST_LINE => LONGEST_LINE,
            _ => return lines.freeze(),
        };
        lines.extend_from_slice(format!("[{index}] ").as_bytes());
        let line = rest.split_to(end);
        lines.extend_from_slice(&line);
        if !line.ends_with(b"\n") {
            lines.extend_from_slice(b"\n");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_prefixed_and_bounded() {
        let mut rest = BytesMut::from(&b"one\ntwo"[..]);
        assert_eq!(whole_lines(&mut rest, 3), "[3] one\n");
        rest.extend_from_slice(b"!\n\n");
        assert_eq!(whole_lines(&mut rest, 3), "[3] two!\n[3] \n");
        rest.extend_from_slice(&vec![b'x'; LONGEST_LINE + 1]);
        assert_eq!(whole_lines(&mut rest, 0).len(), LONGEST_LINE + 5);
        assert_eq!(rest, "x");
    }
}
