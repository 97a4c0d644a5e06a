//! Writes responses as JSON, for all three endpoints, whole or in chunks.
//!
//! Owns: the shape of a response. Invariants: a logprob prints as the shortest number that parses
//! to the same f32, so equal bits give equal bytes. A caller fills a [`Choice`] in the same way for
//! all endpoints. Not here: event framing (`http::sse`), when to send a chunk.
//!
//! The parts of a stream, in order: [`Renderer::placing`] if KV is kept; for each choice
//! [`Renderer::opening`] and any number of [`Renderer::chunk`]; [`Renderer::closing`]; [`DONE`]. A
//! chunk holds the new part; at `/generate` it repeats the whole choice so far
//! ([`Renderer::is_cumulative`]).

mod chat;
mod completion;
mod generate;

use super::kv_transfer::KeptKv;
use super::request::{ApiEndpoint, GenerateRequest};
use crate::model::answer::CallPart;
use crate::stdx::hex::to_hex;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use sha2::{Digest, Sha256};
use std::borrow::Cow;

/// Characters of the id of a tool call behind `call_`, as in OpenAI's answers.
const CALL_ID_LENGTH: usize = 24;
/// Templates of Mistral refuse ids of any other length.
const SHORT_CALL_ID_LENGTH: usize = 9;

/// The data of the last event of a stream.
pub const DONE: &[u8] = b"[DONE]";

/// The reason why an answer ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// It reached `max_tokens` or the end of the context; holds the number of generated tokens.
    Length(u32),
    /// The model's end-of-sequence token, with this id.
    EndOfSequence(u32),
    /// One of the request's stop token ids.
    StopToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// It was aborted; holds the reason.
    Abort(String),
}

impl Finish {
    /// The finish reason in OpenAI's and SGLang's API.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Length(_) => "length",
            Self::EndOfSequence(_) | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Abort(_) => "abort",
        }
    }
}

/// A token and its log probability (natural logarithm).
#[derive(Clone, PartialEq, Debug)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Its bytes, which can be a part of a character.
    pub bytes: Vec<u8>,
    /// From the softmax of the logits before temperature.
    pub logprob: f32,
}

impl TokenLogprob {
    /// Its bytes as text; incomplete characters become U+FFFD.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.bytes)
    }
}

/// The logprobs at one position of an answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Position {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// The most probable tokens, best first; can hold more than the request asked for.
    pub top: Vec<TokenLogprob>,
}

/// A token of the prompt.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptPosition {
    /// Its logprob, NaN for the first token of the range: nothing comes before the first token of a
    /// prompt, and SGLang begins every range with null.
    pub token: TokenLogprob,
    /// Number of tokens that were at least as likely; 0 without a logprob.
    pub rank: u32,
    /// The most probable tokens, best first; can hold more than the request asked for.
    pub top: Vec<TokenLogprob>,
}

impl PromptPosition {
    /// Its logprob, if it has one.
    pub fn logprob(&self) -> Option<f32> {
        (self.rank > 0).then_some(self.token.logprob)
    }
}

/// Token counts of a request, or of one choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt: u32,
    /// Generated tokens.
    pub completion: u32,
    /// Prompt tokens that were not computed.
    pub cached: u32,
    /// Generated tokens that are reasoning.
    pub reasoning: u32,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form {
            prompt_tokens: u32,
            completion_tokens: u32,
            total_tokens: u32,
            prompt_tokens_details: PromptDetails,
            #[serde(skip_serializing_if = "Option::is_none")]
            completion_tokens_details: Option<CompletionDetails>,
        }
        #[derive(Serialize)]
        struct PromptDetails {
            cached_tokens: u32,
        }
        #[derive(Serialize)]
        struct CompletionDetails {
            reasoning_tokens: u32,
        }
        let reasoning_tokens = self.reasoning;
        Form {
            prompt_tokens: self.prompt,
            completion_tokens: self.completion,
            total_tokens: self.prompt.saturating_add(self.completion),
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached },
            completion_tokens_details: (reasoning_tokens > 0)
                .then_some(CompletionDetails { reasoning_tokens }),
        }
        .serialize(serializer)
    }
}

