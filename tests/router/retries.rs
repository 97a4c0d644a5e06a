//! Requests that the router sends to another pair, and streams that continue there.

use crate::client::{Client, Router};
use crate::worker::{Asked, PATIENCE, Worker};
use crate::{PROMPT, STREAM, trio};
use baton::limits::ROUTER_CATCH_UP_TIME;
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// Two workers of each role and a router that uses them in turn.
pub struct Quartet {
    pub prefill: [Worker; 2],
    pub decode: [Worker; 2],
    pub router: Router,
}

impl Quartet {
    pub fn start(flags: &[&str]) -> Quartet {
        let (prefill, decode) =
            ([(); 2].map(|()| Worker::start()), [(); 2].map(|()| Worker::start()));
        let flags = [&["--policy", "round_robin"], flags].concat();
        let router = Router::ready(&[&prefill[0], &prefill[1]], &[&decode[0], &decode[1]], &flags);
        router.wait_for_workers(4);
        Quartet { prefill, decode, router }
    }

    /// The next request at both workers of a pair, and the indexes of the workers.
    pub fn asked(&self) -> ([usize; 2], Asked, Asked) {
        let (prefill, at_prefill) = self.at_prefill();
        let (decode, at_decode) = self.at_decode();
        ([prefill, decode], at_prefill, at_decode)
    }

    /// The next request at a prefill worker, and its index.
    pub fn at_prefill(&self) -> (usize, Asked) {
        next(&self.prefill)
    }

    /// The same for a decode worker.
    pub fn at_decode(&self) -> (usize, Asked) {
        next(&self.decode)
    }

    /// Whether no worker has an unhandled request.
    pub fn is_unasked(&self) -> bool {
        self.prefill.iter().chain(&self.decode).all(Worker::is_unasked)
    }
}

