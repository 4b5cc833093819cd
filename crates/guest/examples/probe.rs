//! Talks to an agent behind a unix socket (QEMU's link chardev) and measures it.
//!
//! `probe SOCKET run COMMAND...` | `probe SOCKET bench [ROUNDS]` |
//! `probe SOCKET write PATH TEXT [atomic]` | `probe SOCKET read PATH` | `probe SOCKET repeat ROUNDS PROGRAM...` | `probe SOCKET identity`

use std::{
    error::Error,
    time::{Duration, Instant},
};

use futures::StreamExt;
use stockade_engine::{
    GuestClient,
    guest::{ReadFile, WriteFile},
};
use stockade_wire::{
    event::Event,
    machine::Identity,
    process::{Command, StartRequest},
};
use tokio::net::UnixStream;

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().ok_or("which socket?")?;
    let verb = arguments.next().ok_or("run, bench or identity?")?;
    let rest: Vec<String> = arguments.collect();
    let begun = Instant::now();
    let client = GuestClient::open(UnixStream::connect(&socket).await?, Duration::from_secs(60)).await?;
    eprintln!("session after {:?}", begun.elapsed());
    match verb.as_str() {
        "run" => run(&client, rest).await,
        "bench" => bench(&client, rest.first().and_then(|rounds| rounds.parse().ok()).unwrap_or(50)).await,
        "write" => write_text(&client, rest).await,
        "read" => read_text(&client, rest).await,
        "repeat" => repeat(&client, rest).await,
        "identity" => identity(&client).await,
        other => Err(format!("no {other}").into()),
    }
}

fn request(command: Command) -> StartRequest {
    StartRequest {
        user: std::env::var("PROBE_USER").ok(),
        timeout_ms: std::env::var("PROBE_TIMEOUT_MS").ok().and_then(|text| text.parse().ok()),
        ..StartRequest::new(command)
    }
}

async fn run(client: &GuestClient, words: Vec<String>) -> Outcome<()> {
    use std::io::Write;
    let command = match words.as_slice() {
        [text] => Command::Shell(text.clone()),
        _ => Command::Argv(words),
    };
    let mut events = client.start(&request(command)).await?;
    while let Some(event) = events.events.next().await {
        match event? {
            Event::Stdout(bytes) => std::io::stdout().write_all(&bytes)?,
            Event::Stderr(bytes) => std::io::stderr().write_all(&bytes)?,
            other => eprintln!("{other:?}"),
        }
    }
    Ok(())
}

async fn exec(client: &GuestClient, command: Command) -> Outcome<u64> {
    let mut events = client.start(&request(command)).await?;
    let mut read = 0;
    while let Some(event) = events.events.next().await {
        if let Event::Stdout(bytes) = event? {
            read += bytes.len() as u64;
        }
    }
    Ok(read)
}

fn argv(words: &str) -> Command {
    Command::Argv(words.split(' ').map(str::to_owned).collect())
}

/// Runs a program again and again: `repeat ROUNDS PROGRAM ARGUMENTS...`.
async fn repeat(client: &GuestClient, words: Vec<String>) -> Outcome<()> {
    let (rounds, words) = words.split_first().ok_or("how often?")?;
    let mut times = Vec::new();
    for _ in 0..rounds.parse()? {
        let begun = Instant::now();
        exec(client, Command::Argv(words.to_vec())).await?;
        times.push(begun.elapsed());
    }
    report(&words.join(" "), times);
    Ok(())
}

async fn bench(client: &GuestClient, rounds: usize) -> Outcome<()> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        client.health().await?;
        times.push(begun.elapsed());
    }
    report("health", times);
    for (name, command) in [
        ("exec /bin/true", argv("/bin/true")),
        ("exec echo ok", argv("echo ok")),
        ("exec dash -c :", argv("/bin/sh -c :")),
        ("exec bash -l -c :", Command::Shell(":".to_owned())),
    ] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            let begun = Instant::now();
            exec(client, command.clone()).await?;
            times.push(begun.elapsed());
        }
        report(name, times);
    }
    let mut times = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        set_identity(client).await?;
        times.push(begun.elapsed());
    }
    report("identity", times);
    let mut times = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        write(client, "/tmp/small", 100).await?;
        times.push(begun.elapsed());
    }
    report("write 100 bytes", times);
    let size = 64 << 20;
    let begun = Instant::now();
    exec(client, argv("head -c 67108864 /dev/zero")).await?;
    rate("exec output", size, begun);
    let begun = Instant::now();
    write(client, "/tmp/big", size).await?;
    rate("upload", size, begun);
    let begun = Instant::now();
    let request = ReadFile { path: "/tmp/big".to_owned(), ..ReadFile::default() };
    let mut file = client.read_file(&request).await?;
    while let Some(piece) = file.body.next().await {
        piece?;
    }
    rate("download", size, begun);
    println!("{:?}", client.stats().await?);
    Ok(())
}

async fn write(client: &GuestClient, path: &str, size: usize) -> Outcome<()> {
    let piece = bytes::Bytes::from(vec![b'x'; size.min(64 << 10)]);
    let pieces = vec![piece; size.div_ceil(64 << 10)];
    let request = WriteFile { path: path.to_owned(), ..WriteFile::default() };
    client.write_file(&request, Box::pin(futures::stream::iter(pieces.into_iter().map(Ok)))).await?;
    Ok(())
}

async fn write_text(client: &GuestClient, words: Vec<String>) -> Outcome<()> {
    let [path, text, ..] = words.as_slice() else { return Err("write PATH TEXT".into()) };
    let request = WriteFile {
        path: path.clone(),
        user: std::env::var("PROBE_USER").ok(),
        atomic: words.len() > 2,
        ..WriteFile::default()
    };
    let text = bytes::Bytes::from(text.clone());
    println!("{:?}", client.write_file(&request, Box::pin(futures::stream::iter([Ok(text)]))).await?);
    Ok(())
}

async fn read_text(client: &GuestClient, words: Vec<String>) -> Outcome<()> {
    let path = words.into_iter().next().ok_or("read PATH")?;
    let request = ReadFile { path, user: std::env::var("PROBE_USER").ok(), ..ReadFile::default() };
    let mut file = client.read_file(&request).await?;
    while let Some(piece) = file.body.next().await {
        print!("{}", String::from_utf8_lossy(&piece?));
    }
    Ok(())
}

fn report(name: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    println!("{name:20} p50 {:?} p95 {:?} max {:?}", at(50), at(95), at(100));
}

fn rate(name: &str, size: usize, begun: Instant) {
    println!("{name:20} {:.1} MB/s", size as f64 / 1e6 / begun.elapsed().as_secs_f64());
}

async fn set_identity(client: &GuestClient) -> Outcome<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let identity = Identity {
        machine_id: "0123456789abcdef0123456789abcdef".to_owned(),
        sandbox_id: "sbx_probe".to_owned(),
        template_id: "tpl_probe".to_owned(),
        hostname: "probe".to_owned(),
        unix_time_ns: now.as_nanos() as u64,
        entropy: "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned(),
        env: [("E2B_SANDBOX".to_owned(), "true".to_owned())].into(),
        default_user: std::env::var("PROBE_USER").unwrap_or_else(|_| "root".to_owned()),
        default_cwd: None,
        files: [("/run/e2b/.E2B_SANDBOX".to_owned(), "true".to_owned())].into(),
        network: None,
    };
    client.set_identity(&identity).await?;
    Ok(())
}

async fn identity(client: &GuestClient) -> Outcome<()> {
    set_identity(client).await?;
    println!("{:?}", client.health().await?);
    Ok(())
}
