//! A body that a router passes on: read no further than its fields, and given the place where the two
//! workers meet.
//!
//! Invariants: what the workers get is what the client sent, field by field, but for the bootstrap fields and what
//! it says of a stream that goes on: those are the router's to say, and a client's own are dropped. Not here: what the fields mean; the
//! workers check them.

use super::error::ApiError;
use super::fields::{Entries, first_item};
use super::resume::{self, Resume};
use crate::cluster::work::{Work, chained};
use crate::ids::Room;
use crate::limits::{BYTES_PER_TOKEN, CHOICES_MAX, PROMPT_BLOCK_BYTES, PROMPT_BLOCKS_MAX};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use std::io::Write;

/// A client's body, ready to be addressed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Routed {
    /// An object with a comma after its last field, and not closed.
    open: Vec<u8>,
    choices: u32,
    stream: bool,
    /// Names that the client gave it, which it may be aborted by.
    rids: Vec<String>,
    /// What it asks of workers, as far as its text tells.
    work: Work,
}

/// Where the workers of a pair meet: at the prefill worker's registry. They derive further rooms where there are several
/// choices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meeting<'a> {
    /// Its host.
    pub host: &'a str,
    /// Its port, or the one that decode workers take where none is named.
    pub port: Option<u16>,
    /// The first choice's room.
    pub room: Room,
}

impl Routed {
    /// Reads a body.
    ///
    /// # Errors
    /// It is not a JSON object, or one with too many fields.
    pub fn parse(body: &[u8]) -> Result<Routed, ApiError> {
        Routed::read(body, false)
    }

    /// As [`Routed::parse`], and names the blocks of the prompt, which take time, for a router that asks who has them.
    ///
    /// # Errors
    /// As there.
    pub fn parse_with_blocks(body: &[u8]) -> Result<Routed, ApiError> {
        Routed::read(body, true)
    }

    fn read(body: &[u8], with_blocks: bool) -> Result<Routed, ApiError> {
        let text = std::str::from_utf8(body).map_err(ApiError::invalid_json)?;
        let Entries(entries) = serde_json::from_str(text).map_err(ApiError::invalid_json)?;
        let mut open = Vec::with_capacity(body.len() + 256);
        open.push(b'{');
        for (name, value) in entries.iter().filter(|(name, _)| !is_ours(name)) {
            serde_json::to_writer(&mut open, name).expect("a text is JSON");
            let _ = write!(open, ":{},", value.get());
        }
        let stream = entries.iter().any(|(name, value)| name == "stream" && value.get() == "true");
        let (prompts, samples) = choices(&entries);
        let choices = prompts.saturating_mul(samples).clamp(1, CHOICES_MAX) as u32;
        let samples = samples.clamp(1, CHOICES_MAX) as u32;
        let work = Work { samples, ..work(&entries, choices, with_blocks) };
        Ok(Routed { open, choices, stream, rids: rids(&entries), work })
    }

    /// Whether the answer is to come as events.
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// Whether one of the names that the client gave it begins so.
    pub fn is_named(&self, rid: &str) -> bool {
        self.rids.iter().any(|own| own.starts_with(rid))
    }

    /// How many sequences it asks for, as far as can be told: prompts times samples.
    pub fn choices(&self) -> u32 {
        self.choices
    }

    /// What it asks of workers, as far as its text tells.
    pub fn work(&self) -> &Work {
        &self.work
    }

