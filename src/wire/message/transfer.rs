//! Messages about one transfer. Each has the room, slot and generation, so that a late message does
//! not match a newer transfer. Without the generation, a second AbortAck for one room would free
//! the pages of the next room.

use super::MessageError;
use super::body::{exactly, read_body, within, write_body};
use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SessionGeneration, SlotId};
use crate::limits::{self, PROMPT_LOGPROBS_BYTES_MAX};
use crate::wire::{Multipart, Parts};
use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};

/// Identifies a transfer: the room, and the destination's slot for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TransferId {
    /// The attempt; below 2^63.
    pub room: Room,
    /// The destination's slot.
    pub slot: SlotId,
    /// The slot's generation; 1 to 2^24 - 1.
    pub generation: Generation,
}

impl TransferId {
    fn checked(self) -> Result<TransferId, MessageError> {
        within("room", self.room.0, 0..=Room::MAX.0)?;
        within("generation", self.generation.0, 1..=(1 << 24) - 1)?;
        Ok(self)
    }
}

/// Truncated SHA-256 of a prompt's ids.
pub type IdsHash = [u8; 16];

/// Hash that shows both legs that they have the same prompt.
pub fn ids_hash(ids: &[u32]) -> IdsHash {
    let digest = Sha256::digest(bytemuck::cast_slice::<u32, u8>(ids));
    digest[..16].try_into().expect("SHA-256 has 32 bytes")
}

/// Page indices on the wire: u32, little-endian, unaligned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageList<'a>(&'a [u8]);

impl<'a> PageList<'a> {
    /// Number of pages.
    pub fn len(self) -> usize {
        self.0.len() / size_of::<PageId>()
    }

    /// Whether there is no page: decode holds the whole prompt.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The pages in order of their tokens; the caller must still check each against the pool's
    /// size.
    pub fn iter(self) -> impl ExactSizeIterator<Item = PageId> + 'a {
        self.0.chunks_exact(size_of::<PageId>()).map(bytemuck::pod_read_unaligned)
    }
}

impl<'a> From<&'a [PageId]> for PageList<'a> {
    fn from(pages: &'a [PageId]) -> PageList<'a> {
        PageList(bytemuck::cast_slice(pages))
    }
}

/// The pages for the KV of one room. Valid in the session that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination<'a> {
    /// The room, and the slot that waits for its KV.
    pub id: TransferId,
    /// The session that the page indices refer to.
    pub session: SessionGeneration,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens at the beginning of the prompt that decode already holds, so they are not
    /// transferred. Fewer than `tokens`.
    pub prefix_tokens: u32,
    /// [`ids_hash`] of the prompt.
    pub ids_hash: IdsHash,
    /// The aux slot leased for this transfer.
    pub aux_index: u32,
    /// Milliseconds until the request's deadline.
    pub deadline_ms: u32,
    /// Pages for the tokens after the prefix.
    pub pages: PageList<'a>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct DestinationBody {
    id: TransferId,
    ids_hash: IdsHash,
    session: SessionGeneration,
    tokens: u32,
    prefix_tokens: u32,
    aux_index: u32,
    deadline_ms: u32,
    pad: u32,
}

impl<'a> Destination<'a> {
    pub(super) fn parse(body: &[u8], parts: Parts<'a>) -> Result<Destination<'a>, MessageError> {
        exactly(parts, 2)?;
        let body: DestinationBody = read_body(body, "Destination")?;
        let pages = parts.get(1).unwrap_or_default();
        let size = size_of::<PageId>();
        if !pages.len().is_multiple_of(size) || pages.len() / size > limits::PAGES_MAX {
            return Err(MessageError::Content { what: "page list", len: pages.len() });
        }
        within("session", body.session.0, 1..=u32::MAX.into())?;
        within("tokens", body.tokens, 1..=u32::MAX.into())?;
        within("prefix", body.prefix_tokens, 0..=u64::from(body.tokens) - 1)?;
        let DestinationBody {
            id,
            ids_hash,
            session,
            tokens,
            prefix_tokens,
            aux_index,
            deadline_ms,
            ..
        } = body;
        Ok(Destination {
            id: id.checked()?,
            session,
            tokens,
            prefix_tokens,
            ids_hash,
            aux_index,
            deadline_ms,
            pages: PageList(pages),
        })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        let Destination {
            id,
            session,
            tokens,
            prefix_tokens,
            ids_hash,
            aux_index,
            deadline_ms,
            pages,
        } = *self;
        let pad = 0;
        write_body(
            &DestinationBody {
                id,
                ids_hash,
                session,
                tokens,
                prefix_tokens,
                aux_index,
                deadline_ms,
                pad,
            },
            out,
        );
        out.end_part();
        out.push(pages.0);
    }
}

/// The destination will need one room's KV. It sends this if the hand-off uses late allocation. The
/// source computes and answers [`Ready`]; then the destination sends [`Destination`]. Valid in the
/// session that it names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Interest {
    /// The room, and the slot that waits for its KV.
    pub id: TransferId,
    /// The session in which Destination will come.
    pub session: SessionGeneration,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// [`ids_hash`] of the prompt.
    pub ids_hash: IdsHash,
    /// Milliseconds until the request's deadline.
    pub deadline_ms: u32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct InterestBody {
    id: TransferId,
    ids_hash: IdsHash,
    session: SessionGeneration,
    tokens: u32,
    deadline_ms: u32,
    pad: u32,
}

impl Interest {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Interest, MessageError> {
        exactly(parts, 1)?;
        let body: InterestBody = read_body(body, "Interest")?;
        within("session", body.session.0, 1..=u32::MAX.into())?;
        within("tokens", body.tokens, 1..=u32::MAX.into())?;
        let InterestBody { id, ids_hash, session, tokens, deadline_ms, .. } = body;
        Ok(Interest { id: id.checked()?, session, tokens, ids_hash, deadline_ms })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        let Interest { id, session, tokens, ids_hash, deadline_ms } = *self;
        write_body(&InterestBody { id, ids_hash, session, tokens, deadline_ms, pad: 0 }, out);
        out.end_part();
    }
}

/// The source has computed the KV for an [`Interest`] and keeps it. The destination can now send
/// [`Destination`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The transfer.
    pub id: TransferId,
}

