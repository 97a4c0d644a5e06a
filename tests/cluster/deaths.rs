//! Hand-offs that end early, for every reason and at every point. The survivor frees all resources,
//! sends its client an error, and serves the next request.
//!
//! The tests wait for points that are visible from outside: a leg that waits alone, a half-computed
//! prompt, a stream that has begun.
//! The messages between these points pass within milliseconds, so the tests try a range of delays.
//! The first range begins at the first contact of two workers (look-up, Announce, Welcome,
//! transport set-up, Destination). The second begins in an established session (Destination,
//! chunks, Done).

use crate::dummy::Dummy;
use crate::leg::Leg;
use crate::process::{PATIENCE, Process, post};
use crate::{body, choices, dual, prefill, start, with_room};
use baton::limits::PEER_SILENCE_MAX;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

/// The event that ends the hand-off.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Blow {
    ClientLeaves,
    AbortAtPrefill,
    AbortAtDecode,
    PrefillDies,
    DecodeDies,
}

/// When it happens.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Point {
    /// This many ms after both legs are sent to workers without a session.
    FirstContact(u64),
    /// The decode leg waits for KV; there is no prefill leg.
    DecodeLegAlone,
    /// The prefill leg waits for its Destination; there is no decode leg.
    PrefillLegAlone,
    /// Some chunks of the prompt are computed and handed over, many are not.
    Chunks,
    /// This many ms after both legs of a short request are sent in an established session.
    Session(u64),
    /// The client has the first token.
    Decoding,
}

const SWEEP_MS: [u64; 6] = [0, 2, 5, 10, 20, 40];

fn points() -> Vec<Point> {
    let mut points =
        vec![Point::DecodeLegAlone, Point::PrefillLegAlone, Point::Chunks, Point::Decoding];
    points.extend(SWEEP_MS.map(Point::FirstContact));
    points.extend(SWEEP_MS.map(Point::Session));
    points
}

/// Whether an answer is a stream with a proper end.
fn is_whole(answer: &str) -> bool {
    answer.starts_with("HTTP/1.1 200")
        && answer.contains("data: [DONE]")
        && !answer.contains("\"error\"")
}

/// A prefill and a decode worker of a slow model.
struct Pair {
    dummy: Dummy,
    transfer: &'static str,
    prefill: Process,
    decode: Process,
    room: u64,
}

impl Pair {
    fn new(transfer: &'static str) -> Pair {
        let dummy = Dummy::slow();
        let prefill = Pair::prefill(&dummy, transfer, 0);
        let decode = Pair::decode(&dummy, transfer);
        Pair { dummy, transfer, prefill, decode, room: 0 }
    }

    fn prefill(dummy: &Dummy, transfer: &str, bootstrap_port: u16) -> Process {
        let port = bootstrap_port.to_string();
        let flags =
            ["--bootstrap-port", &port, "--chunked-prefill-size", "8", "--transfer", transfer];
        dummy.start("prefill", &[&flags[..], &["--max-running-requests", "4"]].concat())
    }

    fn decode(dummy: &Dummy, transfer: &str) -> Process {
        dummy.start("decode", &["--transfer", transfer, "--max-running-requests", "4"])
    }

