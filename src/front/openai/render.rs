//! Answers as JSON, for all three endpoints, whole or in chunks.
//!
//! Owns: the shape of an answer. Invariants: a logprob prints as the shortest number that reads
//! back as the same f32, so equal bits give equal bytes; the caller says what a choice holds and
//! never how its endpoint spells it. Not here: event framing (`http::sse`), when a chunk is due.
//!
//! A stream is [`Renderer::placing`] where KV is kept, [`Renderer::opening`] and any number of [`Renderer::chunk`] per choice, then
//! [`Renderer::closing`], then [`DONE`]. Chunks hold what is new; `/generate` repeats all so far
//! ([`Renderer::is_cumulative`]).

mod chat;
mod completion;
mod generate;

use super::kv_transfer::KeptKv;
use super::request::{Endpoint, GenerateRequest};
use serde::{Serialize, Serializer};
use std::borrow::Cow;

/// The data of a stream's last event.
pub const DONE: &[u8] = b"[DONE]";

/// Why an answer ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Finish {
    /// `max_tokens`, or the context, was reached; holds the number of tokens generated.
    Length(u32),
    /// The model's end of sequence, as this id.
    EndOfSequence(u32),
    /// One of the request's stop token ids.
    StopToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// Somebody aborted it; says why.
    Abort(String),
}

impl Finish {
    /// OpenAI's word, and SGLang's.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Length(_) => "length",
            Self::EndOfSequence(_) | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Abort(_) => "abort",
        }
    }
}

/// A token and the natural logarithm of its probability.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Its bytes, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// Of the unscaled softmax.
    pub logprob: f32,
}

impl TokenLogprob {
    /// Its bytes as text; parts of characters show as U+FFFD.
    pub fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.bytes)
    }
}

/// The logprobs at one position of an answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Position {
    /// The token chosen.
    pub chosen: TokenLogprob,
    /// The most probable ones, best first; may hold more than a request asked for.
    pub top: Vec<TokenLogprob>,
}

/// Tokens of a request, or of one choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Of the prompts.
    pub prompt: u32,
    /// Generated.
    pub completion: u32,
    /// Of the prompts' tokens, those not computed.
    pub cached: u32,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Form {
            prompt_tokens: u32,
            completion_tokens: u32,
            total_tokens: u32,
            prompt_tokens_details: Details,
        }
        #[derive(Serialize)]
        struct Details {
            cached_tokens: u32,
        }
        Form {
            prompt_tokens: self.prompt,
            completion_tokens: self.completion,
            total_tokens: self.prompt.saturating_add(self.completion),
            prompt_tokens_details: Details { cached_tokens: self.cached },
        }
        .serialize(serializer)
    }
}

/// Where the time of a request went, in milliseconds; stages that it did not pass are absent. Of an answer that has gone on
/// at other workers, since some were lost, all is told of those alone that ended it.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Timings {
    /// Waiting for admission to prefill.
    pub queue_ms: f64,
    /// Waiting for decode's destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_ms: Option<f64>,
    /// Tokens computed by prefill: those of the prompt that no cache had, and of an answer that went on the ones before.
    pub prefill_tokens: u32,
    /// Computing them.
    pub prefill_ms: f64,
    /// Bytes of KV handed over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handover_bytes: Option<u64>,
    /// From the end of prefill to the last byte in decode's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handover_ms: Option<f64>,
    /// Where prefill is another process, in place of that: decode's wait from the lease of its pages to
    /// the last byte, most of which is prefill's own queue and work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_wait_ms: Option<f64>,
    /// The transport's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<&'static str>,
    /// From there into the running batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub join_ms: Option<f64>,
    /// Tokens that decode generated, the first not counted.
    pub decode_tokens: u32,
    /// Generating them.
    pub decode_ms: f64,
    /// Tokens that the client had of workers that were lost, before these went on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_tokens: Option<u32>,
}

/// One choice, whole or what is new of it.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Its place among the choices, prompt by prompt.
    pub index: usize,
    /// The prompt's name, or the request's.
    pub rid: &'a str,
    /// Text.
    pub text: &'a str,
    /// Ids generated, a final end of sequence included.
    pub token_ids: &'a [u32],
    /// One for each of `token_ids` where logprobs are wanted, else empty.
    pub positions: &'a [Position],
    /// Characters of the choice's tokens before `positions`.
    pub text_offset: usize,
    /// The prompt's ids, in a choice's first chunk and in whole answers.
    pub prompt_ids: Option<&'a [u32]>,
    /// Why it ended, if it has.
    pub finish: Option<&'a Finish>,
    /// Of this choice so far.
    pub usage: Usage,
}

