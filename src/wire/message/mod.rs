//! Messages between workers (docs/design/wire.md): their types and their bytes.
//!
//! The first part is an 8-byte header and a little-endian plain-old-data body, read unaligned. A
//! body that is too long is cut. A short one is filled with zeros if an earlier minor version wrote
//! it, else refused. Lists and texts are parts of their own.
//! Invariants: decoded values are in range, as far as this can be checked without context (the
//! receiver compares peers, pools and sessions). Only Announce and Welcome allocate.
//! Not here: frames (`zmtp`), proof and seals (`auth`), the effects of a message (`transfer`).

mod body;
mod error;
mod grant;
mod hello;
mod session;
#[cfg(test)]
mod tests;
mod text;
mod transfer;

pub use error::MessageError;
pub use grant::{
    HostId, QueuePairName, RailGrant, RdmaGrant, ShmGrant, SocketName, TcpGrant, Token,
};
pub use hello::{Bye, Hello, Proof};
pub use session::{
    Announce, AuxLayoutClaim, BitClass, Fingerprint, KvLayoutClaim, Rank, Refusal, Refused,
    RegionLengths, Transport, Welcome,
};
pub use transfer::{
    Abort, AbortAck, Destination, Done, IdsHash, Interest, PageList, PromptRecord, Ready, Status,
    TransferId, ids_hash,
};

use crate::limits;
use crate::wire::auth::Seal;
use crate::wire::{Multipart, Parts};
use body::{read_body, write_body};
use bytemuck::{Pod, Zeroable};

/// Major version of the messages; another one is refused.
pub const VERSION: u8 = 3;
/// Minor version, sent in Hello; a link uses the lower of both sides' versions. A minor version
/// appends to bodies and adds kinds that may be skipped. It removes nothing, changes no meaning and
/// adds no parts. 1: ids of cluster keys in Hello. 2: late allocation, in Welcome, with Interest
/// and Ready. 3: the bit class, in Announce. 4: logprobs of the prompt, in PromptRecord.
pub const MINOR: u8 = 4;
const MAGIC: u16 = u16::from_le_bytes(*b"BT");
/// A receiver that does not know the kind must close the connection, not skip the message.
const MUST_UNDERSTAND: u16 = 1;

#[cfg(not(target_endian = "little"))]
compile_error!("wire bodies are little-endian plain-old-data");

/// Begins the first part of every message.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u16,
    version: u8,
    kind: u8,
    flags: u16,
    /// Parts that follow this one; the number of frames with the MORE flag.
    parts: u16,
}

const HEADER_LEN: usize = size_of::<Header>();

