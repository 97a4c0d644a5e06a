//! Messages about the connection: Hello, Proof, Bye.

use super::body::{exactly, read_body, read_grown, within};
use super::{MessageError, transfer};
use crate::cause::Cause;
use crate::ids::{Peer, Role};
use crate::limits;
use crate::wire::auth::KeyId;
use crate::wire::{Multipart, Parts};
use bytemuck::{Pod, Zeroable};

/// The identity of a worker; the first message of each side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Name and incarnation.
    pub peer: Peer,
    /// The sender counts its connections. A higher number ends earlier connections and the
    /// transfers on them.
    pub connection: u64,
    /// Bits of the sender's abilities beyond this version; unknown ones are ignored.
    pub capabilities: u64,
    /// Major, minor, patch of the sender's software, for logs.
    pub software: [u16; 3],
    /// Tensor-parallel ranks.
    pub ranks: u16,
    /// The worker's role.
    pub role: Role,
    /// Random; makes each proof unique.
    pub nonce: [u8; 32],
    /// Minor version of its messages; see [`MINOR`](super::MINOR).
    pub minor: u8,
    /// The ids of its cluster keys, the proven one first. Minor 0 sends none.
    pub keys: [KeyId; limits::CLUSTER_KEYS_MAX],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HelloBody {
    peer: Peer,
    connection: u64,
    capabilities: u64,
    software: [u16; 3],
    ranks: u16,
    role: u8,
    minor: u8,
    pad: [u8; 6],
    nonce: [u8; 32],
    /// Sent since minor 1.
    keys: [KeyId; limits::CLUSTER_KEYS_MAX],
}

/// Bytes of the body that minor 0 wrote.
const LEAST: usize = std::mem::offset_of!(HelloBody, keys);

impl Hello {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Hello, MessageError> {
        exactly(parts, 1)?;
        let mut hello: HelloBody = read_grown(body, LEAST, "Hello")?;
        // From a later minor version, the shorter body is incomplete.
        if hello.minor > 0 {
            hello = read_body(body, "Hello")?;
        }
        let body = hello;
        let role = match body.role {
            1 => Role::Prefill,
            2 => Role::Decode,
            3 => Role::Mixed,
            role => return Err(MessageError::Value { what: "role", value: role.into() }),
        };
        within("ranks", body.ranks, 1..=limits::RANKS_MAX as u64)?;
        let HelloBody { peer, connection, capabilities, software, ranks, nonce, minor, .. } = body;
        let keys = if minor == 0 { Default::default() } else { body.keys };
        Ok(Hello { peer, connection, capabilities, software, ranks, role, nonce, minor, keys })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        let Hello { peer, connection, capabilities, software, ranks, role, nonce, minor, keys } =
            *self;
        let (role, pad) = (role as u8, [0; 6]);
        let body = HelloBody {
            peer,
            connection,
            capabilities,
            software,
            ranks,
            role,
            minor,
            pad,
            nonce,
            keys,
        };
        let len = if minor == 0 { LEAST } else { size_of::<HelloBody>() };
        out.extend(&bytemuck::bytes_of(&body)[..len]);
        out.end_part();
    }
}

/// Proof that the sender knows the cluster key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof {
    /// See [`ClusterKey::proof`](crate::wire::auth::ClusterKey::proof).
    pub tag: [u8; 32],
}

impl Proof {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Proof, MessageError> {
        exactly(parts, 1)?;
        Ok(Proof { tag: read_body(body, "Proof")? })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        out.push(&self.tag);
    }
}

/// The sender ends the link, either now or after its drain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bye {
    /// Why it ends the link, if there is a special reason.
    pub cause: Option<Cause>,
}

impl Bye {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Bye, MessageError> {
        exactly(parts, 1)?;
        let [cause, _pad @ ..]: [u8; 8] = read_body(body, "Bye")?;
        Ok(Bye { cause: transfer::cause_of(cause) })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        out.push(&[transfer::number_of(self.cause), 0, 0, 0, 0, 0, 0, 0]);
    }
}
