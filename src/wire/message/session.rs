//! Messages about a session: Announce, and its answers Welcome and Refused. The receiver does not
//! trust what they say about the sender's memory until the planner has checked strides and lengths.

use super::MessageError;
use super::body::{exactly, read_body, read_part, within, write_body};
use super::grant::{HostId, RdmaGrant, ShmGrant, SocketName, TcpGrant, Token};
use super::text::{read_text, write_text};
use crate::ids::SessionGeneration;
use crate::limits;
use crate::wire::{Multipart, Parts};
use bytemuck::{Pod, Zeroable};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// A transport. Its value is its number on the wire and the position of its bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Transport {
    /// The destination copies from the source's mapped pool.
    Shm = 1,
    /// The source's NIC writes into the destination's pool.
    Rdma = 2,
    /// Frames over streams.
    Tcp = 3,
    /// No bytes move; for tests.
    Fake = 4,
}

impl Transport {
    /// All transports, the preferred one first.
    pub const ALL: [Transport; 4] =
        [Transport::Shm, Transport::Rdma, Transport::Tcp, Transport::Fake];

    /// Names of several transports, for logs.
    pub fn list(transports: impl Iterator<Item = Transport>) -> String {
        let names: Vec<&str> = transports.map(Transport::name).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }

    /// The name in `--transfer`, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Rdma => "rdma",
            Transport::Tcp => "tcp",
            Transport::Fake => "fake",
        }
    }

    /// The transport with this name.
    pub fn named(name: &str) -> Option<Transport> {
        Transport::ALL.into_iter().find(|transport| transport.name() == name)
    }

    const fn bit(self) -> u32 {
        1 << self as u8
    }

    fn from_number(number: u8) -> Option<Transport> {
        Transport::ALL.into_iter().find(|known| *known as u8 == number)
    }

    /// Whether the source writes directly into its destination's memory.
    pub const fn writes_remotely(self) -> bool {
        matches!(self, Transport::Rdma)
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Hashes of everything that must be equal on two workers, so that one can use the KV of the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Fingerprint {
    /// Of the model's configuration.
    pub config: [u8; 32],
    /// Of the weights.
    pub weights: [u8; 32],
    /// Of the kernel family. A source that knows both bit classes compares these in its place.
    pub kernels: [u8; 32],
    /// Of the tokenizer.
    pub tokenizer: [u8; 32],
    /// Of the chat template.
    pub template: [u8; 32],
}

impl Fingerprint {
    /// Name of the first field that differs, with both values.
    pub fn difference<'a>(
        &'a self,
        other: &'a Fingerprint,
    ) -> Option<(&'static str, &'a [u8; 32], &'a [u8; 32])> {
        [
            ("config", &self.config, &other.config),
            ("weights", &self.weights, &other.weights),
            ("kernels", &self.kernels, &other.kernels),
            ("tokenizer", &self.tokenizer, &other.tokenizer),
            ("template", &self.template, &other.template),
        ]
        .into_iter()
        .find(|(_, ours, theirs)| ours != theirs)
    }
}

/// The class of kernel families that give equal bits: its name, padded with zeros. A peer of an
/// earlier minor version sends none, which is all zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct BitClass([u8; 16]);

impl BitClass {
    /// Name of this value in refusals and answers.
    pub const FIELD: &'static str = "bit_class";
    /// What an operator can do if two classes differ.
    pub const REMEDY: &'static str = "give both workers the same --kernels";
    /// The class of a peer that sends none.
    pub const UNKNOWN: BitClass = BitClass([0; 16]);

    /// The class of this name.
    ///
    /// # Panics
    /// The name does not have 1 to 16 bytes of printable ASCII.
    pub fn named(name: &str) -> BitClass {
        assert!(name.len() <= size_of::<BitClass>(), "{name:?} is too long for a bit class");
        let mut bytes = [0; 16];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        let class = BitClass(bytes);
        assert!(class.is_known() && class.is_sound(), "{name:?} names a bit class");
        class
    }

    /// Whether the peer has sent it.
    pub fn is_known(&self) -> bool {
        *self != BitClass::UNKNOWN
    }

