//! The guarantees of the provider, tested through the interface that production code uses.

use super::{Fabric, Landed, QueuePairCounts, StepMode};
use crate::kv::region::Region;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::sys::verbs::{
    Access, Capacity, Chain, Completion, CompletionError, CompletionKind, CompletionQueue,
    Completions, Device, Domain, Endpoint, LocalPiece, Marks, PostError, QueuePair, Registration,
    RemoteAddress,
};
use std::sync::Arc;
use std::time::Duration;

const BYTES: usize = 16 << 10;
const SIGNALLED: Marks = Marks { signalled: true, inline: false, immediate: None };

/// An end with memory and one queue pair.
struct End {
    domain: Arc<Domain>,
    region: Arc<Region>,
    registration: Arc<Registration>,
    sent: CompletionQueue,
    received: CompletionQueue,
    pair: QueuePair,
}

impl End {
    fn new(fabric: &Fabric, takes_writes: bool) -> End {
        let device: Arc<Device> = fabric.device();
        let domain = Domain::new(&device).unwrap();
        let region = Arc::new(Region::new(c"verbs-test", BYTES).unwrap());
        let access = Access { remote_write: takes_writes, relaxed_ordering: false };
        let registration = Arc::new(Registration::new(&domain, &region, 0..BYTES, access).unwrap());
        let sent = CompletionQueue::new(&device, 64).unwrap();
        let received = CompletionQueue::with_events(&device, 64).unwrap();
        let pair = pair(&domain, &sent, &received, takes_writes);
        End { domain, region, registration, sent, received, pair }
    }

    fn chain(&self, requests: usize, pieces: usize) -> Chain {
        Chain::new(std::slice::from_ref(&self.registration), requests, pieces)
    }

    fn at(&self, offset: usize) -> RemoteAddress {
        RemoteAddress {
            address: self.registration.address() + offset as u64,
            key: self.registration.remote_key(),
        }
    }

    fn fill(&self, byte: u8) {
        (0..BYTES / 8)
            .for_each(|word| self.region.store(8 * word, &u64::from_ne_bytes([byte; 8]), 8));
    }

    /// Whether eight words from `offset` on consist of this byte.
    fn holds(&self, offset: usize, byte: u8) -> bool {
        let words = (0..8).map(|word| self.region.word(offset + 8 * word));
        words.into_iter().all(|word| {
            word.load(std::sync::atomic::Ordering::Relaxed) == u64::from_ne_bytes([byte; 8])
        })
    }

    fn ended(&mut self) -> Vec<Completion> {
        taken(&mut self.sent)
    }

    fn notices(&mut self) -> Vec<Completion> {
        taken(&mut self.received)
    }
}

fn pair(
    domain: &Arc<Domain>,
    sent: &CompletionQueue,
    received: &CompletionQueue,
    takes: bool,
) -> QueuePair {
    let wanted = Capacity { requests: 8, receives: 8, pieces: 8, inline: 128 };
    QueuePair::new(domain, sent, received, wanted, takes).unwrap()
}

fn taken(queue: &mut CompletionQueue) -> Vec<Completion> {
    let mut completions = Completions::new(16);
    queue.poll(&mut completions).unwrap();
    completions.iter().collect()
}

fn connect(fabric: &Fabric, a: &mut QueuePair, b: &mut QueuePair) {
    let mut sequence = a.number() * 1000;
    let mut opened = |pair: &mut QueuePair| -> Endpoint {
        pair.reset().unwrap();
        sequence += 1;
        pair.open(&fabric.route(), sequence).unwrap()
    };
    let (one, other) = (opened(a), opened(b));
    a.connect(&other).unwrap();
    b.connect(&one).unwrap();
}

fn connected() -> (Fabric, End, End) {
    let fabric = Fabric::new();
    let (mut source, mut destination) = (End::new(&fabric, false), End::new(&fabric, true));
    connect(&fabric, &mut source.pair, &mut destination.pair);
    source.fill(0x5a);
    (fabric, source, destination)
}

