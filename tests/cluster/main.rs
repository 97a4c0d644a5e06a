//! Prefill and decode as separate processes on one host. They give the same tokens as one process.
//! Either can die at any time without harm to the other.

mod abuse;
mod admin;
mod agents;
mod ahead;
mod alone;
mod attacks;
mod cpus;
mod deaths;
mod drain;
mod dummy;
mod ends;
mod etcd;
mod etcd_server;
mod fleet;
mod flows;
mod http;
mod kept;
mod keys;
mod late;
mod layers;
mod leg;
mod liveness;
mod members;
mod moves;
mod namespaces;
mod network;
mod prefix;
mod process;
mod recorded;
mod recurrent;
mod routed;
mod secrecy;
mod secured;
mod storm;
mod stranger;
mod successors;
mod tls;
mod turns;
mod unfit;
mod upgrade;
mod windows;

use baton::limits::DIAL_HOLD_OFF;
use process::{PATIENCE, Process, get, post};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama-f32");
const COMMON: [&str; 8] =
    ["--port", "0", "--kv-memory", "8MiB", "--threads", "1", "--max-running-requests", "4"];

fn start(command: &str, more: &[&str]) -> Process {
    start_model(MODEL, command, more)
}

/// The path of a small model.
fn path_of(model: &str) -> String {
    format!("{}/tests/fixtures/{model}", env!("CARGO_MANIFEST_DIR"))
}

fn start_model(model: &str, command: &str, more: &[&str]) -> Process {
    let mut args = vec![command, model];
    args.extend(COMMON);
    args.extend(more);
    Process::start(&args)
}

fn prefill(more: &[&str]) -> Process {
    let mut args = vec!["--bootstrap-port", "0"];
    args.extend(more);
    start("prefill", &args)
}

/// A prompt that differs by `salt`, long enough for several pages and chunks.
fn body(salt: u32, tokens: u32, max_tokens: u32) -> Value {
    let prompt: Vec<u32> = (0..tokens).map(|i| 10 + (i * 7 + salt * 13) % 300).collect();
    json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.7, "seed": salt,
        "ignore_eos": true, "logprobs": 3, "return_token_ids": true,
    })
}

fn with_room(mut body: Value, prefill: &Process, room: u64) -> String {
    body["bootstrap_host"] = json!("127.0.0.1");
    body["bootstrap_port"] = json!(prefill.bootstrap_port);
    body["bootstrap_room"] = json!(room);
    body.to_string()
}

/// Both legs at once, as a router sends them.
fn dual(prefill: SocketAddr, decode: SocketAddr, body: String) -> ((u16, String), (u16, String)) {
    let same = body.clone();
    let reader = thread::spawn(move || post(prefill, "/v1/completions", &same));
    let answer = post(decode, "/v1/completions", &body);
    (reader.join().unwrap(), answer)
}

fn choices(answer: &(u16, String)) -> Value {
    assert_eq!(answer.0, 200, "{}", answer.1);
    let answer: Value = serde_json::from_str(&answer.1).unwrap();
    answer["choices"].clone()
}

/// The choice of `auto` and its reason are in the log and the metrics of both.
#[test]
fn workers_of_one_host_choose_shm_and_say_why() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    choices(&dual(prefill.address, decode.address, with_room(body(1, 20, 4), &prefill, 1)).1);
    for worker in [&prefill, &decode] {
        assert!(worker.has_said("transport=shm why=same_host"));
        let label = "transport=\"shm\",why=\"same_host\"";
        assert_eq!(worker.metric("baton_sessions_total{", label), 1.0);
        assert_eq!(worker.metric("baton_sessions_total{", ""), 1.0);
    }
    assert!(decode.metric("baton_transfer_work_requests_total{", "") > 0.0, "it copied");
}

fn same_as_one_process(transfer: &str) {
    let mixed = start("serve", &["--mixed", "--disable-radix-cache"]);
    let split = start("serve", &["--chunked-prefill-size", "16"]);
    let prefill =
        prefill(&["--chunked-prefill-size", "32", "--page-size", "8", "--transfer", transfer]);
    let decode = start("decode", &["--page-size", "16", "--transfer", transfer]);
    let mut running = Vec::new();
    for salt in 0..6 {
        let body = body(salt, 5 + salt * 29, 12);
        let expected = choices(&mixed.post("/v1/completions", &body.to_string()));
        assert_eq!(expected, choices(&split.post("/v1/completions", &body.to_string())));
        let (from, to) = (prefill.address, decode.address);
        let sent = with_room(body, &prefill, salt.into());
        running.push((expected, thread::spawn(move || dual(from, to, sent))));
    }
    for (expected, legs) in running {
        let (reader, writer) = legs.join().unwrap();
        assert_eq!(choices(&writer), expected);
        let first = &choices(&reader)[0];
        assert_eq!(
            first["token_ids"][0], expected[0]["token_ids"][0],
            "prefill tells the first token"
        );
        assert_eq!(first["finish_reason"], "length");
    }
    prefill.await_idle();
    decode.await_idle();
    assert_eq!(prefill.metric("baton_request_failures_total{", ""), 0.0);
}

