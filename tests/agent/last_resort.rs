//! What no agent can stop: a queue pair that its NIC keeps, or a thread that does not come back.
//! The process lives on. The agent ends, and the leases of its open requests do not.

use super::{PATIENCE, PAYLOAD, Side, ids};
use baton::agent::AgentConfig;
use baton::agent::client::AgentError;
use baton::agent::requests::AgentEventKind;
use baton::ids::{PageId, Role, Room};
use baton::kv::region::Region;
use baton::sys::verbs::CompletionError;
use baton::sys::verbs::provider::{DeviceFault, Fabric};
use baton::transfer::manager::rooms::Slot;
use baton::transfer::status::State;
use baton::transfer::transport::rdma::Nic;
use baton::wire::message::Transport;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Places of devices on the fabric.
const FROM: u32 = 1;
const TO: u32 = 2;
const ROOM: Room = Room(5);
const TOKENS: u32 = 30;

/// Two agents on a fabric that waits for steps, and a request of both.
struct Pair {
    fabric: Fabric,
    source: Side,
    destination: Side,
    from: Slot,
    to: Slot,
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "never: {what}");
        sleep(Duration::from_millis(1));
    }
}

fn side(fabric: &Fabric, role: Role, nics: u16, has_data_threads: bool) -> Side {
    let place = if role == Role::Prefill { FROM } else { TO };
    let nic = |number| {
        let (device, route) = (fabric.device_in(place), fabric.route());
        Nic { device, route, number, node: None, chosen: String::new() }
    };
    let nics = (0..nics).map(nic).collect();
    let change = |config| AgentConfig { nics, has_data_threads, ..config };
    Side::with(role, Transport::Rdma, change)
}

fn pages(side: &Side) -> Vec<PageId> {
    side.pages(1, TOKENS)
}

impl Pair {
    /// Both ends have leased pages. The destination has this many NICs, the source has one.
    fn new(fabric: Fabric, nics: u16, has_data_threads: bool) -> Pair {
        let source = side(&fabric, Role::Prefill, 1, has_data_threads);
        let destination = side(&fabric, Role::Decode, nics, false);
        let from = source.client().offer(ROOM, &ids(TOKENS), PATIENCE).unwrap();
        source.client().lease(from, 0, &pages(&source)).unwrap();
        source.compute(ROOM, 0..TOKENS, &pages(&source));
        let address = source.agent.address().unwrap();
        let to = destination.client().wish(ROOM, address, &ids(TOKENS), PATIENCE).unwrap();
        destination.client().lease(to, 0, &pages(&destination)).unwrap();
        Pair { fabric, source, destination, from, to }
    }

    /// The KV is computed, so the source posts it.
    fn compute(&self) {
        self.source.client().compute(self.from, TOKENS).unwrap();
        self.source.client().send_last(self.from, &PAYLOAD).unwrap();
    }

    /// Waits until the source has posted KV. Returns the queue pairs.
    fn post(&self) -> Vec<u32> {
        self.compute();
        until("a post", || !self.fabric.leaving(FROM).is_empty());
        self.fabric.leaving(FROM)
    }

    /// Breaks the session in place of moving what these queue pairs have.
    fn break_session(&self, posted: Vec<u32>) {
        for pair in posted {
            self.fabric.fail_next(pair, CompletionError::RemoteAccess);
        }
        self.fabric.step();
    }
}

