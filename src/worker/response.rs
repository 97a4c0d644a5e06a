//! The answer to one generation request: turns tokens into the bytes for the client.
//!
//! Owns: the choices, their text so far, stop strings, the form of the answer. It appends bytes to
//! a buffer of the caller. Thread: `ctl`. Invariants: a choice ends at most once, by a stop string
//! in [`ResponseBuilder::push_token`] or by [`ResponseBuilder::finish_choice`]. Not here: the
//! worker that generates a choice (`requests`), sockets.

use crate::api::render::{
    Choice, DONE, Finish, Position, PromptPosition, Renderer, Timings, TokenLogprob, Usage,
};
use crate::api::resume::{ChoiceEnd, ChoiceProgress, Mark};
use crate::api::{ApiError, GenerateRequest, Prompts};
use crate::http::sse;
use crate::model::answer::{AnswerParts, AnswerReader, AnswerRules, ReasoningStart};
use crate::model::logprobs::{PromptLogprobs, Sampled};
use crate::model::tokenizer::{Detokenizer, Tokenizer};
use crate::sched::messages::FinishReason;
use crate::stdx::text_matcher::{TextMatch, TextMatcher};
use std::sync::Arc;

/// One answer. It exists from the time when the prompts are tokenised.
#[derive(Debug)]
pub struct ResponseBuilder {
    renderer: Renderer,
    choices: Vec<ChoiceState>,
    stream: bool,
    logprobs: bool,
    echo: bool,
    /// Whether the answer is only the echo of the prompt.
    only_echo: bool,
    return_token_ids: bool,
    /// Whether each event has a mark with the progress of its choice, for a failover.
    marked: bool,
    open: usize,
    stops: Vec<String>,
    /// Whether a stop string is a part of the answer.
    includes_stop: bool,
    /// Tokens of a choice before a stop string can end it.
    min_tokens: u32,
    id: String,
}

#[derive(Debug)]
struct ChoiceState {
    rid: String,
    prompt: Arc<[u32]>,
    detokenizer: Detokenizer,
    stop: TextMatcher,
    /// Ids at the end that have no text.
    silent: Vec<u32>,
    eos: Vec<u32>,
    /// Parts since the last chunk, or since the start if the answer is complete or cumulative.
    parts: AnswerParts,
    /// Separates reasoning and tool calls from content; `None`: all text is content.
    reader: Option<AnswerReader>,
    reasoning_tokens: u32,
    ids: Vec<u32>,
    positions: Vec<Position>,
    /// The prompt's tokens, if their logprobs are in the answer.
    prompt_positions: Vec<PromptPosition>,
    /// Number of characters with logprobs in earlier chunks.
    sent_chars: usize,
    /// Number of `ids` and `positions` in earlier events.
    marked: usize,
    generated: u32,
    cached: u32,
    /// Whether the client of the stream has an event of this choice.
    opened: bool,
    first: bool,
    finish: Option<Finish>,
}

/// The data of a choice that is not in the request: ids of its prompt, echo, name.
#[derive(Clone, Debug)]
pub struct PreparedPrompt {
    /// Token ids of the prompt.
    pub ids: Arc<[u32]>,
    /// Text of the prompt if it is echoed.
    pub echo: Option<String>,
    /// Name for `/abort_request` and `/generate`.
    pub rid: String,
    /// Where the prompt left the reasoning.
    pub reasoning: ReasoningStart,
}

/// The next action of the caller after a token.
#[derive(Clone, PartialEq, Debug)]
#[must_use]
pub enum PushOutcome {
    /// Continue with the next token.
    Continue,
    /// A stop string is complete. The caller must stop the generation of this choice and call
    /// [`ResponseBuilder::stop_choice`].
    Stop(Finish),
}

