//! A cluster in one thread: everything that happens, in the order of one seed.
//!
//! Owns: hosts with their processes, connections between them, the router, the time, the checkers. A thread of a
//! process takes a turn when it was woken, or its time has come; a message arrives when it has travelled.
//! Invariants: whatever is drawn comes from the plan's dice, so that a seed repeats itself; a connection keeps
//! its order, two of them do not.

mod calls;
mod harm;
mod lanes;
mod network;
mod requests;
mod roles;
mod stream;
mod turns;
mod writes;

use super::agenda::{Agenda, MILLI, Nanos, SECOND};
use super::checkers::{
    Checked, Checker, Finding, ends::Ends, idle, reasons::Reasons, shadow::Shadow, silence,
};
use super::dice::Dice;
use super::edge::{ConnNumber, Input, Parcel};
use super::faults::Fault;
use super::plan::{Plan, Size};
use super::process::{Process, Site, Thread};
use super::router::Flights;
use super::router::fleet::CallName;
use super::story::Story;
use super::workload::Workload;
use crate::cluster::router::Role;
use crate::front::router::TICK as ROUTER_TICK;
use crate::ids::Room;
use crate::limits::EARLY_DESTINATION_LIFE;
use calls::Call;
use lanes::{LaneNumber, Lanes};
use roles::Turn;
use std::collections::BTreeMap;
use std::time::Instant;
use stream::Stream;
use writes::{Step, Writes};

/// Most happenings of a run: many times what the longest of them takes.
const HAPPENINGS_MAX: u64 = 20_000_000;
/// Between two looks at what is overdue.
const CHECK_EVERY: Nanos = SECOND;
/// How long a request may take when all is well again.
const RECOVERED: Nanos = 10 * SECOND;
/// From the last request's end until nothing of it is held any more but rooms whose request never came.
const CLEARED: Nanos = 10 * SECOND;
/// From the time a process is told to drain, and all else is well, until it has ended and another one is there.
const DRAINED: Nanos = 60 * SECOND;
/// Between two looks of an idle engine for work.
pub const ENGINE_LOOKS: Nanos = SECOND;
/// Longest that a thread which always lags is late.
const LAG_MAX: Nanos = 30 * MILLI;
/// How long a lost packet waits to be sent again, at most.
const RESENT: Nanos = 400 * MILLI;

/// Something is not as it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// Which checker says so.
    pub by: Checker,
    /// What.
    pub what: String,
    /// When.
    pub at: Nanos,
    /// Where the legs of the request meet that it is about, if it is about one.
    pub room: Option<Room>,
}

/// What a run was.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Report {
    /// Equal for equal runs.
    pub hash: u64,
    /// Happenings.
    pub happenings: u64,
    /// Requests begun: those that were asked for, and those that tried at the end whether each pair serves again.
    pub requests: usize,
    /// Of them, the latter.
    pub trials: usize,
    /// Where legs met, by request, if one of them is asked for.
    pub rooms: Vec<(usize, Room)>,
    /// Of them, those that ended well.
    pub well: usize,
    /// The others, by cause.
    pub failures: BTreeMap<&'static str, usize>,
    /// Tries beyond the first of each.
    pub retries: usize,
    /// Workers that have another role,
    pub turned: usize,
    /// and those that were to have one, and kept theirs.
    pub stayed: usize,
    /// How long it took in its own time.
    pub time: Nanos,
}

/// Something that is to happen.
#[derive(Debug)]
enum Happening {
    /// A worker of which nothing was heard since then must be given up.
    Silent { host: usize, life: u32, since: Nanos },
    /// A thread's turn, if that is still when it is due.
    Turn { host: usize, life: u32, thread: Thread, at: Nanos },
    /// A request of a queue pair goes on.
    Write(Step, u32),
    /// A lane goes on.
    Lane(lanes::Step, LaneNumber),
    /// The next parcel of a connection reaches this end.
    Arrive { conn: ConnNumber, end: usize },
    /// A dial reaches the other host, or not.
    Reach { conn: ConnNumber, until: Nanos },
    /// Something comes that is not on a connection.
    Pass { host: usize, life: u32, input: Input },
    /// The router's dial reaches a worker's host, or not.
    Knock(CallName),
    /// The next of what was sent on a call's connection reaches the worker.
    ToWorker(CallName),
    /// The next of it reaches the router.
    ToRouter(CallName),
    /// The router finds that connections it keeps to a process are closed.
    Dropped { host: usize, life: u32 },
    /// The router looks for what is overdue.
    RouterTick,
    /// A client asks.
    Request,
    /// A flight's next try may be due.
    Remind(usize),
    /// Is everything as it must be?
    Check,
    /// Something goes wrong.
    Fault(Fault),
    /// A process is started where one has died.
    Restart { host: usize },
    /// Packets arrive again.
    Heal { ways: [Option<(usize, usize)>; 2] },
    /// A model is as fast as it was.
    Quicken { host: usize, life: u32 },
}

