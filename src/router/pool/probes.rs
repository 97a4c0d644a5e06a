//! Probes of workers: their identity first, then their health.

use super::{RoleReport, WorkerPool};
use crate::api::info::ASKED_BY_ROUTER;
use crate::config::values::WorkerUrl;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::router::call::Owner;
use crate::router::identity::{self, Identification, WorkerInfo};
use crate::router::load_report;
use crate::router::target::WorkerTarget;
use crate::routing::health::HealthChange;
use crate::routing::load::WorkerNumber;
use crate::stdx::failpoint::is_failpoint_active;
use crate::upstream::answer::UpstreamReply;
use crate::upstream::request::UpstreamHead;
use std::sync::Arc;
use std::time::Instant;

/// The fault of a worker that has another role and reports it only with an API key.
const WITHHELD: &str =
    "it has another role, and this router has no key to read it (--api-key-file)";

impl WorkerPool {
    /// Starts the probes that are due.
    pub fn probe(&mut self, reactor: &mut Reactor, now: Instant) {
        while let Some(worker) = self.balancer.begin_probe(now) {
            self.ask(reactor, worker, now);
        }
        while let Some(worker) = self.balancer.give_up(now) {
            let url = self.url(worker);
            event!(Error, "router", "worker was not up in time: probing stopped", worker = url);
        }
    }

    /// Queries a worker's identity, or probes its health if the identity is known.
    fn ask(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        debug_assert!(self.targets.contains_key(&worker), "a worker that is probed is known");
        let Some(target) = self.targets.get(&worker) else { return };
        if target.address.is_none() {
            self.look_up_again(worker, now);
        }
        // Workers with different keys can have read their new ones since their last report.
        let has_final_keys = !self.balancer.differs_by_keys(worker)
            || is_failpoint_active("keys that differ are final");
        // A leaving worker is probed only for its health, because its calls still run.
        let is_known = |target: &WorkerTarget| {
            (target.is_identified && has_final_keys) || !self.balancer.has(worker)
        };
        match self.targets.get(&worker).is_some_and(is_known) {
            false => self.call(reactor, worker, Owner::IdentityQuery, now),
            true => self.call(reactor, worker, Owner::Probe, now),
        }
    }

    fn call(&mut self, reactor: &mut Reactor, worker: WorkerNumber, owner: Owner, now: Instant) {
        debug_assert!(self.balancer.knows(worker), "a call is counted at its worker");
        let reservation = self.balancer.reserve_visit(worker);
        match self.open_call(reactor, owner, reservation, now + self.health.1, now) {
            Ok((conn, _)) => {
                let path = match owner {
                    Owner::IdentityQuery => identity::PATH,
                    Owner::Report => load_report::PATH,
                    _ => &self.health.0,
                };
                let mut order = UpstreamHead::get(path);
                if owner == Owner::IdentityQuery {
                    order.headers.push((ASKED_BY_ROUTER, String::from("introduction")));
                }
                // `/health` needs no API key.
                order.headers.extend(self.bearer().filter(|_| path != "/health"));
                self.send_request(reactor, conn, &order, &Arc::default(), now);
            }
            Err(_) if owner == Owner::Report => self.balancer.reported(worker, None, now),
            Err(reason) => {
                self.ails(worker, format!("cannot connect: {reason}"));
                self.probed(worker, false, now);
            }
        }
    }

    /// Queries the load of a worker that is up, if a policy compares loads and the worker reports
    /// it.
    pub(super) fn ask_report(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let reports = self.targets.get(&worker).is_some_and(|target| target.reports);
        if reports && self.balancer.compares_loads() && self.balancer.has(worker) {
            self.balancer.ask_report(worker);
            self.call(reactor, worker, Owner::Report, now);
        }
    }

    /// Handles the answer to a load query. If the worker does not know the path, it gets no further
    /// load query before its next identification.
    pub(super) fn reported(&mut self, worker: WorkerNumber, answer: &UpstreamReply, now: Instant) {
        let report = if answer.is_success() { load_report::of(&answer.body) } else { None };
        if let Some(target) = self.targets.get_mut(&worker) {
            target.reports &= !matches!(answer.status, 401 | 403 | 404 | 405);
            target.used = report.map(|report| report.used);
        }
        self.balancer.reported(worker, report, now);
    }

