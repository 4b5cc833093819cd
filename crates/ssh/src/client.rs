//! One client: who it is and what it asks for. Nothing here waits for a guest: whoever answers a channel does that
//! in a task of its own, so that one slow channel holds up no other.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use russh::{
    Channel, ChannelId, ChannelOpenFailure, ChannelWriteHalf, Disconnect, Pty, Sig,
    keys::HashAlg,
    server::{Auth, ChannelOpenHandle, Handler, Msg, PublicKeyOffer, Session, VerifiedPublicKey},
};
use stockade_model::SandboxId;
use stockade_wire::process::PtySize;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::{
    forward,
    intake::{Intake, Piece},
    process::{self, Program},
    server::{Entry, Shared},
};

/// Keys a client may show before it signs with one; agents hold a few.
const MOST_OFFERS: u32 = 30;
const MOST_CHANNELS: usize = 128;
const MOST_VARIABLES: usize = 128;
const MOST_VARIABLE_BYTES: usize = 64 << 10;
/// Sizes and signals on their way to a process; those that come faster are dropped.
const CONTROLS: usize = 64;
const PROHIBITED: u32 = 1;
const NO_ROOM: u32 = 4;

/// What comes in on a channel. Without an end: the client has gone.
pub(crate) enum Input {
    Data(Piece),
    End,
}

pub(crate) type Inputs = mpsc::UnboundedReceiver<Input>;

/// What a client wants of a process that runs.
#[derive(Debug)]
pub(crate) enum Control {
    Resize(PtySize),
    Signal(i32),
}

/// What a program is to be started with.
#[derive(Default)]
pub(crate) struct Setup {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) pty: Option<PtySize>,
}

/// The way out of a channel.
pub(crate) type Out = ChannelWriteHalf<Msg>;

struct Open {
    inputs: mpsc::UnboundedSender<Input>,
    stage: Stage,
}

enum Stage {
    /// Nothing runs yet.
    Asking(Box<Asking>),
    /// The process ends as the client wishes when this is dropped.
    Process(mpsc::Sender<Control>),
    Forward,
}

struct Asking {
    out: Out,
    inputs: Inputs,
    setup: Setup,
}

pub(crate) struct Client {
    shared: Arc<Shared>,
    intake: Arc<Intake>,
    entry: Arc<Entry>,
    offers: u32,
    sandbox: Option<SandboxId>,
    /// Its place among those of the sandbox.
    _place: Option<OwnedSemaphorePermit>,
    channels: HashMap<ChannelId, Open>,
}

impl Client {
    pub(crate) fn new(shared: Arc<Shared>, intake: Arc<Intake>, entry: Arc<Entry>) -> Self {
        Self { shared, intake, entry, offers: 0, sandbox: None, _place: None, channels: HashMap::new() }
    }