impl ResponseBuilder {
    /// An answer with one choice per prompt and sample, ordered by prompt. `rules` say how
    /// reasoning and tool calls are found; without rules, all text is content. `eos` are the
    /// model's end-of-sequence tokens.
    pub fn new(
        request: &GenerateRequest,
        renderer: Renderer,
        prompts: &[PreparedPrompt],
        rules: Option<&AnswerRules>,
        eos: &[u32],
        id: String,
    ) -> ResponseBuilder {
        let ending = if request.ignore_eos { &[] } else { eos };
        let state = |prompted: &PreparedPrompt| ChoiceState {
            rid: prompted.rid.clone(),
            prompt: prompted.ids.clone(),
            detokenizer: Detokenizer::new(request.skip_special_tokens)
                .with_tags(rules.map(|rules| rules.tags.clone())),
            stop: TextMatcher::new(&request.stop),
            silent: match request.includes_stop {
                true => ending.to_vec(),
                false => ending.iter().chain(&request.stop_token_ids).copied().collect(),
            },
            eos: ending.to_vec(),
            parts: AnswerParts {
                content: prompted.echo.clone().unwrap_or_default(),
                ..AnswerParts::default()
            },
            reader: rules.map(|rules| AnswerReader::new(rules, prompted.reasoning)),
            reasoning_tokens: 0,
            ids: Vec::new(),
            positions: Vec::new(),
            prompt_positions: Vec::new(),
            sent_chars: 0,
            marked: 0,
            generated: 0,
            cached: 0,
            opened: false,
            first: true,
            finish: None,
        };
        let choices: Vec<ChoiceState> = prompts
            .iter()
            .flat_map(|prompt| (0..request.samples).map(move |_| prompt))
            .map(state)
            .collect();
        ResponseBuilder {
            renderer,
            open: choices.len(),
            choices,
            stream: request.stream,
            logprobs: request.logprobs.is_some(),
            echo: request.echo,
            only_echo: request.max_tokens == Some(0),
            return_token_ids: request.return_token_ids,
            marked: request.stream && request.resume.is_some(),
            stops: request.stop.clone(),
            includes_stop: request.includes_stop,
            min_tokens: request.min_tokens,
            id,
        }
    }

    /// The request's id, for the log.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether the answer is a stream of events.
    pub fn is_stream(&self) -> bool {
        self.stream
    }

    /// Whether all choices have ended.
    pub fn is_over(&self) -> bool {
        self.open == 0
    }

    /// Number of tokens of the prompts and of the answer so far.
    pub fn tokens(&self) -> u64 {
        let usage = self.usage();
        u64::from(usage.prompt) + u64::from(usage.completion)
    }

    /// Number of ids generated for a choice so far.
    pub fn generated(&self, choice: usize) -> u32 {
        self.choices[choice].generated
    }

    /// Whether a choice has ended.
    pub fn has_ended(&self, choice: usize) -> bool {
        self.choices[choice].finish.is_some()
    }

    /// The ids of a choice's prompt.
    pub fn prompt(&self, choice: usize) -> &[u32] {
        &self.choices[choice].prompt
    }

    /// Takes the logprobs of the prompt of a choice, before its first token. The token at `start`
    /// is the first in the answer; its logprob is null.
    pub fn set_prompt_logprobs(
        &mut self,
        choice: usize,
        start: u32,
        logprobs: &PromptLogprobs,
        tokenizer: &Tokenizer,
    ) {
        let ChoiceState { prompt, prompt_positions, .. } = &mut self.choices[choice];
        let unscored = prompt.get(start as usize).map(|&id| PromptPosition {
            token: token_logprob(id, f32::NAN, tokenizer),
            rank: 0,
            top: Vec::new(),
        });
        prompt_positions.extend(unscored);
        prompt_positions.extend(logprobs.iter().map(|(at, scored)| {
            let others = scored.top.as_slice().iter();
            PromptPosition {
                token: token_logprob(prompt[at as usize], scored.logprob, tokenizer),
                rank: scored.rank,
                top: others.map(|&(id, logprob)| token_logprob(id, logprob, tokenizer)).collect(),
            }
        }));
    }

