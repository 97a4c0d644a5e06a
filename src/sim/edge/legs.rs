//! Legs of a process, by the rules of `worker::requests`: placed, told of by the engine,
//! cancelled, aborted.

use super::{Edge, EdgeLeg, Job, Output, address_of, roles};
use crate::cause::Cause;
use crate::ids::{Leg, RequestId, Room, WorkerId};
use crate::peer::handoff::{Source, prompt_of};
use crate::sched::messages::{EngineEvent, FinishReason, RequestEvent, TransferEvent};
use crate::sched::request::{EngineRequest, Stamps};
use crate::sim::checkers::shadow::{Grant, GrantState};
use crate::sim::checkers::{Checked, Checker, Finding, tokens};
use crate::sim::process::WORKER;
use crate::sim::router::fleet::CallName;
use crate::sim::router::{Answer, LegName};
use crate::transfer::manager::rooms::Slot;
use std::ops::Range;
use std::time::{Duration, Instant};

impl Edge {
    /// Who asked has closed a leg's connection.
    pub(super) fn cancel(&mut self, name: LegName) {
        self.drop_asked(name);
        if let Some(leg) = self.legs.values_mut().find(|leg| leg.name == name) {
            // Whose answer was that its KV is kept works for nobody, who could leave.
            let is_kept = std::mem::replace(&mut leg.muted, true) && leg.kept.is_some();
            if !leg.finished && !is_kept {
                let slot = leg.slot;
                self.handoff.worker_mut(WORKER).abort(slot, Cause::ClientGone);
            }
        }
    }

    /// Somebody wants a request to end; who asked for it is told.
    pub(super) fn abort(&mut self, flight: usize) {
        self.abort_asked(flight);
        let legs = self.legs.values_mut().filter(|leg| leg.name.flight == flight && !leg.muted);
        for leg in legs.filter(|leg| !leg.finished) {
            leg.muted = true;
            self.handoff.worker_mut(WORKER).abort(leg.slot, Cause::Aborted);
            let aborted = Answer::Ended(FinishReason::Failed(Cause::Aborted));
            self.outbox.push(Output::Answer(CallName::Leg(leg.name), aborted));
        }
        let asked = self.asking.keys().copied().filter(|name| name.flight == flight);
        for name in asked.collect::<Vec<_>>() {
            self.drop_asked(name);
        }
    }

    /// What is kept in this room will not be claimed; who waits for that to be said is told.
    pub(super) fn give_up_kept(&mut self, room: Room) {
        let mut legs = self.legs.values_mut().filter(|leg| leg.kept == Some(room) && !leg.finished);
        let Some(leg) = legs.next() else { return };
        self.handoff.worker_mut(WORKER).abort(leg.slot, Cause::Aborted);
        if !std::mem::replace(&mut leg.muted, true) {
            let aborted = Answer::Ended(FinishReason::Failed(Cause::Aborted));
            self.outbox.push(Output::Answer(CallName::Leg(leg.name), aborted));
        }
    }

    /// A leg's request has come.
    ///
    /// # Errors
    /// It should have been refused.
    pub(super) fn submit(&mut self, job: Job, now: Instant) -> Checked {
        let leg = job.name;
        let placed = match self.answer(&job)? {
            None => {
                self.place(job, now).map_err(|cause| Answer::Ended(FinishReason::Failed(cause)))
            }
            Some(answer) => Err(answer),
        };
        match placed {
            Ok(()) => self.taken.push(leg),
            Err(answer) => self.outbox.push(Output::Answer(CallName::Leg(leg), answer)),
        }
        Ok(())
    }

    /// What is answered at once, if anything is.
    fn answer(&self, job: &Job) -> Result<Option<Answer>, Finding> {
        let Job { name, room, order, .. } = job;
        let keeps = job.keeps && name.role == Leg::Prefill;
        if let Some(refusal) = self.refusal(job.taken_for.as_deref()) {
            return Ok(Some(refusal));
        }
        if keeps && self.role() != Leg::Prefill {
            // As a field of the request that means nothing to it.
            return Ok(Some(Answer::Ended(FinishReason::Failed(Cause::Refused))));
        }
        roles::may_take(self.process, self.is_emptying(), self.role(), *name)?;
        let outcome = if order.max_new == 0 { FinishReason::Length } else { FinishReason::Stop };
        // Nothing is kept, and it is told where all the same.
        let whole = if keeps { Answer::Kept(*room) } else { Answer::Ended(outcome) };
        Ok(order.is_whole().then_some(whole))
    }

