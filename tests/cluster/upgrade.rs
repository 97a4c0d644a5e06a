//! Workers and a router of the last release together with those of this build, in every mixture.
//!
//! An upgrade replaces one process after the other, so each mixture occurs. Each mixture must serve
//! every flow with the same tokens as this build.

use crate::process::{PATIENCE, Process};
use crate::{COMMON, MODEL, body, choices, dual, with_room};
use baton::model::forward::cpu::available_kernels;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

const FLOWS: [&str; 3] = ["dual", "prefill-first", "decode-first"];

/// The program that `tools/last-release` builds. Without it, the test is skipped, or fails if
/// `BATON_REQUIRE_LAST_RELEASE` is set.
fn last_release() -> Option<PathBuf> {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/last-release");
    let found = Command::new(tool).arg("--check").output().expect("the tool runs");
    if !found.status.success() {
        let why = String::from_utf8_lossy(&found.stderr);
        let is_required = std::env::var_os("BATON_REQUIRE_LAST_RELEASE").is_some();
        assert!(!is_required, "the last release is required: {}", why.trim());
        eprintln!("SKIPPED: {}", why.trim());
        return None;
    }
    Some(PathBuf::from(String::from_utf8(found.stdout).expect("a path").trim()))
}

fn run(program: &Path, args: &[&str]) -> Process {
    let mut command = Command::new(program);
    command.args(args);
    Process::run(command)
}

fn worker(program: &Path, role: &str, more: &[&str]) -> Process {
    let mut args = vec![role, MODEL];
    args.extend(COMMON);
    args.extend(more);
    run(program, &args)
}

/// A router that sees both workers as healthy.
fn router(program: &Path, flow: &str, prefill: &Process, decode: &Process) -> Process {
    let [prefill_url, decode_url] =
        [prefill, decode].map(|worker| format!("http://{}", worker.address));
    let port = prefill.bootstrap_port.to_string();
    let workers = ["--prefill", &prefill_url, &port, "--decode", &decode_url];
    let router = run(program, &[&["router", "--port", "0", "--flow", flow], &workers[..]].concat());
    let begun = Instant::now();
    while router.metric("smg_worker_health{", "") < 2.0 {
        assert!(begun.elapsed() < PATIENCE, "the router never sees both workers");
        thread::sleep(Duration::from_millis(20));
    }
    router
}

/// The answers of a cluster to the same requests, flow by flow.
fn answers(programs: [&Path; 3]) -> Vec<Value> {
    let [reads, writes, routes] = programs;
    let mut prefill = worker(reads, "prefill", &["--bootstrap-port", "0"]);
    let mut decode = worker(writes, "decode", &[]);
    let mut found = Vec::new();
    for flow in FLOWS {
        let mut router = router(routes, flow, &prefill, &decode);
        for salt in 0..4 {
            // A prompt that is new, one of the same beginning, and one of several chunks.
            let asked = body(salt / 2, 20 + salt * 60, 8).to_string();
            found.push(choices(&router.post("/v1/completions", &asked)));
        }
        router.check_alive();
    }
    for worker in [&mut prefill, &mut decode] {
        worker.await_idle();
        worker.check_alive();
    }
    let handed_over = decode.metric("baton_sessions_total{", "");
    assert!(handed_over >= 1.0, "KV went from one worker to the other");
    found
}

#[test]
fn the_last_release_and_this_build_serve_together_in_every_mixture() {
    let Some(last) = last_release() else { return };
    let this = Path::new(env!("CARGO_BIN_EXE_baton"));
    let expected = answers([this; 3]);
    for mixture in 1..8 {
        let programs: [&Path; 3] =
            std::array::from_fn(|at| if mixture >> at & 1 == 1 { last.as_path() } else { this });
        let is_old = |at: &usize| mixture >> at & 1 == 1;
        let old: Vec<&str> =
            (0..3).filter(is_old).map(|at| ["prefill", "decode", "router"][at]).collect();
        assert_eq!(answers(programs), expected, "of the last release: {}", old.join(", "));
    }
}

/// The last release compares kernel families, and knows no bit classes.
#[test]
fn a_worker_of_the_last_release_pairs_with_its_own_kernels_alone() {
    let Some(last) = last_release() else { return };
    let this = Path::new(env!("CARGO_BIN_EXE_baton"));
    let decode = worker(&last, "decode", &[]);
    let theirs = available_kernels().last().expect("a CPU has kernels");
    for (room, &family) in (1..).zip(available_kernels()) {
        let more = ["--bootstrap-port", "0", "--kernels", family.name()];
        let prefill = worker(this, "prefill", &more);
        let sent = with_room(body(3, 20, 8), &prefill, room);
        let (first, (status, text)) = dual(prefill.address, decode.address, sent);
        if family == *theirs {
            assert_eq!((first.0, status), (200, 200), "{family}: {} {text}", first.1);
            continue;
        }
        assert_eq!(status, 502, "{family}: {text}");
        assert!(text.contains(r#""code":"incompatible""#), "{family}: {text}");
        prefill.await_said("kernels differs");
    }
    decode.await_idle();
}
