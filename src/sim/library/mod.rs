//! The library under a simulated engine: agents as they are, over operating systems in memory, in
//! one thread and under one seed.
//!
//! ```text
//!  attempts ─▶ engine ─▶ AgentClient ─▶ agent ─▶ network and NICs ─▶ agent ─▶ ... ─▶ engine
//! ```
//! Replaced: the sockets below the reactor, the library of verbs, the threads (a turn steps `ctl`,
//! the mover and the engine in a drawn order), and the engine. Invariant: the same seed gives the
//! same run. Not here: the rules that are checked (`engine`), the C functions over agents.

mod engine;
mod memory;
mod plan;

use super::faults::Fault;
use super::network::{CutPlace, Network};
use super::nics::{NicEvent, NicNetwork};
use super::turns::{LATENESS, TurnSchedule};
use super::{Event, RunDigest, RunReport, RunScale, network};
use crate::agent::requests::AgentRole;
use crate::agent::service::AgentService;
use crate::agent::{Agent, AgentConfig, DestinationAgent, SourceAgent};
use crate::cause::Cause;
use crate::ids::Role;
use crate::net::{MemoryKernel, Reactor};
use crate::obs::log::{self, SimulatedSource};
use crate::stdx::cidr::Cidr;
use crate::stdx::event_queue::{EventQueue, MICRO, MILLI, Nanos, SECOND};
use crate::stdx::hash_map;
use crate::stdx::rng::Rng;
use crate::transfer::command::{Cancel, DestinationCommand, SourceCommand};
use crate::transfer::transport::rdma::Nic;
use crate::wire::message::HostId;
use engine::{AttemptEnd, GuestEngine};
use memory::EngineMemory;
use plan::{AgentSite, LibraryPlan, PROMPT_MAX};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The addresses of all hosts.
const HOSTS: &str = "10.0.0.0/8";
/// The longest simulated time of a run.
const TIME_MAX: Nanos = 300 * SECOND;
/// Time between two turns while requests are open, and while none is.
const BUSY_TURN: Nanos = 400 * MICRO;
const IDLE_TURN: Nanos = 20 * MILLI;
/// The longest time from the end of a destination that has given up to that of its source. The
/// engine of the source can look late.
const TOLD_MAX: Nanos = 5 * SECOND;
/// Most steps of the mover in a turn.
const MOVER_STEPS: u64 = 4;

/// An agent and its engine, in one process.
struct LibraryProcess {
    kernel: MemoryKernel,
    service: Service,
    engine: GuestEngine,
    address: Option<SocketAddr>,
    /// The times of the agent's last two turns. The last one can have begun with an older clock.
    agent_ran: [Nanos; 2],
}

enum Service {
    Source(Box<AgentService<SourceCommand>>),
    Destination(Box<AgentService<DestinationCommand>>),
}

impl Service {
    fn turn(&mut self) -> Result<(), String> {
        match self {
            Service::Source(service) => service.turn(|| false),
            Service::Destination(service) => service.turn(|| false),
        }
    }

    fn step_mover(&mut self) {
        _ = match self {
            Service::Source(service) => service.agent().step_mover(),
            Service::Destination(service) => service.agent().step_mover(),
        };
    }

    fn check_idle(&mut self) -> Result<(), String> {
        fn check<C: Cancel>(agent: &Agent<C>) -> Result<(), String> {
            agent.invariants();
            agent.check_idle()
        }
        match self {
            Service::Source(service) => check(service.agent()),
            Service::Destination(service) => check(service.agent()),
        }
    }

    fn close(self, now: Instant) -> Result<(), String> {
        match self {
            Service::Source(service) => service.close(now),
            Service::Destination(service) => service.close(now),
        }
    }
}

