//! Requests for which a decode worker asks prefill for the KV (flow `decode-first`).
//!
//! ```text
//! tokenised: slots taken, prefill pending ──place of the KV──▶ legs start
//!                                       ──failure──▶ error that names prefill's field
//! ```
//! Thread: `ctl`. Invariants: this worker asks prefill only for a request that has slots here. If a
//! request ends before it claims its KV, prefill releases the KV. Not here: the decision after each
//! reply (`routing::remote_prefill`), the connection to prefill (`worker::prefill_client`).

use super::{
    ActiveRequest, ChoiceInput, ChoicePlace, Context, LegKind, NewLeg, Placement, RequestTable,
    error_of,
};
use crate::api::bootstrap::SOURCE_PARAM;
use crate::api::info::AbortRequest;
use crate::api::{ApiError, KvTransferParams};
use crate::cause::Cause;
use crate::http::response::Response;
use crate::ids::{RequestKey, Room};
use crate::limits::{
    PREFILL_REPLY_TIME, ROUTER_ABORT_TIME, ROUTER_GRACE, ROUTER_LOST_PREFILL_TIME,
};
use crate::routing::remote_prefill::{DecodeProgress, PrefillAction, RemotePrefill as Core, Reply};
use crate::sched::request::EngineRequest;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::manager::rooms::Slot;
use crate::worker::prefill_client::{PrefillRefusal, PrefillReply, PrefillRequest};
use std::sync::Arc;
use std::time::Instant;

/// Key of a message that belongs to no request; its reply is ignored.
const NOBODY: RequestKey = RequestKey(u64::MAX);

