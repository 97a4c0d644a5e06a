//! Clients of the router: each opens a connection, asks once, reads the answer as bytes, and may
//! leave early.

use super::keys::{ClientKeys, KeyAge};
use super::requests::PlannedRequest;
use super::workload::SimLogprobs;
use crate::http::client::{RequestLine, ResponseDecoder, ResponseEvent, write_request};
use crate::http::{HttpLimits, Method};
use crate::kv::page_key::Salt;
use crate::net::{ConnId, Event, MemoryKernel, Reactor};
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The deadline of clients that have one.
pub const DEADLINE: Nanos = 30 * SECOND;

/// All clients, which share one host.
pub struct Clients {
    kernel: MemoryKernel,
    reactor: Reactor,
    router: SocketAddr,
    /// The API keys of requests from now on.
    pub keys: ClientKeys,
    /// Requests that were not sent, the next one last.
    waiting: Vec<PlannedRequest>,
    open: BTreeMap<ConnId, Exchange>,
    /// Connections of aborts, until their answers.
    aborts: BTreeSet<ConnId>,
    /// Ended requests with their outcome and time.
    pub ended: Vec<(PlannedRequest, Nanos, Outcome)>,
    now: Nanos,
}

struct Exchange {
    request: PlannedRequest,
    /// The right API key when it was sent.
    key: KeyAge,
    decoder: ResponseDecoder,
    status: u16,
    body: Vec<u8>,
}

/// How a request ended.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// The whole answer came.
    Answered {
        /// Its tokens.
        ids: Vec<u32>,
        /// Tokens of the prompt that came from a prefix cache, as the answer says.
        cached: usize,
        /// The logprobs of the prompt.
        logprobs: SimLogprobs,
    },
    /// An error came, with this status, code and message.
    Refused(u16, String, String),
    /// The connection or the answer was cut, or is no valid answer.
    Broken(String),
    /// The client left.
    Left,
    /// Tokens or bytes came that no fault excuses.
    Wrong(String),
}

impl Clients {
    /// Clients that send these requests to the router, in order of their times.
    pub fn new(kernel: MemoryKernel, router: SocketAddr, requests: Vec<PlannedRequest>) -> Clients {
        Clients {
            reactor: Reactor::in_memory(kernel.clone()).expect("memory cannot fail"),
            kernel,
            router,
            keys: ClientKeys { right: KeyAge::Old, is_old_refused: false },
            waiting: requests.into_iter().rev().collect(),
            open: BTreeMap::new(),
            aborts: BTreeSet::new(),
            ended: Vec::new(),
            now: 0,
        }
    }