    /// Continues a choice after the tokens that its client has, up to `most` tokens. If only the
    /// end of the answer is missing, appends it to `out`.
    pub fn resume_choice(
        &mut self,
        choice: usize,
        progress: &ChoiceProgress,
        most: usize,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        let state = &mut self.choices[choice];
        state.opened = true;
        if self.echo && self.logprobs && !progress.ids.is_empty() {
            // The client has the logprobs of the prompt.
            let texts = state.prompt.iter().map(|&id| token_logprob(id, 0.0, tokenizer));
            state.sent_chars = texts.map(|token| token.text().chars().count()).sum();
        }
        // The client has these events already, so they are not sent.
        let mut unsaid = Vec::new();
        for sampled in progress.sampled() {
            if let PushOutcome::Stop(finish) =
                self.push_token(choice, &sampled, tokenizer, &mut unsaid)
            {
                self.end(choice, finish, None, &mut unsaid);
            }
        }
        let outcome = match progress.end {
            Some(ChoiceEnd::Length) => Some(FinishReason::Length),
            Some(ChoiceEnd::Stop) => Some(FinishReason::Stop),
            None => None,
        };
        if let Some(outcome) = outcome {
            self.finish_choice(choice, outcome, progress.cached, None, &mut unsaid);
        }
        if progress.ids.len() >= most && !self.has_ended(choice) {
            self.finish_choice(choice, FinishReason::Length, 0, None, out);
        }
    }

    /// Takes the next token of a choice. Appends an event to `out` if one is due.
    pub fn push_token(
        &mut self,
        choice: usize,
        sampled: &Sampled,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) -> PushOutcome {
        let state = &mut self.choices[choice];
        if state.finish.is_some() || self.only_echo {
            return PushOutcome::Continue;
        }
        state.generated += 1;
        state.ids.push(sampled.token);
        if self.logprobs {
            state.positions.push(position(sampled, tokenizer));
        }
        if state.silent.contains(&sampled.token) {
            // A stop token has no text. `RequestEvent::Finished` follows and says why it ended.
            return PushOutcome::Continue;
        }
        let mut piece = String::new();
        state.detokenizer.push(tokenizer, sampled.token, &mut piece);
        let stop = match state.generated <= self.min_tokens {
            true => {
                state.read(&piece);
                None
            }
            false => state.push_text(&piece),
        };
        state.reasoning_tokens +=
            u32::from(state.reader.as_ref().is_some_and(|r| r.is_reasoning()));
        if let Some(stop) = stop {
            if self.includes_stop {
                state.read(&self.stops[stop.index]);
            }
            let finish = Finish::StopString(self.stops[stop.index].clone());
            return PushOutcome::Stop(finish);
        }
        let due = !state.parts.is_empty() || self.logprobs || self.return_token_ids;
        if self.stream && due {
            self.emit(choice, None, out);
        }
        PushOutcome::Continue
    }

    /// Ends a choice at a stop string. `cached` is the number of prompt tokens from the prefix
    /// cache. `timings`: see [`ResponseBuilder::finish_choice`].
    pub fn stop_choice(
        &mut self,
        choice: usize,
        finish: Finish,
        cached: u32,
        timings: Option<&Timings>,
        out: &mut Vec<u8>,
    ) {
        self.choices[choice].cached = cached;
        self.end(choice, finish, timings, out);
    }

    /// Ends a choice after its last token. `timings`, if requested, go into its last chunk.
    pub fn finish_choice(
        &mut self,
        choice: usize,
        outcome: FinishReason,
        cached: u32,
        timings: Option<&Timings>,
        out: &mut Vec<u8>,
    ) {
        let state = &mut self.choices[choice];
        state.cached = cached;
        if state.finish.is_some() {
            return;
        }
        let last = state.ids.last().copied().unwrap_or(0);
        let finish = match outcome {
            _ if self.only_echo => Finish::Length(0),
            FinishReason::Stop if state.eos.contains(&last) => Finish::EndOfSequence(last),
            FinishReason::Stop => Finish::StopToken(last),
            FinishReason::Length | FinishReason::HandedOver => Finish::Length(state.generated),
            FinishReason::Failed(cause) => Finish::Abort(cause.name().into()),
        };
        let mut rest = String::new();
        state.detokenizer.finish(&mut rest);
        let matched = state.push_text(&rest);
        let finish = match matched {
            Some(stop) => {
                if self.includes_stop {
                    state.read(&self.stops[stop.index]);
                }
                Finish::StopString(self.stops[stop.index].clone())
            }
            None => {
                let mut held = String::new();
                state.stop.finish(&mut held);
                state.read(&held);
                finish
            }
        };
        self.end(choice, finish, timings, out);
    }