    /// The body for both workers of an attempt, which says where they meet, or for one that serves it alone. With
    /// `resume` they mark their events, and begin behind what it says; with `first_token` prefill tells at once what it
    /// samples.
    pub fn address(
        &self,
        meeting: Option<Meeting<'_>>,
        resume: Option<&Resume>,
        first_token: bool,
    ) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.open.len() + 256);
        body.extend_from_slice(&self.open);
        if let Some(resume) = resume {
            let _ = write!(body, "\"{}\":", resume::FIELD);
            serde_json::to_writer(&mut body, resume).expect("numbers are JSON");
            body.push(b',');
        }
        if first_token {
            let _ = write!(body, "\"{}\":true,", resume::FIRST_TOKEN);
        }
        if let Some(Meeting { host, port, room }) = meeting {
            body.extend_from_slice(b"\"bootstrap_host\":");
            serde_json::to_writer(&mut body, host).expect("a text is JSON");
            body.extend_from_slice(b",\"bootstrap_port\":");
            match port {
                Some(port) => drop(write!(body, "{port}")),
                None => body.extend_from_slice(b"null"),
            }
            let _ = write!(body, ",\"bootstrap_room\":{room},");
        }
        // The comma behind the last field.
        if body.last() == Some(&b',') {
            body.pop();
        }
        body.push(b'}');
        body
    }
}

fn is_ours(name: &str) -> bool {
    matches!(
        name,
        "bootstrap_host" | "bootstrap_port" | "bootstrap_room" | resume::FIELD | resume::FIRST_TOKEN
    )
}

/// `rid` is a name, or one for each prompt.
fn rids(entries: &[(String, &RawValue)]) -> Vec<String> {
    let rid = entries.iter().find(|(name, _)| name == "rid").map(|(_, value)| value.get());
    let one = |raw| serde_json::from_str(raw).map(|name: String| vec![name]);
    rid.and_then(|raw| one(raw).or_else(|_| serde_json::from_str(raw)).ok()).unwrap_or_default()
}

/// The prompt as it stands in the body: texts that begin alike have prompts that do, under one salt. Escapes and the names
/// of fields count as text; so about four bytes are a token.
fn work(entries: &[(String, &RawValue)], choices: u32, with_blocks: bool) -> Work {
    let field =
        |name: &str| entries.iter().find(|(key, _)| key == name).map(|(_, value)| value.get().as_bytes());
    let Some(text) = ["messages", "prompt", "text", "input_ids"].into_iter().find_map(field) else {
        return Work::of(choices);
    };
    let salt = ["model", "cache_salt", "tools"].into_iter().filter_map(field);
    let salt = salt.fold(0, chained);
    let most = if with_blocks { PROMPT_BLOCKS_MAX } else { 0 };
    let blocks = text.chunks_exact(PROMPT_BLOCK_BYTES).take(most);
    let blocks = blocks.scan(salt, |before, block| {
        *before = chained(*before, block);
        Some(*before)
    });
    // Ids are counted, whatever they look like.
    let first = text.iter().find(|byte| !b"[ \t\r\n".contains(byte));
    let (tokens, block) = match first.is_some_and(u8::is_ascii_digit) {
        true => {
            let tokens = 1 + text.iter().filter(|&&byte| byte == b',').count();
            (tokens, PROMPT_BLOCK_BYTES * tokens / text.len())
        }
        false => (text.len() / BYTES_PER_TOKEN, PROMPT_BLOCK_BYTES / BYTES_PER_TOKEN),
    };
    Work {
        sequences: choices,
        samples: 1,
        tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
        block: block as u32,
        blocks: blocks.collect(),
    }
}

/// Prompts, and samples of each.
fn choices(entries: &[(String, &RawValue)]) -> (usize, usize) {
    #[derive(Deserialize)]
    struct Sampling {
        n: Option<usize>,
    }
    let field = |name: &str| entries.iter().find(|(key, _)| key == name).map(|(_, value)| value.get());
    let sampling = field("sampling_params").and_then(|raw| serde_json::from_str::<Sampling>(raw).ok());
    let samples = field("n").and_then(|raw| serde_json::from_str(raw).ok()).or(sampling.and_then(|s| s.n));
    let prompts = ["prompt", "text", "input_ids"].into_iter().filter_map(field).map(prompts).max();
    (prompts.unwrap_or(1), samples.unwrap_or(1))
}