    fn used(&self) -> &[u8] {
        &self.0[..self.0.iter().position(|&byte| byte == 0).unwrap_or(self.0.len())]
    }

    /// Whether it is printable ASCII and then zeros.
    fn is_sound(&self) -> bool {
        let used = self.used();
        let is_padded = self.0[used.len()..].iter().all(|&byte| byte == 0);
        is_padded && used.iter().all(u8::is_ascii_graphic)
    }
}

impl fmt::Display for BitClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(self.used()).unwrap_or_default())
    }
}

/// A peer's description of its KV layout; fields as in `kv::layout`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct KvLayoutClaim {
    /// Tokens of a page; at least 1, as are the next four.
    pub page_size: u32,
    /// Transformer layers.
    pub layers: u32,
    /// KV heads of each rank.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Pages of the pool.
    pub pages: u32,
    /// Element type: 0 f32, 1 f16, 2 bf16. The receiver refuses other numbers.
    pub dtype: u32,
    /// Bytes from a page to the next.
    pub page_stride: u64,
    /// Bytes from a layer to the next.
    pub layer_stride: u64,
    /// Bytes from keys to values.
    pub kv_stride: u64,
    /// Bytes from a KV head to the next.
    pub head_stride: u64,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Bytes from a rank's region to the next.
    pub rank_stride: u64,
    /// Tensor-parallel ranks, 1 to [`limits::RANKS_MAX`]; one region holds them all.
    pub ranks: u32,
    /// KV heads of the model; at least 1.
    pub model_kv_heads: u32,
}

impl KvLayoutClaim {
    /// Bytes from the region's beginning to the end of its last element, with elements of
    /// `element_bytes`. `None` beyond 64 bits. A region must be at least as long.
    pub fn extent(&self, element_bytes: u64) -> Option<u64> {
        let steps = [
            (self.pages, self.page_stride),
            (self.layers, self.layer_stride),
            (2, self.kv_stride),
            (self.kv_heads, self.head_stride),
            (self.page_size, self.token_stride),
            (self.ranks, self.rank_stride),
        ];
        let head = u64::from(self.head_dim).checked_mul(element_bytes);
        steps.into_iter().try_fold(head?, |extent, (count, stride)| {
            extent.checked_add(u64::from(count).checked_sub(1)?.checked_mul(stride)?)
        })
    }

    /// The claim, if its counts can be those of a layout.
    ///
    /// # Errors
    /// A count is zero, or there are too many ranks.
    pub fn checked(self) -> Result<KvLayoutClaim, MessageError> {
        within("page size", self.page_size, 1..=u32::MAX.into())?;
        within("layers", self.layers, 1..=u32::MAX.into())?;
        within("KV heads", self.kv_heads, 1..=u32::MAX.into())?;
        within("head size", self.head_dim, 1..=u32::MAX.into())?;
        within("pages", self.pages, 1..=u32::MAX.into())?;
        within("ranks", self.ranks, 1..=limits::RANKS_MAX as u64)?;
        within("KV heads of the model", self.model_kv_heads, 1..=u32::MAX.into())?;
        Ok(self)
    }
}

/// A peer's description of its aux slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct AuxLayoutClaim {
    /// Version of the record.
    pub version: u32,
    /// Bytes of a record.
    pub record_bytes: u32,
    /// Records.
    pub slots: u32,
}

/// Lengths in bytes of a rank's regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RegionLengths {
    /// KV pool.
    pub kv: u64,
    /// Aux slots.
    pub aux: u64,
    /// Notice ring.
    pub notice: u64,
}

