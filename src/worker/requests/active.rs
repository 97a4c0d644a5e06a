//! One request for text: what its client asked for, and which part of the answer it has.
//!
//! Thread: `ctl`. Invariant: a stream is opened with the first bytes of its answer, not before. Not
//! here: the form of the answer (`response`), the legs that compute it (`legs`).

use super::Context;
use super::remote_prefill::PendingPrefill;
use crate::api::{GenerateRequest, KeptKv};
use crate::ids::RequestId;
use crate::net::ConnId;
use crate::worker::response::ResponseBuilder;
use crate::worker::stages::ChoiceTimes;
use crate::worker::text::JobGuard;
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
    /// A self-test of this worker. A worker that takes part in hand-offs serves it without a
    /// partner.
    pub(super) is_self_test: bool,
    /// Where its KV is kept for decode.
    pub(super) kept: Option<KeptKv>,
    /// The request to prefill for it.
    pub(super) pending_prefill: Option<Box<PendingPrefill>>,
    pub(super) legs: Vec<RequestId>,
    pub(super) timings: Vec<ChoiceTimes>,
    /// For each choice: its first token, and which leg has sent it.
    pub(super) first_tokens: Vec<FirstTokenState>,
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

impl ActiveRequest {
    /// Whether each choice has sent a token, or had its full answer before this request.
    pub(super) fn have_all_begun(&self) -> bool {
        let Some(exchange) = &self.response else { return false };
        let mut choices = self.first_tokens.iter().enumerate();
        choices
            .all(|(choice, first)| *first != FirstTokenState::Pending || exchange.has_ended(choice))
    }

    /// Sends `out` if the answer is a stream. The first call opens the stream.
    pub(super) fn stream(&mut self, out: &[u8], cx: &mut Context<'_>) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let Some(exchange) = self.response.as_ref().filter(|exchange| exchange.is_stream()) else {
            if is_first && self.pending_prefill.is_some() {
                // The answer is not a stream, so only this tells the router that prefill is done.
                cx.connections.processing(cx.reactor, self.conn);
            }
            return;
        };
        let mut events = Vec::new();
        if is_first {
            cx.connections.open_stream(cx.reactor, self.conn);
            exchange.open(&mut events);
        }
        events.extend_from_slice(out);
        if !events.is_empty() {
            cx.connections.send_chunk(cx.reactor, self.conn, &events);
        }
    }
}

/// The tokens that a choice is computed from.
#[derive(Clone, Debug)]
pub(super) struct ChoiceInput {
    /// Token ids of the prompt, then those of the answer that the client already has.
    pub(super) ids: Arc<[u32]>,
    /// How many ids at the end of `ids` belong to the answer.
    pub(super) resumed: u32,
}
