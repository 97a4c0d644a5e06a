//! The bell, as `sched::engine::run` listens to it.

use crate::models::sleep::Sleep;
use crate::stdx::bell::Bell;
use crate::stdx::sync::{AtomicBool, Ordering};
use loom::sync::Arc;
use loom::thread;

/// Two ringers leave work in the weakest way. The listener sleeps as long as nobody wakes it, and gets it all:
/// where a wake-up is lost, loom finds nobody who could run.
pub fn nobody_sleeps_over_work() {
    let work = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
    let sleep = Sleep::new();
    let waker = sleep.clone();
    let bell = Arc::new(Bell::new(move || waker.wake()));
    let ring = |index: usize| {
        let (work, bell) = (work.clone(), bell.clone());
        move || {
            work[index].store(true, Ordering::Relaxed);
            bell.ring();
        }
    };
    let ringers = [thread::spawn(ring(0)), thread::spawn(ring(1))];
    let mut taken = [false; 2];
    while taken != [true; 2] {
        bell.announce();
        let found = [0, 1].map(|index| work[index].load(Ordering::Relaxed));
        if found == taken {
            sleep.sleep();
        }
        bell.dismiss();
        taken = found;
    }
    for ringer in ringers {
        ringer.join().unwrap();
    }
}