fn piece(offset: usize, len: u32) -> LocalPiece {
    LocalPiece { registration: 0, offset, len }
}

fn written(id: u64, pair: &QueuePair) -> Completion {
    Completion { id, queue_pair: pair.number(), outcome: Ok(CompletionKind::Written) }
}

fn faulty(id: u64, pair: &QueuePair, fault: CompletionError) -> Completion {
    Completion { id, queue_pair: pair.number(), outcome: Err(fault) }
}

/// One write of the first 64 bytes to `to`.
fn post(source: &mut End, id: u64, to: RemoteAddress, marks: Marks) {
    let mut chain = source.chain(1, 1);
    chain.write(id, &[piece(0, 64)], to, marks);
    source.pair.post(&mut chain).unwrap();
}

#[test]
fn a_chain_is_one_doorbell_and_its_last_completion_stands_for_all() {
    let (fabric, mut source, mut destination) = connected();
    destination.pair.post_receive(40).unwrap();
    let mut chain = source.chain(3, 8);
    let pieces: Vec<LocalPiece> = (0..8).map(|i| piece(128 * i, 64)).collect();
    chain.write(1, &pieces, destination.at(0), Marks::default());
    chain.write(2, &pieces[..1], destination.at(1024), Marks { inline: true, ..Marks::default() });
    chain.write(
        3,
        &[],
        destination.at(0),
        Marks { signalled: true, inline: false, immediate: Some(77) },
    );
    source.pair.post(&mut chain).unwrap();
    assert_eq!(fabric.counts(source.pair.number()), QueuePairCounts { doorbells: 1, requests: 3 });
    // Inline bytes were read at posting; the others are read at execution.
    source.fill(0x66);
    assert!(destination.holds(0, 0) && source.ended().is_empty());
    assert_eq!(fabric.step(), 3);
    assert!((0..8).all(|i| destination.holds(64 * i, 0x66)));
    assert!(
        destination.holds(1024, 0x5a) && destination.holds(512, 0) && destination.holds(1088, 0)
    );
    assert_eq!(source.ended(), [written(3, &source.pair)]);
    let notice = Completion {
        id: 40,
        queue_pair: destination.pair.number(),
        outcome: Ok(CompletionKind::Notified { immediate: 77 }),
    };
    assert_eq!(destination.notices(), [notice]);
    assert_eq!(fabric.step(), 0);
}

#[test]
fn room_comes_back_when_a_completion_is_polled() {
    let (fabric, mut source, destination) = connected();
    let mut chain = source.chain(5, 1);
    for round in 0..20 {
        for id in 0..5 {
            let marks = Marks { signalled: id == 4, ..Marks::default() };
            chain.write(id, &[piece(0, 8)], destination.at(0), marks);
        }
        source.pair.post(&mut chain).unwrap();
        let refused = source.pair.post(&mut chain).unwrap_err();
        assert_eq!(refused, PostError { posted: 3, error: libc::ENOMEM }, "round {round}");
        fabric.step();
        assert_eq!(source.pair.post(&mut chain).unwrap_err().posted, 0, "executed, but not polled");
        assert_eq!(source.ended(), [written(4, &source.pair)]);
        // Removes the three accepted requests of the second chain.
        chain.clear();
        chain.write(9, &[piece(0, 8)], destination.at(0), SIGNALLED);
        source.pair.post(&mut chain).unwrap();
        chain.clear();
        fabric.step();
        assert_eq!(source.ended(), [written(9, &source.pair)]);
    }
}