    /// The body of both legs, with a new room.
    fn body(&mut self, prompt: u32, max_tokens: u32) -> Value {
        self.room += 1;
        let room = self.room;
        let prompt: Vec<u64> =
            (0..prompt).map(|i| 3 + (u64::from(i) * 7 + room * 13) % 380).collect();
        json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
            "stream": true,
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port,
            "bootstrap_room": room})
    }

    fn legs(&self, body: &Value) -> [Option<Leg>; 2] {
        [&self.prefill, &self.decode]
            .map(|worker| Some(Leg::open(worker.address, "/v1/completions", "", body)))
    }

    /// A request succeeds at once. After the death of a prefill worker, decode first leaves its
    /// address alone for a while.
    #[track_caller]
    fn check_works(&mut self, after: Option<Blow>) {
        let begun = Instant::now();
        loop {
            let body = self.body(40, 3);
            let [prefill, decode] = self.legs(&body).map(Option::unwrap);
            let decode = decode.end();
            if is_whole(&decode) {
                let prefill = prefill.end();
                assert!(is_whole(&prefill), "{prefill}");
                return;
            }
            // As a router does.
            drop(prefill);
            assert!(after == Some(Blow::PrefillDies) && begun.elapsed() < PATIENCE, "{decode}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Brings a request to the point.
    fn steer(&mut self, point: Point) -> [Option<Leg>; 2] {
        if matches!(point, Point::FirstContact(_)) {
            self.decode = Pair::decode(&self.dummy, self.transfer);
        }
        match point {
            Point::FirstContact(ms) | Point::Session(ms) => {
                let body = self.body(24, 4);
                let legs = self.legs(&body);
                thread::sleep(Duration::from_millis(ms));
                legs
            }
            Point::DecodeLegAlone => {
                let leg = Leg::open(self.decode.address, "/v1/completions", "", &self.body(40, 4));
                await_metric(&self.decode, "sglang:num_decode_transfer_queue_reqs{", |count| {
                    count == 1.0
                });
                [None, Some(leg)]
            }
            Point::PrefillLegAlone => {
                let leg = Leg::open(self.prefill.address, "/v1/completions", "", &self.body(40, 4));
                let waiting = "sglang:num_prefill_bootstrap_queue_reqs{";
                await_metric(&self.prefill, waiting, |count| count == 1.0);
                [Some(leg), None]
            }
            Point::Chunks => {
                const PROMPT: u32 = 1000;
                let name = "sglang:prompt_tokens_total{";
                for _ in 0..20 {
                    let before = self.prefill.metric(name, "");
                    let body = self.body(PROMPT, 4);
                    let legs = self.legs(&body);
                    let read =
                        await_metric(&self.prefill, name, |read| read > before + 16.0) - before;
                    if read < f64::from(PROMPT) / 2.0 {
                        return legs;
                    }
                    // This process was delayed. Try again.
                    legs.into_iter().flatten().for_each(|leg| drop(leg.end()));
                }
                panic!("a prompt is never met half way");
            }
            Point::Decoding => {
                let body = self.body(40, 300);
                let mut legs = self.legs(&body);
                legs[1].as_mut().unwrap().await_words("data: ");
                legs
            }
        }
    }

    /// The event happens. Then every leg must end, and every survivor must be idle.
    fn suffer(&mut self, point: Point, blow: Blow) {
        let [prefill, decode] = self.steer(point);
        match blow {
            Blow::ClientLeaves => return drop((prefill, decode)),
            Blow::PrefillDies => self.prefill.kill(),
            Blow::DecodeDies => self.decode.kill(),
            Blow::AbortAtPrefill => abort(&self.prefill),
            Blow::AbortAtDecode => abort(&self.decode),
        }
        if point == Point::Decoding && matches!(blow, Blow::PrefillDies | Blow::AbortAtPrefill) {
            // Decode has all it needs.
            let answer = decode.unwrap().end();
            assert!(is_whole(&answer), "{answer}");
            return;
        }
        // The workers have exchanged nothing that would end the other leg. Its client ends it.
        let is_elsewhere = match point {
            Point::PrefillLegAlone => matches!(blow, Blow::DecodeDies | Blow::AbortAtDecode),
            Point::DecodeLegAlone => blow == Blow::AbortAtPrefill,
            _ => false,
        };
        if is_elsewhere {
            return;
        }
        let (hit, other) = match blow {
            Blow::PrefillDies | Blow::AbortAtPrefill => (prefill, decode),
            _ => (decode, prefill),
        };
        let was_hit = hit.is_none_or(|leg| !is_whole(&leg.end()));
        let swept = matches!(point, Point::FirstContact(_) | Point::Session(_));
        let Some(other) = other else { return };
        if swept && was_hit && blow != Blow::PrefillDies {
            // Possibly before the workers have exchanged this room: the router ends the other leg.
            // After the death of a prefill worker, decode decides.
            return;
        }
        let answer = other.end();
        assert!(is_whole(&answer) != was_hit || swept || point == Point::Decoding, "{answer}");
    }

    /// Restarts the worker that died.
    fn restart(&mut self, blow: Blow) {
        match blow {
            Blow::PrefillDies => {
                self.prefill =
                    Pair::prefill(&self.dummy, self.transfer, self.prefill.bootstrap_port);
            }
            Blow::DecodeDies => self.decode = Pair::decode(&self.dummy, self.transfer),
            Blow::ClientLeaves | Blow::AbortAtPrefill | Blow::AbortAtDecode => {}
        }
    }
}

fn abort(worker: &Process) {
    let (status, text) = post(worker.address, "/abort_request", r#"{"abort_all":true}"#);
    assert_eq!(status, 200, "{text}");
}

#[track_caller]
fn await_metric(worker: &Process, name: &str, is_there: impl Fn(f64) -> bool) -> f64 {
    let begun = Instant::now();
    loop {
        let value = worker.metric(name, "");
        if is_there(value) {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "{name} stays at {value}");
    }
}

/// One event at all points, with the same survivors, so that leaks add up.
fn at_every_point(transfer: &'static str, blow: Blow) {
    let mut pair = Pair::new(transfer);
    pair.check_works(None);
    for point in points() {
        eprintln!("== {blow:?} at {point:?} over {transfer}");
        pair.suffer(point, blow);
        for (worker, death) in
            [(&mut pair.prefill, Blow::PrefillDies), (&mut pair.decode, Blow::DecodeDies)]
        {
            if blow != death {
                worker.check_alive();
                worker.await_idle();
            }
        }
        pair.restart(blow);
        pair.check_works(Some(blow));
        for worker in [&mut pair.prefill, &mut pair.decode] {
            worker.await_idle();
            worker.check_alive();
        }
    }
}

#[test]
fn a_client_leaves_over_shm() {
    at_every_point("shm", Blow::ClientLeaves);
}

#[test]
fn a_client_leaves_over_tcp() {
    at_every_point("tcp", Blow::ClientLeaves);
}

#[test]
fn prefill_dies_over_shm() {
    at_every_point("shm", Blow::PrefillDies);
}

#[test]
fn prefill_dies_over_tcp() {
    at_every_point("tcp", Blow::PrefillDies);
}

#[test]
fn decode_dies_over_shm() {
    at_every_point("shm", Blow::DecodeDies);
}

#[test]
fn decode_dies_over_tcp() {
    at_every_point("tcp", Blow::DecodeDies);
}

#[test]
fn prefill_is_told_to_abort_over_shm() {
    at_every_point("shm", Blow::AbortAtPrefill);
}

#[test]
fn prefill_is_told_to_abort_over_tcp() {
    at_every_point("tcp", Blow::AbortAtPrefill);
}

#[test]
fn decode_is_told_to_abort_over_shm() {
    at_every_point("shm", Blow::AbortAtDecode);
}

#[test]
fn decode_is_told_to_abort_over_tcp() {
    at_every_point("tcp", Blow::AbortAtDecode);
}

/// A host can stand still for seconds (a guest that is moved, a debugger). Workers that stood still
/// together do not take each other for dead.
#[test]
fn a_pause_of_the_whole_host_ends_no_session() {
    let (prefill, decode) = (prefill(&[]), start("decode", &[]));
    let answer = |room| {
        let body = with_room(body(1, 20, 4), &prefill, room);
        choices(&dual(prefill.address, decode.address, body).1)
    };
    let before = answer(1);
    for _ in 0..2 {
        for process in [&prefill, &decode] {
            process.pause();
        }
        thread::sleep(PEER_SILENCE_MAX + Duration::from_millis(500));
        for process in [&decode, &prefill] {
            process.go_on();
        }
        // A worker that takes the other for dead does so at its next check of deadlines.
        thread::sleep(Duration::from_millis(300));
    }
    assert_eq!(answer(2), before);
    assert_eq!(decode.times_said("control link to a prefill worker is open"), 1);
    assert!(!prefill.has_said("silent for too long") && !decode.has_said("silent for too long"));
}

/// SGLang's two counters tell an operator whether the fabric or the bootstrap is at fault.
#[test]
fn failures_count_as_those_before_and_after_kv_could_move() {
    let decode = start("decode", &[]);
    let counted = || {
        ["bootstrap", "transfer"]
            .map(|phase| decode.metric(&format!("sglang:num_{phase}_failed_reqs_total{{"), ""))
    };
    let (free, mut prefill) = (TcpListener::bind("127.0.0.1:0").unwrap(), prefill(&[]));
    let closed = free.local_addr().unwrap().port();
    drop(free);
    let mut lost = body(1, 40, 4);
    lost["bootstrap_host"] = json!("127.0.0.1");
    lost["bootstrap_port"] = json!(closed);
    lost["bootstrap_room"] = json!(1);
    assert_ne!(decode.post("/v1/completions", &lost.to_string()).0, 200);
    assert_eq!(counted(), [1.0, 0.0]);

    // Its pages are allocated; the prefill leg never comes.
    let waits = with_room(body(2, 40, 4), &prefill, 2);
    let address = decode.address;
    let answer = thread::spawn(move || post(address, "/v1/completions", &waits));
    let queue = "sglang:num_decode_transfer_queue_reqs{";
    await_metric(&decode, queue, |waiting| waiting == 1.0);
    prefill.kill();
    assert_ne!(answer.join().unwrap().0, 200);
    assert_eq!(counted(), [1.0, 1.0]);
}