    /// Whether a key opens what the client wants in to.
    async fn opens(&self, user: &str, fingerprint: &str) -> Option<SandboxId> {
        let id: SandboxId = user.parse().ok()?;
        match self.shared.service.opens_by_ssh(&id, fingerprint).await {
            Ok(true) => Some(id),
            Ok(false) => None,
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "an SSH key cannot be looked up");
                None
            }
        }
    }

    /// A place for one more channel; `None`: there are too many.
    fn admit(&mut self, channel: Channel<Msg>) -> Option<(ChannelId, Asking)> {
        // Those whose task has ended, with a client that has not closed them.
        self.channels.retain(|_, open| !open.inputs.is_closed());
        if self.channels.len() >= MOST_CHANNELS {
            return None;
        }
        let id = channel.id();
        let (sender, inputs) = mpsc::unbounded_channel();
        self.channels.insert(id, Open { inputs: sender, stage: Stage::Forward });
        // What the other half would hear comes to our methods as well.
        let (_, out) = channel.split();
        Some((id, Asking { out, inputs, setup: Setup::default() }))
    }

    fn asking(&mut self, channel: ChannelId) -> Option<&mut Asking> {
        match self.channels.get_mut(&channel).map(|open| &mut open.stage) {
            Some(Stage::Asking(asking)) => Some(asking),
            _ => None,
        }
    }

    /// Starts what a session channel is for; it can be said once.
    fn start(&mut self, channel: ChannelId, program: Option<Program>, session: &mut Session) -> Result<(), Error> {
        let (Some(program), Some(sandbox)) = (program, self.sandbox.clone()) else {
            return session.channel_failure(channel);
        };
        let Some(open) = self.channels.get_mut(&channel).filter(|open| matches!(open.stage, Stage::Asking(_))) else {
            return session.channel_failure(channel);
        };
        let (controls, control) = mpsc::channel(CONTROLS);
        let Stage::Asking(asking) = std::mem::replace(&mut open.stage, Stage::Process(controls)) else {
            return session.channel_failure(channel);
        };
        session.channel_success(channel)?;
        let Asking { out, inputs, setup } = *asking;
        let (service, handle) = (self.shared.service.clone(), session.handle());
        self.shared.spawn(async move {
            process::run(&service, &sandbox, program, setup, process::Wire { out, handle, inputs, control }).await;
        });
        Ok(())
    }

    /// Joins a channel with something in the guest.
    async fn forward(
        &mut self,
        channel: Channel<Msg>,
        target: Result<forward::Target, String>,
        reply: ChannelOpenHandle,
    ) {
        let refuse = |code, reason: String| ChannelOpenFailure::Other { code, reason };
        let target = match target {
            Ok(target) => target,
            Err(problem) => return reply.reject(refuse(PROHIBITED, problem)).await,
        };
        let Some(sandbox) = self.sandbox.clone() else { return };
        let Some((_, asking)) = self.admit(channel) else {
            return reply.reject(refuse(NO_ROOM, format!("more than {MOST_CHANNELS} channels"))).await;
        };
        let service = self.shared.service.clone();
        self.shared.spawn(async move {
            forward::run(&service, &sandbox, target, reply, asking.out, asking.inputs).await;
        });
    }

    fn control(&self, channel: ChannelId, control: Control) {
        if let Some(Open { stage: Stage::Process(controls), .. }) = self.channels.get(&channel) {
            // The last size counts, and it comes again with the next change; a process that takes nothing for so long
            // hears nothing.
            let _ = controls.try_send(control);
        }
    }
}

type Error = russh::Error;

impl Handler for Client {
    type Error = Error;

    async fn auth_publickey_offered(&mut self, user: &str, offer: PublicKeyOffer<'_>) -> Result<Auth, Error> {
        self.offers += 1;
        if self.offers > MOST_OFFERS {
            return Err(Error::Disconnect);
        }
        let fingerprint = offer.public_key.fingerprint(HashAlg::Sha256).to_string();
        Ok(if self.opens(user, &fingerprint).await.is_some() { Auth::Accept } else { Auth::reject() })
    }

    async fn auth_publickey(&mut self, user: &str, key: VerifiedPublicKey<'_>) -> Result<Auth, Error> {
        let fingerprint = key.public_key.fingerprint(HashAlg::Sha256).to_string();
        self.sandbox = self.opens(user, &fingerprint).await;
        Ok(if self.sandbox.is_some() { Auth::Accept } else { Auth::reject() })
    }

    async fn auth_succeeded(&mut self, session: &mut Session) -> Result<(), Error> {
        let Some(sandbox) = &self.sandbox else { return Err(Error::Disconnect) };
        tracing::info!(%sandbox, peer = %self.entry.peer, "somebody came in over SSH");
        self.entry.is_known();
        self._place = self.shared.place_in(sandbox);
        if self._place.is_none() {
            let message = "too many SSH connections to this sandbox";
            session.disconnect(Disconnect::TooManyConnections, message, "en")?;
        }
        Ok(())
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), Error> {
        match self.admit(channel) {
            Some((id, asking)) => {
                if let Some(open) = self.channels.get_mut(&id) {
                    open.stage = Stage::Asking(Box::new(asking));
                }
                reply.accept().await;
            }
            None => reply.reject(ChannelOpenFailure::ResourceShortage).await,
        }
        Ok(())
    }

    async fn channel_open_direct_tcpip(
        &mut self,
        channel: Channel<Msg>,
        host: &str,
        port: u32,
        _: &str,
        _: u32,
        reply: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), Error> {
        self.forward(channel, forward::Target::port(host, port), reply).await;
        Ok(())
    }

