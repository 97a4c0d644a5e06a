//! The thread `ctl` of an agent, for an engine that has threads of its own.
//!
//! Owns: the thread, which owns the service of the agent. Thread: the caller starts and stops it.
//! Invariants: it parks unless there is work. After the thread has ended, no event comes, and calls
//! of the client fail. If it has panicked, the pool stays mapped.

use super::client::AgentClient;
use super::requests::AgentRole;
use super::service::AgentService;
use super::{Agent, AgentConfig, DestinationAgent, SourceAgent};
use crate::ids::Role;
use crate::limits::AGENT_CLOSE_TIME;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::stdx::panic_message::panic_message;
use crate::sys::{affinity, last_resort, signal_mask};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
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

    fn run<C: AgentRole + Send + 'static>(agent: Agent<C>) -> Result<AgentThread, String> {
        let (address, region) = (agent.address(), agent.memory.region.clone());
        let (service, client) = AgentService::new(agent)?;
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = stop.clone();
        let thread = Builder::new().name("baton-ctl".into()).spawn(move || {
            let run = || last_resort::as_guest(|| serve(service, &is_stopped));
            let ended = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
                // A NIC may still access the pool.
                std::mem::forget(region);
                Err(panic_message(&*panic).to_owned())
            });
            if let Err(why) = ended {
                event!(Error, "agent", "the agent has ended", why = why);
            }
        });
        let client = Arc::new(client);
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

fn serve<C: AgentRole>(mut service: AgentService<C>, stop: &AtomicBool) -> Result<(), String> {
    while !stop.load(Ordering::Acquire) {
        service.turn(|| stop.load(Ordering::Acquire))?;
    }
    let until = service.agent().reactor.now() + AGENT_CLOSE_TIME;
    service.close(until)
}

impl Drop for AgentThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.client.wake();
        // A panicked thread has already reported the panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
