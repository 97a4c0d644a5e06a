//! Hosts with their own addresses: network namespaces that a switch in another namespace connects.
//!
//! They need root and iproute2. Without these, a test reports that it is skipped, or fails if
//! `BATON_REQUIRE_NAMESPACES` is set. `tools/nft` drops packets, `tools/delay` delays them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const HOSTS: [(&str, &str); 10] = [
    ("prefill", "10.77.0.1"),
    ("decode", "10.77.0.2"),
    ("second", "10.77.0.3"),
    ("client", "10.77.0.4"),
    ("third", "10.77.0.5"),
    ("router", "10.77.0.6"),
    ("other", "10.77.0.7"),
    ("keeper1", "10.77.0.8"),
    ("keeper2", "10.77.0.9"),
    ("keeper3", "10.77.0.10"),
];

/// A host's own address.
pub fn address(host: &str) -> IpAddr {
    let (_, address) =
        HOSTS.iter().find(|(name, _)| *name == host).expect("a host of this network");
    address.parse().expect("an address")
}

/// Namespaces that are removed on drop.
pub struct Network {
    /// Prefix of the names of its namespaces.
    pub tag: String,
}

impl Network {
    /// A network, if this machine supports it.
    pub fn get() -> Option<Network> {
        let network = Network::new();
        if network.is_none() {
            assert!(
                std::env::var_os("BATON_REQUIRE_NAMESPACES").is_none(),
                "network namespaces are required"
            );
            eprintln!("SKIPPED: network namespaces need root and iproute2");
        }
        network
    }

    fn new() -> Option<Network> {
        // Tests can be threads of one process.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let network = Network { tag: format!("bt{}n{number}", std::process::id()) };
        let hub = network.name("hub");
        let made = ip(&["netns", "add", &hub])
            && ip(&["-n", &hub, "link", "add", "switch", "type", "bridge"])
            && ip(&["-n", &hub, "link", "set", "switch", "up"])
            && HOSTS
                .iter()
                .enumerate()
                .all(|(index, (host, address))| network.join(index, host, address));
        made.then_some(network)
    }

    fn name(&self, host: &str) -> String {
        format!("{}{host}", self.tag)
    }

    fn join(&self, index: usize, host: &str, address: &str) -> bool {
        let (hub, host, port) = (self.name("hub"), self.name(host), format!("port{index}"));
        ip(&["netns", "add", &host])
            && ip(&[
                "-n", &hub, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns",
                &host,
            ])
            && ip(&["-n", &hub, "link", "set", &port, "master", "switch", "up"])
            && ip(&["-n", &host, "addr", "add", &format!("{address}/24"), "dev", "eth0"])
            && ip(&["-n", &host, "link", "set", "eth0", "up"])
            && ip(&["-n", &host, "link", "set", "lo", "up"])
    }

    /// Sets a host's port of the switch up or down.
    pub fn set_port(&self, host: &str, state: &str) {
        assert!(ip(&[
            "-n",
            &self.name("hub"),
            "link",
            "set",
            &format!("port{}", index(host)),
            state
        ]));
    }

