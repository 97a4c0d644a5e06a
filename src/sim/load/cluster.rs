//! A cluster under load: requests come, the router chooses, workers take turns, KV takes its time.
//!
//! Owns: the agenda, the hosts, the requests that are open. What a turn tells, it tells when it has taken its time.
//! Between hosts there are messages of one latency each, in the order of production: both legs leave, decode grants pages
//! (late: shows interest, hears that the prompt is computed, then grants), prefill sends each chunk when it is computed (what its cache has, at once), decode tells Done. What a turn tells before
//! its forward pass is heard then, if the worker rings for it. A worker without a free
//! slot says so before anything travels; one that lets too many wait says so when the request has come, and the other leg
//! is ended.

use super::super::agenda::{Agenda, Nanos};
use super::super::checkers::{Checker, Finding};
use super::super::dice::Dice;
use super::super::model::mix;
use super::arrivals::Arrivals;
use super::host::{Bench, Half, Host, Turned, WORKER};
use super::plan::{Plan, Size};
use super::report::{Samples, Served, Summary, Totals};
use super::transfers::{Flow, Use};
use crate::cause::Cause;
use crate::cluster::flight::{Flight, News, Next, Terms};
use crate::cluster::loads::WorkerNumber;
use crate::cluster::retries::Retries;
use crate::cluster::router::{Booking, NoWorker, Role, Router};
use crate::config::flags::Engine;
use crate::config::resolved::{DecodeAllocation, RetryTerms};
use crate::ids::{RequestId, Room};
use crate::kv::prefix::Salt;
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::model::sampler::SamplingParams;
use crate::sched::mailbox::{Command, Event, Outcome};
use crate::sched::request::{Request, Stamps};
use crate::sched::worker::Activity;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{SessionId, Target};
use crate::transfer::status::Move;
use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::time::{Duration, Instant};

/// Longer than any run: in the load mode nobody gives up.
const PATIENCE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Something happens.
#[derive(Debug)]
enum Happening {
    /// The next request comes.
    Arrive,
    /// A request is tried, or tried again.
    Try(usize),
    /// Both legs are at their workers.
    Submit(usize),
    /// A worker's turn, if it is still due then.
    Turn { host: usize, at: Nanos },
    /// A message is at a worker, which tells its engine.
    Tell { host: usize, command: Command },
    /// A Destination is at its prefill worker.
    Grant { host: usize, source: Use, target: Target },
    /// The first byte of a flow is at the NIC of its destination.
    Come(Box<Flow>),
    /// The last one is in place.
    Land(Box<Flow>),
    /// The same, of all that a prompt left, where its prefill worker does not wait for it.
    LandAlone { host: usize, destination: Use, record: Box<AuxRecord> },
    /// A prefill worker hears Done.
    Done { host: usize, source: Use },
    /// A worker hears that the other leg was refused.
    Abort { host: usize, leg: Use },
}

/// One open request.
#[derive(Debug)]
struct Open {
    core: Flight,
    /// By role.
    booked: [Option<Booking>; 2],
    /// By role, since it was sent: host and slot. Who reads the prompt itself has no other leg.
    legs: [Option<(usize, Use)>; 2],
    /// Of its tokens, when the first and the last were told.
    first: Nanos,
    last: Nanos,
    tokens: u32,
    /// The same, with the one that prefill samples, which not every engine tells.
    sampled: u32,
    cached: u32,
    /// When the prompt was computed, where decode takes pages then.
    computed: Nanos,
    /// Slots that are not back.
    held: u32,
    /// Who has refused it; it is tried again when nothing is left of this try.
    refused: Option<Role>,
    /// By role, of a try that was refused: whether the leg has ended.
    ended: [bool; 2],
}

/// What was not as it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    finding: Finding,
    at: Nanos,
    seed: u64,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { by, request, what } = &self.finding;
        write!(f, "seed {}, {} ns: {by:?}: {what}", self.seed, self.at)?;
        request.map_or(Ok(()), |request| write!(f, " (request {request})"))
    }
}