/// The next request at any of these workers.
fn next(workers: &[Worker; 2]) -> (usize, Asked) {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let asked = workers
            .iter()
            .enumerate()
            .find_map(|(which, worker)| Some((which, worker.try_asked()?)));
        if let Some(asked) = asked {
            return asked;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("no worker is asked");
}

fn room(asked: &Asked) -> u64 {
    asked.json()["bootstrap_room"].as_u64().unwrap()
}

/// An event of the first choice with its mark.
pub fn event(ids: &[u32], text: &str) -> String {
    let mark = json!({ "created": 7, "choice": 0, "ids": ids });
    format!(": {mark}\ndata: {text}\n\n")
}

/// A worker closes a connection with too much unsent data. The client reads too slowly, and would
/// do so elsewhere; unless the worker is gone.
#[test]
fn a_client_that_reads_too_slowly_continues_elsewhere_only_if_its_worker_is_gone() {
    let text = "x".repeat(60 << 10);
    for is_gone in [false, true] {
        let quartet = Quartet::start(&[]);
        let mut client = quartet.router.post("/v1/completions", STREAM);
        let ([_, worker], mut at_prefill, mut at_decode) = quartet.asked();
        at_prefill.answer("200 OK", "{}");
        at_decode.open_stream();
        let events = at_decode.flood(&event(&[5], &text));
        assert!(events < 1 << 12, "the router takes what its client does not");
        if is_gone {
            quartet.decode[worker].stop();
            quartet.router.wait_for_workers(3);
        } else {
            at_decode.hang_up();
        }
        let reader = thread::spawn(move || rest(&mut client));
        if is_gone {
            let ([_, other], _, mut at_decode) = quartet.asked();
            assert!(other != worker);
            let told =
                at_decode.json()["baton_resume"]["choices"][0]["ids"].as_array().unwrap().len();
            // A partial event is not passed on.
            assert!(told <= events + 1, "{told} of {events}");
            at_decode.open_stream();
            at_decode.chunk(&event(&[6], "the end"));
            at_decode.chunk("data: [DONE]\n\n");
            at_decode.end_stream();
        }
        let told = reader.join().unwrap();
        let end = if is_gone {
            "data: the end\n\ndata: [DONE]\n\n"
        } else {
            "\"code\":\"client_gone\"}}\n\n"
        };
        assert!(told.ends_with(end), "{}", &told[told.len() - 300..]);
        let metrics = quartet.router.get("/metrics").answer().1;
        let count = |name: &str| {
            let lines = metrics.lines().filter(|line| line.starts_with(name));
            lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
        };
        let gone = count("smg_router_request_errors_total{error_type=\"client_gone\"");
        assert_eq!(
            (gone, count("baton_router_retries_total")),
            if is_gone { (0.0, 1.0) } else { (1.0, 0.0) }
        );
        assert!(quartet.prefill.iter().all(Worker::is_unasked), "no other worker is asked");
    }
}

/// A client that has caught up since is treated like any other.
#[test]
fn a_client_that_once_read_slowly_continues_elsewhere_if_its_worker_ends() {
    let text = "x".repeat(60 << 10);
    let quartet = Quartet::start(&[]);
    let mut client = quartet.router.post("/v1/completions", STREAM);
    let ([_, worker], mut at_prefill, mut at_decode) = quartet.asked();
    at_prefill.answer("200 OK", "{}");
    at_decode.open_stream();
    let reader = thread::spawn(move || {
        // It stops reading while its worker sends more than the router buffers for it.
        thread::sleep(Duration::from_secs(1));
        let caught_up =
            std::iter::from_fn(|| client.piece()).any(|piece| piece.contains("data: seen"));
        (caught_up, client)
    });
    for _ in 0..100 {
        at_decode.chunk(&event(&[5], &text));
    }
    at_decode.chunk(&event(&[6], "seen"));
    let (caught_up, mut client) = reader.join().unwrap();
    assert!(caught_up);
    thread::sleep(ROUTER_CATCH_UP_TIME);
    at_decode.hang_up();
    let reader = thread::spawn(move || rest(&mut client));
    let ([_, other], _, mut at_decode) = quartet.asked();
    assert!(other != worker);
    at_decode.open_stream();
    at_decode.chunk(&event(&[7], "the end"));
    at_decode.chunk("data: [DONE]\n\n");
    at_decode.end_stream();
    let told = reader.join().unwrap();
    assert!(told.ends_with("data: the end\n\ndata: [DONE]\n\n"), "{told}");
}

/// An error body is collected up to the limit of its length.
#[test]
fn an_error_without_end_is_given_up() {
    let quartet = Quartet::start(&["--disable-retries"]);
    let mut client = quartet.router.post("/v1/completions", PROMPT);
    let (_, _, mut at_decode) = quartet.asked();
    at_decode.send(b"HTTP/1.1 500 Internal Server Error\r\ntransfer-encoding: chunked\r\n\r\n");
    let sent = at_decode.flood(&"x".repeat(64 << 10));
    assert!(sent < 1 << 12 && at_decode.is_closed());
    let (status, text) = client.answer();
    assert!(status == 502 && text.contains("longer than"), "{status} {text}");
}

pub fn rest(client: &mut Client) -> String {
    std::iter::from_fn(|| client.piece()).collect()
}

#[test]
fn a_request_goes_to_another_pair_when_a_worker_is_lost_or_says_no() {
    let four = Quartet::start(&[]);
    // A worker reports that the client is gone, because the other leg's connection was lost. The
    // router's client is still there.
    const GONE: &str = "{\"error\":{\"code\":\"client_gone\"}}";
    for (role, status, told) in [
        ("decode", "", ""),
        ("decode", "429 Too Many", "{}"),
        ("decode", "502 Oh", "{}"),
        ("prefill", "503 No", "{}"),
        ("prefill", "499 Gone", GONE),
    ] {
        let mut client = four.router.post("/v1/completions", PROMPT);
        let (first, mut at_prefill, mut at_decode) = four.asked();
        let first_room = room(&at_decode);
        match (role, status) {
            ("decode", "") => at_decode.hang_up(),
            ("decode", status) => at_decode.answer(status, told),
            (_, status) => at_prefill.answer(status, told),
        }
        let (second, mut at_prefill, mut at_decode) = four.asked();
        // The loss of one worker says nothing about the other one.
        let blamed = if role == "prefill" && told != GONE { 0 } else { 1 };
        assert_ne!(second[blamed], first[blamed], "{role} {status}");
        if status.starts_with("502") {
            assert_ne!(
                second[0], first[0],
                "one of the two has lost the other, and it is unknown which"
            );
        }
        assert_ne!(room(&at_decode), first_room, "each try has a room of its own");
        assert_eq!(room(&at_decode), room(&at_prefill));
        at_prefill.answer("200 OK", "{}");
        at_decode.answer("200 OK", "{\"well\":1}");
        assert_eq!(client.answer(), (200, "{\"well\":1}".into()), "{role} {status}");
    }
}

#[test]
fn tries_have_an_end_and_the_last_answer_is_the_clients() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", PROMPT);
    for _ in 0..5 {
        prefill.asked();
        decode.asked().answer("502 Oh", "{\"error\":{\"code\":\"peer_lost\"}}");
    }
    assert_eq!(client.answer(), (502, "{\"error\":{\"code\":\"peer_lost\"}}".into()));
    let mut client = router.post("/v1/completions", PROMPT);
    for _ in 0..5 {
        decode.asked();
        prefill.asked().answer("499 Gone", "{\"error\":{\"code\":\"client_gone\"}}");
    }
    let (status, told) = client.answer();
    assert!(
        (status, told.contains("peer_lost")) == (502, true),
        "the client has not gone: {status} {told}"
    );
    let mut client = router.post("/v1/completions", PROMPT);
    for _ in 0..2 {
        prefill.asked();
        decode.asked().answer("500 Oh", "{}");
    }
    assert_eq!(client.answer().0, 500, "what is the request's own doing is not done five times");
    let mut client = router.post("/v1/completions", PROMPT);
    prefill.asked();
    decode.asked().answer("400 No", "{}");
    assert_eq!(client.answer().0, 400);
    for told in ["{\"error\":{\"code\":\"aborted\"}}", "{}"] {
        let mut client = router.post("/v1/completions", PROMPT);
        prefill.asked();
        decode.asked().answer("499 Aborted", told);
        assert_eq!(client.answer().0, 499, "an aborted request is not retried");
    }
    assert!(prefill.is_unasked() && decode.is_unasked());
}