#[test]
fn keys_bounds_and_permissions_are_checked() {
    let (fabric, mut source, mut destination) = connected();
    let good = destination.at(0);
    let own = source.at(0);
    let wrong = [
        RemoteAddress { key: good.key + 1, ..good },
        RemoteAddress { address: good.address - 1, ..good },
        destination.at(BYTES - 63),
        RemoteAddress { address: u64::MAX - 3, ..good },
        // Registered without write access, and from another domain.
        own,
    ];
    for (id, to) in (10..).zip(wrong) {
        connect(&fabric, &mut source.pair, &mut destination.pair);
        destination.pair.post_receive(5).unwrap();
        post(&mut source, id, to, Marks::default());
        post(&mut source, 99, good, SIGNALLED);
        fabric.step();
        let fault = faulty(id, &source.pair, CompletionError::RemoteAccess);
        assert_eq!(source.ended(), [fault, faulty(99, &source.pair, CompletionError::Flushed)]);
        assert_eq!(destination.notices(), [faulty(5, &destination.pair, CompletionError::Flushed)]);
        assert!(destination.holds(0, 0));
    }
    connect(&fabric, &mut source.pair, &mut destination.pair);
    let stranger = End::new(&fabric, false);
    let mut chain = stranger.chain(1, 1);
    chain.write(7, &[piece(0, 8)], good, SIGNALLED);
    source.pair.post(&mut chain).unwrap();
    fabric.step();
    assert_eq!(source.ended(), [faulty(7, &source.pair, CompletionError::LocalProtection)]);
}

#[test]
fn a_notice_waits_for_a_receive_as_long_as_it_is_told_to() {
    let (fabric, mut source, mut destination) = connected();
    let marks = Marks { immediate: Some(1), ..SIGNALLED };
    post(&mut source, 1, destination.at(0), marks);
    assert_eq!((fabric.step(), source.ended().len()), (1, 0), "read, but it cannot land");
    destination.pair.post_receive(0).unwrap();
    fabric.step();
    assert_eq!(source.ended(), [written(1, &source.pair)]);
    assert!(destination.holds(0, 0x5a));

    source.pair.reset().unwrap();
    destination.pair.reset().unwrap();
    let impatient = crate::sys::verbs::Route { receive_retries: 3, ..fabric.route() };
    let one = source.pair.open(&impatient, 5).unwrap();
    let other = destination.pair.open(&impatient, 6).unwrap();
    source.pair.connect(&other).unwrap();
    destination.pair.connect(&one).unwrap();
    taken(&mut destination.received);
    post(&mut source, 2, destination.at(0), marks);
    fabric.step();
    assert_eq!(source.ended(), [faulty(2, &source.pair, CompletionError::NoReceive)]);
}

#[test]
fn faults_come_as_ordered_and_flush_the_rest() {
    let (fabric, mut source, mut destination) = connected();
    for fault in [
        CompletionError::NoAnswer,
        CompletionError::RemoteOperation,
        CompletionError::Flushed,
        CompletionError::Other(19),
    ] {
        connect(&fabric, &mut source.pair, &mut destination.pair);
        fabric.fail_next(source.pair.number(), fault);
        post(&mut source, 1, destination.at(0), Marks::default());
        post(&mut source, 2, destination.at(0), Marks::default());
        fabric.step();
        let flushed = faulty(2, &source.pair, CompletionError::Flushed);
        assert_eq!(source.ended(), [faulty(1, &source.pair, fault), flushed]);
        assert!(destination.holds(0, 0));
    }
    connect(&fabric, &mut source.pair, &mut destination.pair);
    post(&mut source, 3, destination.at(0), Marks::default());
    source.pair.fail().unwrap();
    assert_eq!(source.ended(), [faulty(3, &source.pair, CompletionError::Flushed)]);
    post(&mut source, 4, destination.at(0), Marks::default());
    fabric.step();
    assert_eq!(source.ended(), [faulty(4, &source.pair, CompletionError::Flushed)]);
    assert!(destination.holds(0, 0));
}

