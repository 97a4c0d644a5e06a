//! The fault mode of `baton sim`: production's router and workers as whole processes, in one thread
//! and under one seed. Their services, links, lanes and HTTP run as they are, over operating
//! systems in memory. Checkers test the rules of docs/design/invariants.md.
//!
//! ```text
//! clients ─┐            MemoryKernel of each process
//! router ──┼─▶ network: bytes in pieces, with delays ─▶ turn of the receiver ─▶ digest
//! workers ─┘
//! ```
//! Replaced: the sockets below the reactor, the library of verbs, the threads (a turn steps all of
//! a process), the files of keys, etcd, the name server, and the model. Not covered yet: TLS.
//! Invariant: the same seed gives the same run. Not here: the load mode (`planner`).

mod campaign;
mod cancels;
mod checks;
mod clients;
mod etcd;
mod faults;
mod fleet;
mod key_exchange;
mod keys;
mod library;
pub mod model;
mod names;
mod network;
mod nics;
mod operator;
mod plan;
mod process;
mod requests;
mod scale;
mod shadow;
mod stages;
mod turns;
pub mod workload;

pub use campaign::{SeedFailure, run_each, run_seeds};
pub use scale::RunScale;

use crate::ids::Role;
use crate::obs::log::{self, SimulatedSource};
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos, SECOND};
use crate::stdx::hash_map;
use crate::stdx::panic_message::panic_message;
use crate::stdx::rng::{Rng, scramble};
use crate::sys::file_access::{FileAccess, MemoryFiles};
use clients::Clients;
use etcd::SimEtcd;
use faults::{Fault, Weather};
use key_exchange::KeyExchange;
use names::NameServer;
use network::{CutPlace, Network};
use nics::{NicEvent, NicNetwork, NicStep};
use operator::Operator;
use plan::RunPlan;
use process::SimProcess;
use std::any::Any;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use turns::{LATENESS, TurnSchedule};

/// The longest simulated time of a run.
const TIME_MAX: Nanos = 900 * SECOND;
/// Turns that each run may take, and further ones for each request and each worker. A usual run
/// takes a tenth.
const TURNS_MAX: u64 = 200_000;
const TURNS_OF_REQUEST: u64 = 5_000;
const TURNS_OF_WORKER: u64 = 20_000;
/// Processes run for this time after the last answer: longer than the life of kept KV.
const SETTLED: Nanos = 90 * SECOND;
/// After the start of one in so many transfers to a victim, the victim dies or falls silent.
const FAULTS_IN_TRANSFER: u64 = 6;
/// Time between the end of a process that the operator restarts, and its next start.
const RESTART: Nanos = 200 * MILLI;
/// Time until all members of an etcd that has lost its keys serve again.
const EMPTIED: Nanos = 300 * MILLI;
/// Hosts between the processes and the members of etcd: the clients and the operator.
const OTHERS: usize = 2;
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
pub struct RunReport {
    /// Requests with the expected answer.
    pub well: usize,
    /// Requests that ended with an error or were cut.
    pub failed: usize,
    /// Requests with a wrong key that were refused.
    pub refused: usize,
    /// Requests of clients that left.
    pub left: usize,
    /// Requests that their clients aborted.
    pub aborted: usize,
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
    Fault(Fault),
    /// A new process starts on a host.
    Restart(usize),
    /// The operator flushes the caches of all workers.
    Flush,
    /// The name server answers again.
    NamesWell,
    /// The operator orders the first role of a host again.
    FirstRole(usize),
    /// The operator begins the next step of the exchange of keys, if all have read the last one.
    Exchange,
    /// The key files of a host change.
    NewKeys(usize),
}

/// Runs a cluster until all requests have ended and all processes are idle.
///
/// # Errors
/// A request has a wrong answer, no end, or an error without a fault; a process keeps something of
/// a request that is over; an assertion fails.
pub fn run(seed: u64, scale: RunScale) -> Result<RunReport, String> {
    if scale.is_library {
        return library::run(seed, scale);
    }
    hash_map::fix_secret();
    let all = || Cluster::new(seed, scale)?.run();
    catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| Err(panic_text(&*panic)))
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    format!("panic: {}", panic_message(panic))
}