/// Times (in milliseconds) and counts of the stages of a request. Stages that it skipped are
/// absent. After a failover they describe only the workers that finished the stream.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Timings {
    /// Wait for admission to prefill.
    pub queue_ms: f64,
    /// Wait for the destination on decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_ms: Option<f64>,
    /// Tokens that prefill computed: the prompt tokens that no cache had, and after a failover the
    /// resumed tokens.
    pub prefill_tokens: u32,
    /// Time to compute them.
    pub prefill_ms: f64,
    /// Bytes of KV transferred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handover_bytes: Option<u64>,
    /// From the end of prefill until the last byte is in decode's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handover_ms: Option<f64>,
    /// Replaces `handover_ms` if prefill runs in another process: the time from the lease of
    /// decode's pages to the last byte. Most of that time is prefill's queue and computation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_wait_ms: Option<f64>,
    /// The transport's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<&'static str>,
    /// From the last byte until the request joins the running batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join_ms: Option<f64>,
    /// Tokens that decode generated, without the first one.
    pub decode_tokens: u32,
    /// Time to generate them.
    pub decode_ms: f64,
    /// Tokens that the client already had when these workers continued the stream of lost workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_tokens: Option<u32>,
}

/// One choice, or its new part.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Its index among all choices, prompt by prompt.
    pub index: usize,
    /// The prompt's request id, or the request's.
    pub rid: &'a str,
    /// The text, without reasoning and tool calls.
    pub text: &'a str,
    /// The reasoning.
    pub reasoning: &'a str,
    /// The tool calls, or their new parts.
    pub calls: &'a [CallPart],
    /// Whether the choice has a tool call so far.
    pub has_call: bool,
    /// Generated token ids, including a final end-of-sequence token.
    pub token_ids: &'a [u32],
    /// One for each of `token_ids` if logprobs are requested, otherwise empty.
    pub positions: &'a [Position],
    /// The prompt's tokens, if their logprobs are requested, in the first chunk of a choice and in
    /// whole responses.
    pub prompt: &'a [PromptPosition],
    /// Number of characters in the choice's tokens before `prompt` and `positions`.
    pub text_offset: usize,
    /// The prompt's ids, in the first chunk of a choice and in whole responses.
    pub prompt_ids: Option<&'a [u32]>,
    /// The reason of its end, if it has ended.
    pub finish: Option<&'a Finish>,
    /// Token counts of this choice so far.
    pub usage: Usage,
}

/// Writes the response to one request.
#[derive(Clone, Debug)]
pub struct Renderer {
    endpoint: ApiEndpoint,
    id: String,
    created: u64,
    model: String,
    logprobs: Option<usize>,
    logprob_text: bool,
    /// Alternatives in the field `prompt_logprobs`.
    prompt_logprobs: Option<usize>,
    echo: bool,
    return_token_ids: bool,
    include_usage: bool,
    continuous_usage: bool,
    tokens_as_ids: bool,
    batch: bool,
    kept: Option<KeptKv>,
    /// Characters of the id of a tool call, behind its prefix.
    call_id_length: usize,
}

/// The fields of OpenAI's responses and chunks, with their choices.
#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    /// Absent, or null in the chunks before the one with the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// Only for chat. Completions have the ids in each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    /// The same.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobForms<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<&'a Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a KeptKv>,
}

impl Renderer {
    /// A renderer for the response to `request`. Its id is `id` with OpenAI's prefix, and it begins
    /// at `created` seconds of Unix time.
    pub fn new(request: &GenerateRequest, id: &str, created: u64, model: &str) -> Self {
        let prefix = match request.endpoint {
            ApiEndpoint::Completions => "cmpl-",
            ApiEndpoint::Chat => "chatcmpl-",
            ApiEndpoint::Generate => "",
        };
        Self {
            endpoint: request.endpoint,
            id: format!("{prefix}{id}"),
            created,
            model: model.to_owned(),
            logprobs: request.logprobs,
            logprob_text: request.logprob_text,
            prompt_logprobs: request.prompt_logprobs.and_then(|wanted| wanted.field),
            echo: request.echo,
            return_token_ids: request.return_token_ids,
            include_usage: request.include_usage,
            continuous_usage: request.continuous_usage,
            tokens_as_ids: request.tokens_as_ids,
            batch: request.batch || request.samples > 1,
            kept: None,
            call_id_length: CALL_ID_LENGTH,
        }
    }

    /// The same, with ids of tool calls that templates of Mistral accept.
    pub fn with_short_call_ids(self) -> Self {
        Self { call_id_length: SHORT_CALL_ID_LENGTH, ..self }
    }

