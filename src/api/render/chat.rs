//! Responses of `/v1/chat/completions`.

use super::{Choice, Matched, Position, Renderer, Timings, TokenLogprob, Usage, write};
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
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
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
    fn of(token: &'a TokenLogprob) -> Self {
        Self { token: token.text(), logprob: token.logprob, bytes: &token.bytes }
    }
}

fn logprobs<'a>(positions: &'a [Position], alternatives: usize) -> Logprobs<'a> {
    let content = positions.iter().map(|Position { chosen, top }| Content {
        chosen: Token::of(chosen),
        top_logprobs: top.iter().take(alternatives).map(Token::of).collect(),
    });
    Logprobs { content: content.collect(), refusal: None }
}

/// The parts of a choice that message and delta have in common.
fn form<'a>(renderer: &Renderer, choice: &Choice<'a>) -> Form<'a> {
    Form {
        index: choice.index,
        message: None,
        delta: None,
        logprobs: renderer.logprobs.map(|count| logprobs(choice.positions, count)),
        finish_reason: choice.finish.map(|finish| finish.reason()),
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
        message: Some(Message { role: ROLE, content: choice.text, refusal: None }),
        ..form(renderer, choice)
    });
    let mut envelope = renderer.envelope(OBJECT, forms.collect(), Some(Some(usage)), timings);
    envelope.prompt_token_ids = choices.first().and_then(|choice| renderer.prompt_ids(choice));
    write(out, &envelope);
}

pub(super) fn opening(renderer: &Renderer, out: &mut Vec<u8>, index: usize) {
    let form = Form {
        index,
        message: None,
        delta: Some(Delta { role: Some(ROLE), content: Some("") }),
        logprobs: None,
        finish_reason: None,
        stop_reason: None,
        token_ids: None,
    };
    write(out, &renderer.envelope(CHUNK, vec![form], renderer.no_usage(), None));
}

pub(super) fn chunk(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choice: &Choice<'_>,
    timings: Option<&Timings>,
) {
    let content = Some(choice.text).filter(|text| !text.is_empty());
    let form = Form { delta: Some(Delta { role: None, content }), ..form(renderer, choice) };
    let mut envelope = renderer.envelope(CHUNK, vec![form], renderer.no_usage(), timings);
    envelope.prompt_token_ids = renderer.prompt_ids(choice);
    write(out, &envelope);
}