/// The whole.
pub struct Cluster<'a> {
    plan: &'a Plan,
    arrivals: &'a Arrivals,
    size: Size,
    agenda: Agenda<Happening>,
    dice: Dice,
    bench: Bench,
    /// Numbered as the router numbers them: prefill workers first.
    hosts: Vec<Host>,
    router: Router,
    retries: Retries,
    next: usize,
    open: BTreeMap<usize, Open>,
    samples: Samples,
    flows: Vec<Flow>,
    moved: u64,
    /// Requests that were foretold to come too late.
    late: usize,
    happenings: u64,
    hash: u64,
    last_token: Nanos,
}

impl<'a> Cluster<'a> {
    /// A cluster that has just started.
    ///
    /// # Panics
    /// There is no memory for it.
    pub fn new(plan: &'a Plan, arrivals: &'a Arrivals) -> Cluster<'a> {
        let dice = Dice::new(plan.seed);
        let size = plan.size(arrivals.longest());
        let bench = Bench::new(&size, plan.cost).expect("memory for a page and the page lists");
        let roles = std::iter::repeat_n(Role::Prefill, plan.prefill)
            .chain(std::iter::repeat_n(Role::Decode, plan.decode));
        let router = Router::new(plan.policies).foretelling(plan.forecast()).seeded(plan.seed);
        let mut router = router.over_caches(plan.blocks());
        let base = bench.instant(0);
        for role in roles.clone() {
            let worker = router.join(role, base);
            router.probed(worker, true, base);
            router.set_reads_alone(worker, plan.local_prefill);
        }
        let hosts = roles.map(|role| Host::new(role, &size, &bench)).collect();
        let mut agenda = Agenda::new(dice.fork("order"));
        agenda.put(arrivals.list()[0].at, Happening::Arrive);
        Cluster {
            plan,
            arrivals,
            size,
            agenda,
            dice: dice.fork("router"),
            bench,
            hosts,
            router,
            retries: Retries::new(RetryTerms::of(plan.retries), base),
            next: 0,
            open: BTreeMap::new(),
            samples: Samples::new(plan.objective),
            flows: Vec::new(),
            moved: 0,
            late: 0,
            happenings: 0,
            hash: 0,
            last_token: 0,
        }
    }

    /// Everything, to the end.
    ///
    /// # Errors
    /// What was not as it must be.
    pub fn run(mut self) -> Result<Summary, Failure> {
        let begun = Instant::now();
        let ended = self.go_on();
        ended.map_err(|finding| Failure { finding, at: self.agenda.now(), seed: self.plan.seed })?;
        let first = self.arrivals.list()[0].at;
        let totals = Totals {
            seed: self.plan.seed,
            makespan: self.last_token - first.min(self.last_token),
            kv_bytes: self.moved * self.plan.fabric.bytes_per_token,
            early: self.late,
            happenings: self.happenings,
            hash: self.hash,
            wall: begun.elapsed(),
        };
        Ok(Summary::new(self.samples, &self.hosts, totals))
    }

    fn go_on(&mut self) -> Result<(), Finding> {
        while let Some(what) = self.agenda.take() {
            self.happenings += 1;
            self.happen(what)?;
            if self
                .plan
                .least_good
                .is_some_and(|share| self.samples.good_at_most(self.arrivals.list().len()) < share)
            {
                // What is still to come changes nothing any more.
                return Ok(());
            }
        }
        self.check_end()
    }

    /// Nothing is to happen any more: all requests have ended, and nothing is left of any.
    fn check_end(&self) -> Result<(), Finding> {
        if let Some((&request, open)) = self.open.first_key_value() {
            return Err(Finding::about(Checker::Ends, request, format!("it hangs: {open:?}")));
        }
        if self.samples.ended() != self.arrivals.list().len() {
            let (ended, came) = (self.samples.ended(), self.arrivals.list().len());
            return Err(Finding::new(Checker::Ends, format!("{ended} of {came} requests have ended")));
        }
        if let Some((worker, _, load)) = self.router.workers().find(|(_, _, load)| load.booked > 0) {
            let what = format!("{} sequences are still charged to worker {}", load.booked, worker.0);
            return Err(Finding::new(Checker::Idle, what));
        }
        let held = self.hosts.iter().position(|host| !host.is_idle());
        if let Some(host) = held {
            let pages = self.hosts[host].stats.pages();
            return Err(Finding::new(
                Checker::Idle,
                format!("worker {host} holds something, its pages: {pages:?}"),
            ));
        }
        match self.hosts.iter().position(|host| host.stats.pages().total() != self.size.pages) {
            Some(host) => Err(Finding::new(Checker::Pages, format!("worker {host} has lost pages"))),
            None => Ok(()),
        }
    }

    fn happen(&mut self, what: Happening) -> Result<(), Finding> {
        let now = self.agenda.now();
        let latency = self.plan.fabric.latency;
        match what {
            Happening::Arrive => {
                let id = self.next;
                self.next += 1;
                if let Some(next) = self.arrivals.list().get(self.next) {
                    self.agenda.put(next.at, Happening::Arrive);
                }
                self.begin(id);
            }
            Happening::Try(id) => self.attempt(id),
            Happening::Submit(id) => self.submit(id),
            Happening::Turn { host, at } => {
                if self.hosts[host].due == at {
                    self.hosts[host].due = Nanos::MAX;
                    self.turn(host)?;
                }
            }
            Happening::Tell { host, command } => {
                self.hosts[host].inbox.push_back(command);
                self.wake(host, now);
            }
            Happening::Grant { host, source, target } => {
                let Use { slot, generation } = source;
                let granted = self.hosts[host].status.advance(slot, generation, Move::Grant);
                if granted.is_err() {
                    // It has refused the request meanwhile, which decode is about to hear.
                    return Ok(());
                }
                let command = Command::Granted { worker: WORKER, slot, generation, target };
                self.hosts[host].inbox.push_back(command);
                self.wake(host, now);
            }
            Happening::Come(flow) => {
                let takes = self.plan.fabric.time_of(flow.tokens);
                let last = self.hosts[flow.to].nic.receive(now, takes);
                self.agenda.put(last + latency, Happening::Land(flow));
            }
            Happening::Land(flow) => self.land(*flow),
            Happening::LandAlone { host, destination, record } => {
                if let Half::Destination(half) = &mut self.hosts[host].half {
                    half.land(destination, Some(*record));
                }
                self.wake(host, now);
            }
            Happening::Abort { host, leg: Use { slot, generation } } => {
                let cause = Cause::OtherLeg;
                let command = Command::Abort { worker: WORKER, slot, generation, cause };
                self.hosts[host].inbox.push_back(command);
                self.wake(host, now);
            }
            Happening::Done { host, source } => {
                if let Half::Source(half) = &mut self.hosts[host].half {
                    half.done(source);
                }
                self.wake(host, now);
            }
        }
        Ok(())
    }

    fn note(&mut self, numbers: [u64; 3]) {
        self.hash = numbers.into_iter().fold(self.hash, |hash, number| mix(hash ^ number));
    }

    fn wake(&mut self, index: usize, at: Nanos) {
        let host = &mut self.hosts[index];
        let at = at.max(host.computes_until);
        if at < host.due {
            host.due = at;
            self.agenda.put(at, Happening::Turn { host: index, at });
        }
    }

    fn begin(&mut self, id: usize) {
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
    fn attempt(&mut self, id: usize) {
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
                    workers[role as usize].is_some_and(|WorkerNumber(host)| !self.hosts[host].has_room())
                };
                let full = [Role::Prefill, Role::Decode].into_iter().find(is_full);
                match (open.core.take(News::Opened(0), &mut terms), full) {
                    (_, Some(role)) => open.core.take(News::Failed(role, Cause::Overloaded), &mut terms),
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
        open.booked.iter_mut().filter_map(Option::take).for_each(|booking| self.router.release(booking, now));
    }

    /// Both legs leave; each has its slot from now on.
    fn send(&mut self, id: usize) {
        let open = self.open.get_mut(&id).expect("it is open");
        for role in [Role::Prefill, Role::Decode] {
            let leg = open.booked[role as usize].as_ref().map(Booking::worker);
            open.legs[role as usize] = leg.map(|WorkerNumber(host)| (host, self.hosts[host].open()));
            open.held += u32::from(leg.is_some());
        }
        let [prefill, decode] = open.legs.map(|leg| leg.map_or(u32::MAX as usize, |(host, _)| host));
        self.note([self.agenda.now(), id as u64, (prefill as u64) << 32 | decode as u64]);
        let at = self.agenda.now() + self.plan.fabric.latency;
        self.agenda.put(at, Happening::Submit(id));
    }

    /// All workers have the request; decode has a session to prefill.
    fn submit(&mut self, id: usize) {
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
    fn session_ready(&self, id: usize, source: usize) -> Command {
        let (_, Use { slot, generation }) = self.open[&id].legs[Role::Decode as usize].expect("it was sent");
        Command::SessionReady { worker: WORKER, slot, generation, session: SessionId(source as u32) }
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

    /// What the last step told is told now that its time has passed; then comes the next, of which some is told at once.
    fn turn(&mut self, index: usize) -> Result<(), Finding> {
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
            return Err(Finding::about(Checker::Ends, id, format!("its {role} leg ends with {outcome:?}")));
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

    /// A worker lets nobody more wait, or hears that the other one does not.
    fn refused(&mut self, role: Role, request: RequestId, cause: Cause) -> Result<(), Finding> {
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
    fn try_again(&mut self, id: usize, role: Role) {
        let (now, chance) = (self.bench.instant(self.agenda.now()), self.dice.draw());
        let open = self.open.get_mut(&id).expect("it is open");
        open.ended = [false; 2];
        let terms = &mut Terms { now, chance, deadline: None, retries: &mut self.retries };
        let next = open.core.take(News::Failed(role, Cause::Overloaded), terms);
        self.follow(id, next);
    }

    fn named(&mut self, request: RequestId) -> Result<&mut Open, Finding> {
        let id = request.0 as usize;
        let open = self.open.get_mut(&id);
        open.ok_or_else(|| Finding::about(Checker::Events, id, "something is told of it after its end"))
    }

    /// Chunks leave by the NICs of their hosts.
    fn leave(&mut self) {
        let now = self.agenda.now();
        for flow in mem::take(&mut self.flows) {
            self.moved += u64::from(flow.tokens);
            if self.plan.engine == Engine::Recorded {
                // All of it, when all is computed, and as if nobody else used the link.
                if flow.last.is_some() && self.takes_late_as_recorded() {
                    self.agenda.put(now, Happening::Done { host: flow.from, source: flow.source });
                } else if let Some(last) = &flow.last {
                    let tokens = self.arrivals.list()[last.room as usize].input;
                    let at = now + self.plan.fabric.time_of(tokens);
                    self.agenda.put(at, Happening::Land(Box::new(flow)));
                }
                continue;
            }
            let takes = self.plan.fabric.time_of(flow.tokens);
            let first = self.hosts[flow.from].nic.send(now, takes);
            self.agenda.put(first, Happening::Come(Box::new(flow)));
        }
    }

    /// The recorded engine's decode workers take pages when a prompt is computed, and its KV leaves then, whatever the
    /// prefill worker does meanwhile.
    fn takes_late_as_recorded(&self) -> bool {
        self.plan.engine == Engine::Recorded && self.plan.allocation == DecodeAllocation::Late
    }

    /// Decode has pages: the KV is there when it has had its time since it was computed. Its prefill worker, which hears
    /// of the pages between two passes, has nothing more to send.
    fn come_at_once(&mut self, to: usize, destination: Use, room: Room) {
        let id = room.0 as usize;
        let takes = self.plan.fabric.time_of(self.arrivals.list()[id].input);
        let at = self.agenda.now().max(self.open[&id].computed + takes);
        let token = Sampled { token: 0, logprob: 0.0, top: TopLogprobs::EMPTY };
        let record = AuxRecord::new(room, &token, self.open[&id].cached);
        self.agenda.put(at, Happening::LandAlone { host: to, destination, record: Box::new(record) });
    }

    fn land(&mut self, flow: Flow) {
        let now = self.agenda.now();
        let Flow { from, source, to, destination, last, .. } = flow;
        let is_last = last.is_some();
        if let Half::Destination(half) = &mut self.hosts[to].half {
            half.land(destination, last);
        }
        if is_last {
            self.agenda.put(now + self.plan.fabric.latency, Happening::Done { host: from, source });
            self.wake(to, now);
        }
    }
}