    /// Sets the fault of a worker, for operators.
    pub(super) fn ails(&mut self, worker: WorkerNumber, why: String) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.fault = Some(why);
        }
    }

    /// Handles a probe of a worker that drains, or (`of_role`) that does not have the expected
    /// role. In the second case, its new role was already queried. If the worker does not report
    /// its role, only an operator can help.
    pub(super) fn declined(&mut self, worker: WorkerNumber, of_role: bool, now: Instant) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.told_down = true;
            if of_role && target.withholds {
                target.drains = false;
                if target.fault.as_deref() != Some(WITHHELD) {
                    event!(
                        Warn,
                        "router",
                        "worker cannot be used",
                        worker = target.url,
                        why = WITHHELD
                    );
                    target.fault = Some(WITHHELD.into());
                    target.mark_fault_logged();
                }
            }
        }
        self.balancer.declined(worker, now);
    }

    /// Handles the end of a worker that drained.
    pub(super) fn log_drain_end(&mut self, worker: WorkerNumber) {
        let role = self.role_name(worker);
        let here = self.targets.get_mut(&worker).filter(|target| target.drains);
        if let (Some(role), Some(target)) = (role, here) {
            (target.drains, target.told_down) = (false, true);
            event!(
                Info,
                "router",
                "worker is down",
                role = role,
                worker = target.url,
                by = "drain"
            );
        }
    }

    /// Handles the end of an identity query: the answer, or the reason why there is none.
    pub(super) fn handle_identity(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        answer: Result<UpstreamReply, String>,
        now: Instant,
    ) {
        let success = answer.as_ref().ok().filter(|answer| answer.is_success());
        let words = success.map(|answer| WorkerInfo::of(&answer.body));
        if let Some(words) = &words {
            self.balancer.set_local_prefill(worker, words.local_prefill);
        }
        // A worker with old cluster keys will soon report new ones.
        let is_settled = self.keys_change.is_none_or(|until| until <= now);
        // A worker that does not answer keeps its earlier report.
        if let Some(words) = &words {
            self.note_compatibility(worker, words, is_settled);
        }
        // The worker can have left during the query. It is still probed, because its calls still
        // run.
        if !self.balancer.has(worker) && self.targets.contains_key(&worker) {
            return self.call(reactor, worker, Owner::Probe, now);
        }
        let here = self.targets.get_mut(&worker).filter(|_| self.balancer.has(worker));
        let (Some(role), Some(target)) = (self.balancer.role(worker), here) else { return };
        target.withholds = matches!(answer, Ok(UpstreamReply { status: 401 | 403, .. }));
        let judged = words.map(|words| {
            target.hear(&words, role);
            identity::identify_worker(role, target.bootstrap_port, target.has_changed_role, &words)
        });
        let (verdict, asked) = match judged {
            Some(verdict) => (verdict, true),
            None => doubt(answer),
        };
        (target.is_identified, target.reports) = (asked && is_settled, true);
        if !asked && target.told_down {
            // The log already says that it is down, and why.
            return self.call(reactor, worker, Owner::Probe, now);
        }
        let is_news = target.verdict != verdict;
        if is_news {
            tell_verdict(&target.url, &verdict);
        }
        target.verdict = verdict;
        match target.verdict {
            Identification::RoleChanged(to) => {
                (target.is_identified, target.fault) = (false, Some("its role has changed".into()));
                debug_assert_ne!(to, role, "a worker that has turned has another role");
                self.turned.push_back(RoleReport { worker, role: to, is_news });
                let change = self.balancer.refused(worker);
                self.log_health_change(worker, change, &"its role");
                self.probed(worker, false, now);
            }
            Identification::Unfit(ref why) => {
                // The log already says that it cannot be used, and why.
                (target.is_identified, target.fault) = (false, Some(why.clone()));
                target.mark_fault_logged();
                // The worker is unfit, even if it is healthy.
                self.balancer.refused(worker);
                self.probed(worker, false, now);
            }
            _ => self.call(reactor, worker, Owner::Probe, now),
        }
    }

    /// Determines the workers with which this worker can be paired. Logs a pair that is not
    /// possible, once.
    fn note_compatibility(&mut self, worker: WorkerNumber, words: &WorkerInfo, is_settled: bool) {
        let misfit = self.balancer.set_compatibility(worker, words.kind.clone());
        let misfit = misfit.filter(|_| !words.is_mixed() && is_settled);
        let misfit = misfit.map(|(other, why)| (other, why.to_string()));
        let Some(target) = self.targets.get_mut(&worker) else { return };
        if target.misfit == misfit {
            return;
        }
        target.misfit.clone_from(&misfit);
        let Some((other, why)) = misfit else { return };
        let (one, other) = (self.url(worker), self.url(other));
        event!(Warn, "router", "two workers do not fit", one = one, other = other, why = why);
    }

    pub(super) fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) {
        let change = self.balancer.probed(worker, is_well, now);
        self.log_health_change(worker, change, &"probe");
        let is_usable = self.balancer.load(worker).is_some_and(|load| load.usable);
        let Some(target) = self.targets.get_mut(&worker).filter(|_| self.balancer.has(worker))
        else {
            return;
        };
        if is_well {
            target.mark_up();
        }
        // The next answer can come from another process, unless the worker is only slow.
        target.is_identified &= is_well || is_usable;
        if !is_well && !is_usable {
            self.tell_why_not(worker);
        }
    }

    /// Logs why a worker is not used: once, and again if the reason changes.
    pub(super) fn tell_why_not(&mut self, worker: WorkerNumber) {
        let Some(target) = self.targets.get_mut(&worker).filter(|_| self.balancer.has(worker))
        else {
            return;
        };
        if target.told_down && !target.confirm_new_fault() {
            return;
        }
        let address = target.address.map_or("unknown".into(), |address| address.to_string());
        let why = target.fault.as_deref().unwrap_or("the reason is unknown");
        event!(
            Warn,
            "router",
            "worker is not up",
            worker = target.url,
            address = address,
            why = why
        );
        target.mark_fault_logged();
    }

    /// Logs that a worker is up or down. The reason is its fault, or `by` if it has none.
    pub(super) fn log_health_change(
        &mut self,
        worker: WorkerNumber,
        change: Option<HealthChange>,
        by: &dyn std::fmt::Display,
    ) {
        let (role, has_left) = (self.role_name(worker), !self.balancer.has(worker));
        let (Some(role), Some(target)) = (role, self.targets.get_mut(&worker)) else { return };
        let url = &target.url;
        match change {
            // A leaving worker is probed while clients wait for it.
            Some(HealthChange::Up) if has_left => {}
            Some(HealthChange::Up) => {
                event!(Info, "router", "worker is up", role = role, worker = url)
            }
            Some(HealthChange::Down) => {
                let why: &dyn std::fmt::Display = match &target.fault {
                    Some(fault) => fault,
                    None => by,
                };
                event!(Warn, "router", "worker is down", role = role, worker = url, why = why);
                target.mark_fault_logged();
            }
            None => {}
        }
    }
}

