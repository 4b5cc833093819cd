//! Commands over one HTTP request, their events as binary frames. For programs that want little overhead
//! and give no input.

use bytes::{Buf as _, BytesMut};
use futures::StreamExt as _;
use reqwest::Method;
use stockade_wire::event::{Event, EventCodec};
use tokio_util::codec::Decoder as _;

use super::{
    Client,
    exec::{ExecRequest, Exit},
    types::ErrorAnswer,
};
use crate::failure::{Failure, chain};

const MEDIA_TYPE: &str = "application/vnd.stockade.events";
/// The frame that carries an error in place of an exit.
const ERROR_KIND: u8 = 255;
const HEADER_BYTES: usize = 5;
const MAX_ERROR_BYTES: usize = 256 << 10;

/// What a command did, as far as it was looked at.
#[derive(Clone, Debug, Default)]
pub(crate) struct Collected {
    pub(crate) stdout: Vec<u8>,
    /// `None` when only the first output was waited for.
    pub(crate) exit: Option<Exit>,
}

impl Client {
    /// Runs a command until it ends, or until its first output; collects what it wrote until then.
    pub(crate) async fn collect(
        &self,
        id: &str,
        request: &ExecRequest,
        first_only: bool,
    ) -> Result<Collected, Failure> {
        let post = self.request(Method::POST, &["v1", "sandboxes", id, "exec"]);
        let response = self.send(post.header(reqwest::header::ACCEPT, MEDIA_TYPE).json(request)).await?;
        let mut body = response.bytes_stream();
        let mut buffer = BytesMut::new();
        let mut collected = Collected::default();
        while let Some(piece) = body.next().await {
            buffer.extend_from_slice(&piece.map_err(|error| self.transport(&error))?);
            while let Some(event) = next_event(&mut buffer)? {
                match event {
                    Event::Stdout(data) => collected.stdout.extend_from_slice(&data),
                    Event::Exit(exit) => {
                        let stockade_wire::process::Exit { code, signal, timed_out, out_of_memory } = exit;
                        collected.exit = Some(Exit { code, signal, timed_out, out_of_memory });
                        return Ok(collected);
                    }
                    _ => {}
                }
                if first_only && !collected.stdout.is_empty() {
                    return Ok(collected);
                }
            }
        }
        Err(Failure::new("stream_cut", format!("the connection to {} was lost before the command ended", self.url())))
    }

    /// Asks the guest what is at a path; the answer is not looked at.
    pub(crate) async fn probe_stat(&self, id: &str, path: &str) -> Result<(), Failure> {
        let request = self.request(Method::GET, &["v1", "sandboxes", id, "files", "stat"]).query(&[("path", path)]);
        self.send(request).await.map(drop)
    }
}

fn next_event(buffer: &mut BytesMut) -> Result<Option<Event>, Failure> {
    let malformed = |what: String| Failure::new("unexpected_answer", format!("an event cannot be read: {what}"));
    if buffer.first() != Some(&ERROR_KIND) {
        return EventCodec.decode(buffer).map_err(|error| malformed(chain(&error)));
    }
    if buffer.len() < HEADER_BYTES {
        return Ok(None);
    }
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if length > MAX_ERROR_BYTES {
        return Err(malformed(format!("an error of {length} bytes")));
    }
    if buffer.len() < HEADER_BYTES + length {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    let ErrorAnswer { error } =
        serde_json::from_slice(&buffer.split_to(length)).map_err(|error| malformed(error.to_string()))?;
    Err(error.into_failure())
}