    /// Whether all requests have ended.
    pub fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.open.is_empty()
    }

    /// Whether a request was sent with this key and has not ended.
    pub fn sends(&self, key: KeyAge) -> bool {
        self.open.values().any(|exchange| exchange.key == key)
    }

    /// The requests without an end, as text.
    pub fn unfinished(&self) -> String {
        format!("{} open, {} not sent", self.open.len(), self.waiting.len())
    }

    /// The longest prefix of a prompt that a cache can have at this time: another request with the
    /// same salt was sent before, and has it in its prompt or its answer.
    pub fn known_prefix(&self, request: &PlannedRequest, until: Nanos) -> usize {
        let others = self.ended.iter().map(|(other, ..)| other);
        let others = others.filter(|other| {
            !std::ptr::eq(*other, request)
                && other.at <= until
                && other.order.salt == request.order.salt
        });
        let common = |other: &PlannedRequest| {
            let known = other.order.prompt.iter().chain(&other.order.expected);
            request.order.prompt.iter().zip(known).take_while(|(one, two)| one == two).count()
        };
        others.map(common).max().unwrap_or(0)
    }

    /// Sends due requests, reads answers, and leaves. Returns the time of the next turn.
    pub fn turn(&mut self, now: Nanos, base: Instant) -> Nanos {
        self.kernel.set_now(base + Duration::from_nanos(now));
        self.now = now;
        self.reactor.wait(None).expect("memory cannot fail");
        while let Some(event) = self.reactor.next_event() {
            match event {
                Event::Received(conn) => self.read(conn),
                Event::Eof(conn) => self.cut(conn, "ended early".into()),
                Event::Closed { conn, reason } => self.cut(conn, reason.to_string()),
                _ => {}
            }
        }
        let is_due = |request: &PlannedRequest| request.aborts.is_some_and(|at| at <= now);
        let aborted = self.open.values_mut().map(|exchange| &mut exchange.request);
        let aborted = aborted.filter(|request| is_due(request) && !request.is_aborted);
        let aborted = aborted.map(|request| {
            request.is_aborted = true;
            request.clone()
        });
        for request in aborted.collect::<Vec<_>>() {
            self.abort(&request);
        }
        let leaves = |exchange: &Exchange| exchange.request.leaves.is_some_and(|at| at <= now);
        let gone = self.open.iter().filter(|(_, exchange)| leaves(exchange));
        for conn in gone.map(|(&conn, _)| conn).collect::<Vec<_>>() {
            self.end(conn, Outcome::Left);
        }
        while let Some(request) = self.waiting.pop_if(|request| request.at <= now) {
            self.ask(request);
        }
        let until = self.reactor.prepare(None).map(|until| (until - base).as_nanos() as Nanos);
        let leaves = self.open.values().filter_map(|exchange| exchange.request.leaves);
        let running = self.open.values().filter(|exchange| !exchange.request.is_aborted);
        let aborts = running.filter_map(|exchange| exchange.request.aborts);
        let asks = self.waiting.last().map(|request| request.at);
        let next = leaves.chain(asks).chain(aborts).chain(until).min();
        next.unwrap_or(now + SECOND)
    }

    /// Lets the clients with this prompt leave at this time, if they may.
    pub fn leave(&mut self, prompt: &[u32], at: Nanos) {
        for exchange in self.open.values_mut() {
            let request = &mut exchange.request;
            if request.may_leave && request.order.prompt == prompt {
                request.leaves = Some(request.leaves.map_or(at, |leaves| leaves.min(at)));
            }
        }
    }

    fn ask(&mut self, request: PlannedRequest) {
        let conn = self.send(&request, "/generate", &body_of(&request));
        let limits = HttpLimits { body: 1 << 20, ..HttpLimits::default() };
        let decoder = ResponseDecoder::new(Method::Post, limits);
        let key = self.keys.right;
        self.open.insert(conn, Exchange { request, key, decoder, status: 0, body: Vec::new() });
    }

    /// Aborts a request by its name.
    fn abort(&mut self, request: &PlannedRequest) {
        let conn = self.send(request, "/abort_request", &json!({ "rid": request.rid }));
        self.aborts.insert(conn);
    }

    /// Sends this body for a request on a connection of its own.
    fn send(&mut self, request: &PlannedRequest, target: &str, body: &Value) -> ConnId {
        let until = self.reactor.now() + Duration::from_secs(10);
        let conn = self.reactor.connect(&self.router.into(), until).expect("few connections");
        let (mut bytes, body) = (Vec::new(), body.to_string());
        let line = RequestLine { method: Method::Post, target, host: "router" };
        let bearer = request.key.map(|key| format!("Bearer {}", self.keys.key_of(key)));
        let key = bearer.as_deref().map(|bearer| ("authorization", bearer));
        let deadline = (DEADLINE / MILLI).to_string();
        let deadline = request.order.is_hurried.then_some(("x-request-timeout-ms", &*deadline));
        let fields = [("connection", "close")].into_iter().chain(key).chain(deadline);
        let fields: Vec<_> = fields.collect();
        write_request(&mut bytes, line, &fields, Some(body.as_bytes()));
        if request.is_cut_short {
            bytes.pop();
        }
        self.reactor.send(conn, &bytes).expect("a short request");
        conn
    }

    fn read(&mut self, conn: ConnId) {
        if self.aborts.remove(&conn) {
            return self.reactor.close(conn);
        }
        let bytes = self.reactor.received(conn).to_vec();
        self.reactor.consume(conn, bytes.len());
        let Some(exchange) = self.open.get_mut(&conn) else { return };
        let mut rest = &bytes[..];
        loop {
            match exchange.decoder.read(rest) {
                Ok((used, event)) => {
                    rest = &rest[used..];
                    match event {
                        Some(ResponseEvent::Head(head)) => exchange.status = head.status,
                        Some(ResponseEvent::Body(piece)) => exchange.body.extend(piece),
                        Some(ResponseEvent::End { .. }) if rest.is_empty() => {
                            let outcome = exchange.outcome();
                            return self.end(conn, outcome);
                        }
                        Some(ResponseEvent::End { .. }) => {
                            return self.end(conn, Outcome::Wrong("bytes after the end".into()));
                        }
                        None => return,
                    }
                }
                Err(error) => return self.cut(conn, error.to_string()),
            }
        }
    }

    fn cut(&mut self, conn: ConnId, why: String) {
        self.end(conn, Outcome::Broken(why));
    }

    fn end(&mut self, conn: ConnId, outcome: Outcome) {
        self.reactor.close(conn);
        self.aborts.remove(&conn);
        if let Some(exchange) = self.open.remove(&conn) {
            let outcome = exchange.wrong_token().map_or(outcome, Outcome::Wrong);
            self.ended.push((exchange.request, self.now, outcome));
        }
    }
}