struct Cluster {
    plan: RunPlan,
    base: Instant,
    queue: EventQueue<Event>,
    network: Network,
    nics: NicNetwork,
    /// By host: its files of keys.
    files: Vec<MemoryFiles>,
    names: NameServer,
    /// By host; `None` while it is dead.
    processes: Vec<Option<SimProcess>>,
    clients: Clients,
    operator: Operator,
    /// Its members have the last hosts.
    etcd: SimEtcd,
    router: SocketAddr,
    schedule: TurnSchedule,
    /// By host that drains: the time between its end and its next start.
    pauses: Vec<Option<Nanos>>,
    dice: Rng,
    digest: RunDigest,
    turns: u64,
    turns_max: u64,
}

impl Cluster {
    fn new(seed: u64, scale: RunScale) -> Result<Cluster, String> {
        let dice = Rng::new(seed).fork("services");
        let mut plan = RunPlan::new(&dice, scale);
        let base = Instant::now();
        let mut network = Network::new(dice.fork("network"));
        let files: Vec<MemoryFiles> = plan.fleet.lines.iter().map(|_| keys::key_files()).collect();
        let names = NameServer::new(base);
        let nics = NicNetwork::new(plan.nic_patience, dice.fork("nics"));
        let start = |(host, line): (usize, &Vec<String>)| {
            let site = plan.fleet.sites[host];
            let kernel = network.add_host(site.machine, base, dice.fork(&format!("host {host}")));
            let (files, site) = (files[host].clone(), (site, nics.of_site(host, site)));
            SimProcess::start(line, kernel, FileAccess::Memory(files), site, base, &names).map(Some)
        };
        let processes =
            plan.fleet.lines.iter().enumerate().map(start).collect::<Result<Vec<_>, _>>()?;
        let kernel = network.add_host(0, base, dice.fork("clients"));
        let router = SocketAddr::new(network::address_of(0), ROUTER_PORT);
        let clients = Clients::new(kernel, router, std::mem::take(&mut plan.requests));
        let operator = Operator::new(
            network.add_host(0, base, dice.fork("operator")),
            plan.fleet.keys,
            dice.fork("whims of the operator"),
        );
        let mut etcd = SimEtcd::default();
        for member in 0..plan.fleet.etcd_members {
            let random = dice.fork(&format!("member {member}"));
            etcd.start(member, network.add_host(0, base, random));
        }
        let hosts = processes.len() + OTHERS + plan.fleet.etcd_members;
        let has_nic = plan.fleet.sites.iter().any(|site| site.has_nic);
        let mut queue = EventQueue::new(dice.fork("queue"));
        (0..hosts).for_each(|host| queue.schedule(0, Event::Turn(host)));
        plan.faults.iter().for_each(|&(at, fault)| queue.schedule(at, Event::Fault(fault)));
        plan.flushes.iter().for_each(|&at| queue.schedule(at, Event::Flush));
        let exchange = plan.exchange.iter();
        exchange.for_each(|exchange| queue.schedule(exchange.begin, Event::Exchange));
        let turns_max = TURNS_MAX
            + TURNS_OF_REQUEST * scale.requests as u64
            + TURNS_OF_WORKER * plan.fleet.roles.len() as u64;
        Ok(Cluster {
            plan,
            base,
            queue,
            network,
            nics,
            files,
            names,
            processes,
            clients,
            operator,
            etcd,
            router,
            schedule: TurnSchedule::new(hosts),
            pauses: vec![None; hosts],
            dice: dice.fork("turns"),
            digest: RunDigest { hash: 0, skips_bytes: has_nic },
            turns: 0,
            turns_max,
        })
    }

