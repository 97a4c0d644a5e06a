//! Responses of `/v1/completions`.

use super::{
    Choice, Matched, Position, PromptLogprobForms, Renderer, Timings, TokenLogprob, Usage, write,
};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::borrow::Cow;

pub(super) const OBJECT: &str = "text_completion";

#[derive(Serialize)]
struct Form<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Logprobs<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Matched<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobForms<'a>>,
}

#[derive(Serialize)]
struct Logprobs<'a> {
    tokens: Vec<Cow<'a, str>>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Top<'a>>>,
    text_offset: Vec<usize>,
}

/// A map from text to logprob: the chosen token and the best alternatives.
struct Top<'a>(Vec<(Cow<'a, str>, f32)>);

impl Serialize for Top<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (i, (name, logprob)) in self.0.iter().enumerate() {
            // Tokens that are parts of a character can have equal texts; the first one wins.
            if self.0[..i].iter().all(|(earlier, _)| earlier != name) {
                map.serialize_entry(name, logprob)?;
            }
        }
        map.end()
    }
}

fn logprobs<'a>(renderer: &Renderer, choice: &Choice<'a>, alternatives: usize) -> Logprobs<'a> {
    let mut offset = choice.text_offset;
    let mut form = Logprobs {
        tokens: vec![],
        token_logprobs: vec![],
        top_logprobs: vec![],
        text_offset: vec![],
    };
    let mut add = |token: &'a TokenLogprob, logprob: Option<f32>, top: &'a [TokenLogprob]| {
        form.text_offset.push(offset);
        offset += token.text().chars().count();
        form.tokens.push(renderer.token_name(token));
        form.token_logprobs.push(logprob);
        let others = top.iter().take(alternatives).filter(|other| other.id != token.id);
        let named = |token| (renderer.token_name(token), token.logprob);
        let all = || Top(std::iter::once(token).chain(others).map(named).collect());
        form.top_logprobs.push(logprob.map(|_| all()));
    };
    for at in choice.prompt.iter().filter(|_| renderer.echo) {
        add(&at.token, at.logprob(), &at.top);
    }
    for Position { chosen, top } in choice.positions {
        add(chosen, Some(chosen.logprob), top);
    }
    form
}

fn form<'a>(renderer: &Renderer, choice: &Choice<'a>) -> Form<'a> {
    Form {
        index: choice.index,
        text: choice.text,
        logprobs: renderer.logprobs.map(|count| logprobs(renderer, choice, count)),
        finish_reason: choice.finish.map(|finish| finish.reason()),
        stop_reason: choice.finish.and_then(Matched::of),
        token_ids: renderer.token_ids(choice),
        prompt_token_ids: renderer.prompt_ids(choice),
        prompt_logprobs: renderer.prompt_logprobs(choice),
    }
}

pub(super) fn body(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choices: &[Choice<'_>],
    usage: Usage,
    timings: Option<&Timings>,
) {
    let forms = choices.iter().map(|choice| form(renderer, choice)).collect();
    write(out, &renderer.envelope(OBJECT, forms, Some(Some(usage)), timings));
}

pub(super) fn chunk(
    renderer: &Renderer,
    out: &mut Vec<u8>,
    choice: &Choice<'_>,
    timings: Option<&Timings>,
) {
    let forms = vec![form(renderer, choice)];
    write(out, &renderer.envelope(OBJECT, forms, renderer.chunk_usage(choice.usage), timings));
}