/// Writes the answer to one request.
#[derive(Clone, Debug)]
pub struct Renderer {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    logprobs: Option<usize>,
    logprob_text: bool,
    return_token_ids: bool,
    include_usage: bool,
    batch: bool,
    kept: Option<KeptKv>,
}

/// What OpenAI's answers and chunks have around their choices.
#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<C>,
    /// Absent, or null in the chunks before the one that holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    /// Chat has them here, completions in each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<&'a Timings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a KeptKv>,
}

impl Renderer {
    /// For the answer to `request`, which is called `id` (OpenAI's prefix is put before it) and
    /// begins at `created` seconds of Unix time.
    pub fn new(request: &GenerateRequest, id: &str, created: u64, model: &str) -> Self {
        let prefix = match request.endpoint {
            Endpoint::Completions => "cmpl-",
            Endpoint::Chat => "chatcmpl-",
            Endpoint::Generate => "",
        };
        Self {
            endpoint: request.endpoint,
            id: format!("{prefix}{id}"),
            created,
            model: model.to_owned(),
            logprobs: request.logprobs,
            logprob_text: request.logprob_text,
            return_token_ids: request.return_token_ids,
            include_usage: request.include_usage,
            batch: request.batch || request.samples > 1,
            kept: None,
        }
    }

    /// The answer also says where the KV is kept.
    pub fn with_kept(self, kept: Option<KeptKv>) -> Self {
        Self { kept, ..self }
    }

    /// Appends the chunk that says before all others where the KV is kept; `false` where none is.
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

    /// When the answer began, in seconds of Unix time.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Whether a chunk holds all of its choice so far instead of what is new.
    pub fn is_cumulative(&self) -> bool {
        self.endpoint == Endpoint::Generate
    }

    /// Appends the whole answer.
    pub fn body(
        &self,
        out: &mut Vec<u8>,
        choices: &[Choice<'_>],
        usage: Usage,
        timings: Option<&Timings>,
    ) {
        match self.endpoint {
            Endpoint::Completions => completion::body(self, out, choices, usage, timings),
            Endpoint::Chat => chat::body(self, out, choices, usage, timings),
            Endpoint::Generate => generate::body(self, out, choices, timings),
        }
    }

    /// Appends the chunk that opens a choice; `false` where there is none.
    pub fn opening(&self, out: &mut Vec<u8>, index: usize) -> bool {
        let opens = self.endpoint == Endpoint::Chat;
        if opens {
            chat::opening(self, out, index);
        }
        opens
    }

    /// Appends a chunk of one choice; `timings` belong to the last one.
    pub fn chunk(&self, out: &mut Vec<u8>, choice: &Choice<'_>, timings: Option<&Timings>) {
        match self.endpoint {
            Endpoint::Completions => completion::chunk(self, out, choice, timings),
            Endpoint::Chat => chat::chunk(self, out, choice, timings),
            Endpoint::Generate => generate::chunk(self, out, choice, timings),
        }
    }

    /// Appends the chunk that ends a stream with the usage; `false` where none was asked for.
    pub fn closing(&self, out: &mut Vec<u8>, usage: Usage) -> bool {
        let object = match self.endpoint {
            Endpoint::Completions => completion::OBJECT,
            Endpoint::Chat => chat::CHUNK,
            Endpoint::Generate => return false,
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
            timings,
            kv_transfer_params: self.kept.as_ref(),
        }
    }

    /// The usage of a chunk that is not the last: null where the last will hold it.
    fn no_usage(&self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }

    fn token_ids<'a>(&self, choice: &Choice<'a>) -> Option<&'a [u32]> {
        self.return_token_ids.then_some(choice.token_ids)
    }

    fn prompt_ids<'a>(&self, choice: &Choice<'a>) -> Option<&'a [u32]> {
        choice.prompt_ids.filter(|_| self.return_token_ids)
    }
}

/// What ended a choice, beside the reason: vLLM's `stop_reason` (null at the end of sequence), or
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
    serde_json::to_writer(out, value).expect("answers are JSON and buffers take all of it");
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

    /// "é!" as three tokens, the first two of which are halves of a character.
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
            token_ids: &[7, 9, 5],
            positions,
            text_offset: 2,
            prompt_ids: Some(&[1, 2]),
            finish,
            usage: Usage { prompt: 2, completion: 3, cached: 1 },
        }
    }

    fn usage() -> Usage {
        Usage { prompt: 2, completion: 3, cached: 1 }
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
        assert!(!renderer.opening(&mut Vec::new(), 0));
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
            json(|out| assert!(renderer.opening(out, 1))),
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
