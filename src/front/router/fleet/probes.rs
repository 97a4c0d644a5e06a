//! How workers are: asked who they are first, and from then on whether they are well.

use super::{Fleet, Turned};
use crate::cluster::health::Change;
use crate::cluster::loads::WorkerNumber;
use crate::front::router::call::{Order, Owner, WorkerAnswer};
use crate::front::router::introduction::{self, Verdict, Words};
use crate::front::router::report;
use crate::front::router::target::Target;
use crate::net::Reactor;
use crate::obs::log::event;
use std::sync::Arc;
use std::time::Instant;

/// What is wrong with a worker that is something else by now, and says to nobody without its key what.
const WITHHELD: &str =
    "it has another role, and does not tell this router which: it asks for a key (--api-key-file)";

impl Fleet {
    /// Begins the probes that are due.
    pub fn probe(&mut self, reactor: &mut Reactor, now: Instant) {
        while let Some(worker) = self.router.begin_probe(now) {
            self.ask(reactor, worker, now);
        }
        while let Some(worker) = self.router.give_up(now) {
            let url = self.url(worker);
            event!(
                Error,
                "router",
                "worker was not up in time, and is no longer looked for",
                worker = url
            );
        }
    }

    /// Asks a worker who it is, or once that is known how it is.
    fn ask(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let Some(target) = self.targets.get(&worker) else { return };
        if target.address.is_none() {
            self.look_up_again(worker, now);
        }
        // Who leaves is asked only whether what it runs goes on.
        let is_known = |target: &Target| target.introduced || !self.router.has(worker);
        match self.targets.get(&worker).is_some_and(is_known) {
            false => self.call(reactor, worker, Owner::Introduction, now),
            true => self.call(reactor, worker, Owner::Probe, now),
        }
    }

    fn call(&mut self, reactor: &mut Reactor, worker: WorkerNumber, owner: Owner, now: Instant) {
        let booking = self.router.visit(worker);
        match self.open(reactor, owner, booking, now + self.health.1, now) {
            Ok((conn, _)) => {
                let path = match owner {
                    Owner::Introduction => introduction::PATH,
                    Owner::Report => report::PATH,
                    _ => &self.health.0,
                };
                let mut order = Order::get(path);
                if owner == Owner::Introduction {
                    order
                        .headers
                        .push((introduction::ASKED_BY_ROUTER, String::from("introduction")));
                }
                // Nobody asks for a key at /health.
                order.headers.extend(self.bearer().filter(|_| path != "/health"));
                self.begin(reactor, conn, &order, &Arc::default(), now);
            }
            Err(_) if owner == Owner::Report => self.router.reported(worker, None, now),
            Err(reason) => {
                self.ails(worker, format!("there is no connection to it: {reason}"));
                self.probed(worker, false, now);
            }
        }
    }

    /// Asks a worker that is well what it has to do, where the choice of workers depends on it and it has ever said so.
    pub(super) fn ask_report(&mut self, reactor: &mut Reactor, worker: WorkerNumber, now: Instant) {
        let reports = self.targets.get(&worker).is_some_and(|target| target.reports);
        if reports && self.router.compares_loads() && self.router.has(worker) {
            self.router.ask_report(worker);
            self.call(reactor, worker, Owner::Report, now);
        }
    }

    /// A worker has answered what it has to do. One that does not know the path is asked no more before it introduces
    /// itself again.
    pub(super) fn reported(&mut self, worker: WorkerNumber, answer: &WorkerAnswer, now: Instant) {
        let report = if answer.is_success() { report::of(&answer.body) } else { None };
        if let Some(target) = self.targets.get_mut(&worker) {
            target.reports &= !matches!(answer.status, 401 | 403 | 404 | 405);
            target.used = report.map(|report| report.used);
        }
        self.router.reported(worker, report, now);
    }

