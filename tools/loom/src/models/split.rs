//! What a session's mover shares with its NIC's poster and poller: the queue pair, which it takes away, and words.

use crate::models::sleep::Sleep;
use crate::stdx::bell::Bell;
use crate::transfer::session::{Nic, Thread};
use crate::transfer::waiter::Turns;
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

fn silent() -> Arc<Bell> {
    Arc::new(Bell::new(|| ()))
}

/// A thread that runs for one turn.
fn turn<T: Turns + 'static>((mut turns, waiter): Thread<T>) -> JoinHandle<Thread<T>> {
    thread::spawn(move || {
        turns.step();
        (turns, waiter)
    })
}

/// Poster and poller may be in the middle of a turn, before it or behind it.
pub fn what_a_session_had_is_another_s_when_its_seat_is_gone() {
    let (nic, poster, poller) = Nic::new(&silent());
    let session = nic.seat();
    session.post();
    let (poster, poller) = (turn(poster), turn(poller));
    drop(session);
    nic.pair.reuse_pages();
    nic.pair.reuse_queue();
    let (mut poster, mut poller) = (poster.join().unwrap(), poller.join().unwrap());
    assert!(!poster.0.step() && !poller.0.step(), "something was done for a session that is gone");
}

/// Cancel comes before the post is taken, or behind it, or behind its completion: the slot's pages are given away as
/// soon as it is said, which it is once.
pub fn a_cancelled_slot_is_over_once() {
    let (nic, poster, poller) = Nic::new(&silent());
    let session = nic.seat();
    session.post();
    let (poster, poller) = (turn(poster), turn(poller));
    session.cancel();
    let overs = session.overs();
    if overs > 0 {
        nic.pair.reuse_pages();
    }
    let (mut poster, mut poller) = (poster.join().unwrap(), poller.join().unwrap());
    while poster.0.step() | poller.0.step() {}
    assert_eq!(overs + session.overs(), 1, "over more or less than once");
    nic.pair.reuse_pages();
}

/// As `Waiter::run`, until its part is done.
fn run<T: Turns + 'static>(
    (mut turns, waiter): Thread<T>,
    done: impl Fn() -> bool + 'static,
) -> JoinHandle<()> {
    thread::spawn(move || {
        while !done() {
            turns.park(true);
            waiter.bell.announce();
            if !turns.step() {
                waiter.doorbell.sleep();
            }
            waiter.bell.dismiss();
            turns.park(false);
        }
    })
}

/// A session comes to threads that may be asleep: its post reaches the poster, its completion the poller, and what
/// became of it the mover.
pub fn all_three_threads_are_woken() {
    let sleep = Sleep::new();
    let waker = sleep.clone();
    let bell = Arc::new(Bell::new(move || waker.wake()));
    let (nic, poster, poller) = Nic::new(&bell);
    let (posts, reaps) = (nic.pair.clone(), nic.pair.clone());
    let poster = run(poster, move || posts.has_posted());
    let poller = run(poller, move || reaps.has_reaped());
    let session = nic.seat();
    session.post();
    loop {
        bell.announce();
        if session.overs() > 0 {
            break;
        }
        sleep.sleep();
        bell.dismiss();
    }
    poster.join().unwrap();
    poller.join().unwrap();
}