/// One process of the sender with the ranks that it holds: its regions and their transports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rank {
    /// Its regions.
    pub regions: RegionLengths,
    /// Lanes that it requests (Announce) or will use (Welcome); at least 1.
    pub lanes: u16,
    /// Shared memory, if offered.
    pub shm: Option<ShmGrant>,
    /// Queue pairs and keys, if offered.
    pub rdma: Option<RdmaGrant>,
    /// Streams, if offered.
    pub tcp: Option<TcpGrant>,
    /// Whether it takes part in tests that transfer no bytes.
    pub fake: bool,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RankBody {
    regions: RegionLengths,
    /// One bit per transport, at its number.
    transports: u32,
    lanes: u16,
    tcp_port: u16,
    tcp_ip: [u8; 16],
    tcp_token: Token,
    host: HostId,
    shm_token: Token,
    shm_name: [u8; SocketName::MAX],
    shm_name_len: u16,
    pad: [u8; 6],
    rdma: RdmaGrant,
}

impl Rank {
    /// Whether the rank offers this transport.
    pub fn offers(&self, transport: Transport) -> bool {
        match transport {
            Transport::Shm => self.shm.is_some(),
            Transport::Rdma => self.rdma.is_some(),
            Transport::Tcp => self.tcp.is_some(),
            Transport::Fake => self.fake,
        }
    }

    fn parse(body: &RankBody) -> Result<Rank, MessageError> {
        let offers = |transport: Transport| body.transports & transport.bit() != 0;
        within("lanes", body.lanes, 1..=limits::LANES_MAX as u64)?;
        let shm = if offers(Transport::Shm) {
            let len = usize::from(body.shm_name_len);
            let socket = body.shm_name.get(..len).and_then(SocketName::new);
            let socket = socket.ok_or(MessageError::Content { what: "socket name", len })?;
            Some(ShmGrant { host: body.host, socket, token: body.shm_token })
        } else {
            None
        };
        let tcp = if offers(Transport::Tcp) {
            within("data port", body.tcp_port, 1..=u16::MAX.into())?;
            let ip = Ipv6Addr::from(body.tcp_ip).to_canonical();
            Some(TcpGrant { address: SocketAddr::new(ip, body.tcp_port), token: body.tcp_token })
        } else {
            None
        };
        let rdma = offers(Transport::Rdma).then_some(body.rdma);
        if let Some(rdma) = &rdma {
            rdma.check(body.regions.kv)?;
        }
        let fake = offers(Transport::Fake);
        Ok(Rank { regions: body.regions, lanes: body.lanes, shm, rdma, tcp, fake })
    }

    fn body(&self) -> RankBody {
        let mut body = RankBody { regions: self.regions, lanes: self.lanes, ..RankBody::zeroed() };
        for transport in Transport::ALL {
            body.transports |= if self.offers(transport) { transport.bit() } else { 0 };
        }
        if let Some(shm) = &self.shm {
            (body.host, body.shm_token) = (shm.host, shm.token);
            (body.shm_name, body.shm_name_len) = (shm.socket.bytes, shm.socket.len.into());
        }
        if let Some(rdma) = self.rdma {
            body.rdma = rdma;
        }
        if let Some(tcp) = &self.tcp {
            let ip = match tcp.address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            (body.tcp_ip, body.tcp_port, body.tcp_token) =
                (ip.octets(), tcp.address.port(), tcp.token);
        }
        body
    }
}

/// The first body of both Announce and Welcome.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SessionBody {
    session: SessionGeneration,
    ranks: u16,
    /// Welcome: the chosen transport.
    transport: u8,
    /// Welcome since minor 2: 1 if the source wants to allocate late. Zero before.
    late: u8,
}

/// The first body of Announce.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AnnounceBody {
    session: SessionBody,
    /// Since minor 3.
    bit_class: BitClass,
}

fn read_session(body: &[u8], what: &'static str) -> Result<SessionBody, MessageError> {
    let body: SessionBody = read_body(body, what)?;
    within("session", body.session.0, 1..=u32::MAX.into())?;
    within("ranks", body.ranks, 1..=limits::RANKS_MAX as u64)?;
    Ok(body)
}

/// Reads `count` ranks: the parts from `first` to the end of the message.
fn read_ranks(parts: Parts<'_>, first: usize, count: u16) -> Result<Vec<Rank>, MessageError> {
    exactly(parts, first + usize::from(count))?;
    (first..parts.len()).map(|index| Rank::parse(&read_part(parts, index, "rank")?)).collect()
}

