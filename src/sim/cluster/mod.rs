//! A cluster in one thread: all events of a run, in the order that the seed determines.
//!
//! Owns: hosts with their processes, connections between them, the router, the time, the checkers.
//! A thread of a process takes a turn when it was woken or is due. A message arrives after its
//! delay. Invariants: all random numbers come from the plan's generator, so that the same seed
//! gives the same run. A connection keeps its order; two connections have no common order.

mod calls;
mod injector;
mod lanes;
mod network;
mod requests;
mod roles;
mod stream;
mod turns;
mod writes;

use super::checkers::ends::Ends;
use super::checkers::reasons::Reasons;
use super::checkers::shadow::Shadow;
use super::checkers::{Checked, Checker, Finding, idle, silence};
use super::edge::{ConnNumber, Input, Parcel};
use super::faults::Fault;
use super::plan::{Plan, Size};
use super::process::{Process, Site, Thread};
use super::router::Flights;
use super::router::fleet::CallName;
use super::trace::Trace;
use super::workload::Workload;
use crate::ids::{Leg, Room};
use crate::limits::EARLY_DESTINATION_LIFE;
use crate::router::TICK as ROUTER_TICK;
use crate::stdx::event_queue::{EventQueue, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use calls::Call;
use lanes::{LaneNumber, Lanes};
use roles::PendingRoleChange;
use std::collections::BTreeMap;
use std::time::Instant;
use stream::Stream;
use writes::{Step, Writes};

/// Maximum number of events of a run: many times the number of the longest run.
const HAPPENINGS_MAX: u64 = 20_000_000;
/// Time between two checks for overdue work.
const CHECK_EVERY: Nanos = SECOND;
/// Longest time of a request after all faults are over.
const RECOVERED: Nanos = 10 * SECOND;
/// Time from the last request's end until it holds nothing. Rooms without a request are kept
/// longer.
const CLEARED: Nanos = 10 * SECOND;
/// Time from a drain's start, without other faults, until the process has ended and another one
/// serves.
const DRAINED: Nanos = 60 * SECOND;
/// Maximum delay of a thread that always lags.
const LAG_MAX: Nanos = 30 * MILLI;
/// Longest wait of a lost packet until it is resent.
const RESENT: Nanos = 400 * MILLI;

/// A violation found in a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SeedFailure {
    /// The checker that reports it.
    pub by: Checker,
    /// What is wrong.
    pub what: String,
    /// Simulated time of the violation.
    pub at: Nanos,
    /// The room of the request concerned, if there is one.
    pub room: Option<Room>,
}

/// The result of a run.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct SeedReport {
    /// Equal for equal runs.
    pub hash: u64,
    /// Number of events.
    pub happenings: u64,
    /// Requests begun, with the trial requests that check at the end whether each pair serves
    /// again.
    pub requests: usize,
    /// Number of trial requests among them.
    pub trials: usize,
    /// Rooms by request, if a room is selected.
    pub rooms: Vec<(usize, Room)>,
    /// Number of requests that succeeded.
    pub well: usize,
    /// The failed requests, by cause.
    pub failures: BTreeMap<&'static str, usize>,
    /// Retries of all requests.
    pub retries: usize,
    /// Number of workers that changed their role,
    pub turned: usize,
    /// and of those that kept it after an order to change.
    pub stayed: usize,
    /// Simulated time of the run.
    pub time: Nanos,
}

/// A scheduled event.
#[derive(Debug)]
enum SimEvent {
    /// Check: no request waits for a worker that was silent since this time.
    Silent { host: usize, life: u32, since: Nanos },
    /// A thread's turn, if it is still due then.
    Turn { host: usize, life: u32, thread: Thread, at: Nanos },
    /// The next step of a queue pair.
    Write(Step, u32),
    /// The next step of a lane.
    Lane(lanes::Step, LaneNumber),
    /// The next parcel of a connection reaches this end.
    Arrive { conn: ConnNumber, end: usize },
    /// A dial reaches the other host, or fails.
    Reach { conn: ConnNumber, until: Nanos },
    /// Something arrives outside a connection.
    Pass { host: usize, life: u32, input: Input },
    /// The router's dial reaches a worker's host, or fails.
    Knock(CallName),
    /// The next parcel of a call's connection reaches the worker.
    ToWorker(CallName),
    /// The next parcel of a call's connection reaches the router.
    ToRouter(CallName),
    /// The router finds that the connections it keeps to a process are closed.
    Dropped { host: usize, life: u32 },
    /// The router checks for overdue work.
    RouterTick,
    /// A client sends a request.
    Request,
    /// The next attempt of a request may be due.
    Remind(usize),
    /// A periodic check.
    Check,
    /// A fault begins.
    Fault(Fault),
    /// A process starts at the address of one that has died.
    Restart { host: usize },
    /// A partition ends.
    Heal { ways: [Option<(usize, usize)>; 2] },
    /// A slowed model becomes as fast as before.
    Quicken { host: usize, life: u32 },
}

