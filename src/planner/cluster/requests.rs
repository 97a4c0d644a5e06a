//! The course of a request: attempt, service by its workers, refusal and retry.
//!
//! Owns: the calls to the router, and the commands to the workers. Each attempt holds one slot of
//! each of its workers; the next attempt begins when all slots are free again. Not here: the events
//! of workers (`events`).

use super::super::host::WORKER;
use super::super::transfers::SlotUse;
use super::super::violation::{Rule, Violation};
use super::{LoadCluster, Open, PATIENCE, SimEvent};
use crate::cause::Cause;
use crate::cli::flags::SimEngine;
use crate::ids::{DecodeAllocation, Leg, RequestId, Room};
use crate::kv::page_key::Salt;
use crate::kv::request_pages::RequestPages;
use crate::model::sampler::SamplingParams;
use crate::routing::attempts::{AttemptAction, AttemptContext, AttemptEvent, Attempts};
use crate::routing::balancer::{NoWorker, Reservation};
use crate::routing::load::WorkerNumber;
use crate::sched::messages::EngineCommand;
use crate::sched::request::{EngineRequest, Stamps};
use crate::stdx::event_queue::Nanos;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::target::SessionId;

impl LoadCluster<'_> {
    pub(super) fn begin(&mut self, id: usize) {
        let open = Open {
            core: Attempts::default(),
            reserved: [None, None],
            legs: [None; 2],
            first: 0,
            last: 0,
            tokens: 0,
            sampled: 0,
            cached: 0,
            computed: 0,
            session: None,
            held: 0,
            refused: None,
            ended: [false; 2],
        };
        self.open.insert(id, open);
        self.attempt(id);
    }

    /// Chooses a pair, as the router does.
    pub(super) fn attempt(&mut self, id: usize) {
        let now = self.bench.instant(self.agenda.now());
        let chance = self.dice.next_u64();
        let mut terms = AttemptContext { now, chance, deadline: None, retries: &mut self.retries };
        let open = self.open.get_mut(&id).expect("it is open");
        let work = self.arrivals.work(id);
        let next = match self.router.choose_serving(&work, open.core.avoid(), now) {
            Err(NoWorker::Late { .. }) => {
                self.late += 1;
                open.core.late()
            }
            Err(nobody) => open.core.handle_no_worker(nobody.may_come(), &terms),
            Ok((prefill, decode)) => {
                let workers = [prefill.as_ref().map(Reservation::worker), Some(decode.worker())];
                open.core.set_workers(workers[0], workers[1]);
                open.reserved = [prefill, Some(decode)];
                let is_full = |&role: &Leg| {
                    workers[role as usize]
                        .is_some_and(|WorkerNumber(host)| !self.hosts[host].has_room())
                };
                let full = [Leg::Prefill, Leg::Decode].into_iter().find(is_full);
                match (open.core.apply_event(AttemptEvent::Opened(0), &mut terms), full) {
                    (_, Some(role)) => open
                        .core
                        .apply_event(AttemptEvent::Failed(role, Cause::Overloaded), &mut terms),
                    (next, None) => next,
                }
            }
        };
        self.follow(id, next);
    }

    /// Performs the router's next action.
    fn follow(&mut self, id: usize, next: AttemptAction) {
        match next {
            AttemptAction::Send => self.send(id),
            AttemptAction::Retry(at) => {
                self.release(id);
                let at = at.saturating_duration_since(self.bench.instant(0)).as_nanos() as Nanos;
                self.agenda.schedule(at, SimEvent::Try(id));
            }
            AttemptAction::Fail(cause) => {
                self.release(id);
                self.open.remove(&id);
                self.samples.refused(cause.name());
                self.note([self.agenda.now(), id as u64, u64::MAX]);
            }
            next => unreachable!("nothing else follows from a choice, and yet: {next:?}"),
        }
    }

    fn release(&mut self, id: usize) {
        let open = self.open.get_mut(&id).expect("it is open");
        let now = self.bench.instant(self.agenda.now());
        open.reserved
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|reservation| self.router.release(reservation, now));
    }

    /// Sends both legs. Each holds its slot from now on.
    fn send(&mut self, id: usize) {
        let open = self.open.get_mut(&id).expect("it is open");
        for role in [Leg::Prefill, Leg::Decode] {
            let leg = open.reserved[role as usize].as_ref().map(Reservation::worker);
            open.legs[role as usize] =
                leg.map(|WorkerNumber(host)| (host, self.hosts[host].open()));
            open.held += u32::from(leg.is_some());
        }
        let [prefill, decode] =
            open.legs.map(|leg| leg.map_or(u32::MAX as usize, |(host, _)| host));
        self.note([self.agenda.now(), id as u64, (prefill as u64) << 32 | decode as u64]);
        let at = self.agenda.now() + self.plan.fabric.latency;
        self.agenda.schedule(at, SimEvent::Submit(id));
    }

    /// Submits the request to all its workers. Decode takes part in a session with prefill, or
    /// refuses the request if all its sessions have requests.
    pub(super) fn submit(&mut self, id: usize) {
        let now = self.agenda.now();
        let legs = self.open[&id].legs;
        let alone = legs[Leg::Prefill as usize].is_none();
        for (host, used) in legs.into_iter().flatten() {
            let mut request = self.request(id, used, self.arrivals.prompt(id), now);
            request.alone = alone;
            self.hosts[host].inbox.push_back(EngineCommand::Submit(Box::new(request)));
            self.wake(host, now);
        }
        let [Some((source, leg)), Some((host, of_decode))] = legs else { return };
        let (instant, takes) = (self.bench.instant(now), self.plan.session_setup);
        let Some(ready) = self.hosts[host].sessions.enter(source, instant, takes) else {
            let (SlotUse { slot, generation }, cause) = (of_decode, Cause::Overloaded);
            let command = EngineCommand::Answer(TransferAnswer::Abort {
                worker: WORKER,
                slot,
                generation,
                cause,
            });
            return self.hosts[host].inbox.push_back(command);
        };
        self.open.get_mut(&id).expect("it is open").session = Some(source);
        let ready = now + ready.saturating_duration_since(instant).as_nanos() as Nanos;
        match self.plan.allocation {
            DecodeAllocation::Early => {
                let command = self.session_ready(id, source);
                match ready > now {
                    true => self.agenda.schedule(ready, SimEvent::Tell { host, command }),
                    false => self.hosts[host].inbox.push_back(command),
                }
            }
            DecodeAllocation::Late => {
                let SlotUse { slot, generation } = leg;
                let command = EngineCommand::Answer(TransferAnswer::Awaited {
                    worker: WORKER,
                    slot,
                    generation,
                });
                let at = ready + self.plan.fabric.latency;
                self.agenda.schedule(at, SimEvent::Tell { host: source, command });
            }
        }
    }

    /// The command that allows the decode leg to take pages.
    pub(super) fn session_ready(&self, id: usize, source: usize) -> EngineCommand {
        let (_, SlotUse { slot, generation }) =
            self.open[&id].legs[Leg::Decode as usize].expect("it was sent");
        EngineCommand::Answer(TransferAnswer::SessionReady {
            worker: WORKER,
            slot,
            generation,
            session: SessionId(source as u32),
        })
    }

    fn request(&self, id: usize, used: SlotUse, prompt: Vec<u32>, now: Nanos) -> EngineRequest {
        let untold = u32::from(self.plan.engine == SimEngine::Recorded);
        let (now, max_new) = (self.bench.instant(now), self.arrivals.list()[id].output + untold);
        let pages = (prompt.len() as u32 + max_new).div_ceil(self.size.config.page_size);
        EngineRequest {
            id: RequestId(id as u64),
            worker: WORKER,
            room: Room(id as u64),
            slot: used.slot,
            generation: used.generation,
            prompt,
            alone: false,
            keep: false,
            resumed: 0,
            output: Vec::with_capacity(max_new as usize),
            pages: RequestPages::with_capacity(pages as usize, self.size.config.groups),
            keys: Vec::with_capacity(pages as usize),
            salt: Some(Salt::default()),
            sampling: SamplingParams::GREEDY,
            grammar: None,
            rules: None,
            top_logprobs: 0,
            prompt_logprobs: None,
            priority: self.arrivals.list()[id].priority,
            max_new,
            stop_tokens: Vec::new(),
            ignore_eos: true,
            deadline: now + PATIENCE,
            stamps: Stamps::new(now),
        }
    }

    /// Handles a refusal: a worker's queue is full, or the worker learns that the other worker's
    /// queue is full.
    pub(super) fn refused(
        &mut self,
        role: Leg,
        request: RequestId,
        cause: Cause,
    ) -> Result<(), Violation> {
        let (now, latency) = (self.agenda.now(), self.plan.fabric.latency);
        let open = self.named(request)?;
        open.ended[role as usize] = true;
        match (open.refused, cause) {
            (Some(_), Cause::OtherLeg | Cause::Overloaded) => {}
            (None, Cause::Overloaded) => {
                open.refused = Some(role);
                let other = role.other() as usize;
                if let Some((host, leg)) = open.legs[other].filter(|_| !open.ended[other]) {
                    // The refusal goes to the router, which notifies the other worker.
                    self.agenda.schedule(now + 2 * latency, SimEvent::Abort { host, leg });
                }
            }
            _ => {
                let what = format!("its {role} leg fails: {cause}");
                return Err(Violation::about(Rule::Ends, request.0 as usize, what));
            }
        }
        Ok(())
    }

    /// Ends a refused attempt.
    pub(super) fn try_again(&mut self, id: usize, role: Leg) {
        let (now, chance) = (self.bench.instant(self.agenda.now()), self.dice.next_u64());
        let open = self.open.get_mut(&id).expect("it is open");
        open.ended = [false; 2];
        let terms = &mut AttemptContext { now, chance, deadline: None, retries: &mut self.retries };
        let next = open.core.apply_event(AttemptEvent::Failed(role, Cause::Overloaded), terms);
        self.follow(id, next);
    }
}
