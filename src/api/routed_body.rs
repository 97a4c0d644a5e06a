//! A body that a router forwards. The router only separates its fields. It adds the registry and
//! room where the two workers meet, or asks a prefill worker to keep its KV.
//!
//! Invariants: workers get the client's fields unchanged. Exceptions are the bootstrap and resume
//! fields: the router sets them and drops those of the client. A request to keep KV for decode has
//! no fields that concern only the form of the answer. Not here: what the fields mean; the workers
//! check them.

use super::error::ApiError;
use super::fields::{Entries, List, first_item};
use super::kv_transfer::{self, Keep, PrefillAddress};
use super::resume::{self, Resume};
use crate::ids::Room;
use crate::limits::{
    BYTES_PER_TOKEN, CHOICES_MAX, NAME_BYTES_MAX, PROMPT_BLOCK_BYTES, PROMPT_BLOCKS_MAX,
};
use crate::routing::demand::{Demand, chained};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use std::io::Write;

/// A client's body, ready for the router's own fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoutedBody {
    /// A JSON object that is not closed, with a comma after its last field.
    open: Vec<u8>,
    /// The fields that concern only the form of the answer, each followed by a comma.
    form: Vec<u8>,
    choices: u32,
    stream: bool,
    /// Request ids (`rid`) from the client, by which it can abort the request.
    rids: Vec<String>,
    /// Its demand on workers, estimated from its text.
    work: Demand,
    /// Maximum tokens of each answer; 0: unknown.
    answer_max: u32,
    /// The field `priority`; 0 without a valid one.
    priority: i32,
}

/// The place where the workers of a pair meet: the prefill worker's bootstrap registry, and a room.
/// They derive the rooms of further choices from the first room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meeting<'a> {
    /// Its host.
    pub host: &'a str,
    /// Its port. `None`: the port from the decode worker's configuration.
    pub port: Option<u16>,
    /// The first choice's room.
    pub room: Room,
}