/// Where a process runs, or ran, or will.
struct Host {
    role: Role,
    size: Size,
    process: Option<Process>,
    /// Nobody is told that there is no process, until then.
    dark_until: Nanos,
    /// It was told to drain then, and another one is started so long after its end.
    leaves: Option<(Nanos, Nanos)>,
    /// It was told to have the other role.
    turns: Option<Turn>,
    /// Processes so far.
    life: u32,
    /// When each thread's next turn is.
    due: [Nanos; 3],
    /// The engine computes until then.
    computes_until: Nanos,
    /// The process stands still until then.
    paused_until: Nanos,
    /// Each thread does.
    stalled_until: [Nanos; 3],
    /// Its model is slow until then.
    slow_until: Nanos,
    /// How many times later than others each thread is.
    lags: [u64; 3],
    /// How much later than the cluster's its clock is,
    skew: Nanos,
    /// since then.
    jumped: Nanos,
}

impl Host {
    /// Until when something kept its threads, or moved its clock.
    fn kept_until(&self) -> Nanos {
        self.stalled_until.into_iter().fold(self.paused_until.max(self.jumped), Nanos::max)
    }
}

/// A control connection.
#[derive(Debug)]
struct Conn {
    /// Who has dialled, and whom.
    hosts: [usize; 2],
    lives: [u32; 2],
    open: [bool; 2],
    /// On their way to each end.
    to: [Stream<Parcel>; 2],
}

impl Conn {
    fn is_end(&self, end: usize, host: usize, life: u32) -> bool {
        (self.hosts[end], self.lives[end]) == (host, life)
    }
}

/// What a run goes through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Requests come and end.
    Working,
    /// All have ended and nothing that was done is felt any more; the next pair to be tried.
    Recovering { pair: usize },
    /// All have ended; what is left over must go by itself.
    Idle { since: Nanos },
    /// It has.
    Over,
}

/// The whole.
pub struct Cluster<'a> {
    plan: &'a Plan,
    base: Instant,
    agenda: Agenda<Happening>,
    dice: Dice,
    hosts: Vec<Host>,
    /// What NICs do; none without any.
    writes: Option<Writes>,
    /// What streams do.
    lanes: Lanes,
    conns: BTreeMap<ConnNumber, Conn>,
    last_conn: ConnNumber,
    calls: BTreeMap<CallName, Call>,
    /// Of workers to workers.
    notices: u64,
    flights: Flights,
    workload: Workload,
    ends: Ends,
    shadow: Shadow,
    phase: Phase,
    /// From a host to another, nothing arrives until then.
    parted: BTreeMap<(usize, usize), Nanos>,
    /// What was done to it.
    reasons: Reasons,
    /// What happened.
    pub story: Story,
    report: Report,
    /// Requests so far, without those that try whether all is well again.
    asked: u32,
}

impl<'a> Cluster<'a> {
    /// A cluster that has just started; the story keeps lines of one room, if asked for.
    pub fn new(plan: &'a Plan, trace: Option<Room>) -> Cluster<'a> {
        let dice = Dice::new(plan.seed);
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
            agenda: Agenda::new(dice.fork("order")),
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
            story: Story::new(trace),
            report: Report::default(),
            asked: 0,
            dice: dice.fork("delays"),
        };
        (0..workers).for_each(|host| cluster.start(host));
        cluster.agenda.put(0, Happening::Request);
        cluster.agenda.put(CHECK_EVERY, Happening::Check);
        cluster.agenda.put(0, Happening::RouterTick);
        if let Some(faults) = &plan.faults {
            cluster.hosts.iter_mut().zip(&faults.lags).for_each(|(host, &lags)| host.lags = lags);
            for &(at, fault) in &faults.list {
                cluster.agenda.put(at, Happening::Fault(fault));
            }
        }
        cluster
    }

    /// Everything, to the end.
    ///
    /// # Errors
    /// What was not as it must be.
    pub fn run(&mut self) -> Result<Report, Failure> {
        while self.phase != Phase::Over {
            let what = self.agenda.take();
            let went = match what {
                Some(what) => self.happen(what),
                None => Err(Finding::new(Checker::Agenda, "nothing is to happen any more")),
            };
            let went = went.and_then(|()| match self.story.happenings() < HAPPENINGS_MAX {
                true => Ok(()),
                false => Err(Finding::new(Checker::Agenda, "it goes on and on")),
            });
            went.map_err(|finding| self.failure(finding))?;
        }
        self.report.hash = self.story.hash();
        self.report.happenings = self.story.happenings();
        self.report.rooms = self.story.rooms();
        self.report.time = self.agenda.now();
        Ok(self.report.clone())
    }