    fn end(&mut self, choice: usize, finish: Finish, timings: Option<&Timings>, out: &mut Vec<u8>) {
        let state = &mut self.choices[choice];
        if let Some(reader) = &mut state.reader {
            reader.finish(&mut state.parts);
        }
        state.finish = Some(finish);
        self.open -= 1;
        if self.stream {
            self.emit(choice, timings, out);
        }
    }

    /// Ends the answer after all its choices. Appends a stream's usage and `[DONE]`, or the
    /// complete body. Only the body carries `timings`; a stream has them in the last event of each
    /// choice.
    pub fn close(&self, timings: Option<&Timings>, out: &mut Vec<u8>) {
        if !self.stream {
            let choices: Vec<_> = (0..self.choices.len()).map(|index| self.view(index)).collect();
            return self.renderer.body(out, &choices, self.usage(), timings);
        }
        let mut data = Vec::new();
        if self.renderer.closing(&mut data, self.usage()) {
            sse::write_event(out, &data);
        }
        sse::write_event(out, DONE);
    }

    /// Appends the events that open a stream.
    pub fn open(&self, out: &mut Vec<u8>) {
        let mut place = Vec::new();
        if self.renderer.placing(&mut place) {
            sse::write_event(out, &place);
        }
        for index in (0..self.choices.len()).filter(|&index| !self.choices[index].opened) {
            let mut data = Vec::new();
            // The tokens so far belong to later events.
            let usage = Usage { completion: 0, reasoning: 0, ..self.view(index).usage };
            if self.renderer.opening(&mut data, index, usage) {
                if self.marked {
                    self.mark(index, ChoiceProgress::default(), out);
                }
                sse::write_event(out, &data);
            }
        }
    }

    /// Appends the error event that ends a stream which has begun.
    pub fn abort(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.open = 0;
        sse::write_event(out, &error.to_json());
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        // Samples of one prompt share it, so its tokens are counted once.
        let mut counted: Option<&Arc<[u32]>> = None;
        for state in &self.choices {
            usage.completion += state.generated;
            usage.reasoning += state.reasoning_tokens;
            if counted.is_none_or(|prompt| !Arc::ptr_eq(prompt, &state.prompt)) {
                usage.prompt += state.prompt.len() as u32;
                usage.cached += state.cached;
                counted = Some(&state.prompt);
            }
        }
        usage
    }

