//! Input and signals for processes that run.

use axum::response::Response;
use futures::stream;
use serde::Deserialize;
use stockade_engine::{EngineError, guest::Selector};
use stockade_wire::{ErrorCode, process};

use super::{
    super::{
        super::connect::{self, ClientStream, Code, ConnectError, Reply, Unary},
        Caller,
    },
    Done, ProcessRequest, ProcessSelector, find, invalid, no_such_process, process_error, select,
};

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ProcessInput {
    Stdin(String),
    Pty(String),
}

impl ProcessInput {
    fn bytes(self) -> Result<bytes::Bytes, ConnectError> {
        let (Self::Stdin(text) | Self::Pty(text)) = self;
        decode_base64(&text).map(Into::into).ok_or_else(|| invalid("input is not valid base64"))
    }
}

/// Both alphabets, with or without padding: all are legal in proto3 JSON.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    use base64::{
        Engine as _,
        alphabet::{STANDARD, URL_SAFE},
        engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
    };
    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let plain = GeneralPurpose::new(&STANDARD, LENIENT).decode(text);
    plain.or_else(|_| GeneralPurpose::new(&URL_SAFE, LENIENT).decode(text)).ok()
}

#[derive(Deserialize)]
pub(in super::super) struct SendInputRequest {
    process: Option<ProcessSelector>,
    input: Option<ProcessInput>,
}

pub(in super::super) async fn send_input(call: Unary<SendInputRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    let input = call.message.input.ok_or_else(|| invalid("input is missing"))?.bytes()?;
    write(&call.caller, &selector, input, false).await?;
    Ok(Reply(Done {}))
}

async fn write(caller: &Caller, selector: &Selector, input: bytes::Bytes, close: bool) -> Result<(), ConnectError> {
    let body = Box::pin(stream::once(std::future::ready(Ok(input))));
    match caller.guest.write_stdin(selector, body, close).await {
        Ok(()) => Ok(()),
        Err(error) => Err(input_error(caller, selector, error).await),
    }
}

/// E2B's server forgets a process with its end, and its clients expect to be told so. The agent remembers it for a
/// while, and says that its input is closed.
async fn input_error(caller: &Caller, selector: &Selector, error: EngineError) -> ConnectError {
    let is_closed = matches!(&error, EngineError::Guest(body) if body.code == ErrorCode::StdinClosed);
    match find(caller, selector).await {
        Ok(found) if is_closed && found.as_ref().is_none_or(|process| process.exit.is_some()) => {
            no_such_process(selector)
        }
        _ => process_error(error, selector),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum StreamInputEvent {
    Start(ProcessRequest),
    Data { input: Option<ProcessInput> },
    Keepalive {},
}

pub(in super::super) async fn stream_input(call: ClientStream) -> Response {
    connect::client_stream_response(take_input(call).await)
}

async fn take_input(call: ClientStream) -> Result<Done, ConnectError> {
    let (caller, mut messages) = call.split::<StreamInputEvent>();
    let Some(StreamInputEvent::Start(start)) = messages.next().await? else {
        return Err(invalid("the first message of an input stream must be start"));
    };
    let selector = select(start.process)?;
    // A write per message, so that each is in the process's pipe before the next is asked for.
    while let Some(message) = messages.next().await? {
        match message {
            StreamInputEvent::Data { input: Some(input) } => write(&caller, &selector, input.bytes()?, false).await?,
            StreamInputEvent::Data { input: None } | StreamInputEvent::Keepalive {} => {}
            StreamInputEvent::Start(_) => return Err(invalid("an input stream has one start only")),
        }
    }
    require_process(&caller, &selector).await?;
    Ok(Done {})
}

/// An input stream without a byte still has to name a process that exists.
async fn require_process(caller: &Caller, selector: &Selector) -> Result<(), ConnectError> {
    find(caller, selector).await?.map(|_| ()).ok_or_else(|| no_such_process(selector))
}

pub(in super::super) async fn close_stdin(call: Unary<ProcessRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    if find(&call.caller, &selector).await?.is_some_and(|process| process.pty) {
        let message = "a terminal has no stdin to close; send it Ctrl-D (0x04)";
        return Err(ConnectError::new(Code::FailedPrecondition, message));
    }
    let nothing = Box::pin(stream::empty());
    match call.caller.guest.write_stdin(&selector, nothing, true).await {
        Ok(()) => Ok(Reply(Done {})),
        Err(error) => Err(input_error(&call.caller, &selector, error).await),
    }
}

#[derive(Deserialize)]
pub(in super::super) struct SendSignalRequest {
    process: Option<ProcessSelector>,
    #[serde(default)]
    signal: Signal,
}

/// An enum of proto3 JSON: by name or number.
#[derive(Default, Deserialize)]
#[serde(untagged)]
enum Signal {
    #[default]
    Unset,
    Number(i32),
    Name(String),
}

impl Signal {
    fn number(&self) -> Result<i32, ConnectError> {
        match self {
            Self::Number(9) => Ok(9),
            Self::Number(15) => Ok(15),
            Self::Name(name) if name == "SIGNAL_SIGKILL" => Ok(9),
            Self::Name(name) if name == "SIGNAL_SIGTERM" => Ok(15),
            Self::Name(name) => Err(invalid(format!("signal {name} is not one of SIGNAL_SIGTERM, SIGNAL_SIGKILL"))),
            Self::Unset | Self::Number(_) => Err(invalid("signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL")),
        }
    }
}

pub(in super::super) async fn send_signal(call: Unary<SendSignalRequest>) -> Result<Reply<Done>, ConnectError> {
    let selector = select(call.message.process)?;
    let request = process::SignalRequest { signal: call.message.signal.number()?, main_only: false };
    call.caller.guest.signal(&selector, request).await.map_err(|error| process_error(error, &selector))?;
    Ok(Reply(Done {}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_known_by_name_and_number() {
        let number = |text: &str| serde_json::from_str::<SendSignalRequest>(text).expect("valid JSON").signal.number();
        assert_eq!(number(r#"{"signal":"SIGNAL_SIGKILL"}"#), Ok(9));
        assert_eq!(number(r#"{"signal":15}"#), Ok(15));
        for bad in ["{}", r#"{"signal":1}"#, r#"{"signal":"SIGNAL_UNSPECIFIED"}"#, r#"{"signal":"HUP"}"#] {
            assert!(number(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn base64_is_read_in_every_form_proto3_json_allows() {
        for text in ["+/8=", "+/8", "-_8=", "-_8"] {
            assert_eq!(decode_base64(text), Some(vec![0xfb, 0xff]), "{text}");
        }
        assert_eq!(decode_base64("*"), None);
    }
}
