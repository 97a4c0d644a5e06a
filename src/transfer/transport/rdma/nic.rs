//! Which NIC, port and address a worker uses, and why.

use crate::sys::verbs::{self, Address, AddressKind, Device, DeviceInfo, PortInfo, Route};
use std::sync::Arc;

/// A NIC that can be used.
#[derive(Clone, Debug)]
pub struct Nic {
    /// Open.
    pub device: Arc<Device>,
    /// Port and address.
    pub route: Route,
    /// What was chosen, for people.
    pub chosen: String,
}

impl Nic {
    /// The first device with an active port, by the best of that port's addresses.
    ///
    /// # Errors
    /// There is none, and why.
    pub fn choose() -> Result<Nic, String> {
        let devices = verbs::list().map_err(|error| error.to_string())?;
        let mut why = "no RDMA device".to_string();
        for device in devices {
            let found = match device {
                Ok(device) => usable(&device).map(|(port, address)| (device.name, port, address)),
                Err(closed) => Err(format!("{} cannot be opened: {}", closed.name, closed.error)),
            };
            match found.and_then(|(name, port, address)| Nic::open(&name, &port, &address)) {
                Ok(nic) => return Ok(nic),
                Err(reason) => why = reason,
            }
        }
        Err(why)
    }

    fn open(name: &str, port: &PortInfo, address: &Address) -> Result<Nic, String> {
        let device = Device::open(name).map_err(|error| format!("{name}: {error}"))?;
        let chosen = format!(
            "{name} port {}, {} {} (entry {}), packets of {} bytes",
            port.number, address.kind, address.gid, address.index, port.mtu
        );
        Ok(Nic { device, route: Route::new(port, address), chosen })
    }
}

/// A device's first active port, and its best address.
fn usable(device: &DeviceInfo) -> Result<(PortInfo, Address), String> {
    let port = device.ports.iter().find(|port| port.active);
    let port = port.ok_or_else(|| format!("{}: no port is active", device.name))?;
    let address =
        port.addresses.iter().max_by_key(|address| (worth(address), std::cmp::Reverse(address.index)));
    let address = address.ok_or_else(|| format!("{}: port {} has no address", device.name, port.number))?;
    Ok((port.clone(), address.clone()))
}

/// Packets of RoCE v2 are routed, those of an IPv4 address everywhere; a link's own addresses reach nobody else.
fn worth(address: &Address) -> u8 {
    match address.kind {
        AddressKind::RoceV2 if address.gid.to_ipv4_mapped().is_some() => 4,
        AddressKind::InfiniBand => 4,
        AddressKind::RoceV2 if !address.gid.is_unicast_link_local() => 3,
        AddressKind::RoceV2 => 2,
        AddressKind::RoceV1 => 1,
        AddressKind::Other(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::LinkLayer;

    fn device(active: bool, addresses: &[(AddressKind, &str)]) -> DeviceInfo {
        let address = |(index, &(kind, gid)): (usize, &(AddressKind, &str))| Address {
            index: index as u32,
            kind,
            gid: gid.parse().unwrap(),
        };
        let port = PortInfo {
            number: 1,
            active,
            link: LinkLayer::Ethernet,
            mtu: 1024,
            lid: 0,
            addresses: addresses.iter().enumerate().map(address).collect(),
        };
        DeviceInfo {
            name: "nic0".into(),
            firmware: String::new(),
            max_region: u64::MAX,
            max_work_requests: 1,
            max_pieces: 1,
            ports: vec![port],
        }
    }

    #[test]
    fn routed_addresses_come_first() {
        let all = [
            (AddressKind::RoceV1, "fe80::1"),
            (AddressKind::RoceV2, "fe80::1"),
            (AddressKind::RoceV1, "::ffff:10.9.0.1"),
            (AddressKind::RoceV2, "::ffff:10.9.0.1"),
            (AddressKind::RoceV2, "::ffff:10.9.0.2"),
        ];
        let chosen = |addresses: &[_]| usable(&device(true, addresses)).unwrap().1.index;
        assert_eq!([chosen(&all), chosen(&all[..3]), chosen(&all[..1])], [3, 1, 0]);
        assert!(usable(&device(false, &all)).unwrap_err().contains("no port is active"));
        assert!(usable(&device(true, &[])).unwrap_err().contains("no address"));
    }
}