#[test]
fn a_held_write_lands_later_unless_the_destination_was_reset() {
    for (is_reset, fails) in [(false, false), (false, true), (true, false), (true, true)] {
        let (fabric, mut source, mut destination) = connected();
        let number = source.pair.number();
        fabric.hold(number);
        post(&mut source, 1, destination.at(0), SIGNALLED);
        fabric.step();
        assert!(destination.holds(0, 0) && source.ended().is_empty());
        // It is already in flight: its source memory can be reused.
        source.fill(0x77);
        if fails {
            source.pair.fail().unwrap();
            assert_eq!(source.ended(), [faulty(1, &source.pair, CompletionError::Flushed)]);
        }
        if is_reset {
            destination.pair.reset().unwrap();
        }
        fabric.release(number);
        fabric.step();
        // A flush does not say whether the bytes land; a reset of the destination does.
        assert!(destination.holds(0, if is_reset { 0 } else { 0x5a }), "{is_reset} {fails}");
        let outcome =
            if is_reset { Err(CompletionError::NoAnswer) } else { Ok(CompletionKind::Written) };
        let expected = Completion { id: 1, queue_pair: number, outcome };
        assert_eq!(source.ended(), if fails { vec![] } else { vec![expected] });
    }
}

#[test]
fn a_request_leaves_lands_and_is_answered_in_its_own_time() {
    let (fabric, mut source, mut destination) = connected();
    let number = source.pair.number();
    assert!(
        !fabric.depart(number) && fabric.land(number).is_none() && fabric.leaving(0).is_empty()
    );
    post(&mut source, 1, destination.at(0), SIGNALLED);
    let marks = Marks { immediate: Some(1), ..SIGNALLED };
    post(&mut source, 2, destination.at(64), marks);
    assert_eq!((fabric.leaving(0), fabric.leaving(1)), (vec![number], vec![]));
    assert!(fabric.depart(number) && fabric.depart(number) && !fabric.depart(number));
    // The bytes were read at departure.
    source.fill(0x77);
    let address = destination.at(0).address;
    assert_eq!(fabric.land(number), Some(Landed::Here { address, bytes: 64 }));
    assert!(destination.holds(0, 0x5a) && source.ended().is_empty());
    assert_eq!(fabric.land(number), Some(Landed::Later), "there is no receive");
    fabric.answer(number);
    assert_eq!(source.ended(), [written(1, &source.pair)]);
    fabric.answer(number);
    assert!(source.ended().is_empty(), "it has not landed");
    destination.pair.post_receive(9).unwrap();
    assert!(matches!(fabric.land(number), Some(Landed::Here { .. })));
    assert_eq!(destination.notices().len(), 1);
    fabric.answer(number);
    assert_eq!(source.ended(), [written(2, &source.pair)]);
}

#[test]
fn a_write_in_flight_lands_even_if_its_source_gives_up() {
    let (fabric, mut source, destination) = connected();
    let number = source.pair.number();
    assert!(!fabric.give_up(number), "it waits for nothing");
    for id in [1, 2, 3] {
        post(&mut source, id, destination.at(64 * id as usize), SIGNALLED);
    }
    assert!(fabric.depart(number) && fabric.depart(number));
    assert!(matches!(fabric.land(number), Some(Landed::Here { .. })));
    // The first has landed, the second is in flight, the third has not left.
    assert!(fabric.give_up(number));
    let [no_answer, flushed] = [CompletionError::NoAnswer, CompletionError::Flushed];
    let ends = [(1, no_answer), (2, flushed), (3, flushed)];
    assert_eq!(source.ended(), ends.map(|(id, fault)| faulty(id, &source.pair, fault)));
    assert!(destination.holds(64, 0x5a) && destination.holds(128, 0));
    drop(source);
    assert_eq!(fabric.place_of_peer(number), None);
    assert!(matches!(fabric.land(number), Some(Landed::Here { .. })));
    assert!(destination.holds(128, 0x5a) && destination.holds(192, 0));
    assert_eq!(fabric.land(number), None);
}