fn write_ranks(ranks: &[Rank], out: &mut Multipart) {
    ranks.iter().for_each(|rank| out.push(bytemuck::bytes_of(&rank.body())));
}

/// The destination describes itself to a source; parts: session, fingerprint, KV, aux, ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Announce {
    /// Counted by the destination from 1; it ends sessions with a lower number.
    pub session: SessionGeneration,
    /// Values that both sides must share.
    pub fingerprint: Fingerprint,
    /// The class of its kernels.
    pub bit_class: BitClass,
    /// KV layout, the same on each rank.
    pub kv: KvLayoutClaim,
    /// Layout of the aux slots.
    pub aux: AuxLayoutClaim,
    /// 1 to [`RANKS_MAX`](limits::RANKS_MAX), rank 0 first.
    pub ranks: Vec<Rank>,
}

impl Announce {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Announce, MessageError> {
        let session = read_session(body, "Announce")?;
        let bit_class = match body.len() == size_of::<SessionBody>() {
            true => BitClass::UNKNOWN,
            false => read_body::<AnnounceBody>(body, "Announce")?.bit_class,
        };
        if !bit_class.is_sound() {
            return Err(MessageError::Content { what: "bit class", len: size_of::<BitClass>() });
        }
        Ok(Announce {
            session: session.session,
            fingerprint: read_part(parts, 1, "fingerprint")?,
            bit_class,
            kv: read_part::<KvLayoutClaim>(parts, 2, "KV layout")?.checked()?,
            aux: read_part(parts, 3, "aux layout")?,
            ranks: read_ranks(parts, 4, session.ranks)?,
        })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        let ranks = self.ranks.len() as u16;
        let session = SessionBody { session: self.session, ranks, transport: 0, late: 0 };
        match self.bit_class.is_known() {
            true => write_body(&AnnounceBody { session, bit_class: self.bit_class }, out),
            // As minor 2 wrote it.
            false => write_body(&session, out),
        }
        out.end_part();
        out.push(bytemuck::bytes_of(&self.fingerprint));
        out.push(bytemuck::bytes_of(&self.kv));
        out.push(bytemuck::bytes_of(&self.aux));
        write_ranks(&self.ranks, out);
    }
}

/// The source accepts the session; parts: session, KV, ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// The number in the Announce.
    pub session: SessionGeneration,
    /// The transport that the source has chosen.
    pub transport: Transport,
    /// The source computes before the destination has pages: Interest comes first, and Destination
    /// after Ready.
    pub late: bool,
    /// The source's KV layout, the same on each rank.
    pub kv: KvLayoutClaim,
    /// The source's ranks, its half of the session.
    pub ranks: Vec<Rank>,
}

impl Welcome {
    pub(super) fn parse(body: &[u8], parts: Parts<'_>) -> Result<Welcome, MessageError> {
        let body = read_session(body, "Welcome")?;
        let transport = Transport::from_number(body.transport);
        Ok(Welcome {
            session: body.session,
            transport: transport
                .ok_or(MessageError::Value { what: "transport", value: body.transport.into() })?,
            late: body.late != 0,
            kv: read_part::<KvLayoutClaim>(parts, 1, "KV layout")?.checked()?,
            ranks: read_ranks(parts, 2, body.ranks)?,
        })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        let (ranks, transport) = (self.ranks.len() as u16, self.transport as u8);
        write_body(
            &SessionBody { session: self.session, ranks, transport, late: self.late.into() },
            out,
        );
        out.end_part();
        out.push(bytemuck::bytes_of(&self.kv));
        write_ranks(&self.ranks, out);
    }
}

/// Why a session is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Another model, or other kernels: 1.
    Model,
    /// The KV layouts cannot be combined: 2.
    KvLayout,
    /// Aux records differ: 3.
    AuxLayout,
    /// No transport in common, or it could not be set up: 4.
    Transport,
    /// Ranks or lanes do not match: 5.
    Ranks,
    /// The source is full or draining: 6.
    Busy,
    /// A reason of a later version.
    Other(u16),
}