    /// A leg gets a place, as `worker::requests` places it.
    ///
    /// # Errors
    /// There is none.
    fn place(&mut self, job: Job, now: Instant) -> Result<(), Cause> {
        let Job { name, room, source, keeps, streams, asks, taken_for: _, order } = job;
        let (question, asks) = (order.clone(), asks && name.role == Leg::Decode);
        let keeps = keeps && name.role == Leg::Prefill;
        let deadline = now + Duration::from_nanos(order.patience);
        let worker = self.handoff.worker_mut(WORKER);
        let Some(slot) = worker.take_slot(prompt_of(&order.prompt), deadline) else {
            return Err(Cause::Overloaded);
        };
        let to = source.filter(|_| name.role == Leg::Decode);
        let source = to.map(address_of);
        let (max_new, salt) = match (name.role, source) {
            (Leg::Prefill, _) => (1, order.salt),
            // As where no key proves sources.
            (Leg::Decode, Some(source)) => (order.max_new, order.salt.of(&source.to_string())),
            (Leg::Decode, None) => (order.max_new, order.salt),
        };
        self.salts.brought(salt, &order.prompt, &order.expected);
        let pages = worker.layout().pages_for(order.prompt.len() as u32 + max_new) as usize;
        self.next_request += 1;
        let request = EngineRequest {
            id: RequestId(self.next_request),
            worker: WORKER,
            room,
            slot: slot.id,
            generation: slot.generation,
            prompt: order.prompt.clone(),
            alone: name.role == Leg::Decode && source.is_none(),
            // Who was told where claims it, and nothing is computed before.
            keep: keeps && !streams,
            resumed: order.resumed,
            output: Vec::with_capacity(max_new as usize),
            pages: Vec::with_capacity(pages),
            salt: Some(salt),
            sampling: order.sampling,
            top_logprobs: 0,
            max_new,
            stop_tokens: order.stop_tokens,
            ignore_eos: false,
            deadline,
            stamps: Stamps::new(now),
        };
        let expected = order.expected.into_iter().take(max_new as usize).collect();
        let leg = EdgeLeg {
            name,
            alone: request.alone,
            slot,
            salt,
            prompt: order.prompt,
            expected,
            held: None,
            kept: keeps.then_some(room),
            streams,
            finished: false,
            muted: false,
        };
        if let Some(to) = to.filter(|_| asks) {
            let order = question;
            let taken_for = Some(roles::name_of(Leg::Prefill).to_string());
            let job = Job {
                name,
                room,
                source: None,
                keeps: true,
                streams: true,
                asks: false,
                taken_for,
                order,
            };
            self.ask(to, Box::new(request), leg, job, now);
            return Ok(());
        }
        if streams {
            self.outbox.push(Output::Answer(CallName::Leg(name), Answer::Kept(room)));
        }
        self.legs.insert(request.id, leg);
        let source = source.map(Source::Remote);
        self.handoff.submit_request(Box::new(request), source.as_ref(), now);
        Ok(())
    }

    /// The engine tells, as to `worker::requests`.
    pub(super) fn event(&mut self, event: EngineEvent, now: Instant) -> Checked {
        match event {
            EngineEvent::Request(RequestEvent::Token { request, sampled, .. }) => {
                self.token(request, sampled.token)?
            }
            EngineEvent::Transfer(TransferEvent::Expecting {
                worker,
                slot,
                generation,
                tokens,
                ..
            }) => {
                self.expecting(worker, Slot { id: slot, generation }, tokens, now)?;
            }
            EngineEvent::Transfer(TransferEvent::Computed {
                worker,
                slot,
                generation,
                request,
                ..
            }) => {
                self.handoff.handle_computed(worker, Slot { id: slot, generation }, now);
                let leg = self.legs.get_mut(&request);
                // Where it is kept the leg works for nobody from now on, until decode claims it.
                if let Some((leg, room)) = leg.and_then(|leg| leg.kept.map(|room| (leg, room)))
                    && !std::mem::replace(&mut leg.muted, true)
                {
                    let answer = if leg.streams {
                        Answer::Ended(FinishReason::Length)
                    } else {
                        Answer::Kept(room)
                    };
                    self.outbox.push(Output::Answer(CallName::Leg(leg.name), answer));
                }
            }
            EngineEvent::Request(RequestEvent::Finished {
                request,
                outcome,
                cached_tokens,
                ..
            }) => {
                self.finished(request, outcome, cached_tokens, now)?;
            }
            EngineEvent::Request(RequestEvent::Released(request)) => self.released(&request)?,
            EngineEvent::Request(RequestEvent::Flushed { .. }) => {}
        }
        Ok(())
    }

