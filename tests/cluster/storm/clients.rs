//! Clients that send requests without pause and know each right answer. Each client knows both
//! routers. It uses the second router if the first is gone, breaks the connection or has no pair.

use super::cluster::{Model, ROUTERS};
use crate::network;
use crate::process::{post, try_post};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

/// How many routers a client asks, one after the other, before it gives up. On a slow machine
/// several can die under one request.
const ASKED_MAX: usize = 6;

/// A request, and the text of its answer.
pub struct Case {
    pub body: Value,
    pub expected: String,
}

/// Requests of many kinds, each changed by `change`, with the answers of a mixed worker.
pub fn cases(model: &Model, change: impl Fn(&mut Value)) -> Vec<Case> {
    let ids = |seed: usize| {
        (0..20 + 17 * seed).map(|i| 3 + (seed * 7919 + i * 104_729) % 380).collect::<Vec<_>>()
    };
    let bodies = (0..12).map(|seed| {
        let temperature = [0.0, 40.0][seed % 2];
        let mut body = json!({"prompt": ids(seed), "max_tokens": 20 + 12 * seed,
            "temperature": temperature,
            "seed": seed, "frequency_penalty": 0.2 * (seed % 3) as f64, "ignore_eos": true,
            "stream": seed % 3 > 0});
        change(&mut body);
        body
    });
    let alone = model.start(0, "serve", &["--mixed"]);
    let case = |body: Value| {
        let expected =
            text(&post(alone.address, "/v1/completions", &body.to_string())).expect("an answer");
        Case { body, expected }
    };
    bodies.map(case).collect()
}

/// The text of a complete answer or of a stream, or the kind of the failure.
pub fn text((status, answer): &(u16, String)) -> Result<String, String> {
    let error = |value: &Value| value["error"]["code"].as_str().map(str::to_owned);
    if answer.starts_with('{') {
        let value: Value = serde_json::from_str(answer).map_err(|_| BROKEN.to_owned())?;
        return match value["choices"][0]["text"].as_str() {
            Some(text) if *status == 200 => Ok(text.to_owned()),
            _ => Err(format!("{status} {}", error(&value).unwrap_or("without a code".into()))),
        };
    }
    let data = || answer.lines().filter_map(|line| line.strip_prefix("data: "));
    if !answer.ends_with("data: [DONE]\n\n") {
        let last = data().next_back().and_then(|data| serde_json::from_str::<Value>(data).ok());
        let kind = last.as_ref().and_then(error);
        return Err(kind.map_or(BROKEN.to_owned(), |kind| format!("event {kind}")));
    }
    let pieces = data().filter(|data| *data != "[DONE]").map(|data| {
        let event: Value = serde_json::from_str(data).map_err(|_| "no event".to_owned())?;
        Ok::<_, String>(event["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
    });
    pieces.collect()
}

/// No server is there, and an answer that ends too early.
const GONE: &str = "gone";
const BROKEN: &str = "broken off";

/// What clients have seen.
#[derive(Default)]
pub struct Tally {
    pub well: usize,
    /// Request, answer, and the expected answer.
    pub wrong: Vec<String>,
    /// Failures by kind.
    pub failures: BTreeMap<String, usize>,
    /// By kind, the failures after which the other router was asked.
    pub elsewhere: BTreeMap<String, usize>,
    /// The longest time for one answer of a router.
    pub longest: Duration,
}

impl Tally {
    pub fn failed(&self) -> usize {
        self.failures.values().sum()
    }

    /// Answers that a router has broken off.
    pub fn broken(&self) -> usize {
        self.elsewhere.get(BROKEN).copied().unwrap_or(0)
    }
}

/// The clients of a storm.
pub struct Clients {
    cases: Vec<Case>,
    routers: [SocketAddr; ROUTERS.len()],
    next: AtomicUsize,
    stop: AtomicBool,
    tally: Mutex<Tally>,
}

impl Clients {
    pub fn new(cases: Vec<Case>, routers: [SocketAddr; ROUTERS.len()]) -> Clients {
        Clients {
            cases,
            routers,
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            tally: Mutex::default(),
        }
    }

    /// Spawns this many clients, each a thread on the client's host. Each sends one case after the
    /// other until it is stopped.
    pub fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        count: usize,
        tag: &'scope str,
    ) {
        for _ in 0..count {
            scope.spawn(move || {
                network::enter(tag, "client");
                while !self.stop.load(Ordering::Relaxed) {
                    self.ask();
                }
            });
        }
    }

    /// Stops them when the value is dropped, for whatever reason.
    pub fn until_dropped(&self) -> impl Drop + '_ {
        Stops(&self.stop)
    }

    pub fn into_tally(self) -> Tally {
        self.tally.into_inner().unwrap()
    }

    fn ask(&self) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let case = &self.cases[number % self.cases.len()];
        let name = format!("x-request-id: storm-{number}\r\n");
        let begun = Instant::now();
        let (mut elsewhere, mut longest) = (Vec::new(), Duration::ZERO);
        let answer = loop {
            let router = self.routers[(number + elsewhere.len()) % self.routers.len()];
            let asked = Instant::now();
            let answer = try_post(router, "/v1/completions", &name, &case.body.to_string());
            let answer = answer.map_err(|_| GONE.to_owned()).and_then(|answer| text(&answer));
            longest = longest.max(asked.elapsed());
            match answer {
                Err(kind) if is_routers(&kind) && elsewhere.len() + 1 < ASKED_MAX => {
                    // Without the pause, refused requests would repeat a thousand times a second.
                    thread::sleep(Duration::from_millis(100));
                    elsewhere.push(kind);
                }
                answer => break answer,
            }
        };
        let took = begun.elapsed();
        if took > Duration::from_secs(15) || answer.is_err() || !elsewhere.is_empty() {
            let (kind, took) = (answer.as_ref().err(), took.as_secs_f64());
            eprintln!(
                "STORM request storm-{number}: {took:.1} s, failed {kind:?}, \
                 elsewhere after {elsewhere:?}"
            );
        }
        let mut tally = self.tally.lock().unwrap();
        tally.longest = tally.longest.max(longest);
        elsewhere.into_iter().for_each(|kind| *tally.elsewhere.entry(kind).or_default() += 1);
        match answer {
            Ok(text) if text == case.expected => tally.well += 1,
            Ok(text) => tally.wrong.push(format!("{}\n{text}\n{}", case.body, case.expected)),
            Err(kind) => *tally.failures.entry(kind).or_default() += 1,
        }
    }
}

/// Whether the failure is that of the router that was asked.
fn is_routers(kind: &str) -> bool {
    kind == GONE || kind == BROKEN || kind.starts_with("503")
}

struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