    /// The id of a tool call. It is the same on the workers of a failover. Calls of other answers
    /// have other ids, even if the client repeats the id of its request.
    fn call_id(&self, choice: &Choice<'_>, index: usize) -> String {
        let Usage { prompt, .. } = choice.usage;
        let what = (&self.id, self.created, prompt, choice.index, index);
        let hash = to_hex(&Sha256::digest(format!("{what:?}")));
        let prefix = if self.call_id_length == CALL_ID_LENGTH { "call_" } else { "" };
        format!("{prefix}{}", &hash[..self.call_id_length])
    }

    /// Adds the place of kept KV to the response.
    pub fn with_kept(self, kept: Option<KeptKv>) -> Self {
        Self { kept, ..self }
    }

    /// Appends the first chunk, which says where the KV is kept. Returns `false` if no KV is kept.
    pub fn placing(&self, out: &mut Vec<u8>) -> bool {
        #[derive(Serialize)]
        struct Form<'a> {
            kv_transfer_params: &'a KeptKv,
        }
        if let Some(kv_transfer_params) = &self.kept {
            write(out, &Form { kv_transfer_params });
        }
        self.kept.is_some()
    }

    /// The time at which the answer began, in seconds of Unix time.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Whether a chunk holds the whole choice so far instead of its new part.
    pub fn is_cumulative(&self) -> bool {
        self.endpoint == ApiEndpoint::Generate
    }

    /// Appends the whole response.
    pub fn body(
        &self,
        out: &mut Vec<u8>,
        choices: &[Choice<'_>],
        usage: Usage,
        timings: Option<&Timings>,
    ) {
        match self.endpoint {
            ApiEndpoint::Completions => completion::body(self, out, choices, usage, timings),
            ApiEndpoint::Chat => chat::body(self, out, choices, usage, timings),
            ApiEndpoint::Generate => generate::body(self, out, choices, timings),
        }
    }

    /// Appends the chunk that opens a choice. Returns `false` if the endpoint has no such chunk.
    pub fn opening(&self, out: &mut Vec<u8>, index: usize, usage: Usage) -> bool {
        let opens = self.endpoint == ApiEndpoint::Chat;
        if opens {
            chat::opening(self, out, index, usage);
        }
        opens
    }

    /// Appends a chunk of one choice; `timings` belong to its last chunk.
    pub fn chunk(&self, out: &mut Vec<u8>, choice: &Choice<'_>, timings: Option<&Timings>) {
        match self.endpoint {
            ApiEndpoint::Completions => completion::chunk(self, out, choice, timings),
            ApiEndpoint::Chat => chat::chunk(self, out, choice, timings),
            ApiEndpoint::Generate => generate::chunk(self, out, choice, timings),
        }
    }

    /// Appends the chunk that ends a stream with the usage. Returns `false` if usage is not
    /// requested.
    pub fn closing(&self, out: &mut Vec<u8>, usage: Usage) -> bool {
        let object = match self.endpoint {
            ApiEndpoint::Completions => completion::OBJECT,
            ApiEndpoint::Chat => chat::CHUNK,
            ApiEndpoint::Generate => return false,
        };
        if self.include_usage {
            write(out, &self.envelope::<()>(object, Vec::new(), Some(Some(usage)), None));
        }
        self.include_usage
    }

    fn envelope<'a, C>(
        &'a self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<Usage>>,
        timings: Option<&'a Timings>,
    ) -> Envelope<'a, C> {
        Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            prompt_token_ids: None,
            prompt_logprobs: None,
            timings,
            kv_transfer_params: self.kept.as_ref(),
        }
    }

    /// The usage in all chunks except the last: that so far if the request asks for it, null if the
    /// last chunk has the usage, otherwise absent.
    fn chunk_usage(&self, so_far: Usage) -> Option<Option<Usage>> {
        self.include_usage.then(|| self.continuous_usage.then_some(so_far))
    }

    /// The name of a token in logprobs.
    fn token_name<'a>(&self, token: &'a TokenLogprob) -> Cow<'a, str> {
        match self.tokens_as_ids {
            true => Cow::Owned(format!("token_id:{}", token.id)),
            false => token.text(),
        }
    }

    /// vLLM's field `prompt_logprobs`.
    fn prompt_logprobs<'a>(&self, choice: &Choice<'a>) -> Option<PromptLogprobForms<'a>> {
        let count = self.prompt_logprobs.filter(|_| !choice.prompt.is_empty())?;
        let form = |at: &'a PromptPosition| at.logprob().map(|_| PromptLogprobForm(at, count));
        Some(choice.prompt.iter().map(form).collect())
    }

    fn token_ids<'a>(&self, choice: &Choice<'a>) -> Option<&'a [u32]> {
        self.return_token_ids.then_some(choice.token_ids)
    }

    fn prompt_ids<'a>(&self, choice: &Choice<'a>) -> Option<&'a [u32]> {
        choice.prompt_ids.filter(|_| self.return_token_ids)
    }
}

