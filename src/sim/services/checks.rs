//! What is checked at the end of a run: the requests, the workers, and what processes still hold.

use super::clients::Outcome;
use super::faults::Weather;
use super::keys::WRONG_KEY;
use super::operator::is_ready;
use super::plan::{ServicePlan, ServiceRequest};
use super::{Cluster, ServiceReport};
use crate::limits::{EARLY_DESTINATION_LIFE, ENGINE_STILL_MAX};
use crate::sim::checkers::silence::KNOWN;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};

/// Errors that a fault can cause.
const EXCUSED: [&str; 8] = [
    "peer_lost",
    "other_leg",
    "draining",
    "overloaded",
    "no_worker",
    "unreachable",
    "flushed",
    "hanging",
];
/// The longest time until the router uses a worker in a new role: a probe, an identity query or a
/// registry entry, and the period of the operator's list.
const FOLLOWED: Nanos = 10 * SECOND;
/// The longest request without faults.
const WAIT: Nanos = 4 * SECOND;
/// The longest request if one worker after the other falls silent, or an engine hangs.
const WAIT_NEAR_FAULT: Nanos = WAIT + 2 * KNOWN + ENGINE_STILL_MAX.as_nanos() as Nanos;

impl Cluster {
    /// At the end, the router uses each worker in its first role. In gentle weather, it has used
    /// each changed role in time.
    pub(super) fn check_workers(&self) -> Result<(), String> {
        let listed = self.operator.listed.as_ref().and_then(|listed| listed["workers"].as_array());
        let listed = listed.ok_or("the router lists no workers")?;
        for (role, address) in &self.plan.roles {
            if !listed.iter().any(|entry| is_ready(entry, *address, *role)) {
                return Err(format!(
                    "the {role} worker {address} is not used at the end: {listed:?}"
                ));
            }
        }
        if listed.len() > self.plan.roles.len() {
            return Err(format!("a worker is listed twice: {listed:?}"));
        }
        let unlisted = self.operator.longest_unlisted;
        match self.plan.weather == Weather::Gentle && unlisted > FOLLOWED {
            true => Err(format!(
                "the router does not use a worker in its new role for {} ms",
                unlisted / MILLI
            )),
            false => Ok(()),
        }
    }

    /// Each process holds nothing.
    pub(super) fn check_idle(&self) -> Result<(), String> {
        for (host, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            process.check_invariants();
            let empty = process.check_idle();
            empty.map_err(|held| format!("host {host} is idle and holds {held}"))?;
        }
        Ok(())
    }

    /// A request waits for a worker that does not answer only until its probes have failed.
    fn check_wait(
        &self,
        request: &ServiceRequest,
        ended: Nanos,
        outcome: &Outcome,
    ) -> Result<(), String> {
        let is_near_fault = self.plan.is_near_fault(request.at, ended);
        let most = match self.plan.weather {
            Weather::Flaky | Weather::Storm if is_near_fault => return Ok(()),
            // A prefill worker that has started again waits for the prompt of KV that is lost.
            Weather::Narrow if is_near_fault && self.plan.keeps_kv() => {
                WAIT_NEAR_FAULT + EARLY_DESTINATION_LIFE.as_nanos() as Nanos
            }
            Weather::Narrow if is_near_fault => WAIT_NEAR_FAULT,
            _ => WAIT,
        };
        let waited = ended - request.at;
        match waited > most {
            true => Err(format!(
                "a request waits for {} ms from {} ms, at most {} ms are needed: {outcome:?}; all \
                 faults: {:?}",
                waited / MILLI,
                request.at / MILLI,
                most / MILLI,
                self.plan.faults
            )),
            false => Ok(()),
        }
    }

    /// Checks each request, and counts the outcomes.
    pub(super) fn report(&self) -> Result<ServiceReport, String> {
        let mut report = ServiceReport {
            roles: self.operator.done,
            hash: self.digest.hash,
            turns: self.turns,
            ..ServiceReport::default()
        };
        for (request, ended, outcome) in &self.clients.ended {
            self.check_wait(request, *ended, outcome)?;
            match outcome {
                Outcome::Answered { ids, .. } if *ids != request.order.expected => {
                    return Err(format!("expected {:?}, got {ids:?}", request.order.expected));
                }
                Outcome::Answered { .. } if request.key == Some(WRONG_KEY) => {
                    return Err("a request with a wrong key is answered".into());
                }
                Outcome::Answered { cached, .. } => {
                    // After a fault, an earlier attempt can have filled the cache.
                    let known = self.clients.known_prefix(request, *ended);
                    if *cached > known && !self.plan.is_near_fault(request.at, *ended) {
                        return Err(format!(
                            "{cached} tokens came from the cache, but no other request with this \
                             salt has more than {known} of them"
                        ));
                    }
                    report.well += 1;
                }
                // A wrong key is refused.
                Outcome::Refused(401, ..) if request.key == Some(WRONG_KEY) => report.refused += 1,
                Outcome::Left => report.left += 1,
                Outcome::Refused(_, code, _)
                    if EXCUSED.contains(&&**code) && self.plan.excuses(request.at, *ended) =>
                {
                    report.failed += 1;
                }
                Outcome::Broken(_) if self.plan.excuses(request.at, *ended) => report.failed += 1,
                other => {
                    let ServicePlan { faults, weather, .. } = &self.plan;
                    return Err(format!(
                        "{other:?} without a fault: asked at {} ms, ended at {} ms; all faults \
                         ({weather:?}): {faults:?}",
                        request.at / MILLI,
                        ended / MILLI
                    ));
                }
            }
        }
        Ok(report)
    }
}
