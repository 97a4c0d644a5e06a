//! Hand-offs from guest to guest, over a wire that loses, delays and reorders RoCE frames, or is
//! cut.
//!
//! The tests run in one guest and start processes in the other. Without another guest, they do
//! nothing.

use crate::far::{self, FAR, LEADS, NEAR};
use crate::fleet::Fleet;
use crate::relay::{RULES, Rule};
use crate::workers::{arguments, await_served, body, ids, start};
use serde_json::Value;
use std::env;
use std::net::UdpSocket;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn there_is_another() -> bool {
    env::var_os(LEADS).is_some()
}

/// What becomes of frames from now on.
fn set(rule: &Rule) {
    let socket = UdpSocket::bind((NEAR, 0)).expect("a socket");
    let rule = serde_json::to_vec(rule).expect("a rule");
    socket.send_to(&rule, (FAR, RULES)).expect("a wire");
}

fn clean() -> Rule {
    Rule { name: "clean".into(), ..Rule::default() }
}

fn lossy() -> Rule {
    Rule { name: "lossy".into(), delay: 2000, lost: 15, late: 5, lateness: 3000, ..Rule::default() }
}

/// All that RoCE sends arrives when both ends have long given it up.
fn held() -> Rule {
    Rule { name: "held".into(), late: 1000, lateness: 2_000_000, ..Rule::default() }
}

fn cut(after: u64, is_whole: bool) -> Rule {
    Rule { name: "cut".into(), cut_after: Some(after), cut_is_whole: is_whole, ..Rule::default() }
}

/// `baton bench transfer` with the process there.
fn bench(peer: &str, more: &[&str]) -> Output {
    let args = [
        "bench",
        "transfer",
        "--transport",
        "rdma",
        "--duration",
        "0",
        "--json",
        "--connect",
        peer,
    ];
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(args).args(more).output();
    let output = output.expect("the binary was built");
    eprintln!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn listening() -> (far::Output, String) {
    let mut other = far::Output::of(&["bench", "transfer", "--listen", &format!("{FAR}:0")]);
    let line = other.await_line("listening on ");
    let peer = line.trim().rsplit(' ').next().expect("an address").to_string();
    (other, peer)
}

/// How many rows were handed over byte for byte.
#[track_caller]
fn verified(output: &Output) -> usize {
    assert!(output.status.success(), "{}", output.status);
    String::from_utf8_lossy(&output.stdout).matches("\"verified\":true").count()
}

const MANY_SMALL: [&str; 7] =
    ["--pages", "8", "--layers", "28", "--item-bytes", "2048", "--fragmented"];

fn check_cases(cases: &[&[&str]]) {
    let (_other, peer) = listening();
    for case in cases {
        assert_eq!(verified(&bench(&peer, &[case, &["--layout", "layer-major"][..]].concat())), 1);
    }
}

#[test]
#[ignore = "needs another guest"]
fn kv_is_handed_over_between_two_hosts() {
    if there_is_another() {
        set(&clean());
        check_cases(&[&["--case", "tiny-2k"], &MANY_SMALL]);
    }
}

/// What is lost is sent again, by the NIC, and nothing lands where it should not.
#[test]
#[ignore = "needs another guest"]
fn kv_is_whole_whatever_the_wire_loses_delays_and_reorders() {
    if there_is_another() {
        set(&lossy());
        check_cases(&[&["--case", "tiny-2k"], &["--case", "smol-128"], &MANY_SMALL]);
        set(&clean());
    }
}

/// Both sides say so, and the next row is handed over once the wire is back.
#[test]
#[ignore = "needs another guest"]
fn a_cut_amid_a_hand_off_ends_it_on_both_sides() {
    if there_is_another() {
        let (mut other, peer) = listening();
        let own =
            ["--pages", "8", "--layers", "4", "--item-bytes", "32768", "--layout", "layer-major"];
        set(&cut(500, false));
        let output = bench(&peer, &own);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("unreachable"), "{said}");
        set(&clean());
        other.await_line("the hand-off failed: ");
        assert_eq!(verified(&bench(&peer, &own)), 1);
    }
}

const PREFILL: [&str; 6] = ["--transfer", "rdma", "--bootstrap-port", "0", "--control-port", "0"];
const DECODE: [&str; 4] = ["--transfer", "rdma", "--bootstrap-allow", "10.9.2.0/24"];

/// Prefill there and decode here, or the other way round; the router is here.
fn fleet(prefill_is_far: bool) -> Fleet {
    let far = |command, more: &[&'static str]| {
        far::start(&arguments(command, &[more, &["--host", FAR, "--insecure"]].concat()))
    };
    let near = |command, more: &[&'static str]| {
        start(command, &[more, &["--host", NEAR, "--insecure"]].concat())
    };
    let (prefill, decode) = match prefill_is_far {
        true => (far("prefill", &PREFILL), near("decode", &DECODE)),
        false => (near("prefill", &PREFILL), far("decode", &DECODE)),
    };
    Fleet::new(vec![prefill], vec![decode])
}

/// Answers as from one process, over a wire that loses.
fn check_answers(fleet: &Fleet) {
    let alone = start("serve", &["--mixed"]);
    set(&lossy());
    for (salt, tokens) in [(1, 5), (2, 100), (3, 230)] {
        let body = body(salt, tokens);
        let expected = ids(alone.post("/v1/completions", &body));
        assert_eq!(ids(fleet.router.post("/v1/completions", &body)), expected, "{tokens} tokens");
    }
    set(&clean());
}

/// While the wire is so, the client hears what became of its request.
fn check_fails(fleet: &Fleet, rule: &Rule) {
    set(rule);
    let (status, text) = fleet.router.post("/v1/completions", &body(4, 230));
    eprintln!("{rule:?}: {status} {text}");
    set(&clean());
    let answer: Value = serde_json::from_str(&text).unwrap();
    let code = answer["error"]["code"].as_str().unwrap_or_default();
    assert!(status == 502 && ["unreachable", "peer_lost"].contains(&code), "{status} {text}");
}

fn check_workers(mut fleet: Fleet) {
    check_answers(&fleet);
    let expected = ids(fleet.router.post("/v1/completions", &body(4, 230)));
    for is_whole in [false, true] {
        check_fails(&fleet, &cut(4, is_whole));
        assert_eq!(await_served(&fleet, &body(4, 230)), expected);
    }
    // While others are served, late packets of a failed request arrive. They must not change KV.
    let others: Vec<_> = (5..8)
        .map(|salt| (salt, ids(fleet.router.post("/v1/completions", &body(salt, 230)))))
        .collect();
    check_fails(&fleet, &held());
    let begun = Instant::now();
    while begun.elapsed() < 2 * Duration::from_micros(held().lateness) {
        for (salt, expected) in &others {
            assert_eq!(&await_served(&fleet, &body(*salt, 230)), expected);
        }
    }
    fleet.check_idle();
}

#[test]
#[ignore = "needs another guest"]
fn workers_on_two_hosts_with_prefill_there() {
    if there_is_another() {
        check_workers(fleet(true));
    }
}

#[test]
#[ignore = "needs another guest"]
fn workers_on_two_hosts_with_decode_there() {
    if there_is_another() {
        check_workers(fleet(false));
    }
}