    fn run(mut self) -> Result<RunReport, String> {
        let (mut end, mut is_over) = (None, false);
        let exchanged = self.plan.exchange.as_ref().map_or(0, KeyExchange::time);
        while let Some(event) = self.queue.pop() {
            let now = self.queue.now();
            if now > TIME_MAX + exchanged || self.turns > self.turns_max {
                let Cluster { clients, turns, .. } = &self;
                return Err(format!("not ended in time: {} ({turns} turns)", clients.unfinished()));
            }
            self.happen(event, now)?;
            let is_exchanged = self.plan.exchange.as_ref().is_none_or(KeyExchange::is_done);
            if end.is_none() && self.clients.is_done() && self.operator.is_done() && is_exchanged {
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
        self.check_keys()?;
        self.report()
    }

    fn happen(&mut self, event: Event, now: Nanos) -> Result<(), String> {
        self.digest.note([now]);
        let Some(event) = self.network.hold_back(event, &mut self.queue) else { return Ok(()) };
        match event {
            Event::Turn(host) if self.schedule.is_due(host, now) => self.turn(host, now)?,
            Event::Turn(_) => {}
            Event::Dial(connection) => {
                let hosts = self.network.open(connection, now, &mut self.digest);
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
                let hosts =
                    self.network.reset_silent(place, limit, &mut self.queue, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Event::Flush => {
                self.operator.flush(self.router);
                self.wake(self.processes.len() + 1, now);
            }
            Event::Exchange => self.exchange_key(now),
            Event::NewKeys(host) => self.change_keys(host, now)?,
            Event::NamesWell => (0..self.schedule.hosts()).for_each(|host| self.wake(host, now)),
            Event::FirstRole(host) => self.order(host, self.plan.fleet.roles[host - 1].0, now),
            Event::Restart(host) => {
                self.schedule.restart(host, now);
                let kernel = self.network.reboot(host, self.base, now);
                if let Some(member) = self.member_of(host) {
                    self.etcd.start(member, kernel);
                    self.wake(host, now);
                    return Ok(());
                }
                let (line, site) = (&self.plan.fleet.lines[host], self.plan.fleet.sites[host]);
                let site = (site, self.nics.of_site(host, site));
                let files = FileAccess::Memory(self.files[host].clone());
                let process = SimProcess::start(line, kernel, files, site, self.base, &self.names)?;
                (self.processes[host], self.pauses[host]) = (Some(process), None);
                self.wake(host, now);
            }
            Event::Fault(fault) => self.break_something(fault, now)?,
        }
        Ok(())
    }

    fn break_something(&mut self, fault: Fault, now: Nanos) -> Result<(), String> {
        match fault {
            Fault::NicError => {
                let event = self.nics.break_one();
                self.notice(event, now)?;
            }
            Fault::Hold { host, pause } => self.nics.hold(host, now + pause),
            Fault::Reset => {
                let hosts = self.network.reset_one(&mut self.queue, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Fault::Drain { host, pause } => {
                if let Some(process) = self.processes[host].as_ref().filter(|_| !self.drains(host))
                {
                    process.terminate();
                    self.pauses[host] = Some(pause);
                    self.wake(host, now);
                }
            }
            Fault::Stall { host, pause } => self.schedule.stall(host, now + pause),
            Fault::Hang { host, pause } => {
                if let Some(process) = &mut self.processes[host] {
                    process.hang_engine(now + pause);
                }
            }
            Fault::Cut { host, pause } => {
                self.network.cut(CutPlace::Host(host), now + pause, &mut self.queue);
            }
            Fault::Part { hosts: (one, other), pause } => {
                self.network.cut(CutPlace::Between(one, other), now + pause, &mut self.queue);
            }
            Fault::Break { hosts, pause } => {
                self.network.break_pair(hosts, now + pause, &mut self.digest);
                self.wake(hosts.0, now);
                self.wake(hosts.1, now);
            }
            Fault::Names { is_silent, pause } => {
                self.names.fail(is_silent, now + pause);
                self.queue.schedule(now + pause, Event::NamesWell);
            }
            Fault::Compact { cancels } => {
                self.etcd.compact(cancels);
                self.plan.fleet.etcd_hosts().for_each(|host| self.wake(host, now));
            }
            Fault::EndLease => self.etcd.end_lease(),
            Fault::EmptyEtcd => {
                self.etcd.empty();
                for member in 0..self.plan.fleet.etcd_members {
                    let host = self.processes.len() + OTHERS + member;
                    self.network.freeze(host);
                    self.end(host, now + EMPTIED);
                }
            }
            Fault::Role { host, role, pause } => {
                self.order(host, role, now);
                self.queue.schedule(now + pause, Event::FirstRole(host));
            }
            Fault::Death { host, pause } => {
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
        if self.processes[host].as_ref().is_some_and(SimProcess::is_woken) {
            self.wake(host, now);
        }
        Ok(())
    }

    fn order(&mut self, host: usize, role: Role, now: Nanos) {
        let (_, worker) = self.plan.fleet.roles[host - 1];
        self.operator.order(worker, role, now);
        if self.plan.weather == Weather::Gentle {
            self.operator.list_workers(self.router);
        }
        self.wake(self.processes.len() + 1, now);
    }

    /// The member of etcd on a host.
    fn member_of(&self, host: usize) -> Option<usize> {
        host.checked_sub(self.processes.len() + OTHERS)
    }

    fn drains(&self, host: usize) -> bool {
        self.pauses[host].is_some()
    }

    /// Ends the process of a host. A new one starts at this time.
    fn end(&mut self, host: usize, restart: Nanos) {
        let has_run = match self.member_of(host) {
            Some(member) => self.etcd.stop(member),
            None => self.processes[host].take().is_some(),
        };
        if has_run {
            self.network.pump(host, &mut self.queue);
            self.nics.pump(host, &mut self.queue);
            self.queue.schedule(restart, Event::Restart(host));
        }
    }

    /// Lets a host take a turn soon, unless it does so anyway.
    fn wake(&mut self, host: usize, now: Nanos) {
        self.schedule.wake(host, now, &mut self.dice, &mut self.queue);
    }

    fn turn(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        log::set_source(Some(SimulatedSource { since_epoch: Duration::from_nanos(now), host }));
        let stepped = self.step(host, now);
        log::set_source(None);
        stepped?;
        self.wake_others(host, now);
        Ok(())
    }

    fn step(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        self.schedule.take(host);
        if self.schedule.is_stalled(host, now) {
            self.schedule.schedule(host, now, &mut self.queue);
            return Ok(());
        }
        self.turns += 1;
        let clients = self.processes.len();
        let until = match self.processes.get_mut(host) {
            Some(Some(process)) => {
                let has_ready_lane = self.network.has_ready_lane(host);
                let turn = process.turn(now, has_ready_lane, &mut self.dice);
                let turn = turn.map_err(|why| format!("host {host}: {why}"))?;
                // A worker that hangs confirms nothing, and is not waited for without end.
                let unconfirmed = process.take_unconfirmed();
                if let Some(held) = unconfirmed.filter(|_| !self.plan.has_hung_peer(host, now)) {
                    return Err(format!("host {host}: the worker leaves its role and has {held}"));
                }
                match turn {
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
            None if host == clients + 1 => self.operator.turn(now, self.base),
            None => {
                let Some(until) = self.etcd.turn(host - clients - OTHERS, now, self.base) else {
                    return Ok(());
                };
                until
            }
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
        self.schedule.schedule(host, until.max(now + pause), &mut self.queue);
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
                self.schedule.schedule(self.processes.len(), at, &mut self.queue);
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
        if self.member_of(host).is_some() {
            let behind = self.etcd.members_behind().collect::<Vec<_>>();
            behind.into_iter().for_each(|at| self.wake(self.processes.len() + OTHERS + at, now));
        }
        let drained = self.network.take_drained();
        let process = |host: usize| self.processes.get(host).and_then(Option::as_ref);
        let machine = |host: usize| self.plan.fleet.sites.get(host).map(|site| site.machine);
        // A process that has just ended can have rung, too.
        let hosts = match process(host).is_none_or(SimProcess::can_have_rung) {
            true => 0..self.processes.len(),
            false => 0..0,
        };
        let near = hosts.filter(|&other| machine(host) == machine(other));
        let rung = near.filter(|&other| process(other).is_some_and(SimProcess::is_woken));
        let writes = drained.into_iter().filter(|&other| self.is_woken(other));
        let woken = rung.chain(writes).filter(|&other| other != host).collect::<BTreeSet<_>>();
        woken.into_iter().for_each(|other| self.wake(other, now));
    }
}
