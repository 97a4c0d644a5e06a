//! Workers of another engine, such as SGLang. The router reaches them only over HTTP. They report
//! other fields or none, and know nothing about this router.

use crate::client::{Router, url};
use crate::worker::{IdentityReply, Worker};
use crate::{PROMPT, STREAM};
use serde_json::{Value, json};

/// The answer of SGLang's server, with the fields that matter.
const READER: IdentityReply = Some((
    "200 OK",
    r#"{"model_path":"m","served_model_name":"m","disaggregation_mode":"prefill",
        "disaggregation_bootstrap_port":9123}"#,
));
const WRITER: IdentityReply =
    Some(("200 OK", r#"{"model_path":"m","disaggregation_mode":"decode"}"#));
const UNKNOWN: IdentityReply = Some(("404 Not Found", r#"{"detail":"Not Found"}"#));

fn worker(identity: IdentityReply) -> Worker {
    Worker::at("127.0.0.1:0".parse().unwrap(), identity)
}

/// A router that is ready, with these words after each prefill worker's URL.
fn router(prefill: &[(&Worker, &[&str])], decode: &[&Worker]) -> Router {
    let mut args = vec!["--policy".to_owned(), "round_robin".to_owned()];
    for (worker, port) in prefill {
        args.extend(["--prefill".into(), url(worker)]);
        args.extend(port.iter().map(|word| word.to_string()));
    }
    args.extend(decode.iter().flat_map(|worker| ["--decode".into(), url(worker)]));
    let router = Router::run(&args);
    router.wait_for_workers(prefill.len() + decode.len());
    router
}

/// The bootstrap port in both legs of a generation request.
fn port(router: &Router, prefill: &Worker, decode: &Worker) -> Value {
    let mut client =
        router.post("/generate", r#"{"input_ids":[1,2],"sampling_params":{"max_new_tokens":2}}"#);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    assert_eq!(at_prefill.body, at_decode.body);
    let told = at_decode.json();
    assert_eq!(told["bootstrap_host"], "127.0.0.1");
    assert!(told["bootstrap_room"].is_u64());
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", r#"{"text":"b"}"#);
    assert_eq!(client.answer(), (200, r#"{"text":"b"}"#.into()));
    told["bootstrap_port"].clone()
}

/// Null means the worker's own port, which decode knows if all have the same.
#[test]
fn a_registry_port_is_the_configured_one_or_the_reported_one_or_null() {
    for (identity, words, expected) in [
        (READER, &["9000"][..], json!(9000)),
        (READER, &[], json!(9123)),
        (READER, &["none"], json!(9123)),
        (UNKNOWN, &["9000"], json!(9000)),
        (UNKNOWN, &[], Value::Null),
        (UNKNOWN, &["none"], Value::Null),
        (None, &[], Value::Null),
    ] {
        let (prefill, decode) = (worker(identity), worker(WRITER));
        let router = router(&[(&prefill, words)], &[&decode]);
        assert_eq!(port(&router, &prefill, &decode), expected, "{identity:?} {words:?}");
        let (_, told) = router.get("/workers").answer();
        let told: Value = serde_json::from_str(&told).unwrap();
        assert_eq!(told["workers"][0]["bootstrap_port"], expected);
    }
}

/// A prefill worker's error is read completely, in whatever pieces it arrives.
#[test]
fn an_error_in_pieces_is_one() {
    let (prefill, decode) = (worker(UNKNOWN), worker(UNKNOWN));
    let router = router(&[(&prefill, &[])], &[&decode]);
    let mut client = router.post("/v1/completions", PROMPT);
    let (mut at_prefill, _at_decode) = (prefill.asked(), decode.asked());
    let wrong = r#"{"object":"error","message":"too long","param":"prompt","code":400}"#;
    at_prefill.send(
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n\
          transfer-encoding: chunked\r\n\r\n",
    );
    for piece in [&wrong[..20], &wrong[20..]] {
        at_prefill.chunk(piece);
        // This piece is sent before the next one.
        prefill.await_probes(2);
    }
    at_prefill.end_stream();
    assert_eq!(client.answer(), (400, wrong.into()));
}

/// Their errors reach the client unchanged. If another worker may do better, the request is
/// retried.
#[test]
fn errors_of_theirs_are_passed_on() {
    let (prefill, decode) = (worker(UNKNOWN), worker(UNKNOWN));
    let router = router(&[(&prefill, &[])], &[&decode]);
    let wrong = "{\"object\":\"error\",\"message\":\"too long\",\"type\":\"BadRequestError\",\
                 \"param\":null,\"code\":400}";
    for body in [PROMPT, STREAM] {
        let mut client = router.post("/v1/completions", body);
        let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        at_decode.answer("400 Bad Request", wrong);
        at_prefill.answer("400 Bad Request", wrong);
        assert_eq!(client.answer(), (400, wrong.into()));
    }
    assert!(prefill.is_unasked() && decode.is_unasked(), "no worker would answer otherwise");
    let mut client = router.post("/v1/completions", PROMPT);
    let broken = r#"{"error":{"message":"KV transfer failed","code":500}}"#;
    for _ in 0..2 {
        let (_at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
        at_decode.answer("500 Internal Server Error", broken);
    }
    assert_eq!(client.answer(), (500, broken.into()), "tried once more");
    // An error inside a stream is the last event for the client, and is passed on unchanged.
    let mut client = router.post("/v1/completions", STREAM);
    let (mut at_prefill, mut at_decode) = (prefill.asked(), decode.asked());
    at_prefill.answer("200 OK", "{}");
    at_decode.open_stream();
    at_decode.chunk("data: {\"text\":\"b\"}\n\n");
    assert_eq!(client.piece().as_deref(), Some("data: {\"text\":\"b\"}\n\n"));
    at_decode.chunk("data: {\"error\":{\"message\":\"aborted\",\"code\":500}}\n\n");
    at_decode.end_stream();
    let rest: String = std::iter::from_fn(|| client.piece()).collect();
    assert_eq!(rest, "data: {\"error\":{\"message\":\"aborted\",\"code\":500}}\n\n");
}

#[test]
fn a_worker_that_dies_is_passed_over_and_serves_again_when_it_is_back() {
    let (prefill, decode) = (worker(UNKNOWN), [worker(UNKNOWN), worker(WRITER)]);
    let router = router(&[(&prefill, &[])], &[&decode[0], &decode[1]]);
    let serves = |decode: &Worker| {
        let mut client = router.post("/v1/chat/completions", PROMPT);
        prefill.asked().answer("200 OK", "{}");
        decode.asked().answer("200 OK", r#"{"choices":[]}"#);
        assert_eq!(client.answer().0, 200);
    };
    decode[0].stop();
    (0..3).for_each(|_| serves(&decode[1]));
    let again = Worker::at(decode[0].address, WRITER);
    router.wait_for_workers(3);
    decode[1].stop();
    (0..2).for_each(|_| serves(&again));
}
