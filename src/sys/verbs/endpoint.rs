//! The two ends of a connection between queue pairs, as plain data. [`Endpoint`] goes to the peer;
//! [`Route`] has the local settings.

use super::devices::{PortGid, PortInfo};

/// One end, as the other end must know it. It holds no secret and is not trusted: a wrong value
/// only makes the connection fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Number of the queue pair, 24 bits.
    pub number: u32,
    /// Sequence number of the first outgoing packet, 24 bits. It is new for each connection, so
    /// that the NIC recognises packets of an earlier connection.
    pub sequence: u32,
    /// GID of the port.
    pub gid: [u8; 16],
    /// LID of the port on InfiniBand; else 0.
    pub lid: u16,
    /// Bytes of a packet's payload on this port.
    pub mtu: u16,
}

/// The local end of a connection: port, address and timeouts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// The port, from 1.
    pub port: u8,
    /// Bytes of a packet's payload. The connection uses the smaller value of both ends.
    pub mtu: u16,
    /// LID, on InfiniBand.
    pub lid: u16,
    /// Index of `gid` in the port's table.
    pub gid_index: u8,
    /// The local address.
    pub gid: [u8; 16],
    /// The byte of DSCP and ECN of RoCE v2.
    pub traffic_class: u8,
    /// Time until an unanswered packet is retransmitted: 4.096 µs · 2^n. NICs may multiply it.
    pub timeout: u8,
    /// Maximum retransmissions, up to 6. NICs also take 7, but soft-RoCE then never gives up.
    pub retries: u8,
    /// Maximum retries if the peer has no receive posted, up to 6; 7: unlimited.
    pub receive_retries: u8,
}

impl Route {
    /// A route from an address of a port. It has six retries, one each 67 ms. A lost peer is
    /// detected within half a second, or within two seconds if the NIC multiplies the timeout. The
    /// wait for a peer's receive is unlimited.
    pub fn new(port: &PortInfo, address: &PortGid) -> Route {
        Route {
            port: port.number,
            mtu: u16::try_from(port.mtu).unwrap_or(0),
            lid: port.lid,
            gid_index: u8::try_from(address.index).unwrap_or(u8::MAX),
            gid: address.gid.octets(),
            traffic_class: 0,
            timeout: 14,
            retries: 6,
            receive_retries: 7,
        }
    }
}
