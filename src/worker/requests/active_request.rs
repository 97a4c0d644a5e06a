//! One request for text: the request of its client, and the part of the answer that the client has.
//!
//! Thread: `ctl`. Invariant: a stream opens together with the first bytes of its answer, not
//! earlier. Not here: the form of the answer (`response`), the legs that compute it (`legs`).

use super::Context;
use super::remote_prefill::PendingPrefill;
use crate::api::{GenerateRequest, KeptKv};
use crate::ids::RequestId;
use crate::model::sampler::TokenRules;
use crate::net::ConnId;
use crate::sched::messages::RequestEvent;
use crate::stdx::budget::BudgetShare;
use crate::worker::response::ResponseBuilder;
use crate::worker::stages::ChoiceTimes;
use crate::worker::text::{JobGuard, PreparedGrammar};
use std::sync::Arc;
use std::time::Instant;

/// A request before and while its legs run.
#[derive(Debug)]
pub(super) struct ActiveRequest {
    pub(super) conn: ConnId,
    pub(super) request: Box<GenerateRequest>,
    pub(super) id: String,
    pub(super) _ticket: JobGuard,
    pub(super) arrived: Instant,
    pub(super) response: Option<ResponseBuilder>,
    pub(super) begun: bool,
    /// Whether it is a self-test of this worker. A worker of hand-offs serves a self-test without a
    /// partner.
    pub(super) is_self_test: bool,
    /// Place of the KV that this worker keeps for decode.
    pub(super) kept: Option<KeptKv>,
    /// The request to prefill that it needs.
    pub(super) pending_prefill: Option<Box<PendingPrefill>>,
    /// By choice: its grammar, until the leg that generates takes it. Empty without grammars.
    pub(super) grammars: Vec<Option<PreparedGrammar>>,
    /// Rules about tokens, if the prompts are tokenised.
    pub(super) rules: Option<Arc<TokenRules>>,
    pub(super) legs: Vec<RequestId>,
    pub(super) timings: Vec<ChoiceTimes>,
    /// For each choice: its first token, and which leg has sent it.
    pub(super) first_tokens: Vec<FirstTokenState>,
    /// For each choice: the logprobs of its prompt.
    pub(super) prompt_logprobs: Vec<PromptLogprobsState>,
    /// Memory for the logprobs of its prompts.
    pub(super) memory: Vec<BudgetShare>,
}

/// The first token of a choice and the leg that sent it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum FirstTokenState {
    /// No leg has sent it.
    #[default]
    Pending,
    /// The prefill leg has sent this token; the decode leg must sample the same one.
    SentByPrefill(u32),
    /// The decode leg has sent it.
    SentByDecode,
}

/// The logprobs of the prompt of one choice.
#[derive(Debug, Default)]
pub(super) enum PromptLogprobsState {
    /// Nothing waits for them: they are not wanted, this worker computes them, or they are in the
    /// answer.
    #[default]
    Settled,
    /// Another worker computes them. The events of the leg that generates wait.
    Awaited(Vec<RequestEvent>),
}

impl PromptLogprobsState {
    /// Whether events wait.
    pub(super) fn holds_events(&self) -> bool {
        matches!(self, PromptLogprobsState::Awaited(held) if !held.is_empty())
    }
}

impl ActiveRequest {
    /// The ids that end a choice.
    pub(super) fn stop_tokens(&self, eos: &[u32]) -> Vec<u32> {
        let ending = if self.request.ignore_eos { &[][..] } else { eos };
        ending.iter().chain(&self.request.stop_token_ids).copied().collect()
    }

    /// Takes the rules about tokens, and adds the shortest length.
    pub(super) fn set_rules(&mut self, rules: TokenRules, eos: &[u32]) {
        let min_tokens = self.request.min_tokens;
        let ends = if min_tokens > 0 { self.stop_tokens(eos) } else { Vec::new() };
        let rules = TokenRules { min_tokens, ends, ..rules };
        self.rules = (!rules.is_empty()).then(|| Arc::new(rules));
    }

    /// Whether each choice has sent a token, or its client had the full answer before this request.
    pub(super) fn have_all_begun(&self) -> bool {
        let Some(response) = &self.response else { return false };
        let mut choices = self.first_tokens.iter().enumerate();
        choices
            .all(|(choice, first)| *first != FirstTokenState::Pending || response.has_ended(choice))
    }

    /// Counts the tokens so far for the limits of the client's API key.
    pub(super) fn count_tokens(&self, cx: &mut Context<'_>) {
        let limits = &mut cx.connections.key_limits;
        if let Some(response) = self.response.as_ref().filter(|_| limits.is_charged(self.conn)) {
            limits.set_used(self.conn, response.tokens(), cx.now);
        }
    }

    /// Sends `out` if the answer is a stream. The first call opens the stream.
    pub(super) fn stream(&mut self, out: &[u8], cx: &mut Context<'_>) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let Some(response) = self.response.as_ref().filter(|response| response.is_stream()) else {
            if is_first && self.pending_prefill.is_some() {
                // The answer is not a stream, so this is the router's only sign that prefill is
                // done.
                cx.connections.processing(cx.reactor, self.conn);
            }
            return;
        };
        let mut events = Vec::new();
        if is_first {
            cx.connections.open_stream(cx.reactor, self.conn);
            response.open(&mut events);
        }
        events.extend_from_slice(out);
        if !events.is_empty() {
            cx.connections.send_chunk(cx.reactor, self.conn, &events);
        }
    }
}

/// The input tokens of a choice.
#[derive(Clone, Debug)]
pub(super) struct ChoiceInput {
    /// Token ids of the prompt, then those of the answer that the client already has.
    pub(super) ids: Arc<[u32]>,
    /// Number of ids at the end of `ids` that belong to the answer.
    pub(super) resumed: u32,
}
