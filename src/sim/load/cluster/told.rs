//! What workers tell: tokens, Destinations, ends.
//!
//! Owns: when it is heard. What a turn tells before its forward pass is heard at once, the rest when the pass has taken its
//! time. Not here: what follows for a request (`requests`), nor for its KV (`ways`).

use super::super::super::checkers::{Checker, Finding};
use super::super::host::{Half, Turned};
use super::super::report::Served;
use super::super::transfers::Use;
use super::{Cluster, Happening, Open};
use crate::cluster::flight::{News, Next, Terms};
use crate::cluster::router::Role;
use crate::config::flags::Engine;
use crate::ids::RequestId;
use crate::sched::mailbox::{Event, Outcome};
use crate::sched::worker::Activity;
use crate::transfer::command::{SessionId, Target};
use std::mem;

impl Cluster<'_> {
    /// What the last step told is told now that its time has passed; then comes the next, of which some is told at once.
    pub(super) fn turn(&mut self, index: usize) -> Result<(), Finding> {
        let now = self.agenda.now();
        self.tell(index, usize::MAX, usize::MAX)?;
        let Turned { activity, took, commands_before, events_before } =
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

    /// So many of the commands that are told to the mover are taken in, and so many events.
    fn tell(&mut self, index: usize, commands: usize, events: usize) -> Result<(), Finding> {
        match &mut self.hosts[index].half {
            Half::Source(half) => half.take(commands, index, &mut self.flows),
            // That something is expected is of no use before Destination has left.
            Half::Destination(half) => half.take(),
        }
        self.leave();
        let mut told = mem::take(&mut self.hosts[index].outbox);
        let events = events.min(told.len());
        for event in told.drain(..events) {
            self.event(index, event)?;
        }
        self.hosts[index].outbox = told;
        Ok(())
    }

    fn event(&mut self, index: usize, event: Event) -> Result<(), Finding> {
        let now = self.agenda.now();
        let role = self.hosts[index].role;
        match event {
            Event::Token { request, .. } if role == Role::Decode => {
                let is_sampled_before = self.plan.engine == Engine::Recorded;
                let open = self.named(request)?;
                open.sampled += 1;
                if is_sampled_before && open.sampled == 1 {
                    return Ok(());
                }
                let last = mem::replace(&mut open.last, now);
                open.tokens += 1;
                if open.tokens == 1 {
                    open.first = now;
                    if let Some(Open { booked: [None, Some(booking)], .. }) =
                        self.open.get_mut(&(request.0 as usize))
                    {
                        self.router.has_read(booking, self.bench.instant(now));
                    }
                } else {
                    self.samples.gap(now - last);
                }
                self.last_token = now;
            }
            Event::Token { .. } => {}
            Event::Expecting { slot, generation, session, room, tokens, .. } => {
                let leg = self.named(RequestId(room.0))?.legs[Role::Prefill as usize];
                let (host, source) = leg.expect("it comes from somewhere");
                debug_assert_eq!(host, session.0 as usize);
                if self.takes_late_as_recorded() {
                    self.come_at_once(index, Use { slot, generation }, room);
                }
                let session = SessionId(index as u32);
                let target = Target { session, slot, generation, room, prefix: tokens.start };
                let at = now + self.plan.fabric.latency;
                self.agenda.put(at, Happening::Grant { host, source, target });
            }
            Event::Computed { request, .. } => {
                let open = self.named(request)?;
                open.computed = now;
                let (host, _) = open.legs[Role::Decode as usize].expect("it goes somewhere");
                let command = self.session_ready(request.0 as usize, index);
                let at = now + self.plan.fabric.latency;
                self.agenda.put(at, Happening::Tell { host, command });
            }
            Event::Finished { request, outcome, cached_tokens, .. } => {
                self.finished(role, request, outcome, cached_tokens)?;
            }
            Event::Released(request) => {
                self.hosts[index].close(request.slot);
                let open = self.named(request.id)?;
                open.held -= 1;
                match (open.held, open.refused.take()) {
                    (0, Some(role)) => self.try_again(request.id.0 as usize, role),
                    (0, None) => drop(self.open.remove(&(request.id.0 as usize))),
                    (_, refused) => open.refused = refused,
                }
            }
            Event::Flushed { .. } => unreachable!("nobody empties a cache"),
        }
        Ok(())
    }

    fn finished(
        &mut self,
        role: Role,
        request: RequestId,
        outcome: Outcome,
        cached: u32,
    ) -> Result<(), Finding> {
        let id = request.0 as usize;
        let (arrival, now) = (&self.arrivals.list()[id], self.bench.instant(self.agenda.now()));
        if let Outcome::Failed(cause) = outcome {
            return self.refused(role, request, cause);
        }
        let open = self.named(request)?;
        let expected = match role {
            Role::Prefill => Outcome::HandedOver,
            Role::Decode => Outcome::Length,
        };
        if outcome != expected {
            return Err(Finding::about(
                Checker::Ends,
                id,
                format!("its {role} leg ends with {outcome:?}"),
            ));
        }
        let booking = open.booked[role as usize].take();
        let is_alone = open.legs[Role::Prefill as usize].is_none();
        if role == Role::Prefill || is_alone {
            open.cached = cached;
        }
        if role == Role::Prefill {
            // Its tokens are decode's to tell.
        } else if open.tokens != arrival.output {
            let what = format!("{} tokens of {} were told", open.tokens, arrival.output);
            return Err(Finding::about(Checker::Tokens, id, what));
        }
        let is_served = open.booked.iter().all(Option::is_none);
        let (first, last, cached) = (open.first, open.last, open.cached);
        self.note([id as u64, first, last]);
        if role == Role::Decode {
            let chance = self.dice.draw();
            let terms = &mut Terms { now, chance, deadline: None, retries: &mut self.retries };
            let open = self.open.get_mut(&id).expect("it was just named");
            let next = open.core.take(News::Landed, terms);
            debug_assert_eq!(next, Next::Land);
        }
        booking.into_iter().for_each(|booking| self.router.release(booking, now));
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