/// A list of ids is one prompt; a list of texts or of lists, as many as it has items.
fn prompts(json: &str) -> usize {
    match first_item(json) {
        Some(b'"' | b'[') => serde_json::from_str::<Vec<IgnoredAny>>(json).map_or(1, |items| items.len()),
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
            Routed::parse_with_blocks(body.as_bytes()).unwrap().work().clone()
        };
        let [a, b, c] = ["alpha ", "beta ", "gamma "].map(turn);
        let (one, two) = (work(std::slice::from_ref(&a), ""), work(&[a.clone(), b.clone()], ""));
        assert_eq!((one.sequences, one.block, one.tokens, one.blocks.len()), (1, 64, 157, 2));
        assert_eq!(two.blocks[..2], one.blocks[..]);
        assert_eq!(work(&[a.clone(), c], "").blocks[..2], one.blocks[..]);
        assert_ne!(work(&[b], "").blocks[0], one.blocks[0]);
        assert_ne!(work(std::slice::from_ref(&a), r#","cache_salt":"x""#).blocks[0], one.blocks[0]);
        assert_eq!(work(&[a], r#","temperature":0"#).blocks, one.blocks);
        assert_eq!(*Routed::parse(b"{}").unwrap().work(), Work::of(1));
    }

    fn addressed(body: &str) -> String {
        let meeting = Meeting { host: "10.0.0.1", port: Some(8998), room: Room(7) };
        let body = Routed::parse(body.as_bytes()).unwrap().address(Some(meeting), None, false);
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
    fn a_port_that_nobody_named_is_null() {
        let meeting = Meeting { host: "h", port: None, room: Room(7) };
        let body = Routed::parse(b"{}").unwrap().address(Some(meeting), None, false);
        let expected = r#"{"bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":7}"#;
        assert_eq!(String::from_utf8(body).unwrap(), expected);
    }

    #[test]
    fn each_prompt_is_before_its_own_samples_only() {
        let work = |body: &str| Routed::parse(body.as_bytes()).unwrap().work().clone();
        let text = "many words ".repeat(40);
        let two = work(&format!(r#"{{"prompt":["{text}","{text}"],"n":3}}"#));
        assert_eq!((two.sequences, two.samples, two.context()), (6, 3, 3 * u64::from(two.tokens)));
        let ids = work(r#"{"input_ids":[[1, 22222], [3]],"sampling_params":{"n":2}}"#);
        assert_eq!((ids.sequences, ids.tokens, ids.context()), (4, 3, 6));
        assert!(ids.blocks.is_empty(), "nobody asked for them");
    }

    #[test]
    fn one_that_is_served_alone_meets_nobody() {
        for body in ["{}", r#"{"a":[1,2],"bootstrap_room":1}"#] {
            let alone = Routed::parse(body.as_bytes()).unwrap().address(None, None, false);
            assert_eq!(alone, if body == "{}" { &b"{}"[..] } else { br#"{"a":[1,2]}"# });
        }
    }

    #[test]
    fn a_client_does_not_choose_where_workers_meet() {
        let body =
            addressed(r#"{"bootstrap_room":1,"\u0062ootstrap_host":"evil","bootstrap_port":null,"a\"b":1}"#);
        assert_eq!(
            body,
            r#"{"a\"b":1,"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#
        );
    }

    #[test]
    fn a_body_is_one_json_object() {
        for body in ["", "[]", "{", "{} {}", r#"{"a":}"#, r#"{"a":1,"a":2}"#, "7"] {
            assert_eq!(Routed::parse(body.as_bytes()).unwrap_err().code, "invalid_json", "{body}");
        }
        assert!(Routed::parse(b"{\"a\":\"\xff\"}").is_err());
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
            assert_eq!(Routed::parse(body.as_bytes()).unwrap().choices(), choices, "{body}");
        }
    }
}
