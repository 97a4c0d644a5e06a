//! The event count, as `sched::engine::run` waits on it.

use crate::models::sleep::Sleep;
use crate::stdx::event_count::EventCount;
use crate::stdx::sync::{AtomicBool, Ordering};
use loom::sync::Arc;
use loom::thread;

/// Two notifiers publish work with the weakest ordering. The listener sleeps until it is woken, and
/// must find all work. If a wake-up is lost, loom finds no thread that can run.
pub fn the_listener_never_sleeps_over_pending_work() {
    let work = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
    let sleep = Sleep::new();
    let waker = sleep.clone();
    let bell = Arc::new(EventCount::new(move || waker.wake()));
    let ring = |index: usize| {
        let (work, bell) = (work.clone(), bell.clone());
        move || {
            work[index].store(true, Ordering::Relaxed);
            bell.notify();
        }
    };
    let ringers = [thread::spawn(ring(0)), thread::spawn(ring(1))];
    let mut taken = [false; 2];
    while taken != [true; 2] {
        bell.prepare_wait();
        let found = [0, 1].map(|index| work[index].load(Ordering::Relaxed));
        if found == taken {
            sleep.sleep();
        }
        bell.cancel_wait();
        taken = found;
    }
    for ringer in ringers {
        ringer.join().unwrap();
    }
}
