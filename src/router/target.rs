//! The router's record of a worker: its address, its reports and its faults.
//!
//! Thread: `ctl`. Not here: connections to it (`pool`), its health (`routing::health`).

use crate::config::values::WorkerUrl;
use crate::ids::Leg;
use crate::net::ConnId;
use crate::router::identity::{Identification, WorkerInfo};
use crate::routing::load::WorkerNumber;
use crate::routing::role_balancer::DecodeCapacity;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// A connection without a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub conn: ConnId,
    pub since: Instant,
}

/// The router's record of a worker.
#[derive(Debug)]
pub struct WorkerTarget {
    /// Its URL from the configuration or its entry.
    pub url: WorkerUrl,
    /// The address of its name, if it is known.
    pub address: Option<SocketAddr>,
    /// Configured port of its bootstrap registry. `None` for decode workers, and if the
    /// configuration has none.
    pub bootstrap_port: Option<u16>,
    /// Reported port of its bootstrap registry.
    pub(super) reported_port: Option<u16>,
    /// Whether it was named with another role and has then reported this role.
    pub(super) has_changed_role: bool,
    /// The reported capacity, and the number of role changes if its role can change.
    pub(super) capacity: Option<DecodeCapacity>,
    pub(super) role_changes: Option<u64>,
    /// Whether it has reported that it cannot change its role now.
    pub(super) keeps_role: bool,
    /// Whether it does not report its identity, because this router has no key for it.
    pub(super) withholds: bool,
    /// Whether it is mixed. It then has the address of a decode worker.
    pub(super) is_mixed: bool,
    /// Whether its address refused a connection, and its name is being looked up again.
    pub(super) lost: bool,
    /// Whether it was identified after the last time at which another process could have replaced
    /// it.
    pub(super) is_identified: bool,
    /// The result of the last identity query.
    pub(super) verdict: Identification,
    /// The worker that it does not fit and the reason, as logged.
    pub(super) misfit: Option<(WorkerNumber, String)>,
    /// Whether it may answer load queries.
    pub(super) reports: bool,
    /// Tokens of KV in use, by its last report.
    pub(super) used: Option<u64>,
    /// Whether it drains, by its own report.
    pub drains: bool,
    /// Reason why it is down. `None` while it is up.
    pub fault: Option<String>,
    /// The name of its model for clients.
    pub model: Option<String>,
    /// Whether the log already says that it is down.
    pub(super) told_down: bool,
    /// The logged fault. `None` if the log names no fault.
    told_fault: Option<String>,
    /// Another fault that the last probe found.
    other_fault: Option<String>,
    /// Idle connections; the last one is the most recently used.
    pub(super) idle: Vec<Idle>,
}

impl WorkerTarget {
    /// A worker at this address, if the address is known.
    pub fn new(
        url: WorkerUrl,
        address: Option<SocketAddr>,
        bootstrap_port: Option<u16>,
    ) -> WorkerTarget {
        let address = address.or_else(|| Some(SocketAddr::new(url.host.parse().ok()?, url.port)));
        WorkerTarget {
            url,
            address,
            bootstrap_port,
            reported_port: None,
            has_changed_role: false,
            capacity: None,
            role_changes: None,
            keeps_role: false,
            withholds: false,
            is_mixed: false,
            lost: false,
            is_identified: false,
            misfit: None,
            reports: true,
            used: None,
            verdict: Identification::Fits,
            drains: false,
            fault: Some("it was not probed yet".into()),
            model: None,
            told_down: false,
            told_fault: None,
            other_fault: None,
            idle: Vec::new(),
        }
    }

    /// Sets whether it has reported its role itself.
    pub(super) fn turned(self, has_changed_role: bool) -> WorkerTarget {
        WorkerTarget { has_changed_role, ..self }
    }