    async fn channel_open_direct_streamlocal(
        &mut self,
        channel: Channel<Msg>,
        path: &str,
        reply: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), Error> {
        self.forward(channel, Ok(forward::Target::Socket(path.to_owned())), reply).await;
        Ok(())
    }

    async fn channel_close(&mut self, channel: ChannelId, _: &mut Session) -> Result<(), Error> {
        self.channels.remove(&channel);
        Ok(())
    }

    async fn channel_eof(&mut self, channel: ChannelId, _: &mut Session) -> Result<(), Error> {
        if let Some(open) = self.channels.get(&channel) {
            // Whoever no longer reads needs no end.
            let _ = open.inputs.send(Input::End);
        }
        Ok(())
    }

    async fn data(&mut self, channel: ChannelId, data: &[u8], _: &mut Session) -> Result<(), Error> {
        if let Some(open) = self.channels.get(&channel) {
            let _ = open.inputs.send(Input::Data(self.intake.piece(data)));
        }
        Ok(())
    }

    async fn pty_request(
        &mut self,
        channel: ChannelId,
        term: &str,
        cols: u32,
        rows: u32,
        _: u32,
        _: u32,
        _: &[(Pty, u32)],
        session: &mut Session,
    ) -> Result<(), Error> {
        let Some(asking) = self.asking(channel) else { return session.channel_failure(channel) };
        asking.setup.pty = Some(size(cols, rows));
        if !term.is_empty() && !term.contains('\0') && term.len() < 128 {
            asking.setup.env.insert("TERM".to_owned(), term.to_owned());
        }
        session.channel_success(channel)
    }

    async fn env_request(
        &mut self,
        channel: ChannelId,
        name: &str,
        value: &str,
        session: &mut Session,
    ) -> Result<(), Error> {
        let Some(asking) = self.asking(channel) else { return session.channel_failure(channel) };
        let env = &mut asking.setup.env;
        let held: usize = env.iter().map(|(name, value)| name.len() + value.len()).sum();
        let is_variable = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
        if !is_variable || env.len() >= MOST_VARIABLES || held + name.len() + value.len() > MOST_VARIABLE_BYTES {
            return session.channel_failure(channel);
        }
        env.insert(name.to_owned(), value.to_owned());
        session.channel_success(channel)
    }

    async fn shell_request(&mut self, channel: ChannelId, session: &mut Session) -> Result<(), Error> {
        self.start(channel, Some(Program::Shell), session)
    }

    async fn exec_request(&mut self, channel: ChannelId, data: &[u8], session: &mut Session) -> Result<(), Error> {
        let command = std::str::from_utf8(data).ok().filter(|command| !command.contains('\0'));
        self.start(channel, command.map(|command| Program::Command(command.to_owned())), session)
    }

    async fn window_change_request(
        &mut self,
        channel: ChannelId,
        cols: u32,
        rows: u32,
        _: u32,
        _: u32,
        _: &mut Session,
    ) -> Result<(), Error> {
        self.control(channel, Control::Resize(size(cols, rows)));
        Ok(())
    }

    async fn signal(&mut self, channel: ChannelId, signal: Sig, _: &mut Session) -> Result<(), Error> {
        if let Some(number) = process::number_of(&signal) {
            self.control(channel, Control::Signal(number));
        }
        Ok(())
    }

    // Said with a failure, so that a client does not go on as if it had it.
    async fn x11_request(
        &mut self,
        channel: ChannelId,
        _: bool,
        _: &str,
        _: &str,
        _: u32,
        session: &mut Session,
    ) -> Result<(), Error> {
        session.channel_failure(channel)
    }

    async fn subsystem_request(&mut self, channel: ChannelId, name: &str, session: &mut Session) -> Result<(), Error> {
        self.start(channel, (name == "sftp").then_some(Program::Sftp), session)
    }
}

/// A terminal without an extent is a terminal of some extent.
fn size(cols: u32, rows: u32) -> PtySize {
    let clamp = |number: u32, usual: u16| match number {
        0 => usual,
        number => u16::try_from(number).unwrap_or(u16::MAX),
    };
    PtySize { cols: clamp(cols, 80), rows: clamp(rows, 24) }
}
