//! What a router's decision costs among a thousand workers of each role, by policy, beside the bare limit: one pass over
//! the same table. `cargo bench --bench choose`. Times are those of this thread on its CPU, so that turns of others do not
//! count; `wall p99` is by the wall's clock.
//!
//! A row's decisions are made anew in each of several rounds, which go over all rows in turn. They are the same ones each
//! time, and of each the median of its times counts: a noisy host makes other decisions slow in each round, and what is slow
//! by itself is slow in all. `one round` is p99 of the worst round, as decisions came that happened once.

#![allow(unsafe_code, reason = "the standard library does not tell a thread's time on the CPU")]

use baton::cluster::flight::Avoid;
use baton::cluster::loads::Load;
use baton::cluster::router::{Role, Router};
use baton::cluster::work::{Work, mix};
use baton::config::resolved::Policy;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Of each role.
const WORKERS: usize = 1000;
/// Requests that are open at a time.
const OPEN: usize = 4000;
const DECISIONS: usize = 20_000;
/// Odd, for a median.
const ROUNDS: usize = 7;

fn main() {
    println!(
        "{WORKERS} prefill and {WORKERS} decode workers, {OPEN} requests open; a decision is a pair, booked"
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
    let table: Vec<Load> = (0..2 * WORKERS)
        .map(|at| Load { usable: true, booked: at as u32, ..Load::default() })
        .collect();
    let scan = || {
        let least =
            black_box(&table).iter().filter(|load| load.usable).min_by_key(|load| load.booked);
        black_box(least);
    };
    (0..DECISIONS).map(|_| timed(scan).0).collect()
}

/// Prompts of 4 to 63 blocks: the first is everybody's, a chat's are its own.
fn work(at: usize) -> Work {
    let chat = mix(at as u64) % 3000;
    let blocks = 4 + mix(chat) % 60;
    let blocks = (0..blocks)
        .map(|depth| if depth == 0 { 1 } else { mix(chat << 8 | depth) })
        .collect::<Box<[u64]>>();
    Work { sequences: 1, samples: 1, tokens: blocks.len() as u32 * 512 + 100, block: 512, blocks }
}

fn decisions(policy: Policy) -> Vec<[Duration; 2]> {
    let base = Instant::now();
    let mut router = Router::new(policy);
    for role in [Role::Prefill, Role::Decode] {
        for _ in 0..WORKERS {
            let worker = router.join(role, base);
            router.probed(worker, true, base);
        }
    }
    let mut open = std::collections::VecDeque::new();
    let mut times = Vec::with_capacity(DECISIONS);
    for at in 0..OPEN + DECISIONS {
        let (work, now) = (work(at), base + Duration::from_millis(at as u64));
        let (time, pair) =
            timed(|| router.choose_serving(&work, &Avoid::default(), now).expect("all are well"));
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

/// On the CPU, and by the wall's clock.
fn timed<R>(what: impl FnOnce() -> R) -> ([Duration; 2], R) {
    let (begun, busy) = (Instant::now(), on_cpu());
    let result = what();
    ([on_cpu() - busy, begun.elapsed()], result)
}

/// How long this thread has been on a CPU.
fn on_cpu() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes one `timespec`, which is ours.
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

/// Microseconds that this share takes no longer than.
fn share(times: &[Duration], share: f64) -> f64 {
    times[((times.len() - 1) as f64 * share) as usize].as_nanos() as f64 / 1e3
}