    /// Applies its report. A field that it does not report keeps its earlier value.
    pub(super) fn hear(&mut self, words: &WorkerInfo, role: Leg) {
        self.model = words.model.clone().or_else(|| self.model.take());
        self.capacity = words.capacity.or(self.capacity);
        // After a change of identity, it may be able to change its role again.
        self.keeps_role &= words.role_changes == self.role_changes;
        (self.role_changes, self.is_mixed) = (words.role_changes, words.is_mixed());
        if role == Leg::Prefill {
            self.reported_port = words.bootstrap_port.or(self.reported_port);
        }
        if words.role_changes.is_some_and(|changes| changes > 0) {
            // The configured port belongs to an earlier role.
            self.bootstrap_port = None;
        }
    }

    /// Why it may be misconfigured, although the router uses it.
    pub(super) fn doubt(&self) -> Option<&str> {
        match &self.verdict {
            Identification::Doubtful(why) => Some(why),
            _ => None,
        }
    }

    /// Records that the log now says why it is down or not used.
    pub(super) fn mark_fault_logged(&mut self) {
        self.told_down = true;
        (self.told_fault, self.other_fault) = (self.fault.clone(), None);
    }

    /// Records that it is up, so that the next fault will be logged.
    pub(super) fn mark_up(&mut self) {
        self.told_down = false;
        (self.drains, self.fault, self.told_fault, self.other_fault) = (false, None, None, None);
    }

    /// Records that a probe found it down again. Returns whether the fault differs from the logged
    /// one and was found twice. Once is not enough, because the faults at a port vary during a
    /// restart.
    pub(super) fn confirm_new_fault(&mut self) -> bool {
        if self.told_fault.is_none() || self.fault == self.told_fault {
            // After a drain, the log says that it is gone, without a reason.
            self.mark_fault_logged();
            return false;
        }
        let is_met_again = self.other_fault == self.fault;
        self.other_fault.clone_from(&self.fault);
        is_met_again
    }

    /// The port of its bootstrap registry, configured or reported.
    pub(super) fn registry_port(&self) -> Option<u16> {
        self.bootstrap_port.or(self.reported_port)
    }

    /// Switches to the next address of its name, because the present one does not work.
    pub(super) fn turn_to(&mut self, addresses: &[IpAddr]) {
        let at =
            self.address.and_then(|address| addresses.iter().position(|&ip| ip == address.ip()));
        let next = at.map_or(0, |at| (at + 1) % addresses.len());
        self.address = Some(SocketAddr::new(addresses[next], self.url.port));
    }

    /// The value of a request's `Host` field.
    pub(super) fn host(&self) -> String {
        self.url.authority()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_reason_is_news_once_it_was_met_twice() {
        let mut target = WorkerTarget::new("http://10.0.0.1:7".parse().unwrap(), None, None);
        let mut met = |why: &str| {
            target.fault = Some(why.into());
            let is_news = target.confirm_new_fault();
            if is_news {
                target.mark_fault_logged();
            }
            is_news
        };
        assert_eq!(
            ["gone", "gone", "late", "gone", "late"].map(&mut met),
            [false; 5],
            "it comes and goes"
        );
        assert_eq!(
            ["late", "late", "gone", "gone", "gone"].map(&mut met),
            [true, false, false, true, false]
        );
        target.mark_up();
        assert!(!target.told_down && target.fault.is_none());
    }

    #[test]
    fn keeps_role_is_cleared_when_the_role_changes() {
        let mut target = WorkerTarget::new("http://10.0.0.1:7".parse().unwrap(), None, None);
        let info = |changes| WorkerInfo { role_changes: changes, ..WorkerInfo::default() };
        target.hear(&info(Some(0)), Leg::Decode);
        target.keeps_role = true;
        target.hear(&info(Some(0)), Leg::Decode);
        assert!(target.keeps_role, "it is what it was");
        target.hear(&info(Some(1)), Leg::Decode);
        assert!(!target.keeps_role);
    }
}
