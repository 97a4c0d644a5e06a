//! Requests of a decode worker that asks prefill for their KV itself.
//!
//! ```text
//! tokenised: places taken, prefill asked ──where the KV will be──▶ legs start ──▶ as if a router had said so
//!                                        ──it fails──▶ the client hears it, of the field that names prefill
//! ```
//! Thread: `ctl`. Invariants: prefill is not asked for what has no place here; what it keeps for a request that ends before
//! it is claimed is given up. Not here: what follows from prefill's words (`cluster::asked`), the connection to it
//! (`front::asking`).

use super::placing::Placement;
use super::{Generations, Given, Live, Part, Way, error_of};
use crate::cause::Cause;
use crate::cluster::asked::{Asked as Core, Next, Own, Said};
use crate::front::asking::{Ask, Refusal, Word};
use crate::front::connections::Answer;
use crate::front::openai::bootstrap::SOURCE_PARAM;
use crate::front::openai::info::Abort;
use crate::front::openai::{ApiError, ToldKv};
use crate::ids::Room;
use crate::limits::{ASKED_WORD_TIME, ROUTER_ABORT_TIME, ROUTER_GRACE, ROUTER_LOST_PREFILL_TIME};
use crate::sched::request::Request;
use crate::transfer::manager::rooms::Slot;
use std::sync::Arc;
use std::time::Instant;

/// No request: what is asked so is only told.
const NOBODY: u64 = u64::MAX;

/// What prefill is asked for a request.
#[derive(Debug)]
pub(super) struct Asked {
    ask: Ask,
    /// Choices that have their places here, and no room yet.
    waiting: Vec<(usize, Box<Request>)>,
    core: Core,
}

impl Asked {
    pub(super) fn new(ask: Ask) -> Asked {
        Asked { ask, waiting: Vec::new(), core: Core::default() }
    }
}

impl Generations {
    /// The prompts of a request are known, of these choices: they take their places, and prefill is asked.
    pub(super) fn ask(
        &mut self,
        id: u64,
        open: Vec<(usize, Given)>,
        samples: usize,
        way: &mut Way<'_>,
    ) {
        let Placement::Decode { worker, .. } = self.terms.placement else { return };
        for (choice, given) in open {
            match self.request(id, choice % samples, worker, Room(0), &given, None) {
                Ok(request) => {
                    let asked = self.live.get_mut(&id).and_then(|live| live.asked.as_mut());
                    if let Some(asked) = asked {
                        asked.waiting.push((choice, request));
                    }
                }
                Err(error) => {
                    let cause =
                        if error.status == 429 { Cause::Overloaded } else { Cause::Refused };
                    return self.fail(id, &error, cause, way);
                }
            }
        }
        let Some(live) = self.live.get(&id) else { return };
        let Some(asked) = live.asked.as_ref().filter(|asked| !asked.waiting.is_empty()) else {
            return self.close_if_over(id, way);
        };
        let mut ask = asked.ask.clone();
        // Prefill keeps the client's time itself, unless it stands still.
        ask.until = live.arrived + live.request.patience + ROUTER_GRACE;
        let Some(order) = ask.order.after(way.now.saturating_duration_since(live.arrived)) else {
            return self.fail(id, &error_of(Cause::Deadline), Cause::Deadline, way);
        };
        (ask.exchange, ask.order) = (id, order);
        self.handoff.ask(ask);
        // It is long, and needed once.
        if let Some(asked) = self.live.get_mut(&id).and_then(|live| live.asked.as_mut()) {
            asked.ask.body = Arc::default();
        }
    }

    /// Prefill has said something of a request, which may be over.
    pub(super) fn hear(&mut self, id: u64, word: Word, way: &mut Way<'_>) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let all_begun = live.have_all_begun();
        let Some(asked) = live.asked.as_mut() else { return };
        // Who is lost hands nothing over any more, to any of the choices.
        let begun = if word == Word::Lost { all_begun } else { live.begun };
        let own = Own { begun, entered: asked.waiting.is_empty() };
        let said = match &word {
            Word::Kept(told) => Said::Kept(told.room),
            Word::Failed(cause) => Said::Failed(*cause),
            Word::Refused(_) => Said::Refused,
            Word::Unasked => Said::Unasked,
            Word::Ended => Said::Ended,
            Word::Lost => Said::Lost,
        };
        match (asked.core.take(said, own), word) {
            (Next::Enter, Word::Kept(told)) => {
                if let Err(error) = self.enter(id, &told, way.now) {
                    self.fail(id, &error, Cause::Incompatible, way);
                }
            }
            (Next::Refuse, Word::Refused(Refusal { media, body })) => {
                let (conn, status) = (live.conn, Cause::Refused.http_status());
                way.answer(conn, &Answer { status, media: &media, body: &body, retry_after: None });
                self.drop_exchange(id, Cause::Refused, way.now);
            }
            (Next::FailAsPartners(cause), _) => self.fail(id, &told_of_source(cause), cause, way),
            (Next::Fail(cause), _) => self.fail(id, &error_of(cause), cause, way),
            (Next::Hurry, _) => self.hurried.push_back((way.now + ROUTER_LOST_PREFILL_TIME, id)),
            (Next::On | Next::Enter | Next::Refuse, _) => {}
        }
    }