#[test]
fn a_packet_of_an_earlier_connection_is_not_taken_in() {
    let (fabric, mut source, mut destination) = connected();
    let number = source.pair.number();
    fabric.hold(number);
    post(&mut source, 1, destination.at(0), SIGNALLED);
    fabric.step();
    for sequence in [7, 8] {
        source.pair.reset().unwrap();
        destination.pair.reset().unwrap();
        let one = source.pair.open(&fabric.route(), sequence).unwrap();
        let other = destination.pair.open(&fabric.route(), sequence).unwrap();
        source.pair.connect(&other).unwrap();
        destination.pair.connect(&one).unwrap();
    }
    post(&mut source, 2, destination.at(64), SIGNALLED);
    fabric.release(number);
    fabric.step();
    assert!(destination.holds(0, 0), "late");
    assert!(destination.holds(64, 0x5a));
    assert_eq!(source.ended(), [written(2, &source.pair)]);

    // The same after the source is gone.
    fabric.hold(number);
    post(&mut source, 3, destination.at(0), SIGNALLED);
    fabric.step();
    drop(source);
    fabric.step();
    assert!(destination.holds(0, 0), "held");
    fabric.release(number);
    fabric.step();
    assert!(destination.holds(0, 0x5a), "the destination was not reset");
}

#[test]
fn queue_pairs_go_in_the_order_they_are_stepped() {
    let (fabric, mut source, destination) = connected();
    let mut second = pair(&source.domain, &source.sent, &source.received, false);
    let mut landing = pair(&destination.domain, &destination.sent, &destination.received, true);
    connect(&fabric, &mut second, &mut landing);
    post(&mut source, 1, destination.at(0), SIGNALLED);
    let mut chain = source.chain(1, 1);
    chain.write(2, &[piece(0, 64)], destination.at(64), SIGNALLED);
    second.post(&mut chain).unwrap();
    assert!(fabric.step_pair(second.number()));
    assert!(destination.holds(64, 0x5a) && destination.holds(0, 0));
    assert!(!fabric.step_pair(second.number()) && fabric.step_pair(source.pair.number()));
    assert_eq!(source.ended(), [written(2, &second), written(1, &source.pair)]);
}

#[test]
fn a_completion_can_be_lost() {
    let (fabric, mut source, destination) = connected();
    fabric.lose_completion(source.pair.number());
    post(&mut source, 1, destination.at(0), SIGNALLED);
    post(&mut source, 2, destination.at(0), SIGNALLED);
    fabric.step();
    assert!(destination.holds(0, 0x5a));
    assert_eq!(source.ended(), [written(2, &source.pair)]);
}

#[test]
fn an_event_follows_the_next_completion() {
    let (fabric, mut source, mut destination) = connected();
    (0..2).for_each(|id| destination.pair.post_receive(id).unwrap());
    let set = WaitSet::new().unwrap();
    set.add(destination.received.events().unwrap(), WaitInterest::Readable).unwrap();
    destination.received.request_event().unwrap();
    let marks = Marks { immediate: Some(1), ..Marks::default() };
    post(&mut source, 1, destination.at(0), marks);
    fabric.step();
    let begun = std::time::Instant::now();
    set.wait(Duration::from_secs(30));
    assert!(begun.elapsed() < Duration::from_secs(30), "no event");
    destination.received.clear_events();
    assert_eq!(destination.notices().len(), 1);
    // No event was requested again.
    post(&mut source, 2, destination.at(0), marks);
    fabric.step();
    set.wait(Duration::ZERO);
    assert_eq!(destination.notices().len(), 1);
}

#[test]
fn polling_can_perform_a_posted_write_or_only_complete_it() {
    let (fabric, mut source, destination) = connected();
    fabric.set_pace(StepMode::Polled);
    post(&mut source, 1, destination.at(0), SIGNALLED);
    assert_eq!(source.ended(), [written(1, &source.pair)]);
    assert!(destination.holds(0, 0x5a));
    fabric.set_pace(StepMode::Discarded);
    post(&mut source, 2, destination.at(64), SIGNALLED);
    assert_eq!(source.ended(), [written(2, &source.pair)]);
    assert!(destination.holds(64, 0));
}

#[test]
fn the_parts_of_an_end_can_be_dropped_in_any_order() {
    let (fabric, mut source, destination) = connected();
    post(&mut source, 1, destination.at(0), SIGNALLED);
    let End { domain, region, registration, sent, received, pair } = source;
    drop((domain, region, sent, fabric));
    drop((registration, received));
    drop(pair);
}
