//! Policies that compare prompts or predict times, in a router with scripted workers.

use super::client::Router;
use super::worker::{Asked, PATIENCE, Worker};
use std::thread;
use std::time::{Duration, Instant};

const ALONE: &str = r#"{"handoff":{"local_prefill":true}}"#;

/// A chat with these turns, each of about 2 kB.
fn chat(turns: &[&str]) -> String {
    let turn = |name: &&str| {
        format!(r#"{{"role":"user","content":"{}"}}"#, name.repeat(2000 / name.len()))
    };
    format!(r#"{{"messages":[{}]}}"#, turns.iter().map(turn).collect::<Vec<_>>().join(","))
}

/// The worker that gets the next request, and the request.
fn next(workers: &[&Worker]) -> (usize, Asked) {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        for (place, worker) in workers.iter().enumerate() {
            if let Some(asked) = worker.try_asked() {
                return (place, asked);
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("no worker is asked");
}

/// Has a chat served to its end. Returns which worker computed the prompt.
fn served(router: &Router, body: &str, prefill: &[&Worker], decode: &[&Worker]) -> usize {
    let mut client = router.post("/v1/chat/completions", body);
    let (place, mut read) = next(prefill);
    let (_, mut generated) = next(decode);
    read.answer("200 OK", "{}");
    generated.answer("200 OK", r#"{"choices":[]}"#);
    assert_eq!(client.answer().0, 200);
    place
}

#[test]
fn every_policy_has_a_pair_serve() {
    for policy in ["random", "power_of_two", "cache_aware", "lmetric", "slo", "conditional"] {
        let (prefill, decode) = ([Worker::start(), Worker::start()], Worker::start());
        let router = Router::start(&[&prefill[0], &prefill[1]], &[&decode], &["--policy", policy]);
        router.wait_for_workers(3);
        for _ in 0..4 {
            served(&router, &chat(&["a"]), &[&prefill[0], &prefill[1]], &[&decode]);
        }
    }
}

#[test]
fn a_chat_continues_on_the_worker_that_read_it() {
    for policy in ["cache_aware", "lmetric", "slo"] {
        let (prefill, decode) =
            ([Worker::start(), Worker::start(), Worker::start()], Worker::start());
        let workers = [&prefill[0], &prefill[1], &prefill[2]];
        let flags = ["--prefill-policy", policy, "--decode-policy", "random"];
        let router = Router::start(&workers, &[&decode], &flags);
        router.wait_for_workers(4);
        let first = served(&router, &chat(&["alpha"]), &workers, &[&decode]);
        let other = served(&router, &chat(&["beta"]), &workers, &[&decode]);
        assert_ne!(
            first, other,
            "{policy}: no worker has it, and others have less in their caches"
        );
        for turns in [&["alpha", "gamma"][..], &["alpha", "gamma", "delta"]] {
            assert_eq!(served(&router, &chat(turns), &workers, &[&decode]), first, "{policy}");
        }
        assert_eq!(
            served(&router, &chat(&["beta", "gamma"]), &workers, &[&decode]),
            other,
            "{policy}"
        );
    }
}

#[test]
fn a_request_with_a_late_forecast_is_refused_at_once() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    // 500 tokens take 25 ms; a second prompt waits for the first.
    let flags = ["--policy", "slo", "--slo-ttft-ms", "60", "--prefill-ms", "0,0.08,0"];
    let router = Router::ready(&[&prefill], &[&decode], &flags);
    let mut first = router.post("/v1/chat/completions", &chat(&["a"]));
    let (mut read, mut generated) = (prefill.asked(), decode.asked());
    let mut late = router.post("/v1/chat/completions", &chat(&["b"]));
    let (status, body) = late.answer();
    assert_eq!((status, late.header("retry-after")), (429, Some("1")), "{body}");
    assert!(body.contains("ms; the limit of --slo-ttft-ms is 60"), "{body}");
    assert!(prefill.is_unasked() && decode.is_unasked());
    read.answer("200 OK", "{}");
    generated.answer("200 OK", r#"{"choices":[]}"#);
    assert_eq!(first.answer().0, 200);
    served(&router, &chat(&["b"]), &[&prefill], &[&decode]);
}

#[test]
fn decode_reads_a_prompt_with_a_short_uncached_rest_itself() {
    let (prefill, decode) = (Worker::start(), Worker::with_identity(ALONE));
    let router = Router::start(
        &[&prefill],
        &[&decode],
        &["--policy", "conditional", "--kv-bytes-per-token", "4194304"],
    );
    // The router is ready with the decode worker alone.
    router.wait_for_workers(2);
    let long = ["x"; 12];
    served(&router, &chat(&long), &[&prefill], &[&decode]);
    // Nearly the complete prompt is cached there.
    let mut client = router.post("/v1/chat/completions", &chat(&[&long[..], &["y"]].concat()));
    let mut asked = decode.asked();
    assert!(asked.json().get("bootstrap_room").is_none(), "it has no partner");
    assert!(prefill.is_unasked());
    asked.answer("200 OK", r#"{"choices":[]}"#);
    assert_eq!(client.answer().0, 200);
    // Nothing of this prompt is cached there.
    served(&router, &chat(&["z"; 12]), &[&prefill], &[&decode]);
}

/// Load from another router is seen in a worker's report. No request waits for a report.
#[test]
fn load_that_a_worker_reports_is_avoided_although_another_router_booked_it() {
    let check = |policy: &'static str| {
        let (prefill, decode) = (Worker::start(), [Worker::start(), Worker::start()]);
        let asked = |decode: &[Worker; 2], sequences: [u32; 2]| {
            // Set before the router starts, so that its first report is not empty.
            decode
                .iter()
                .zip(sequences)
                .for_each(|(worker, sequences)| worker.will_report(sequences));
        };
        asked(&decode, [9, 0]);
        let flags = ["--policy", policy, "--health-check-interval-secs", "1"];
        let router = Router::start(&[&prefill], &[&decode[0], &decode[1]], &flags);
        router.wait_for_workers(3);
        let workers = [&decode[0], &decode[1]];
        let chosen = |router: &Router| {
            let mut client = router.post("/v1/chat/completions", &chat(&["a"]));
            let (_, mut read) = next(&[&prefill]);
            let (place, mut generated) = next(&workers);
            read.answer("200 OK", "{}");
            generated.answer("200 OK", r#"{"choices":[]}"#);
            assert_eq!(client.answer().0, 200);
            place
        };
        decode.iter().for_each(Worker::await_report);
        for _ in 0..3 {
            assert_eq!(chosen(&router), 1, "{policy}");
        }
        asked(&decode, [0, 9]);
        decode.iter().for_each(Worker::await_report);
        for _ in 0..3 {
            assert_eq!(chosen(&router), 0, "{policy}");
        }
    };
    // At the same time: each of them waits for reports.
    thread::scope(|scope| {
        for policy in ["least_loaded", "lmetric", "power_of_two"] {
            scope.spawn(move || check(policy));
        }
    });
}

/// The reports of all decode workers are added up for clients that read them as a worker's.
#[test]
fn the_loads_of_a_router_are_those_of_its_decode_workers() {
    let told = r#"{"max_running_requests": 8, "max_total_tokens": 4096}"#;
    let (prefill, decode) =
        (Worker::start(), [Worker::with_identity(told), Worker::with_identity(told)]);
    decode.iter().zip([9, 1]).for_each(|(worker, sequences)| worker.will_report(sequences));
    let flags = ["--health-check-interval-secs", "1"];
    let router = Router::start(&[&prefill], &[&decode[0], &decode[1]], &flags);
    router.wait_for_workers(3);
    decode.iter().for_each(Worker::await_report);
    let loads: serde_json::Value =
        serde_json::from_str(&router.get("/v1/loads").answer().1).unwrap();
    let load = &loads["loads"][0];
    let told = ["max_running_requests", "max_total_num_tokens", "num_used_tokens"]
        .map(|field| &load[field]);
    assert_eq!(told, [16, 8192, 1000], "{load}");
    assert_eq!(load["token_usage"], 1000.0 / 8192.0, "{load}");
}
