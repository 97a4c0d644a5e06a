//! The order in which the workers of a pair get a request.

use crate::client::Router;
use crate::retries::{Quartet, event};
use crate::worker::{Asked, PATIENCE, Worker};
use crate::{PROMPT, STREAM};
use serde_json::{Value, json};
use std::time::Instant;

const PREFILL_FIRST: [&str; 2] = ["--flow", "prefill-first"];

const DECODE_FIRST: [&str; 2] = ["--flow", "decode-first"];

/// A prefill worker's answer for KV that it keeps in this room.
fn kept(room: u64) -> Value {
    json!({"do_remote_prefill": true, "remote_host": "10.0.0.1", "remote_port": 9000,
        "bootstrap_room": room})
}

fn keep(asked: &mut Asked, room: u64) {
    asked.answer("200 OK", &json!({ "kv_transfer_params": kept(room), "choices": [] }).to_string());
}

/// The worker is asked to drop the KV that it keeps in this room.
#[track_caller]
fn check_given_up(worker: &Worker, room: u64) {
    let asked = worker.asked();
    assert_eq!(asked.line, "POST /abort_request HTTP/1.1");
    assert_eq!(asked.json(), json!({ "bootstrap_room": room }));
    assert_eq!(asked.header("authorization"), Some("Bearer k"));
}

/// The room in which the router asks a prefill worker to keep KV.
fn room_of(asked: &Asked) -> u64 {
    asked.json()["kv_transfer_params"]["bootstrap_room"].as_u64().expect("a room")
}

