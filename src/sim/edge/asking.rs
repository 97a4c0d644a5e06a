//! A decode worker's requests to prefill workers, where the router leaves them to it, by the rules
//! of `worker::prefill_client` (its connections) and `worker::requests::remote_prefill` (whose table,
//! `routing::remote_prefill`, is production's).
//!
//! Invariants: prefill is not asked for what has no place here; what it keeps for a request that
//! ends before it is claimed is given up. Not here: how long a connection takes to stand and to
//! carry something (`cluster!`).

use super::{Edge, EdgeLeg, Job, Output, address_of};
use crate::cause::Cause;
use crate::ids::Leg;
use crate::limits::{
    PREFILL_REPLY_TIME, PREFILL_SILENCE_MAX, ROUTER_CONNECT_TIME, ROUTER_GRACE,
    ROUTER_LOST_PREFILL_TIME,
};
use crate::peer::handoff::Source;
use crate::routing::remote_prefill::{DecodeProgress, PrefillAction, RemotePrefill, Reply};
use crate::sched::messages::FinishReason;
use crate::sched::request::EngineRequest;
use crate::sim::process::WORKER;
use crate::sim::router::fleet::CallName;
use crate::sim::router::{Answer, LegName};
use crate::transfer::manager::rooms::Slot;
use std::time::Instant;

/// What was asked for one leg.
#[derive(Debug)]
pub(super) struct Asking {
    /// Whom.
    to: usize,
    core: RemotePrefill,
    /// It has its place here, and no room yet.
    waiting: Option<(Box<EngineRequest>, Box<EdgeLeg>)>,
    /// What is asked, until the connection stands.
    job: Option<Box<Job>>,
    /// Prefill may say something still.
    open: bool,
    /// It has said where the KV will be.
    told: bool,
    /// Decode has told of the answer.
    pub(super) begun: bool,
    /// By when the connection must stand.
    connects: Instant,
    /// Since when it has taken nothing in.
    silent: Instant,
    /// When it is given up.
    until: Instant,
}

/// How a decode leg's question to prefill is called.
fn question_of(leg: LegName) -> LegName {
    LegName { role: Leg::Prefill, ..leg }
}

impl Edge {
    /// A leg has its place: prefill is asked.
    pub(super) fn ask(
        &mut self,
        to: usize,
        request: Box<EngineRequest>,
        leg: EdgeLeg,
        job: Job,
        now: Instant,
    ) {
        let name = leg.name;
        let question = question_of(name);
        let until = request.deadline + ROUTER_GRACE;
        self.outbox.push(Output::Ask { name: question, to, room: job.room });
        let asking = Asking {
            to,
            core: RemotePrefill::default(),
            waiting: Some((request, Box::new(leg))),
            job: Some(Box::new(Job { name: question, ..job })),
            open: true,
            told: false,
            begun: false,
            connects: until.min(now + ROUTER_CONNECT_TIME),
            silent: now,
            until,
        };
        self.asking.insert(name, asking);
    }

    /// Something has come on the connection of a question.
    pub(super) fn word(&mut self, question: LegName, answer: Answer, now: Instant) {
        let name = LegName { role: Leg::Decode, ..question };
        let Some(asking) = self.asking.get_mut(&name).filter(|asking| asking.open) else { return };
        let said = match answer {
            Answer::Stands(_) => {
                asking.silent = now;
                if let Some(job) = asking.job.take() {
                    self.outbox.push(Output::Put(question, job));
                }
                return;
            }
            // Only a failure is of use behind the first event.
            Answer::Token(_) => return,
            Answer::Kept(room) => {
                asking.told = true;
                Reply::Kept(Some(room))
            }
            Answer::Drains | Answer::Hangs => Reply::Failed(Cause::Draining),
            Answer::Ended(FinishReason::Failed(Cause::Refused)) if !asking.told => Reply::Refused,
            // That its client has gone, as prefill may think, is not for one that is here.
            Answer::Ended(FinishReason::Failed(Cause::ClientGone)) | Answer::Lost => {
                Reply::Failed(Cause::PeerLost)
            }
            Answer::Ended(FinishReason::Failed(cause)) => Reply::Failed(cause),
            Answer::Ended(_) if asking.told => Reply::Ended,
            Answer::Ended(_) => Reply::Failed(Cause::Incompatible),
            Answer::Well | Answer::Is { .. } | Answer::SourceFailed(_) => {
                unreachable!("prefill is asked for KV, and asks nobody")
            }
        };
        self.hear_said(name, said, now);
    }

    /// Prefill has said something. Of a connection that was lost it is the last word only where
    /// nothing was said before.
    fn hear_said(&mut self, name: LegName, said: Reply, now: Instant) {
        let Some(asking) = self.asking.get_mut(&name) else { return };
        asking.open &= matches!(said, Reply::Kept(_));
        let said = match said {
            Reply::Failed(Cause::PeerLost) if asking.told => Reply::Lost,
            Reply::Failed(Cause::Deadline) if asking.told => Reply::Ended,
            said => said,
        };
        let own = DecodeProgress { begun: asking.begun, entered: asking.waiting.is_none() };
        match asking.core.apply_reply(said, own) {
            PrefillAction::On => {}
            PrefillAction::Hurry => self.hurried.push_back((now + ROUTER_LOST_PREFILL_TIME, name)),
            PrefillAction::Enter => self.enter(name, said, now),
            PrefillAction::FailAsPartners(cause) => {
                self.fail_asked(name, cause, Answer::SourceFailed(cause))
            }
            PrefillAction::Fail(cause) => {
                self.fail_asked(name, cause, Answer::Ended(FinishReason::Failed(cause)))
            }
            PrefillAction::Refuse => {
                self.fail_asked(
                    name,
                    Cause::Refused,
                    Answer::Ended(FinishReason::Failed(Cause::Refused)),
                );
            }
        }
    }

