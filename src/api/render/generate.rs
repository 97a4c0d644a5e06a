//! Responses of SGLang's `/generate`.

use super::{
    Choice, Finish, KeptKv, Matched, PromptPosition, Renderer, Timings, TokenLogprob, write,
};
use serde::Serialize;
use std::borrow::Cow;

#[derive(Serialize)]
struct Form<'a> {
    text: &'a str,
    output_ids: &'a [u32],
    meta_info: Meta<'a>,
    /// Identifies the choice in a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<&'a Timings>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    finish_reason: Option<Reason<'a>>,
    prompt_tokens: u32,
    completion_tokens: u32,
    cached_tokens: u32,
    #[serde(flatten)]
    logprobs: Option<Logprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a KeptKv>,
}

#[derive(Serialize)]
struct Reason<'a> {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    matched: Option<Matched<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'a str>,
}

impl<'a> Reason<'a> {
    fn of(finish: &'a Finish) -> Self {
        let mut reason = Self {
            r#type: finish.reason(),
            matched: Matched::of(finish),
            length: None,
            message: None,
        };
        match finish {
            Finish::Length(count) => reason.length = Some(*count),
            Finish::EndOfSequence(id) => reason.matched = Some(Matched::Id(*id)),
            Finish::Abort(message) => reason.message = Some(message),
            Finish::StopToken(_) | Finish::StopString(_) => {}
        }
        reason
    }
}

#[derive(Serialize)]
struct Logprobs<'a> {
    /// Always present: SGLang's router prepends prefill's entries.
    input_token_logprobs: Vec<Triple<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<Vec<Option<Vec<Triple<'a>>>>>,
    output_token_logprobs: Vec<Triple<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<Vec<Vec<Triple<'a>>>>,
}

/// Logprob (null for the first token of the prompt), token id, and text or null.
type Triple<'a> = (Option<f32>, u32, Option<Cow<'a, str>>);

fn logprobs<'a>(renderer: &Renderer, choice: &Choice<'a>) -> Option<Logprobs<'a>> {
    let alternatives = renderer.logprobs?;
    let with = |token: &'a TokenLogprob, logprob| {
        (logprob, token.id, renderer.logprob_text.then(|| token.text()))
    };
    let triple = |token: &'a TokenLogprob| with(token, Some(token.logprob));
    let (positions, prompt) = (choice.positions, choice.prompt);
    let triples =
        |top: &'a [TokenLogprob]| -> Vec<_> { top.iter().take(alternatives).map(triple).collect() };
    let of_input = |at: &'a PromptPosition| at.logprob().map(|_| triples(&at.top));
    Some(Logprobs {
        input_token_logprobs: prompt.iter().map(|at| with(&at.token, at.logprob())).collect(),
        input_top_logprobs: (alternatives > 0 && !prompt.is_empty())
            .then(|| prompt.iter().map(of_input).collect()),
        output_token_logprobs: positions.iter().map(|at| triple(&at.chosen)).collect(),
        output_top_logprobs: (alternatives > 0)
            .then(|| positions.iter().map(|at| triples(&at.top)).collect()),
    })
}

fn form<'a>(renderer: &'a Renderer, choice: &Choice<'a>, timings: Option<&'a Timings>) -> Form<'a> {
    Form {
        text: choice.text,
        output_ids: choice.token_ids,
        meta_info: Meta {
            id: choice.rid,
            finish_reason: choice.finish.map(Reason::of),
            prompt_tokens: choice.usage.prompt,
            completion_tokens: choice.usage.completion,
            cached_tokens: choice.usage.cached,
            logprobs: logprobs(renderer, choice),
            kv_transfer_params: renderer.kept.as_ref(),
        },
        index: None,
        timings,
    }
}

pub(super) fn body(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choices: &[Choice<'_>],
    timings: Option<&Timings>,
) {
    let forms: Vec<_> = choices.iter().map(|choice| form(renderer, choice, timings)).collect();
    match forms.as_slice() {
        [one] if !renderer.batch => write(out, one),
        all => write(out, &all),
    }
}

pub(super) fn chunk(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choice: &Choice<'_>,
    timings: Option<&Timings>,
) {
    let index = renderer.batch.then_some(choice.index);
    write(out, &Form { index, ..form(renderer, choice, timings) });
}
