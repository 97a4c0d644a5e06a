//! A cluster under load: requests come, the router chooses, workers take turns, KV takes its time.
//!
//! Owns: the agenda, the hosts, the requests that are open. What a turn tells, it tells when it has taken its time.
//! Between hosts there are messages of one latency each, in the order of production: both legs leave, decode grants pages
//! (late: shows interest, hears that the prompt is computed, then grants), prefill sends each chunk when it is computed (what its cache has, at once), decode tells Done. What a turn tells before
//! its forward pass is heard then, if the worker rings for it. A worker without a free
//! slot says so before anything travels; one that lets too many wait says so when the request has come, and the other leg
//! is ended.

mod requests;
mod told;
mod ways;

use super::super::agenda::{Agenda, Nanos};
use super::super::checkers::{Checker, Finding};
use super::super::dice::Dice;
use super::super::model::mix;
use super::arrivals::Arrivals;
use super::host::{Bench, Half, Host, WORKER};
use super::plan::{Plan, Size};
use super::report::{Samples, Summary, Totals};
use super::transfers::{Flow, Use};
use crate::cause::Cause;
use crate::cluster::flight::Flight;
use crate::cluster::retries::Retries;
use crate::cluster::router::{Booking, Role, Router};
use crate::config::resolved::RetryTerms;
use crate::ids::RequestId;
use crate::sched::mailbox::Command;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::Target;
use crate::transfer::status::Move;
use std::collections::BTreeMap;
use std::fmt;
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
        ended.map_err(|finding| Failure {
            finding,
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
            return Err(Finding::new(
                Checker::Ends,
                format!("{ended} of {came} requests have ended"),
            ));
        }
        if let Some((worker, _, load)) = self.router.workers().find(|(_, _, load)| load.booked > 0)
        {
            let what =
                format!("{} sequences are still charged to worker {}", load.booked, worker.0);
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
            Some(host) => {
                Err(Finding::new(Checker::Pages, format!("worker {host} has lost pages")))
            }
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

    fn named(&mut self, request: RequestId) -> Result<&mut Open, Finding> {
        let id = request.0 as usize;
        let open = self.open.get_mut(&id);
        open.ok_or_else(|| {
            Finding::about(Checker::Events, id, "something is told of it after its end")
        })
    }
}
