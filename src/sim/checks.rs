//! What is checked at the end of a run: the requests, the workers, and what processes still hold.

use super::clients::{DEADLINE, Outcome};
use super::faults::Weather;
use super::keys::ClientKey;
use super::operator::is_ready;
use super::plan::RunPlan;
use super::process::SimProcess;
use super::requests::PlannedRequest;
use super::{Cluster, RunReport};
use crate::config::secret::{Secret, read_cluster_key};
use crate::limits::{
    EARLY_DESTINATION_LIFE, ENGINE_STILL_MAX, HTTP_REQUEST_TIME_MAX, NET_HOST_SILENCE_MAX,
    ROUTER_PROBE_FAILURES, ROUTER_PROBE_INTERVAL, ROUTER_PROBE_TIME,
};
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::sys::file_access::FileAccess;

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
/// Time from a worker's last sign of life until probes have detected the silence: one probe has
/// just succeeded, then `ROUTER_PROBE_FAILURES` probes fail. Ticks and messages in flight take up
/// to a second more.
const KNOWN: Nanos = (ROUTER_PROBE_INTERVAL.as_nanos()
    + ROUTER_PROBE_FAILURES as u128 * ROUTER_PROBE_TIME.as_nanos()) as Nanos
    + SECOND;
/// The longest request without faults.
const WAIT: Nanos = 4 * SECOND;
/// The longest request if one worker after the other falls silent, or an engine hangs.
const WAIT_NEAR_FAULT: Nanos = WAIT + 2 * KNOWN + ENGINE_STILL_MAX.as_nanos() as Nanos;

