//! Checks of a worker's tables, for debug builds, tests and the simulator.
//!
//! Thread: `ctl`. They change no table, except that `take_stages` collects stages. Not here: the
//! checks of each table, which it has itself.

use super::WorkerService;
use crate::ids::{RequestId, RequestKey};
use crate::sched::messages::EngineEvent;
use crate::transfer::manager::rooms::Slot;
use crate::worker::metrics::Stages;
use crossbeam_channel::Receiver;

impl WorkerService {
    /// Asserts the rules that hold between turns.
    ///
    /// # Panics
    /// A table of the service contradicts itself or another one.
    pub fn invariants(&self) {
        self.requests.invariants();
        self.connections.invariants();
        let mut clients = self.requests.clients();
        assert!(clients.all(|conn| self.connections.owns(conn)), "each request has its client");
        self.handoff.invariants();
        if let Some(links) = &self.control_links {
            links.invariants();
        }
    }

    /// The legs that have no request any more, without those that keep KV for decode.
    pub fn legs_without_request(&self) -> impl Iterator<Item = (RequestId, Slot)> {
        self.requests.legs_without_request()
    }

    /// The requests that have no complete answer.
    pub fn unanswered(&self) -> impl Iterator<Item = RequestKey> {
        self.requests.unanswered()
    }

    /// The choice that a leg generates.
    pub fn choice_of(&self, leg: RequestId) -> Option<(RequestKey, usize)> {
        self.requests.choice_of(leg)
    }

    /// Takes the stages of the choices that were recorded since the last call. The first call
    /// begins to collect them.
    pub fn take_stages(&mut self) -> Vec<(RequestKey, usize, Stages)> {
        self.requests.take_stages()
    }

    /// The events of the engine that `ctl` has not taken.
    pub fn engine_events(&self) -> &Receiver<EngineEvent> {
        &self.events
    }

    /// Whether the service holds nothing of any request.
    ///
    /// # Errors
    /// What it holds.
    pub fn check_idle(&self) -> Result<(), String> {
        match self.reactor.queued_total() {
            0 => self.connections.check_idle().and_then(|()| self.check_role_idle()),
            queued => Err(format!("{queued} bytes to send")),
        }
    }

    /// Whether destinations have confirmed all KV of requests that have ended here.
    ///
    /// # Errors
    /// The number of hand-offs that they have not confirmed.
    pub fn check_confirmed(&self) -> Result<(), String> {
        self.handoff.check_confirmed()
    }

    /// Whether no prefill worker is asked for KV, or to give KV up.
    ///
    /// # Errors
    /// The number of calls.
    pub fn check_calls(&self) -> Result<(), String> {
        match self.prefill_client.count() {
            0 => Ok(()),
            calls => Err(format!("{calls} calls to prefill workers")),
        }
    }

    /// Whether the current role holds nothing of any request. Answers can be on their way to
    /// clients.
    ///
    /// # Errors
    /// What it holds.
    pub fn check_role_idle(&self) -> Result<(), String> {
        match self.requests.is_idle() {
            true => self.handoff.check_idle().and_then(|()| self.routes.telemetry().check_idle()),
            false => Err("requests".into()),
        }
    }

    /// The number of running requests, while the role changes.
    pub fn running_in_role_change(&self) -> Option<usize> {
        self.routes.is_changing().then(|| self.requests.running())
    }
}
