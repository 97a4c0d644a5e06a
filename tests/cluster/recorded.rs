//! Recorded requests of SGLang's router to a prefill and a decode worker (`tools/sglang-router
//! --record`), sent again byte for byte. Each worker must give the answer that this router needs.
//! `NAME.prefill` and `NAME.decode` came at the same time; `NAME-stream` is `NAME` as a stream.

use crate::process::{PATIENCE, Process};
use crate::start;
use baton::http::client::{ResponseDecoder, ResponseEvent, ResponseHead};
use baton::http::{HttpLimits, Method};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::{fs, thread};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings/sglang-router-0.3.2");
/// The workers' address in the recording. It has the length of the longest address.
const HOST: &str = "127.111.111.111";
/// Their registry port, which decode uses if it gets no port.
const REGISTRY: &str = "8998";

/// The requests to both workers, by name.
type Recording = BTreeMap<String, [Option<Vec<u8>>; 2]>;

/// The recording with workers at `host`, which has the same length.
fn recording(host: &str) -> Recording {
    assert_eq!(host.len(), HOST.len());
    let mut all = Recording::new();
    for file in fs::read_dir(FOLDER).unwrap() {
        let path = file.unwrap().path();
        let role = ["prefill", "decode"]
            .iter()
            .position(|role| path.extension().is_some_and(|end| end == *role));
        let bytes = moved(&fs::read(&path).unwrap(), host);
        all.entry(stem(&path)).or_default()[role.expect("a role")] = Some(bytes);
    }
    all
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap().to_string_lossy().into_owned()
}

fn moved(bytes: &[u8], host: &str) -> Vec<u8> {
    let mut moved = bytes.to_vec();
    let places =
        bytes.windows(HOST.len()).enumerate().filter(|(_, window)| *window == HOST.as_bytes());
    places.for_each(|(place, _)| moved[place..place + HOST.len()].copy_from_slice(host.as_bytes()));
    moved
}

/// A loopback address that no other test process uses.
fn own_host() -> String {
    let digits = |number: u32| 100 + number % 100;
    let id = std::process::id();
    format!("127.{}.{}.{}", digits(id), digits(id / 100), digits(id / 10_000))
}

struct Answer {
    head: ResponseHead,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert_eq!(self.head.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).expect("an answer in JSON")
    }

    /// The events of a stream with a proper end.
    fn events(&self) -> Vec<Value> {
        assert_eq!(self.head.status, 200, "{}", self.body);
        assert!(self.head.headers.get("content-type").unwrap().starts_with("text/event-stream"));
        let events = self.body.strip_suffix("data: [DONE]\n\n").expect("a proper end");
        let data = events
            .split_terminator("\n\n")
            .map(|event| event.strip_prefix("data: ").expect("an event"));
        data.map(|data| serde_json::from_str(data).expect("an event in JSON")).collect()
    }
}

/// A connection that is kept, as the router keeps them.
struct Line(TcpStream);

impl Line {
    fn to(address: SocketAddr) -> Line {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Line(stream)
    }

    fn ask(&mut self, request: &[u8]) -> Answer {
        self.0.write_all(request).unwrap();
        let mut decoder = ResponseDecoder::new(
            Method::Post,
            HttpLimits { body: usize::MAX, ..HttpLimits::default() },
        );
        let (mut input, mut head, mut body) = (Vec::new(), None, Vec::new());
        loop {
            let (used, event) = decoder.read(&input).expect("an answer in HTTP");
            let is_end = match event {
                Some(ResponseEvent::Head(found)) => head.replace(found).is_some(),
                Some(ResponseEvent::Body(piece)) => {
                    body.extend_from_slice(piece);
                    false
                }
                Some(ResponseEvent::End { keep_alive }) => {
                    assert!(keep_alive, "the connection is kept");
                    true
                }
                None => {
                    input.drain(..used);
                    let mut piece = [0; 64 << 10];
                    let count = self.0.read(&mut piece).expect("an answer comes");
                    assert!(count > 0, "closed before the answer's end");
                    input.extend_from_slice(&piece[..count]);
                    continue;
                }
            };
            input.drain(..used);
            if is_end {
                assert!(input.is_empty(), "nothing behind the answer");
                return Answer {
                    head: head.expect("a head"),
                    body: String::from_utf8(body).unwrap(),
                };
            }
        }
    }
}

/// Both legs at the same moment.
fn dual(lines: &mut [Line; 2], requests: &[Option<Vec<u8>>; 2]) -> [Answer; 2] {
    let [prefill, decode] = lines;
    let [Some(to_prefill), Some(to_decode)] = requests else { panic!("it went to one of them") };
    thread::scope(|scope| {
        let reader = scope.spawn(|| prefill.ask(to_prefill));
        let writer = decode.ask(to_decode);
        [reader.join().unwrap(), writer]
    })
}

fn body_of(request: &[u8]) -> Value {
    let at = request.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    serde_json::from_slice(&request[at + 4..]).expect("a body in JSON")
}

fn is_to(request: &[u8], path: &str) -> bool {
    request.starts_with(format!("POST {path} ").as_bytes())
}

/// The part of an answer that counts: the choices, or texts, IDs and finish reasons.
fn essence(answer: &Value) -> Value {
    let one = |item: &Value| {
        json!([item["text"], item["output_ids"], item["meta_info"]["finish_reason"]])
    };
    match answer {
        Value::Array(items) => items.iter().map(one).collect(),
        answer if answer.get("choices").is_some() => answer["choices"].clone(),
        answer => one(answer),
    }
}

