//! Workers that die or hang while a client reads. The stream continues on other workers, with the
//! same bytes as without the failure.

use crate::dummy::Dummy;
use crate::fleet::Fleet;
use crate::leg::Leg;
use crate::process::{PATIENCE, Process};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

/// A fleet with a model so slow that a stream can be hit in the middle.
pub struct Slow {
    dummy: Dummy,
    transfer: &'static str,
    pub fleet: Fleet,
}

const PREFILL: usize = 2;
const DECODE: usize = 2;

/// More than a stream of [`cases`] takes on a machine that computes its prompt between two looks.
const STREAM_TIME: Duration = Duration::from_secs(1);

impl Slow {
    fn start(transfer: &'static str) -> Slow {
        Slow::with(transfer, &[])
    }

    /// With these flags of the router.
    pub fn with(transfer: &'static str, flags: &[&str]) -> Slow {
        Slow::of(Dummy::slow(), transfer, flags)
    }

    fn of(dummy: Dummy, transfer: &'static str, flags: &[&str]) -> Slow {
        let prefill =
            (0..PREFILL).map(|_| Slow::worker(&dummy, transfer, "prefill", 0, 0)).collect();
        let decode = (0..DECODE).map(|_| Slow::worker(&dummy, transfer, "decode", 0, 0)).collect();
        let fleet = Fleet::with(prefill, decode, flags);
        Slow { dummy, transfer, fleet }
    }

    fn worker(
        dummy: &Dummy,
        transfer: &str,
        role: &str,
        port: u16,
        bootstrap_port: u16,
    ) -> Process {
        let bootstrap_port = bootstrap_port.to_string();
        let mut flags = vec!["--transfer", transfer, "--max-running-requests", "4"];
        if role == "prefill" {
            flags.extend(["--bootstrap-port", &bootstrap_port, "--chunked-prefill-size", "16"]);
        }
        dummy.start_at(port, role, &flags)
    }

    /// The decode worker that is busy.
    #[track_caller]
    pub fn busy(&self) -> usize {
        let begun = Instant::now();
        loop {
            let is_busy = |worker: &Process| worker.metric("sglang:num_running_reqs{", "") > 0.0;
            if let Some(found) = self.fleet.decode.iter().position(is_busy) {
                return found;
            }
            assert!(begun.elapsed() < PATIENCE, "no worker generates");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill_decode(&mut self, which: usize) {
        self.fleet.decode[which].kill();
    }

    /// Another process takes the place of one that died.
    pub fn restart_decode(&mut self, which: usize) {
        let port = self.fleet.decode[which].address.port();
        self.fleet.decode[which] = Slow::worker(&self.dummy, self.transfer, "decode", port, 0);
        self.await_all();
    }

    /// The prefill worker that is busy. None if none is seen for a time in which a stream ends.
    fn reading(&self) -> Option<usize> {
        let begun = Instant::now();
        let is_busy = |worker: &Process| worker.metric("sglang:num_running_reqs{", "") > 0.0;
        while begun.elapsed() < STREAM_TIME {
            if let Some(found) = self.fleet.prefill.iter().position(is_busy) {
                return Some(found);
            }
        }
        None
    }

    /// Harms the prefill worker that computes a prompt without a cached part. The answer must be
    /// the same. Returns which worker it was.
    pub fn harm_reader(
        &mut self,
        case: &(&'static str, Value),
        expected: &[String],
        harm: impl Fn(&mut Process),
    ) -> usize {
        let begun = Instant::now();
        loop {
            for worker in &self.fleet.prefill {
                worker.post("/flush_cache", "");
            }
            let stream = open(self.fleet.router.address, case);
            let victim = self.reading();
            if let Some(victim) = victim {
                harm(&mut self.fleet.prefill[victim]);
            }
            check_same(&stream.end(), expected, &case.1);
            // A fast machine computes a prompt between two looks: then it is sent again.
            if let Some(victim) = victim {
                return victim;
            }
            assert!(begun.elapsed() < PATIENCE, "no worker computes the prompt");
        }
    }

    pub fn restart_prefill(&mut self, which: usize) {
        let worker = &self.fleet.prefill[which];
        let (port, bootstrap_port) = (worker.address.port(), worker.bootstrap_port);
        self.fleet.prefill[which] =
            Slow::worker(&self.dummy, self.transfer, "prefill", port, bootstrap_port);
        self.await_all();
    }

    pub fn await_all(&self) {
        let begun = Instant::now();
        while self.fleet.router.metric("smg_worker_health{", "") < (PREFILL + DECODE) as f64 {
            assert!(begun.elapsed() < PATIENCE, "the router never sees all its workers");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// All forms of streams, greedy and seeded. All use earlier tokens: penalties, stop strings,
/// repeated logprobs, several choices, usage.
pub fn cases() -> Vec<(&'static str, Value)> {
    let ids = |seed: u32, count: u32| {
        (0..count).map(|i| 3 + (seed * 7919 + i * 104_729) % 380).collect::<Vec<_>>()
    };
    let usage = json!({ "include_usage": true });
    vec![
        (
            "/v1/completions",
            json!({"prompt": ids(1, 40), "max_tokens": 96, "temperature": 0, "ignore_eos": true,
            "logprobs": 2, "return_token_ids": true, "stream_options": usage}),
        ),
        (
            "/v1/completions",
            json!({"prompt": ids(2, 70), "max_tokens": 96, "temperature": 40, "seed": 5,
            "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3,
            "ignore_eos": true,
            "stop": ["never to be seen"], "echo": true, "logprobs": 1,
            "stream_options": usage}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "Where is the Seine?"}],
            "max_tokens": 80, "temperature": 40, "seed": 9, "n": 2, "logprobs": true,
            "top_logprobs": 3, "ignore_eos": true, "stream_options": usage}),
        ),
        (
            "/generate",
            json!({"input_ids": ids(3, 33), "return_logprob": true, "top_logprobs_num": 2,
            "logprob_start_len": 4,
            "sampling_params": {"max_new_tokens": 96, "temperature": 40, "sampling_seed": 3,
            "ignore_eos": true}}),
        ),
        (
            "/v1/completions",
            json!({"prompt": ids(4, 50), "max_tokens": 96, "temperature": 40, "seed": 7,
            "structured_outputs": {"regex": "([a-z]{2,9} ){400}"}, "logprobs": 2,
            "return_token_ids": true, "stream_options": usage}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "Spell a long word."}],
            "max_tokens": 110, "temperature": 40, "seed": 11, "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "spell", "parameters": {
            "type": "object", "properties": {"word": {"type": "string",
            "pattern": "^([a-z]{2,9} ){400}$"}}, "required": ["word"]}}}],
            "stream_options": usage}),
        ),
        (
            "/v1/responses",
            json!({"input": "Where is the Seine?", "max_output_tokens": 96, "temperature": 40,
            "seed": 9, "ignore_eos": true, "top_logprobs": 2}),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "Spell a long word."}],
            "max_tokens": 110, "temperature": 40, "seed": 11, "tool_choice": {"type": "any"},
            "tools": [{"name": "spell", "input_schema": {
            "type": "object", "properties": {"word": {"type": "string",
            "pattern": "^([a-z]{2,9} ){400}$"}}, "required": ["word"]}}]}),
        ),
    ]
}

