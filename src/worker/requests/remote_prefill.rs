//! Requests of a decode worker that asks prefill for their KV itself.
//!
//! ```text
//! tokenised: slots taken, prefill asked ──place of the KV──▶ legs start
//!                                       ──failure──▶ error that names prefill's field
//! ```
//! Thread: `ctl`. Invariants: prefill is asked only if the request has slots here; KV that is kept
//! for a request that ends before its claim is given up. Not here: the decision after each reply
//! (`routing::remote_prefill`), the connection to prefill (`worker::prefill_client`).

use super::placement::Placement;
use super::{ActiveRequest, ChoiceInput, Context, LegKind, RequestTable, error_of};
use crate::api::bootstrap::SOURCE_PARAM;
use crate::api::info::AbortRequest;
use crate::api::{ApiError, KvTransferParams};
use crate::cause::Cause;
use crate::http::response::Response;
use crate::ids::Room;
use crate::limits::{ASKED_WORD_TIME, ROUTER_ABORT_TIME, ROUTER_GRACE, ROUTER_LOST_PREFILL_TIME};
use crate::routing::remote_prefill::{DecodeProgress, PrefillAction, RemotePrefill as Core, Reply};
use crate::sched::request::EngineRequest;
use crate::transfer::manager::rooms::Slot;
use crate::worker::prefill_client::{PrefillRefusal, PrefillReply, PrefillRequest};
use std::sync::Arc;
use std::time::Instant;

/// Key of a message that belongs to no request; its reply is ignored.
const NOBODY: u64 = u64::MAX;

/// The request to prefill that belongs to one request here.
#[derive(Debug)]
pub(super) struct PendingPrefill {
    ask: PrefillRequest,
    /// Choices that have slots here and no room yet.
    waiting: Vec<(usize, Box<EngineRequest>)>,
    core: Core,
}

impl PendingPrefill {
    pub(super) fn new(ask: PrefillRequest) -> PendingPrefill {
        PendingPrefill { ask, waiting: Vec::new(), core: Core::default() }
    }
}

impl RequestTable {
    /// The prompts of these choices are known. Takes slots for them and asks prefill.
    pub(super) fn ask_prefill(
        &mut self,
        id: u64,
        open: Vec<(usize, ChoiceInput)>,
        samples: usize,
        cx: &mut Context<'_>,
    ) {
        let Placement::Decode { worker, .. } = self.config.placement else { return };
        for (choice, given) in open {
            match self.build_request(
                id,
                choice % samples,
                worker,
                Room(0),
                &given,
                None,
                cx.handoff,
            ) {
                Ok(request) => {
                    let asked =
                        self.active.get_mut(&id).and_then(|live| live.pending_prefill.as_mut());
                    if let Some(asked) = asked {
                        asked.waiting.push((choice, request));
                    }
                }
                Err(error) => {
                    let cause =
                        if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                    return self.fail_request(id, &error, cause, cx);
                }
            }
        }
        let Some(live) = self.active.get(&id) else { return };
        let Some(asked) = live.pending_prefill.as_ref().filter(|asked| !asked.waiting.is_empty())
        else {
            return self.close_if_over(id, cx);
        };
        let mut ask = asked.ask.clone();
        // Prefill watches the client's deadline itself. This later deadline is for a prefill worker
        // that hangs.
        ask.until = live.arrived + live.request.patience + ROUTER_GRACE;
        let Some(order) = ask.head.after_wait(cx.now.saturating_duration_since(live.arrived))
        else {
            return self.fail_request(id, &error_of(Cause::Deadline), Cause::Deadline, cx);
        };
        (ask.key, ask.head) = (id, order);
        cx.prefill_client.send_request(ask);
        // The body can be long and is not needed again.
        if let Some(asked) = self.active.get_mut(&id).and_then(|live| live.pending_prefill.as_mut())
        {
            asked.ask.body = Arc::default();
        }
    }

    /// Takes a reply of prefill. Its request can be over.
    pub(super) fn handle_prefill_reply(
        &mut self,
        id: u64,
        word: PrefillReply,
        cx: &mut Context<'_>,
    ) {
        let Some(live) = self.active.get_mut(&id) else { return };
        let all_begun = live.have_all_begun();
        let Some(asked) = live.pending_prefill.as_mut() else { return };
        // A lost prefill worker sends no more KV, so every choice must have begun.
        let begun = if word == PrefillReply::Lost { all_begun } else { live.begun };
        let own = DecodeProgress { begun, entered: asked.waiting.is_empty() };
        let said = match &word {
            PrefillReply::Kept(told) => Reply::Kept(told.room),
            PrefillReply::Failed(cause) => Reply::Failed(*cause),
            PrefillReply::Refused(_) => Reply::Refused,
            PrefillReply::NotSent => Reply::Unasked,
            PrefillReply::Ended => Reply::Ended,
            PrefillReply::Lost => Reply::Lost,
        };
        match (asked.core.apply_reply(said, own), word) {
            (PrefillAction::Enter, PrefillReply::Kept(told)) => {
                if let Err(error) = self.start_decode_legs(id, &told, cx) {
                    self.fail_request(id, &error, Cause::Incompatible, cx);
                }
            }
            (PrefillAction::Refuse, PrefillReply::Refused(PrefillRefusal { media, body })) => {
                let (conn, status) = (live.conn, Cause::Refused.http_status());
                cx.send_response(
                    conn,
                    &Response { status, media: &media, body: &body, retry_after: None },
                );
                self.drop_request(id, Cause::Refused, cx);
            }
            (PrefillAction::FailAsPartners(cause), _) => {
                self.fail_request(id, &told_of_source(cause), cause, cx)
            }
            (PrefillAction::Fail(cause), _) => self.fail_request(id, &error_of(cause), cause, cx),
            (PrefillAction::Hurry, _) => {
                self.start_deadlines.push_back((cx.now + ROUTER_LOST_PREFILL_TIME, id))
            }
            (PrefillAction::On | PrefillAction::Enter | PrefillAction::Refuse, _) => {}
        }
    }