#[test]
fn two_processes_answer_like_one_bit_for_bit_over_shm() {
    same_as_one_process("shm");
}

#[test]
fn two_processes_answer_like_one_bit_for_bit_over_tcp() {
    same_as_one_process("tcp");
}

#[test]
fn a_prefill_worker_that_dies_fails_its_requests_and_comes_back() {
    prefill_dies("shm");
    prefill_dies("tcp");
}

fn prefill_dies(transfer: &str) {
    let mut old = prefill(&["--transfer", transfer]);
    let decode = start("decode", &["--transfer", transfer]);
    let port = old.bootstrap_port.to_string();
    let answer = dual(old.address, decode.address, with_room(body(1, 40, 4), &old, 1)).1;
    let expected = choices(&answer);
    // The decode leg alone: its prefill leg never comes, then the worker dies.
    let (to, sent) = (decode.address, with_room(body(2, 40, 4), &old, 2));
    let waiting = thread::spawn(move || post(to, "/v1/completions", &sent));
    thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    old.kill();
    let (status, text) = waiting.join().unwrap();
    assert_eq!(status, 502, "{text}");
    assert!(begun.elapsed() < PATIENCE);
    decode.await_idle();
    // At the same registry port, but as a new incarnation.
    let new = start("prefill", &["--bootstrap-port", &port, "--transfer", transfer]);
    thread::sleep(DIAL_HOLD_OFF + Duration::from_millis(200));
    let again = dual(new.address, decode.address, with_room(body(1, 40, 4), &new, 3)).1;
    assert_eq!(choices(&again), expected);
    decode.await_idle();
    new.await_idle();
}

#[test]
fn a_decode_worker_that_dies_frees_prefill() {
    decode_dies("shm");
    decode_dies("tcp");
}

fn decode_dies(transfer: &str) {
    let prefill = prefill(&["--chunked-prefill-size", "16", "--transfer", transfer]);
    let mut old = start("decode", &["--transfer", transfer]);
    let _ = dual(prefill.address, old.address, with_room(body(1, 40, 4), &prefill, 1));
    // Many long prompts are running when it dies.
    let legs: Vec<_> = (0..4)
        .map(|i| {
            let (from, to) = (prefill.address, old.address);
            let sent = with_room(body(i, 200, 200), &prefill, 10 + u64::from(i));
            thread::spawn(move || dual(from, to, sent))
        })
        .collect();
    thread::sleep(Duration::from_millis(30));
    old.kill();
    for leg in legs {
        let _ = leg.join().unwrap();
    }
    prefill.await_idle();
    let new = start("decode", &["--transfer", transfer]);
    let answer = dual(prefill.address, new.address, with_room(body(1, 40, 4), &prefill, 50)).1;
    choices(&answer);
    prefill.await_idle();
    new.await_idle();
}

#[test]
fn legs_that_never_meet_and_clients_that_leave_leak_nothing() {
    let prefill = prefill(&[]);
    let decode = start("decode", &[]);
    for i in 0..5 {
        for address in [prefill.address, decode.address] {
            let body = with_room(
                body(i, 60, 8),
                &prefill,
                1000 + u64::from(i) + u64::from(address == decode.address) * 100,
            );
            let head = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            std::io::Write::write_all(&mut stream, (head + &body).as_bytes()).unwrap();
            thread::sleep(Duration::from_millis(20));
            drop(stream);
        }
    }
    prefill.await_idle();
    decode.await_idle();
    choices(&dual(prefill.address, decode.address, with_room(body(9, 60, 8), &prefill, 5)).1);
}

/// Two routers can name one worker differently. Two links to it would void each other.
#[test]
fn one_prefill_worker_under_two_names_is_one_peer() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    for room in 0..6 {
        let mut body: Value =
            serde_json::from_str(&with_room(body(3, 60, 8), &prefill, room)).unwrap();
        body["bootstrap_host"] =
            json!(["127.0.0.1", "localhost", "[127.0.0.1]"][room as usize % 3]);
        choices(&dual(prefill.address, decode.address, body.to_string()).1);
    }
    assert_eq!(prefill.times_said("control link from a decode worker is open"), 1);
}

