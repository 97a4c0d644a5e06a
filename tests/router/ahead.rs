//! Streams that begin with prefill's token (`--first-token prefill`). Each token is sent once and
//! in order, after any failure.

use crate::STREAM;
use crate::client::Client;
use crate::retries::{Quartet, event, rest};
use crate::worker::Asked;

const AHEAD: [&str; 2] = ["--first-token", "prefill"];
const DONE: &str = "data: [DONE]\n\n";

/// A stream with prefill's first token, and its two legs.
fn begun(quartet: &Quartet) -> (Client, Asked, Asked) {
    let mut client = quartet.router.post("/v1/completions", STREAM);
    let (_, mut at_prefill, at_decode) = quartet.asked();
    assert_eq!(at_prefill.json()["baton_first_token"], true);
    at_prefill.open_stream();
    at_prefill.chunk(&event(&[4], "four"));
    assert_eq!(client.piece().as_deref(), Some("data: four\n\n"));
    (client, at_prefill, at_decode)
}

#[track_caller]
fn is_resumed_at(asked: &Asked, ids: &[u32]) {
    let resume = &asked.json()["baton_resume"];
    assert_eq!(resume["choices"][0]["ids"], serde_json::json!(ids), "{resume}");
}

#[test]
fn the_first_token_is_prefills_and_comes_once() {
    let quartet = Quartet::start(&AHEAD);
    let (mut client, mut at_prefill, mut at_decode) = begun(&quartet);
    // Only decode ends the answer.
    at_prefill.chunk(": {\"created\":7,\"choice\":0,\"end\":\"length\"}\ndata: the end\n\n");
    at_prefill.chunk(DONE);
    at_prefill.end_stream();
    at_decode.open_stream();
    at_decode.chunk(&[event(&[4], "four"), event(&[5], "five")].concat());
    assert_eq!(client.piece().as_deref(), Some("data: five\n\n"));
    at_decode.chunk(DONE);
    at_decode.end_stream();
    assert_eq!(rest(&mut client), DONE);
    let created = |asked: &Asked| asked.json()["baton_resume"]["created"].as_u64();
    assert!(
        created(&at_prefill).is_some() && created(&at_prefill) == created(&at_decode),
        "one answer"
    );
}

#[test]
fn a_prefill_token_that_decode_has_already_sent_is_dropped() {
    let quartet = Quartet::start(&AHEAD);
    let mut client = quartet.router.post("/v1/completions", STREAM);
    let (_, mut at_prefill, mut at_decode) = quartet.asked();
    at_prefill.open_stream();
    at_decode.open_stream();
    at_decode.chunk(&event(&[4], "four"));
    assert_eq!(client.piece().as_deref(), Some("data: four\n\n"));
    at_prefill.chunk(&event(&[4], "four"));
    at_prefill.end_stream();
    assert!(at_prefill.is_open(), "it is heard to the end");
    at_decode.chunk(&[&event(&[5], "five"), DONE].concat());
    at_decode.end_stream();
    assert_eq!(rest(&mut client), ["data: five\n\n", DONE].concat());
}

#[test]
fn only_streams_and_only_with_the_flag() {
    let quartet = Quartet::start(&[]);
    let mut client = quartet.router.post("/v1/completions", STREAM);
    let (_, mut at_prefill, mut at_decode) = quartet.asked();
    assert!(at_prefill.json().get("baton_first_token").is_none());
    at_prefill.open_stream();
    at_prefill.chunk(&event(&[4], "four"));
    at_prefill.end_stream();
    assert!(at_prefill.is_open(), "it is heard to the end");
    at_decode.open_stream();
    at_decode.chunk(&[&event(&[4], "vier"), DONE].concat());
    at_decode.end_stream();
    assert_eq!(rest(&mut client), ["data: vier\n\n", DONE].concat());
    let quartet = Quartet::start(&AHEAD);
    let mut client = quartet.router.post("/v1/completions", crate::PROMPT);
    let (_, mut at_prefill, mut at_decode) = quartet.asked();
    assert!(at_prefill.json().get("baton_first_token").is_none());
    at_prefill.answer("200 OK", "{}");
    at_decode.answer("200 OK", "{}");
    assert_eq!(client.answer(), (200, "{}".into()));
}

