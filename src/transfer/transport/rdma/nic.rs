//! The choice of a worker's NICs, ports and addresses.

use crate::sys::host::HostFiles;
use crate::sys::topology::{Cpu, node_of_nic};
use crate::sys::verbs::{self, Device, DeviceInfo, GidKind, PortGid, PortInfo, Route};
use crate::wire::message::RdmaGrant;
use std::sync::Arc;

/// A NIC that can be used.
#[derive(Clone, Debug)]
pub struct Nic {
    /// The open device.
    pub device: Arc<Device>,
    /// Port and address.
    pub route: Route,
    /// Index among all devices of the host, sorted by name. Hosts with equal hardware have equal
    /// numbers.
    pub number: u16,
    /// The NUMA node, if it is known.
    pub node: Option<u32>,
    /// Description of the choice, for logs.
    pub chosen: String,
}

/// A device that could be used.
struct Candidate {
    number: u16,
    name: String,
    port: PortInfo,
    address: PortGid,
    node: Option<u32>,
}

impl Nic {
    /// Chooses devices with an active port, and the best address of each port. It chooses at most
    /// as many as a session can use. `names` limits the choice to these devices. Without names, it
    /// chooses devices on the NUMA node of all `cores`, and others only if none of these opens.
    ///
    /// # Errors
    /// The reason, if no device can be used.
    pub fn choose(names: &[String], cores: &[usize]) -> Result<Vec<Nic>, String> {
        let host = HostFiles::at("/");
        let mut why = "no RDMA device".to_string();
        let mut listed: Vec<_> = verbs::list()
            .map_err(|error| error.to_string())?
            .into_iter()
            .map(|device| match device {
                Ok(device) => (device.name.clone(), usable(&device)),
                Err(closed) => {
                    let reason = format!("{} cannot be opened: {}", closed.name, closed.error);
                    (closed.name, Err(reason))
                }
            })
            .collect();
        listed.sort_by(|(a, _), (b, _)| natural(a).cmp(&natural(b)));
        if let Some(unknown) =
            names.iter().find(|name| listed.iter().all(|(found, _)| found != *name))
        {
            return Err(format!("there is no device {unknown}"));
        }
        let mut found = Vec::new();
        for (number, (name, usable)) in (0u16..).zip(listed) {
            match usable {
                _ if !names.is_empty() && !names.contains(&name) => {}
                Ok((port, address)) => {
                    let node = node_of_nic(&host, &name);
                    found.push(Candidate { number, name, port, address, node });
                }
                Err(reason) => why = reason,
            }
        }
        let here = if names.is_empty() { node_of_cores(&host, cores) } else { None };
        let mut nics = Vec::new();
        // Devices of other nodes are used only if no near device opens.
        for candidates in nearest(found, here, |candidate| candidate.node) {
            for candidate in candidates {
                match candidate.open() {
                    Ok(nic) => nics.push(nic),
                    Err(reason) => why = reason,
                }
            }
            if !nics.is_empty() {
                nics.truncate(RdmaGrant::RAILS_MAX);
                return Ok(nics);
            }
        }
        Err(why)
    }

    /// Descriptions of several NICs, for logs.
    pub fn list(nics: &[Nic]) -> String {
        nics.iter().map(|nic| nic.chosen.as_str()).collect::<Vec<_>>().join("; ")
    }
}

impl Candidate {
    fn open(self) -> Result<Nic, String> {
        let Candidate { number, name, port, address, node } = self;
        let device = Device::open(&name).map_err(|error| format!("{name}: {error}"))?;
        let shown = node.map_or(String::new(), |node| format!(", NUMA node {node}"));
        let chosen = format!(
            "{name} port {}, {} {} (entry {}), packets of {} bytes{shown}",
            port.number, address.kind, address.gid, address.index, port.mtu
        );
        Ok(Nic { device, route: Route::new(&port, &address), number, node, chosen })
    }
}

/// The NUMA node of all `cores`; None if they are on several nodes, or it is unknown.
fn node_of_cores(host: &HostFiles, cores: &[usize]) -> Option<u32> {
    let mut nodes = cores.iter().map(|&core| Cpu::of(host, core).node);
    let first = nodes.next()??;
    nodes.all(|node| node == Some(first)).then_some(first)
}

