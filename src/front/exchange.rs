//! One generation request of a client, from its tokens to the bytes of its answer.
//!
//! Owns: the choices, their text so far, stop strings, the answer's form. No I/O: bytes are appended to a
//! buffer of the caller's. Not here: which worker generates what (`service`), HTTP framing.
//!
//! A choice ends at most once: by [`Exchange::push`] finding a stop string, or by [`Exchange::finish`].

use crate::front::http::sse;
use crate::front::openai::render::{
    Choice, DONE, Finish, Position, Renderer, Timings, TokenLogprob, Usage,
};
use crate::front::openai::resume::{End, Mark, Told};
use crate::front::openai::{ApiError, GenerateRequest, Prompts, StopMatcher};
use crate::model::logprobs::Sampled;
use crate::model::tokenizer::{Detokenizer, Tokenizer};
use crate::sched::mailbox::Outcome;
use std::sync::Arc;

/// What the service must know of a request once its prompts are tokenised.
#[derive(Debug)]
pub struct Exchange {
    renderer: Renderer,
    choices: Vec<State>,
    stream: bool,
    logprobs: bool,
    return_token_ids: bool,
    /// Whether events are marked with what they stand for.
    marked: bool,
    open: usize,
    stops: Vec<String>,
    id: String,
}

#[derive(Debug)]
struct State {
    rid: String,
    prompt: Arc<[u32]>,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// Ids after which no text follows and which have none themselves.
    silent: Vec<u32>,
    eos: Vec<u32>,
    /// Since the last chunk, or since the start where the answer is whole or cumulative.
    text: String,
    ids: Vec<u32>,
    positions: Vec<Position>,
    /// Characters of the tokens whose logprobs were in chunks before.
    sent_chars: usize,
    /// How many of `ids` and `positions` earlier events stand for.
    told: usize,
    generated: u32,
    cached: u32,
    /// Whether the stream's client has an event of it.
    opened: bool,
    first: bool,
    finish: Option<Finish>,
}

/// What a choice needs besides the request: its prompt, its name, the ids that end it.
#[derive(Clone, Debug)]
pub struct Prompted {
    /// Ids of the prompt.
    pub ids: Arc<[u32]>,
    /// The prompt's text where it is echoed.
    pub echo: Option<String>,
    /// Name for `/abort_request` and `/generate`.
    pub rid: String,
}

/// What is to be done after a token.
#[derive(Clone, PartialEq, Debug)]
#[must_use]
pub enum Step {
    /// The next one, please.
    Continue,
    /// A stop string is complete: generation of this choice must end, and [`Exchange::stop`] says so.
    Stop(Finish),
}

