//! The two ends of a way between queue pairs, as plain data: what a peer is told, and what is ours to choose.

use super::devices::{Address, PortInfo};

/// One end, as the other must know it. Nothing in it is a secret or is trusted: a wrong one leads nowhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endpoint {
    /// Of the queue pair, 24 bit.
    pub number: u32,
    /// Of the first packet that leaves it, 24 bit; fresh for each connection, so that a packet of an earlier
    /// one is told apart.
    pub sequence: u32,
    /// Of the port.
    pub gid: [u8; 16],
    /// Of the port, on InfiniBand; else 0.
    pub lid: u16,
    /// Bytes of a packet's payload that the port carries.
    pub mtu: u16,
}

/// Our end of a way: port, address and how patiently it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// The port, from 1.
    pub port: u8,
    /// Bytes of a packet's payload; the smaller of both ends' is used.
    pub mtu: u16,
    /// On InfiniBand.
    pub lid: u16,
    /// Place of `gid` in the port's table.
    pub gid_index: u8,
    /// Our address.
    pub gid: [u8; 16],
    /// Byte of DSCP and ECN of RoCE v2.
    pub traffic_class: u8,
    /// 4.096 µs · 2^n until an unanswered packet is sent again. NICs may multiply it.
    pub timeout: u8,
    /// How often it is sent again, up to 6. NICs take 7, too, but soft-RoCE then never gives up.
    pub retries: u8,
    /// How often where the peer had no receive, up to 6; 7: without end.
    pub receive_retries: u8,
}

impl Route {
    /// By an address of a port. Six retries, each after 67 ms: an end that is gone is noticed within half a
    /// second, or two where the NIC multiplies; and a peer is waited for until it has a receive.
    pub fn new(port: &PortInfo, address: &Address) -> Route {
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