impl Ready {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Ready, MessageError> {
        exactly(parts, 1)?;
        let id: TransferId = read_body(body, "Ready")?;
        Ok(Ready { id: id.checked()? })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_body(&self.id, out);
        out.end_part();
    }
}

/// A transfer and up to eight small values about it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TransferBody {
    id: TransferId,
    values: [u8; 8],
}

fn read_transfer(
    body: &[u8],
    parts: Parts<'_>,
    what: &'static str,
) -> Result<(TransferId, [u8; 8]), MessageError> {
    exactly(parts, 1)?;
    let body: TransferBody = read_body(body, what)?;
    Ok((body.id.checked()?, body.values))
}

fn write_transfer(id: TransferId, first: u8, second: u8, out: &mut Multipart) {
    write_body(&TransferBody { id, values: [first, second, 0, 0, 0, 0, 0, 0] }, out);
    out.end_part();
}

/// Asks the other side to stop a transfer. Valid on the connection that carried its Destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abort {
    /// The transfer.
    pub id: TransferId,
    /// The reason.
    pub cause: Cause,
}

impl Abort {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Abort, MessageError> {
        let (id, [cause, ..]) = read_transfer(body, parts, "Abort")?;
        Ok(Abort { id, cause: Cause::from_number(cause) })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_transfer(self.id, self.cause as u8, 0, out);
    }
}

/// Answers an Abort, or a Destination that the source refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AbortAck {
    /// The transfer.
    pub id: TransferId,
    /// True: no byte of the transfer can arrive any more. False: bytes may still arrive.
    pub quiet: bool,
    /// Why the answering side has ended the transfer.
    pub cause: Cause,
}

impl AbortAck {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<AbortAck, MessageError> {
        let (id, [quiet, cause, ..]) = read_transfer(body, parts, "AbortAck")?;
        within("quiet", quiet, 0..=1)?;
        Ok(AbortAck { id, quiet: quiet == 1, cause: Cause::from_number(cause) })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_transfer(self.id, self.quiet.into(), self.cause as u8, out);
    }
}

/// The state of a transfer at its source.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// The transfer.
    pub id: TransferId,
    /// Transfer state, Failed 0 to Success 4 (docs/design/handoff.md).
    pub state: u8,
    /// The cause of a failure.
    pub cause: Option<Cause>,
}

impl Status {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Status, MessageError> {
        let (id, [state, cause, ..]) = read_transfer(body, parts, "Status")?;
        within("state", state, 0..=4)?;
        Ok(Status { id, state, cause: cause_of(cause) })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_transfer(self.id, self.state, number_of(self.cause), out);
    }
}

/// The destination has pulled or received everything. Sent by its mover.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Done {
    /// The transfer.
    pub id: TransferId,
}

impl Done {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Done, MessageError> {
        exactly(parts, 1)?;
        let id: TransferId = read_body(body, "Done")?;
        Ok(Done { id: id.checked()? })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_body(&self.id, out);
        out.end_part();
    }
}

/// The logprobs of the prompt of a transfer, if its request asks for them. Sent once by the source,
/// since minor 4.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PromptRecord<'a> {
    /// The transfer.
    pub id: TransferId,
    /// The logprobs, in the form that both schedulers know.
    pub bytes: &'a [u8],
}

impl<'a> PromptRecord<'a> {
    pub(super) fn parse(body: &[u8], parts: Parts<'a>) -> Result<PromptRecord<'a>, MessageError> {
        exactly(parts, 2)?;
        let id: TransferId = read_body(body, "PromptRecord")?;
        let bytes = parts.get(1).unwrap_or_default();
        if bytes.len() > PROMPT_LOGPROBS_BYTES_MAX {
            return Err(MessageError::Content { what: "prompt record", len: bytes.len() });
        }
        Ok(PromptRecord { id: id.checked()?, bytes })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_body(&self.id, out);
        out.end_part();
        out.push(self.bytes);
    }
}

/// A cause that may be absent, from its number.
pub(super) fn cause_of(number: u8) -> Option<Cause> {
    (number != 0).then(|| Cause::from_number(number))
}

/// The number of a cause that may be absent; no cause has 0.
pub(super) fn number_of(cause: Option<Cause>) -> u8 {
    cause.map_or(0, |cause| cause as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_ids_is_that_of_their_little_endian_bytes() {
        assert_ne!(ids_hash(&[1, 2]), ids_hash(&[2, 1]));
        assert_ne!(ids_hash(&[]), ids_hash(&[0]));
        let digest = Sha256::digest([1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(ids_hash(&[1, 2])[..], digest[..16]);
    }
}