    /// It is known where the KV of a leg will be.
    fn enter(&mut self, name: LegName, said: Reply, now: Instant) {
        let Some(asking) = self.asking.get_mut(&name) else { return };
        let (Some((mut request, leg)), Reply::Kept(Some(room))) = (asking.waiting.take(), said)
        else {
            return;
        };
        request.room = room;
        let source = Source::Remote(address_of(asking.to));
        self.legs.insert(request.id, *leg);
        self.handoff.submit_request(request, Some(&source), now);
    }

    /// A leg ends before its time.
    fn fail_asked(&mut self, name: LegName, cause: Cause, answer: Answer) {
        self.drop_asked(name);
        for leg in self.legs.values_mut().filter(|leg| leg.name == name) {
            leg.muted = true;
            if !leg.finished {
                self.handoff.worker_mut(WORKER).abort(leg.slot, cause);
            }
        }
        self.outbox.push(Output::Answer(CallName::Leg(name), answer));
    }

    /// Prefill does not go on with what was asked for a leg that has ended before its time, nor
    /// keeps anything for it. Whether anything was asked.
    pub(super) fn drop_asked(&mut self, name: LegName) -> bool {
        let Some(asking) = self.asking.remove(&name) else { return false };
        if asking.open {
            self.outbox.push(Output::Unask(question_of(name)));
        }
        if let Some((request, _)) = asking.waiting {
            self.handoff
                .release_slot(WORKER, Slot { id: request.slot, generation: request.generation });
        }
        if let Some(room) = asking.core.room() {
            self.outbox.push(Output::GiveUp { to: asking.to, room });
        }
        true
    }

    /// Somebody wants a request to end of which prefill has not said where its KV will be; who
    /// asked for it is told.
    pub(super) fn abort_asked(&mut self, flight: usize) {
        let waits = |(name, asking): &(&LegName, &Asking)| {
            name.flight == flight && asking.waiting.is_some()
        };
        let waiting: Vec<LegName> =
            self.asking.iter().filter(waits).map(|(&name, _)| name).collect();
        for name in waiting {
            self.fail_asked(
                name,
                Cause::Aborted,
                Answer::Ended(FinishReason::Failed(Cause::Aborted)),
            );
        }
    }

    /// Whether a failure that the hand-off tells of a leg waits for prefill's word on it.
    pub(super) fn defer_failure(&mut self, name: LegName, cause: Cause, now: Instant) -> bool {
        let asking = self.asking.get_mut(&name);
        let waits = asking.and_then(|asking| asking.core.defer_failure(cause));
        if waits == Some(true) {
            self.unheard.push_back((now + PREFILL_REPLY_TIME, name));
        }
        waits.is_some()
    }

    /// Ends the legs that have failed and of which prefill says nothing.
    pub(super) fn end_unheard(&mut self, now: Instant) {
        while let Some((_, name)) = self.unheard.pop_front_if(|(until, _)| *until <= now) {
            let asking = self.asking.get_mut(&name);
            if let Some(cause) = asking.and_then(|asking| asking.core.take_deferred()) {
                self.fail_asked(name, cause, Answer::Ended(FinishReason::Failed(cause)));
            }
        }
        while let Some((_, name)) = self.hurried.pop_front_if(|(until, _)| *until <= now) {
            let asking = self.asking.get(&name);
            if let Some(PrefillAction::FailAsPartners(cause)) =
                asking.map(|asking| asking.core.hurried(asking.begun))
            {
                self.fail_asked(name, cause, Answer::SourceFailed(cause));
            }
        }
    }

    /// Gives up what takes too long, or stands still before it has said where the KV is.
    pub(super) fn expire_asked(&mut self, now: Instant) {
        let open = self.asking.iter().filter(|(_, asking)| asking.open);
        let late: Vec<(LegName, Cause)> =
            open.filter_map(|(&name, asking)| Some((name, asking.overdue(now)?))).collect();
        for (name, cause) in late {
            self.outbox.push(Output::Unask(question_of(name)));
            self.hear_said(name, Reply::Failed(cause), now);
        }
    }
}

impl Asking {
    fn overdue(&self, now: Instant) -> Option<Cause> {
        let is_silent = !self.told && self.silent + PREFILL_SILENCE_MAX <= now;
        match now {
            now if self.until <= now => Some(Cause::Deadline),
            now if self.job.is_some() && self.connects <= now => Some(Cause::PeerLost),
            _ => is_silent.then_some(Cause::PeerLost),
        }
    }

    /// Whether prefill has not said where the KV will be.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }
}