impl Exchange {
    /// The first event of a stream that does not go on with the expected tokens.
    fn wrong_token(&self) -> Option<String> {
        if !self.request.stream || self.status != 200 {
            return None;
        }
        let text = String::from_utf8_lossy(&self.body);
        let (whole, _) = text.rsplit_once("\n\n")?;
        let (expected, mut before) = (&self.request.order.expected, 0);
        for event in whole.split("\n\n").filter_map(|event| event.strip_prefix("data: ")) {
            let Ok(event) = serde_json::from_str::<Value>(event) else { continue };
            let ids = serde_json::from_value::<Vec<u32>>(event["output_ids"].clone());
            let Ok(ids) = ids else { continue };
            if !expected.starts_with(&ids) || ids.len() < before {
                return Some(format!("{ids:?} after {before} tokens of {expected:?}"));
            }
            before = ids.len();
        }
        None
    }

    fn outcome(&self) -> Outcome {
        let text = String::from_utf8_lossy(&self.body);
        let broken = || Outcome::Broken(format!("status {}: {text}", self.status));
        let is_stream = self.request.stream && self.status == 200;
        // The first event of a stream has the logprobs of the prompt.
        let (first, last) = match is_stream {
            true => {
                let events = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
                let is_whole = text.ends_with("data: [DONE]\n\n");
                let mut events = events.filter(|event| *event != "[DONE]");
                let first = events.next().unwrap_or_default();
                let last = events.last().unwrap_or(first);
                if !is_whole && !last.contains("\"error\"") {
                    return broken();
                }
                (first, last)
            }
            false => (&*text, &*text),
        };
        let Ok(answer) = serde_json::from_str::<Value>(last) else { return broken() };
        if let Some(code) = answer["error"]["code"].as_str() {
            let message = answer["error"]["message"].to_string();
            return Outcome::Refused(self.status, code.to_owned(), message);
        }
        let cached = answer["meta_info"]["cached_tokens"].as_u64();
        let ids = serde_json::from_value(answer["output_ids"].clone());
        match (ids, cached, logprobs_of_prompt(first)) {
            (Ok(ids), Some(cached), Some(logprobs)) => {
                Outcome::Answered { ids, cached: cached as usize, logprobs }
            }
            _ => broken(),
        }
    }
}

/// The logprobs of the prompt in an answer or event; `None` if they have another form.
fn logprobs_of_prompt(answer: &str) -> Option<SimLogprobs> {
    let mut answer: Value = serde_json::from_str(answer).ok()?;
    let mut read = |name: &str| match answer["meta_info"][name].take() {
        Value::Null => json!([]),
        list => list,
    };
    let [tokens, top] = ["input_token_logprobs", "input_top_logprobs"].map(&mut read);
    Some(SimLogprobs {
        tokens: serde_json::from_value(tokens).ok()?,
        top: serde_json::from_value(top).ok()?,
    })
}

fn body_of(request: &PlannedRequest) -> Value {
    let asked = &request.order;
    let mut body = json!({
        "input_ids": asked.prompt,
        "rid": request.rid,
        "stream": request.stream,
        "sampling_params": {
            "temperature": asked.sampling.temperature,
            "sampling_seed": asked.sampling.seed,
            "frequency_penalty": asked.sampling.frequency_penalty,
            "max_new_tokens": asked.max_new,
            "stop_token_ids": asked.stop_tokens,
        },
    });
    match asked.grammar {
        Some(regex) => body["sampling_params"]["regex"] = json!(regex),
        None => body["sampling_params"]["ignore_eos"] = json!(true),
    }
    if let Some((first, alternatives)) = asked.logprobs_from {
        body["return_logprob"] = json!(true);
        body["logprob_start_len"] = json!(first);
        body["top_logprobs_num"] = json!(alternatives);
    }
    if asked.salt != Salt(0) {
        body["cache_salt"] = json!(asked.salt.0.to_string());
    }
    body
}
