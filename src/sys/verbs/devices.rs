//! The available devices, with their ports and addresses. Each device is opened, queried and
//! closed.
#![allow(unsafe_code)]

use super::abi::{self, DeviceAttr, Gid, GidEntry, PortAttr};
use super::device::{Device, Listed, done, text};
use super::library::Unavailable;
use std::ffi::{c_int, c_uint};
use std::net::Ipv6Addr;
use std::{fmt, io};

/// An RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// The name in `ibv_devices`.
    pub name: String,
    /// Version of the firmware; often empty for a software device.
    pub firmware: String,
    /// Maximum bytes of a region.
    pub max_region: u64,
    /// Maximum work requests of a queue.
    pub max_work_requests: u32,
    /// Maximum local pieces of a work request.
    pub max_pieces: u32,
    /// Ports, numbered from 1.
    pub ports: Vec<PortInfo>,
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortInfo {
    /// Its number.
    pub number: u8,
    /// Whether it carries traffic.
    pub active: bool,
    /// The link layer.
    pub link: LinkLayer,
    /// Bytes of a packet's payload, as currently active.
    pub mtu: u32,
    /// The address on InfiniBand, assigned by the subnet manager; 0 elsewhere.
    pub lid: u16,
    /// The GID table without its empty entries.
    pub addresses: Vec<PortGid>,
}

/// The link layer of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// InfiniBand's own link layer.
    InfiniBand,
    /// RoCE.
    Ethernet,
    /// Another one, by its number.
    Other(u8),
}

/// An entry of a port's GID table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortGid {
    /// Its index in the table.
    pub index: u32,
    /// Its type.
    pub kind: GidKind,
    /// The GID, which is an IPv6 address; for RoCE over IPv4 a mapped one.
    pub gid: Ipv6Addr,
}

/// The packet format of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidKind {
    /// On InfiniBand.
    InfiniBand,
    /// On Ethernet, within a subnet.
    RoceV1,
    /// In UDP, routable.
    RoceV2,
    /// Another one, by its number.
    Other(u32),
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GidKind::InfiniBand => f.write_str("InfiniBand"),
            GidKind::RoceV1 => f.write_str("RoCE v1"),
            GidKind::RoceV2 => f.write_str("RoCE v2"),
            GidKind::Other(number) => write!(f, "type {number}"),
        }
    }
}

/// A device that exists but cannot be queried.
#[derive(Debug)]
pub struct Closed {
    /// The name in `ibv_devices`.
    pub name: String,
    /// The reason.
    pub error: io::Error,
}

/// All devices, in the library's order.
///
/// # Errors
/// The verbs library is not available.
pub fn list() -> Result<Vec<Result<DeviceInfo, Closed>>, Unavailable> {
    let listed = Listed::get()?;
    let found = listed.devices().map(|device| {
        let name = listed.name(device);
        // SAFETY: the device belongs to a list that is still held.
        let opened = unsafe { Device::open_listed(listed.library, device, name.clone()) };
        opened.and_then(|device| describe(&device)).map_err(|error| Closed { name, error })
    });
    Ok(found.collect())
}

impl Device {
    /// The current limits of the device, with its ports and their addresses.
    pub fn info(&self) -> io::Result<DeviceInfo> {
        describe(self)
    }

    /// Whether a port (from 1) is up now.
    pub fn is_active(&self, port: u8) -> io::Result<bool> {
        is_active(self, port)
    }
}

/// Queries a device.
pub(super) fn describe(device: &Device) -> io::Result<DeviceInfo> {
    // SAFETY: the struct holds plain numbers and arrays of them, and zeros are valid values.
    let mut attr: DeviceAttr = unsafe { std::mem::zeroed() };
    // SAFETY: the device is open, and `attr` is writable.
    done(unsafe { (device.library.query_device)(device.context, &mut attr) })?;
    // SAFETY: the array is part of `attr`; the library ends it with 0.
    let firmware = unsafe { text(attr.fw_ver.as_ptr()) };
    let ports =
        (1..=attr.phys_port_cnt).map(|number| port(device, number)).collect::<io::Result<_>>()?;
    let count = |value: c_int| u32::try_from(value).unwrap_or(0);
    Ok(DeviceInfo {
        name: device.name().into(),
        firmware,
        max_region: attr.max_mr_size,
        max_work_requests: count(attr.max_qp_wr),
        max_pieces: count(attr.max_sge),
        ports,
    })
}

/// Whether a port is up now.
pub(super) fn is_active(device: &Device, port: u8) -> io::Result<bool> {
    Ok(query(device, port)?.state == abi::PORT_ACTIVE)
}

fn query(device: &Device, number: u8) -> io::Result<PortAttr> {
    // SAFETY: the struct holds plain numbers, and zeros are valid values.
    let mut attr: PortAttr = unsafe { std::mem::zeroed() };
    // SAFETY: the device is open, the port is one of its own, and `attr` is writable. Old libraries
    // fill the beginning of it, newer ones all.
    done(unsafe { (device.library.query_port)(device.context, number, &mut attr) })?;
    Ok(attr)
}

fn port(device: &Device, number: u8) -> io::Result<PortInfo> {
    let attr = query(device, number)?;
    let link = match c_uint::from(attr.link_layer) {
        abi::LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
        abi::LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
        _ => LinkLayer::Other(attr.link_layer),
    };
    let mtu = match attr.active_mtu {
        known @ abi::MTU_256..=abi::MTU_4096 => 128 << known,
        _ => 0,
    };
    let addresses = addresses(device, number)?;
    Ok(PortInfo {
        number,
        active: attr.state == abi::PORT_ACTIVE,
        link,
        mtu,
        lid: attr.lid,
        addresses,
    })
}

fn addresses(device: &Device, port: u8) -> io::Result<Vec<PortGid>> {
    /// Maximum entries of all ports together; common devices have 256 each. The kernel receives the
    /// size of the table in 16 bits and refuses a larger one.
    const ENTRIES_MAX: usize = 2047;
    const _: () = assert!(ENTRIES_MAX * size_of::<GidEntry>() <= u16::MAX as usize);
    let empty = GidEntry {
        gid: Gid { raw: [0; 16] },
        gid_index: 0,
        port_num: 0,
        gid_type: 0,
        ndev_ifindex: 0,
    };
    let mut table = vec![empty; ENTRIES_MAX];
    // SAFETY: the device is open, and the table has room for the given number of entries of the
    // given size.
    let filled = unsafe {
        (device.library.query_gid_table)(
            device.context,
            table.as_mut_ptr(),
            table.len(),
            0,
            size_of::<GidEntry>(),
        )
    };
    let filled = usize::try_from(filled)
        .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-filled).unwrap_or(libc::EIO)))?;
    let own =
        table[..filled.min(ENTRIES_MAX)].iter().filter(|entry| entry.port_num == u32::from(port));
    let addresses = own.map(|entry| PortGid {
        index: entry.gid_index,
        kind: match entry.gid_type {
            abi::GID_TYPE_IB => GidKind::InfiniBand,
            abi::GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            abi::GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            other => GidKind::Other(other),
        },
        gid: Ipv6Addr::from(entry.gid.raw),
    });
    Ok(addresses.collect())
}