/// How a leg finds the KV of its prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvLocation<'a> {
    /// Both legs meet at this registry and room.
    Met(Meeting<'a>),
    /// Prefill keeps the KV. This is the JSON object from its answer.
    Kept(&'a str),
    /// Decode asks this prefill worker for the KV.
    Asked(&'a PrefillAddress),
}

impl RoutedBody {
    /// Reads a body.
    ///
    /// # Errors
    /// The body is not a JSON object, or has too many fields.
    pub fn parse(body: &[u8]) -> Result<RoutedBody, ApiError> {
        RoutedBody::read(body, None)
    }

    /// Like [`RoutedBody::parse`], and also hashes the blocks of the prompt, which takes time. A
    /// router needs the hashes to find workers that have the blocks cached. A client that does not
    /// know `secret` cannot write a prompt with blocks that collide with those of another prompt.
    ///
    /// # Errors
    /// The body is not a JSON object, or has too many fields.
    pub fn parse_with_blocks(body: &[u8], secret: u64) -> Result<RoutedBody, ApiError> {
        RoutedBody::read(body, Some(secret))
    }

    fn read(body: &[u8], secret: Option<u64>) -> Result<RoutedBody, ApiError> {
        let text = std::str::from_utf8(body).map_err(ApiError::invalid_json)?;
        let Entries(entries) = serde_json::from_str(text).map_err(ApiError::invalid_json)?;
        let mut open = Vec::with_capacity(body.len() + 256);
        open.push(b'{');
        let mut form = Vec::new();
        for (name, value) in entries.iter().filter(|(name, _)| !is_ours(name)) {
            let part = if is_of_form(name) { &mut form } else { &mut open };
            serde_json::to_writer(&mut *part, name).expect("a string is JSON");
            let _ = write!(part, ":{},", value.get());
        }
        let stream = entries.iter().any(|(name, value)| name == "stream" && value.get() == "true");
        let (prompts, samples) = choices(&entries);
        let choices = prompts.saturating_mul(samples).clamp(1, CHOICES_MAX) as u32;
        let samples = samples.clamp(1, CHOICES_MAX) as u32;
        let work = Demand { samples, ..work(&entries, choices, secret) };
        let (rids, answer_max) = (rids(&entries), answer_max(&entries));
        let priority = entries.iter().find(|(name, _)| name == "priority");
        let priority = priority.and_then(|(_, value)| serde_json::from_str(value.get()).ok());
        let priority = priority.unwrap_or(0);
        Ok(RoutedBody { open, form, choices, stream, rids, work, answer_max, priority })
    }

    /// Whether the client asks for server-sent events.
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// Whether one of the client's request ids starts with `rid`.
    pub fn is_named(&self, rid: &str) -> bool {
        self.rids.iter().any(|own| own.starts_with(rid))
    }

    /// Number of sequences that it asks for: prompts times samples. The body is not validated for
    /// this.
    pub fn choices(&self) -> u32 {
        self.choices
    }

    /// Its demand on workers, estimated from its text.
    pub fn work(&self) -> &Demand {
        &self.work
    }

    /// Its order in a queue at this path: the lowest number is the first. In `/generate`, it is the
    /// highest number of the body, as in SGLang.
    pub fn priority(&self, path: &str) -> i32 {
        if path == "/generate" { self.priority.saturating_neg() } else { self.priority }
    }

    /// Tokens of its prompts, estimated, and of its answers at their longest. Without a maximum in
    /// the body, answers do not count.
    pub fn tokens_max(&self) -> u64 {
        u64::from(self.work.tokens) + u64::from(self.choices) * u64::from(self.answer_max)
    }

    /// The body for workers that generate, or for both legs. `place` says where the KV is; it is
    /// `None` for a worker that serves the request alone. With `resume`, workers mark their events
    /// and continue after the resumed ids. With `first_token`, prefill sends its sampled token at
    /// once.
    pub fn address(
        &self,
        place: Option<KvLocation<'_>>,
        resume: Option<&Resume>,
        first_token: bool,
    ) -> Vec<u8> {
        let mut body = self.begin(resume);
        body.extend_from_slice(&self.form);
        if first_token {
            let _ = write!(body, "\"{}\":true,", resume::FIRST_TOKEN);
        }
        match place {
            None => {}
            Some(KvLocation::Met(meeting)) => meeting.write(&mut body),
            Some(KvLocation::Kept(params)) => {
                drop(write!(body, "\"{}\":{params},", kv_transfer::FIELD))
            }
            Some(KvLocation::Asked(address)) => {
                let _ = write!(body, "\"{}\":", kv_transfer::PREFILL);
                serde_json::to_writer(&mut body, address).expect("plain structs are JSON");
                body.push(b',');
            }
        }
        closed(body)
    }

    /// The body that asks a prefill worker to keep its KV for decode. It does not depend on the
    /// form of the client's answer. With `as_events`, the first event says at once where the KV is.
    pub fn keep(&self, keep: &Keep, resume: Option<&Resume>, as_events: bool) -> Vec<u8> {
        let mut body = self.begin(resume);
        let _ = write!(body, "\"stream\":{as_events},\"{}\":", kv_transfer::FIELD);
        serde_json::to_writer(&mut body, &keep.asking()).expect("plain structs are JSON");
        body.push(b',');
        closed(body)
    }

    /// All fields except those of the answer's form. The object stays open.
    fn begin(&self, resume: Option<&Resume>) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.open.len() + self.form.len() + 256);
        body.extend_from_slice(&self.open);
        if let Some(resume) = resume {
            let _ = write!(body, "\"{}\":", resume::FIELD);
            serde_json::to_writer(&mut body, resume).expect("numbers are JSON");
            body.push(b',');
        }
        body
    }
}

impl Meeting<'_> {
    fn write(&self, body: &mut Vec<u8>) {
        let Meeting { host, port, room } = self;
        body.extend_from_slice(b"\"bootstrap_host\":");
        serde_json::to_writer(&mut *body, host).expect("a string is JSON");
        body.extend_from_slice(b",\"bootstrap_port\":");
        match port {
            Some(port) => drop(write!(body, "{port}")),
            None => body.extend_from_slice(b"null"),
        }
        let _ = write!(body, ",\"bootstrap_room\":{room},");
    }
}

fn closed(mut body: Vec<u8>) -> Vec<u8> {
    // Drop the comma after the last field.
    if body.last() == Some(&b',') {
        body.pop();
    }
    body.push(b'}');
    body
}

fn is_ours(name: &str) -> bool {
    matches!(
        name,
        "bootstrap_host"
            | "bootstrap_port"
            | "bootstrap_room"
            | resume::FIELD
            | resume::FIRST_TOKEN
            | kv_transfer::FIELD
            | kv_transfer::PREFILL
    )
}

/// Whether the field concerns only the form of the answer, not its content.
fn is_of_form(name: &str) -> bool {
    matches!(name, "stream" | "stream_options" | "return_token_ids" | "return_timings")
}

