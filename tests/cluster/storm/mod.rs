//! A steady load on two prefill and two decode workers, each on a host of its own, while one after the other of them is
//! killed and started again, stands still, loses its link, or its packets, all of them or one way.
//!
//! Shown: all but a few requests end well, each with the right tokens, the others by a typed error, and in time; what is
//! left over in the end is nothing. `BATON_STORM_SECONDS` says how long it lasts, `BATON_STORM_SEED` which harm comes when,
//! `BATON_STORM_MODEL` which model; `tools/storm` runs the long one.

use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::network::{self, Network};
use crate::process::{PATIENCE, Process, post, post_with};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const SECONDS: u64 = 25;
const CLIENTS: usize = 6;
/// Longest that a client waits: a silent worker is noticed in some seconds, at most twice in the life of a request.
const LONGEST: Duration = Duration::from_secs(30);
/// Hosts of the workers, prefill workers first.
const WORKERS: [&str; 4] = ["prefill", "third", "decode", "second"];
const DECODE: usize = 2;

/// What is done to a worker.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// Killed, and started again under its address.
    Kill,
    /// Stopped by a signal, and let go on.
    Pause,
    /// Its link is down.
    Unplug,
    /// What it sends to one other host is lost.
    Deafen,
    /// One packet in ten is.
    Lose,
}

/// Numbers drawn from a seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
}

/// What workers are started from.
enum Model {
    Made(Dummy),
    File(PathBuf),
}

impl Model {
    fn get() -> Model {
        match std::env::var_os("BATON_STORM_MODEL") {
            Some(path) => Model::File(path.into()),
            None => Model::Made(Dummy::slow()),
        }
    }

    fn start(&self, port: u16, command: &str, more: &[&str]) -> Process {
        match self {
            Model::Made(dummy) => dummy.start_at(port, command, more),
            Model::File(path) => {
                let (path, port) = (path.to_str().expect("a path in UTF-8"), port.to_string());
                let common = ["--port", &port, "--kv-memory", "64MiB", "--threads", "1"];
                Process::start(&[&[command, path], &common[..], more].concat())
            }
        }
    }
}

fn start_worker(network: &Network, model: &Model, which: usize) -> Process {
    let host = WORKERS[which];
    let address = network::address(host).to_string();
    let common = ["--host", &address, "--insecure", "--transfer", "tcp"];
    let common = [&common[..], &["--max-running-requests", "16"]].concat();
    network.enter(host);
    match which < DECODE {
        true => model.start(8000, "prefill", &[&common[..], &["--bootstrap-port", "8998"]].concat()),
        false => model.start(8000, "decode", &[&common[..], &["--bootstrap-allow", "10.77.0.0/24"]].concat()),
    }
}

/// A request, and its answer's text.
struct Case {
    body: Value,
    expected: String,
}

fn cases() -> Vec<Value> {
    let ids =
        |seed: usize| (0..20 + 17 * seed).map(|i| 3 + (seed * 7919 + i * 104_729) % 380).collect::<Vec<_>>();
    (0..12)
        .map(|seed| {
            let temperature = [0.0, 40.0][seed % 2];
            json!({"prompt": ids(seed), "max_tokens": 20 + 12 * seed, "temperature": temperature, "seed": seed,
                "frequency_penalty": 0.2 * (seed % 3) as f64, "ignore_eos": true, "stream": seed % 3 > 0})
        })
        .collect()
}

