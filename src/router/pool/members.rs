//! Workers that join and leave, and the addresses of their names.

use super::WorkerPool;
use crate::ids::Leg;
use crate::limits::KEYS_CHANGE_TIME;
use crate::net::Reactor;
use crate::obs::log::event;
use crate::router::target::WorkerTarget;
use crate::routing::load::WorkerNumber;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

impl WorkerPool {
    /// Adds a worker. It is probed at once, and used when it is up. `Membership` checks the limit.
    pub fn join(&mut self, role: Leg, target: WorkerTarget, now: Instant) -> WorkerNumber {
        let worker = self.balancer.join(role, now);
        let before = self.targets.insert(worker, target);
        debug_assert!(before.is_none(), "a worker that joins has a new number");
        worker
    }

    /// Sets the address of a worker's name.
    pub fn locate(&mut self, worker: WorkerNumber, address: SocketAddr) {
        if let Some(target) = self.targets.get_mut(&worker) {
            target.address = Some(address);
        }
    }

    /// Lets a worker leave. It gets no new calls, and its open calls continue.
    pub fn part_with(
        &mut self,
        reactor: &mut Reactor,
        worker: WorkerNumber,
        why: &dyn fmt::Display,
    ) {
        if !self.balancer.has(worker) {
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
        self.balancer.leave(worker);
        if !self.balancer.knows(worker) {
            self.targets.remove(&worker);
        }
    }

    /// Identifies all workers again after a change of cluster keys, with a probe now. This repeats
    /// until each worker has had time to read its own keys.
    pub fn ask_anew(&mut self, now: Instant) {
        self.keys_change = Some(now + KEYS_CHANGE_TIME);
        for (&worker, target) in &mut self.targets {
            target.is_identified = false;
            self.balancer.hasten_probe(worker, now);
        }
    }

    /// Applies finished lookups of names.
    pub fn resolve(&mut self, now: Instant) {
        while let Some((name, found)) = self.names.expire(now).or_else(|| self.names.poll(now)) {
            // Several workers can have one name and different ports. Each of them is lost and found
            // separately.
            let is_meant = |target: &WorkerTarget| target.lost && target.url.host == name;
            for (&worker, target) in self.targets.iter_mut().filter(|(_, target)| is_meant(target))
            {
                target.lost = false;
                // If the name was not found, the next failed connection starts another lookup.
                if let Ok(addresses) = &found {
                    let was_known = target.address.is_some();
                    target.turn_to(addresses);
                    if !was_known {
                        self.balancer.hasten_probe(worker, now);
                    }
                }
            }
        }
    }

    /// Looks up the name of a worker that refuses connections, because the name can have another
    /// address now.
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
    use crate::config::Policy;
    use crate::config::values::WorkerUrl;
    use crate::net::resolver::Resolver;
    use crate::routing::balancer::LoadBalancer;
    use std::net::TcpListener;
    use std::time::Duration;

    /// One of two workers with the same name has moved, so nothing listens at its first address.
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
        let mut pool = WorkerPool::new(LoadBalancer::new(Policy::RoundRobin), names.unwrap());
        let moved = pool.join(Leg::Decode, WorkerTarget::new(url, Some(gone), None), begun);
        let stays = pool.join(Leg::Decode, WorkerTarget::new(other_url, Some(there), None), begun);
        while worker.accept().is_err() {
            let now = Instant::now();
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never found");
            pool.probe(&mut reactor, now);
            reactor.poll(Some(now + Duration::from_millis(50))).unwrap();
            while let Some(event) = reactor.next_event() {
                pool.handle(&mut reactor, event, now);
            }
            pool.resolve(now);
        }
        assert_eq!(pool.target(moved).unwrap().address, Some(here));
        assert_eq!(pool.target(stays).unwrap().address, Some(there), "it was well where it is");
    }
}
