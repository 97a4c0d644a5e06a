//! What becomes of a request: it is tried, goes to its workers, is refused and tried again.
//!
//! Owns: what the router is asked, and what its workers are given. Every try holds a slot of each worker that it was sent to, and
//! the next begins when all are back. Not here: what workers tell of it (`told`).

use super::super::super::agenda::Nanos;
use super::super::super::checkers::{Checker, Finding};
use super::super::host::WORKER;
use super::super::transfers::Use;
use super::{Cluster, Happening, Open, PATIENCE};
use crate::cause::Cause;
use crate::cluster::flight::{Flight, News, Next, Terms};
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::{Booking, NoWorker, Role};
use crate::config::flags::Engine;
use crate::config::resolved::DecodeAllocation;
use crate::ids::{RequestId, Room};
use crate::kv::prefix::Salt;
use crate::model::sampler::SamplingParams;
use crate::sched::mailbox::Command;
use crate::sched::request::{Request, Stamps};
use crate::transfer::command::SessionId;

impl Cluster<'_> {
    pub(super) fn begin(&mut self, id: usize) {
        let open = Open {
            core: Flight::default(),
            booked: [None, None],
            legs: [None; 2],
            first: 0,
            last: 0,
            tokens: 0,
            sampled: 0,
            cached: 0,
            computed: 0,
            held: 0,
            refused: None,
            ended: [false; 2],
        };
        self.open.insert(id, open);
        self.attempt(id);
    }

    /// Takes a pair, as the router does.
    pub(super) fn attempt(&mut self, id: usize) {
        let now = self.bench.instant(self.agenda.now());
        let chance = self.dice.draw();
        let mut terms = Terms { now, chance, deadline: None, retries: &mut self.retries };
        let open = self.open.get_mut(&id).expect("it is open");
        let work = self.arrivals.work(id);
        let next = match self.router.choose_serving(&work, open.core.avoid(), now) {
            Err(NoWorker::Late { .. }) => {
                self.late += 1;
                open.core.late()
            }
            Err(nobody) => open.core.nobody(nobody.may_come(), &terms),
            Ok((prefill, decode)) => {
                let workers = [prefill.as_ref().map(Booking::worker), Some(decode.worker())];
                open.core.choose(workers[0], workers[1]);
                open.booked = [prefill, Some(decode)];
                let is_full = |&role: &Role| {
                    workers[role as usize]
                        .is_some_and(|WorkerNumber(host)| !self.hosts[host].has_room())
                };
                let full = [Role::Prefill, Role::Decode].into_iter().find(is_full);
                match (open.core.take(News::Opened(0), &mut terms), full) {
                    (_, Some(role)) => {
                        open.core.take(News::Failed(role, Cause::Overloaded), &mut terms)
                    }
                    (next, None) => next,
                }
            }
        };
        self.follow(id, next);
    }

    /// Does what the router does then.
    fn follow(&mut self, id: usize, next: Next) {
        match next {
            Next::Send => self.send(id),
            Next::Again(at) => {
                self.release(id);
                let at = at.saturating_duration_since(self.bench.instant(0)).as_nanos() as Nanos;
                self.agenda.put(at, Happening::Try(id));
            }
            Next::Fail(cause) => {
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
        open.booked
            .iter_mut()
            .filter_map(Option::take)
            .for_each(|booking| self.router.release(booking, now));
    }

    /// Both legs leave; each has its slot from now on.
    fn send(&mut self, id: usize) {
        let open = self.open.get_mut(&id).expect("it is open");
        for role in [Role::Prefill, Role::Decode] {
            let leg = open.booked[role as usize].as_ref().map(Booking::worker);
            open.legs[role as usize] =
                leg.map(|WorkerNumber(host)| (host, self.hosts[host].open()));
            open.held += u32::from(leg.is_some());
        }
        let [prefill, decode] =
            open.legs.map(|leg| leg.map_or(u32::MAX as usize, |(host, _)| host));
        self.note([self.agenda.now(), id as u64, (prefill as u64) << 32 | decode as u64]);
        let at = self.agenda.now() + self.plan.fabric.latency;
        self.agenda.put(at, Happening::Submit(id));
    }

    /// All workers have the request; decode has a session to prefill.
    pub(super) fn submit(&mut self, id: usize) {
        let now = self.agenda.now();
        let legs = self.open[&id].legs;
        let alone = legs[Role::Prefill as usize].is_none();
        for (host, used) in legs.into_iter().flatten() {
            let mut request = self.request(id, used, self.arrivals.prompt(id), now);
            request.alone = alone;
            self.hosts[host].inbox.push_back(Command::Submit(Box::new(request)));
            self.wake(host, now);
        }
        let [Some((source, Use { slot, generation })), Some((host, _))] = legs else { return };
        match self.plan.allocation {
            DecodeAllocation::Early => {
                let ready = self.session_ready(id, source);
                self.hosts[host].inbox.push_back(ready);
            }
            DecodeAllocation::Late => {
                let command = Command::Awaited { worker: WORKER, slot, generation };
                let at = now + self.plan.fabric.latency;
                self.agenda.put(at, Happening::Tell { host: source, command });
            }
        }
    }

    /// That the decode leg may take pages.
    pub(super) fn session_ready(&self, id: usize, source: usize) -> Command {
        let (_, Use { slot, generation }) =
            self.open[&id].legs[Role::Decode as usize].expect("it was sent");
        Command::SessionReady {
            worker: WORKER,
            slot,
            generation,
            session: SessionId(source as u32),
        }
    }

    fn request(&self, id: usize, used: Use, prompt: Vec<u32>, now: Nanos) -> Request {
        let untold = u32::from(self.plan.engine == Engine::Recorded);
        let (now, max_new) = (self.bench.instant(now), self.arrivals.list()[id].output + untold);
        let pages = (prompt.len() as u32 + max_new).div_ceil(self.size.config.page_size);
        Request {
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
            pages: Vec::with_capacity(pages as usize),
            salt: Some(Salt::default()),
            sampling: SamplingParams::GREEDY,
            top_logprobs: 0,
            max_new,
            stop_tokens: Vec::new(),
            ignore_eos: true,
            deadline: now + PATIENCE,
            stamps: Stamps::new(now),
        }
    }

    /// A worker lets nobody more wait, or hears that the other one does not.
    pub(super) fn refused(
        &mut self,
        role: Role,
        request: RequestId,
        cause: Cause,
    ) -> Result<(), Finding> {
        let (now, latency) = (self.agenda.now(), self.plan.fabric.latency);
        let open = self.named(request)?;
        open.ended[role as usize] = true;
        match (open.refused, cause) {
            (Some(_), Cause::OtherLeg | Cause::Overloaded) => {}
            (None, Cause::Overloaded) => {
                open.refused = Some(role);
                let other = role.other() as usize;
                if let Some((host, leg)) = open.legs[other].filter(|_| !open.ended[other]) {
                    // The refusal goes to the router, which tells the other worker.
                    self.agenda.put(now + 2 * latency, Happening::Abort { host, leg });
                }
            }
            _ => {
                let what = format!("its {role} leg fails: {cause}");
                return Err(Finding::about(Checker::Ends, request.0 as usize, what));
            }
        }
        Ok(())
    }

    /// A try that was refused is over.
    pub(super) fn try_again(&mut self, id: usize, role: Role) {
        let (now, chance) = (self.bench.instant(self.agenda.now()), self.dice.draw());
        let open = self.open.get_mut(&id).expect("it is open");
        open.ended = [false; 2];
        let terms = &mut Terms { now, chance, deadline: None, retries: &mut self.retries };
        let next = open.core.take(News::Failed(role, Cause::Overloaded), terms);
        self.follow(id, next);
    }
}
