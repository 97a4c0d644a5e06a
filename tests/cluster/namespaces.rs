//! Prefill on one host, decode on another, a client on a third: hosts are network namespaces with their own
//! addresses, joined by a switch in a fourth. KV moves over tcp, since descriptors cannot pass between them.
//!
//! Needs root and iproute2; without them the test says that it is skipped, or fails where
//! `BATON_REQUIRE_NAMESPACES` is set.
#![allow(unsafe_code)]

use crate::process::{Process, post};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

use crate::MODEL;
const HOSTS: [(&str, &str); 3] = [("prefill", "10.77.0.1"), ("decode", "10.77.0.2"), ("client", "10.77.0.3")];

/// Namespaces that end with the value.
struct Network {
    tag: String,
}

impl Network {
    fn new() -> Option<Network> {
        let network = Network { tag: format!("bt{}", std::process::id()) };
        let hub = network.name("hub");
        let made = ip(&["netns", "add", &hub])
            && ip(&["-n", &hub, "link", "add", "switch", "type", "bridge"])
            && ip(&["-n", &hub, "link", "set", "switch", "up"])
            && HOSTS.iter().enumerate().all(|(index, (host, address))| network.join(index, host, address));
        made.then_some(network)
    }

    fn name(&self, host: &str) -> String {
        format!("{}{host}", self.tag)
    }

    fn join(&self, index: usize, host: &str, address: &str) -> bool {
        let (hub, host, port) = (self.name("hub"), self.name(host), format!("port{index}"));
        ip(&["netns", "add", &host])
            && ip(&["-n", &hub, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &host])
            && ip(&["-n", &hub, "link", "set", &port, "master", "switch", "up"])
            && ip(&["-n", &host, "addr", "add", &format!("{address}/24"), "dev", "eth0"])
            && ip(&["-n", &host, "link", "set", "eth0", "up"])
            && ip(&["-n", &host, "link", "set", "lo", "up"])
    }

    /// Moves this thread, and what it starts, to a host.
    fn enter(&self, host: &str) {
        let namespace = File::open(format!("/var/run/netns/{}", self.name(host))).expect("it was made");
        // SAFETY: an open descriptor of a network namespace; only this thread moves.
        let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in ["prefill", "decode", "client", "hub"] {
            ip(&["netns", "del", &self.name(host)]);
        }
    }
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
}

#[test]
fn kv_moves_between_hosts_over_tcp() {
    let Some(network) = Network::new() else {
        assert!(std::env::var_os("BATON_REQUIRE_NAMESPACES").is_none(), "network namespaces are required");
        eprintln!("SKIPPED: network namespaces need root and iproute2");
        return;
    };
    let common = [
        "--port",
        "8000",
        "--kv-memory",
        "8MiB",
        "--threads",
        "1",
        "--max-running-requests",
        "4",
        "--insecure",
    ];
    let start = |host: &str, args: &[&str]| {
        network.enter(host);
        let mut all = args.to_vec();
        all.extend(common);
        Process::start(&all)
    };
    let prefill = start("prefill", &["prefill", MODEL, "--host", "10.77.0.1"]);
    let decode =
        start("decode", &["decode", MODEL, "--host", "10.77.0.2", "--bootstrap-allow", "10.77.0.0/24"]);
    network.enter("client");
    for room in 0..4u64 {
        let prompt: Vec<u64> = (0..150).map(|i| 10 + (i * 7 + room * 13) % 300).collect();
        let body = json!({
            "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true, "return_token_ids": true,
            "bootstrap_host": "10.77.0.1", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room,
        })
        .to_string();
        let (from, sent) = (prefill.address, body.clone());
        let tag = network.tag.clone();
        let reader = std::thread::spawn(move || {
            let there = std::mem::ManuallyDrop::new(Network { tag });
            there.enter("client");
            post(from, "/v1/completions", &sent)
        });
        let (status, answer) = post(decode.address, "/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 8);
        assert_eq!(reader.join().unwrap().0, 200);
    }
    prefill.await_idle();
    decode.await_idle();
}