/// A host. It runs one process after the other.
struct Host {
    role: Leg,
    size: Size,
    process: Option<Process>,
    /// Time until which the host sends no resets for a missing process.
    dark_until: Nanos,
    /// Time of the order to drain, and the time from the process's end until another one starts.
    leaves: Option<(Nanos, Nanos)>,
    /// The role change in progress.
    turns: Option<PendingRoleChange>,
    /// Number of processes so far.
    life: u32,
    /// When each thread's next turn is due.
    due: [Nanos; 3],
    /// End of the engine's computation.
    computes_until: Nanos,
    /// End of a pause of the process.
    paused_until: Nanos,
    /// End of a stall, by thread.
    stalled_until: [Nanos; 3],
    /// End of the time in which its model is slow.
    slow_until: Nanos,
    /// By thread: a factor of its delays.
    lags: [u64; 3],
    /// How far its clock is ahead of the cluster's.
    skew: Nanos,
    /// When the clock jumped last.
    jumped: Nanos,
}

impl Host {
    /// End of the last fault that delayed its threads or moved its clock.
    fn kept_until(&self) -> Nanos {
        self.stalled_until.into_iter().fold(self.paused_until.max(self.jumped), Nanos::max)
    }
}

/// A control connection.
#[derive(Debug)]
struct Conn {
    /// The dialling host and the dialled host.
    hosts: [usize; 2],
    lives: [u32; 2],
    open: [bool; 2],
    /// Parcels on their way to each end.
    to: [Stream<Parcel>; 2],
}

impl Conn {
    fn is_end(&self, end: usize, host: usize, life: u32) -> bool {
        (self.hosts[end], self.lives[end]) == (host, life)
    }
}

/// The phases of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Requests come and end.
    Working,
    /// All requests have ended, and all effects of faults are over. `pair` is the next pair to try.
    Recovering { pair: usize },
    /// All requests have ended. The rest of their state must disappear by itself.
    Idle { since: Nanos },
    /// Nothing is left.
    Over,
}

/// The simulated cluster.
pub struct Cluster<'a> {
    plan: &'a Plan,
    base: Instant,
    agenda: EventQueue<SimEvent>,
    dice: Rng,
    hosts: Vec<Host>,
    /// Writes of NICs; `None` without NICs.
    writes: Option<Writes>,
    /// TCP lanes.
    lanes: Lanes,
    conns: BTreeMap<ConnNumber, Conn>,
    last_conn: ConnNumber,
    calls: BTreeMap<CallName, Call>,
    /// Notices that workers sent to workers.
    notices: u64,
    flights: Flights,
    workload: Workload,
    ends: Ends,
    shadow: Shadow,
    phase: Phase,
    /// Time until which nothing arrives from one host at another.
    parted: BTreeMap<(usize, usize), Nanos>,
    /// The faults so far, with their effects.
    reasons: Reasons,
    /// The record of the run.
    pub trace: Trace,
    report: SeedReport,
    /// Requests so far, without the trial requests.
    asked: u32,
}