impl LibraryProcess {
    fn start(
        site: &AgentSite,
        kernel: MemoryKernel,
        nics: Vec<Nic>,
        dice: Rng,
    ) -> Result<LibraryProcess, String> {
        let memory = EngineMemory::new(site.layout, site.pages, dice.fork("memory"));
        let reactor = Reactor::in_memory(kernel.clone()).map_err(|error| error.to_string())?;
        let config = AgentConfig {
            slots: site.slots,
            prompt_pages: PROMPT_MAX as usize,
            transports: site.transports.clone(),
            lanes: site.lanes,
            nics,
            machine: HostId([site.machine; 16]),
            allowed: vec![HOSTS.parse::<Cidr>()?],
            busy_poll: true,
            ..AgentConfig::new(
                memory.region().clone(),
                site.layout,
                site.pages,
                [1; 32],
                kernel.host(),
            )
        };
        fn serve<C: AgentRole>(
            agent: Agent<C>,
            memory: EngineMemory,
            (lateness, dice): (Nanos, Rng),
            kind: fn(Box<AgentService<C>>) -> Service,
        ) -> Result<(Service, GuestEngine), String> {
            let (service, client) = AgentService::new(agent)?;
            let engine = GuestEngine::new(C::ROLE, client, memory, lateness, dice);
            Ok((kind(Box::new(service)), engine))
        }
        let pace = (site.lateness, dice.fork("engine"));
        let mut address = None;
        let (service, engine) = match site.role {
            Role::Prefill => {
                let agent = SourceAgent::source(config, reactor)?;
                address = agent.address();
                serve(agent, memory, pace, Service::Source)?
            }
            _ => {
                let agent = DestinationAgent::destination(config, reactor)?;
                serve(agent, memory, pace, Service::Destination)?
            }
        };
        Ok(LibraryProcess { kernel, service, engine, address, agent_ran: [0; 2] })
    }

    /// Takes a turn. Returns the time of the next one, unless something comes before.
    fn turn(
        &mut self,
        now: Nanos,
        addresses: &[SocketAddr],
        dice: &mut Rng,
    ) -> Result<Nanos, String> {
        let mut looks_at = now + IDLE_TURN;
        let first = dice.range_u64(0, 2);
        for part in 0..3 {
            match (first + part) % 3 {
                0 => {
                    self.service.turn()?;
                    self.agent_ran = [now, self.agent_ran[0]];
                }
                1 => (0..dice.range_u64(1, MOVER_STEPS)).for_each(|_| self.service.step_mover()),
                _ => looks_at = self.engine.turn(now, self.agent_ran[1], addresses)?,
            }
        }
        let pause = if self.engine.is_busy() { BUSY_TURN } else { IDLE_TURN };
        Ok(looks_at.min(now + pause))
    }
}

struct LibraryCluster {
    plan: LibraryPlan,
    base: Instant,
    queue: EventQueue<Event>,
    network: Network,
    nics: NicNetwork,
    /// By host; `None` while it is dead.
    processes: Vec<Option<LibraryProcess>>,
    /// The last known address of each host: that of a source's agent.
    addresses: Vec<SocketAddr>,
    /// The memory of agents that have ended.
    memories: Vec<EngineMemory>,
    schedule: TurnSchedule,
    ends: Vec<AttemptEnd>,
    has_last_attempts: bool,
    dice: Rng,
    digest: RunDigest,
    turns: u64,
}

/// Runs agents and their engines until all requests have ended.
///
/// # Errors
/// A rule is broken, or an assertion fails.
pub fn run(seed: u64, scale: RunScale) -> Result<RunReport, String> {
    hash_map::fix_secret();
    let all = || LibraryCluster::new(seed, scale)?.run();
    catch_unwind(AssertUnwindSafe(all)).unwrap_or_else(|panic| Err(super::panic_text(&*panic)))
}

impl LibraryCluster {
    fn new(seed: u64, scale: RunScale) -> Result<LibraryCluster, String> {
        let dice = Rng::new(seed).fork("library");
        let plan = LibraryPlan::new(&dice, scale);
        let hosts = plan.sites.len();
        let base = Instant::now();
        let has_nics = plan.sites.iter().any(AgentSite::has_nic);
        let mut cluster = LibraryCluster {
            base,
            queue: EventQueue::new(dice.fork("queue")),
            network: Network::new(dice.fork("network")),
            nics: NicNetwork::new(super::plan::NIC_PATIENCE, dice.fork("nics")),
            processes: Vec::new(),
            addresses: vec![SocketAddr::new(network::address_of(0), 1); hosts],
            memories: Vec::new(),
            schedule: TurnSchedule::new(hosts),
            ends: Vec::new(),
            has_last_attempts: false,
            dice: dice.fork("turns"),
            digest: RunDigest { hash: 0, skips_bytes: has_nics },
            turns: 0,
            plan,
        };
        for host in 0..hosts {
            let random = dice.fork(&format!("host {host}"));
            let machine = cluster.plan.sites[host].machine;
            let kernel = cluster.network.add_host(machine, base, random);
            let process = cluster.start(host, kernel, 0)?;
            cluster.processes.push(Some(process));
            cluster.queue.schedule(0, Event::Turn(host));
        }
        for (number, attempt) in cluster.plan.attempts.iter().enumerate() {
            for host in attempt.hosts {
                let process = cluster.processes[host].as_mut().expect("all have started");
                process.engine.add(number, attempt.clone());
            }
        }
        for &(at, fault) in &cluster.plan.faults {
            cluster.queue.schedule(at, Event::Fault(fault));
        }
        Ok(cluster)
    }