/// A message between two workers.
#[derive(Clone, PartialEq, Debug)]
pub enum Message<'a> {
    /// The sender's identity.
    Hello(Hello),
    /// Proof that the sender knows the cluster key.
    Proof(Proof),
    /// The destination describes its regions to the source.
    Announce(Box<Announce>),
    /// The source accepts the session.
    Welcome(Box<Welcome>),
    /// The source refuses the session.
    Refused(Refused<'a>),
    /// The pages for one request's KV.
    Destination(Destination<'a>),
    /// The destination will need one request's KV.
    Interest(Interest),
    /// The source has computed it.
    Ready(Ready),
    /// Asks the other side to stop a transfer.
    Abort(Abort),
    /// The other side has stopped it.
    AbortAck(AbortAck),
    /// The state of a transfer at its source.
    Status(Status),
    /// The destination has received everything.
    Done(Done),
    /// The logprobs of a transfer's prompt.
    PromptRecord(PromptRecord<'a>),
    /// The sender accepts no new rooms.
    Bye(Bye),
}

const HELLO: u8 = 1;
const PROOF: u8 = 2;
const ANNOUNCE: u8 = 3;
const WELCOME: u8 = 4;
const REFUSED: u8 = 5;
const DESTINATION: u8 = 6;
const INTEREST: u8 = 7;
const READY: u8 = 8;
const ABORT: u8 = 9;
const ABORT_ACK: u8 = 10;
const STATUS: u8 = 11;
const DONE: u8 = 12;
const BYE: u8 = 13;
const PROMPT_RECORD: u8 = 14;

impl<'a> Message<'a> {
    /// Reads a message. `seal` is the peer's, if the connection has one. `None` is an unknown kind
    /// of a later version that may be skipped.
    pub fn decode(
        parts: Parts<'a>,
        seal: Option<&mut Seal>,
    ) -> Result<Option<Message<'a>>, MessageError> {
        let first = parts.get(0).unwrap_or_default();
        let header: Header = read_body(first, "header")?;
        if header.magic != MAGIC {
            return Err(MessageError::Magic(header.magic));
        }
        if header.version != VERSION {
            return Err(MessageError::Version { theirs: header.version });
        }
        if usize::from(header.parts) + 1 != parts.len() {
            return Err(MessageError::Parts {
                said: usize::from(header.parts) + 1,
                found: parts.len(),
            });
        }
        let parts = match seal {
            Some(seal) => seal.open(parts).ok_or(MessageError::Seal)?,
            None => parts,
        };
        let body = &first[HEADER_LEN..];
        Ok(Some(match header.kind {
            HELLO => Message::Hello(Hello::parse(body, parts)?),
            PROOF => Message::Proof(Proof::parse(body, parts)?),
            ANNOUNCE => Message::Announce(Box::new(Announce::parse(body, parts)?)),
            WELCOME => Message::Welcome(Box::new(Welcome::parse(body, parts)?)),
            REFUSED => Message::Refused(Refused::parse(body, parts)?),
            DESTINATION => Message::Destination(Destination::parse(body, parts)?),
            INTEREST => Message::Interest(Interest::parse(body, parts)?),
            READY => Message::Ready(Ready::parse(body, parts)?),
            ABORT => Message::Abort(Abort::parse(body, parts)?),
            ABORT_ACK => Message::AbortAck(AbortAck::parse(body, parts)?),
            STATUS => Message::Status(Status::parse(body, parts)?),
            DONE => Message::Done(Done::parse(body, parts)?),
            BYE => Message::Bye(Bye::parse(body, parts)?),
            PROMPT_RECORD => Message::PromptRecord(PromptRecord::parse(body, parts)?),
            kind if header.flags & MUST_UNDERSTAND != 0 => return Err(MessageError::Kind(kind)),
            _ => return Ok(None),
        }))
    }

    /// Replaces the content of `out` by the message; `seal` is ours, if the connection has one.
    pub fn encode(&self, seal: Option<&mut Seal>, out: &mut Multipart) {
        out.clear(limits::ZMTP_BUFFER_KEPT);
        let mut header =
            Header { magic: MAGIC, version: VERSION, kind: self.kind(), flags: 0, parts: 0 };
        write_body(&header, out);
        match self {
            Message::Hello(hello) => hello.write(out),
            Message::Proof(proof) => proof.write(out),
            Message::Announce(announce) => announce.write(out),
            Message::Welcome(welcome) => welcome.write(out),
            Message::Refused(refused) => refused.write(out),
            Message::Destination(destination) => destination.write(out),
            Message::Interest(interest) => interest.write(out),
            Message::Ready(ready) => ready.write(out),
            Message::Abort(abort) => abort.write(out),
            Message::AbortAck(ack) => ack.write(out),
            Message::Status(status) => status.write(out),
            Message::Done(done) => done.write(out),
            Message::PromptRecord(record) => record.write(out),
            Message::Bye(bye) => bye.write(out),
        }
        header.parts = (out.parts().len() - 1 + usize::from(seal.is_some())) as u16;
        out.overwrite(0, bytemuck::bytes_of(&header));
        if let Some(seal) = seal {
            seal.close(out);
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Message::Hello(_) => HELLO,
            Message::Proof(_) => PROOF,
            Message::Announce(_) => ANNOUNCE,
            Message::Welcome(_) => WELCOME,
            Message::Refused(_) => REFUSED,
            Message::Destination(_) => DESTINATION,
            Message::Interest(_) => INTEREST,
            Message::Ready(_) => READY,
            Message::Abort(_) => ABORT,
            Message::AbortAck(_) => ABORT_ACK,
            Message::Status(_) => STATUS,
            Message::Done(_) => DONE,
            Message::PromptRecord(_) => PROMPT_RECORD,
            Message::Bye(_) => BYE,
        }
    }
}
