//! Who comes and goes, and where names point.

use super::Fleet;
use crate::cluster::loads::WorkerNumber;
use crate::cluster::router::Role;
use crate::front::router::target::Target;
use crate::limits::KEYS_CHANGE_TIME;
use crate::net::Reactor;
use crate::obs::log::event;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

impl Fleet {
    /// A worker joins: it is probed at once, and used when it is well. How many there may be is the membership's
    /// to say.
    pub fn join(&mut self, role: Role, target: Target, now: Instant) -> WorkerNumber {
        let worker = self.router.join(role, now);
        self.targets.insert(worker, target);
        worker
    }

    /// It is known where a worker's name points.
    pub fn locate(&mut self, worker: WorkerNumber, address: SocketAddr) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.address = Some(address);
        }
    }

    /// A worker leaves: it gets nothing new, and what runs on it runs on.
    pub fn part_with(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        why: &dyn fmt::Display,
    ) {
        if !self.router.has(worker) {
            return;
        }
        if let (Some(role), Some(target)) = (self.role_name(worker), self.targets.get_mut(&worker))
        {
            event!(Info, "router", "worker leaves", role = role, worker = target.url, why = why);
            for idle in target.idle.drain(..) {
                self.kept.remove(&idle.conn);
                reactor.close(idle.conn);
            }
        }
        self.router.leave(worker);
        if !self.router.knows(worker) {
            self.targets.remove(&worker);
        }
    }

    /// Cluster keys have changed here: all are asked who they are with the next looks at them, the first of which is due,
    /// until each will have read its own.
    pub fn ask_anew(&mut self, now: Instant) {
        self.keys_change = Some(now + KEYS_CHANGE_TIME);
        for (&worker, target) in &mut self.targets {
            target.introduced = false;
            self.router.hasten_probe(worker, now);
        }
    }

    /// Takes in where names point now.
    pub fn resolve(&mut self, now: Instant) {
        while let Some((name, found)) = self.names.expire(now).or_else(|| self.names.poll(now)) {
            // Workers of one name, on several ports, are lost and found one by one.
            let is_meant = |target: &Target| target.lost && target.url.host == name;
            for (&worker, target) in self.targets.iter_mut().filter(|(_, target)| is_meant(target))
            {
                target.lost = false;
                // What was not found is asked for again when it leads nowhere again.
                if let Ok(addresses) = &found {
                    let was_known = target.address.is_some();
                    target.turn_to(addresses);
                    if !was_known {
                        self.router.hasten_probe(worker, now);
                    }
                }
            }
        }
    }

    /// A worker takes no connection: its name may point elsewhere by now.
    pub(super) fn look_up_again(&mut self, worker: WorkerNumber, now: Instant) {
        let Some(target) = self.targets.get_mut(&worker) else { return };
        if target.url.host.parse::<IpAddr>().is_ok() {
            return;
        }
        match self.names.resolve(&target.url.host, now) {
            Some(Ok(addresses)) => target.turn_to(&addresses),
            Some(Err(_)) => {}
            None => target.lost = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::router::Router;
    use crate::config::resolved::Policy;
    use crate::config::values::WorkerUrl;
    use crate::front::resolver::Resolver;
    use std::net::TcpListener;
    use std::time::Duration;

    /// One of two workers of a name has moved: where it pointed at the start nobody listens any more.
    #[test]
    fn a_name_that_leads_nowhere_is_resolved_again() {
        let worker = TcpListener::bind("127.0.0.1:0").unwrap();
        worker.set_nonblocking(true).unwrap();
        let here = worker.local_addr().unwrap();
        let other = TcpListener::bind("127.0.0.9:0").unwrap();
        let there = other.local_addr().unwrap();
        let other_url: WorkerUrl = format!("http://worker.test:{}", there.port()).parse().unwrap();
        let url: WorkerUrl = format!("http://worker.test:{}", here.port()).parse().unwrap();
        let gone = SocketAddr::new("127.0.0.9".parse().unwrap(), here.port());
        let begun = Instant::now();
        let mut reactor = Reactor::new().unwrap();
        let waker = reactor.waker();
        let names = Resolver::over(
            move |name| {
                assert_eq!(name, "worker.test");
                Ok(vec![gone.ip(), here.ip()])
            },
            move || waker.wake(),
        );
        let mut fleet = Fleet::new(Router::new(Policy::RoundRobin), names.unwrap());
        let moved = fleet.join(Role::Decode, Target::new(url, Some(gone), None), begun);
        let stays = fleet.join(Role::Decode, Target::new(other_url, Some(there), None), begun);
        while worker.accept().is_err() {
            let now = Instant::now();
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never found");
            fleet.probe(&mut reactor, now);
            reactor.poll(Some(now + Duration::from_millis(50))).unwrap();
            while let Some(event) = reactor.next_event() {
                fleet.handle(&mut reactor, event, now);
            }
            fleet.resolve(now);
        }
        assert_eq!(fleet.target(moved).unwrap().address, Some(here));
        assert_eq!(fleet.target(stays).unwrap().address, Some(there), "it was well where it is");
    }
}