    fn start(
        &mut self,
        host: usize,
        kernel: MemoryKernel,
        now: Nanos,
    ) -> Result<LibraryProcess, String> {
        let site = &self.plan.sites[host];
        let nics = if site.has_nic() { vec![self.nics.nic(host)] } else { Vec::new() };
        let dice = self.dice.fork(&format!("process of {host} at {now}"));
        let process = LibraryProcess::start(site, kernel, nics, dice)?;
        if let Some(address) = process.address {
            self.addresses[host] = address;
        }
        Ok(process)
    }

    fn run(mut self) -> Result<RunReport, String> {
        while let Some(event) = self.queue.pop() {
            let now = self.queue.now();
            if now > TIME_MAX {
                return Err(format!("not ended in time: {:?}", self.check_idle()));
            }
            self.happen(event, now)?;
            let is_over = now > self.plan.end && self.is_idle();
            if is_over && !std::mem::replace(&mut self.has_last_attempts, true) {
                self.begin_last_attempts(now)?;
            } else if is_over && self.check_idle().is_ok() {
                break;
            }
        }
        self.memories.iter().try_for_each(EngineMemory::check_guards)?;
        self.report()
    }

    /// Whether no engine has a request.
    fn is_idle(&self) -> bool {
        self.processes.iter().all(|one| one.as_ref().is_some_and(|one| one.engine.is_idle()))
    }

    fn check_idle(&mut self) -> Result<(), String> {
        for (host, process) in self.processes.iter_mut().enumerate() {
            let process = process.as_mut().ok_or("a process is dead")?;
            let held = process.engine.check_idle().and_then(|()| process.service.check_idle());
            held.map_err(|held| format!("host {host} is idle and holds {held}"))?;
        }
        Ok(())
    }

    /// All faults are over, and all slots free: each pair can hand over.
    fn begin_last_attempts(&mut self, now: Nanos) -> Result<(), String> {
        let attempts = self.plan.last_attempts(&mut self.dice, now);
        for process in self.processes.iter_mut().flatten() {
            process.engine.remember_releases()?;
        }
        for attempt in attempts {
            let number = self.plan.attempts.len();
            for host in attempt.hosts {
                let process = self.processes[host].as_mut().expect("no process is dead");
                process.engine.add(number, attempt.clone());
                self.wake(host, now);
            }
            self.plan.attempts.push(attempt);
        }
        Ok(())
    }

