//! The guest's name server. It answers from the policy and the name table; only names that are allowed are asked for
//! upstream, and nothing a guest writes is forwarded.
//!
//! ```text
//! question ── read ──> class, opcode, one question? ──no──> FORMERR / REFUSED / NOTIMP
//!                          │ yes
//!                          ├─ PTR of one of our addresses ──> its name
//!                          ├─ name not allowed ──> our address (explain) or NXDOMAIN; other records NXDOMAIN
//!                          ├─ A ──> exists upstream? ──> our address / NXDOMAIN / SERVFAIL
//!                          └─ AAAA, HTTPS, TXT, ... ──> no records (the guest has IPv4 only; no keys for ECH;
//!                                                       no tunnel)
//! ```

mod table;

use std::net::{IpAddr, Ipv4Addr};

use hickory_proto::{
    op::{Edns, Message, MessageType, OpCode, ResponseCode},
    rr::{DNSClass, Name, RData, Record, RecordType, rdata},
};

pub use self::table::{NameTable, NameTableRecord, TableError};
use crate::policy::normalize_name;

/// How long guests may keep answers, in seconds.
const TTL: u32 = 30;
/// The longest question we read; real ones are far below.
const MAX_QUESTION: usize = 4_096;

/// A question that makes sense.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Question {
    message: Message,
    /// What is asked.
    pub ask: Ask,
}

/// What is asked.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Ask {
    /// The address of a name.
    Address(String),
    /// Its IPv6 address: there is none, but clients take NXDOMAIN here for the name as a whole.
    Ipv6Address(String),
    /// Another record of a name.
    Other(String),
    /// The name of an address.
    NameOf(Ipv4Addr),
    /// Something that is no host name and does not exist.
    Nothing,
}

/// What to say.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Answer {
    /// This address.
    Address(Ipv4Addr),
    /// This name.
    Name(String),
    /// The name exists and has no such record.
    Empty,
    /// The name does not exist.
    Nxdomain,
    /// It is not known now.
    Servfail,
}

/// Reads a question. The error is the answer to send, if the packet deserves one.
pub fn read(packet: &[u8]) -> Result<Question, Option<Vec<u8>>> {
    let (Some(id), Some(flags)) = (packet.first_chunk::<2>(), packet.get(2)) else { return Err(None) };
    // An answer to an answer could go on for ever.
    if flags & 0x80 != 0 || packet.len() < 12 {
        return Err(None);
    }
    let id = u16::from_be_bytes(*id);
    let refuse = |code| Err(encode(&Message::error_msg(id, OpCode::Query, code)));
    if packet.len() > MAX_QUESTION {
        return refuse(ResponseCode::FormErr);
    }
    let Ok(message) = Message::from_vec(packet) else { return refuse(ResponseCode::FormErr) };
    if message.metadata.op_code != OpCode::Query {
        return refuse(ResponseCode::NotImp);
    }
    let [query] = message.queries.as_slice() else { return refuse(ResponseCode::FormErr) };
    if query.query_class() != DNSClass::IN {
        return refuse(ResponseCode::Refused);
    }
    let ask = read_ask(query.name(), query.query_type());
    Ok(Question { message, ask })
}

fn read_ask(name: &Name, kind: RecordType) -> Ask {
    if kind == RecordType::PTR
        && let Ok(network) = name.parse_arpa_name()
    {
        return match network.addr() {
            IpAddr::V4(address) => Ask::NameOf(address),
            IpAddr::V6(_) => Ask::Nothing,
        };
    }
    match (normalize_name(&name.to_ascii()), kind) {
        (None, _) => Ask::Nothing,
        (Some(name), RecordType::A) => Ask::Address(name),
        (Some(name), RecordType::AAAA) => Ask::Ipv6Address(name),
        (Some(name), _) => Ask::Other(name),
    }
}

/// The packet that answers `question`.
pub fn answer(question: &Question, answer: &Answer) -> Option<Vec<u8>> {
    let asked = &question.message;
    let mut message = Message::response(asked.metadata.id, OpCode::Query);
    message.metadata.message_type = MessageType::Response;
    message.metadata.recursion_desired = asked.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    let query = asked.queries.first()?;
    message.add_query(query.clone());
    if asked.edns.is_some() {
        message.set_edns(Edns::new());
    }
    match answer {
        Answer::Address(address) => {
            let data = RData::A(rdata::A(*address));
            message.add_answer(Record::from_rdata(query.name().clone(), TTL, data));
        }
        Answer::Name(name) => {
            let data = RData::PTR(rdata::PTR(Name::from_ascii(format!("{name}.")).ok()?));
            message.add_answer(Record::from_rdata(query.name().clone(), TTL, data));
        }
        Answer::Empty => {}
        Answer::Nxdomain => message.metadata.response_code = ResponseCode::NXDomain,
        Answer::Servfail => message.metadata.response_code = ResponseCode::ServFail,
    }
    encode(&message)
}

fn encode(message: &Message) -> Option<Vec<u8>> {
    message.to_vec().ok()
}