pub fn open(address: SocketAddr, (path, body): &(&'static str, Value)) -> Leg {
    let mut body = body.clone();
    body["stream"] = json!(true);
    Leg::open(address, path, "x-request-id: one\r\n", &body)
}

/// The events of a stream with a proper end, without the creation time.
#[track_caller]
pub fn events(answer: &str) -> Vec<String> {
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let is_event = |line: &&str| line.starts_with("data: ");
    let events: Vec<String> = answer.lines().filter(is_event).map(without_created).collect();
    let ends = ["[DONE]", r#""type":"response.incomplete""#, r#"{"type":"message_stop"}"#];
    let last = events.last().expect("a stream has events");
    assert!(ends.iter().any(|end| last.contains(end)), "{answer}");
    assert!(!answer.contains("\n: "), "marks are the router's: {answer}");
    events
}

/// Without the id of a tool call, too, which depends on that time.
fn without_created(event: &str) -> String {
    let mut event = event.to_owned();
    for (name, digits) in [("\"created\":", 10), ("\"created_at\":", 10), ("\"call_", 16)] {
        if let Some((before, rest)) = event.split_once(name) {
            event = format!("{before}{}", rest.trim_start_matches(|c: char| c.is_digit(digits)));
        }
    }
    event
}

/// Sorted by choice, because events of choices interleave in any order. Without the number of
/// cached tokens, which depends on earlier requests.
fn by_choice(events: &[String]) -> Vec<String> {
    let names = ["\"cached_tokens\":", "\"cache_read_input_tokens\":", "\"input_tokens\":"];
    let cut = |event: &String| {
        names.iter().fold(event.clone(), |event, name| match event.split_once(name) {
            None => event,
            Some((before, rest)) => {
                format!("{before}{}", rest.trim_start_matches(|c: char| c.is_ascii_digit()))
            }
        })
    };
    let choice = |event: &String| {
        let (_, rest) = event.split_once("\"index\":")?;
        Some(rest.as_bytes()[0])
    };
    let mut events: Vec<String> = events.iter().map(cut).collect();
    events.sort_by_key(|event| choice(event).unwrap_or(b'~'));
    events
}

#[track_caller]
pub fn check_same(found: &str, expected: &[String], what: &Value) {
    let (found, expected) = (by_choice(&events(found)), by_choice(expected));
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found, expected, "event {at} of {what}");
    }
    assert_eq!(found.len(), expected.len(), "{what}");
}

