//! The thread `ctl` of an agent, for an engine that has threads of its own.
//!
//! Owns: the thread, which owns the [`Agent`] and the table of its requests. Thread: the caller
//! starts and stops it. Invariants: it parks unless there is work. After the thread has ended, no
//! event comes, and calls of the client fail.

use super::client::{AgentClient, ClientParts};
use super::requests::{
    AgentRequests, AgentRings, AgentRole, EVENTS_OF_A_REQUEST, ORDERS_OF_A_REQUEST, SlotProgress,
};
use super::{Agent, AgentConfig, DestinationAgent, SourceAgent};
use crate::ids::Role;
use crate::limits::AGENT_CLOSE_TIME;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::sys::event::EventFd;
use crate::sys::{affinity, signal_mask};
use crossbeam_channel as channel;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};

/// An agent on a thread of its own. Dropping it ends the agent.
#[derive(Debug)]
pub struct AgentThread {
    client: Arc<AgentClient>,
    address: Option<SocketAddr>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl AgentThread {
    /// Starts an agent of this role. Its threads get no signals.
    ///
    /// # Errors
    /// A port, a thread, or the memory of a NIC cannot be had, or the role is mixed.
    pub fn start(role: Role, config: AgentConfig) -> Result<AgentThread, String> {
        let cpus = config.cpus.clone();
        let start = || {
            let reactor = Reactor::new().map_err(super::text)?;
            match role {
                Role::Prefill => AgentThread::run(SourceAgent::source(config, reactor)?),
                Role::Decode => AgentThread::run(DestinationAgent::destination(config, reactor)?),
                Role::Mixed => Err("an agent computes prompts or uses their KV".into()),
            }
        };
        if cpus.is_empty() {
            return signal_mask::with_blocked(start);
        }
        let (started, moved) = signal_mask::with_blocked(|| affinity::start_on(&cpus, start));
        moved.map_err(|error| format!("the CPUs of the agent: {error}"))?;
        started
    }

    fn run<C: AgentRole + Send + 'static>(mut agent: Agent<C>) -> Result<AgentThread, String> {
        let slots = agent.leased.len();
        let (orders, to_agent) = channel::bounded(slots * ORDERS_OF_A_REQUEST);
        let (to_engine, events) = channel::bounded(slots * EVENTS_OF_A_REQUEST);
        let (to_free, free) = channel::bounded(slots);
        let progress: Arc<[_]> = (0..slots).map(|_| SlotProgress::default()).collect();
        let event_fd = EventFd::new().map_err(super::text)?;
        let (stop, is_dead) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicBool>::default());
        let parts = ClientParts {
            role: C::ROLE,
            layout: agent.memory.layout,
            pages: agent.memory.pages,
            prompt_pages: agent.prompt_pages as u32,
            orders,
            events,
            free,
            progress: Arc::clone(&progress),
            lists: Arc::clone(&agent.memory.lists),
            status: agent.handle.status.clone(),
            counters: Arc::clone(&agent.memory.counters),
            bell: agent.bell.clone(),
            event_fd: event_fd.duplicate().map_err(super::text)?,
            is_dead: Arc::clone(&is_dead),
        };
        let address = agent.address();
        let rings = AgentRings { orders: to_agent, events: to_engine, free: to_free, progress };
        let mut requests = AgentRequests::new(&mut agent, rings);
        let is_stopped = stop.clone();
        let last = LastWord { event_fd, is_dead };
        let thread = Builder::new().name("baton-ctl".into()).spawn(move || {
            let ended = serve(&mut agent, &mut requests, &last.event_fd, &is_stopped);
            let until = agent.reactor.now() + AGENT_CLOSE_TIME;
            let ended = ended.and_then(|()| agent.close(until));
            if let Err(why) = ended {
                event!(Error, "agent", "the agent has ended", why = why);
            }
        });
        let client = Arc::new(AgentClient::new(parts));
        Ok(AgentThread { client, address, stop, thread: Some(thread.map_err(super::text)?) })
    }

    /// The engine's side. Any thread can use it.
    pub fn client(&self) -> &Arc<AgentClient> {
        &self.client
    }

    /// The address that destinations need, of a source.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// Tells the engine that the agent has ended, also after a panic.
struct LastWord {
    event_fd: EventFd,
    is_dead: Arc<AtomicBool>,
}

impl Drop for LastWord {
    fn drop(&mut self) {
        self.is_dead.store(true, Ordering::Release);
        self.event_fd.signal();
    }
}

fn serve<C: AgentRole>(
    agent: &mut Agent<C>,
    requests: &mut AgentRequests,
    event_fd: &EventFd,
    stop: &AtomicBool,
) -> Result<(), String> {
    let bell = agent.bell.clone();
    while !stop.load(Ordering::Acquire) {
        bell.prepare_wait();
        // Work that comes after this look wakes the reactor.
        let is_busy = requests.turn(agent) || stop.load(Ordering::Acquire);
        if requests.take_told() {
            event_fd.signal();
        }
        agent.turn(!is_busy, |_| Ok(()))?;
        bell.cancel_wait();
    }
    Ok(())
}

impl Drop for AgentThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.client.wake();
        // A panicked thread has already reported the panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