    /// It is known where the KV of a request will be.
    fn enter(&mut self, id: u64, told: &ToldKv, now: Instant) -> Result<(), ApiError> {
        let Placement::Decode { fake_bootstrap, fake_by_default, proven, .. } =
            self.terms.placement
        else {
            return Ok(());
        };
        let Some(live) = self.live.get_mut(&id) else { return Ok(()) };
        let met = told.met(live.timings.len()).map_err(|error| {
            let why =
                format!("the prefill worker that was asked says of its KV: {}", error.message);
            source_error(Cause::Incompatible, why)
        })?;
        live.request.bootstrap = Some(met);
        let choices = live.timings.len();
        let meetings =
            (0..choices).map(|choice| self.meeting(id, choice, fake_bootstrap, fake_by_default));
        let meetings = meetings.collect::<Result<Vec<_>, _>>()?;
        let asked = self.live.get_mut(&id).and_then(|live| live.asked.as_mut());
        let waiting = asked.map(|asked| std::mem::take(&mut asked.waiting)).unwrap_or_default();
        for (choice, mut request) in waiting {
            let (room, source) = &meetings[choice];
            request.room = *room;
            self.salt_as_from(source, proven, &mut request);
            self.start(id, choice, Part::Visible, request, Some(source), None, now);
        }
        Ok(())
    }

    /// Whether a failure that the hand-off tells waits for prefill's word, which says whose it is.
    pub(super) fn awaits_word(&mut self, id: u64, cause: Cause, now: Instant) -> bool {
        let asked = self.live.get_mut(&id).and_then(|live| live.asked.as_mut());
        let waits = asked.and_then(|asked| asked.core.awaits_word(cause));
        if waits == Some(true) {
            self.unheard.push_back((now + ASKED_WORD_TIME, id));
        }
        waits.is_some()
    }

    /// Ends the requests that have failed and of which prefill says nothing, and those that have lost it and do not begin.
    pub(super) fn end_unheard(&mut self, way: &mut Way<'_>) {
        while let Some((_, id)) = self.unheard.pop_front_if(|(until, _)| *until <= way.now) {
            let asked = self.live.get_mut(&id).and_then(|live| live.asked.as_mut());
            if let Some(cause) = asked.and_then(|asked| asked.core.unheard()) {
                self.fail(id, &error_of(cause), cause, way);
            }
        }
        while let Some((_, id)) = self.hurried.pop_front_if(|(until, _)| *until <= way.now) {
            let hurried =
                |live: &Live| Some(live.asked.as_ref()?.core.hurried(live.have_all_begun()));
            let next = self.live.get(&id).and_then(hurried);
            if let Some(Next::FailAsPartners(cause)) = next {
                self.fail(id, &told_of_source(cause), cause, way);
            }
        }
    }

    /// A request has ended before its time: prefill does not go on with it, nor keeps anything for it.
    pub(super) fn drop_asked(&mut self, id: u64, live: &mut Live, now: Instant) {
        let Some(asked) = live.asked.take() else { return };
        self.handoff.unask(id);
        for (_, request) in asked.waiting {
            let slot = Slot { id: request.slot, generation: request.generation };
            self.handoff.released(request.worker, slot);
        }
        if let Some(room) = asked.core.room() {
            let mut ask = asked.ask;
            ask.exchange = NOBODY;
            ask.order.target = "/abort_request".into();
            ask.body = Arc::new(Abort::body_of(room));
            ask.until = now + ROUTER_ABORT_TIME;
            self.handoff.ask(ask);
        }
    }
}

/// What a client is told of a failure of the prefill worker that was asked: by the field, a router knows whose it is.
fn told_of_source(cause: Cause) -> ApiError {
    source_error(cause, format!("the prefill worker that was asked for the KV has failed: {cause}"))
}

fn source_error(cause: Cause, why: String) -> ApiError {
    let retry_after = (cause == Cause::Overloaded).then_some(1);
    let error = ApiError::new(cause.http_status(), cause.name(), why);
    ApiError { param: Some(SOURCE_PARAM.into()), retry_after, ..error }
}