    fn token(&mut self, request: RequestId, token: u32) -> Checked {
        let Some(leg) = self.legs.get_mut(&request) else { return Ok(()) };
        if leg.finished {
            return wrong(leg, "a token after the end");
        }
        // Also of what nobody listens to any more.
        let right = leg.expected.pop_front();
        tokens::next(leg.name.flight, self.process, token, right)?;
        match leg.name.role {
            Leg::Prefill => leg.held = Some(token),
            Leg::Decode if !leg.muted => {
                let name = CallName::Leg(leg.name);
                if let Some(asking) = self.asking.get_mut(&leg.name) {
                    asking.begun = true;
                }
                self.outbox.push(Output::Answer(name, Answer::Token(token)));
            }
            Leg::Decode => {}
        }
        Ok(())
    }

    /// Pages are leased for what is to come.
    fn expecting(
        &mut self,
        worker: WorkerId,
        slot: Slot,
        tokens: Range<u32>,
        now: Instant,
    ) -> Checked {
        let worker_of = self.handoff.worker(worker);
        let layout = worker_of.layout();
        let same =
            |leg: &&EdgeLeg| (leg.slot.id, leg.slot.generation) == (slot.id, slot.generation);
        let Some(leg) = self.legs.values().find(same) else {
            return Err(Finding::new(
                Checker::Events,
                "pages were leased for a leg that is released",
            ));
        };
        self.salts.found(leg.name.flight, leg.salt, &leg.prompt, tokens.start)?;
        let first = (tokens.start / layout.page_size) as usize;
        let pages = first..layout.pages_for(tokens.end) as usize;
        let grant = Grant {
            generation: slot.generation,
            request: leg.name.flight,
            prompt: leg.prompt.clone(),
            tokens: tokens.clone(),
            first,
            pages: pages.map(|index| worker_of.lists().page(slot.id, index)).collect(),
            lease: GrantState::Granted,
        };
        self.grants.insert(slot.id, grant);
        self.handoff.handle_expecting(worker, slot, tokens, now);
        Ok(())
    }

    fn finished(
        &mut self,
        request: RequestId,
        outcome: FinishReason,
        cached: u32,
        now: Instant,
    ) -> Checked {
        let Some(leg) = self.legs.get_mut(&request) else { return Ok(()) };
        // Decode tells what its source found, if it had one.
        if leg.name.role == Leg::Prefill || leg.alone {
            self.salts.found(leg.name.flight, leg.salt, &leg.prompt, cached)?;
        }
        if std::mem::replace(&mut leg.finished, true) {
            return wrong(leg, "a leg ended twice");
        }
        let (slot, of, muted, held) = (leg.slot, leg.name, leg.muted, leg.held);
        let failure = match outcome {
            FinishReason::Failed(cause) => Some(cause),
            _ => None,
        };
        if !muted && !failure.is_some_and(|cause| self.defer_failure(of, cause, now)) {
            let name = CallName::Leg(of);
            if let (Some(token), None) = (held, failure) {
                self.outbox.push(Output::Answer(name, Answer::Token(token)));
            }
            self.outbox.push(Output::Answer(name, Answer::Ended(outcome)));
            match failure {
                Some(_) => drop(self.drop_asked(of)),
                // What prefill says still is of no interest.
                None => drop(self.asking.remove(&of)),
            }
        }
        self.handoff.handle_finished(WORKER, slot, failure, now);
        Ok(())
    }

    fn released(&mut self, request: &EngineRequest) -> Checked {
        let slot = Slot { id: request.slot, generation: request.generation };
        self.grants.remove(&slot.id);
        self.handoff.release_slot(WORKER, slot);
        match self.legs.remove(&request.id) {
            None => Err(Finding::new(Checker::Events, "a leg was released twice")),
            Some(leg) if !leg.finished => wrong(&leg, "a leg was released before it ended"),
            Some(leg) if !request.pages.is_empty() => wrong(&leg, "a leg was released with pages"),
            Some(_) => Ok(()),
        }
    }
}

/// What is told of a leg cannot be.
fn wrong(leg: &EdgeLeg, what: &'static str) -> Checked {
    Err(Finding::about(Checker::Events, leg.name.flight, what))
}
