//! Prefill on one host, decode on two others, a client on a fourth: hosts are network namespaces with their own
//! addresses, joined by a switch in a fifth. KV moves over tcp, since descriptors cannot pass between them.
//!
//! Needs root and iproute2; without them the test says that it is skipped, or fails where
//! `BATON_REQUIRE_NAMESPACES` is set.
#![allow(unsafe_code)]

use crate::fleet::Fleet;
use crate::process::{PATIENCE, Process, post};
use serde_json::{Value, json};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::MODEL;
const HOSTS: [(&str, &str); 4] =
    [("prefill", "10.77.0.1"), ("decode", "10.77.0.2"), ("second", "10.77.0.3"), ("client", "10.77.0.4")];

/// Namespaces that end with the value.
struct Network {
    tag: String,
}

impl Network {
    fn new() -> Option<Network> {
        // Tests may be threads of one process.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let network = Network { tag: format!("bt{}n{number}", std::process::id()) };
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

    /// Takes a host's port of the switch up or down.
    fn set_port(&self, host: &str, state: &str) {
        let index = HOSTS.iter().position(|(name, _)| *name == host).expect("a host of this network");
        assert!(ip(&["-n", &self.name("hub"), "link", "set", &format!("port{index}"), state]));
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
        for host in ["prefill", "decode", "second", "client", "hub"] {
            ip(&["netns", "del", &self.name(host)]);
        }
    }
}

fn ip(args: &[&str]) -> bool {
    Command::new("ip").args(args).output().is_ok_and(|output| output.status.success())
}

/// A network, unless this machine has none to give.
fn network() -> Option<Network> {
    let network = Network::new();
    if network.is_none() {
        assert!(std::env::var_os("BATON_REQUIRE_NAMESPACES").is_none(), "network namespaces are required");
        eprintln!("SKIPPED: network namespaces need root and iproute2");
    }
    network
}

/// A worker that listens on `listen`; it is reached at its host's own address.
fn start(network: &Network, host: &str, listen: &str, args: &[&str]) -> Process {
    let common = ["--port", "8000", "--kv-memory", "8MiB", "--threads", "1", "--max-running-requests", "4"];
    network.enter(host);
    let mut process = Process::start(&[args, &["--host", listen, "--insecure"], &common].concat());
    let (_, address) = HOSTS.iter().find(|(name, _)| *name == host).expect("a host of this network");
    process.address.set_ip(address.parse().expect("an address"));
    process
}

/// One request, both legs, from the client's host.
fn hand_off(network: &Network, prefill: &Process, decode: &Process, room: u64) {
    network.enter("client");
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

#[test]
fn kv_moves_between_hosts_over_tcp() {
    let Some(network) = network() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let decode = start(&network, "decode", "10.77.0.2", &decode);
    for room in 0..4 {
        hand_off(&network, &prefill, &decode, room);
    }
    prefill.await_idle();
    decode.await_idle();
}

/// A decode worker whose host is gone, with a request on it, closes no connection; its kernel is asked for a sign.
#[test]
fn a_host_that_is_gone_is_noticed_with_a_request_on_it() {
    let Some(network) = network() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let decode = start(&network, "decode", "10.77.0.2", &decode);
    network.enter("client");
    let fleet = Fleet::new(vec![prefill], vec![decode]);
    let body =
        json!({"prompt": vec![11; 100], "max_tokens": 8, "temperature": 0, "ignore_eos": true}).to_string();
    let ask = || fleet.router.post("/v1/completions", &body);
    assert_eq!(ask().0, 200);
    // So small a request fits into the kernels, so that its stopped process is no reason.
    fleet.decode[0].pause();
    let (router, sent) = (fleet.router.address, body.clone());
    let tag = network.tag.clone();
    let asked = std::thread::spawn(move || {
        std::mem::ManuallyDrop::new(Network { tag }).enter("client");
        post(router, "/v1/completions", &sent)
    });
    std::thread::sleep(Duration::from_millis(500));
    network.set_port("decode", "down");
    let (status, answer) = asked.join().unwrap();
    network.set_port("decode", "up");
    fleet.decode[0].go_on();
    assert_eq!(status, 502, "{answer}");
    assert!(answer.contains("peer_lost"), "{answer}");
    let begun = Instant::now();
    while ask().0 != 200 {
        assert!(begun.elapsed() < PATIENCE, "the host is back");
        std::thread::sleep(Duration::from_millis(200));
    }
    fleet.workers().for_each(Process::await_idle);
}

/// All listen on the same address and port, and yet are three workers.
#[test]
fn workers_that_listen_on_every_address_are_told_apart() {
    let Some(network) = network() else { return };
    let prefill = start(&network, "prefill", "0.0.0.0", &["prefill", MODEL, "--advertise-host", "10.77.0.1"]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let workers = ["decode", "second"].map(|host| start(&network, host, "0.0.0.0", &decode));
    for room in 0..8 {
        hand_off(&network, &prefill, &workers[room as usize % 2], room);
    }
    assert!(!prefill.has_said("replaced by a newer connection"), "workers cut each other off");
    for worker in workers.iter().chain([&prefill]) {
        worker.await_idle();
    }
}
