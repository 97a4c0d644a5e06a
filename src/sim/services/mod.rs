//! Production's router and workers under a seed: their services, links, lanes and HTTP run as they
//! are, over operating systems in memory.
//!
//! ```text
//! clients ─┐            MemoryKernel of each process
//! router ──┼─▶ network: bytes in pieces, with delays ─▶ turn of the receiver ─▶ digest
//! workers ─┘
//! ```
//! Replaced: the sockets below the reactor, the library of verbs, the threads (a turn steps all of
//! a process), and the model. Not covered yet: TLS, etcd, names of hosts, and the exchange of keys.
//! Invariant: the same seed gives the same run.

mod campaign;
mod checks;
mod clients;
mod faults;
mod keys;
mod network;
mod nics;
mod operator;
mod plan;
mod process;
mod shadow;

pub use campaign::run_seeds;
pub use plan::ServiceScale;

use crate::ids::Role;
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos, SECOND};
use crate::stdx::hash_map;
use crate::stdx::rng::{Rng, scramble};
use clients::Clients;
use faults::{ServiceFault, Weather};
use network::{CutPlace, Network};
use nics::{NicEvent, NicNetwork, NicStep};
use operator::Operator;
use plan::ServicePlan;
use process::ServiceProcess;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The longest simulated time of a run.
const TIME_MAX: Nanos = 900 * SECOND;
/// Turns that each run may take, and further ones for each request. A usual run takes a tenth.
const TURNS_MAX: u64 = 200_000;
const TURNS_OF_REQUEST: u64 = 5_000;
/// Processes run for this time after the last answer: longer than the life of kept KV.
const SETTLED: Nanos = 90 * SECOND;
/// The longest delay between a reason to wake and the turn of a process.
const LATENESS: Nanos = 50 * MICRO;
/// After the start of one in so many transfers to a victim, the victim dies or falls silent.
const FAULTS_IN_TRANSFER: u64 = 6;
/// The usual time of an answer.
const ANSWER: Nanos = 20 * MILLI;
/// The usual time of a transfer.
const TRANSFER: Nanos = 2 * MILLI;
/// The longest time until the router lists its workers, and all processes are idle.
const LISTED: Nanos = 10 * SECOND;
/// The tables of a process are checked once in this many turns.
const CHECK_TURNS: u64 = 64;
/// Port of the router.
const ROUTER_PORT: u16 = 30_000;

/// The result of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServiceReport {
    /// Requests with the expected answer.
    pub well: usize,
    /// Requests that ended with an error or were cut.
    pub failed: usize,
    /// Requests with a wrong key that were refused.
    pub refused: usize,
    /// Requests of clients that left.
    pub left: usize,
    /// Orders of the operator after which a worker had the role.
    pub roles: usize,
    /// A hash of all events.
    pub hash: u64,
    /// Turns of processes.
    pub turns: u64,
}

/// A hash of all events of a run, their times and their bytes. Equal hashes show that a replay
/// repeats the run.
#[derive(Clone, Copy, Debug, Default)]
struct RunDigest {
    hash: u64,
    /// Only the lengths of pieces count. With NICs, messages have addresses of memory, which are
    /// other ones in each run.
    skips_bytes: bool,
}

impl RunDigest {
    fn note(&mut self, numbers: impl IntoIterator<Item = u64>) {
        numbers.into_iter().for_each(|number| self.hash = scramble(self.hash ^ number));
    }

    fn note_bytes(&mut self, bytes: &[u8]) {
        self.note([bytes.len() as u64]);
        if !self.skips_bytes {
            self.note(bytes.iter().map(|&byte| byte.into()));
        }
    }
}

enum Event {
    /// A process may take a turn.
    Turn(usize),
    /// A dial reaches its host.
    Dial(usize),
    /// A step of a NIC's queue pair.
    Nic(NicStep, u32),
    /// What has travelled to this end of a connection arrives.
    Arrival { connection: usize, end: usize },
    /// Nothing may have passed at this place for the longest silence of its streams.
    Silence { place: CutPlace, limit: Duration },
    /// A fault of the plan.
    Fault(ServiceFault),
    /// A new process starts on a host.
    Restart(usize),
    /// The operator orders the first role of a host again.
    FirstRole(usize),
}

