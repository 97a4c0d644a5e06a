//! One request for text: what its client asked, and how much of the answer that has.
//!
//! Thread: `ctl`. Invariant: a stream begins with the first that there is of it. Not here: the answer's form (`exchange`), what
//! works for it (`legs`).

use super::Way;
use super::asked::Asked;
use crate::front::exchange::Exchange;
use crate::front::openai::{GenerateRequest, KeptKv};
use crate::front::stages::ChoiceTimes;
use crate::front::text::Ticket;
use crate::ids::RequestId;
use crate::net::ConnId;
use std::sync::Arc;
use std::time::Instant;

/// An exchange before and while its legs run.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) conn: ConnId,
    pub(super) request: Box<GenerateRequest>,
    pub(super) id: String,
    pub(super) _ticket: Ticket,
    pub(super) arrived: Instant,
    pub(super) exchange: Option<Exchange>,
    pub(super) begun: bool,
    /// A request of our own: a worker that takes part in a hand-off serves it alone.
    pub(super) trial: bool,
    /// Where its KV is kept for decode.
    pub(super) kept: Option<KeptKv>,
    /// What prefill is asked for it.
    pub(super) asked: Option<Box<Asked>>,
    pub(super) legs: Vec<RequestId>,
    pub(super) timings: Vec<ChoiceTimes>,
    /// Of each choice its first token, and who has told it.
    pub(super) first: Vec<First>,
}

/// The first token of a choice.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum First {
    /// Nobody has told it.
    #[default]
    Due,
    /// Prefill has; decode is to sample it, too.
    Ahead(u32),
    /// Decode has.
    Told,
}

impl Live {
    /// Whether each of its choices has told something, or its client had all of it.
    pub(super) fn have_all_begun(&self) -> bool {
        let Some(exchange) = &self.exchange else { return false };
        let mut choices = self.first.iter().enumerate();
        choices.all(|(choice, first)| *first != First::Due || exchange.has_ended(choice))
    }

    /// Sends what there is of an answer that is a stream, which begins with the first of it.
    pub(super) fn stream(&mut self, out: &[u8], way: &mut Way<'_>) {
        let is_first = !std::mem::replace(&mut self.begun, true);
        let Some(exchange) = self.exchange.as_ref().filter(|exchange| exchange.is_stream()) else {
            if is_first && self.asked.is_some() {
                // Nobody else can tell the router that prefill has done its part.
                way.connections.processing(way.reactor, self.conn);
            }
            return;
        };
        let mut events = Vec::new();
        if is_first {
            way.connections.open_stream(way.reactor, self.conn);
            exchange.open(&mut events);
        }
        events.extend_from_slice(out);
        if !events.is_empty() {
            way.connections.stream(way.reactor, self.conn, &events);
        }
    }
}

/// What a choice is computed from.
#[derive(Clone, Debug)]
pub(super) struct Given {
    /// Ids of its prompt, and of what its client has of the answer.
    pub(super) ids: Arc<[u32]>,
    /// How many of the last of them are of the answer.
    pub(super) resumed: u32,
}
