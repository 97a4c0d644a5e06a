//! Pairs that cannot hand over. They fail at once, and the client's error and the logs name the
//! difference.

use crate::fleet::Fleet;
use crate::keys::KeyFile;
use crate::process::{PATIENCE, Process, post};
use crate::stranger::{Framed, bytes_of, hello, until_closed};
use crate::{MODEL, body, choices, dual, path_of, prefill, start, with_room};
use baton::model::forward::cpu::{KernelFamily, available_kernels};
use baton::wire::auth::{Keyring, Side};
use baton::wire::message::{MINOR, Message, VERSION};
use serde_json::Value;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

const OTHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-f32");
const COMMON: [&str; 6] = ["--port", "0", "--kv-memory", "8MiB", "--threads", "1"];

fn worker(role: &str, model: &str, more: &[&str]) -> Process {
    let mut args = vec![role, model];
    args.extend(COMMON);
    if role == "prefill" {
        args.extend(["--bootstrap-port", "0"]);
    }
    args.extend(more);
    Process::start(&args)
}

#[track_caller]
fn await_said(process: &Process, words: &str) {
    let begun = Instant::now();
    while !process.has_said(words) {
        assert!(begun.elapsed() < PATIENCE, "it never says {words:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sends the decode leg twice: the second finds a source that is held off for the same reason.
#[track_caller]
fn check(prefill: &Process, decode: &Process, [at_prefill, at_decode]: [&str; 2]) {
    for room in 1..3 {
        let (status, text) =
            decode.post("/v1/completions", &with_room(body(1, 20, 4), prefill, room));
        assert!(status == 502 && text.contains(r#""code":"incompatible""#), "{status} {text}");
    }
    await_said(prefill, at_prefill);
    await_said(decode, at_decode);
    decode.await_idle();
    prefill.await_idle();
}

#[test]
fn both_say_which_field_of_model_layout_or_transport_differs() {
    let plain = prefill(&["--transfer", "shm"]);
    check(&plain, &worker("decode", OTHER, &[]), ["why=\"config differs: source has "; 2]);
    let narrow = worker("decode", MODEL, &["--kv-dtype", "f16"]);
    check(&plain, &narrow, ["kv_dtype differs: source has f32, destination has f16"; 2]);
    let far = worker("decode", MODEL, &["--transfer", "tcp"]);
    check(&plain, &far, ["transport differs: source has shm, destination has tcp"; 2]);
}

/// The pages of several groups are in one list, and state lies on pages. Both workers of such a
/// model must have the same page size. A model with state alone, or with one group alone, has no
/// such rule.
#[test]
fn pages_of_another_size_are_refused_for_a_model_with_groups() {
    for (model, is_refused) in [
        ("gemma3-f32", true),
        ("falcon-h1-f32", true),
        ("qwen3-next-f32", true),
        ("mamba2-f32", false),
        ("mistral-f32", false),
    ] {
        let model = path_of(model);
        let prefill = worker("prefill", &model, &["--page-size", "16"]);
        let decode = worker("decode", &model, &["--page-size", "8"]);
        if is_refused {
            check(&prefill, &decode, ["page size differs: source has 16, destination has 8"; 2]);
            let router = Fleet::new(vec![prefill], vec![decode]).router;
            let (status, answer) = router.post("/v1/completions", &body(1, 40, 4).to_string());
            assert_eq!(status, 503, "the router forms no such pair: {answer}");
            assert!(router.get("/workers").1.contains("page_size=16"), "{model}");
            continue;
        }
        let asked = body(1, 40, 4);
        let whole = worker("serve", &model, &["--mixed"]);
        let expected = choices(&whole.post("/v1/completions", &asked.to_string()));
        let sent = with_room(asked, &prefill, 1);
        let (first, answer) = dual(prefill.address, decode.address, sent);
        assert_eq!(first.0, 200, "{model}: {}", first.1);
        assert_eq!(choices(&answer), expected, "{model}");
    }
}

/// Workers whose kernels give equal bits hand over, with the tokens of one worker alone. Others are
/// refused. Of the families, those that this CPU has are tried.
#[test]
fn kernels_of_one_bit_class_form_pairs_and_other_kernels_are_refused() {
    let kernels = available_kernels();
    let of = |role: &str, family: KernelFamily| worker(role, MODEL, &["--kernels", family.name()]);
    // `check` uses the rooms below.
    let mut room = 10;
    for &source in kernels {
        let prefill = of("prefill", source);
        for &destination in kernels {
            let decode = of("decode", destination);
            if source.bit_class() != destination.bit_class() {
                let differ = format!(
                    "bit_class differs: source has {}, destination has {}; give both workers the \
                     same --kernels",
                    source.bit_class(),
                    destination.bit_class()
                );
                check(&prefill, &decode, [&differ; 2]);
                continue;
            }
            let alone = start("serve", &["--mixed", "--kernels", destination.name()]);
            for tokens in [20, 100] {
                room += 1;
                let asked = body(room, tokens, 16);
                let expected = choices(&alone.post("/v1/completions", &asked.to_string()));
                let sent = with_room(asked, &prefill, u64::from(room));
                let (first, answer) = dual(prefill.address, decode.address, sent);
                assert_eq!(first.0, 200, "{source} to {destination}: {}", first.1);
                assert_eq!(choices(&answer), expected, "{source} to {destination}");
            }
        }
    }
}

#[test]
fn keys_that_differ_are_named() {
    let (one, another) = (KeyFile::new(b'a'), KeyFile::new(b'b'));
    let with = |role, key: Option<&KeyFile>| match key {
        Some(key) => worker(role, MODEL, &["--cluster-key-file", key.path()]),
        None => worker(role, MODEL, &[]),
    };
    let theirs_alone = "peer has a cluster key, this worker has none";
    let ours_alone = "peer has no cluster key, this worker has one";
    let other = "peer has another cluster key than this worker";
    for (ours, theirs, said) in [
        (Some(&one), None, [ours_alone, theirs_alone]),
        (None, Some(&one), [theirs_alone, ours_alone]),
        (Some(&one), Some(&another), [other; 2]),
    ] {
        check(&with("prefill", ours), &with("decode", theirs), said);
    }
}

/// Of another major version, only the version is understood. Of a later minor version, the common
/// part is.
#[test]
fn another_major_version_is_named_and_a_later_minor_one_is_none() {
    let reader = prefill(&[]);
    let control = SocketAddr::new(reader.address.ip(), reader.control_port);
    let mut other = bytes_of(&Message::Hello(hello(Side::Dialer, 9, &Keyring::default())));
    assert_eq!(other[2], VERSION);
    other[2] += 1;
    let mut peer = Framed::dial(control);
    peer.say(&[&other]);
    until_closed(&mut peer.stream);
    await_said(
        &reader,
        &format!("peer's messages are of version {}, ours of version {VERSION}", VERSION + 1),
    );
    let mut grown = bytes_of(&Message::Hello(hello(Side::Dialer, 9, &Keyring::default())));
    grown.extend([0xaa; 40]);
    let mut peer = Framed::dial(control);
    peer.say(&[&grown]);
    await_said(&reader, "control link from a decode worker is open");
    assert!(reader.has_said(&format!("wire={VERSION}.{MINOR}")));
}

#[test]
fn a_router_does_not_use_workers_of_another_role_and_says_why() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let url = |worker: &Process| format!("http://{}", worker.address);
    let port = reader.bootstrap_port.to_string();
    let wrong = |prefill: [&str; 2], decode: &str| {
        let [url, port] = prefill;
        Process::start(&["router", "--port", "0", "--prefill", url, port, "--decode", decode])
    };
    let swapped = wrong([&url(&writer), &port], &url(&reader));
    await_said(&swapped, "it serves the other phase and cannot be a prefill worker");
    await_said(&swapped, "it serves the other phase and cannot be a decode worker");
    let elsewhere = wrong([&url(&reader), "9"], &url(&writer));
    await_said(&elsewhere, "but this router was given port 9");
    assert_eq!(swapped.get("/health").0, 503);
    let (status, text) = swapped.post("/v1/completions", &body(1, 20, 4).to_string());
    assert!(status == 503 && text.contains("no_worker"), "{status} {text}");
    assert_eq!(reader.metric("baton_request_failures_total{", ""), 0.0);
    Fleet::new(vec![reader], vec![writer]);
}

/// The bootstrap port also answers health probes, so the router takes it for a worker.
#[test]
fn a_router_says_that_it_cannot_identify_what_a_url_leads_to() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let registry = format!("http://127.0.0.1:{}", reader.bootstrap_port);
    let url = format!("http://{}", writer.address);
    let router =
        Process::start(&["router", "--port", "0", "--prefill", &registry, "--decode", &url]);
    await_said(&router, "worker may be misconfigured");
    await_said(&router, "worker is up role=decode");
    let workers: Value = serde_json::from_str(&router.get("/workers").1).unwrap();
    let listed = workers["workers"].as_array().unwrap();
    let doubted = listed.iter().find(|worker| worker["url"] == registry.as_str()).unwrap();
    let reason = doubted["reason"].as_str().unwrap();
    assert!(reason.starts_with("/server_info answers with status 404"), "{reason}");
    let fitting = listed.iter().find(|worker| worker["url"] == url.as_str()).unwrap();
    assert_eq!(fitting["reason"], Value::Null);
    Fleet::new(vec![reader], vec![writer]);
}

/// A router forwards identity queries, so it would answer like a worker. A router in a worker's
/// place must not be taken for the worker behind it.
#[test]
fn a_router_is_not_taken_for_a_worker() {
    let (reader, writer) = (prefill(&[]), start("decode", &[]));
    let url = |process: &Process| format!("http://{}", process.address);
    let port = reader.bootstrap_port.to_string();
    let keys = KeyFile::new(b'k');
    let inner = Process::start(&[
        "router",
        "--port",
        "0",
        "--prefill",
        &url(&reader),
        &port,
        "--decode",
        &url(&writer),
        "--api-key-file",
        keys.path(),
    ]);
    await_ready(&inner);
    for (prefill, decode, role) in [(&inner, &writer, "prefill"), (&reader, &inner, "decode")] {
        let named = [&url(prefill), "--decode", &url(decode)];
        let outer = Process::start(&[&["router", "--port", "0", "--prefill"][..], &named].concat());
        await_said(&outer, &format!("it is a router, not a {role} worker"));
        assert_eq!(outer.get("/health").0, 503);
        let (status, text) = outer.post("/v1/completions", &body(1, 20, 4).to_string());
        assert!(status == 503 && text.contains("no_worker"), "{status} {text}");
    }
    Fleet::new(vec![reader], vec![writer]);
}

/// No hand-off, and no prefill worker.
#[test]
fn a_mixed_worker_named_as_a_decode_worker_serves_alone() {
    let whole = start("serve", &["--mixed"]);
    let url = format!("http://{}", whole.address);
    let router = Process::start(&["router", "--port", "0", "--decode", &url]);
    await_ready(&router);
    let asked = body(3, 40, 8).to_string();
    let [(status, through), (_, itself)] =
        [&router, &whole].map(|at| at.post("/v1/completions", &asked));
    assert_eq!(status, 200, "{through}");
    assert_eq!(choices(&(status, through)), choices(&(200, itself)));
    let (_, listed) = router.get("/workers");
    assert!(
        listed.contains(r#""worker_type":"mixed""#) && listed.contains(r#""status":"ready""#),
        "{listed}"
    );
    let misplaced = Process::start(&["router", "--port", "0", "--prefill", &url]);
    await_said(&misplaced, "give it to --decode");
}

#[track_caller]
fn await_ready(router: &Process) {
    let begun = Instant::now();
    while router.get("/health").0 != 200 {
        assert!(begun.elapsed() < PATIENCE, "it never has a pair");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A worker that drains finishes its requests, and also what its partner has not yet seen. Its end
/// causes no failure.
#[test]
fn a_drained_prefill_worker_finishes_and_ends_as_announced() {
    let (reader, decode) = (prefill(&[]), start("decode", &[]));
    let (from, to) = (reader.address, decode.address);
    let done = dual(from, to, with_room(body(1, 20, 4), &reader, 1)).1;
    assert_eq!(done.0, 200, "{}", done.1);
    // Its room waits for a decode leg, and the drain waits for the room.
    let sent = with_room(body(2, 20, 4), &reader, 2);
    let same = sent.clone();
    let last = thread::spawn(move || post(from, "/v1/completions", &same));
    let begun = Instant::now();
    while reader.metric("sglang:num_prefill_bootstrap_queue_reqs{", "") == 0.0 {
        assert!(begun.elapsed() < PATIENCE, "the request never waits for its decode leg");
        thread::sleep(Duration::from_millis(5));
    }
    reader.terminate();
    await_said(&reader, "draining");
    // The reader will not accept a room that is new to it.
    let (status, text) = decode.post("/v1/completions", &with_room(body(3, 20, 4), &reader, 3));
    let own = r#""param":"bootstrap_host","code":"draining""#;
    assert!(status == 503 && text.contains(own), "{status} {text}");
    let (status, text) = decode.post("/v1/completions", &sent);
    assert_eq!(status, 200, "{text}");
    assert_eq!(last.join().unwrap().0, 200);
    assert_eq!(reader.exit_code(), Some(0));
    await_said(&decode, "control link closed after Bye");
    decode.await_idle();
}