/// The request to prefill for one request of this worker.
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
    /// Takes slots for choices with known prompts, and asks prefill.
    pub(super) fn ask_prefill(
        &mut self,
        key: RequestKey,
        open: Vec<(usize, ChoiceInput)>,
        samples: usize,
        cx: &mut Context<'_>,
    ) {
        let Placement::Decode { worker, .. } = self.config.placement else { return };
        let pending = self.active.get(&key).and_then(|active| active.pending_prefill.as_ref());
        let is_new = pending.is_some_and(|pending| pending.waiting.is_empty());
        debug_assert!(is_new, "prefill is asked once for a request");
        for (choice, given) in open {
            let place = ChoicePlace { key, choice, sample: choice % samples, input: &given };
            let logprobs = self.reserve_prompt_logprobs(place);
            let built = logprobs.and_then(|logprobs| {
                self.await_prompt_logprobs(place, logprobs.is_some());
                self.build_request(place, worker, Room(0), None, cx)
            });
            match built {
                Ok(request) => {
                    let pending = self
                        .active
                        .get_mut(&key)
                        .and_then(|active| active.pending_prefill.as_mut());
                    if let Some(pending) = pending {
                        pending.waiting.push((choice, request));
                    }
                }
                Err(error) => {
                    let cause =
                        if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                    return self.fail_request(key, &error, cause, cx);
                }
            }
        }
        let Some(active) = self.active.get(&key) else { return };
        let Some(pending) =
            active.pending_prefill.as_ref().filter(|pending| !pending.waiting.is_empty())
        else {
            return self.close_if_over(key, cx);
        };
        let mut ask = pending.ask.clone();
        // Prefill checks the client's deadline itself. This later deadline ends a request to a
        // prefill worker that hangs.
        ask.until = active.arrived + active.request.patience + ROUTER_GRACE;
        let Some(order) = ask.head.after_wait(cx.now.saturating_duration_since(active.arrived))
        else {
            return self.fail_request(key, &error_of(Cause::Deadline), Cause::Deadline, cx);
        };
        (ask.key, ask.head) = (key, order);
        cx.prefill_client.send_request(ask);
        // The body can be long and is not needed again.
        if let Some(pending) =
            self.active.get_mut(&key).and_then(|active| active.pending_prefill.as_mut())
        {
            pending.ask.body = Arc::default();
        }
    }

    /// Takes a reply of prefill. Its request can have ended already.
    pub(super) fn handle_prefill_reply(
        &mut self,
        key: RequestKey,
        reply: PrefillReply,
        cx: &mut Context<'_>,
    ) {
        let Some(active) = self.active.get_mut(&key) else { return };
        let all_begun = active.have_all_begun();
        let Some(pending) = active.pending_prefill.as_mut() else { return };
        // A lost prefill worker sends no more KV, so the request goes on only if every choice has
        // begun.
        let begun = if reply == PrefillReply::Lost { all_begun } else { active.begun };
        let own = DecodeProgress { begun, entered: pending.waiting.is_empty() };
        let event = match &reply {
            PrefillReply::Kept(params) => Reply::Kept(params.room),
            PrefillReply::Failed(cause) => Reply::Failed(*cause),
            PrefillReply::Refused(_) => Reply::Refused,
            PrefillReply::NotSent => Reply::NotSent,
            PrefillReply::Ended => Reply::Ended,
            PrefillReply::Lost => Reply::Lost,
        };
        match (pending.core.apply_reply(event, own), reply) {
            (PrefillAction::Enter, PrefillReply::Kept(params)) => {
                if let Err(error) = self.start_decode_legs(key, &params, cx) {
                    self.fail_request(key, &error, Cause::Incompatible, cx);
                }
            }
            (PrefillAction::Refuse, PrefillReply::Refused(PrefillRefusal { media, body })) => {
                let (conn, status) = (active.conn, Cause::Refused.http_status());
                cx.send_response(
                    conn,
                    &Response { status, media: &media, body: &body, retry_after: None },
                );
                self.drop_request(key, Cause::Refused, cx);
            }
            (PrefillAction::FailAsPartners(cause), _) => {
                self.fail_request(key, &told_of_source(cause), cause, cx)
            }
            (PrefillAction::Fail(cause), _) => self.fail_request(key, &error_of(cause), cause, cx),
            (PrefillAction::Hurry, _) => {
                self.start_deadlines.push_back((cx.now + ROUTER_LOST_PREFILL_TIME, key))
            }
            (action @ (PrefillAction::On | PrefillAction::Enter | PrefillAction::Refuse), _) => {
                debug_assert_eq!(action, PrefillAction::On, "an action follows from its reply");
            }
        }
    }

    /// Starts the decode legs of a request when prefill has sent the place of its KV.
    fn start_decode_legs(
        &mut self,
        key: RequestKey,
        params: &KvTransferParams,
        cx: &mut Context<'_>,
    ) -> Result<(), ApiError> {
        let Placement::Decode { fake_bootstrap, fake_by_default, proven, .. } =
            self.config.placement
        else {
            return Ok(());
        };
        let Some(active) = self.active.get_mut(&key) else { return Ok(()) };
        let met = params.met(active.timings.len()).map_err(|error| {
            let why =
                format!("the prefill worker sent an invalid place of its KV: {}", error.message);
            source_error(Cause::Incompatible, why)
        })?;
        active.request.bootstrap = Some(met);
        let choices = active.timings.len();
        let meetings = (0..choices).map(|choice| {
            let entropy = cx.reactor.entropy();
            self.room_and_source(key, choice, fake_bootstrap, fake_by_default, entropy)
        });
        let meetings = meetings.collect::<Result<Vec<_>, _>>()?;
        let pending = self.active.get_mut(&key).and_then(|active| active.pending_prefill.as_mut());
        let waiting =
            pending.map(|pending| std::mem::take(&mut pending.waiting)).unwrap_or_default();
        debug_assert!(!waiting.is_empty(), "choices wait for the place of their KV");
        for (choice, mut request) in waiting {
            let (room, source) = &meetings[choice];
            request.room = *room;
            self.salt_as_from(source, proven, &mut request);
            let kind = LegKind::Visible;
            let leg = NewLeg { key, choice, kind, source: Some(source), partner: None };
            self.start_leg(leg, request, cx);
        }
        Ok(())
    }

    /// Whether a failure that the hand-off reported must wait for prefill's own reply. That reply
    /// says which side failed.
    pub(super) fn awaits_prefill_reply(
        &mut self,
        key: RequestKey,
        cause: Cause,
        now: Instant,
    ) -> bool {
        let pending = self.active.get_mut(&key).and_then(|active| active.pending_prefill.as_mut());
        let waits = pending.and_then(|pending| pending.core.defer_failure(cause));
        if waits == Some(true) {
            self.awaiting_reply.push_back((now + PREFILL_REPLY_TIME, key));
        }
        waits.is_some()
    }

    /// Fails requests that got no reply of prefill in time, and requests that lost prefill and did
    /// not begin in time.
    pub(super) fn end_unheard(&mut self, cx: &mut Context<'_>) {
        while let Some((_, key)) = self.awaiting_reply.pop_front_if(|(until, _)| *until <= cx.now) {
            let pending =
                self.active.get_mut(&key).and_then(|active| active.pending_prefill.as_mut());
            if let Some(cause) = pending.and_then(|pending| pending.core.take_deferred()) {
                self.fail_request(key, &error_of(cause), cause, cx);
            }
        }
        while let Some((_, key)) = self.start_deadlines.pop_front_if(|(until, _)| *until <= cx.now)
        {
            let hurried = |active: &ActiveRequest| {
                Some(active.pending_prefill.as_ref()?.core.hurried(active.have_all_begun()))
            };
            let next = self.active.get(&key).and_then(hurried);
            if let Some(PrefillAction::FailAsPartners(cause)) = next {
                self.fail_request(key, &told_of_source(cause), cause, cx);
            }
        }
    }

    /// Cleans up after a request that ended early: prefill stops its work and releases the KV that
    /// it keeps.
    pub(super) fn drop_asked(
        &mut self,
        key: RequestKey,
        active: &mut ActiveRequest,
        cx: &mut Context<'_>,
    ) {
        let Some(pending) = active.pending_prefill.take() else { return };
        cx.prefill_client.cancel_request(key, cx.reactor);
        for (_, request) in pending.waiting {
            let slot = Slot { id: request.slot, generation: request.generation };
            if !is_failpoint_active("choice that waits for prefill keeps its slot") {
                cx.handoff.release_slot(request.worker, slot);
            }
        }
        if let Some(room) = pending.core.room() {
            let mut ask = pending.ask;
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
    ApiError { param: Some(SOURCE_PARAM.into()), ..ApiError::from_cause(cause, why) }
}
