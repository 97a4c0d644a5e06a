//! Findings about RDMA devices, from libibverbs and the kernel.

use super::{Diagnosis, Verdict};
use crate::sys::verbs::{
    Closed, DeviceInfo, GidKind, LINKAGE, LinkLayer, Linkage, PortInfo, Unavailable,
};
use std::fmt::Write as _;

const TOPIC: &str = "rdma";
const INSTALL: &str = match LINKAGE {
    Linkage::Contained => "use the file of `cargo build --release` with the vendor's packages",
    _ => "install libibverbs1 and ibverbs-providers, or the vendor's packages",
};

/// Findings about the devices of [`list`](crate::sys::verbs::list). `kernel` has the names in
/// `/sys/class/infiniband`.
pub fn findings(
    listed: Result<Vec<Result<DeviceInfo, Closed>>, Unavailable>,
    kernel: &[String],
) -> Vec<Diagnosis> {
    let listed = match listed {
        Err(why) if kernel.is_empty() => {
            return vec![Diagnosis::good(TOPIC, format!("no device; {why}"))];
        }
        Err(why) => {
            let found = format!("devices {}, but {why}", kernel.join(" "));
            let advice = match why {
                Unavailable::StaticBuild => {
                    "use the file of `cargo build --release` or `tools/static-build --rdma`"
                }
                _ => INSTALL,
            };
            return vec![Diagnosis::with(TOPIC, Verdict::Poor, found, advice)];
        }
        Ok(listed) => listed,
    };
    if listed.is_empty() && kernel.is_empty() {
        return vec![Diagnosis::good(TOPIC, "no device; libibverbs is available".into())];
    }
    let has = |name: &String| listed.iter().any(|device| name_of(device) == name);
    let without: Vec<&str> = kernel.iter().filter(|name| !has(name)).map(String::as_str).collect();
    let mut findings: Vec<Diagnosis> = listed.iter().map(device).collect();
    if !without.is_empty() {
        let found = format!("no provider for {}", without.join(" "));
        findings.push(Diagnosis::with(TOPIC, Verdict::Poor, found, INSTALL));
    }
    findings
}

fn name_of(device: &Result<DeviceInfo, Closed>) -> &String {
    match device {
        Ok(device) => &device.name,
        Err(closed) => &closed.name,
    }
}

fn device(device: &Result<DeviceInfo, Closed>) -> Diagnosis {
    let device = match device {
        Ok(device) => device,
        Err(Closed { name, error }) => {
            let advice = "allow this user to open /dev/infiniband/uverbs*";
            return Diagnosis::with(
                TOPIC,
                Verdict::Poor,
                format!("{name} cannot be opened: {error}"),
                advice,
            );
        }
    };
    let mut found = device.name.clone();
    if !device.firmware.is_empty() {
        let _ = write!(found, ", firmware {}", device.firmware);
    }
    let _ = write!(
        found,
        ", {} work requests of {} pieces",
        device.max_work_requests, device.max_pieces
    );
    for port in &device.ports {
        found += &shown(port);
    }
    let is_usable =
        |port: &PortInfo| port.active && port.addresses.iter().any(|address| routes(address.kind));
    match device.ports.iter().any(is_usable) {
        true => Diagnosis::good(TOPIC, found),
        false => {
            let advice = "no port is up with a RoCE v2 or InfiniBand address: bring the link up \
                          and give it an IP address";
            Diagnosis::with(TOPIC, Verdict::Poor, found, advice)
        }
    }
}

fn routes(kind: GidKind) -> bool {
    matches!(kind, GidKind::RoceV2 | GidKind::InfiniBand)
}

fn shown(port: &PortInfo) -> String {
    let state = if port.active { "up" } else { "down" };
    let link = match port.link {
        LinkLayer::InfiniBand => "InfiniBand".into(),
        LinkLayer::Ethernet => "Ethernet".into(),
        LinkLayer::Other(number) => format!("link layer {number}"),
    };
    let mut text = format!("; port {} {state}, {link}, MTU {}", port.number, port.mtu);
    for address in port.addresses.iter().filter(|address| routes(address.kind)) {
        let _ = match address.gid.to_ipv4_mapped() {
            Some(ip) => write!(text, ", GID {} {} {ip}", address.index, address.kind),
            None => write!(text, ", GID {} {} {}", address.index, address.kind, address.gid),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::PortGid;
    use std::io;

    fn rxe(active: bool) -> DeviceInfo {
        let address = |index, kind, gid: &str| PortGid { index, kind, gid: gid.parse().unwrap() };
        let addresses = vec![
            address(0, GidKind::RoceV1, "fe80::1"),
            address(1, GidKind::RoceV2, "::ffff:10.9.0.1"),
            address(2, GidKind::RoceV2, "fe80::1"),
        ];
        let port =
            PortInfo { number: 1, active, link: LinkLayer::Ethernet, mtu: 1024, lid: 0, addresses };
        DeviceInfo {
            name: "rxe0".into(),
            firmware: String::new(),
            max_region: 1 << 30,
            max_work_requests: 16384,
            max_pieces: 32,
            ports: vec![port],
        }
    }

    #[test]
    fn a_device_is_shown_with_the_addresses_that_can_be_used() {
        let found = findings(Ok(vec![Ok(rxe(true))]), &["rxe0".into()]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].verdict, Verdict::Good);
        assert_eq!(
            found[0].found,
            "rxe0, 16384 work requests of 32 pieces; port 1 up, Ethernet, MTU 1024, \
             GID 1 RoCE v2 10.9.0.1, GID 2 RoCE v2 fe80::1"
        );
        assert_eq!(findings(Ok(vec![Ok(rxe(false))]), &[])[0].verdict, Verdict::Poor);
    }

    #[test]
    fn a_missing_rdma_library_or_provider_is_named() {
        let missing = || Err(Unavailable::Library("no such file".into()));
        let by_static = findings(Err(Unavailable::StaticBuild), &["mlx5_0".to_string()]);
        assert!(by_static[0].to_string().contains("use the file of `cargo build --release`"));
        let none = findings(missing(), &[]);
        assert_eq!((none[0].verdict, none.len()), (Verdict::Good, 1));
        let kernel = ["mlx5_0".to_string(), "mlx5_1".to_string()];
        let library = findings(missing(), &kernel);
        assert_eq!(library[0].verdict, Verdict::Poor);
        assert!(
            library[0].found.starts_with("devices mlx5_0 mlx5_1, but libibverbs.so.1"),
            "{library:?}"
        );
        let error = || io::Error::from_raw_os_error(libc::EACCES);
        let denied = || Err(Closed { name: "mlx5_0".into(), error: error() });
        let provider = findings(Ok(vec![denied()]), &kernel);
        assert!(provider[0].found.starts_with("mlx5_0 cannot be opened: "), "{provider:?}");
        assert_eq!(provider[1].found, "no provider for mlx5_1");
    }
}