/// Runs a cluster until all requests have ended and all processes are idle.
///
/// # Errors
/// A request has a wrong answer, no end, or an error without a fault; a process keeps something of
/// a request that is over; an assertion fails.
pub fn run(seed: u64, scale: ServiceScale) -> Result<ServiceReport, String> {
    hash_map::fix_secret();
    let all = || Cluster::new(seed, scale)?.run();
    catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(format!("panic: {}", text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("?")))
    })
}

struct Cluster {
    plan: ServicePlan,
    base: Instant,
    queue: EventQueue<Event>,
    network: Network,
    nics: NicNetwork,
    /// By host; `None` while it is dead.
    processes: Vec<Option<ServiceProcess>>,
    clients: Clients,
    operator: Operator,
    router: SocketAddr,
    /// By host: the time of its next turn.
    due: Vec<Option<Nanos>>,
    /// By host: its process takes no turn until this time.
    stalled_until: Vec<Nanos>,
    /// By host that drains: the time between its end and its next start.
    pauses: Vec<Option<Nanos>>,
    dice: Rng,
    digest: RunDigest,
    turns: u64,
    turns_max: u64,
}

impl Cluster {
    fn new(seed: u64, scale: ServiceScale) -> Result<Cluster, String> {
        let dice = Rng::new(seed).fork("services");
        let mut plan = ServicePlan::new(&dice, scale);
        let base = Instant::now();
        let mut network = Network::new(dice.fork("network"));
        let nics = NicNetwork::new(plan.nic_patience, dice.fork("nics"));
        let start = |(host, line): (usize, &Vec<String>)| {
            let site = plan.sites[host];
            let kernel = network.add_host(site.machine, base, dice.fork(&format!("host {host}")));
            ServiceProcess::start(line, kernel, (site, nics.of_site(host, site)), base).map(Some)
        };
        let processes = plan.lines.iter().enumerate().map(start).collect::<Result<Vec<_>, _>>()?;
        let kernel = network.add_host(0, base, dice.fork("clients"));
        let router = SocketAddr::new(network::address_of(0), ROUTER_PORT);
        let clients = Clients::new(kernel, router, std::mem::take(&mut plan.requests));
        let operator = Operator::new(
            network.add_host(0, base, dice.fork("operator")),
            plan.keys.operator_key(),
        );
        let hosts = processes.len() + 2;
        let has_nic = plan.sites.iter().any(|site| site.has_nic);
        let mut queue = EventQueue::new(dice.fork("queue"));
        (0..hosts).for_each(|host| queue.schedule(0, Event::Turn(host)));
        plan.faults.iter().for_each(|&(at, fault)| queue.schedule(at, Event::Fault(fault)));
        Ok(Cluster {
            plan,
            base,
            queue,
            network,
            nics,
            processes,
            clients,
            operator,
            router,
            due: vec![Some(0); hosts],
            stalled_until: vec![0; hosts],
            pauses: vec![None; hosts],
            dice: dice.fork("turns"),
            digest: RunDigest { hash: 0, skips_bytes: has_nic },
            turns: 0,
            turns_max: TURNS_MAX + TURNS_OF_REQUEST * scale.requests as u64,
        })
    }

    fn run(mut self) -> Result<ServiceReport, String> {
        let (mut end, mut is_over) = (None, false);
        while let Some(event) = self.queue.pop() {
            let now = self.queue.now();
            if now > TIME_MAX || self.turns > self.turns_max {
                let Cluster { clients, turns, .. } = &self;
                return Err(format!("not ended in time: {} ({turns} turns)", clients.unfinished()));
            }
            self.happen(event, now)?;
            if end.is_none() && self.clients.is_done() && self.operator.is_done() {
                end = Some(now + SETTLED);
            }
            let is_listed = is_over && self.operator.listed.is_some();
            // A worker that renews its entry sends a body.
            if is_listed && self.check_idle().is_ok() {
                break;
            }
            if end.is_some_and(|end| now > end + LISTED) {
                self.check_idle()?;
                return Err("the router does not list its workers".into());
            }
            if end.is_some_and(|end| now > end) && !std::mem::replace(&mut is_over, true) {
                self.operator.listed = None;
                self.operator.list_workers(self.router);
            }
        }
        self.check_workers()?;
        self.report()
    }

