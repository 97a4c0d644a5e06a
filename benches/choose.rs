//! The cost of a router's decision among a thousand workers of each role, by policy. The baseline
//! is one pass over the same table. Run it with `cargo bench --bench choose`. Times are CPU times
//! of this thread, so that other programs do not count; `wall p99` is wall time.
//!
//! Each round makes the same decisions in every row, and the rounds go over all rows in turn. Each
//! decision counts with the median of its times. Noise of the host affects different decisions in
//! each round; a slow decision is slow in all rounds. `one round` is the p99 of the worst single
//! round.

#![allow(unsafe_code, reason = "the standard library has no CPU time of a thread")]

use baton::config::Policy;
use baton::ids::Leg;
use baton::routing::attempts::AvoidList;
use baton::routing::balancer::LoadBalancer;
use baton::routing::demand::Demand;
use baton::routing::load::WorkerLoad;
use baton::stdx::rng::mix;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Workers of each role.
const WORKERS: usize = 1000;
/// Requests that are open at any time.
const OPEN: usize = 4000;
const DECISIONS: usize = 20_000;
/// Number of rounds; odd, because of the median.
const ROUNDS: usize = 7;

fn main() {
    println!(
        "{WORKERS} prefill and {WORKERS} decode workers, {OPEN} requests open; \
         a decision is a pair, reserved"
    );
    println!(
        "{:<14} {:>9} {:>9} {:>9} {:>9} {:>12}",
        "us", "p50", "p99", "max", "wall p99", "one round"
    );
    let rows = [
        ("bare scan", None),
        ("round_robin", Some(Policy::RoundRobin)),
        ("random", Some(Policy::Random)),
        ("power_of_two", Some(Policy::PowerOfTwo)),
        ("least_loaded", Some(Policy::LeastLoaded)),
        ("cache_aware", Some(Policy::CacheAware)),
        ("lmetric", Some(Policy::Lmetric)),
        ("slo", Some(Policy::Slo)),
        ("conditional", Some(Policy::Conditional)),
    ];
    let mut rounds = rows.map(|_| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        for ((_, policy), rounds) in rows.iter().zip(&mut rounds) {
            rounds.push(policy.map_or_else(scans, decisions));
        }
    }
    for ((name, _), rounds) in rows.iter().zip(&rounds) {
        told(name, rounds);
    }
}

fn scans() -> Vec<[Duration; 2]> {
    let table: Vec<WorkerLoad> = (0..2 * WORKERS)
        .map(|at| WorkerLoad { usable: true, reserved: at as u32, ..WorkerLoad::default() })
        .collect();
    let scan = || {
        let least =
            black_box(&table).iter().filter(|load| load.usable).min_by_key(|load| load.reserved);
        black_box(least);
    };
    (0..DECISIONS).map(|_| timed(scan).0).collect()
}

/// Prompts of 4 to 63 blocks. The first block is shared by all; the others belong to one chat.
fn work(at: usize) -> Demand {
    let chat = mix(at as u64) % 3000;
    let blocks = 4 + mix(chat) % 60;
    let blocks = (0..blocks)
        .map(|depth| if depth == 0 { 1 } else { mix(chat << 8 | depth) })
        .collect::<Box<[u64]>>();
    Demand { sequences: 1, samples: 1, tokens: blocks.len() as u32 * 512 + 100, block: 512, blocks }
}

fn decisions(policy: Policy) -> Vec<[Duration; 2]> {
    let base = Instant::now();
    let mut router = LoadBalancer::new(policy);
    for role in [Leg::Prefill, Leg::Decode] {
        for _ in 0..WORKERS {
            let worker = router.join(role, base);
            router.probed(worker, true, base);
        }
    }
    let mut open = std::collections::VecDeque::new();
    let mut times = Vec::with_capacity(DECISIONS);
    for at in 0..OPEN + DECISIONS {
        let (work, now) = (work(at), base + Duration::from_millis(at as u64));
        let (time, pair) = timed(|| {
            router.choose_serving(&work, &AvoidList::default(), now).expect("all are well")
        });
        open.push_back(pair);
        if at < OPEN {
            continue;
        }
        times.push(time);
        if let Some((prefill, decode)) = open.pop_front() {
            prefill.into_iter().chain([decode]).for_each(|booking| router.release(booking, now));
        }
    }
    times
}

/// Runs a closure. Also returns its CPU time and its wall time.
fn timed<R>(what: impl FnOnce() -> R) -> ([Duration; 2], R) {
    let (begun, busy) = (Instant::now(), on_cpu());
    let result = what();
    ([on_cpu() - busy, begun.elapsed()], result)
}

/// CPU time of this thread.
fn on_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one `timespec`, which this function owns.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "each thread has a clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn told(name: &str, rounds: &[Vec<[Duration; 2]>]) {
    let [busy, wall] = [0, 1].map(|clock| {
        sorted((0..DECISIONS).map(|at| {
            let times = sorted(rounds.iter().map(|round| round[at][clock]));
            times[times.len() / 2]
        }))
    });
    let worst = rounds.iter().map(|round| share(&sorted(round.iter().map(|times| times[0])), 0.99));
    println!(
        "{name:<14} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>12.2}",
        share(&busy, 0.5),
        share(&busy, 0.99),
        share(&busy, 1.0),
        share(&wall, 0.99),
        worst.fold(0.0, f64::max)
    );
}

fn sorted(times: impl Iterator<Item = Duration>) -> Vec<Duration> {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    times
}

/// The quantile of sorted times, in microseconds.
fn share(times: &[Duration], share: f64) -> f64 {
    times[((times.len() - 1) as f64 * share) as usize].as_nanos() as f64 / 1e3
}
