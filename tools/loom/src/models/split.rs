//! The state that a session's mover shares with its NIC's poster and poller: words, and the queue
//! pair, which the mover takes away.

use crate::models::sleep::Sleep;
use crate::stdx::event_count::EventCount;
use crate::transfer::event_loop::LoopTask;
use crate::transfer::session::{Nic, Thread};
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

fn silent() -> Arc<EventCount> {
    Arc::new(EventCount::new(|| ()))
}

/// A thread that runs for one turn.
fn turn<T: LoopTask + 'static>((mut turns, waiter): Thread<T>) -> JoinHandle<Thread<T>> {
    thread::spawn(move || {
        turns.step();
        (turns, waiter)
    })
}

/// The poster and the poller can each be before, in or after a turn.
pub fn pages_of_a_session_can_be_reused_when_its_seat_is_gone() {
    let (nic, poster, poller) = Nic::new(&silent());
    let session = nic.add_session();
    session.post();
    let (poster, poller) = (turn(poster), turn(poller));
    drop(session);
    nic.pair.reuse_pages();
    nic.pair.reuse_queue();
    let (mut poster, mut poller) = (poster.join().unwrap(), poller.join().unwrap());
    assert!(!poster.0.step() && !poller.0.step(), "work was done for a session that has ended");
}

/// Cancel comes before the post is taken, after it, or after its completion. The end of the slot is
/// reported once. The slot's pages are reused as soon as it is reported.
pub fn a_cancelled_slot_is_over_once() {
    let (nic, poster, poller) = Nic::new(&silent());
    let session = nic.add_session();
    session.post();
    let (poster, poller) = (turn(poster), turn(poller));
    session.cancel();
    let overs = session.overs();
    if overs > 0 {
        nic.pair.reuse_pages();
    }
    let (mut poster, mut poller) = (poster.join().unwrap(), poller.join().unwrap());
    while poster.0.step() | poller.0.step() {}
    assert_eq!(overs + session.overs(), 1, "the slot was not over exactly once");
    nic.pair.reuse_pages();
}

/// As `Waiter::run`, until its part is done.
fn run<T: LoopTask + 'static>(
    (mut turns, waiter): Thread<T>,
    done: impl Fn() -> bool + 'static,
) -> JoinHandle<()> {
    thread::spawn(move || {
        while !done() {
            turns.park(true);
            waiter.bell.prepare_wait();
            if !turns.step() {
                waiter.doorbell.sleep();
            }
            waiter.bell.cancel_wait();
            turns.park(false);
        }
    })
}

/// A session is added to threads that can be asleep. Its post wakes the poster, its completion
/// wakes the poller, and the report wakes the mover.
pub fn all_three_threads_are_woken() {
    let sleep = Sleep::new();
    let waker = sleep.clone();
    let bell = Arc::new(EventCount::new(move || waker.wake()));
    let (nic, poster, poller) = Nic::new(&bell);
    let (posts, reaps) = (nic.pair.clone(), nic.pair.clone());
    let poster = run(poster, move || posts.has_posted());
    let poller = run(poller, move || reaps.has_reaped());
    let session = nic.add_session();
    session.post();
    loop {
        bell.prepare_wait();
        if session.overs() > 0 {
            break;
        }
        sleep.sleep();
        bell.cancel_wait();
    }
    poster.join().unwrap();
    poller.join().unwrap();
}
