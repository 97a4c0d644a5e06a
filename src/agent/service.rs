//! An agent and its requests, which an owner steps: the agent's thread, or the simulator.
//!
//! Owns: the [`Agent`], the table of its requests, and the sign of its end. Thread: the owner's.
//! Invariant: the engine learns that the agent has ended after the last event, and when nothing
//! moves any more. A NIC or thread that cannot be stopped may go on. The pages that it uses stay
//! leased. Not here: the loop of the thread (`thread`).

use super::Agent;
use super::client::{AgentClient, ClientParts};
use super::requests::{
    AgentRequests, AgentRings, AgentRole, EVENTS_OF_A_REQUEST, ORDERS_OF_A_REQUEST, SlotProgress,
};
use crate::stdx::event_count::EventCount;
use crate::sys::event::EventFd;
use crossbeam_channel as channel;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// An agent that serves the orders of an [`AgentClient`].
pub(crate) struct AgentService<C> {
    agent: Agent<C>,
    requests: AgentRequests,
    // Dropped after the agent.
    end: EndSignal,
}

impl<C: AgentRole> AgentService<C> {
    /// Opens an agent to an engine.
    ///
    /// # Errors
    /// No descriptor can be had.
    pub(crate) fn new(mut agent: Agent<C>) -> Result<(AgentService<C>, AgentClient), String> {
        let slots = agent.leased.len();
        let (orders, to_agent) = channel::bounded(slots * ORDERS_OF_A_REQUEST);
        let (to_engine, events) = channel::bounded(slots * EVENTS_OF_A_REQUEST);
        let (to_free, free) = channel::bounded(slots);
        let progress: Arc<[_]> = (0..slots).map(|_| SlotProgress::default()).collect();
        let event_fd = EventFd::new().map_err(super::text)?;
        let is_dead = Arc::<AtomicBool>::default();
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
        let rings = AgentRings { orders: to_agent, events: to_engine, free: to_free, progress };
        let requests = AgentRequests::new(&mut agent, rings);
        let end = EndSignal { event_fd, is_dead };
        Ok((AgentService { agent, requests, end }, AgentClient::new(parts)))
    }

    /// Runs one turn of `ctl`. It parks if there is no work, unless `must_stop` returns true after
    /// the owner's bell can wake it.
    ///
    /// # Errors
    /// The agent has ended.
    pub(crate) fn turn(&mut self, must_stop: impl FnOnce() -> bool) -> Result<(), String> {
        let AgentService { agent, requests, end } = self;
        let bell: Arc<EventCount> = agent.bell.clone();
        // Orders that come during this look need no wake-up. After it, there is usually no work.
        requests.turn(agent);
        bell.prepare_wait();
        // Work that comes after this look wakes the reactor.
        let is_busy = requests.turn(agent) || must_stop();
        if requests.take_told() {
            end.event_fd.signal();
        }
        agent.turn(!is_busy, |_| Ok(()))?;
        bell.cancel_wait();
        Ok(())
    }

    /// The agent.
    pub(crate) fn agent(&mut self) -> &mut Agent<C> {
        &mut self.agent
    }

    /// Ends the agent, as [`Agent::close`] does. The engine learns of the end afterwards.
    ///
    /// # Errors
    /// The reactor failed.
    pub(crate) fn close(self, until: Instant) -> Result<(), String> {
        let AgentService { agent, end: _last, .. } = self;
        agent.close(until)
    }
}

/// Tells the engine that the agent has ended, also after a panic.
struct EndSignal {
    event_fd: EventFd,
    is_dead: Arc<AtomicBool>,
}

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.is_dead.store(true, Ordering::Release);
        self.event_fd.signal();
    }
}
