//! Tests of the pool's invariants.

use super::*;
use crate::config::Policy;
use crate::ids::Leg;
use crate::stdx::failpoint::panic_of;

/// A pool with one idle connection that was kept for too long.
fn pool_with_an_old_connection(reactor: &Reactor, now: Instant) -> WorkerPool {
    let waker = reactor.waker();
    let names = Resolver::over(|_| Ok(Vec::new()), move || waker.wake()).unwrap();
    let mut pool = WorkerPool::new(LoadBalancer::new(Policy::RoundRobin), names);
    let url = "http://127.0.0.1:9".parse().unwrap();
    let worker = pool.join(Leg::Decode, WorkerTarget::new(url, None, None), now);
    let conn = ConnId::outside(1);
    pool.targets.get_mut(&worker).unwrap().idle.push(Idle { conn, since: now });
    pool.kept.insert(conn, worker);
    pool.invariants();
    pool
}

#[test]
fn invariants_find_a_connection_that_is_closed_and_stays_listed() {
    let begun = Instant::now();
    let late = begun + ROUTER_IDLE_TIME;
    let mut reactor = Reactor::new().unwrap();
    let mut pool = pool_with_an_old_connection(&reactor, begun);
    pool.expire(&mut reactor, late);
    assert!(pool.kept.is_empty(), "it is closed");

    let mut pool = pool_with_an_old_connection(&reactor, begun);
    let message = panic_of("idle connection stays listed", || pool.expire(&mut reactor, late));
    assert!(message.contains("each idle connection is listed once"), "{message}");
}
