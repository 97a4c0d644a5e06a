//! What devices there are, with their ports and addresses: opened to be asked, then closed.
#![allow(unsafe_code)]

use super::abi::{self, DeviceAttr, Gid, GidEntry, ListedDevice, PortAttr};
use super::device::{Device, done};
use super::library::{Library, Unavailable};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::io;
use std::net::Ipv6Addr;

/// An RDMA device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// As `ibv_devices` calls it.
    pub name: String,
    /// Of the firmware; of a device in software often empty.
    pub firmware: String,
    /// Bytes that one region may have.
    pub max_region: u64,
    /// Work requests that a queue may hold.
    pub max_work_requests: u32,
    /// Local pieces of one work request.
    pub max_pieces: u32,
    /// Counted from 1.
    pub ports: Vec<PortInfo>,
}

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortInfo {
    /// Its number.
    pub number: u8,
    /// Whether it carries traffic.
    pub active: bool,
    /// What is below.
    pub link: LinkLayer,
    /// Bytes of a packet's payload, as the link has them now.
    pub mtu: u32,
    /// Its address on InfiniBand, given by the subnet manager; 0 elsewhere.
    pub lid: u16,
    /// Its table, without entries that are empty.
    pub addresses: Vec<Address>,
}

/// What carries the packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// Of its own.
    InfiniBand,
    /// RoCE.
    Ethernet,
    /// Another one, by its number.
    Other(u8),
}

/// An entry of a port's table of GIDs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Address {
    /// Its place in the table.
    pub index: u32,
    /// How it travels.
    pub kind: AddressKind,
    /// The GID, which is an IPv6 address; of RoCE over IPv4 a mapped one.
    pub gid: Ipv6Addr,
}

/// How packets to an address look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressKind {
    /// On InfiniBand.
    InfiniBand,
    /// On Ethernet, within a subnet.
    RoceV1,
    /// In UDP.
    RoceV2,
    /// Another one, by its number.
    Other(u32),
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressKind::InfiniBand => f.write_str("InfiniBand"),
            AddressKind::RoceV1 => f.write_str("RoCE v1"),
            AddressKind::RoceV2 => f.write_str("RoCE v2"),
            AddressKind::Other(number) => write!(f, "type {number}"),
        }
    }
}

/// A device that is there and cannot be asked.
#[derive(Debug)]
pub struct Closed {
    /// As `ibv_devices` calls it.
    pub name: String,
    /// Why.
    pub error: io::Error,
}

/// All devices, in the library's order.
///
/// # Errors
/// There are no verbs here.
pub fn list() -> Result<Vec<Result<DeviceInfo, Closed>>, Unavailable> {
    let listed = Listed::get()?;
    let found = listed.devices().map(|device| {
        let name = listed.name(device);
        // SAFETY: a device of a list that is still held.
        let opened = unsafe { Device::open_listed(listed.library, device, name.clone()) };
        opened.and_then(|device| describe(&device)).map_err(|error| Closed { name, error })
    });
    Ok(found.collect())
}

/// The library's list of devices, freed when dropped.
pub(super) struct Listed {
    pub(super) library: &'static Library,
    devices: *mut *mut ListedDevice,
    count: usize,
}

impl Listed {
    pub(super) fn get() -> Result<Listed, Unavailable> {
        let library = Library::get()?;
        let mut count: c_int = 0;
        // SAFETY: a place for the count; the result is null or an array of that many devices.
        let devices = unsafe { (library.get_device_list)(&mut count) };
        if devices.is_null() {
            let error = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            // How a kernel without the subsystem answers.
            return match error {
                libc::ENOSYS => Ok(Listed { library, devices, count: 0 }),
                _ => Err(Unavailable::Devices(error)),
            };
        }
        Ok(Listed { library, devices, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = *mut ListedDevice> {
        // SAFETY: below the count. The device is the library's until the list is freed.
        (0..self.count).map(|index| unsafe { *self.devices.add(index) })
    }

    pub(super) fn name(&self, device: *mut ListedDevice) -> String {
        // SAFETY: a device of this list; the name is part of it.
        unsafe { text((self.library.get_device_name)(device)) }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        if !self.devices.is_null() {
            // SAFETY: as it was given, once; devices that are open stay open.
            unsafe { (self.library.free_device_list)(self.devices) };
        }
    }
}

/// What a device says of itself.
pub(super) fn describe(device: &Device) -> io::Result<DeviceInfo> {
    // SAFETY: plain numbers and arrays of them, for which zeros are values.
    let mut attr: DeviceAttr = unsafe { std::mem::zeroed() };
    // SAFETY: an open device, and a place for what it says.
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
    // SAFETY: plain numbers, for which zeros are values.
    let mut attr: PortAttr = unsafe { std::mem::zeroed() };
    // SAFETY: an open device, one of its ports, and a place for what it says: old libraries fill the
    // beginning of it, newer ones all.
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

fn addresses(device: &Device, port: u8) -> io::Result<Vec<Address>> {
    /// Of all ports together; common devices have 256 each. The kernel is told the table's bytes in 16 bits, and
    /// refuses what does not fit there.
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
    // SAFETY: an open device, room for as many entries as are told, each of the size that is told.
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
    let addresses = own.map(|entry| Address {
        index: entry.gid_index,
        kind: match entry.gid_type {
            abi::GID_TYPE_IB => AddressKind::InfiniBand,
            abi::GID_TYPE_ROCE_V1 => AddressKind::RoceV1,
            abi::GID_TYPE_ROCE_V2 => AddressKind::RoceV2,
            other => AddressKind::Other(other),
        },
        gid: Ipv6Addr::from(entry.gid.raw),
    });
    Ok(addresses.collect())
}

/// # Safety
/// Null, or a string that ends with 0.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: by the caller.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}