impl Refusal {
    fn from_number(number: u16) -> Refusal {
        match number {
            1 => Refusal::Model,
            2 => Refusal::KvLayout,
            3 => Refusal::AuxLayout,
            4 => Refusal::Transport,
            5 => Refusal::Ranks,
            6 => Refusal::Busy,
            other => Refusal::Other(other),
        }
    }

    fn number(self) -> u16 {
        match self {
            Refusal::Model => 1,
            Refusal::KvLayout => 2,
            Refusal::AuxLayout => 3,
            Refusal::Transport => 4,
            Refusal::Ranks => 5,
            Refusal::Busy => 6,
            Refusal::Other(number) => number,
        }
    }
}

/// The source refuses the session; parts: session and reason, field, both values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused<'a> {
    /// The number in the Announce.
    pub session: SessionGeneration,
    /// The kind of reason.
    pub reason: Refusal,
    /// The field that differs.
    pub field: &'a str,
    /// Its value at the source, which refuses.
    pub source: &'a str,
    /// Its value in the Announce.
    pub destination: &'a str,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct RefusedBody {
    session: SessionGeneration,
    reason: u16,
    pad: u16,
}

impl<'a> Refused<'a> {
    pub(super) fn parse(body: &[u8], parts: Parts<'a>) -> Result<Refused<'a>, MessageError> {
        exactly(parts, 4)?;
        let body: RefusedBody = read_body(body, "Refused")?;
        within("session", body.session.0, 1..=u32::MAX.into())?;
        Ok(Refused {
            session: body.session,
            reason: Refusal::from_number(body.reason),
            field: read_text(parts, 1, "field")?,
            source: read_text(parts, 2, "source's value")?,
            destination: read_text(parts, 3, "destination's value")?,
        })
    }

    pub(super) fn write(&self, out: &mut Multipart) {
        write_body(
            &RefusedBody { session: self.session, reason: self.reason.number(), pad: 0 },
            out,
        );
        out.end_part();
        [self.field, self.source, self.destination]
            .into_iter()
            .for_each(|text| write_text(text, out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claimed_layout_ends_at_its_last_element_and_never_wraps() {
        // Page-major: 3 pages of 2 layers, K and V, 2 heads, 4 tokens, 8 elements of 2 bytes.
        let claim = KvLayoutClaim {
            page_size: 4,
            layers: 2,
            kv_heads: 2,
            head_dim: 8,
            pages: 3,
            dtype: 2,
            page_stride: 512,
            layer_stride: 256,
            kv_stride: 128,
            head_stride: 64,
            token_stride: 16,
            rank_stride: 2000,
            ranks: 1,
            model_kv_heads: 2,
        };
        assert_eq!(claim.extent(2), Some(3 * 512));
        assert_eq!(KvLayoutClaim { ranks: 3, ..claim }.extent(2), Some(2 * 2000 + 3 * 512));
        assert_eq!(KvLayoutClaim { ranks: 3, rank_stride: u64::MAX / 2, ..claim }.extent(2), None);
        assert_eq!(KvLayoutClaim { page_stride: u64::MAX / 2, ..claim }.extent(2), None);
        assert_eq!(KvLayoutClaim { layers: 0, ..claim }.extent(2), None);
        for bad in [
            KvLayoutClaim { pages: 0, ..claim },
            KvLayoutClaim { ranks: 0, ..claim },
            KvLayoutClaim { ranks: 1 + limits::RANKS_MAX as u32, ..claim },
            KvLayoutClaim { model_kv_heads: 0, ..claim },
        ] {
            assert!(bad.checked().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn fingerprints_name_the_field_that_differs() {
        let ours = Fingerprint::zeroed();
        let theirs = Fingerprint { tokenizer: [1; 32], template: [1; 32], ..ours };
        assert_eq!(ours.difference(&ours), None);
        assert_eq!(ours.difference(&theirs).unwrap().0, "tokenizer");
    }

    #[test]
    fn secrets_do_not_print() {
        assert_eq!(format!("{:?}", Token([77; 16])), "Token(..)");
    }
}