    /// How long it has run.
    pub fn now(&self) -> Nanos {
        self.agenda.now()
    }

    fn failure(&self, finding: Finding) -> Failure {
        let Finding { by, request, what } = finding;
        Failure {
            by,
            what,
            at: self.agenda.now(),
            room: request.map(|request| self.flights.room(request)),
        }
    }

    fn happen(&mut self, what: Happening) -> Checked {
        let now = self.agenda.now();
        match what {
            Happening::Turn { host, life, thread, at } => {
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
            Happening::Write(step, pair) => self.write(step, pair)?,
            Happening::Lane(step, lane) => self.carry(step, lane),
            Happening::Arrive { conn, end } => self.arrive(conn, end),
            Happening::Reach { conn, until } => self.reach(conn, until),
            Happening::Pass { host, life, input } => self.pass(host, life, input),
            Happening::Silent { host, life, since } if self.hosts[host].life == life => {
                silence::known(host, self.flights.waits_for(host, since))?;
            }
            Happening::Silent { .. } => {}
            Happening::Knock(call) => self.knock(call),
            Happening::ToWorker(call) => self.reach_worker(call),
            Happening::ToRouter(call) => self.reach_router(call)?,
            Happening::Dropped { host, life } => self.flights.drop_kept(host, life),
            Happening::RouterTick => {
                self.agenda.put(now + ROUTER_TICK.as_nanos() as Nanos, Happening::RouterTick);
                self.flights.tick(now);
                self.carry_out()?;
            }
            Happening::Request => self.request()?,
            Happening::Remind(flight) => {
                self.flights.remind(flight, now);
                self.carry_out()?;
            }
            Happening::Check => self.check()?,
            Happening::Fault(fault) => self.go_wrong(fault)?,
            Happening::Restart { host } => self.restart(host),
            Happening::Heal { ways } => self.heal(ways),
            Happening::Quicken { host, life } => self.quicken(host, life),
        }
        Ok(())
    }

    /// A process is started, as what its command line says.
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

    /// A worker of this role begins, at this time.
    fn begin_worker(&mut self, index: usize, role: Role, mut process: Process, at: Nanos) {
        let host = &mut self.hosts[index];
        process.edge.begin(process.instant(at + host.skew));
        (host.role, host.size, host.process) = (role, self.plan.size(role), Some(process));
        (host.turns, host.due) = (None, [Nanos::MAX; 3]);
        (host.computes_until, host.slow_until) = (0, 0);
        self.ends.set_lone(index, role == Role::Decode && self.plan.reads_alone(index));
        for thread in Thread::ALL {
            let at = at + self.late();
            self.wake(index, thread, at);
        }
    }

    fn delay(&mut self) -> Nanos {
        let (least, most) = self.plan.delay;
        // A lost packet comes later, and what follows it on its connection, too.
        let resent = if self.dice.one_in(200) { self.dice.within(0, RESENT) } else { 0 };
        self.dice.within(least, most) + resent
    }

    fn check(&mut self) -> Checked {
        let now = self.agenda.now();
        self.agenda.put(now + CHECK_EVERY, Happening::Check);
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
                let [prefill, decode] =
                    [Role::Prefill, Role::Decode].map(|role| self.hosts_of(role));
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
                idle::charges_nothing(self.flights.booked())?;
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

    /// Who drains is over when what it had is.
    fn drained(&self, now: Nanos) -> Checked {
        let begun = |from: Nanos| from.max(self.reasons.quiet_from());
        let late = self.reasons.leaving().find(|&(_, from)| begun(from) + DRAINED < now);
        late.map_or(Ok(()), |(host, _)| {
            Err(Finding::new(
                Checker::Ends,
                format!("process {host} was told to drain and is not over"),
            ))
        })
    }

    /// Connections of the router to a host's process.
    fn clients(&self, index: usize) -> usize {
        let life = self.hosts[index].life;
        let calls = self.calls.values().filter(|call| call.leads_to(index, life)).count();
        calls + self.flights.kept(index, life)
    }

    /// Whether something is true of all processes.
    fn all(&self, holds: impl Fn(usize, &Process) -> Checked) -> Checked {
        let hosts = self.hosts.iter().enumerate();
        let mut running = hosts.filter_map(|(index, host)| Some((index, host.process.as_ref()?)));
        running.try_for_each(|(index, process)| holds(index, process))
    }
}