#[test]
fn a_client_is_waited_for_no_longer_than_it_said() {
    let (prefill, decode, router) = trio();
    let mut client = router.connect();
    client.post("/v1/completions", "x-request-timeout-ms: 60000\r\n", PROMPT);
    prefill.asked();
    thread::sleep(Duration::from_millis(20));
    decode.asked().hang_up();
    let again = prefill.asked();
    let left: u64 = again.header("x-request-timeout-ms").unwrap().parse().unwrap();
    assert!(left <= 59_980, "{left}");
    decode.asked().answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

/// Both legs are given up at the same time, in any order.
#[test]
fn a_client_gets_a_timeout_at_its_deadline_whichever_leg_ends_first() {
    let (prefill, decode, router) = trio();
    let mut clients: Vec<Client> = (0..8).map(|_| router.connect()).collect();
    for client in &mut clients {
        client.post("/v1/completions", "x-request-timeout-ms: 200\r\n", PROMPT);
    }
    let _silent: Vec<_> = clients.iter().map(|_| (prefill.asked(), decode.asked())).collect();
    for client in &mut clients {
        assert_eq!(client.answer().0, 408);
    }
}

#[test]
fn a_stream_continues_if_its_worker_dies_and_the_client_sees_no_gap() {
    let four = Quartet::start(&[]);
    let mut client = four.router.post("/v1/completions", STREAM);
    let (first, at_prefill, mut at_decode) = four.asked();
    assert_eq!(at_decode.json()["baton_resume"], json!({ "created": null, "choices": [] }));
    at_decode.open_stream();
    at_decode.chunk(&event(&[], "begun"));
    at_decode.chunk(&event(&[4, 5], "one"));
    // In one piece or in two.
    let mut told = client.piece().unwrap();
    if told.len() < 20 {
        told += &client.piece().unwrap();
    }
    assert_eq!(told, "data: begun\n\ndata: one\n\n");
    at_decode.chunk(&event(&[6], "cut off")[..30]);
    at_decode.hang_up();
    assert!(at_prefill.is_closed());
    let (second, _, mut at_decode) = four.asked();
    assert_ne!(first[1], second[1]);
    let resume = at_decode.json()["baton_resume"].clone();
    assert_eq!(resume, json!({ "created": 7, "choices": [{ "ids": [4, 5] }] }));
    at_decode.open_stream();
    at_decode.chunk(&event(&[6], "two"));
    // A worker that fails and can still report it is no other case.
    at_decode.chunk(&(event(&[7], "three") + "data: {\"error\":{\"code\":\"draining\"}}\n\n"));
    let (third, _, mut at_decode) = four.asked();
    assert_ne!(second[1], third[1]);
    assert_eq!(at_decode.json()["baton_resume"]["choices"], json!([{ "ids": [4, 5, 6, 7] }]));
    at_decode.open_stream();
    at_decode.chunk(&(event(&[8], "four") + "data: [DONE]\n\n"));
    at_decode.end_stream();
    assert_eq!(rest(&mut client), "data: two\n\ndata: three\n\ndata: four\n\ndata: [DONE]\n\n");
    let metrics = four.router.get("/metrics").answer().1;
    assert!(metrics.contains("baton_router_resumed_total 2\n"), "{metrics}");
}

#[test]
fn a_stream_with_all_its_events_ends_without_another_worker() {
    let (prefill, decode, router) = trio();
    let mut client = router.post("/v1/completions", STREAM);
    prefill.asked();
    let mut at_decode = decode.asked();
    at_decode.open_stream();
    at_decode.chunk(&(event(&[1], "all") + "data: [DONE]\n\n"));
    at_decode.hang_up();
    assert_eq!(rest(&mut client), "data: all\n\ndata: [DONE]\n\n");
    assert!(decode.is_unasked());
}

#[test]
fn a_worker_that_begins_anew_is_not_passed_off_as_going_on() {
    let four = Quartet::start(&[]);
    let mut client = four.router.post("/v1/completions", STREAM);
    let (_, _, mut at_decode) = four.asked();
    at_decode.open_stream();
    at_decode.chunk(&event(&[4], "one"));
    client.piece();
    at_decode.hang_up();
    let (_, _, mut at_decode) = four.asked();
    at_decode.open_stream();
    at_decode.chunk("data: one\n\n");
    assert!(at_decode.is_closed());
    let told = rest(&mut client);
    assert!(told.starts_with("data: {\"error\":{"), "{told}");
}

#[test]
fn a_worker_restarted_in_time_serves_the_requests_of_its_predecessor() {
    let (prefill, decode, router) = trio();
    let address = decode.address;
    let mut client = router.post("/v1/completions", PROMPT);
    prefill.asked();
    decode.asked();
    decode.stop();
    thread::sleep(Duration::from_millis(300));
    let decode = Worker::at(address, Some(("200 OK", "{}")));
    prefill.asked().answer("200 OK", "{}");
    decode.asked().answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

#[test]
fn an_abort_reaches_a_request_between_two_tries_and_one_at_its_workers() {
    let (prefill, decode, router) = trio();
    let abort = |body: &str| {
        let mut client = router.post("/abort_request", body);
        for worker in [&prefill, &decode] {
            worker.asked().answer("200 OK", "{}");
        }
        assert_eq!(client.answer().0, 200);
    };
    for stream in [false, true] {
        let body = json!({"prompt": "a", "rid": "mine-7", "stream": stream}).to_string();
        let mut client = router.post("/generate", &body);
        let (at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        if stream {
            at_decode.open_stream();
            at_decode.chunk(&event(&[5], "{\"a\":1}"));
            assert_eq!(client.piece().as_deref(), Some("data: {\"a\":1}\n\n"));
        }
        // The names must begin with this value. A shorter name does not match, and neither does the
        // router's own ID.
        for other in ["other", "mine-77", "6"] {
            abort(&json!({ "rid": other }).to_string());
        }
        assert!(at_prefill.is_open() && at_decode.is_open());
        // Its workers end it because of the order, not because the connection is closed.
        let mut asking = router.post("/abort_request", r#"{"rid":"mine"}"#);
        for worker in [&prefill, &decode] {
            let mut asked = worker.asked();
            assert!(at_prefill.is_open() && at_decode.is_open());
            asked.answer("200 OK", r#"{"aborted":1}"#);
        }
        let told = asking.answer().1;
        assert_eq!(told, r#"{"success":true,"aborted":1,"aborted_at_workers":2,"workers":2}"#);
        let told = if stream { rest(&mut client) } else { client.answer().1 };
        assert!(told.contains("aborted") && told.matches("error").count() > 0, "{told}");
        assert!(at_prefill.is_closed() && at_decode.is_closed());
    }
    // It waits for a worker to come back.
    let mut client = router.post("/generate", PROMPT);
    let legs = (prefill.asked(), decode.asked());
    for worker in [&prefill, &decode] {
        worker.stop();
    }
    drop(legs);
    thread::sleep(Duration::from_millis(300));
    let (status, body) = router.post("/abort_request", r#"{"abort_all":true}"#).answer();
    assert!(status == 200 && body.contains("unreached"), "{status} {body}");
    assert_eq!(client.answer().0, 499);
    let (status, _) = router.post("/abort_request", r#"{"abort_all":true}"#).answer();
    assert_eq!(status, 502, "no worker is there, and nothing was ended");
}
