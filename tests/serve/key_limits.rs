//! Limits of requests and tokens for each API key, on one process and through a router.

use crate::client::{PATIENCE, Reply};
use crate::server::{Routed, Server, endless};
use baton::http::Method;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const REQUESTS: &str = "--key-requests-per-minute";
const TOKENS: &str = "--key-tokens-per-minute";
const KEYS: &str = "one\ntwo\n";

/// A file of keys. Drop removes it.
struct KeyFile(PathBuf);

impl KeyFile {
    fn new(lines: &str) -> KeyFile {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("baton-key-limits-{}-{number}", std::process::id());
        let file = KeyFile(std::env::temp_dir().join(name));
        file.write(lines);
        file
    }

    fn write(&self, lines: &str) {
        std::fs::write(&self.0, lines).unwrap();
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a check at one mixed worker, then at a router with two workers. All have these keys.
fn at_each_front(lines: &str, limits: &[&str], check: impl Fn(&Server)) {
    let keys = KeyFile::new(lines);
    let shared = ["--api-key-file", keys.path()];
    check(&Server::start_long(&[&["--mixed"], &shared[..], limits].concat()));
    check(&Routed::start(&shared, limits).router);
}

fn post(server: &Server, key: &str, path: &str, body: &Value) -> Reply {
    let bearer = format!("Bearer {key}");
    let body = body.to_string();
    server.request(Method::Post, path, &[("authorization", &bearer)], body.as_bytes())
}

fn get(server: &Server, key: &str, path: &str) -> Reply {
    server.request(Method::Get, path, &[("authorization", &format!("Bearer {key}"))], b"")
}

/// A request with a prompt of five tokens and an answer of exactly `most`.
fn completion(most: u32) -> Value {
    json!({"prompt": [5, 6, 7, 8, 9], "max_tokens": most, "ignore_eos": true, "temperature": 0})
}

fn ask(server: &Server, key: &str, most: u32) -> Reply {
    post(server, key, "/v1/completions", &completion(most))
}

fn field<'a>(reply: &'a Reply, name: &str) -> Option<&'a str> {
    reply.head.headers.get(name)
}

/// Checks a refusal with 429. Returns its message and the seconds until the next try.
#[track_caller]
fn refused(reply: &Reply) -> (String, u64) {
    let expected = (429, "rate_limit_exceeded".to_owned(), None);
    assert_eq!(reply.error(), expected, "{}", reply.text());
    assert_eq!(reply.json()["error"]["type"], "rate_limit_error");
    let seconds = field(reply, "retry-after").expect("a time").parse().unwrap();
    assert!(seconds > 0, "{}", reply.text());
    (reply.json()["error"]["message"].as_str().unwrap().to_owned(), seconds)
}

/// The counter of refusals by this limit.
fn refusals(server: &Server, limit: &str) -> f64 {
    let text = get(server, "two", "/metrics");
    let name = format!("baton_key_limit_refusals_total{{limit=\"{limit}\"}} ");
    let line = text.text().lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("{name}")).parse().unwrap()
}