/// The choices of an answer, or the items of a batch, or the single item.
fn items(answer: &Value) -> &[Value] {
    match answer {
        Value::Array(items) => items,
        answer => answer["choices"].as_array().map_or(std::slice::from_ref(answer), Vec::as_slice),
    }
}

/// The finish reason of each choice.
fn ends(answer: &Value) -> Vec<&Value> {
    items(answer)
        .iter()
        .map(|item| item.pointer("/meta_info/finish_reason/type").unwrap_or(&item["finish_reason"]))
        .collect()
}

/// The text of each choice.
fn texts(answer: &Value) -> BTreeMap<u64, String> {
    let text = |item: &Value| {
        item["message"]["content"].as_str().or(item["text"].as_str()).unwrap().to_owned()
    };
    items(answer)
        .iter()
        .enumerate()
        .map(|(place, item)| (item["index"].as_u64().unwrap_or(place as u64), text(item)))
        .collect()
}

/// The same for a stream.
fn streamed(events: &[Value]) -> BTreeMap<u64, String> {
    let mut texts = BTreeMap::<u64, String>::new();
    for event in events {
        let Some(choices) = event["choices"].as_array() else {
            // Each event holds all the text so far.
            let index = event["index"].as_u64().unwrap_or(0);
            texts.insert(index, event["text"].as_str().unwrap().to_owned());
            continue;
        };
        for choice in choices {
            let piece =
                choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            *texts.entry(choice["index"].as_u64().unwrap()).or_default() += piece;
        }
    }
    texts
}

/// What the router's own code reads from the two answers to `/generate` to merge logprobs.
fn check_merging(legs: [&Value; 2]) {
    let [prompted, generated] = legs.map(|leg| &leg["meta_info"]);
    assert!(prompted["input_token_logprobs"].is_array(), "{prompted}");
    assert_eq!(generated["input_token_logprobs"], json!([]));
    let count = generated["output_token_logprobs"].as_array().map(Vec::len);
    assert_eq!(count.map(|count| count as u64), generated["completion_tokens"].as_u64());
}

#[test]
fn requests_of_sglangs_router_get_the_answers_that_it_needs() {
    let host = own_host();
    let named = ["--served-model-name", "smol"];
    let at = ["--host", &host, "--bootstrap-port", REGISTRY, "--chunked-prefill-size", "8"];
    let mut workers = [
        start("prefill", &[&named[..], &at].concat()),
        start("decode", &[&named[..], &["--host", &host]].concat()),
    ];
    let serve = start("serve", &[&["--mixed"][..], &named].concat());
    let mut lines = workers.each_ref().map(|worker| Line::to(worker.address));
    let mut whole = BTreeMap::new();
    let mut seen = 0;
    // A stream comes after its complete form.
    let mut all: Vec<_> = recording(&host).into_iter().collect();
    all.sort_by_key(|(name, _)| (name.ends_with("-stream"), name.clone()));
    for (name, requests) in all {
        eprintln!("{name}");
        seen += 1;
        let first = requests.iter().flatten().next().unwrap();
        let is_generation = ["/generate", "/v1/completions", "/v1/chat/completions"]
            .iter()
            .any(|path| is_to(first, path));
        if name.starts_with("start") {
            workers
                .iter_mut()
                .zip(&requests)
                .for_each(|(worker, request)| greet(worker, request.as_ref().unwrap()));
        } else if is_to(first, "/v1/rerank") {
            for refused in dual(&mut lines, &requests) {
                assert_eq!(refused.head.status, 404, "{}", refused.body);
                assert!(refused.body.contains("/v1/rerank"), "{}", refused.body);
            }
        } else if !is_generation {
            for (line, request) in lines.iter_mut().zip(requests.iter().flatten()) {
                line.ask(request).json();
            }
        } else if body_of(first)["stream"] == true {
            let [prompted, generated] = dual(&mut lines, &requests).map(|answer| answer.events());
            assert!(!prompted.is_empty());
            assert_eq!(&streamed(&generated), &whole[name.strip_suffix("-stream").unwrap()]);
        } else {
            let [prompted, generated] = dual(&mut lines, &requests).map(|answer| answer.json());
            let alone = Line::to(serve.address).ask(first).json();
            assert_eq!(essence(&generated), essence(&alone), "as one process says it");
            assert!(
                ends(&prompted).iter().all(|reason| *reason == "length"),
                "prefill says one token: {prompted}"
            );
            if name == "generate-logprobs" {
                check_merging([&prompted, &generated]);
            }
            whole.insert(name, texts(&generated));
        }
    }
    assert!(
        seen >= 30 && whole.len() >= 14,
        "{seen} recorded, {} of them whole answers",
        whole.len()
    );
    for mut worker in workers {
        worker.await_idle();
        worker.check_alive();
    }
}

/// One of the first probes, each on its own connection: HTTP/1.1, or the preface of HTTP/2, which
/// is refused or closed.
fn greet(worker: &mut Process, request: &[u8]) {
    if !request.starts_with(b"PRI ") {
        let answer = Line::to(worker.address).ask(request);
        assert_eq!(answer.head.status, 200, "{}", answer.body);
        return;
    }
    let mut stream = TcpStream::connect(worker.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is not left open"),
    }
    assert!(
        answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    worker.check_alive();
}