/// Checks an agent that ends while a request has leased pages, and frees it. Then the program lets
/// the memory go, and the result tells whether it is still mapped.
fn check_end(side: Side, slot: Slot) -> Weak<Region> {
    let client = side.agent.client().clone();
    until("the end of the agent", || client.is_dead());
    let told: Vec<_> = std::iter::from_fn(|| client.poll()).map(|event| event.kind).collect();
    assert!(!told.contains(&AgentEventKind::Ended), "{told:?}");
    assert!(client.event_fd().wait_readable(Duration::ZERO).unwrap());
    let is_source = side.agent.address().is_some();
    let next = match is_source {
        true => client.offer(Room(6), &ids(4), PATIENCE),
        false => client.wish(Room(6), ([127, 0, 0, 1], 1).into(), &ids(4), PATIENCE),
    };
    assert_eq!(next, Err(AgentError::Dead));
    let cancelled = client.cancel(slot);
    assert!(matches!(cancelled, Err(AgentError::Dead | AgentError::Repeated)), "{cancelled:?}");
    let words = side.words(ROOM, 0..TOKENS, &pages(&side));
    let is_whole = |region: &Region| {
        let expected = |value| if is_source { value } else { 0 };
        words.iter().all(|&(at, value)| region.word(at).load(Ordering::Relaxed) == expected(value))
    };
    let Side { agent, region, .. } = side;
    drop(agent);
    assert!(is_whole(&region));
    assert!(client.poll().is_none());
    assert_eq!(client.release(slot), Err(AgentError::Open), "its end is not known");
    let memory = Arc::downgrade(&region);
    drop(region);
    assert!(memory.upgrade().is_none_or(|region| is_whole(&region)));
    memory
}

fn with_queue_pairs_that_stay(place: u32) -> Fabric {
    let fabric = Fabric::new();
    fabric.break_devices(place, DeviceFault::KeepsPairs);
    fabric
}

/// Its request has failed before, and the lease waits for the posts.
#[test]
fn a_source_ends_if_a_queue_pair_can_neither_be_destroyed_nor_reset() {
    let pair = Pair::new(with_queue_pairs_that_stay(FROM), 1, false);
    let posted = pair.post();
    pair.source.client().cancel(pair.from).unwrap();
    let status = || pair.source.client().status(pair.from).unwrap();
    until("the failure", || status().state == State::Failed);
    pair.break_session(posted);
    let Pair { source, mut destination, from, to, .. } = pair;
    assert!(check_end(source, from).upgrade().is_some());
    let told = destination.end(to);
    assert!(matches!(told[1..], [AgentEventKind::Failed(_), AgentEventKind::Ended]), "{told:?}");
}

#[test]
fn a_destination_ends_if_a_queue_pair_can_neither_be_destroyed_nor_reset() {
    let pair = Pair::new(with_queue_pairs_that_stay(TO), 1, false);
    pair.break_session(pair.post());
    let Pair { mut source, destination, from, to, .. } = pair;
    assert!(check_end(destination, to).upgrade().is_some());
    let told = source.end(from);
    assert!(matches!(told[1..], [AgentEventKind::Failed(_), AgentEventKind::Ended]), "{told:?}");
}

/// The source has a partner for one of two NICs. `ctl` ends the queue pairs of the other one.
#[test]
fn a_destination_ends_if_queue_pairs_without_partners_stay() {
    let pair = Pair::new(with_queue_pairs_that_stay(TO), 2, false);
    assert!(check_end(pair.destination, pair.to).upgrade().is_some());
}

/// Posting threads come back when it is dropped, also after a failed check.
struct Stall<'a>(&'a Fabric);

impl Drop for Stall<'_> {
    fn drop(&mut self) {
        self.0.stall(false);
    }
}

#[test]
fn a_source_ends_if_its_poster_does_not_come_back() {
    let pair = Pair::new(Fabric::new(), 1, true);
    pair.fabric.stall(true);
    pair.compute();
    let Pair { fabric, source, destination, from, .. } = pair;
    let stall = Stall(&fabric);
    until("a stall", || fabric.has_stalled());
    drop(destination);
    until("the end of the agent", || source.client().is_dead());
    let memory = check_end(source, from);
    drop(stall);
    assert!(memory.upgrade().is_some());
}

/// Its queue pairs are destroyed, so the memory need not stay.
#[test]
fn a_source_ends_if_its_poller_has_panicked() {
    let pair = Pair::new(Fabric::new(), 1, true);
    pair.post();
    pair.fabric.break_devices(FROM, DeviceFault::Overreports);
    pair.fabric.step();
    check_end(pair.source, pair.from);
}
