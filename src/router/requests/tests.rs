//! Tests of the invariants of the requests and of the queue.

use super::*;
use crate::config::{Policy, RetryConfig};
use crate::ids::Leg;
use crate::net::resolver::Resolver;
use crate::obs::registry::Registry;
use crate::router::pool::PoolEvent;
use crate::router::target::WorkerTarget;
use crate::routing::balancer::LoadBalancer;
use crate::stdx::failpoint::panic_of;
use crate::upstream::request::UpstreamHead;
use std::net::TcpListener;
use std::time::Duration;

const CLIENT: ConnId = ConnId::outside(7);

/// A router with one decode worker that is up.
struct Router {
    reactor: Reactor,
    connections: Connections,
    pool: WorkerPool,
    requests: ProxiedRequests,
    now: Instant,
    worker: TcpListener,
}

impl Router {
    fn new(terms: &RequestConfig) -> Router {
        let now = Instant::now();
        let worker = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", worker.local_addr().unwrap()).parse().unwrap();
        let reactor = Reactor::new().unwrap();
        let waker = reactor.waker();
        let names = Resolver::over(|_| Ok(Vec::new()), move || waker.wake()).unwrap();
        let mut pool = WorkerPool::new(LoadBalancer::new(Policy::RoundRobin), names);
        let number = pool.join(Leg::Decode, WorkerTarget::new(url, None, None), now);
        pool.balancer().probed(number, true, now);
        let metrics = RouterMetrics::register(&mut Registry::default());
        let retries = RetryBudget::new(RetryConfig::of(3), now);
        Router {
            reactor,
            connections: Connections::default(),
            pool,
            requests: ProxiedRequests::new(retries, metrics).within(terms),
            now,
            worker,
        }
    }

    fn split(&mut self) -> (&mut ProxiedRequests, RouterContext<'_>) {
        let Router { reactor, connections, pool, requests, now, .. } = self;
        (requests, RouterContext { reactor, connections, pool, now: *now })
    }

    /// A request that the decode worker serves alone.
    fn start(&mut self) {
        let head = UpstreamHead::get("/tokenize");
        let request = ClientRequest { head, payload: Payload::Decode(Vec::new()), id: "a".into() };
        let (requests, mut cx) = self.split();
        requests.start_request(CLIENT, request, &mut cx);
    }

    fn end(&mut self) {
        let (requests, mut cx) = self.split();
        requests.handle_disconnect(CLIENT, &mut cx);
    }

    /// The worker closes each connection until the request waits for a retry.
    fn break_off(&mut self) {
        self.worker.set_nonblocking(true).unwrap();
        let late = self.now + Duration::from_secs(60);
        while self.requests.open[&CLIENT].due.is_none() {
            drop(self.worker.accept());
            self.now = Instant::now();
            assert!(self.now < late, "the request does not end its attempt");
            self.reactor.poll(Some(self.now + Duration::from_millis(10))).unwrap();
            while let Some(event) = self.reactor.next_event() {
                self.pool.handle(&mut self.reactor, event, self.now);
                while let Some(PoolEvent { conn, event, .. }) = self.pool.poll() {
                    let (requests, mut cx) = self.split();
                    requests.handle_lead_event(CLIENT, conn, event, &mut cx);
                }
            }
        }
    }

    fn check(&self) {
        self.requests.invariants(&self.pool);
        self.pool.invariants();
    }
}

#[test]
fn invariants_find_a_call_that_outlives_its_request() {
    let mut router = Router::new(&RequestConfig::default());
    router.start();
    router.check();
    assert_eq!((router.requests.served(), router.pool.legs()), (1, 1));
    router.end();
    router.check();
    assert_eq!((router.requests.served(), router.pool.legs()), (0, 0));

    router.start();
    let message = panic_of("call outlives its request", || {
        router.end();
        router.check();
    });
    assert!(message.contains("each call of a leg has its request"), "{message}");
}

#[test]
fn invariants_find_a_retry_that_is_not_listed() {
    let lose_the_worker = || {
        let mut router = Router::new(&RequestConfig::default());
        router.start();
        router.break_off();
        router.check();
    };
    lose_the_worker();
    let message = panic_of("retry is not listed", lose_the_worker);
    assert!(message.contains("a request that waits for a retry is listed"), "{message}");
}
