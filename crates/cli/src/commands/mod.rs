//! The commands, one file a verb.

use std::io;

use tokio::runtime::{Builder, Runtime};

use crate::{
    args::{Arguments, Command, Common},
    bench::bench,
    client::Client,
    doctor::doctor,
    failure::Failure,
    server::up,
    ui::Ui,
};

mod attend;
mod code;
mod cp;
pub(crate) mod env;
mod exec;
mod fork;
mod lifecycle;
mod network;
mod processes;
mod run;
mod sandboxes;
mod snapshots;
mod ssh;
mod template;
mod tunnel;
mod usage;
mod version;

/// What a command works with.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) ui: Ui,
}

/// A runtime of the size the command needs: clients are done before more threads have started.
pub(crate) fn runtime(command: &Command) -> io::Result<Runtime> {
    match command {
        Command::Up(_) | Command::Bench(_) => Builder::new_multi_thread().enable_all().build(),
        _ => Builder::new_current_thread().enable_all().build(),
    }
}

/// Runs the command; its exit code.
pub(crate) async fn dispatch(arguments: Arguments, ui: Ui) -> Result<u8, Failure> {
    let Arguments { common, command } = arguments;
    let context = |common: &Common| Client::find(common).map(|client| Context { client, ui });
    match command {
        Command::Run(args) => {
            let context = context(&common).map_err(Failure::of_exec)?;
            return run::run(&context, args).await.map_err(Failure::of_exec);
        }
        Command::Exec(args) => {
            let context = context(&common).map_err(Failure::of_exec)?;
            return exec::exec(&context, args).await.map_err(Failure::of_exec);
        }
        Command::Shell(args) => {
            let context = context(&common).map_err(Failure::of_exec)?;
            return exec::shell(&context, args).await.map_err(Failure::of_exec);
        }
        Command::Attach(args) => {
            let context = context(&common).map_err(Failure::of_exec)?;
            return processes::attach(&context, args).await.map_err(Failure::of_exec);
        }
        Command::Ps(args) => processes::ps(&context(&common)?, args).await,
        Command::Code(args) => return code::code(&context(&common)?, args).await,
        Command::Kill(args) => return sandboxes::kill(&context(&common)?, args).await,
        Command::Create(args) => sandboxes::create(&context(&common)?, args).await,
        Command::Ls(args) => sandboxes::ls(&context(&common)?, args).await,
        Command::Info(args) => sandboxes::info(&context(&common)?, args).await,
        Command::Logs(args) => sandboxes::logs(&context(&common)?, args).await,
        Command::Extend(args) => sandboxes::extend(&context(&common)?, args).await,
        Command::Pause(args) => lifecycle::pause(&context(&common)?, args).await,
        Command::Resume(args) => lifecycle::resume(&context(&common)?, args).await,
        Command::Snapshot(args) => return snapshots::snapshot(&context(&common)?, args).await,
        Command::Fork(args) => return fork::fork(&context(&common)?, args).await,
        Command::Stop(args) => lifecycle::stop(&context(&common)?, args).await,
        Command::Start(args) => lifecycle::start(&context(&common)?, args).await,
        Command::Set(args) => lifecycle::set(&context(&common)?, args).await,
        Command::Rollback(args) => lifecycle::rollback(&context(&common)?, args).await,
        Command::Promote(args) => lifecycle::promote(&context(&common)?, args).await,
        Command::Usage(args) => usage::usage(&context(&common)?, args).await,
        Command::Cp(args) => cp::cp(&context(&common)?, args).await,
        Command::Preview(args) => tunnel::preview(&context(&common)?, args).await,
        Command::Tunnel(args) => tunnel::tunnel(&context(&common)?, args).await,
        Command::Ssh(args) => return ssh::ssh(&context(&common)?, args).await,
        Command::SshKey(args) => ssh::ssh_key(&context(&common)?, args).await,
        Command::Policy(args) => network::policy(&context(&common)?, args).await,
        Command::Secret(args) => network::secret(&context(&common)?, args).await,
        Command::Audit(args) => network::audit(&context(&common)?, args).await,
        Command::Template(args) => return template::template(&context(&common)?, args).await,
        Command::Version => version::version(&common, ui).await,
        Command::Env(args) => env::env(&common, ui, args),
        Command::Doctor(args) => return doctor(&common, args, ui).await,
        Command::Bench(args) => return bench(&common, args, ui).await,
        Command::Up(args) => up(&common, args, ui).await,
    }?;
    Ok(0)
}