    /// Prefill has said where the KV of a request will be.
    fn start_decode_legs(
        &mut self,
        id: u64,
        told: &KvTransferParams,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let Placement::Decode { fake_bootstrap, fake_by_default, proven, .. } =
            self.config.placement
        else {
            return Ok(());
        };
        let Some(live) = self.active.get_mut(&id) else { return Ok(()) };
        let met = told.met(live.timings.len()).map_err(|error| {
            let why =
                format!("the prefill worker gave an invalid place of its KV: {}", error.message);
            source_error(Cause::Incompatible, why)
        })?;
        live.request.bootstrap = Some(met);
        let choices = live.timings.len();
        let meetings = (0..choices)
            .map(|choice| self.room_and_source(id, choice, fake_bootstrap, fake_by_default));
        let meetings = meetings.collect::<Result<Vec<_>, _>>()?;
        let asked = self.active.get_mut(&id).and_then(|live| live.pending_prefill.as_mut());
        let waiting = asked.map(|asked| std::mem::take(&mut asked.waiting)).unwrap_or_default();
        for (choice, mut request) in waiting {
            let (room, source) = &meetings[choice];
            request.room = *room;
            self.salt_as_from(source, proven, &mut request);
            self.start_leg(id, choice, LegKind::Visible, request, Some(source), None, cx);
        }
        Ok(())
    }

    /// Whether a failure reported by the hand-off waits for prefill's own reply. That reply says
    /// which side has failed.
    pub(super) fn awaits_prefill_reply(&mut self, id: u64, cause: Cause, now: Instant) -> bool {
        let asked = self.active.get_mut(&id).and_then(|live| live.pending_prefill.as_mut());
        let waits = asked.and_then(|asked| asked.core.awaits_word(cause));
        if waits == Some(true) {
            self.awaiting_reply.push_back((now + ASKED_WORD_TIME, id));
        }
        waits.is_some()
    }

    /// Fails requests that got no reply of prefill in time. Also fails those that lost prefill and
    /// did not begin in time.
    pub(super) fn end_unheard(&mut self, cx: &mut Context<'_>) {
        while let Some((_, id)) = self.awaiting_reply.pop_front_if(|(until, _)| *until <= cx.now) {
            let asked = self.active.get_mut(&id).and_then(|live| live.pending_prefill.as_mut());
            if let Some(cause) = asked.and_then(|asked| asked.core.unheard()) {
                self.fail_request(id, &error_of(cause), cause, cx);
            }
        }
        while let Some((_, id)) = self.start_deadlines.pop_front_if(|(until, _)| *until <= cx.now) {
            let hurried = |live: &ActiveRequest| {
                Some(live.pending_prefill.as_ref()?.core.hurried(live.have_all_begun()))
            };
            let next = self.active.get(&id).and_then(hurried);
            if let Some(PrefillAction::FailAsPartners(cause)) = next {
                self.fail_request(id, &told_of_source(cause), cause, cx);
            }
        }
    }

    /// A request has ended early. Prefill stops its work and gives up the KV that it keeps.
    pub(super) fn drop_asked(&mut self, id: u64, live: &mut ActiveRequest, cx: &mut Context<'_>) {
        let Some(asked) = live.pending_prefill.take() else { return };
        cx.prefill_client.cancel_request(id, cx.reactor);
        for (_, request) in asked.waiting {
            let slot = Slot { id: request.slot, generation: request.generation };
            cx.handoff.release_slot(request.worker, slot);
        }
        if let Some(room) = asked.core.room() {
            let mut ask = asked.ask;
            ask.key = NOBODY;
            ask.head.target = "/abort_request".into();
            ask.body = Arc::new(AbortRequest::body_of(room));
            ask.until = cx.now + ROUTER_ABORT_TIME;
            cx.prefill_client.send_request(ask);
        }
    }
}

/// The client's error for a failure of the prefill worker. Its `param` shows a router which side
/// failed.
fn told_of_source(cause: Cause) -> ApiError {
    source_error(cause, format!("the prefill worker of this request has failed: {cause}"))
}

fn source_error(cause: Cause, why: String) -> ApiError {
    let retry_after = (cause == Cause::Overloaded).then_some(1);
    let error = ApiError::new(cause.http_status(), cause.name(), why);
    ApiError { param: Some(SOURCE_PARAM.into()), retry_after, ..error }
}
