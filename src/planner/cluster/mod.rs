//! A cluster under load: requests arrive, the router chooses workers, workers take turns, KV moves.
//!
//! Owns: the event queue, the hosts, the open requests. The events of a turn take effect when its
//! time has passed. Events before its forward pass take effect at once if the worker wakes `ctl`.
//! Each message between hosts takes one latency. The order is as in production: both legs leave,
//! decode has a session with prefill, decode grants pages, prefill sends each computed chunk,
//! decode sends Done. With late allocation, decode announces interest, and grants pages when the
//! prompt is computed. A worker without a free slot refuses a request at once. A worker with a full
//! queue refuses it at its arrival, and the other leg is aborted. The same holds for a decode
//! worker with a request in each of its sessions.

mod events;
mod links;
mod requests;

use super::arrivals::Arrivals;
use super::host::{Bench, Host, MoverStub, WORKER};
use super::plan::{LoadPlan, LoadWorkerSize};
use super::report::{LoadSamples, Summary, Totals};
use super::transfers::{ChunkTransfer, SlotUse};
use super::violation::{Rule, Violation};
use crate::cause::Cause;
use crate::config::RetryConfig;
use crate::ids::{Leg, RequestId};
use crate::routing::attempts::Attempts;
use crate::routing::balancer::{LoadBalancer, Reservation};
use crate::routing::retries::RetryBudget;
use crate::sched::messages::EngineCommand;
use crate::stdx::event_queue::{EventQueue, Nanos};
use crate::stdx::rng::{Rng, scramble};
use crate::transfer::answer::TransferAnswer;
use crate::transfer::aux::AuxRecord;
use crate::transfer::status::Move;
use crate::transfer::target::Target;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Longer than any run, because no client gives up in the load mode.
const PATIENCE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A scheduled event.
#[derive(Debug)]
enum SimEvent {
    /// The next request arrives.
    Arrive,
    /// An attempt of a request begins.
    Try(usize),
    /// Both legs reach their workers.
    Submit(usize),
    /// A worker's turn, if it is still due then.
    Turn { host: usize, at: Nanos },
    /// A message reaches a worker, which passes it to its engine.
    Tell { host: usize, command: EngineCommand },
    /// A Destination message reaches its prefill worker.
    Grant { host: usize, source: SlotUse, target: Target },
    /// The first byte of a flow reaches the NIC of its destination.
    Come(Box<ChunkTransfer>),
    /// The last byte has landed.
    Land(Box<ChunkTransfer>),
    /// All KV of a prompt has landed, without a wait at its prefill worker.
    LandAlone { host: usize, destination: SlotUse, record: Box<AuxRecord> },
    /// A prefill worker receives Done.
    Done { host: usize, source: SlotUse },
    /// A worker learns that the other leg was refused.
    Abort { host: usize, leg: SlotUse },
}

/// One open request.
#[derive(Debug)]
struct Open {
    core: Attempts,
    /// The reservations, by role.
    reserved: [Option<Reservation>; 2],
    /// Host and slot of each leg that was sent, by role. If a worker serves alone, there is no
    /// other leg.
    legs: [Option<(usize, SlotUse)>; 2],
    /// When its first and last token were generated.
    first: Nanos,
    last: Nanos,
    tokens: u32,
    /// Number of tokens, including prefill's token, which not every engine reports.
    sampled: u32,
    cached: u32,
    /// Time at which the prompt was computed, if decode takes pages then.
    computed: Nanos,
    /// The host of the prefill worker, while the decode leg has a session with it.
    session: Option<usize>,
    /// Slots that it still holds.
    held: u32,
    /// The role that has refused it. The retry begins when this attempt holds no more slots.
    refused: Option<Leg>,
    /// By role, in an attempt that was refused: whether the leg has ended.
    ended: [bool; 2],
}

/// A violation found in a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadFailure {
    violation: Violation,
    at: Nanos,
    seed: u64,
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}, {} ns: {}", self.seed, self.at, self.violation)
    }
}

/// The simulated cluster.
pub struct LoadCluster<'a> {
    plan: &'a LoadPlan,
    arrivals: &'a Arrivals,
    size: LoadWorkerSize,
    agenda: EventQueue<SimEvent>,
    dice: Rng,
    bench: Bench,
    /// Numbered as in the router: prefill workers first.
    hosts: Vec<Host>,
    router: LoadBalancer,
    retries: RetryBudget,
    next: usize,
    open: BTreeMap<usize, Open>,
    samples: LoadSamples,
    flows: Vec<ChunkTransfer>,
    moved: u64,
    /// Requests rejected because the forecast misses the limits.
    late: usize,
    happenings: u64,
    hash: u64,
    last_token: Nanos,
}