/// Request ids: `rid` is one string or one per prompt. Values that workers refuse are dropped.
fn rids(entries: &[(String, &RawValue)]) -> Vec<String> {
    let rid = entries.iter().find(|(name, _)| name == "rid").map(|(_, value)| value.get());
    let read = |raw: &str| match serde_json::from_str::<String>(raw) {
        Ok(name) => Some(vec![name]),
        Err(_) => serde_json::from_str(raw).ok().and_then(List::<String, CHOICES_MAX>::whole),
    };
    let rids = rid.and_then(read).unwrap_or_default();
    if rids.iter().all(|rid| rid.len() <= NAME_BYTES_MAX) { rids } else { Vec::new() }
}

/// Estimates the demand from the raw JSON text of the prompt. With equal salts, prompts that start
/// with the same text have the same first blocks. About four bytes count as a token, including
/// escapes and field names.
fn work(entries: &[(String, &RawValue)], choices: u32, secret: Option<u64>) -> Demand {
    let field = |name: &str| {
        entries.iter().find(|(key, _)| key == name).map(|(_, value)| value.get().as_bytes())
    };
    let Some(text) = ["messages", "prompt", "text", "input_ids"].into_iter().find_map(field) else {
        return Demand::of(choices);
    };
    let salt = ["model", "cache_salt", "tools"].into_iter().filter_map(field);
    let salt = salt.fold(secret.unwrap_or(0), chained);
    let most = if secret.is_some() { PROMPT_BLOCKS_MAX } else { 0 };
    let blocks = text.chunks_exact(PROMPT_BLOCK_BYTES).take(most);
    let blocks = blocks.scan(salt, |before, block| {
        *before = chained(*before, block);
        Some(*before)
    });
    // Token ids are counted; their values are not checked.
    let first = text.iter().find(|byte| !b"[ \t\r\n".contains(byte));
    let (tokens, block) = match first.is_some_and(u8::is_ascii_digit) {
        true => {
            let tokens = 1 + text.iter().filter(|&&byte| byte == b',').count();
            (tokens, PROMPT_BLOCK_BYTES * tokens / text.len())
        }
        false => (text.len() / BYTES_PER_TOKEN, PROMPT_BLOCK_BYTES / BYTES_PER_TOKEN),
    };
    Demand {
        sequences: choices,
        samples: 1,
        tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        block: block as u32,
        blocks: blocks.collect(),
    }
}

/// The maximum tokens of each answer; 0 without one. The body is not validated for this.
fn answer_max(entries: &[(String, &RawValue)]) -> u32 {
    #[derive(Deserialize)]
    struct Sampling {
        max_new_tokens: Option<u32>,
    }
    let value = |(name, value): &(String, &RawValue)| match &**name {
        "max_tokens" | "max_completion_tokens" => serde_json::from_str(value.get()).ok(),
        "sampling_params" => serde_json::from_str::<Sampling>(value.get()).ok()?.max_new_tokens,
        _ => None,
    };
    entries.iter().filter_map(value).max().unwrap_or(0)
}

/// Number of prompts, and of samples for each.
fn choices(entries: &[(String, &RawValue)]) -> (usize, usize) {
    #[derive(Deserialize)]
    struct Sampling {
        n: Option<usize>,
    }
    let field =
        |name: &str| entries.iter().find(|(key, _)| key == name).map(|(_, value)| value.get());
    let sampling =
        field("sampling_params").and_then(|raw| serde_json::from_str::<Sampling>(raw).ok());
    let samples =
        field("n").and_then(|raw| serde_json::from_str(raw).ok()).or(sampling.and_then(|s| s.n));
    let prompts = ["prompt", "text", "input_ids"].into_iter().filter_map(field).map(prompts).max();
    (prompts.unwrap_or(1), samples.unwrap_or(1))
}