/// The text of a whole answer or of a stream, or the kind of the failure.
fn text((status, answer): &(u16, String)) -> Result<String, String> {
    let error = |value: &Value| value["error"]["code"].as_str().unwrap_or("?").to_owned();
    if answer.starts_with('{') {
        let value: Value = serde_json::from_str(answer).map_err(|_| "cut off".to_owned())?;
        return match value["choices"][0]["text"].as_str() {
            Some(text) if *status == 200 => Ok(text.to_owned()),
            _ => Err(format!("{status} {}", error(&value))),
        };
    }
    if !answer.ends_with("data: [DONE]\n\n") {
        let last = answer.lines().rev().find_map(|line| line.strip_prefix("data: "));
        let value = last.and_then(|data| serde_json::from_str::<Value>(data).ok()).unwrap_or_default();
        return Err(format!("event {}", error(&value)));
    }
    let data = answer.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let pieces = data.map(|data| {
        let event: Value = serde_json::from_str(data).map_err(|_| "no event".to_owned())?;
        Ok::<_, String>(event["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
    });
    pieces.collect()
}

/// What clients have seen.
#[derive(Default)]
struct Tally {
    well: usize,
    wrong: Vec<String>,
    failures: BTreeMap<String, usize>,
    longest: Duration,
}

/// Asks one case after the other until told to stop.
fn ask(router: SocketAddr, cases: &[Case], next: &AtomicUsize, stop: &AtomicBool, tally: &Mutex<Tally>) {
    while !stop.load(Ordering::Relaxed) {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let case = &cases[number % cases.len()];
        let begun = Instant::now();
        let name = format!("x-request-id: storm-{number}\r\n");
        let answer = post_with(router, "/v1/completions", &name, &case.body.to_string());
        let took = begun.elapsed();
        if took > LONGEST / 2 {
            eprintln!("STORM request storm-{number} took {took:.1?}");
        }
        let mut tally = tally.lock().unwrap();
        tally.longest = tally.longest.max(took);
        match text(&answer) {
            Ok(text) if text == case.expected => tally.well += 1,
            Ok(text) => tally.wrong.push(format!("{}\n{text}\n{}", case.body, case.expected)),
            Err(kind) => *tally.failures.entry(kind).or_default() += 1,
        }
    }
}

struct Storm {
    network: Network,
    model: Model,
    fleet: Fleet,
    dice: Dice,
}

impl Storm {
    fn worker(&mut self, which: usize) -> &mut Process {
        match which < DECODE {
            true => &mut self.fleet.prefill[which],
            false => &mut self.fleet.decode[which - DECODE],
        }
    }

    /// One worker suffers, and the cluster is whole again.
    fn strike(&mut self) {
        let harm = self.dice.pick(&[Harm::Kill, Harm::Pause, Harm::Unplug, Harm::Deafen, Harm::Lose]);
        let which = self.dice.below(WORKERS.len());
        let host = WORKERS[which];
        let time = Duration::from_millis(self.dice.pick(&[200, 1000, 2500, 6000]));
        eprintln!("STORM {harm:?} {host} {time:?}");
        match harm {
            Harm::Kill => {
                self.worker(which).kill();
                thread::sleep(time.min(Duration::from_secs(2)));
                let next = start_worker(&self.network, &self.model, which);
                self.network.enter("client");
                *self.worker(which) = next;
            }
            Harm::Pause => {
                self.worker(which).pause();
                thread::sleep(time);
                self.worker(which).go_on();
            }
            Harm::Unplug => {
                self.network.set_port(host, "down");
                thread::sleep(time);
                self.network.set_port(host, "up");
            }
            Harm::Deafen | Harm::Lose => {
                let others = WORKERS.iter().chain(&["router"]).copied().filter(|other| *other != host);
                let other = self.dice.pick(&others.collect::<Vec<_>>());
                let rule = match harm {
                    Harm::Deafen => format!("ip daddr {}", network::address(other)),
                    _ => "numgen random mod 10 < 1".to_owned(),
                };
                self.network.drop_packets(host, Some(&rule));
                thread::sleep(time);
                self.network.drop_packets(host, None);
            }
        }
        let begun = Instant::now();
        while self.fleet.router.metric("smg_worker_health{", "") < WORKERS.len() as f64 {
            assert!(begun.elapsed() < PATIENCE, "the router never sees all workers again");
            thread::sleep(Duration::from_millis(50));
        }
        thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn requests_end_well_whatever_happens_to_their_workers() {
    let Some(network) = Network::get() else { return };
    if !network::has_nft() {
        return eprintln!("SKIPPED: nft cannot be had");
    }
    let number = |name: &str, default: u64| {
        std::env::var(name)
            .map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}: a number")))
    };
    let (seconds, seed) = (number("BATON_STORM_SECONDS", SECONDS), number("BATON_STORM_SEED", 1));
    let model = Model::get();
    network.enter("client");
    let alone = model.start(0, "serve", &["--mixed"]);
    let cases: Vec<Case> = cases()
        .into_iter()
        .map(|body| {
            let expected =
                text(&post(alone.address, "/v1/completions", &body.to_string())).expect("an answer");
            Case { body, expected }
        })
        .collect();
    drop(alone);
    let mut workers: Vec<Process> =
        (0..WORKERS.len()).map(|which| start_worker(&network, &model, which)).collect();
    let decode = workers.split_off(DECODE);
    network.enter("router");
    let address = network::address("router").to_string();
    let fleet = Fleet::with(workers, decode, &["--host", &address, "--policy", "least_loaded"]);
    network.enter("client");
    let mut storm = Storm { network, model, fleet, dice: Dice(seed) };
    let router = storm.fleet.router.address;
    let (stop, next, tally) = (AtomicBool::new(false), AtomicUsize::new(0), Mutex::new(Tally::default()));
    let resident = |storm: &Storm| storm.fleet.router.resident() >> 10;
    let mut before = 0;
    let tag = Arc::new(storm.network.tag.clone());
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let tag = tag.clone();
            let (cases, next, stop, tally) = (&cases, &next, &stop, &tally);
            scope.spawn(move || {
                network::enter(&tag, "client");
                ask(router, cases, next, stop, tally);
            });
        }
        // Whatever ends this ends the clients.
        let stops = Stops(&stop);
        thread::sleep(Duration::from_secs(2));
        before = resident(&storm);
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            storm.strike();
        }
        drop(stops);
    });
    let tally = tally.into_inner().unwrap();
    let failed: usize = tally.failures.values().sum();
    let metric = |name: &str| storm.fleet.router.metric(name, "");
    let (retried, resumed) = (metric("baton_router_retries_total{"), metric("baton_router_resumed_total"));
    eprintln!(
        "STORM seed {seed}, {seconds} s: {} well, {failed} failed {:?}, {} wrong, {retried} tried again, {resumed} went on \
         elsewhere; longest {:.1} s; router {before} KiB, then {} KiB",
        tally.well,
        tally.failures,
        tally.wrong.len(),
        tally.longest.as_secs_f64(),
        resident(&storm),
    );
    assert_eq!(tally.wrong, [""; 0]);
    assert!(failed * 100 <= tally.well, "more than one in a hundred failed: {:?}", tally.failures);
    assert!(tally.longest < LONGEST, "a client waited {:?}", tally.longest);
    assert!(retried > 0.0, "nothing went wrong");
    storm.fleet.check_idle();
    assert_eq!(storm.fleet.router.metric("smg_worker_requests_active{", ""), 0.0, "charged to workers");
    assert!(storm.fleet.router.get("/v1/loads").1.contains("\"num_running_reqs\":0"), "held by the router");
}

/// Tells clients to stop.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