    fn happen(&mut self, event: Event, now: Nanos) -> Result<(), String> {
        self.digest.note([now]);
        let Some(event) = self.network.hold_back(event, &mut self.queue) else { return Ok(()) };
        match event {
            Event::Turn(host) if self.schedule.is_due(host, now) => self.turn(host, now)?,
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
                let LibraryCluster { nics, network, queue, digest, .. } = self;
                let event = nics.step((step, pair), network, queue, digest);
                self.notice(event, now);
            }
            Event::Silence { place, limit } => {
                let hosts =
                    self.network.reset_silent(place, limit, &mut self.queue, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Event::Restart(host) => {
                self.schedule.restart(host, now);
                let kernel = self.network.reboot(host, self.base, now);
                let process = self.start(host, kernel, now)?;
                self.processes[host] = Some(process);
                self.wake(host, now);
            }
            Event::Fault(fault) => self.break_something(fault, now)?,
            _ => {}
        }
        Ok(())
    }

    fn break_something(&mut self, fault: Fault, now: Nanos) -> Result<(), String> {
        match fault {
            Fault::NicError => {
                let event = self.nics.break_one();
                self.notice(event, now);
            }
            Fault::Hold { host, pause } => self.nics.hold(host, now + pause),
            Fault::Reset => {
                let hosts = self.network.reset_one(&mut self.queue, &mut self.digest);
                hosts.into_iter().for_each(|host| self.wake(host, now));
            }
            Fault::Stall { host, pause } => self.schedule.stall(host, now + pause),
            Fault::Cut { host, pause } => {
                self.network.cut(CutPlace::Host(host), now + pause, &mut self.queue);
            }
            Fault::Break { hosts, pause } => {
                self.network.break_pair(hosts, now + pause, &mut self.digest);
                self.wake(hosts.0, now);
                self.wake(hosts.1, now);
            }
            Fault::Drain { host, pause } => self.end(host, now, now + pause, true)?,
            Fault::Death { host, pause } => {
                self.network.freeze(host);
                self.end(host, now, now + pause, false)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Ends an agent: its engine closes it, or its process dies. A new one starts at this time.
    fn end(
        &mut self,
        host: usize,
        now: Nanos,
        restart: Nanos,
        is_closed: bool,
    ) -> Result<(), String> {
        let Some(mut process) = self.processes[host].take() else { return Ok(()) };
        self.ends.extend(process.engine.take_ends());
        process.kernel.set_now(self.base + Duration::from_nanos(now));
        if is_closed {
            process.service.close(process.kernel.now())?;
            // The engine uses its memory again at once.
            let mut memory = process.engine.into_memory();
            memory.give_back_all();
            self.memories.push(memory);
        }
        self.network.pump(host, &mut self.queue);
        self.nics.pump(host, &mut self.queue);
        self.queue.schedule(restart, Event::Restart(host));
        Ok(())
    }

    /// What a NIC has done wakes the process of its host.
    fn notice(&mut self, event: NicEvent, now: Nanos) {
        match event {
            NicEvent::Nothing => {}
            NicEvent::Completed(host) | NicEvent::Landed { host, .. } => self.wake(host, now),
        }
    }

    fn wake(&mut self, host: usize, now: Nanos) {
        self.schedule.wake(host, now, &mut self.dice, &mut self.queue);
    }

    fn turn(&mut self, host: usize, now: Nanos) -> Result<(), String> {
        self.schedule.take(host);
        let Some(process) = &mut self.processes[host] else { return Ok(()) };
        if self.schedule.is_stalled(host, now) {
            self.schedule.schedule(host, now, &mut self.queue);
            return Ok(());
        }
        self.turns += 1;
        process.kernel.set_now(self.base + Duration::from_nanos(now));
        log::set_source(Some(SimulatedSource { since_epoch: Duration::from_nanos(now), host }));
        let turn = process.turn(now, &self.addresses, &mut self.dice);
        log::set_source(None);
        let until = turn.map_err(|why| format!("host {host}: {why}"))?;
        self.ends.extend(process.engine.take_ends());
        self.network.pump(host, &mut self.queue);
        self.nics.pump(host, &mut self.queue);
        let is_ready = self.network.is_ready(host) || self.network.has_ready_lane(host);
        let pause = self.dice.range_u64(MICRO, LATENESS);
        self.schedule.schedule(
            host,
            if is_ready { now + pause } else { until.max(now + pause) },
            &mut self.queue,
        );
        let drained = self.network.take_drained();
        let woken: BTreeSet<_> = drained.into_iter().filter(|&other| other != host).collect();
        woken.into_iter().for_each(|other| self.wake(other, now));
        Ok(())
    }

    /// A source learns soon that its destination has given an attempt up, if both have met.
    fn check_sources(&self) -> Result<(), String> {
        let given_up = self.ends.iter().filter(|end| {
            let is_own = end.role == Role::Decode && end.failure == Some(Cause::Aborted);
            is_own && end.has_met
        });
        for end in given_up {
            let is_source =
                |other: &&AttemptEnd| other.attempt == end.attempt && other.role == Role::Prefill;
            let Some(source) = self.ends.iter().find(is_source) else { continue };
            let began = self.plan.attempts[end.attempt].ends[0].at.unwrap_or(0);
            if source.at > end.at.max(began) + TOLD_MAX {
                return Err(format!(
                    "the source of {:?} is not told that its destination has given up",
                    self.plan.attempts[end.attempt].room
                ));
            }
        }
        Ok(())
    }

    /// Counts the outcomes. An attempt that nothing disturbs has landed at both ends.
    fn report(&self) -> Result<RunReport, String> {
        let mut report =
            RunReport { hash: self.digest.hash, turns: self.turns, ..RunReport::default() };
        let is_calm = self.plan.faults.is_empty() && !self.plan.is_tight;
        if is_calm {
            self.check_sources()?;
        }
        let pairs = self.plan.sources * (self.plan.sites.len() - self.plan.sources);
        let last = self.plan.attempts.len() - pairs;
        for (number, attempt) in self.plan.attempts.iter().enumerate() {
            let ends = self.ends.iter().filter(|end| end.attempt == number);
            let landed = ends.clone().filter(|end| end.failure.is_none()).count();
            match landed {
                2 => report.well += 1,
                _ => report.failed += 1,
            }
            if landed < 2 && attempt.must_land() && (is_calm || number >= last) {
                return Err(format!("{attempt:?} has not landed: {:?}", ends.collect::<Vec<_>>()));
            }
        }
        Ok(report)
    }
}
