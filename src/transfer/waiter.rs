//! The loop of every thread that moves bytes: turns as long as there is something to do, then a park.
//!
//! Thread: `move`, `post`, `poll`, each with a [`Waiter`] of its own. Parks in one wait set (its doorbell, sockets,
//! completion channels) and never longer than a bound. Invariant: no lost wake-up, by [`Bell`]'s rules: park, announce,
//! look once more. Not here: what a turn does.

use crate::stdx::bell::Bell;
use crate::stdx::seal::seal_thread;
use crate::sys::event::{EventCounter, Interest, WaitSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a thread parks when nothing rings: a bound on every wait, not a schedule.
const PARK_MAX: Duration = Duration::from_secs(1);
/// Turns without work before parking; a turn is some tens of nanoseconds per session.
const SPINS: u32 = 200;

/// What a thread does over and over.
pub trait Turns {
    /// One turn; true when something was done.
    fn step(&mut self) -> bool;

    /// Has whatever brings work from outside this process wake the thread, or no longer.
    fn park(&mut self, parked: bool);
}

/// Where a thread parks and what wakes it.
#[derive(Debug)]
pub struct Waiter {
    /// For threads of this process.
    pub bell: Arc<Bell>,
    /// The same, for peers in other processes.
    pub doorbell: EventCounter,
    /// Doorbell and sockets; transports that have any add them.
    pub set: Arc<WaitSet>,
    spins: u32,
}

impl Waiter {
    /// A place to park. `spin` is off where threads outnumber cores.
    pub fn new(spin: bool) -> io::Result<Waiter> {
        let doorbell = EventCounter::new()?;
        let set = Arc::new(WaitSet::new()?);
        set.add(doorbell.as_fd(), Interest::Readable)?;
        let wake = doorbell.duplicate()?;
        let bell = Arc::new(Bell::new(move || wake.signal()));
        Ok(Waiter { bell, doorbell, set, spins: if spin { SPINS } else { 1 } })
    }

    /// The thread function: turns until `stop`, parked when there is nothing to do.
    pub fn run(&self, turns: &mut impl Turns, stop: &AtomicBool) {
        let _seal = seal_thread();
        let mut idle = 0;
        while !stop.load(Ordering::Relaxed) {
            if turns.step() {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < self.spins {
                std::hint::spin_loop();
                continue;
            }
            turns.park(true);
            // Its fence comes after what sessions have said, too.
            self.bell.announce();
            if !turns.step() && !stop.load(Ordering::Relaxed) {
                self.set.wait(PARK_MAX);
            }
            self.bell.dismiss();
            turns.park(false);
            self.doorbell.clear();
            idle = 0;
        }
    }
}