impl<'a> Cluster<'a> {
    /// A cluster that has just started. The trace keeps the lines of the room `trace`.
    pub fn new(plan: &'a Plan, trace: Option<Room>) -> Cluster<'a> {
        let dice = Rng::new(plan.seed);
        let base = Instant::now();
        let workers = (plan.scale.prefill + plan.scale.decode) as usize;
        let host = |host| Host {
            role: plan.role(host),
            size: plan.size(plan.role(host)),
            process: None,
            dark_until: 0,
            leaves: None,
            turns: None,
            life: 0,
            due: [Nanos::MAX; 3],
            computes_until: 0,
            paused_until: 0,
            stalled_until: [0; 3],
            slow_until: 0,
            lags: [1; 3],
            skew: 0,
            jumped: 0,
        };
        let mut cluster = Cluster {
            plan,
            base,
            agenda: EventQueue::new(dice.fork("order")),
            hosts: (0..workers).map(host).collect(),
            writes: plan.machines.nics.map(|nics| Writes::new(nics, dice.fork("writes"))),
            lanes: Lanes::new(plan.machines.streams, dice.fork("lanes")),
            conns: BTreeMap::new(),
            last_conn: 0,
            calls: BTreeMap::new(),
            notices: 0,
            flights: Flights::new(plan, base, dice.fork("router")),
            workload: Workload::new(dice.fork("workload"), plan.patience, plan.haste),
            ends: Ends::new(plan),
            shadow: Shadow::default(),
            phase: Phase::Working,
            parted: BTreeMap::new(),
            reasons: Reasons::new(plan.machines.clone()),
            trace: Trace::new(trace),
            report: SeedReport::default(),
            asked: 0,
            dice: dice.fork("delays"),
        };
        (0..workers).for_each(|host| cluster.start(host));
        cluster.agenda.schedule(0, SimEvent::Request);
        cluster.agenda.schedule(CHECK_EVERY, SimEvent::Check);
        cluster.agenda.schedule(0, SimEvent::RouterTick);
        if let Some(faults) = &plan.faults {
            cluster.hosts.iter_mut().zip(&faults.lags).for_each(|(host, &lags)| host.lags = lags);
            for &(at, fault) in &faults.list {
                cluster.agenda.schedule(at, SimEvent::Fault(fault));
            }
        }
        cluster
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The first violation.
    pub fn run(&mut self) -> Result<SeedReport, SeedFailure> {
        while self.phase != Phase::Over {
            let what = self.agenda.pop();
            let went = match what {
                Some(what) => self.happen(what),
                None => Err(Finding::new(Checker::Agenda, "no event is left")),
            };
            let went = went.and_then(|()| match self.trace.happenings() < HAPPENINGS_MAX {
                true => Ok(()),
                false => Err(Finding::new(Checker::Agenda, "the run does not end")),
            });
            went.map_err(|finding| self.failure(finding))?;
        }
        self.report.hash = self.trace.hash();
        self.report.happenings = self.trace.happenings();
        self.report.rooms = self.trace.rooms();
        self.report.time = self.agenda.now();
        Ok(self.report.clone())
    }

    /// Simulated time.
    pub fn now(&self) -> Nanos {
        self.agenda.now()
    }

    fn failure(&self, finding: Finding) -> SeedFailure {
        let Finding { by, request, what } = finding;
        SeedFailure {
            by,
            what,
            at: self.agenda.now(),
            room: request.map(|request| self.flights.room(request)),
        }
    }

    fn happen(&mut self, what: SimEvent) -> Checked {
        let now = self.agenda.now();
        match what {
            SimEvent::Turn { host, life, thread, at } => {
                let current = &mut self.hosts[host];
                if current.life != life || current.due[thread as usize] != at {
                    return Ok(());
                }
                current.due[thread as usize] = Nanos::MAX;
                match current.paused_until.max(current.stalled_until[thread as usize]) {
                    until if until > now => self.wake(host, thread, until),
                    _ => self.turn(host, thread, now)?,
                }
            }
            SimEvent::Write(step, pair) => self.write(step, pair)?,
            SimEvent::Lane(step, lane) => self.carry(step, lane),
            SimEvent::Arrive { conn, end } => self.arrive(conn, end),
            SimEvent::Reach { conn, until } => self.reach(conn, until),
            SimEvent::Pass { host, life, input } => self.pass(host, life, input),
            SimEvent::Silent { host, life, since } if self.hosts[host].life == life => {
                silence::known(host, self.flights.waits_for(host, since))?;
            }
            SimEvent::Silent { .. } => {}
            SimEvent::Knock(call) => self.knock(call),
            SimEvent::ToWorker(call) => self.reach_worker(call),
            SimEvent::ToRouter(call) => self.reach_router(call)?,
            SimEvent::Dropped { host, life } => self.flights.drop_kept(host, life),
            SimEvent::RouterTick => {
                self.agenda.schedule(now + ROUTER_TICK.as_nanos() as Nanos, SimEvent::RouterTick);
                self.flights.tick(now);
                self.carry_out()?;
            }
            SimEvent::Request => self.request()?,
            SimEvent::Remind(flight) => {
                self.flights.remind(flight, now);
                self.carry_out()?;
            }
            SimEvent::Check => self.check()?,
            SimEvent::Fault(fault) => self.go_wrong(fault)?,
            SimEvent::Restart { host } => self.restart(host),
            SimEvent::Heal { ways } => self.heal(ways),
            SimEvent::Quicken { host, life } => self.quicken(host, life),
        }
        Ok(())
    }

    /// Starts a process in the role of its command line.
    fn start(&mut self, index: usize) {
        let now = self.agenda.now();
        let role = self.plan.role(index);
        let process = Process::new(index, role, &self.plan.size(role), self.site(index), self.base);
        let process = process.expect("memory for a process");
        let host = &mut self.hosts[index];
        host.life += 1;
        (host.paused_until, host.stalled_until) = (0, [0; 3]);
        (host.dark_until, host.leaves) = (0, None);
        self.begin_worker(index, role, process, now);
    }

    fn site(&self, index: usize) -> Site<'_> {
        let machines = &self.plan.machines;
        let nic = self.writes.as_ref().map(|writes| &writes.fabric).zip(machines.nic(index));
        Site { host: machines.host(index), nic, streams: machines.streams }
    }

    /// Starts a worker of this role at this time.
    fn begin_worker(&mut self, index: usize, role: Leg, mut process: Process, at: Nanos) {
        let host = &mut self.hosts[index];
        process.edge.begin(process.instant(at + host.skew));
        (host.role, host.size, host.process) = (role, self.plan.size(role), Some(process));
        (host.turns, host.due) = (None, [Nanos::MAX; 3]);
        (host.computes_until, host.slow_until) = (0, 0);
        self.ends.set_lone(index, role == Leg::Decode && self.plan.local_prefill(index));
        for thread in Thread::ALL {
            let at = at + self.late();
            self.wake(index, thread, at);
        }
    }

    fn delay(&mut self) -> Nanos {
        let (least, most) = self.plan.delay;
        // A lost packet arrives later, and so do the later packets of its connection.
        let resent = if self.dice.one_in(200) { self.dice.range_u64(0, RESENT) } else { 0 };
        self.dice.range_u64(least, most) + resent
    }

    fn check(&mut self) -> Checked {
        let now = self.agenda.now();
        self.agenda.schedule(now + CHECK_EVERY, SimEvent::Check);
        self.ends.overdue(now, &self.reasons)?;
        self.drained(now)?;
        self.turned(now)?;
        if let Some(writes) = &mut self.writes {
            writes.forget();
        }
        self.lanes.forget();
        let all = self.asked == self.plan.scale.requests;
        match self.phase {
            Phase::Working
                if all
                    && self.ends.open() == 0
                    && now >= self.reasons.quiet_from().max(self.ends.cleared_from())
                    && self.reasons.leaving().next().is_none() =>
            {
                self.phase = match self.plan.is_calm() {
                    true => Phase::Idle { since: now },
                    false => Phase::Recovering { pair: 0 },
                };
            }
            Phase::Recovering { pair } if self.ends.open() == 0 => {
                let [prefill, decode] = [Leg::Prefill, Leg::Decode].map(|role| self.hosts_of(role));
                self.phase = match pair < prefill.len() * decode.len() {
                    true => {
                        let pair_of = [prefill[pair % prefill.len()], decode[pair / prefill.len()]];
                        self.begin(Some(pair_of), true)?;
                        Phase::Recovering { pair: pair + 1 }
                    }
                    false => Phase::Idle { since: now },
                };
            }
            Phase::Working | Phase::Recovering { .. } | Phase::Over => {}
            Phase::Idle { since } => {
                let since = since.max(self.ends.cleared_from());
                let rooms_gone = CLEARED + EARLY_DESTINATION_LIFE.as_nanos() as Nanos;
                idle::charges_nothing(self.flights.reserved())?;
                match (self.all(idle::holds_nothing), self.all(idle::has_no_rooms)) {
                    (Ok(()), Ok(())) => self.phase = Phase::Over,
                    (Err(held), _) if now > since + CLEARED => return Err(held),
                    (_, Err(known)) if now > since + rooms_gone => return Err(known),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Fails if a draining process has not ended in time.
    fn drained(&self, now: Nanos) -> Checked {
        let begun = |from: Nanos| from.max(self.reasons.quiet_from());
        let late = self.reasons.leaving().find(|&(_, from)| begun(from) + DRAINED < now);
        late.map_or(Ok(()), |(host, _)| {
            Err(Finding::new(
                Checker::Ends,
                format!("process {host} was asked to drain and has not ended"),
            ))
        })
    }

    /// Connections of the router to a host's process.
    fn clients(&self, index: usize) -> usize {
        let life = self.hosts[index].life;
        let calls = self.calls.values().filter(|call| call.leads_to(index, life)).count();
        calls + self.flights.kept(index, life)
    }

    /// Runs a check for all processes.
    fn all(&self, holds: impl Fn(usize, &Process) -> Checked) -> Checked {
        let hosts = self.hosts.iter().enumerate();
        let mut running = hosts.filter_map(|(index, host)| Some((index, host.process.as_ref()?)));
        running.try_for_each(|(index, process)| holds(index, process))
    }
}