#[test]
fn prefill_is_asked_first_and_decode_continues_from_its_kept_kv() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &PREFILL_FIRST);
    for (path, body, wrap) in [
        (
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":4,"echo":true,"kv_transfer_params":{"x":1}}"#,
            false,
        ),
        ("/generate", r#"{"text":["a","b"],"bootstrap_room":3}"#, true),
    ] {
        let mut client = router.post(path, body);
        let mut at_prefill = prefill.asked();
        let asked = at_prefill.json();
        assert_eq!(at_prefill.line, format!("POST {path} HTTP/1.1"));
        assert_eq!(asked["stream"], false);
        let host = json!({"do_remote_decode": true, "do_remote_prefill": false,
            "remote_host": "127.0.0.1", "remote_port": 9000,
            "bootstrap_room": room_of(&at_prefill)});
        assert_eq!(asked["kv_transfer_params"], host);
        // With `echo`, prefill may have to compute the logprobs of the prompt.
        assert_eq!(asked.get("echo").is_some(), body.contains("echo"), "{asked}");
        assert!(asked.get("bootstrap_room").is_none(), "{asked}");
        assert!(decode.is_unasked(), "it is not its turn");
        let told = json!({ "kv_transfer_params": kept(7) });
        let answer = if wrap { json!([{ "text": "", "meta_info": told }, {}]) } else { told };
        at_prefill.answer("200 OK", &answer.to_string());
        let mut at_decode = decode.asked();
        let asked = at_decode.json();
        assert_eq!(asked["kv_transfer_params"], kept(7));
        assert!(
            asked.get("bootstrap_room").is_none() && asked.get("bootstrap_host").is_none(),
            "{asked}"
        );
        assert_eq!(asked.get("echo").is_some(), body.contains("echo"));
        at_decode.answer("200 OK", r#"{"well":1}"#);
        assert_eq!(client.answer(), (200, r#"{"well":1}"#.into()));
    }
    assert!(prefill.is_unasked(), "what was claimed is not given up");
}

#[test]
fn an_error_of_prefill_is_told_and_decode_never_asked() {
    let quartet = Quartet::start(&PREFILL_FIRST);
    let mut client = quartet.router.post("/v1/completions", PROMPT);
    let (_, mut at_prefill) = quartet.at_prefill();
    at_prefill.answer("400 No", r#"{"error":{"code":"context_length_exceeded"}}"#);
    assert_eq!(client.answer().0, 400);
    // A failure that another worker possibly does not have is retried there.
    for fault in ["429 Full", "500 Oh", "hang up", "no room"] {
        let mut client = quartet.router.connect();
        client.post("/v1/completions", "authorization: Bearer k\r\n", PROMPT);
        let (first, mut at_prefill) = quartet.at_prefill();
        let room = room_of(&at_prefill);
        match fault {
            "hang up" => at_prefill.hang_up(),
            "no room" => at_prefill.answer("200 OK", r#"{"choices":[]}"#),
            status => at_prefill.answer(status, r#"{"error":{}}"#),
        }
        // Its answer can have been on its way, or does not name the room.
        if matches!(fault, "hang up" | "no room") {
            check_given_up(&quartet.prefill[first], room);
        }
        let (second, mut at_prefill) = quartet.at_prefill();
        assert_ne!(first, second, "{fault}");
        keep(&mut at_prefill, 5);
        let (_, mut at_decode) = quartet.at_decode();
        at_decode.answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200, "{fault}");
    }
    assert!(quartet.is_unasked());
}

/// A hung worker closes nothing: failed probes end its requests.
#[test]
fn a_prefill_worker_that_is_asked_first_and_stands_still_is_given_up() {
    let quartet = Quartet::start(&PREFILL_FIRST);
    let mut client = quartet.router.connect();
    client.post("/v1/completions", "authorization: Bearer k\r\n", PROMPT);
    let (first, still) = quartet.at_prefill();
    quartet.prefill[first].ignore_probes(4);
    check_given_up(&quartet.prefill[first], room_of(&still));
    let (second, mut at_prefill) = quartet.at_prefill();
    assert_ne!(first, second);
    assert!(still.is_closed());
    keep(&mut at_prefill, 5);
    quartet.at_decode().1.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

/// Decode has left when its turn comes. Another worker can claim the kept KV, and no prompt is
/// computed twice.
#[test]
fn kept_kv_is_claimed_by_another_decode_worker_if_one_has_left() {
    let quartet = Quartet::start(&PREFILL_FIRST);
    let mut client = quartet.router.post("/v1/completions", PROMPT);
    keep(&mut quartet.at_prefill().1, 1);
    let (first, mut at_decode) = quartet.at_decode();
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
    // It is the other worker's turn.
    let mut client = quartet.router.post("/v1/completions", PROMPT);
    let (_, mut at_prefill) = quartet.at_prefill();
    quartet.decode[1 - first].stop();
    keep(&mut at_prefill, 2);
    let (second, mut at_decode) = quartet.at_decode();
    assert_eq!((second, &at_decode.json()["kv_transfer_params"]), (first, &kept(2)));
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
    assert!(quartet.prefill.iter().all(Worker::is_unasked), "nothing is read again, or given up");
    // If there is no other worker, the KV is dropped, and the client gets an error.
    let mut client = quartet.router.connect();
    client.post("/v1/completions", "authorization: Bearer k\r\n", PROMPT);
    let (which, mut at_prefill) = quartet.at_prefill();
    quartet.decode[first].stop();
    keep(&mut at_prefill, 3);
    check_given_up(&quartet.prefill[which], 3);
    drop(client);
}

/// The router forgets a worker that has left when its last call ends. Its KV is still there.
#[test]
fn kept_kv_is_claimed_although_its_prefill_worker_has_left() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &PREFILL_FIRST);
    let mut client = router.post("/v1/completions", PROMPT);
    let mut at_prefill = prefill.asked();
    let mut operator = router.connect();
    operator.ask("GET", "/workers", "", "");
    let listed: Value = serde_json::from_str(&operator.answer().1).unwrap();
    let workers = listed["workers"].as_array().unwrap();
    let listed = workers.iter().find(|worker| worker["worker_type"] == "prefill").unwrap();
    operator.ask("DELETE", &format!("/workers/{}", listed["id"].as_str().unwrap()), "", "");
    assert_eq!(operator.answer().0, 202);
    keep(&mut at_prefill, 5);
    let mut at_decode = decode.asked();
    assert_eq!(at_decode.json()["kv_transfer_params"], kept(5));
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer().0, 200);
}

/// KV that decode does not claim is dropped at once, and the prompt is computed again.
#[test]
fn kept_kv_that_decode_does_not_claim_is_released() {
    let quartet = Quartet::start(&PREFILL_FIRST);
    let mut client = quartet.router.connect();
    let key = "authorization: Bearer k\r\n";
    for (room, fault) in ["429 Full", "500 Oh", "hang up"].into_iter().enumerate() {
        let room = room as u64;
        client.post("/v1/completions", key, PROMPT);
        let (first, mut at_prefill) = quartet.at_prefill();
        keep(&mut at_prefill, room);
        let (refusing, mut at_decode) = quartet.at_decode();
        match fault {
            "hang up" => at_decode.hang_up(),
            status => at_decode.answer(status, r#"{"error":{}}"#),
        }
        check_given_up(&quartet.prefill[first], room);
        let (_, mut at_prefill) = quartet.at_prefill();
        keep(&mut at_prefill, 90 + room);
        let (other, mut at_decode) = quartet.at_decode();
        assert_ne!(other, refusing, "{fault}");
        assert_eq!(at_decode.json()["kv_transfer_params"], kept(90 + room), "{fault}");
        at_decode.answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200, "{fault}");
    }
    // An error of the request itself is returned at once.
    client.post("/v1/completions", key, PROMPT);
    let (first, mut at_prefill) = quartet.at_prefill();
    keep(&mut at_prefill, 11);
    quartet.at_decode().1.answer("400 No", r#"{"error":{}}"#);
    assert_eq!(client.answer().0, 400);
    check_given_up(&quartet.prefill[first], 11);
}

#[test]
fn a_client_that_leaves_ends_whichever_leg_runs() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &PREFILL_FIRST);
    let mut client = router.connect();
    client.post("/v1/completions", "authorization: Bearer k\r\n", STREAM);
    let at_prefill = prefill.asked();
    drop(client);
    assert!(at_prefill.is_closed());
    // Its answer can be on its way.
    check_given_up(&prefill, room_of(&at_prefill));
    let mut client = router.connect();
    client.post("/v1/completions", "authorization: Bearer k\r\n", STREAM);
    keep(&mut prefill.asked(), 8);
    let at_decode = decode.asked();
    drop(client);
    assert!(at_decode.is_closed());
    check_given_up(&prefill, 8);
}

/// The client's tokens go to both legs of the next attempt.
#[test]
fn a_stream_continues_elsewhere_and_both_legs_get_its_tokens() {
    let quartet = Quartet::start(&PREFILL_FIRST);
    let mut client = quartet.router.connect();
    client.post("/v1/completions", "authorization: Bearer k\r\n", STREAM);
    let (first, mut at_prefill) = quartet.at_prefill();
    assert!(at_prefill.json().get("baton_resume").is_none(), "there is nothing to go on behind");
    keep(&mut at_prefill, 1);
    let (_, mut at_decode) = quartet.at_decode();
    assert_eq!(at_decode.json()["baton_resume"], json!({ "created": null, "choices": [] }));
    at_decode.open_stream();
    at_decode.chunk(&event(&[5, 6], "{}"));
    assert_eq!(client.piece().as_deref(), Some("data: {}\n\n"));
    at_decode.hang_up();
    check_given_up(&quartet.prefill[first], 1);
    let (_, mut at_prefill) = quartet.at_prefill();
    let asked = at_prefill.json();
    assert_eq!(
        (&asked["stream"], &asked["baton_resume"]["choices"][0]["ids"]),
        (&json!(false), &json!([5, 6]))
    );
    keep(&mut at_prefill, 2);
    let (_, mut at_decode) = quartet.at_decode();
    let asked = at_decode.json();
    assert_eq!(
        (&asked["kv_transfer_params"], &asked["baton_resume"]["choices"][0]["ids"]),
        (&kept(2), &json!([5, 6]))
    );
    at_decode.open_stream();
    at_decode.chunk(&event(&[7], "{}"));
    at_decode.chunk("data: [DONE]\n\n");
    at_decode.end_stream();
    assert_eq!(client.answer().1, "data: {}\n\ndata: [DONE]\n\n");
}

/// Both workers are reserved when the pair is chosen, and both count from then on.
#[test]
fn a_decode_worker_is_charged_while_prefill_reads() {
    let prefill = Worker::start();
    let decode = [Worker::start(), Worker::start()];
    let router = Router::ready(
        &[&prefill],
        &[&decode[0], &decode[1]],
        &[&PREFILL_FIRST[..], &["--policy", "least_loaded"]].concat(),
    );
    router.wait_for_workers(3);
    let mut clients: Vec<_> = (0..4).map(|_| router.post("/v1/completions", PROMPT)).collect();
    let asked: Vec<Asked> = (0..4).map(|_| prefill.asked()).collect();
    for (room, mut at_prefill) in asked.into_iter().enumerate() {
        keep(&mut at_prefill, room as u64);
    }
    for worker in &decode {
        for _ in 0..2 {
            worker.asked().answer("200 OK", "{}");
        }
        assert!(worker.is_unasked());
    }
    clients.iter_mut().for_each(|client| assert_eq!(client.answer().0, 200));
}

/// The prefill worker that decode's request names.
fn named(asked: &Asked) -> Value {
    let body = asked.json();
    assert!(body.get("bootstrap_room").is_none() && body.get("bootstrap_host").is_none(), "{body}");
    body["baton_prefill"].clone()
}

#[test]
fn only_decode_is_asked_and_it_gets_the_address_of_prefill() {
    let (prefill, decode) = (Worker::start(), Worker::start());
    let router = Router::ready(&[&prefill], &[&decode], &DECODE_FIRST);
    let mut client = router
        .post("/v1/completions", r#"{"prompt":"a","baton_prefill":{"host":"evil","port":1}}"#);
    let mut at_decode = decode.asked();
    let address =
        json!({"host": "127.0.0.1", "port": prefill.address.port(), "bootstrap_port": 9000});
    assert_eq!(named(&at_decode), address);
    at_decode.answer("200 OK", r#"{"well":1}"#);
    assert_eq!(client.answer(), (200, r#"{"well":1}"#.into()));
    let client = router.post("/v1/completions", STREAM);
    let at_decode = decode.asked();
    drop(client);
    assert!(at_decode.is_closed());
    assert!(prefill.is_unasked());
}

/// The field at fault tells the router which worker has failed.
#[test]
fn a_failure_of_the_prefill_worker_that_decode_asked_is_not_decode_s() {
    let prefill = [Worker::start(), Worker::start()];
    let decode = Worker::start();
    let flags = [&DECODE_FIRST[..], &["--policy", "round_robin"]].concat();
    let router = Router::ready(&[&prefill[0], &prefill[1]], &[&decode], &flags);
    router.wait_for_workers(3);
    for code in ["overloaded", "internal", "draining", "incompatible", "peer_lost"] {
        let error = format!(r#"{{"error":{{"code":"{code}","param":"bootstrap_host"}}}}"#);
        let mut client = router.post("/v1/completions", PROMPT);
        let mut at_decode = decode.asked();
        let first = named(&at_decode);
        at_decode.answer("502 Bad Gateway", &error);
        // The only decode worker gets the request again, with another prefill worker.
        let mut at_decode = decode.asked();
        assert_ne!(named(&at_decode), first, "{code}");
        at_decode.answer("200 OK", "{}");
        assert_eq!(client.answer().0, 200, "{code}");
    }
    // The same without the field is decode's own failure, and there is no other worker.
    let mut client = router.post("/v1/completions", PROMPT);
    decode.asked().answer("429 Full", r#"{"error":{"code":"overloaded"}}"#);
    assert_eq!(client.answer().0, 429);
}

/// Decode asks prefill, so only the router knows the reservation.
#[test]
fn a_prefill_worker_is_charged_until_decode_s_first_byte() {
    let prefill = [Worker::start(), Worker::start()];
    let decode = Worker::start();
    let flags = [&DECODE_FIRST[..], &["--policy", "least_loaded"]].concat();
    let router = Router::ready(&[&prefill[0], &prefill[1]], &[&decode], &flags);
    router.wait_for_workers(3);
    let mut clients = vec![router.post("/v1/completions", STREAM)];
    let mut one = decode.asked();
    clients.push(router.post("/v1/completions", STREAM));
    let two = decode.asked();
    assert_ne!(named(&one), named(&two));
    // The first prompt is computed, the second is not.
    one.open_stream();
    one.chunk(&event(&[5], "{}"));
    assert_eq!(clients[0].piece().as_deref(), Some("data: {}\n\n"));
    clients.push(router.post("/v1/completions", STREAM));
    assert_eq!(named(&decode.asked()), named(&one), "it has nothing to do");
}

#[test]
fn of_an_answer_that_comes_whole_decode_says_when_prefill_is_done() {
    let prefill = [Worker::start(), Worker::start()];
    let decode = Worker::start();
    let flags = [&DECODE_FIRST[..], &["--policy", "least_loaded"]].concat();
    let router = Router::ready(&[&prefill[0], &prefill[1]], &[&decode], &flags);
    router.wait_for_workers(3);
    let mut client = router.post("/v1/completions", PROMPT);
    let mut one = decode.asked();
    let _other = router.post("/v1/completions", PROMPT);
    let two = decode.asked();
    assert_ne!(named(&one), named(&two));
    one.send(b"HTTP/1.1 102 Processing\r\n\r\n");
    // The router reads that before the next event.
    let is_charged = |line: &str| {
        line.starts_with("smg_worker_requests_active{")
            && line.contains("\"prefill\"")
            && line.ends_with(" 1")
    };
    let begun = Instant::now();
    while router.get("/metrics").answer().1.lines().filter(|line| is_charged(line)).count() != 1 {
        assert!(begun.elapsed() < PATIENCE, "it stays charged");
    }
    let _third = router.post("/v1/completions", PROMPT);
    assert_eq!(named(&decode.asked()), named(&one), "it has nothing to do");
    one.answer("200 OK", r#"{"well":1}"#);
    assert_eq!(client.answer(), (200, r#"{"well":1}"#.into()));
}
