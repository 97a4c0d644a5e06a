//! Requests of `/v1/responses` and `/v1/messages`, each with an answer behind the first newline. A
//! translated request is a JSON object, and its translation of a stream does not depend on how the
//! stream is cut.

use baton::api::{Sampling, TranslatedEndpoint, chat};
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

const ENDPOINTS: [TranslatedEndpoint; 3] = [
    TranslatedEndpoint::Responses,
    TranslatedEndpoint::Messages,
    TranslatedEndpoint::TokenCount,
];

pub fn run(data: &[u8]) {
    let [kind, length, rest @ ..] = data else { return };
    let endpoint = ENDPOINTS[*kind as usize % ENDPOINTS.len()];
    let end = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
    let (body, answer) = rest.split_at(end);
    let answer = answer.strip_prefix(b"\n").unwrap_or_default();
    match endpoint.translate(body) {
        Err(error) => assert_eq!(error.status, 400),
        Ok((translated, mut translator)) => {
            let object: BTreeMap<String, IgnoredAny> =
                serde_json::from_slice(&translated).expect("a translated request is an object");
            assert!(object.contains_key("messages"));
            let _ = chat::parse(&translated, &Sampling::default());
            let mut at_once = Vec::new();
            translator.translate_events(answer, &mut at_once);
            let (_, mut other) = endpoint.translate(body).expect("the same body");
            let mut in_pieces = Vec::new();
            for piece in answer.chunks(*length as usize % 32 + 1) {
                other.translate_events(piece, &mut in_pieces);
            }
            assert_eq!(in_pieces, at_once);
            let status = if kind & 128 == 0 { 200 } else { 400 };
            let _ = translator.translate_body(status, answer);
        }
    }
}