/// After a session has failed, the worker is queried again: the next one at its address can differ.
#[test]
fn a_worker_that_did_not_fit_comes_back_fitting() {
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-f32");
    let mut args = vec!["prefill", other, "--bootstrap-port", "0"];
    args.extend(COMMON);
    let mut old = Process::start(&args);
    let decode = start("decode", &[]);
    let (status, _) = decode.post("/v1/completions", &with_room(body(1, 20, 4), &old, 1));
    assert_eq!(status, 502);
    old.kill();
    let port = old.bootstrap_port.to_string();
    let new = start("prefill", &["--bootstrap-port", &port]);
    assert_ne!(old.control_port, new.control_port);
    // Waits until the decode worker dials again.
    thread::sleep(DIAL_HOLD_OFF + Duration::from_millis(200));
    choices(&dual(new.address, decode.address, with_room(body(1, 20, 4), &new, 2)).1);
}

#[test]
fn the_fake_source_serves_decode_alone() {
    let decode = start("decode", &["--transfer", "fake"]);
    for room in 0..20 {
        let mut body = body(room, 30, 6);
        body["bootstrap_host"] = json!("2.2.2.2");
        body["bootstrap_room"] = json!(room);
        let answer = decode.post("/v1/completions", &body.to_string());
        assert_eq!(choices(&answer)[0]["token_ids"].as_array().unwrap().len(), 6);
    }
    decode.await_idle();
}

#[test]
fn the_registry_answers_as_sglangs() {
    let prefill = prefill(&[]);
    let registry = SocketAddr::new(prefill.address.ip(), prefill.bootstrap_port);
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(registry).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n");
        std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
        answer
    };
    let all = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let topology = get(&format!("/route?{all}"));
    assert!(
        topology.starts_with("HTTP/1.1 200") && topology.contains("\"attn_tp_size\":1"),
        "{topology}"
    );
    assert!(get(&format!("/route?{}", all.replace("-1", "0"))).contains("\"rank_port\""));
    assert!(get(&format!("/route?{}", all.replace("-1", "7"))).starts_with("HTTP/1.1 404"));
    assert!(get("/route").starts_with("HTTP/1.1 400"));
    assert!(get("/health").ends_with("OK"));
}

#[test]
fn the_registry_tells_the_ports_that_were_taken() {
    let prefill = prefill(&[]);
    let registry = SocketAddr::new(prefill.address.ip(), prefill.bootstrap_port);
    let ranks = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let (status, told) = get(registry, &format!("/route?{ranks}"));
    assert_eq!(status, 200, "{told}");
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["prefill_http_port"], prefill.address.port());
    assert_eq!(told["control_port"], prefill.control_port);
}

/// A decode worker without tcp needs no data port, and opens none.
#[test]
fn a_data_port_is_opened_for_tcp_alone() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    for transfer in ["shm", "fake"] {
        let decode = start("decode", &["--transfer", transfer, "--data-port", &port]);
        assert_eq!(decode.data_port, 0, "{transfer}");
    }
    assert_ne!(start("decode", &["--transfer", "tcp"]).data_port, 0);
}

/// One prefill worker has one session, whatever name the requests use.
#[test]
fn names_of_one_prefill_worker_share_a_session() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    let mut room = 0;
    for host in ["127.0.0.1", "LocalHost", "localhost", "::ffff:127.0.0.1", "LOCALHOST"] {
        room += 1;
        let mut body = body(room, 40, 8);
        body["bootstrap_host"] = json!(host);
        body["bootstrap_port"] = json!(prefill.bootstrap_port);
        body["bootstrap_room"] = json!(room);
        let (reader, writer) = dual(prefill.address, decode.address, body.to_string());
        assert_eq!((reader.0, writer.0), (200, 200), "{host}: {reader:?} {writer:?}");
    }
    assert_eq!(decode.times_said("control link to a prefill worker is open"), 1);
    let mut lost = body(9, 40, 8);
    lost["bootstrap_host"] = json!("nowhere.invalid");
    lost["bootstrap_room"] = json!(9);
    let (status, text) = post(decode.address, "/v1/completions", &lost.to_string());
    assert!(status == 502 && text.contains("peer_lost"), "{status} {text}");
    decode.await_idle();
}