    fn view(&self, index: usize) -> Choice<'_> {
        let state = &self.choices[index];
        Choice {
            index,
            rid: &state.rid,
            text: &state.parts.content,
            reasoning: &state.parts.reasoning,
            calls: &state.parts.calls,
            has_call: state.reader.as_ref().is_some_and(AnswerReader::has_call),
            token_ids: &state.ids,
            positions: &state.positions,
            // A cumulative stream repeats them once, in its last event.
            prompt: match state.first || self.renderer.is_cumulative() && state.finish.is_some() {
                true => &state.prompt_positions,
                false => &[],
            },
            text_offset: state.sent_chars,
            prompt_ids: state.first.then_some(&state.prompt[..]),
            finish: state.finish.as_ref(),
            usage: Usage {
                prompt: state.prompt.len() as u32,
                completion: state.generated,
                cached: state.cached,
                reasoning: state.reasoning_tokens,
            },
        }
    }

    fn emit(&mut self, index: usize, timings: Option<&Timings>, out: &mut Vec<u8>) {
        let mut data = Vec::new();
        self.renderer.chunk(&mut data, &self.view(index), timings);
        if self.marked {
            self.mark(index, self.untold(index), out);
        }
        sse::write_event(out, &data);
        let state = &mut self.choices[index];
        let was_first = std::mem::replace(&mut state.first, false);
        state.marked = state.ids.len();
        if !self.renderer.is_cumulative() {
            let length = |token: &TokenLogprob| token.text().chars().count();
            let echoed = state.prompt_positions.iter().filter(|_| was_first && self.echo);
            state.sent_chars += echoed.map(|at| length(&at.token)).sum::<usize>();
            state.sent_chars += state.positions.iter().map(|at| length(&at.chosen)).sum::<usize>();
            state.parts.clear();
            state.ids.clear();
            state.positions.clear();
            state.marked = 0;
        }
    }

    /// The part of a choice that the next event adds.
    fn untold(&self, index: usize) -> ChoiceProgress {
        let state = &self.choices[index];
        let bits = |token: &TokenLogprob| (token.id, token.logprob.to_bits());
        let logprobs = |position: &Position| {
            (position.chosen.logprob.to_bits(), position.top.iter().map(bits).collect::<Vec<_>>())
        };
        // Only cumulative answers repeat logprobs, so only they need them after a failover.
        let repeated = if self.renderer.is_cumulative() { &state.positions[..] } else { &[] };
        ChoiceProgress {
            ids: state.ids[state.marked..].to_vec(),
            logprobs: repeated.iter().skip(state.marked).map(logprobs).collect(),
            end: state.finish.as_ref().map(|finish| match finish {
                Finish::Length(_) => ChoiceEnd::Length,
                _ => ChoiceEnd::Stop,
            }),
            cached: state.cached,
        }
    }

    fn mark(&self, choice: usize, progress: ChoiceProgress, out: &mut Vec<u8>) {
        let ChoiceState { first, prompt, .. } = &self.choices[choice];
        let before = choice.checked_sub(1).map(|before| &self.choices[before].prompt);
        let is_told = *first && before.is_none_or(|before| !Arc::ptr_eq(before, prompt));
        let prompt = if is_told { prompt.len() as u32 } else { 0 };
        let mark = Mark { created: self.renderer.created(), choice, prompt, progress };
        sse::write_comment(out, &serde_json::to_vec(&mark).expect("numbers are JSON"));
    }
}

impl ChoiceState {
    /// Takes text. Returns the stop string that it completes.
    fn push_text(&mut self, piece: &str) -> Option<TextMatch> {
        if self.reader.is_none() {
            return self.stop.push(piece, &mut self.parts.content);
        }
        let mut passed = String::new();
        let found = self.stop.push(piece, &mut passed);
        self.read(&passed);
        found
    }

    /// Takes text that has no stop string.
    fn read(&mut self, text: &str) {
        match &mut self.reader {
            Some(reader) => reader.push(text, &mut self.parts),
            None => self.parts.content.push_str(text),
        }
    }
}

fn position(sampled: &Sampled, tokenizer: &Tokenizer) -> Position {
    let others = sampled.top.as_slice().iter();
    Position {
        chosen: token_logprob(sampled.token, sampled.logprob, tokenizer),
        top: others.map(|&(id, logprob)| token_logprob(id, logprob, tokenizer)).collect(),
    }
}

fn token_logprob(id: u32, logprob: f32, tokenizer: &Tokenizer) -> TokenLogprob {
    TokenLogprob { id, bytes: tokenizer.token_bytes(id).to_vec(), logprob }
}

/// The text of each prompt for `echo`: as sent, or decoded from ids.
pub fn echoes(prompts: &Prompts, ids: &[Vec<u32>], tokenizer: &Tokenizer) -> Vec<String> {
    match prompts {
        Prompts::Texts(texts) => texts.clone(),
        Prompts::Ids(_) | Prompts::Chat(_) => {
            ids.iter().map(|ids| tokenizer.decode(ids, false)).collect()
        }
    }
}
