//! Reads a TLS ClientHello: strictly, and only what the policy needs.
//!
//! ```text
//! record:    22 | version (2) | length (2) | fragment            a hello may span records and segments
//! handshake: 1 | length (3) | version (2) | random (32) | session id (<) | suites (<<) | compression (<)
//!            | extensions (<<): type (2) | length (2) | data     < one and << two bytes of length
//! ```
//!
//! A server that reads a hello another way than we do would be a way around the policy, so that whatever is unusual
//! is an error: a second name, an extension twice, bytes left over.

use crate::policy::normalize_name;

/// The most a hello may take; post-quantum key shares need a few kilobytes.
const MAX_HELLO: usize = 64 << 10;
const MAX_RECORD: usize = (16 << 10) + 256;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;

/// What a hello says.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Hello {
    /// The server's name, normalized.
    pub server_name: Option<String>,
    /// Whether it carries an encrypted inner hello (or a decoy).
    pub encrypted: bool,
}

/// What the first bytes of a connection say.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum HelloParse {
    /// Not all of it is there.
    More,
    /// A hello.
    Hello(Hello),
    /// Not a hello we accept.
    Bad(&'static str),
}

/// Reads as much as is there.
pub fn parse(bytes: &[u8]) -> HelloParse {
    let mut message = Vec::new();
    let mut rest = bytes;
    loop {
        let Some((header, after)) = rest.split_first_chunk::<5>() else { return more(bytes) };
        let [kind, major, minor, high, low] = *header;
        if kind != HANDSHAKE || major != 3 || minor > 4 {
            return HelloParse::Bad("not a TLS handshake record");
        }
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > MAX_RECORD {
            return HelloParse::Bad("a record of an impossible length");
        }
        let whole = after.get(..length);
        message.extend_from_slice(whole.unwrap_or(after));
        match handshake_length(&message) {
            Err(problem) => return HelloParse::Bad(problem),
            Ok(Some(needed)) if message.len() >= needed => {
                if message.len() > needed {
                    return HelloParse::Bad("bytes after the hello in its record");
                }
                return match read_body(&message[4..]) {
                    Ok(hello) => HelloParse::Hello(hello),
                    Err(problem) => HelloParse::Bad(problem),
                };
            }
            Ok(_) => {}
        }
        if whole.is_none() {
            return more(bytes);
        }
        rest = &after[length..];
    }
}

fn more(bytes: &[u8]) -> HelloParse {
    if bytes.len() > MAX_HELLO { HelloParse::Bad("a hello longer than 64 KiB") } else { HelloParse::More }
}

fn handshake_length(message: &[u8]) -> Result<Option<usize>, &'static str> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err("not a client hello");
    }
    let Some([_, a, b, c]) = message.first_chunk::<4>() else { return Ok(None) };
    let length = 4 + u32::from_be_bytes([0, *a, *b, *c]) as usize;
    if length > MAX_HELLO { Err("a hello longer than 64 KiB") } else { Ok(Some(length)) }
}

/// Takes pieces off the front.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("a length that does not fit")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<usize, &'static str> {
        Ok(self.take(bytes)?.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    }

    fn vector(&mut self, length_bytes: usize) -> Result<&'a [u8], &'static str> {
        let length = self.number(length_bytes)?;
        self.take(length)
    }
}

fn read_body(body: &[u8]) -> Result<Hello, &'static str> {
    let mut cursor = Cursor(body);
    cursor.take(2 + 32)?;
    if cursor.vector(1)?.len() > 32 {
        return Err("a session id longer than 32 bytes");
    }
    let suites = cursor.vector(2)?;
    if suites.is_empty() || suites.len() % 2 != 0 {
        return Err("a list of cipher suites that is none");
    }
    if cursor.vector(1)?.is_empty() {
        return Err("no compression methods");
    }
    let mut hello = Hello::default();
    if cursor.0.is_empty() {
        return Ok(hello);
    }
    let mut extensions = Cursor(cursor.vector(2)?);
    if !cursor.0.is_empty() {
        return Err("bytes after the extensions");
    }
    let mut seen = Vec::new();
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)? as u16;
        let data = extensions.vector(2)?;
        if seen.contains(&kind) {
            return Err("an extension twice");
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => hello.server_name = Some(read_server_name(data)?),
            ENCRYPTED_CLIENT_HELLO => hello.encrypted = true,
            _ => {}
        }
    }
    Ok(hello)
}

fn read_server_name(data: &[u8]) -> Result<String, &'static str> {
    let mut cursor = Cursor(data);
    let mut list = Cursor(cursor.vector(2)?);
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    if kind != 0 || !list.0.is_empty() || !cursor.0.is_empty() {
        return Err("a list of server names that is not one host name");
    }
    let text = std::str::from_utf8(name).map_err(|_| "a server name that is no text")?;
    // A trailing dot is not allowed here and read by servers in two ways.
    if text.ends_with('.') {
        return Err("a server name with a trailing dot");
    }
    normalize_name(text).ok_or("a server name that is no host name")
}