impl Exchange {
    /// An answer of one choice per prompt and sample, prompt by prompt. `eos` are the model's ends of
    /// sequence.
    pub fn new(
        request: &GenerateRequest,
        renderer: Renderer,
        prompts: &[Prompted],
        eos: &[u32],
        id: String,
    ) -> Exchange {
        let ending = if request.ignore_eos { &[] } else { eos };
        let state = |prompted: &Prompted| State {
            rid: prompted.rid.clone(),
            prompt: prompted.ids.clone(),
            detokenizer: Detokenizer::new(request.skip_special_tokens),
            stop: StopMatcher::new(&request.stop),
            silent: ending.iter().chain(&request.stop_token_ids).copied().collect(),
            eos: ending.to_vec(),
            text: prompted.echo.clone().unwrap_or_default(),
            ids: Vec::new(),
            positions: Vec::new(),
            sent_chars: 0,
            told: 0,
            generated: 0,
            cached: 0,
            opened: false,
            first: true,
            finish: None,
        };
        let choices: Vec<State> = prompts
            .iter()
            .flat_map(|prompt| (0..request.samples).map(move |_| prompt))
            .map(state)
            .collect();
        Exchange {
            renderer,
            open: choices.len(),
            choices,
            stream: request.stream,
            logprobs: request.logprobs.is_some(),
            return_token_ids: request.return_token_ids,
            marked: request.stream && request.resume.is_some(),
            stops: request.stop.clone(),
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

    /// Ids generated for a choice so far.
    pub fn generated(&self, choice: usize) -> u32 {
        self.choices[choice].generated
    }

    /// Whether a choice has ended.
    pub fn has_ended(&self, choice: usize) -> bool {
        self.choices[choice].finish.is_some()
    }

    /// Goes on behind what a choice's client has, of an answer of at most `most` tokens. Appends its end to `out` where
    /// that is all that is missing.
    pub fn resume(
        &mut self,
        choice: usize,
        told: &Told,
        most: usize,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        self.choices[choice].opened = true;
        // All of it was told by somebody else.
        let mut unsaid = Vec::new();
        for sampled in told.sampled() {
            if let Step::Stop(finish) = self.push(choice, &sampled, tokenizer, &mut unsaid) {
                self.end(choice, finish, None, &mut unsaid);
            }
        }
        let outcome = match told.end {
            Some(End::Length) => Some(Outcome::Length),
            Some(End::Stop) => Some(Outcome::Stop),
            None => None,
        };
        if let Some(outcome) = outcome {
            self.finish(choice, outcome, told.cached, None, &mut unsaid);
        }
        if told.ids.len() >= most && !self.has_ended(choice) {
            self.finish(choice, Outcome::Length, 0, None, out);
        }
    }

    /// Takes a choice's next token; appends an event to `out` where one is due.
    pub fn push(
        &mut self,
        choice: usize,
        sampled: &Sampled,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) -> Step {
        let state = &mut self.choices[choice];
        if state.finish.is_some() {
            return Step::Continue;
        }
        state.generated += 1;
        state.ids.push(sampled.token);
        if self.logprobs {
            state.positions.push(position(sampled, tokenizer));
        }
        if state.silent.contains(&sampled.token) {
            // Its text is not shown; Finished follows and says why it ended.
            return Step::Continue;
        }
        let mut piece = String::new();
        state.detokenizer.push(tokenizer, sampled.token, &mut piece);
        if let Some(stop) = state.stop.push(&piece, &mut state.text) {
            let finish = Finish::StopString(self.stops[stop].clone());
            return Step::Stop(finish);
        }
        let due = !state.text.is_empty() || self.logprobs || self.return_token_ids;
        if self.stream && due {
            self.emit(choice, None, out);
        }
        Step::Continue
    }

    /// A stop string has ended a choice, of whose prompt so many tokens were not computed. `timings` as with
    /// [`Exchange::finish`].
    pub fn stop(
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

    /// A choice's generation has ended well. `timings` go out with the last chunk where asked for.
    pub fn finish(
        &mut self,
        choice: usize,
        outcome: Outcome,
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
            Outcome::Stop if state.eos.contains(&last) => Finish::EndOfSequence(last),
            Outcome::Stop => Finish::StopToken(last),
            Outcome::Length | Outcome::HandedOver => Finish::Length(state.generated),
            Outcome::Failed(cause) => Finish::Abort(cause.name().into()),
        };
        let mut rest = String::new();
        state.detokenizer.finish(&mut rest);
        let matched = state.stop.push(&rest, &mut state.text);
        let finish = match matched {
            Some(stop) => Finish::StopString(self.stops[stop].clone()),
            None => {
                state.stop.finish(&mut state.text);
                finish
            }
        };
        self.end(choice, finish, timings, out);
    }

    fn end(&mut self, choice: usize, finish: Finish, timings: Option<&Timings>, out: &mut Vec<u8>) {
        self.choices[choice].finish = Some(finish);
        self.open -= 1;
        if self.stream {
            self.emit(choice, timings, out);
        }
    }

    /// Ends the answer, once all choices have: a stream's usage and `[DONE]`, or the whole body, which has
    /// the timings where a stream has them in a choice's last event.
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

    /// The events that open a stream.
    pub fn open(&self, out: &mut Vec<u8>) {
        let mut place = Vec::new();
        if self.renderer.placing(&mut place) {
            sse::write_event(out, &place);
        }
        for index in (0..self.choices.len()).filter(|&index| !self.choices[index].opened) {
            let mut data = Vec::new();
            if self.renderer.opening(&mut data, index) {
                if self.marked {
                    self.mark(index, Told::default(), out);
                }
                sse::write_event(out, &data);
            }
        }
    }

    /// The event that ends a stream which has begun and cannot go on.
    pub fn abort(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.open = 0;
        sse::write_event(out, &error.to_json());
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        // The samples of one prompt share it; it is counted once.
        let mut counted: Option<&Arc<[u32]>> = None;
        for state in &self.choices {
            usage.completion += state.generated;
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
            text: &state.text,
            token_ids: &state.ids,
            positions: &state.positions,
            text_offset: state.sent_chars,
            prompt_ids: state.first.then_some(&state.prompt[..]),
            finish: state.finish.as_ref(),
            usage: Usage {
                prompt: state.prompt.len() as u32,
                completion: state.generated,
                cached: state.cached,
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
        state.first = false;
        state.told = state.ids.len();
        if !self.renderer.is_cumulative() {
            let sent =
                state.positions.iter().map(|position| position.chosen.text().chars().count());
            state.sent_chars += sent.sum::<usize>();
            state.text.clear();
            state.ids.clear();
            state.positions.clear();
            state.told = 0;
        }
    }

    /// What the next event of a choice stands for.
    fn untold(&self, index: usize) -> Told {
        let state = &self.choices[index];
        let bits = |token: &TokenLogprob| (token.id, token.logprob.to_bits());
        let logprobs = |position: &Position| {
            (position.chosen.logprob.to_bits(), position.top.iter().map(bits).collect::<Vec<_>>())
        };
        // Only what is repeated must be known again.
        let repeated = if self.renderer.is_cumulative() { &state.positions[..] } else { &[] };
        Told {
            ids: state.ids[state.told..].to_vec(),
            logprobs: repeated.iter().skip(state.told).map(logprobs).collect(),
            end: state.finish.as_ref().map(|finish| match finish {
                Finish::Length(_) => End::Length,
                _ => End::Stop,
            }),
            cached: state.cached,
        }
    }

    fn mark(&self, choice: usize, told: Told, out: &mut Vec<u8>) {
        let mark = Mark { created: self.renderer.created(), choice, told };
        sse::write_comment(out, &serde_json::to_vec(&mark).expect("numbers are JSON"));
    }
}

fn position(sampled: &Sampled, tokenizer: &Tokenizer) -> Position {
    let token = |id: u32, logprob: f32| TokenLogprob {
        id,
        bytes: tokenizer.token_bytes(id).to_vec(),
        logprob,
    };
    Position {
        chosen: token(sampled.token, sampled.logprob),
        top: sampled.top.as_slice().iter().map(|&(id, logprob)| token(id, logprob)).collect(),
    }
}

/// The prompts' texts, where they are echoed: as sent, or decoded from ids.
pub fn echoes(prompts: &Prompts, ids: &[Vec<u32>], tokenizer: &Tokenizer) -> Vec<String> {
    match prompts {
        Prompts::Texts(texts) => texts.clone(),
        Prompts::Ids(_) | Prompts::Chat(_) => {
            ids.iter().map(|ids| tokenizer.decode(ids, false)).collect()
        }
    }
}