/// The verdict on a worker that did not identify itself, and whether that answer is final.
fn doubt(answer: Result<UpstreamReply, String>) -> (Identification, bool) {
    match answer {
        Ok(answer) => {
            let why = format!("{} {}", identity::PATH, answer.complaint());
            // The worker does not know the path, or requires a key that only clients have.
            let asked = matches!(answer.status, 401 | 403 | 404 | 405);
            (Identification::Doubtful(why), asked)
        }
        Err(why) => {
            let why = format!("{} is not answered: {why}", identity::PATH);
            (Identification::Doubtful(why), false)
        }
    }
}

fn tell_verdict(url: &WorkerUrl, verdict: &Identification) {
    match verdict {
        Identification::Unfit(why) => {
            event!(Error, "router", "worker cannot be used", worker = url, why = why);
        }
        Identification::Doubtful(why) => {
            event!(Warn, "router", "worker may be misconfigured", worker = url, why = why);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Policy;
    use crate::ids::Leg;
    use crate::net::resolver::Resolver;
    use crate::routing::attempts::AvoidList;
    use crate::routing::balancer::LoadBalancer;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    /// Answers each request on its own connection, and reports its path.
    fn serve(worker: &TcpListener, asked: &mpsc::Sender<String>) {
        for stream in worker.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(stream.read_line(&mut head).unwrap() > 0, "it asks");
            }
            let _ = stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
            if asked.send(head.split(' ').nth(1).unwrap().to_owned()).is_err() {
                return;
            }
        }
    }

    /// The role of a worker that has left does not matter. Its health matters while a client waits
    /// for it.
    #[test]
    fn a_leaving_worker_is_probed_while_a_request_waits_for_it() {
        for leaves_while_it_is_asked in [false, true] {
            let worker = TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", worker.local_addr().unwrap()).parse().unwrap();
            let (asked, paths) = mpsc::channel();
            thread::spawn(move || serve(&worker, &asked));
            let begun = Instant::now();
            let mut reactor = Reactor::new().unwrap();
            let waker = reactor.waker();
            let names = Resolver::over(|_| Ok(Vec::new()), move || waker.wake());
            let mut pool = WorkerPool::new(LoadBalancer::new(Policy::RoundRobin), names.unwrap());
            let leaves = pool.join(Leg::Decode, WorkerTarget::new(url, None, None), begun);
            pool.balancer().probed(leaves, true, begun);
            let waits =
                pool.balancer().choose_one(Leg::Decode, 1, &AvoidList::default(), begun).unwrap();
            if leaves_while_it_is_asked {
                pool.probe(&mut reactor, begun + Duration::from_secs(10));
            }
            pool.part_with(&mut reactor, leaves, &"it drains");
            let mut seen = Vec::new();
            while seen.len() < 3 {
                let now = Instant::now();
                assert!(begun.elapsed() < Duration::from_secs(60), "it is asked no more: {seen:?}");
                pool.probe(&mut reactor, now);
                reactor.poll(Some(now + Duration::from_millis(50))).unwrap();
                while let Some(event) = reactor.next_event() {
                    pool.handle(&mut reactor, event, now);
                }
                seen.extend(paths.try_iter());
            }
            let first = if leaves_while_it_is_asked { identity::PATH } else { "/health" };
            assert_eq!(seen, [first, "/health", "/health"]);
            pool.release(waits, begun);
        }
    }
}