/// One entry for each token of a prompt; null for the first.
type PromptLogprobForms<'a> = Vec<Option<PromptLogprobForm<'a>>>;

/// The logprobs at one position of a prompt: a map from token ids, the prompt's token first, then
/// this number of alternatives.
struct PromptLogprobForm<'a>(&'a PromptPosition, usize);

impl Serialize for PromptLogprobForm<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form<'a> {
            logprob: f32,
            rank: u32,
            decoded_token: Cow<'a, str>,
        }
        let PromptLogprobForm(PromptPosition { token, rank, top }, count) = self;
        let mut map = serializer.serialize_map(None)?;
        let others = (1..).zip(top.iter().take(*count)).filter(|(_, other)| other.id != token.id);
        for (rank, token) in std::iter::once((*rank, token)).chain(others) {
            let form = Form { logprob: token.logprob, rank, decoded_token: token.text() };
            map.serialize_entry(&token.id, &form)?;
        }
        map.end()
    }
}

/// The token or string that ended a choice: vLLM's `stop_reason` (null at the end of sequence), or
/// SGLang's `matched`.
#[derive(Serialize)]
#[serde(untagged)]
enum Matched<'a> {
    Id(u32),
    Text(&'a str),
}

impl<'a> Matched<'a> {
    fn of(finish: &'a Finish) -> Option<Self> {
        match finish {
            Finish::StopToken(id) => Some(Self::Id(*id)),
            Finish::StopString(text) => Some(Self::Text(text)),
            Finish::Length(_) | Finish::EndOfSequence(_) | Finish::Abort(_) => None,
        }
    }
}

fn write(out: &mut Vec<u8>, value: &impl Serialize) {
    serde_json::to_writer(out, value).expect("a response is valid JSON and a buffer never fails");
}

#[cfg(test)]
mod tests {
    use super::super::{
        Sampling, chat as chat_body, completion as completion_body, generate as generate_body,
    };
    use super::*;

    fn token(id: u32, bytes: &[u8], logprob: f32) -> TokenLogprob {
        TokenLogprob { id, bytes: bytes.to_vec(), logprob }
    }

    /// "é!" as three tokens; the first two are the halves of one character.
    fn positions() -> Vec<Position> {
        vec![
            Position {
                chosen: token(7, b"\xc3", -0.1),
                top: vec![token(7, b"\xc3", -0.1), token(8, b"\xc4", -3.5)],
            },
            Position {
                chosen: token(9, b"\xa9", 0.0),
                top: vec![token(9, b"\xa9", 0.0), token(3, b"x", -17.25)],
            },
            Position {
                chosen: token(5, b"!", -1.5),
                top: vec![token(4, b"?", -0.25), token(5, b"!", -1.5)],
            },
        ]
    }

    fn choice<'a>(positions: &'a [Position], finish: Option<&'a Finish>) -> Choice<'a> {
        Choice {
            index: 0,
            rid: "r",
            text: "é!",
            reasoning: "",
            calls: &[],
            has_call: false,
            token_ids: &[7, 9, 5],
            positions,
            prompt: &[],
            text_offset: 2,
            prompt_ids: Some(&[1, 2]),
            finish,
            usage: Usage { prompt: 2, completion: 3, cached: 1, reasoning: 0 },
        }
    }

    fn usage() -> Usage {
        Usage { prompt: 2, completion: 3, cached: 1, reasoning: 0 }
    }

    fn renderer(request: Result<GenerateRequest, super::super::ApiError>) -> Renderer {
        Renderer::new(&request.unwrap(), "r", 7, "m")
    }