    /// What is wrong with a worker, for operators.
    pub(super) fn ails(&mut self, worker: WorkerNumber, why: String) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.fault = Some(why);
        }
    }

    /// A probe was answered as by one that drains: it takes nothing new, or (`of_role`) is none that this router takes it for.
    /// Which it is it has been asked before; where it does not tell, nothing but its operator gets it on.
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
                    target.tell_fault();
                }
            }
        }
        self.router.declined(worker, now);
    }

    /// One that drained is there no longer.
    pub(super) fn is_gone(&mut self, worker: WorkerNumber) {
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

    /// An introduction has ended: with this answer, or for this reason with none.
    pub(super) fn introduced(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        answer: Result<WorkerAnswer, String>,
        now: Instant,
    ) {
        let told = answer.as_ref().ok().filter(|answer| answer.is_success());
        let words = told.map(|answer| Words::of(&answer.body));
        if let Some(words) = &words {
            self.router.set_reads_alone(worker, words.reads_alone);
        }
        // Who does not tell now is what it told before.
        let misfit =
            words.as_ref().and_then(|words| self.router.introduced(worker, words.kind.clone()));
        let is_mixed = words.as_ref().is_some_and(Words::is_mixed);
        // Who has not read its new keys yet says something else soon.
        let is_settled = self.keys_change.is_none_or(|until| until <= now);
        if let Some((other, why)) = misfit.filter(|_| !is_mixed && is_settled) {
            let (worker, other) = (self.url(worker), self.url(other));
            event!(
                Warn,
                "router",
                "two workers are never paired",
                one = worker,
                other = other,
                why = why
            );
        }
        // It may have left while it was asked; what it runs goes on as long as it does.
        if !self.router.has(worker) && self.targets.contains_key(&worker) {
            return self.call(reactor, worker, Owner::Probe, now);
        }
        let here = self.targets.get_mut(&worker).filter(|_| self.router.has(worker));
        let (Some(role), Some(target)) = (self.router.role(worker), here) else { return };
        target.withholds = matches!(answer, Ok(WorkerAnswer { status: 401 | 403, .. }));
        let judged = words.map(|words| {
            target.hear(&words, role);
            introduction::judge(role, target.bootstrap_port, target.has_turned, &words)
        });
        let (verdict, asked) = match (judged, answer) {
            (Some(verdict), _) => (verdict, true),
            (None, Ok(answer)) => {
                let why = format!("{} {}", introduction::PATH, answer.complaint());
                // It does not know the path, or wants a key that only clients have.
                let asked = matches!(answer.status, 401 | 403 | 404 | 405);
                (Verdict::Doubtful(why), asked)
            }
            (None, Err(why)) => {
                (Verdict::Doubtful(format!("{} is not answered: {why}", introduction::PATH)), false)
            }
        };
        (target.introduced, target.reports) = (asked && is_settled, true);
        if !asked && target.told_down {
            // That it is down was said with the reason.
            return self.call(reactor, worker, Owner::Probe, now);
        }
        let is_news = target.verdict != verdict;
        match &verdict {
            Verdict::Unfit(why) if is_news => {
                event!(Error, "router", "worker cannot be used", worker = target.url, why = why);
            }
            Verdict::Doubtful(why) if is_news => {
                event!(Warn, "router", "worker may not fit", worker = target.url, why = why);
            }
            _ => {}
        }
        target.verdict = verdict;
        match target.verdict {
            Verdict::Turned(to) => {
                (target.introduced, target.fault) =
                    (false, Some(format!("it is a {to} worker now")));
                self.turned.push_back(Turned { worker, role: to, is_news });
                let change = self.router.refused(worker);
                self.tell(worker, change, &"its role");
                self.probed(worker, false, now);
            }
            Verdict::Unfit(ref why) => {
                // That it is not used any more was said with the reason.
                (target.introduced, target.fault) = (false, Some(why.clone()));
                target.tell_fault();
                // No matter how well it is.
                self.router.refused(worker);
                self.probed(worker, false, now);
            }
            _ => self.call(reactor, worker, Owner::Probe, now),
        }
    }

    pub(super) fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) {
        let change = self.router.probed(worker, is_well, now);
        self.tell(worker, change, &"probe");
        let is_usable = self.router.load(worker).is_some_and(|load| load.usable);
        let Some(target) = self.targets.get_mut(&worker).filter(|_| self.router.has(worker)) else {
            return;
        };
        if is_well {
            target.is_well();
        }
        // Who answers there next may be somebody else, unless it is only late.
        target.introduced &= is_well || is_usable;
        if !is_well && !is_usable {
            self.tell_why_not(worker);
        }
    }

    /// Tells why a worker is not used: once, and again where the reason is another one by now.
    pub(super) fn tell_why_not(&mut self, worker: WorkerNumber) {
        let Some(target) = self.targets.get_mut(&worker).filter(|_| self.router.has(worker)) else {
            return;
        };
        if target.told_down && !target.has_another_fault() {
            return;
        }
        let address = target.address.map_or("unknown".into(), |address| address.to_string());
        let why = target.fault.as_deref().unwrap_or("it is not known why");
        event!(
            Warn,
            "router",
            "worker is not up",
            worker = target.url,
            address = address,
            why = why
        );
        target.tell_fault();
    }

    /// Tells that a worker is up or down by now, and why, by this unless more is known.
    pub(super) fn tell(
        &mut self,
        worker: WorkerNumber,
        change: Option<Change>,
        by: &dyn std::fmt::Display,
    ) {
        let (role, has_left) = (self.role_name(worker), !self.router.has(worker));
        let (Some(role), Some(target)) = (role, self.targets.get_mut(&worker)) else { return };
        let url = &target.url;
        match change {
            // One that leaves is looked at as long as clients wait for it.
            Some(Change::Up) if has_left => {}
            Some(Change::Up) => event!(Info, "router", "worker is up", role = role, worker = url),
            Some(Change::Down) => {
                let why: &dyn std::fmt::Display = match &target.fault {
                    Some(fault) => fault,
                    None => by,
                };
                event!(Warn, "router", "worker is down", role = role, worker = url, why = why);
                target.tell_fault();
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::flight::Avoid;
    use crate::cluster::router::{Role, Router};
    use crate::config::resolved::Policy;
    use crate::front::resolver::Resolver;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    /// Answers each request on a connection of its own, and tells its path.
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

    /// Whom it is taken for when it has left is nobody's concern; whether it stands still is that of who waits for it.
    #[test]
    fn who_leaves_is_asked_how_it_is_as_long_as_somebody_waits_for_it() {
        for leaves_while_it_is_asked in [false, true] {
            let worker = TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", worker.local_addr().unwrap()).parse().unwrap();
            let (asked, paths) = mpsc::channel();
            thread::spawn(move || serve(&worker, &asked));
            let begun = Instant::now();
            let mut reactor = Reactor::new().unwrap();
            let waker = reactor.waker();
            let names = Resolver::over(|_| Ok(Vec::new()), move || waker.wake());
            let mut fleet = Fleet::new(Router::new(Policy::RoundRobin), names.unwrap());
            let leaves = fleet.join(Role::Decode, Target::new(url, None, None), begun);
            fleet.router().probed(leaves, true, begun);
            let waits =
                fleet.router().choose_one(Role::Decode, 1, &Avoid::default(), begun).unwrap();
            if leaves_while_it_is_asked {
                fleet.probe(&mut reactor, begun + Duration::from_secs(10));
            }
            fleet.part_with(&mut reactor, leaves, &"it drains");
            let mut seen = Vec::new();
            while seen.len() < 3 {
                let now = Instant::now();
                assert!(begun.elapsed() < Duration::from_secs(60), "it is asked no more: {seen:?}");
                fleet.probe(&mut reactor, now);
                reactor.poll(Some(now + Duration::from_millis(50))).unwrap();
                while let Some(event) = reactor.next_event() {
                    fleet.handle(&mut reactor, event, now);
                }
                seen.extend(paths.try_iter());
            }
            let first = if leaves_while_it_is_asked { introduction::PATH } else { "/health" };
            assert_eq!(seen, [first, "/health", "/health"]);
            fleet.release(waits, begun);
        }
    }
}