    fn happen(&mut self, event: Event, now: Nanos) -> Result<(), String> {
        self.digest.note([now]);
        let Some(event) = self.network.hold_back(event, &mut self.queue) else { return Ok(()) };
        match event {
            Event::Turn(host) if self.due[host] == Some(now) => self.turn(host, now)?,
            Event::Turn(_) => {}
            Event::Dial(connection) => {
                let hosts = self.network.open(connection, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Event::Arrival { connection, end } => {
                let at = (connection, end);
                let host = self.network.arrive(at, &mut self.queue, &mut self.digest);
                self.wake(host, now);
                self.network.pump(host, &mut self.queue);
            }
            Event::Nic(step, pair) => {
                let Cluster { nics, network, queue, digest, .. } = self;
                let event = nics.step((step, pair), network, queue, digest);
                self.notice(event, now)?;
            }
            Event::Silence { place, limit } => {
                let hosts = self.network.reset_silent(place, limit, now, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Event::FirstRole(host) => self.order(host, self.plan.roles[host - 1].0, now),
            Event::Restart(host) => {
                self.stalled_until[host] = now;
                let kernel = self.network.reboot(host, self.base, now);
                let (line, site) = (&self.plan.lines[host], self.plan.sites[host]);
                let site = (site, self.nics.of_site(host, site));
                let process = ServiceProcess::start(line, kernel, site, self.base)?;
                (self.processes[host], self.pauses[host]) = (Some(process), None);
                self.wake(host, now);
            }
            Event::Fault(fault) => self.break_something(fault, now)?,
        }
        Ok(())
    }

    fn break_something(&mut self, fault: ServiceFault, now: Nanos) -> Result<(), String> {
        match fault {
            ServiceFault::NicError => {
                let event = self.nics.break_one();
                self.notice(event, now)?;
            }
            ServiceFault::Hold { host, pause } => self.nics.hold(host, now + pause),
            ServiceFault::Reset => {
                let hosts = self.network.reset_one(&mut self.queue, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            ServiceFault::Drain { host, pause } => {
                if let Some(process) = self.processes[host].as_ref().filter(|_| !self.drains(host))
                {
                    process.terminate();
                    self.pauses[host] = Some(pause);
                    self.wake(host, now);
                }
            }
            ServiceFault::Stall { host, pause } => {
                self.stalled_until[host] = self.stalled_until[host].max(now + pause);
            }
            ServiceFault::Hang { host, pause } => {
                if let Some(process) = &mut self.processes[host] {
                    process.hang_engine(now + pause);
                }
            }
            ServiceFault::Cut { host, pause } => {
                self.network.cut(CutPlace::Host(host), now + pause, &mut self.queue);
            }
            ServiceFault::Part { hosts: (one, other), pause } => {
                self.network.cut(CutPlace::Between(one, other), now + pause, &mut self.queue);
            }
            ServiceFault::Role { host, role, pause } => {
                self.order(host, role, now);
                self.queue.schedule(now + pause, Event::FirstRole(host));
            }
            ServiceFault::Death { host, pause } => {
                self.network.freeze(host);
                self.end(host, now + pause);
            }
        }
        Ok(())
    }

    /// What a NIC has done reaches the process of its host.
    fn notice(&mut self, event: NicEvent, now: Nanos) -> Result<(), String> {
        let host = match event {
            NicEvent::Nothing => return Ok(()),
            NicEvent::Completed(host) => host,
            NicEvent::Landed { host, address, bytes } => {
                self.digest.note([bytes]);
                if let Some(process) = &self.processes[host] {
                    let check = process.check_write(address, bytes);
                    check.map_err(|why| format!("host {host}: {why}"))?;
                }
                host
            }
        };
        if self.processes[host].as_ref().is_some_and(ServiceProcess::is_woken) {
            self.wake(host, now);
        }
        Ok(())
    }

    fn order(&mut self, host: usize, role: Role, now: Nanos) {
        let (_, worker) = self.plan.roles[host - 1];
        self.operator.order(worker, role, now);
        if self.plan.weather == Weather::Gentle {
            self.operator.list_workers(self.router);
        }
        self.wake(self.processes.len() + 1, now);
    }

    fn drains(&self, host: usize) -> bool {
        self.pauses[host].is_some()
    }

    /// Ends the process of a host. A new one starts at this time.
    fn end(&mut self, host: usize, restart: Nanos) {
        if self.processes[host].take().is_some() {
            self.network.pump(host, &mut self.queue);
            self.nics.pump(host, &mut self.queue);
            self.queue.schedule(restart, Event::Restart(host));
        }
    }

    /// Lets a host take a turn soon, unless it does so anyway.
    fn wake(&mut self, host: usize, now: Nanos) {
        let at = now + self.dice.range_u64(0, LATENESS);
        self.schedule(host, at);
    }

    fn schedule(&mut self, host: usize, at: Nanos) {
        let at = at.max(self.stalled_until[host]);
        if self.due[host].is_none_or(|due| at < due) {
            self.due[host] = Some(at);
            self.queue.schedule(at, Event::Turn(host));
        }
    }

    fn turn(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        self.step(host, now)?;
        self.wake_others(host, now);
        Ok(())
    }

    fn step(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        self.due[host] = None;
        if now < self.stalled_until[host] {
            self.schedule(host, now);
            return Ok(());
        }
        self.turns += 1;
        let clients = self.processes.len();
        let until = match self.processes.get_mut(host) {
            Some(Some(process)) => {
                let has_ready_lane = self.network.has_ready_lane(host);
                let turn = process.turn(now, has_ready_lane, &mut self.dice);
                match turn.map_err(|why| format!("host {host}: {why}"))? {
                    Some(until) => until,
                    None => {
                        let pause = self.pauses[host].ok_or("a process ends unasked")?;
                        self.end(host, now + pause);
                        return Ok(());
                    }
                }
            }
            Some(None) => return Ok(()),
            None if host == clients => self.clients.turn(now, self.base),
            None => self.operator.turn(now, self.base),
        };
        if self.turns.is_multiple_of(CHECK_TURNS)
            && let Some(Some(process)) = self.processes.get(host)
        {
            process.check_invariants();
        }
        self.aim_at_transfers(host, now);
        self.network.pump(host, &mut self.queue);
        self.nics.pump(host, &mut self.queue);
        let until = if self.is_woken(host) { now } else { until };
        let pause = self.dice.range_u64(MICRO, LATENESS);
        self.schedule(host, until.max(now + pause));
        Ok(())
    }

    /// Lets some clients leave, and some workers die or fall silent, while KV is in transfer or
    /// soon after.
    fn aim_at_transfers(&mut self, host: usize, now: Nanos) {
        let Some(Some(process)) = self.processes.get_mut(host) else { return };
        for prompt in process.take_begun_transfers() {
            if self.dice.one_in(self.plan.leaves_in_transfer) {
                let at = now + self.dice.range_u64(0, TRANSFER);
                self.clients.leave(&prompt, at);
                self.schedule(self.processes.len(), at);
            }
            let at = now + self.dice.range_u64(0, ANSWER);
            let is_aimed = at < self.plan.faults_end
                && self.plan.weather != Weather::Flaky
                && self.plan.victims.contains(&host);
            if is_aimed && self.dice.one_in(FAULTS_IN_TRANSFER) {
                for fault in faults::draw_aimed(&mut self.dice, host) {
                    self.plan.faults.push((at, fault));
                    self.queue.schedule(at, Event::Fault(fault));
                }
            }
        }
    }

    fn is_woken(&self, host: usize) -> bool {
        self.network.is_ready(host) || self.network.has_ready_lane(host)
    }

    /// Wakes hosts with streams that take bytes again, and with a doorbell that this host rang.
    fn wake_others(&mut self, host: usize, now: Nanos) {
        let drained = self.network.take_drained();
        for other in 0..self.due.len() {
            let machine = |host: usize| self.plan.sites.get(host).map(|site| site.machine);
            let rings = || machine(host) == machine(other);
            let process = self.processes.get(other).and_then(Option::as_ref);
            let is_woken = (rings() && process.is_some_and(ServiceProcess::is_woken))
                || (drained.contains(&other) && self.is_woken(other));
            if other != host && is_woken {
                self.wake(other, now);
            }
        }
    }
}