    /// Delays every frame from and to this host by this time, until drop.
    pub fn delay(&self, host: &str, time: Duration) -> Detour<'_> {
        let hub = self.name("hub");
        let [port, near, far, slow] =
            ["port", "near", "far", "slow"].map(|it| format!("{it}{}", index(host)));
        let mut relay = Command::new("ip")
            .args(["netns", "exec", &hub, concat!(env!("CARGO_MANIFEST_DIR"), "/tools/delay")])
            .args([&time.as_millis().to_string(), &near, &far])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip is there");
        let mut said = String::new();
        let read = BufReader::new(relay.stdout.take().expect("piped")).read_line(&mut said);
        assert!(read.is_ok() && said == "ready\n", "tools/delay says {said:?}");
        let switched = ip(&["-n", &hub, "link", "add", &slow, "type", "bridge"])
            && ip(&["-n", &hub, "link", "set", &slow, "up"])
            && ip(&["-n", &hub, "link", "set", &near, "master", &slow, "up"])
            && ip(&["-n", &hub, "link", "set", &far, "master", "switch", "up"])
            && ip(&["-n", &hub, "link", "set", &port, "master", &slow]);
        assert!(switched, "the detour is not taken");
        Detour { network: self, host: host.to_owned(), relay }
    }

    /// Moves this thread, and what it starts, to a host.
    pub fn enter(&self, host: &str) {
        enter(&self.tag, host);
    }

    /// Lets a host's kernel drop packets that leave it, by an nft rule. `None` removes the rule.
    pub fn drop_packets(&self, host: &str, rule: Option<&str>) {
        let host = self.name(host);
        let run = |command: &str| {
            let done = Command::new("ip").args(["netns", "exec", &host, nft(), command]).output();
            done.is_ok_and(|output| output.status.success())
        };
        match rule {
            Some(rule) => {
                assert!(run("add table inet storm"));
                assert!(run("add chain inet storm out { type filter hook output priority 0 ; }"));
                assert!(run(&format!("add rule inet storm out {rule} drop")), "{rule}");
            }
            None => assert!(run("delete table inet storm")),
        }
    }
}

/// A host's traffic through `tools/delay`.
pub struct Detour<'a> {
    network: &'a Network,
    host: String,
    relay: Child,
}

impl Drop for Detour<'_> {
    fn drop(&mut self) {
        let (hub, index) = (self.network.name("hub"), index(&self.host));
        ip(&["-n", &hub, "link", "set", &format!("port{index}"), "master", "switch"]);
        drop(self.relay.stdin.take());
        let _ = self.relay.wait();
        ip(&["-n", &hub, "link", "del", &format!("slow{index}")]);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in HOSTS.map(|(host, _)| host).iter().chain(&["hub"]) {
            ip(&["netns", "del", &self.name(host)]);
        }
    }
}

fn index(host: &str) -> usize {
    HOSTS.iter().position(|(name, _)| *name == host).expect("a host of this network")
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
}

/// Moves this thread, and what it starts, to a host of the network with this tag.
pub fn enter(tag: &str, host: &str) {
    let namespace = File::open(format!("/var/run/netns/{tag}{host}")).expect("it was made");
    // SAFETY: an open descriptor of a network namespace; only this thread moves.
    let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
    assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
}

/// Limits how much unread data a connection's kernel buffers.
pub fn narrow(stream: &TcpStream) {
    // A packet of the loopback device has this size. With less, packets would arrive one by one.
    let size: libc::c_int = 64 << 10;
    let len = size_of_val(&size) as libc::socklen_t;
    // SAFETY: an open socket, and a number of the given length.
    let set = unsafe {
        let size = (&raw const size).cast();
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, size, len)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// Whether rules can drop packets.
pub fn has_nft() -> bool {
    let found = !nft().is_empty();
    assert!(found || std::env::var_os("BATON_REQUIRE_NAMESPACES").is_none(), "nft is required");
    found
}

/// The path of the program. Empty if it is not available.
fn nft() -> &'static str {
    static NFT: OnceLock<String> = OnceLock::new();
    NFT.get_or_init(|| {
        let found = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/nft")).output();
        let path = found.ok().filter(|output| output.status.success()).map(|output| output.stdout);
        path.map_or(String::new(), |path| String::from_utf8_lossy(&path).trim().to_owned())
    })
}

/// How many segments with data a connection has received.
pub fn data_segments(stream: &TcpStream) -> u32 {
    /// Offset of `tcpi_data_segs_in` in Linux's `tcp_info`.
    const AT: usize = 152;
    let mut info = [0u8; 256];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes and reports how many.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut length,
        )
    };
    assert!(got == 0 && length as usize >= AT + 4, "the kernel tells no segments");
    u32::from_ne_bytes(info[AT..AT + 4].try_into().unwrap())
}