    fn completion(rest: &str) -> Renderer {
        renderer(completion_body::parse(
            format!(r#"{{"prompt":"ab"{rest}}}"#).as_bytes(),
            &Sampling::default(),
        ))
    }

    fn chat(rest: &str) -> Renderer {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"ab"}}]{rest}}}"#);
        renderer(chat_body::parse(body.as_bytes(), &Sampling::default()))
    }

    fn generate(rest: &str) -> Renderer {
        renderer(generate_body::parse(
            format!(r#"{{"text":"ab"{rest}}}"#).as_bytes(),
            &Sampling::default(),
        ))
    }

    fn json(write: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut out = Vec::new();
        write(&mut out);
        String::from_utf8(out).unwrap()
    }

    const USAGE: &str = r#""usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}"#;

    #[test]
    fn a_completion() {
        let finish = Finish::StopString("\n".into());
        let plain =
            json(|out| completion("").body(out, &[choice(&[], Some(&finish))], usage(), None));
        assert_eq!(
            plain,
            format!(
                r#"{{"id":"cmpl-r","object":"text_completion","created":7,"model":"m","choices":[{{"index":0,"text":"é!","logprobs":null,"finish_reason":"stop","stop_reason":"\n"}}],{USAGE}}}"#
            )
        );
        let positions = positions();
        let timings = Timings { prefill_tokens: 2, handover_ms: Some(0.5), ..Timings::default() };
        let renderer = completion(r#","logprobs":1,"return_token_ids":true"#);
        let full = json(|out| {
            renderer.body(
                out,
                &[choice(&positions, Some(&Finish::Length(3)))],
                usage(),
                Some(&timings),
            );
        });
        assert_eq!(
            full,
            format!(
                r#"{{"id":"cmpl-r","object":"text_completion","created":7,"model":"m","choices":[{{"index":0,"text":"é!","logprobs":{{"tokens":["�","�","!"],"token_logprobs":[-0.1,0.0,-1.5],"top_logprobs":[{{"�":-0.1}},{{"�":0.0}},{{"!":-1.5,"?":-0.25}}],"text_offset":[2,3,4]}},"finish_reason":"length","stop_reason":null,"token_ids":[7,9,5],"prompt_token_ids":[1,2]}}],{USAGE},"timings":{{"queue_ms":0.0,"prefill_tokens":2,"prefill_ms":0.0,"handover_ms":0.5,"decode_tokens":0,"decode_ms":0.0}}}}"#
            )
        );
    }

    #[test]
    fn tokens_that_read_the_same_share_a_name() {
        let positions = positions();
        let renderer = completion(r#","logprobs":2"#);
        let full = json(|out| renderer.body(out, &[choice(&positions, None)], usage(), None));
        assert!(
            full.contains(
                r#""top_logprobs":[{"�":-0.1},{"�":0.0,"x":-17.25},{"!":-1.5,"?":-0.25}]"#
            ),
            "{full}"
        );
    }

    #[test]
    fn a_stream_of_completions() {
        let renderer = completion(
            r#","stream":true,"stream_options":{"include_usage":true},"return_token_ids":true"#,
        );
        assert!(!renderer.opening(&mut Vec::new(), 0, usage()));
        let chunk =
            json(|out| renderer.chunk(out, &choice(&[], Some(&Finish::EndOfSequence(5))), None));
        assert_eq!(
            chunk,
            r#"{"id":"cmpl-r","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"é!","logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":[7,9,5],"prompt_token_ids":[1,2]}],"usage":null}"#
        );
        let closing = json(|out| assert!(renderer.closing(out, usage())));
        assert_eq!(
            closing,
            format!(
                r#"{{"id":"cmpl-r","object":"text_completion","created":7,"model":"m","choices":[],{USAGE}}}"#
            )
        );
        assert!(!completion("").closing(&mut Vec::new(), usage()));
    }

    #[test]
    fn a_chat() {
        let positions = positions();
        let renderer = chat(r#","logprobs":true,"top_logprobs":1,"return_token_ids":true"#);
        let full = json(|out| {
            renderer.body(
                out,
                &[choice(&positions[1..], Some(&Finish::StopToken(5)))],
                usage(),
                None,
            );
        });
        assert_eq!(
            full,
            format!(
                r#"{{"id":"chatcmpl-r","object":"chat.completion","created":7,"model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"é!","refusal":null}},"logprobs":{{"content":[{{"token":"�","logprob":0.0,"bytes":[169],"top_logprobs":[{{"token":"�","logprob":0.0,"bytes":[169]}}]}},{{"token":"!","logprob":-1.5,"bytes":[33],"top_logprobs":[{{"token":"?","logprob":-0.25,"bytes":[63]}}]}}],"refusal":null}},"finish_reason":"stop","stop_reason":5,"token_ids":[7,9,5]}}],{USAGE},"prompt_token_ids":[1,2]}}"#
            )
        );
    }

    #[test]
    fn a_stream_of_chat() {
        let renderer = chat(r#","stream":true,"stream_options":{"include_usage":true}"#);
        let head = r#"{"id":"chatcmpl-r","object":"chat.completion.chunk","created":7,"model":"m","choices":["#;
        assert_eq!(
            json(|out| assert!(renderer.opening(out, 1, usage()))),
            format!(
                r#"{head}{{"index":1,"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null,"stop_reason":null}}],"usage":null}}"#
            )
        );
        assert_eq!(
            json(|out| renderer.chunk(out, &choice(&[], None), None)),
            format!(
                r#"{head}{{"index":0,"delta":{{"content":"é!"}},"logprobs":null,"finish_reason":null,"stop_reason":null}}],"usage":null}}"#
            )
        );
        let last = Choice { text: "", ..choice(&[], Some(&Finish::Length(3))) };
        assert_eq!(
            json(|out| renderer.chunk(out, &last, None)),
            format!(
                r#"{head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"length","stop_reason":null}}],"usage":null}}"#
            )
        );
        assert_eq!(
            json(|out| assert!(renderer.closing(out, usage()))),
            format!("{head}],{USAGE}}}")
        );
    }

    #[test]
    fn an_answer_of_generate() {
        let positions = positions();
        let head = r#"{"text":"é!","output_ids":[7,9,5],"meta_info":{"id":"r","finish_reason":"#;
        let counts = r#","prompt_tokens":2,"completion_tokens":3,"cached_tokens":1"#;
        let reason = |finish: &Finish| {
            json(|out| generate("").body(out, &[choice(&[], Some(finish))], usage(), None))
        };
        for (finish, expected) in [
            (Finish::Length(3), r#"{"type":"length","length":3}"#),
            (Finish::EndOfSequence(5), r#"{"type":"stop","matched":5}"#),
            (Finish::StopString("x".into()), r#"{"type":"stop","matched":"x"}"#),
            (Finish::Abort("gone".into()), r#"{"type":"abort","message":"gone"}"#),
        ] {
            assert_eq!(reason(&finish), format!("{head}{expected}{counts}}}}}"));
        }
        let renderer = generate(r#","return_logprob":true"#);
        assert_eq!(
            json(|out| renderer.body(out, &[choice(&positions, None)], usage(), None)),
            format!(
                r#"{head}null{counts},"input_token_logprobs":[],"output_token_logprobs":[[-0.1,7,null],[0.0,9,null],[-1.5,5,null]]}}}}"#
            )
        );
        let renderer = generate(
            r#","return_logprob":true,"top_logprobs_num":1,"return_text_in_logprobs":true"#,
        );
        assert_eq!(
            json(|out| renderer.chunk(out, &choice(&positions[2..], None), None)),
            format!(
                r#"{head}null{counts},"input_token_logprobs":[],"output_token_logprobs":[[-1.5,5,"!"]],"output_top_logprobs":[[[-0.25,4,"?"]]]}}}}"#
            )
        );
        assert!(renderer.is_cumulative());
    }

    #[test]
    fn a_list_asked_is_a_list_answered() {
        let renderer = generate(r#","sampling_params":{"n":2}"#);
        let two =
            json(|out| renderer.body(out, &[choice(&[], None), choice(&[], None)], usage(), None));
        assert_eq!(serde_json::from_str::<Vec<serde_json::Value>>(&two).unwrap().len(), 2);
        let chunk =
            json(|out| renderer.chunk(out, &Choice { index: 1, ..choice(&[], None) }, None));
        assert!(chunk.ends_with(r#""cached_tokens":1},"index":1}"#), "{chunk}");
    }

    #[test]
    fn logprobs_read_back_as_the_same_bits() {
        for bits in (0x8000_0001u32..0xff80_0000).step_by(9_999_991) {
            let logprob = f32::from_bits(bits);
            let positions = [Position { chosen: token(1, b"a", logprob), top: vec![] }];
            let renderer = generate(r#","return_logprob":true"#);
            let text = json(|out| renderer.body(out, &[choice(&positions, None)], usage(), None));
            let start = text.find("[[").unwrap() + 2;
            let number = text[start..].split(',').next().unwrap();
            assert_eq!(number.parse::<f32>().unwrap().to_bits(), bits, "{number}");
        }
    }
}