impl Cluster {
    /// At the end, the router uses each worker in its first role. In gentle weather, it has used
    /// each changed role in time. Except in a storm, it has soon learnt the new keys of workers.
    pub(super) fn check_workers(&self) -> Result<(), String> {
        let listed = self.operator.listed.as_ref().and_then(|listed| listed["workers"].as_array());
        let listed = listed.ok_or("the router lists no workers")?;
        for (role, address) in &self.plan.fleet.roles {
            if !listed.iter().any(|entry| is_ready(entry, *address, *role)) {
                return Err(format!(
                    "the {role} worker {address} is not used at the end: {listed:?}"
                ));
            }
        }
        if listed.len() > self.plan.fleet.roles.len() {
            return Err(format!("a worker is listed twice: {listed:?}"));
        }
        let unpaired = self.operator.longest_unpaired;
        if self.plan.weather != Weather::Storm && unpaired > FOLLOWED {
            return Err(format!(
                "a worker fits no other because of its keys for {} ms",
                unpaired / MILLI
            ));
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

    /// At the end, each worker has the keys of its files.
    pub(super) fn check_keys(&self) -> Result<(), String> {
        for (host, process) in self.processes.iter().enumerate() {
            let keys = process.as_ref().and_then(SimProcess::cluster_keys).unwrap_or_default();
            let access = FileAccess::Memory(self.files[host].clone());
            let read = |key: &Secret| read_cluster_key(&access, key.source(), &mut Vec::new());
            if keys.iter().any(|key| read(key).ok().as_ref() != Some(key)) {
                return Err(format!("host {host} has not read its new cluster keys"));
            }
        }
        Ok(())
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
        request: &PlannedRequest,
        ended: Nanos,
        outcome: &Outcome,
    ) -> Result<(), String> {
        let late = WAIT + self.plan.time_without_router(request.at, ended);
        if request.is_cut_short {
            let waited = ended - request.at;
            let unnoticed = match outcome {
                // A reset that is lost is noticed by its silence.
                Outcome::Broken(_) => NET_HOST_SILENCE_MAX.as_nanos() as Nanos,
                _ => 0,
            };
            let most = HTTP_REQUEST_TIME_MAX.as_nanos() as Nanos + unnoticed + late;
            return match waited > most {
                true => Err(format!(
                    "a request that is not whole is waited for {} ms from {} ms: {outcome:?}; all \
                     faults: {:?}",
                    waited / MILLI,
                    request.at / MILLI,
                    self.plan.faults
                )),
                false => Ok(()),
            };
        }
        if request.order.is_hurried && ended - request.at > DEADLINE + late {
            return Err(format!("a request is not ended at its deadline: {outcome:?}"));
        }
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
    pub(super) fn report(&self) -> Result<RunReport, String> {
        let mut report = RunReport {
            roles: self.operator.done,
            hash: self.digest.hash,
            turns: self.turns,
            ..RunReport::default()
        };
        if let Some(wrong) = &self.operator.wrong {
            return Err(wrong.clone());
        }
        for (request, ended, outcome) in &self.clients.ended {
            self.check_wait(request, *ended, outcome)?;
            *self.count_of(request, *ended, outcome, &mut report)? += 1;
        }
        Ok(report)
    }

    /// The count of this outcome. An error if the outcome is wrong, or no fault excuses it.
    fn count_of<'a>(
        &self,
        request: &PlannedRequest,
        ended: Nanos,
        outcome: &Outcome,
        report: &'a mut RunReport,
    ) -> Result<&'a mut usize, String> {
        let is_excused = || self.plan.excuses(request.at, ended);
        match outcome {
            Outcome::Answered { .. } => {
                self.check_answer(request, ended, outcome)?;
                Ok(&mut report.well)
            }
            // A wrong key is refused.
            Outcome::Refused(401, ..) if request.key == Some(ClientKey::Wrong) => {
                Ok(&mut report.refused)
            }
            Outcome::Left => Ok(&mut report.left),
            Outcome::Refused(_, code, _) if code == "aborted" && request.is_aborted => {
                Ok(&mut report.aborted)
            }
            // It does not arrive in time.
            Outcome::Refused(408, ..) if request.is_cut_short => Ok(&mut report.refused),
            Outcome::Refused(_, code, _)
                if code == "deadline"
                    && request.order.is_hurried
                    && ended - request.at >= DEADLINE
                    && is_excused() =>
            {
                Ok(&mut report.failed)
            }
            Outcome::Refused(_, code, _) if EXCUSED.contains(&&**code) && is_excused() => {
                Ok(&mut report.failed)
            }
            Outcome::Refused(_, code, _)
                if code == "no_worker" && self.plan.excuses_empty_registry(request.at, ended) =>
            {
                Ok(&mut report.failed)
            }
            Outcome::Broken(_) if is_excused() => Ok(&mut report.failed),
            other => {
                let RunPlan { faults, weather, .. } = &self.plan;
                Err(format!(
                    "{other:?} without a fault: asked at {} ms, ended at {} ms; all faults \
                     ({weather:?}): {faults:?}",
                    request.at / MILLI,
                    ended / MILLI
                ))
            }
        }
    }

    /// Checks the tokens, the logprobs and the number of cached tokens of an answer.
    fn check_answer(
        &self,
        request: &PlannedRequest,
        ended: Nanos,
        outcome: &Outcome,
    ) -> Result<(), String> {
        let Outcome::Answered { ids, cached, logprobs } = outcome else { return Ok(()) };
        if *ids != request.order.expected {
            return Err(format!("expected {:?}, got {ids:?}", request.order.expected));
        }
        if *logprobs != request.order.expected_logprobs {
            let expected = &request.order.expected_logprobs;
            return Err(format!("logprobs: expected {expected:?}, got {logprobs:?}"));
        }
        if request.key == Some(ClientKey::Wrong) {
            return Err("a request with a wrong key is answered".into());
        }
        // After a fault, an earlier attempt can have filled the cache. So can the one that an abort
        // ended, if the abort came too late for the router.
        let known = self.clients.known_prefix(request, ended);
        let is_near_fault = self.plan.is_near_fault(request.at, ended);
        if *cached > known && !is_near_fault && !request.is_aborted {
            return Err(format!(
                "{cached} tokens came from the cache, but no other request with this salt has \
                 more than {known} of them"
            ));
        }
        Ok(())
    }
}
