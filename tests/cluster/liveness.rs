//! A peer is dead after its configured time of silence. A slow peer is not.

use crate::fleet::Fleet;
use crate::members::{await_workers, listed, router, serves};
use crate::process::{PATIENCE, Process, post};
use crate::{body, choices, dual, prefill, start, with_room};
use baton::limits::ENGINE_STILL_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const SILENT: &str = "silent for too long";

/// Threads that only compute; they end on drop.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<u64>>,
}

impl Busy {
    fn threads(count: usize) -> Busy {
        let stop = Arc::<AtomicBool>::default();
        let spin = |stop: Arc<AtomicBool>| {
            let mut turns = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                turns = std::hint::black_box(turns + 1);
            }
            turns
        };
        let threads = (0..count)
            .map(|_| {
                thread::spawn({
                    let stop = stop.clone();
                    move || spin(stop)
                })
            })
            .collect();
        Busy { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok_and(|turns| turns > 0), "it was busy");
        }
    }
}

/// Requests run all the time. Afterwards nothing runs: idle links are checked too.
#[test]
fn no_live_worker_is_declared_dead_beside_eight_busy_threads() {
    let router = router(0, &[]);
    let registry = format!("http://{}", router.address);
    let (reader, writer) =
        (prefill(&["--registry", &registry]), start("decode", &["--registry", &registry]));
    await_workers(&router, 2);
    serves(&router, 0);
    let busy = Busy::threads(8);
    let begun = Instant::now();
    let mut salt = 1;
    while begun.elapsed() < Duration::from_secs(15) {
        serves(&router, salt);
        salt += 1;
        if begun.elapsed() > Duration::from_secs(10) {
            thread::sleep(Duration::from_secs(3));
        }
    }
    drop(busy);
    assert_eq!(listed(&router).len(), 2);
    for worker in [&reader, &writer] {
        assert!(!worker.has_said(SILENT) && !worker.has_said("link is down"));
    }
    assert!(!router.has_said("worker is down") && !router.has_said("worker leaves"));
}

/// A decode worker with this timeout, in a session with a prefill worker that is then stopped.
fn still(timeout: &str) -> (Process, Process) {
    let reader = prefill(&[]);
    let writer = start("decode", &["--peer-timeout", timeout]);
    choices(&dual(reader.address, writer.address, with_room(body(1, 40, 4), &reader, 1)).1);
    (reader, writer)
}

#[test]
fn a_peer_that_stands_still_is_dead_after_the_time_that_was_asked_for() {
    let (reader, writer) = still("0.5");
    let (to, sent) = (writer.address, with_room(body(2, 40, 4), &reader, 2));
    reader.pause();
    let (status, text) = post(to, "/v1/completions", &sent);
    assert_eq!(status, 502, "{text}");
    writer.await_said(SILENT);
    reader.go_on();
    writer.await_idle();

    let (reader, writer) = still("30");
    reader.pause();
    thread::sleep(Duration::from_secs(5));
    reader.go_on();
    choices(&dual(reader.address, writer.address, with_room(body(3, 40, 4), &reader, 3)).1);
    assert!(!writer.has_said(SILENT), "half a minute was asked for");
    let begun = Instant::now();
    reader.await_idle();
    assert!(begun.elapsed() < PATIENCE);
}

/// One event is one log line, of the paused worker and of those that miss it.
#[test]
fn a_worker_that_was_paused_is_told_of_once() {
    let fleet = Fleet::new(vec![prefill(&[])], vec![start("decode", &[])]);
    let (router, reader) = (&fleet.router, &fleet.prefill[0]);
    reader.pause();
    router.await_said("worker is down role=prefill");
    // It is probed again and again. Its engine has not moved for as long as a hung one.
    thread::sleep(ENGINE_STILL_MAX + Duration::from_secs(2));
    reader.go_on();
    reader.await_said("was paused seconds=");
    router.await_times("worker is up role=prefill", 2);
    assert_eq!((reader.times_said(" WARN "), reader.times_said(" ERROR ")), (1, 0));
    assert_eq!((router.times_said(" WARN "), router.times_said(" ERROR ")), (1, 0));
}

/// A router that waits for both legs, as SGLang's does, learns only this way that decode is dead.
#[test]
fn a_prefill_worker_waits_only_so_long_for_decode_to_ask() {
    let (prefill, decode) = (prefill(&["--bootstrap-timeout", "1"]), start("decode", &[]));
    let (status, text) = prefill.post("/v1/completions", &with_room(body(1, 40, 4), &prefill, 1));
    assert!(status == 502 && text.contains("peer_lost"), "{status} {text}");
    prefill.await_idle();
    choices(&dual(prefill.address, decode.address, with_room(body(1, 40, 4), &prefill, 2)).1);
}