/// A list of ids is one prompt. A list of texts or of lists has one prompt per item.
fn prompts(json: &str) -> usize {
    match first_item(json) {
        Some(b'"' | b'[') => {
            serde_json::from_str::<Vec<IgnoredAny>>(json).map_or(1, |items| items.len())
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_that_begin_alike_have_the_same_blocks() {
        let turn = |text: &str| format!(r#"{{"role":"user","content":"{}"}}"#, text.repeat(100));
        let work = |turns: &[String], more: &str| {
            let body = format!(r#"{{"messages":[{}]{more}}}"#, turns.join(","));
            RoutedBody::parse_with_blocks(body.as_bytes(), 1).unwrap().work().clone()
        };
        let [a, b, c] = ["alpha ", "beta ", "gamma "].map(turn);
        let (one, two) = (work(std::slice::from_ref(&a), ""), work(&[a.clone(), b.clone()], ""));
        assert_eq!((one.sequences, one.block, one.tokens, one.blocks.len()), (1, 64, 157, 2));
        assert_eq!(two.blocks[..2], one.blocks[..]);
        assert_eq!(work(&[a.clone(), c], "").blocks[..2], one.blocks[..]);
        assert_ne!(work(&[b], "").blocks[0], one.blocks[0]);
        assert_ne!(work(std::slice::from_ref(&a), r#","cache_salt":"x""#).blocks[0], one.blocks[0]);
        assert_eq!(work(&[a], r#","temperature":0"#).blocks, one.blocks);
        assert_eq!(*RoutedBody::parse(b"{}").unwrap().work(), Demand::of(1));
    }

    fn addressed(body: &str) -> String {
        let meeting = Meeting { host: "10.0.0.1", port: Some(8998), room: Room(7) };
        let body = RoutedBody::parse(body.as_bytes()).unwrap().address(
            Some(KvLocation::Met(meeting)),
            None,
            false,
        );
        String::from_utf8(body).unwrap()
    }

    #[test]
    fn fields_are_passed_on_as_they_came_and_the_meeting_place_is_added() {
        assert_eq!(
            addressed(r#" { "prompt" : "a\u00e4\n" , "x":[1.50, {"y":null}] } "#),
            r#"{"prompt":"a\u00e4\n","x":[1.50, {"y":null}],"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#
        );
        assert_eq!(
            addressed("{}"),
            r#"{"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#
        );
    }

    #[test]
    fn an_unnamed_bootstrap_port_is_null() {
        let meeting = Meeting { host: "h", port: None, room: Room(7) };
        let body =
            RoutedBody::parse(b"{}").unwrap().address(Some(KvLocation::Met(meeting)), None, false);
        let expected = r#"{"bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":7}"#;
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }

    #[test]
    fn each_prompt_is_before_its_own_samples_only() {
        let work = |body: &str| RoutedBody::parse(body.as_bytes()).unwrap().work().clone();
        let text = "many words ".repeat(40);
        let two = work(&format!(r#"{{"prompt":["{text}","{text}"],"n":3}}"#));
        assert_eq!((two.sequences, two.samples, two.context()), (6, 3, 3 * u64::from(two.tokens)));
        let ids = work(r#"{"input_ids":[[1, 22222], [3]],"sampling_params":{"n":2}}"#);
        assert_eq!((ids.sequences, ids.tokens, ids.context()), (4, 3, 6));
        assert!(ids.blocks.is_empty(), "blocks are not requested");
    }

    #[test]
    fn answers_count_at_their_longest_if_the_body_says_it() {
        for (body, tokens) in [
            (r#"{"prompt":[1,2,3],"max_tokens":10}"#, 13),
            (r#"{"prompt":[[1,2],[3]],"n":3,"max_tokens":10}"#, 63),
            (r#"{"prompt":[1],"max_tokens":null,"max_completion_tokens":7}"#, 8),
            (r#"{"input_ids":[1],"sampling_params":{"n":2,"max_new_tokens":5}}"#, 11),
            (r#"{"prompt":[1],"max_tokens":-1}"#, 1),
            ("{}", 0),
        ] {
            let routed = RoutedBody::parse(body.as_bytes()).unwrap();
            assert_eq!(routed.tokens_max(), tokens, "{body}");
        }
    }

    #[test]
    fn the_lowest_priority_is_the_first_at_each_path() {
        for (body, priority) in [
            (r#"{"priority":7}"#, 7),
            (r#"{"priority":-2147483648}"#, i32::MIN),
            (r#"{"priority":2147483648}"#, 0),
            (r#"{"priority":null}"#, 0),
            (r#"{"priority":"7"}"#, 0),
            ("{}", 0),
        ] {
            let routed = RoutedBody::parse(body.as_bytes()).unwrap();
            let both = ["/v1/completions", "/generate"].map(|path| routed.priority(path));
            assert_eq!(both, [priority, priority.saturating_neg()], "{body}");
        }
    }

    #[test]
    fn a_request_served_by_one_worker_has_no_bootstrap_fields() {
        for body in ["{}", r#"{"a":[1,2],"bootstrap_room":1}"#] {
            let alone = RoutedBody::parse(body.as_bytes()).unwrap().address(None, None, false);
            assert_eq!(alone, if body == "{}" { &b"{}"[..] } else { br#"{"a":[1,2]}"# });
        }
    }

    #[test]
    fn a_client_does_not_choose_where_workers_meet() {
        let body = addressed(
            r#"{"bootstrap_room":1,"\u0062ootstrap_host":"evil","bootstrap_port":null,"a\"b":1}"#,
        );
        assert_eq!(
            body,
            r#"{"a\"b":1,"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#
        );
    }

    #[test]
    fn prefill_is_asked_to_keep_the_kv_and_decode_gets_its_location() {
        let body = br#"{"stream":true,"prompt":[1],"kv_transfer_params":7,"baton_prefill":8,
            "echo":true,"n":2}"#;
        let routed = RoutedBody::parse(body).unwrap();
        let text = |body: Vec<u8>| String::from_utf8(body).unwrap();
        let keep = Keep { host: Some("10.0.0.1".into()), ..Keep::default() };
        assert_eq!(
            text(routed.keep(&keep, None, false)),
            r#"{"prompt":[1],"echo":true,"n":2,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_host":"10.0.0.1"}}"#
        );
        let resume = Resume { created: Some(7), choices: vec![None] };
        assert!(text(routed.keep(&keep, Some(&resume), true)).starts_with(
            r#"{"prompt":[1],"echo":true,"n":2,"baton_resume":{"created":7,"choices":[null]},"stream":true,"kv_"#
        ));
        assert_eq!(
            text(routed.address(Some(KvLocation::Kept(r#"{"a":1}"#)), None, false)),
            r#"{"prompt":[1],"echo":true,"n":2,"stream":true,"kv_transfer_params":{"a":1}}"#
        );
        let address = PrefillAddress {
            host: "10.0.0.1".into(),
            port: 30_000,
            tls: false,
            bootstrap_port: None,
        };
        assert_eq!(
            text(routed.address(Some(KvLocation::Asked(&address)), None, false)),
            r#"{"prompt":[1],"echo":true,"n":2,"stream":true,"baton_prefill":{"host":"10.0.0.1","port":30000}}"#
        );
    }

    #[test]
    fn a_body_is_one_json_object() {
        for body in ["", "[]", "{", "{} {}", r#"{"a":}"#, r#"{"a":1,"a":2}"#, "7"] {
            assert_eq!(
                RoutedBody::parse(body.as_bytes()).unwrap_err().code.name(),
                "invalid_json",
                "{body}"
            );
        }
        assert!(RoutedBody::parse(b"{\"a\":\"\xff\"}").is_err());
    }

    #[test]
    fn names_that_workers_do_not_take_are_not_kept() {
        let named = |rid: serde_json::Value| {
            let body = serde_json::json!({ "prompt": "a", "rid": rid }).to_string();
            RoutedBody::parse(body.as_bytes()).unwrap().rids
        };
        assert_eq!(named("a".into()), ["a"]);
        assert_eq!(named(["a", "b"].into_iter().collect()), ["a", "b"]);
        assert_eq!(named(vec!["a"; CHOICES_MAX].into()).len(), CHOICES_MAX);
        for odd in [vec!["a".to_owned(); CHOICES_MAX + 1], vec!["a".repeat(NAME_BYTES_MAX + 1)]] {
            assert!(named(odd.into()).is_empty());
        }
    }

    #[test]
    fn choices_are_prompts_times_samples() {
        for (body, choices) in [
            ("{}", 1),
            (r#"{"prompt":"a","n":3}"#, 3),
            (r#"{"prompt":["a","b"],"n":3}"#, 6),
            (r#"{"prompt":[1,2,3]}"#, 1),
            (r#"{"prompt":[[1],[2]],"n":null}"#, 2),
            (r#"{"input_ids":[[1],[2]],"sampling_params":{"n":2,"x":[]}}"#, 4),
            (r#"{"text":"a","sampling_params":[]}"#, 1),
            (r#"{"prompt":[],"n":0}"#, 1),
            (r#"{"n":18446744073709551615,"prompt":["a","b"]}"#, CHOICES_MAX as u32),
        ] {
            assert_eq!(RoutedBody::parse(body.as_bytes()).unwrap().choices(), choices, "{body}");
        }
    }
}
