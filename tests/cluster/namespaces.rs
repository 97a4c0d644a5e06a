//! Prefill on one host, decode on two others, a client on a fourth. KV moves over tcp, because
//! descriptors cannot pass between hosts.

use crate::MODEL;
use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::network::{self, Network};
use crate::process::{PATIENCE, Process, post, sum};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A worker that listens on `listen` and is reached at its host's own address.
fn start(network: &Network, host: &str, listen: &str, args: &[&str]) -> Process {
    let common =
        ["--port", "8000", "--kv-memory", "8MiB", "--threads", "1", "--max-running-requests", "4"];
    network.enter(host);
    let mut process = Process::start(&[args, &["--host", listen, "--insecure"], &common].concat());
    process.address.set_ip(network::address(host));
    process
}

/// One request, both legs, from the client's host.
fn hand_off(network: &Network, prefill: &Process, decode: &Process, room: u64) {
    network.enter("client");
    let prompt: Vec<u64> = (0..150).map(|i| 10 + (i * 7 + room * 13) % 300).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
        "bootstrap_host": "10.77.0.1", "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": room,
    })
    .to_string();
    let (from, sent) = (prefill.address, body.clone());
    let tag = network.tag.clone();
    let reader = std::thread::spawn(move || {
        network::enter(&tag, "client");
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
    let Some(network) = Network::get() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let decode = start(&network, "decode", "10.77.0.2", &decode);
    for room in 0..4 {
        hand_off(&network, &prefill, &decode, room);
    }
    prefill.await_idle();
    decode.await_idle();
}

/// They share a machine, but cannot pass descriptors to each other.
#[test]
fn workers_in_separate_namespaces_do_not_use_shm() {
    let Some(network) = Network::get() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let free = start(&network, "decode", "10.77.0.2", &decode);
    hand_off(&network, &prefill, &free, 1);
    for worker in [&prefill, &free] {
        worker.await_said("transport of a session chosen");
        assert!(worker.has_said("transport=tcp why=") && !worker.has_said("transport=shm"));
    }
    let bound =
        start(&network, "second", "10.77.0.3", &[&decode[..], &["--transfer", "shm"]].concat());
    network.enter("client");
    let body = json!({
        "prompt": [11, 12, 13], "max_tokens": 2, "bootstrap_host": "10.77.0.1",
        "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 2,
    });
    let (status, answer) = post(bound.address, "/v1/completions", &body.to_string());
    assert!(status == 502 && answer.contains("incompatible"), "{status} {answer}");
    prefill.await_said("session refused");
    assert!(!prefill.has_said("transport=shm"));
}

/// A decode worker with a request loses its host. The host closes no connection, so the kernel must
/// probe it.
#[test]
fn a_host_that_is_gone_is_noticed_with_a_request_on_it() {
    let Some(network) = Network::get() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let decode = ["decode", MODEL, "--bootstrap-allow", "10.77.0.0/24"];
    let decode = start(&network, "decode", "10.77.0.2", &decode);
    network.enter("client");
    let fleet = Fleet::with(vec![prefill], vec![decode], &["--disable-retries"]);
    let body =
        json!({"prompt": vec![11; 100], "max_tokens": 8, "temperature": 0, "ignore_eos": true})
            .to_string();
    let ask = || fleet.router.post("/v1/completions", &body);
    assert_eq!(ask().0, 200);
    // The request fits into the kernels' buffers, so the stopped process is not noticed.
    fleet.decode[0].pause();
    let (router, sent) = (fleet.router.address, body.clone());
    let tag = network.tag.clone();
    let asked = std::thread::spawn(move || {
        network::enter(&tag, "client");
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

/// A client has a request at a prefill worker, which waits for a decode worker. The client's host
/// goes, and closes no connection. Nothing is queued for the client, so the kernel must probe it.
#[test]
fn a_request_ends_if_the_host_of_its_client_is_gone() {
    let Some(network) = Network::get() else { return };
    let prefill = start(&network, "prefill", "10.77.0.1", &["prefill", MODEL]);
    let body = json!({
        "prompt": vec![11; 100], "max_tokens": 8, "bootstrap_host": "10.77.0.1",
        "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 7,
    })
    .to_string();
    network.enter("client");
    let mut client = TcpStream::connect(prefill.address).unwrap();
    let head = format!("content-length: {}\r\n\r\n", body.len());
    write!(client, "POST /v1/completions HTTP/1.1\r\nhost: t\r\n{head}{body}").unwrap();
    network.enter("decode");
    let waiting = || sum(&prefill.get("/metrics").1, "vllm:num_requests_waiting{", "");
    let begun = Instant::now();
    while waiting() == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "the request waits for a decode worker");
        std::thread::sleep(Duration::from_millis(50));
    }
    network.set_port("client", "down");
    prefill.await_idle();
    network.set_port("client", "up");
}

/// All listen on the same address and port, and are still three workers.
#[test]
fn workers_that_listen_on_every_address_are_told_apart() {
    let Some(network) = Network::get() else { return };
    let prefill =
        start(&network, "prefill", "0.0.0.0", &["prefill", MODEL, "--advertise-host", "10.77.0.1"]);
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

/// The time from a client's disconnect at the router until neither worker has anything of its
/// request. Polled every few milliseconds, in each phase.
#[test]
fn a_client_that_leaves_frees_both_workers() {
    let Some(network) = Network::get() else { return };
    let slow = Dummy::slow();
    let worker = |host: &str, args: &[&str]| {
        network.enter(host);
        let address = network::address(host).to_string();
        let common = ["--host", &address, "--insecure", "--max-running-requests", "1"];
        slow.start(args[0], &[&args[1..], &common].concat())
    };
    let prefill =
        worker("prefill", &["prefill", "--bootstrap-port", "0", "--chunked-prefill-size", "16"]);
    let decode = worker("decode", &["decode", "--bootstrap-allow", "10.77.0.0/24"]);
    network.enter("client");
    let fleet = Fleet::new(vec![prefill], vec![decode]);
    let router = fleet.router.address;
    let running = |worker: &Process| worker.metric("sglang:num_running_reqs{", "");
    let waiting = |worker: &Process| worker.metric("vllm:num_requests_waiting{", "");
    let mut salt = 0;
    let mut open = |tokens: u32| {
        salt += 1;
        let prompt: Vec<u32> = (0..tokens).map(|i| 3 + (i * 7 + salt * 13) % 380).collect();
        let body = json!({"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": true,
            "stream": true});
        Leg::open(router, "/v1/completions", "", &body)
    };
    for phase in ["queued", "prefill", "decode"] {
        let mut times = Vec::new();
        for _ in 0..7 {
            // The request that the waiting one waits for.
            let mut ahead = (phase == "queued").then(|| open(300));
            let mut leg = open(if phase == "decode" { 20 } else { 300 });
            match phase {
                "queued" => wait(|| waiting(&fleet.prefill[0]) + waiting(&fleet.decode[0]) >= 1.0),
                "prefill" => wait(|| running(&fleet.prefill[0]) == 1.0),
                _ => leg.await_events(3),
            }
            drop(ahead.take());
            drop(leg);
            let left = Instant::now();
            fleet.workers().for_each(Process::await_idle);
            times.push(left.elapsed());
        }
        times.sort();
        eprintln!(
            "CANCEL {phase}: median {:.0?}, longest {:.0?}",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
}

#[track_caller]
fn wait(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < PATIENCE, "it never comes");
        std::thread::sleep(Duration::from_millis(1));
    }
}
