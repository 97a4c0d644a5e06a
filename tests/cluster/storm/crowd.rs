//! Hundreds of streams at once through one router, while one of its four workers dies. Each stream
//! ends with its own right tokens, and the router uses little memory for each.

use super::clients::{Case, cases, text};
use super::cluster::{Model, mib};
use super::number;
use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::process::{Process, parse};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const STREAMS: u64 = 500;
/// Least length of a stream, in tokens. The last stream begins before the shortest one ends, also
/// beside other tests.
const TOKENS_MIN: u64 = 120;
/// Longest wait between two events of a stream, and before its first: all other prompts come before
/// it.
const LONGEST: Duration = Duration::from_secs(600);
/// Most memory of a router for one stream: its buffers and the client's token IDs. This is far less
/// than the limit for a client that reads slowly.
const PER_STREAM_MAX: u64 = 64 << 10;

/// What one client saw.
struct Seen {
    first: Duration,
    whole: Duration,
    text: Result<String, String>,
}

fn stream(router: SocketAddr, case: &Case, open: &Barrier, begun: &AtomicUsize) -> Seen {
    open.wait();
    let asked = Instant::now();
    let mut leg = Leg::open(router, "/v1/completions", "", &case.body);
    leg.wait_for(LONGEST);
    let first = if leg.has_events(1) { asked.elapsed() } else { Duration::MAX };
    begun.fetch_add(1, Ordering::Relaxed);
    let text = text(&parse(&leg.end()));
    Seen { first, whole: asked.elapsed(), text }
}

#[test]
fn hundreds_of_streams_at_once_end_well_though_a_worker_dies() {
    let streams = number("BATON_STORM_STREAMS", STREAMS) as usize;
    let model = Model::get_or(|| Dummy::new(&json!({"max_position_embeddings": 2048})));
    let cases = cases(&model, |body| {
        body["stream"] = json!(true);
        let tokens = body["max_tokens"].as_u64().unwrap_or_default() + 40;
        body["max_tokens"] = json!(tokens.max(TOKENS_MIN));
    });
    // For the largest model of this test: 22.5 KiB a token, and at most 359 tokens.
    let (slots, memory) = (streams.to_string(), format!("{}MiB", 8 * streams));
    let common = ["--transfer", "tcp", "--max-running-requests", &slots, "--kv-memory", &memory];
    let worker =
        |command: &str, more: &[&str]| model.start(0, command, &[&common[..], more].concat());
    let prefill = (0..2).map(|_| worker("prefill", &["--bootstrap-port", "0"])).collect();
    let decode = (0..2).map(|_| worker("decode", &[])).collect();
    let mut fleet = Fleet::with(prefill, decode, &["--policy", "least_loaded"]);
    let router = fleet.router.address;
    let memory = |fleet: &Fleet| {
        let workers: Vec<String> = fleet.workers().map(|worker| mib(worker.resident())).collect();
        format!("router {} MiB; workers {} MiB", mib(fleet.router.resident()), workers.join(", "))
    };
    eprintln!("STORM before: {}", memory(&fleet));
    let before = fleet.router.resident();
    let (open, begun, over) = (Barrier::new(streams), AtomicUsize::new(0), AtomicUsize::new(0));
    let (mut peak, mut held_most, mut most) = (0, 0, String::new());
    let asked = Instant::now();
    let seen: Vec<Seen> = thread::scope(|scope| {
        let clients: Vec<_> = (0..streams)
            .map(|number| {
                let (case, open, begun, over) =
                    (&cases[number % cases.len()], &open, &begun, &over);
                scope.spawn(move || {
                    let seen = stream(router, case, open, begun);
                    over.fetch_add(1, Ordering::Relaxed);
                    seen
                })
            })
            .collect();
        let mut killed = false;
        while over.load(Ordering::Relaxed) < streams {
            held_most = held_most.max(held(&fleet.router));
            if fleet.router.resident() > peak {
                peak = fleet.router.resident();
                most = memory(&fleet);
            }
            if !killed && begun.load(Ordering::Relaxed) * 4 > streams {
                fleet.decode.remove(1).kill();
                killed = true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        clients.into_iter().map(|client| client.join().expect("no panic")).collect()
    });
    let took = asked.elapsed();
    let mut failures: BTreeMap<&str, usize> = BTreeMap::new();
    let mut wrong = 0;
    for (number, seen) in seen.iter().enumerate() {
        match &seen.text {
            Ok(text) if *text == cases[number % cases.len()].expected => {}
            Ok(_) => wrong += 1,
            Err(kind) => *failures.entry(kind).or_default() += 1,
        }
    }
    let sorted = |of: fn(&Seen) -> Duration| {
        let mut times: Vec<Duration> = seen.iter().map(of).collect();
        times.sort();
        let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64();
        format!("{:.2}, {:.2}, {:.2}, {:.2} s", at(0), at(50), at(99), at(100))
    };
    let (first, whole) = (sorted(|seen| seen.first), sorted(|seen| seen.whole));
    let metric = |name: &str| fleet.router.metric(name, "");
    let (tried, resumed) =
        (metric("baton_router_retries_total{"), metric("baton_router_resumed_total"));
    eprintln!("STORM most: {most}");
    eprintln!("STORM after: {}", memory(&fleet));
    eprintln!(
        "STORM {streams} streams at once, {held_most} held by the router: {wrong} wrong, \
         failed {failures:?}, {tried} tried again, {resumed} went on elsewhere; \
         to the first event (shortest, median, 99 %, longest) {first}, to the end {whole}; \
         all in {:.1} s",
        took.as_secs_f64()
    );
    assert_eq!((wrong, failures), (0, BTreeMap::new()));
    assert_eq!(held_most, streams, "they were not all there at once");
    assert!(resumed > 0.0, "nothing went on elsewhere");
    let per_stream = peak.saturating_sub(before) / streams as u64;
    assert!(per_stream < PER_STREAM_MAX, "the router holds {per_stream} bytes for each");
    fleet.check_idle();
}

/// How many requests the router has: at workers, and waiting for another attempt.
fn held(router: &Process) -> usize {
    let (_, loads) = router.get("/v1/loads");
    let loads: serde_json::Value = serde_json::from_str(&loads).expect("JSON");
    let of = |load: &serde_json::Value| load["num_total_reqs"].as_u64().unwrap_or(0);
    loads["loads"].as_array().map_or(0, |all| all.iter().map(of).sum()) as usize
}