/// The items on the node `here`, then the others.
fn nearest<T>(all: Vec<T>, here: Option<u32>, node: impl Fn(&T) -> Option<u32>) -> [Vec<T>; 2] {
    let (near, far) = all.into_iter().partition(|one| here.is_some() && node(one) == here);
    [near, far]
}

/// Sort key: `mlx5_10` comes behind `mlx5_9`.
fn natural(name: &str) -> (&str, u64) {
    let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (stem, number) = name.split_at(name.len() - digits);
    (stem, number.parse().unwrap_or(0))
}

/// A device's first active port, and its best address.
fn usable(device: &DeviceInfo) -> Result<(PortInfo, PortGid), String> {
    let port = device.ports.iter().find(|port| port.active);
    let port = port.ok_or_else(|| format!("{}: no port is active", device.name))?;
    let address = port
        .addresses
        .iter()
        .max_by_key(|address| (worth(address), std::cmp::Reverse(address.index)));
    let address =
        address.ok_or_else(|| format!("{}: port {} has no address", device.name, port.number))?;
    Ok((port.clone(), address.clone()))
}

/// Rank of an address. RoCE v2 packets are routed, and IPv4 addresses are reachable most widely. A
/// link-local address is reachable only on its own link.
fn worth(address: &PortGid) -> u8 {
    match address.kind {
        GidKind::RoceV2 if address.gid.to_ipv4_mapped().is_some() => 4,
        GidKind::InfiniBand => 4,
        GidKind::RoceV2 if !address.gid.is_unicast_link_local() => 3,
        GidKind::RoceV2 => 2,
        GidKind::RoceV1 => 1,
        GidKind::Other(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::LinkLayer;

    fn device(active: bool, addresses: &[(GidKind, &str)]) -> DeviceInfo {
        let address = |(index, &(kind, gid)): (usize, &(GidKind, &str))| PortGid {
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
    fn nics_of_this_node_come_first_and_in_order() {
        let all = || vec![("a", Some(1)), ("b", Some(0)), ("c", None), ("d", Some(1))];
        let names = |here| {
            let parts = nearest(all(), here, |&(_, node)| node);
            parts.map(|part| part.iter().map(|one| one.0).collect::<String>()).join(" ")
        };
        let all = [names(Some(1)), names(Some(0)), names(Some(2)), names(None)];
        assert_eq!(all, ["ad bc", "b acd", " abcd", " abcd"]);
        let mut devices = ["mlx5_10", "mlx5_9", "bnxt_re0", "mlx5_1", "rxe"];
        devices.sort_by(|a, b| natural(a).cmp(&natural(b)));
        assert_eq!(devices, ["bnxt_re0", "mlx5_1", "mlx5_9", "mlx5_10", "rxe"]);
    }

    #[test]
    fn cores_have_a_node_if_all_are_on_it() {
        let root = std::env::temp_dir().join(format!("baton-nodes-{}", std::process::id()));
        for (core, node) in [(3, 1), (4, 1), (5, 0)] {
            let folder = format!("sys/devices/system/cpu/cpu{core}/node{node}");
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        let host = HostFiles::at(&root);
        let nodes =
            [&[3][..], &[3, 4], &[3, 5], &[3, 9], &[]].map(|cores| node_of_cores(&host, cores));
        assert_eq!(nodes, [Some(1), Some(1), None, None, None]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn routed_addresses_come_first() {
        let all = [
            (GidKind::RoceV1, "fe80::1"),
            (GidKind::RoceV2, "fe80::1"),
            (GidKind::RoceV1, "::ffff:10.9.0.1"),
            (GidKind::RoceV2, "::ffff:10.9.0.1"),
            (GidKind::RoceV2, "::ffff:10.9.0.2"),
        ];
        let chosen = |addresses: &[_]| usable(&device(true, addresses)).unwrap().1.index;
        assert_eq!([chosen(&all), chosen(&all[..3]), chosen(&all[..1])], [3, 1, 0]);
        assert!(usable(&device(false, &all)).unwrap_err().contains("no port is active"));
        assert!(usable(&device(true, &[])).unwrap_err().contains("no address"));
    }
}
