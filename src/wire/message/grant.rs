//! Grants in Announce and Welcome: how the other side can reach a process's memory, and the secrets
//! that it needs. The content of a grant is untrusted until the planner has checked it.

use super::MessageError;
use super::body::within;
use bytemuck::{Pod, Zeroable};
use std::fmt;
use std::net::SocketAddr;

/// A secret that gives its holder access to one rank's memory or streams. Never printed.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Token(pub [u8; 16]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Identifies a machine since its boot; equal ids mean that memory can be shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct HostId(pub [u8; 16]);

/// Name of an abstract unix socket, without its leading zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SocketName {
    pub(super) bytes: [u8; SocketName::MAX],
    pub(super) len: u8,
}

impl SocketName {
    /// Bytes of the longest name.
    pub const MAX: usize = 64;

    /// A name of 1 to [`MAX`](Self::MAX) bytes.
    pub fn new(name: &[u8]) -> Option<SocketName> {
        let mut bytes = [0; SocketName::MAX];
        bytes.get_mut(..name.len())?.copy_from_slice(name);
        (!name.is_empty()).then_some(SocketName { bytes, len: name.len() as u8 })
    }

    /// The name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}", self.as_bytes().escape_ascii())
    }
}

/// How to get a rank's descriptors over a unix socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmGrant {
    /// The sender's machine.
    pub host: HostId,
    /// The socket that passes the descriptors.
    pub socket: SocketName,
    /// A process must send this token to get them.
    pub token: Token,
}

/// How to open a rank's streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TcpGrant {
    /// The rank's listening data address; its port is above 0.
    pub address: SocketAddr,
    /// Opens a stream.
    pub token: Token,
}

/// The values of one of a session's queue pairs that its peer needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct QueuePairName {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// Sequence number of its first packet, 24 bits.
    pub sequence: u32,
}

/// One NIC of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RailGrant {
    /// GID of the port.
    pub gid: [u8; 16],
    /// Bytes of the pool that one key opens, a power of two; together the keys open the whole pool.
    pub slab_bytes: u64,
    /// Key of the slot records.
    pub records_key: u32,
    /// LID of the port, on InfiniBand.
    pub lid: u16,
    /// Payload bytes of a packet.
    pub mtu: u16,
    /// In Announce: the destination's number for this NIC. In Welcome: the number of the
    /// destination's NIC to which this NIC is connected.
    pub number: u16,
    /// Number of keys below, 1 to [`RailGrant::SLABS_MAX`].
    pub slabs: u16,
    /// Zero.
    pub pad: u32,
    /// Keys by slab; the first `slabs` are valid.
    pub keys: [u32; RailGrant::SLABS_MAX],
}

impl RailGrant {
    /// Most slabs of a pool. Devices accept slabs of at least 1 GiB, so this is more memory than
    /// most ranks have.
    pub const SLABS_MAX: usize = 64;

    /// This grant with one key for each slab of `bytes`, in order. Keys that do not fit are
    /// dropped.
    pub fn with_keys(self, bytes: u64, keys: impl Iterator<Item = u32>) -> RailGrant {
        let mut grant = RailGrant { slab_bytes: bytes, slabs: 0, ..self };
        for (place, key) in grant.keys.iter_mut().zip(keys) {
            *place = key;
            grant.slabs += 1;
        }
        grant
    }

    /// The keys of the pool, slab by slab.
    pub fn slab_keys(&self) -> &[u32] {
        &self.keys[..usize::from(self.slabs)]
    }

    /// `pool`: bytes that the keys must open together.
    fn check(&self, pool: u64) -> Result<(), MessageError> {
        within("rdma slabs", self.slabs, 1..=RailGrant::SLABS_MAX as u64)?;
        let opened = u128::from(self.slab_bytes) * u128::from(self.slabs);
        if !self.slab_bytes.is_power_of_two() || opened < pool.into() {
            return Err(MessageError::Value {
                what: "bytes of an rdma slab",
                value: self.slab_bytes,
            });
        }
        Ok(())
    }
}

/// How to write into a rank's memory, and the queue pairs that do so.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RdmaGrant {
    /// Address of the pool in the rank's process.
    pub kv_address: u64,
    /// Address of the slot records.
    pub records_address: u64,
    /// Number of NICs below, 1 to [`RdmaGrant::RAILS_MAX`].
    pub rails: u16,
    /// Queue pairs of each NIC; together at most [`RdmaGrant::LANES_MAX`].
    pub lanes: u16,
    /// Zero.
    pub pad: u32,
    nics: [RailGrant; RdmaGrant::RAILS_MAX],
    /// Queue pairs of one NIC are adjacent.
    pairs: [QueuePairName; RdmaGrant::LANES_MAX],
}

impl RdmaGrant {
    /// Most NICs of a session.
    pub const RAILS_MAX: usize = 4;
    /// Most lanes of a session.
    pub const LANES_MAX: usize = 16;

    /// Memory without a NIC: it cannot be reached yet.
    pub fn empty(kv_address: u64, records_address: u64) -> RdmaGrant {
        RdmaGrant { kv_address, records_address, ..RdmaGrant::zeroed() }
    }

    /// Adds a NIC. Its number is unique, and it has as many queue pairs as each NIC before it. A
    /// NIC that does not fit is dropped.
    pub fn push(&mut self, rail: RailGrant, names: &[QueuePairName]) {
        let (place, lanes) = (usize::from(self.rails), names.len());
        if let (Some(nic), Some(pairs)) =
            (self.nics.get_mut(place), self.pairs.get_mut(place * lanes..(place + 1) * lanes))
        {
            *nic = rail;
            pairs.copy_from_slice(names);
            (self.rails, self.lanes) = (self.rails + 1, lanes as u16);
        }
    }

    /// NICs with their queue pairs, by lane.
    pub fn rails(&self) -> impl ExactSizeIterator<Item = (&RailGrant, &[QueuePairName])> {
        let lanes = usize::from(self.lanes);
        (0..usize::from(self.rails))
            .map(move |place| (&self.nics[place], &self.pairs[place * lanes..][..lanes]))
    }

    pub(super) fn check(&self, pool: u64) -> Result<(), MessageError> {
        within("rdma NICs", self.rails, 1..=RdmaGrant::RAILS_MAX as u64)?;
        within(
            "rdma lanes",
            self.lanes,
            1..=(RdmaGrant::LANES_MAX / usize::from(self.rails)) as u64,
        )?;
        for (place, (nic, _)) in self.rails().enumerate() {
            nic.check(pool)?;
            if self.rails().take(place).any(|(before, _)| before.number == nic.number) {
                return Err(MessageError::Value {
                    what: "number of an rdma NIC, again",
                    value: nic.number.into(),
                });
            }
        }
        Ok(())
    }
}

/// Keys must not appear in logs.
impl fmt::Debug for RdmaGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaGrant")
            .field("rails", &self.rails)
            .field("lanes", &self.lanes)
            .finish_non_exhaustive()
    }
}
