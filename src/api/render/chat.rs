//! Responses of `/v1/chat/completions`.

use super::{Choice, Matched, Position, Renderer, Timings, TokenLogprob, Usage, write};
use crate::model::answer::CallPart;
use serde::Serialize;
use std::borrow::Cow;

const OBJECT: &str = "chat.completion";
pub(super) const CHUNK: &str = "chat.completion.chunk";
const ROLE: &str = "assistant";

#[derive(Serialize)]
struct Form<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Matched<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(flatten)]
    reasoning: Option<Reasoning<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(flatten)]
    reasoning: Option<Reasoning<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

/// Reasoning under both of its names: vLLM's newer one, and that of DeepSeek and SGLang.
#[derive(Serialize)]
struct Reasoning<'a> {
    reasoning: &'a str,
    reasoning_content: &'a str,
}

impl<'a> Reasoning<'a> {
    fn of(choice: &Choice<'a>) -> Option<Self> {
        let text = choice.reasoning;
        (!text.is_empty()).then_some(Self { reasoning: text, reasoning_content: text })
    }
}

/// A tool call, or a part of it. Only the first part has an id, a type and a name.
#[derive(Serialize)]
struct Call<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// The tool calls of a choice. Parts of a stream say which call they belong to.
fn calls<'a>(renderer: &Renderer, choice: &Choice<'a>, is_stream: bool) -> Vec<Call<'a>> {
    let form = |part: &'a CallPart| Call {
        index: is_stream.then_some(part.index),
        id: part.name.is_some().then(|| renderer.call_id(choice, part.index)),
        kind: part.name.is_some().then_some("function"),
        function: Function { name: part.name.as_deref(), arguments: &part.arguments },
    };
    choice.calls.iter().map(form).collect()
}

/// Why a choice ended. A call of a tool is a reason of its own.
fn finish_reason(choice: &Choice<'_>) -> Option<&'static str> {
    match choice.finish?.reason() {
        "stop" if choice.has_call => Some("tool_calls"),
        reason => Some(reason),
    }
}

#[derive(Serialize)]
struct Logprobs<'a> {
    content: Vec<Content<'a>>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct Content<'a> {
    #[serde(flatten)]
    chosen: Token<'a>,
    top_logprobs: Vec<Token<'a>>,
}

#[derive(Serialize)]
struct Token<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
}

impl<'a> Token<'a> {
    fn of(renderer: &Renderer, token: &'a TokenLogprob) -> Self {
        let name = renderer.token_name(token);
        Self { token: name, logprob: token.logprob, bytes: &token.bytes }
    }
}

fn logprobs<'a>(
    renderer: &Renderer,
    positions: &'a [Position],
    alternatives: usize,
) -> Logprobs<'a> {
    let form = |token: &'a TokenLogprob| Token::of(renderer, token);
    let content = positions.iter().map(|Position { chosen, top }| Content {
        chosen: form(chosen),
        top_logprobs: top.iter().take(alternatives).map(form).collect(),
    });
    Logprobs { content: content.collect(), refusal: None }
}

/// The parts of a choice that message and delta have in common.
fn form<'a>(renderer: &Renderer, choice: &Choice<'a>) -> Form<'a> {
    Form {
        index: choice.index,
        message: None,
        delta: None,
        logprobs: renderer.logprobs.map(|count| logprobs(renderer, choice.positions, count)),
        finish_reason: finish_reason(choice),
        stop_reason: choice.finish.and_then(Matched::of),
        token_ids: renderer.token_ids(choice),
    }
}

pub(super) fn body(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choices: &[Choice<'_>],
    usage: Usage,
    timings: Option<&Timings>,
) {
    let forms = choices.iter().map(|choice| Form {
        message: Some(Message {
            role: ROLE,
            // Without any text beside reasoning or calls, there is no content.
            content: Some(choice.text).filter(|text| {
                !text.is_empty() || choice.calls.is_empty() && choice.reasoning.is_empty()
            }),
            refusal: None,
            reasoning: Reasoning::of(choice),
            tool_calls: calls(renderer, choice, false),
        }),
        ..form(renderer, choice)
    });
    let mut envelope = renderer.envelope(OBJECT, forms.collect(), Some(Some(usage)), timings);
    envelope.prompt_token_ids = choices.first().and_then(|choice| renderer.prompt_ids(choice));
    envelope.prompt_logprobs = choices.first().and_then(|choice| renderer.prompt_logprobs(choice));
    write(out, &envelope);
}

pub(super) fn opening(renderer: &Renderer, out: &mut Vec<u8>, index: usize, usage: Usage) {
    let form = Form {
        index,
        message: None,
        delta: Some(Delta {
            role: Some(ROLE),
            content: Some(""),
            reasoning: None,
            tool_calls: Vec::new(),
        }),
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    };
    write(out, &renderer.envelope(CHUNK, vec![form], renderer.chunk_usage(usage), None));
}

pub(super) fn chunk(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choice: &Choice<'_>,
    timings: Option<&Timings>,
) {
    let content = Some(choice.text).filter(|text| !text.is_empty());
    let delta = Delta {
        role: None,
        content,
        reasoning: Reasoning::of(choice),
        tool_calls: calls(renderer, choice, true),
    };
    let form = Form { delta: Some(delta), ..form(renderer, choice) };
    let mut envelope =
        renderer.envelope(CHUNK, vec![form], renderer.chunk_usage(choice.usage), timings);
    envelope.prompt_token_ids = renderer.prompt_ids(choice);
    write(out, &envelope);
}