/// Decode dies after the client has prefill's first token. The next pair continues after it, and
/// its prefill sends the second token.
#[test]
fn a_stream_continues_after_prefills_first_token_at_another_pair() {
    let quartet = Quartet::start(&AHEAD);
    let (mut client, _at_prefill, at_decode) = begun(&quartet);
    at_decode.hang_up();
    let (_, mut at_prefill, mut at_decode) = quartet.asked();
    for leg in [&at_prefill, &at_decode] {
        is_resumed_at(leg, &[4]);
    }
    at_prefill.open_stream();
    at_prefill.chunk(&event(&[5], "five"));
    assert_eq!(client.piece().as_deref(), Some("data: five\n\n"));
    at_decode.open_stream();
    at_decode.chunk(&[&event(&[5], "five"), &event(&[6], "six"), DONE].concat());
    at_decode.end_stream();
    assert_eq!(rest(&mut client), ["data: six\n\n", DONE].concat());
}

/// Prefill fails after its token, by an event or by its end, or before its token.
#[test]
fn a_stream_continues_elsewhere_if_prefill_fails() {
    for is_told in [true, false] {
        let quartet = Quartet::start(&AHEAD);
        let (mut client, mut at_prefill, at_decode) = begun(&quartet);
        if is_told {
            at_prefill.chunk("data: {\"error\":{\"code\":\"internal\"}}\n\n");
            at_prefill.end_stream();
            assert!(at_decode.is_closed());
        } else {
            at_prefill.hang_up();
            // Decode gets a short time, and reports that its source is lost.
            let mut at_decode = at_decode;
            at_decode.answer("502 Bad Gateway", "{\"error\":{\"code\":\"peer_lost\"}}");
        }
        let (_, mut at_prefill, mut at_decode) = quartet.asked();
        is_resumed_at(&at_decode, &[4]);
        at_prefill.answer("200 OK", "{}");
        at_decode.open_stream();
        at_decode.chunk(&[&event(&[5], "five"), DONE].concat());
        at_decode.end_stream();
        assert_eq!(rest(&mut client), ["data: five\n\n", DONE].concat(), "told: {is_told}");
    }
}

#[test]
fn a_stream_ends_with_an_error_event_if_no_worker_can_continue_it() {
    let quartet = Quartet::start(&[&AHEAD[..], &["--disable-retries"]].concat());
    let (mut client, _at_prefill, at_decode) = begun(&quartet);
    at_decode.hang_up();
    let told = rest(&mut client);
    assert!(
        told.starts_with("data: {\"error\"") && told.contains("\"code\":\"peer_lost\""),
        "{told}"
    );
    let (mut client, _at_prefill, mut at_decode) = begun(&quartet);
    at_decode.answer(
        "429 Too Many Requests",
        "{\"error\":{\"code\":\"overloaded\",\"message\":\"full\"}}",
    );
    assert_eq!(
        rest(&mut client),
        "data: {\"error\":{\"code\":\"overloaded\",\"message\":\"full\"}}\n\n"
    );
}

/// Two legs that differ are a failure. Their tokens are never mixed.
#[test]
fn a_decode_worker_that_says_otherwise_is_not_believed() {
    for other in [event(&[9], "nine"), event(&[4, 5], "four five"), "data: four\n\n".into()] {
        let quartet = Quartet::start(&AHEAD);
        let (mut client, _at_prefill, mut at_decode) = begun(&quartet);
        at_decode.open_stream();
        at_decode.chunk(&other);
        let (_, _, mut at_decode) = quartet.asked();
        is_resumed_at(&at_decode, &[4]);
        at_decode.open_stream();
        at_decode.chunk(&[&event(&[5], "five"), DONE].concat());
        at_decode.end_stream();
        assert_eq!(rest(&mut client), ["data: five\n\n", DONE].concat(), "{other}");
    }
}
