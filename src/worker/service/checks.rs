//! Checks of a worker's tables, for debug builds, tests and the simulator.
//!
//! Thread: `ctl`. They change nothing. Not here: the checks of each table, which it has itself.

use super::WorkerService;
use crate::ids::RequestId;
use crate::transfer::manager::rooms::Slot;

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