impl<'a> LoadCluster<'a> {
    /// A cluster that has just started.
    ///
    /// # Panics
    /// The memory is insufficient.
    pub fn new(plan: &'a LoadPlan, arrivals: &'a Arrivals) -> LoadCluster<'a> {
        let dice = Rng::new(plan.seed);
        let size = plan.size(arrivals.longest());
        let bench = Bench::new(&size, plan.cost).expect("memory for a page and the page lists");
        let roles = std::iter::repeat_n(Leg::Prefill, plan.prefill)
            .chain(std::iter::repeat_n(Leg::Decode, plan.decode));
        let router =
            LoadBalancer::new(plan.policies).with_forecast(plan.forecast()).seeded(plan.seed);
        let mut router = router.over_caches(plan.blocks());
        let base = bench.instant(0);
        for role in roles.clone() {
            let worker = router.join(role, base);
            router.probed(worker, true, base);
            router.set_local_prefill(worker, plan.local_prefill);
        }
        let hosts = roles.map(|role| Host::new(role, &size, &bench)).collect();
        let mut agenda = EventQueue::new(dice.fork("order"));
        agenda.schedule(arrivals.list()[0].at, SimEvent::Arrive);
        LoadCluster {
            plan,
            arrivals,
            size,
            agenda,
            dice: dice.fork("router"),
            bench,
            hosts,
            router,
            retries: RetryBudget::new(RetryConfig::of(plan.retries), base),
            next: 0,
            open: BTreeMap::new(),
            samples: LoadSamples::new(plan.objective),
            flows: Vec::new(),
            moved: 0,
            late: 0,
            happenings: 0,
            hash: 0,
            last_token: 0,
        }
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(mut self) -> Result<Summary, LoadFailure> {
        let begun = Instant::now();
        let ended = self.go_on();
        ended.map_err(|violation| LoadFailure {
            violation,
            at: self.agenda.now(),
            seed: self.plan.seed,
        })?;
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

    fn go_on(&mut self) -> Result<(), Violation> {
        while let Some(what) = self.agenda.pop() {
            self.happenings += 1;
            self.happen(what)?;
            if self
                .plan
                .least_good
                .is_some_and(|share| self.samples.good_at_most(self.arrivals.list().len()) < share)
            {
                // The remaining requests cannot change the result.
                return Ok(());
            }
        }
        self.check_end()
    }

    /// Checks the end: all requests have ended and hold nothing.
    fn check_end(&self) -> Result<(), Violation> {
        if let Some((&request, open)) = self.open.first_key_value() {
            return Err(Violation::about(Rule::Ends, request, format!("it hangs: {open:?}")));
        }
        if self.samples.ended() != self.arrivals.list().len() {
            let (ended, came) = (self.samples.ended(), self.arrivals.list().len());
            return Err(Violation::new(
                Rule::Ends,
                format!("{ended} of {came} requests have ended"),
            ));
        }
        if let Some((worker, _, load)) =
            self.router.workers().find(|(_, _, load)| load.reserved > 0)
        {
            let what =
                format!("{} sequences are still charged to worker {}", load.reserved, worker.0);
            return Err(Violation::new(Rule::Idle, what));
        }
        let held = self.hosts.iter().position(|host| !host.is_idle());
        if let Some(host) = held {
            let pages = self.hosts[host].stats.pages();
            return Err(Violation::new(
                Rule::Idle,
                format!("worker {host} holds something, its pages: {pages:?}"),
            ));
        }
        match self.hosts.iter().position(|host| host.stats.pages().total() != self.size.pages) {
            Some(host) => Err(Violation::new(Rule::Pages, format!("worker {host} has lost pages"))),
            None => Ok(()),
        }
    }

    fn happen(&mut self, what: SimEvent) -> Result<(), Violation> {
        let now = self.agenda.now();
        let latency = self.plan.fabric.latency;
        match what {
            SimEvent::Arrive => {
                let id = self.next;
                self.next += 1;
                if let Some(next) = self.arrivals.list().get(self.next) {
                    self.agenda.schedule(next.at, SimEvent::Arrive);
                }
                self.begin(id);
            }
            SimEvent::Try(id) => self.attempt(id),
            SimEvent::Submit(id) => self.submit(id),
            SimEvent::Turn { host, at } => {
                if self.hosts[host].due == at {
                    self.hosts[host].due = Nanos::MAX;
                    self.turn(host)?;
                }
            }
            SimEvent::Tell { host, command } => self.deliver(host, command),
            SimEvent::Grant { host, source, target } => {
                let SlotUse { slot, generation } = source;
                let granted = self.hosts[host].status.advance(slot, generation, Move::Grant);
                if granted.is_err() {
                    // It has already refused the request; decode will learn that soon.
                    return Ok(());
                }
                let worker = WORKER;
                let answer = TransferAnswer::Granted { worker, slot, generation, target };
                self.deliver(host, answer.into());
            }
            SimEvent::Come(flow) => {
                let takes = self.plan.fabric.time_of(flow.tokens);
                let last = self.hosts[flow.to].nic.receive(now, takes);
                self.agenda.schedule(last + latency, SimEvent::Land(flow));
            }
            SimEvent::Land(flow) => self.land(*flow),
            SimEvent::LandAlone { host, destination, record } => {
                if let MoverStub::Destination(half) = &mut self.hosts[host].half {
                    half.land(destination, Some(*record));
                }
                self.wake(host, now);
            }
            SimEvent::Abort { host, leg: SlotUse { slot, generation } } => {
                let (worker, cause) = (WORKER, Cause::OtherLeg);
                let answer = TransferAnswer::Abort { worker, slot, generation, cause };
                self.deliver(host, answer.into());
            }
            SimEvent::Done { host, source } => {
                if let MoverStub::Source(half) = &mut self.hosts[host].half {
                    half.done(source);
                }
                self.wake(host, now);
            }
        }
        Ok(())
    }

    /// Gives an engine a command, and wakes it.
    fn deliver(&mut self, host: usize, command: EngineCommand) {
        self.hosts[host].inbox.push_back(command);
        self.wake(host, self.agenda.now());
    }

    fn note(&mut self, numbers: [u64; 3]) {
        self.hash = numbers.into_iter().fold(self.hash, |hash, number| scramble(hash ^ number));
    }

    fn wake(&mut self, index: usize, at: Nanos) {
        let host = &mut self.hosts[index];
        let at = at.max(host.computes_until);
        if at < host.due {
            host.due = at;
            self.agenda.schedule(at, SimEvent::Turn { host: index, at });
        }
    }

    fn named(&mut self, request: RequestId) -> Result<&mut Open, Violation> {
        let id = request.0 as usize;
        let open = self.open.get_mut(&id);
        open.ok_or_else(|| Violation::about(Rule::Events, id, "it has an event after its end"))
    }
}
