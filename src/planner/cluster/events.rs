//! Events of workers: tokens, Destinations, ends.
//!
//! Owns: the time at which an event takes effect. Events before the forward pass of a turn take
//! effect at once, the others after the pass. Not here: the effects on a request (`requests`) and
//! on its KV (`links`).

use super::super::host::{MoverStub, TurnResult};
use super::super::report::Served;
use super::super::transfers::SlotUse;
use super::super::violation::{Rule, Violation};
use super::{LoadCluster, Open, SimEvent};
use crate::cli::flags::SimEngine;
use crate::ids::{Leg, RequestId};
use crate::routing::attempts::{AttemptAction, AttemptContext, AttemptEvent};
use crate::sched::messages::{EngineEvent, FinishReason, RequestEvent, TransferEvent};
use crate::sched::worker::Activity;
use crate::stdx::event_queue::Nanos;
use crate::transfer::target::{SessionId, Target};
use std::mem;

impl LoadCluster<'_> {
    /// Delivers the events of the last step, because its time has passed. Then runs the next step,
    /// and delivers its early events.
    pub(super) fn turn(&mut self, index: usize) -> Result<(), Violation> {
        let now = self.agenda.now();
        self.tell(index, usize::MAX, usize::MAX)?;
        let TurnResult { activity, took, commands_before, events_before } =
            self.hosts[index].step(&mut self.bench, now);
        self.note([now, index as u64, took << 2 | activity as u64]);
        match took {
            0 => self.tell(index, usize::MAX, usize::MAX)?,
            _ => self.tell(index, commands_before, events_before)?,
        }
        if activity == Activity::Busy || !self.hosts[index].inbox.is_empty() {
            self.wake(index, now + took);
        }
        Ok(())
    }

    /// Takes at most `commands` commands to the mover, and delivers at most `events` events.
    fn tell(&mut self, index: usize, commands: usize, events: usize) -> Result<(), Violation> {
        match &mut self.hosts[index].half {
            MoverStub::Source(half) => half.take(commands, index, &mut self.flows),
            // A decode worker's expectation matters only after Destination was sent.
            MoverStub::Destination(half) => half.take(),
        }
        self.leave();
        let mut outbox = mem::take(&mut self.hosts[index].outbox);
        let events = events.min(outbox.len());
        for event in outbox.drain(..events) {
            self.event(index, event)?;
        }
        self.hosts[index].outbox = outbox;
        Ok(())
    }

    fn event(&mut self, index: usize, event: EngineEvent) -> Result<(), Violation> {
        let now = self.agenda.now();
        let role = self.hosts[index].role;
        match event {
            EngineEvent::Request(RequestEvent::Token { request, .. }) if role == Leg::Decode => {
                self.count_token(request, now)?;
            }
            EngineEvent::Request(RequestEvent::Token { .. }) => {}
            EngineEvent::Transfer(TransferEvent::Expecting {
                slot,
                generation,
                session,
                room,
                tokens,
                ..
            }) => {
                let leg = self.named(RequestId(room.0))?.legs[Leg::Prefill as usize];
                let (host, source) = leg.expect("it comes from somewhere");
                debug_assert_eq!(host, session.0 as usize);
                if self.takes_late_as_recorded() {
                    self.come_at_once(index, SlotUse { slot, generation }, room);
                }
                let session = SessionId(index as u32);
                let target = Target { session, slot, generation, room, prefix: tokens.start };
                let at = now + self.plan.fabric.latency;
                self.agenda.schedule(at, SimEvent::Grant { host, source, target });
            }
            EngineEvent::Transfer(TransferEvent::Computed { request, .. }) => {
                let open = self.named(request)?;
                open.computed = now;
                let (host, _) = open.legs[Leg::Decode as usize].expect("it goes somewhere");
                let command = self.session_ready(request.0 as usize, index);
                let at = now + self.plan.fabric.latency;
                self.agenda.schedule(at, SimEvent::Tell { host, command });
            }
            EngineEvent::Request(RequestEvent::Finished {
                request,
                outcome,
                cached_tokens,
                ..
            }) => {
                self.finished(role, request, outcome, cached_tokens)?;
            }
            EngineEvent::Request(RequestEvent::Released(request)) => {
                self.hosts[index].close(request.slot);
                let open = self.named(request.id)?;
                open.held -= 1;
                let left = if role == Leg::Decode { open.session.take() } else { None };
                match (open.held, open.refused.take()) {
                    (0, Some(role)) => self.try_again(request.id.0 as usize, role),
                    (0, None) => drop(self.open.remove(&(request.id.0 as usize))),
                    (_, refused) => open.refused = refused,
                }
                if let Some(source) = left {
                    self.hosts[index].sessions.leave(source);
                }
            }
            EngineEvent::Request(RequestEvent::Flushed { .. }) => {
                unreachable!("no cache is flushed")
            }
        }
        Ok(())
    }

    /// Records a token of a decode worker and the time since the previous one.
    fn count_token(&mut self, request: RequestId, now: Nanos) -> Result<(), Violation> {
        let is_sampled_before = self.plan.engine == SimEngine::Recorded;
        let open = self.named(request)?;
        open.sampled += 1;
        if is_sampled_before && open.sampled == 1 {
            return Ok(());
        }
        let last = mem::replace(&mut open.last, now);
        open.tokens += 1;
        if open.tokens == 1 {
            open.first = now;
            if let Some(Open { reserved: [None, Some(reservation)], .. }) =
                self.open.get_mut(&(request.0 as usize))
            {
                self.router.mark_read(reservation, self.bench.instant(now));
            }
        } else {
            self.samples.gap(now - last);
        }
        self.last_token = now;
        Ok(())
    }

    fn finished(
        &mut self,
        role: Leg,
        request: RequestId,
        outcome: FinishReason,
        cached: u32,
    ) -> Result<(), Violation> {
        let id = request.0 as usize;
        let (arrival, now) = (&self.arrivals.list()[id], self.bench.instant(self.agenda.now()));
        if let FinishReason::Failed(cause) = outcome {
            return self.refused(role, request, cause);
        }
        let open = self.named(request)?;
        let expected = match role {
            Leg::Prefill => FinishReason::HandedOver,
            Leg::Decode => FinishReason::Length,
        };
        if outcome != expected {
            return Err(Violation::about(
                Rule::Ends,
                id,
                format!("its {role} leg ends with {outcome:?}"),
            ));
        }
        let reservation = open.reserved[role as usize].take();
        let is_alone = open.legs[Leg::Prefill as usize].is_none();
        if role == Leg::Prefill || is_alone {
            open.cached = cached;
        }
        if role == Leg::Prefill {
            // Decode reports its tokens.
        } else if open.tokens != arrival.output {
            let what = format!("{} of {} tokens were generated", open.tokens, arrival.output);
            return Err(Violation::about(Rule::Tokens, id, what));
        }
        let is_served = open.reserved.iter().all(Option::is_none);
        let (first, last, cached) = (open.first, open.last, open.cached);
        self.note([id as u64, first, last]);
        if role == Leg::Decode {
            let chance = self.dice.next_u64();
            let terms =
                &mut AttemptContext { now, chance, deadline: None, retries: &mut self.retries };
            let open = self.open.get_mut(&id).expect("it was just named");
            let next = open.core.apply_event(AttemptEvent::Finished, terms);
            debug_assert_eq!(next, AttemptAction::Finish);
        }
        reservation.into_iter().for_each(|reservation| self.router.release(reservation, now));
        if is_served {
            self.samples.served(Served {
                ttft: first - arrival.at,
                e2e: last - arrival.at,
                input: arrival.input,
                cached,
                output: arrival.output,
            });
        }
        Ok(())
    }
}