/// Waits until this many tokens are left to the key.
#[track_caller]
fn await_left(server: &Server, key: &str, at_least: u32) {
    let begun = Instant::now();
    loop {
        // A request that fails shows the limits, and costs no tokens.
        let mut odd = completion(1);
        odd["model"] = json!("other");
        let reply = post(server, key, "/v1/completions", &odd);
        assert_eq!(reply.status(), 404, "{}", reply.text());
        let left: u32 = field(&reply, "x-ratelimit-remaining-tokens").unwrap().parse().unwrap();
        if left >= at_least {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "{left} tokens are left, not {at_least}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_key_has_its_requests_per_minute_and_is_told_in_each_api() {
    // The minute of one request is longer than the test.
    at_each_front("one\ntwo requests-per-minute=5\n", &[REQUESTS, "1"], |server| {
        let first = ask(server, "one", 2);
        first.ok();
        assert_eq!(field(&first, "x-ratelimit-limit-requests"), Some("1"));
        assert_eq!(field(&first, "x-ratelimit-remaining-requests"), Some("0"));
        assert_eq!(field(&first, "x-ratelimit-limit-tokens"), None);
        let reply = ask(server, "one", 2);
        let (message, seconds) = refused(&reply);
        assert!(message.contains("limit of 1 requests per minute"), "{message}");
        assert!(message.contains(REQUESTS) && (1..=60).contains(&seconds), "{message}");
        assert_eq!(field(&reply, "x-ratelimit-remaining-requests"), Some("0"));
        let chat = json!({"max_tokens": 2, "messages": [{"role": "user", "content": "a"}]});
        refused(&post(server, "one", "/v1/chat/completions", &chat));
        refused(&post(server, "one", "/v1/responses", &json!({"input": "a"})));
        refused(&post(server, "one", "/generate", &json!({"text": "a"})));
        let mut streamed = completion(2);
        streamed["stream"] = json!(true);
        refused(&post(server, "one", "/v1/completions", &streamed));
        let message = post(server, "one", "/v1/messages", &chat);
        assert_eq!(message.status(), 429);
        assert_eq!(message.json()["error"]["type"], "rate_limit_error", "{}", message.text());
        assert!(field(&message, "retry-after").is_some());
        for path in ["/v1/models", "/metrics", "/health", "/version"] {
            assert_eq!(get(server, "one", path).status(), 200, "{path}");
        }
        post(server, "one", "/tokenize", &json!({"prompt": "a"})).ok();
        post(server, "one", "/v1/messages/count_tokens", &chat).ok();
        // Another key is not affected, and its line has another value.
        (0..5).for_each(|_| _ = ask(server, "two", 2).ok());
        refused(&ask(server, "two", 2));
        assert_eq!((refusals(server, "requests"), refusals(server, "tokens")), (7.0, 0.0));
        assert_eq!(ask(server, "three", 2).status(), 401);
    });
}

#[test]
fn the_time_of_a_refusal_is_enough() {
    let keys = KeyFile::new(KEYS);
    let server = Server::start(&["--mixed", "--api-key-file", keys.path(), REQUESTS, "60"]);
    let begun = Instant::now();
    let refusal = loop {
        let reply = ask(&server, "one", 1);
        if reply.status() != 200 {
            break reply;
        }
        assert!(begun.elapsed() < PATIENCE, "no request is refused");
    };
    // The one test that waits for a time: it is the promise of the answer.
    thread::sleep(Duration::from_secs(refused(&refusal).1));
    ask(&server, "one", 1).ok();
}

#[test]
fn prompts_and_answers_count_as_tokens() {
    let flags = [TOKENS, "100"];
    at_each_front("one\ntwo\nthree\nfour\nfive\n", &flags, |server| {
        let (message, seconds) = {
            let first = ask(server, "one", 60);
            assert_eq!(first.ok()["usage"]["total_tokens"], 65);
            assert_eq!(field(&first, "x-ratelimit-limit-tokens"), Some("100"));
            assert_eq!(field(&first, "x-ratelimit-remaining-tokens"), Some("35"));
            refused(&ask(server, "one", 60))
        };
        assert!(message.contains("limit of 100 tokens per minute"), "{message}");
        assert!(message.contains("up to 65 tokens") && (1..=18).contains(&seconds), "{message}");
        let never = ask(server, "one", 96);
        assert_eq!(never.error(), (400, "rate_limit_exceeded".into(), None), "{}", never.text());
        assert!(never.text().contains("up to 101 tokens"), "{}", never.text());
        assert_eq!(field(&never, "retry-after"), None);
        // The choices of one prompt share it: 5 and 3 times 20.
        let mut three = completion(20);
        three["n"] = json!(3);
        post(server, "two", "/v1/completions", &three).ok();
        refused(&ask(server, "two", 50));
        // A stream counts as it runs.
        let mut streamed = completion(60);
        streamed["stream"] = json!(true);
        post(server, "three", "/v1/completions", &streamed).events();
        refused(&ask(server, "three", 60));
        // So do answers in another form, of several prompts.
        let sampling = json!({"max_new_tokens": 30, "ignore_eos": true});
        let two = json!({"input_ids": [[5, 6, 7], [8, 9]], "sampling_params": sampling});
        post(server, "four", "/generate", &two).ok();
        refused(&ask(server, "four", 60));
        assert_eq!((refusals(server, "requests"), refusals(server, "tokens")), (0.0, 5.0));
        // A request that fails costs nothing, and an answer only what it has.
        let mut odd = completion(90);
        odd["model"] = json!("other");
        assert_eq!(post(server, "five", "/v1/completions", &odd).status(), 404);
        let mut short = completion(90);
        short["stop_token_ids"] = (0..256).collect();
        short["min_tokens"] = json!(0);
        let used = post(server, "five", "/v1/completions", &short).ok();
        let used = used["usage"]["total_tokens"].as_u64().unwrap() as u32;
        await_left(server, "five", 100 - used);
    });
}

/// The charge of a stream ends with its client.
#[test]
fn a_client_that_leaves_gets_its_charge_back() {
    at_each_front(KEYS, &[TOKENS, "100000"], |server| {
        let mut client = server.connect();
        let body = endless().to_string();
        let bearer = ("authorization", "Bearer one");
        client.send(Method::Post, "/v1/completions", &[bearer], Some(body.as_bytes()));
        client.wait_for("data: ");
        refused(&post(server, "one", "/v1/completions", &endless()));
        drop(client);
        // More than what comes in the time of the test, and less than the charge of 60,000.
        await_left(server, "one", 95_000);
    });
}

#[test]
fn a_changed_file_keeps_the_state_of_keys_that_stay() {
    let keys = KeyFile::new("one\n");
    let (shared, limits) = (["--api-key-file", keys.path()], [REQUESTS, "1"]);
    check_reload(&Server::start(&[&["--mixed"], &shared[..], &limits].concat()), &[], &keys);
    keys.write("one\n");
    let routed = Routed::start(&shared, &limits);
    check_reload(&routed.router, &routed.workers, &keys);
}

fn check_reload(front: &Server, others: &[Server], keys: &KeyFile) {
    ask(front, "one", 2).ok();
    refused(&ask(front, "one", 2));
    keys.write("two requests-per-minute=2\none\n");
    for server in others.iter().chain([front]) {
        server.signal("HUP");
        let begun = Instant::now();
        while server.said("file reloaded what=\"API keys\"").is_empty() {
            assert!(begun.elapsed() < PATIENCE, "the file is not read again");
            thread::sleep(Duration::from_millis(5));
        }
    }
    refused(&ask(front, "one", 2));
    (0..2).for_each(|_| _ = ask(front, "two", 2).ok());
    refused(&ask(front, "two", 2));
}

/// A router's calls to its workers have the client's key, and are not limited by a shared file.
#[test]
fn a_shared_file_limits_no_call_of_a_router() {
    let keys = KeyFile::new("one requests-per-minute=1 tokens-per-minute=1\n");
    let shared = ["--api-key-file", keys.path()];
    let routed = Routed::start(&shared, &[]);
    (0..4).for_each(|_| _ = ask(&routed.router, "one", 20).ok());
    for server in routed.workers.iter().chain([&routed.router]) {
        let reply = get(server, "one", "/metrics");
        let refused = "baton_key_limit_refusals_total{limit=\"requests\"} 0\n";
        assert!(reply.text().contains(refused), "{}", reply.text());
    }
}