fn streams_survive_the_death_of_decode(mut slow: Slow, cases: &[(&'static str, Value)]) {
    let address = slow.fleet.router.address;
    for case in cases {
        let expected = events(&open(address, case).end());
        for after in [2, 9] {
            let mut stream = open(address, case);
            stream.await_events(after);
            let victim = slow.busy();
            slow.kill_decode(victim);
            check_same(&stream.end(), &expected, &case.1);
            slow.restart_decode(victim);
        }
    }
    let resumed = slow.fleet.router.metric("baton_router_resumed_total", "");
    assert_eq!(resumed, 2.0 * cases.len() as f64, "each of them was met in its midst");
    slow.fleet.check_idle();
}

#[test]
fn streams_survive_the_death_of_decode_over_shm() {
    streams_survive_the_death_of_decode(Slow::start("shm"), &cases());
}

#[test]
fn streams_survive_the_death_of_decode_over_tcp() {
    streams_survive_the_death_of_decode(Slow::start("tcp"), &cases());
}

/// A stream goes on with KV of windows and of experts, and with state, that is computed anew.
#[test]
fn streams_of_other_layers_survive_the_death_of_decode() {
    let transfers = ["tcp", "shm"].into_iter().cycle();
    for (dummy, transfer) in Dummy::slow_others().into_iter().zip(transfers) {
        streams_survive_the_death_of_decode(Slow::of(dummy, transfer, &[]), &cases()[..3]);
    }
}

/// The prefill worker dies before the first token, and the other one computes the prompt again.
#[test]
fn requests_survive_the_death_of_prefill() {
    let mut slow = Slow::start("shm");
    let address = slow.fleet.router.address;
    for case in cases() {
        let expected = events(&open(address, &case).end());
        let victim = slow.harm_reader(&case, &expected, Process::kill);
        slow.restart_prefill(victim);
    }
    slow.fleet.check_idle();
}

/// A stopped worker sends nothing, and its kernel does not report it.
#[test]
fn a_stream_leaves_a_decode_worker_that_stands_still() {
    let slow = Slow::start("tcp");
    let address = slow.fleet.router.address;
    let case = &cases()[0];
    let expected = events(&open(address, case).end());
    let mut stream = open(address, case);
    stream.await_events(4);
    let victim = slow.busy();
    slow.fleet.decode[victim].pause();
    check_same(&stream.end(), &expected, &case.1);
    slow.fleet.decode[victim].go_on();
    slow.await_all();
    let mut fleet = slow.fleet;
    fleet.check_idle();
}

/// An aborted request is not continued anywhere.
#[test]
fn a_stream_that_is_aborted_ends() {
    let slow = Slow::start("shm");
    let address = slow.fleet.router.address;
    let mut stream = open(address, &cases()[0]);
    stream.await_events(3);
    assert_eq!(slow.fleet.router.post("/abort_request", r#"{"rid":"one"}"#).0, 200);
    let answer = stream.end();
    assert!(answer.contains(r#""code":"aborted""#) && !answer.contains("[DONE]"), "{answer}");
    assert_eq!(slow.fleet.router.metric("baton_router_retries_total{", ""), 0.0);
    let mut fleet = slow.fleet;
    fleet.check_idle();
    let failed = |cause: &str| {
        let label = format!("cause=\"{cause}\"");
        fleet
            .workers()
            .map(|worker| worker.metric("baton_request_failures_total{", &label))
            .sum::<f64>()
    };
    assert!(failed("aborted") > 0.0 && failed("client_gone") == 0.0, "no client has gone");
}

/// A stopped worker with an entry is dropped for lack of renewals, at about the time when it is
/// found dead.
#[test]
fn a_stream_leaves_a_worker_that_entered_itself_and_stands_still() {
    let dummy = Dummy::slow();
    let router = Process::start(&["router", "--port", "0"]);
    let registry = format!("http://{}", router.address);
    let worker = |role: &str, more: &[&str]| {
        let common = ["--transfer", "tcp", "--max-running-requests", "4", "--registry", &registry];
        dummy.start(role, &[more, &common].concat())
    };
    let prefill = vec![worker("prefill", &["--bootstrap-port", "0"])];
    let decode = (0..DECODE).map(|_| worker("decode", &[])).collect();
    let begun = Instant::now();
    let is_up = |line: &str| line.starts_with("smg_worker_health{") && line.ends_with(" 1");
    while router.get("/metrics").1.lines().filter(|line| is_up(line)).count() < 1 + DECODE {
        assert!(begun.elapsed() < PATIENCE, "the router never sees all its workers");
        thread::sleep(Duration::from_millis(20));
    }
    let address = router.address;
    let mut slow = Slow { dummy, transfer: "tcp", fleet: Fleet { prefill, decode, router } };
    let case = &cases()[0];
    let expected = events(&open(address, case).end());
    for _ in 0..3 {
        let mut stream = open(address, case);
        stream.await_events(4);
        let victim = slow.busy();
        slow.fleet.decode[victim].pause();
        check_same(&stream.end(), &expected, &case.1);
        slow.fleet.decode[victim].go_on();
        let begun = Instant::now();
        while slow.fleet.router.get("/metrics").1.lines().filter(|line| is_up(line)).count()
            < 1 + DECODE
        {
            assert!(begun.elapsed() < PATIENCE, "it never comes back");
            thread::sleep(Duration::from_millis(20));
        }
    }
    slow.fleet.check_idle();
}
