//! The loop of every thread that moves bytes: turns as long as there is something to do, then a park.
//!
//! Thread: `move`, `post`, `poll`, each with a [`Waiter`] of its own. Parks in one wait set (its doorbell, sockets,
//! completion channels) and never longer than a bound. Invariant: no lost wake-up, by [`Bell`]'s rules: park, announce,
//! look once more. Not here: what a turn does.

use crate::stdx::bell::Bell;
use crate::stdx::planted::is_planted;
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

/// What comes after a step of a [`Round`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// A turn.
    Turn,
    /// The same, after the shortest of pauses.
    Spin,
    /// Sleep until something rings, then [`Round::rise`].
    Park,
    /// [`Round::rise`] at once: there was something left to do.
    Rise,
}

/// Where in its loop a thread is: turns, then none to take, then about to park. Apart from the thread and its sleep, so
/// that a simulation goes through the same steps, and other threads between any two of them.
#[derive(Debug)]
pub struct Round {
    spins: u32,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Takes turns, the last so many of them without work.
    Turning { idle: u32 },
    /// Has none to take, and is about to say so.
    Tired,
    /// Has said so, and looks once more.
    Looking,
}

impl Round {
    /// A loop that takes `spins` turns without work before it parks.
    pub fn new(spins: u32) -> Round {
        Round { spins, stage: Stage::Turning { idle: 0 } }
    }

    /// A turn, or the announcement that there will be none.
    pub fn step(&mut self, turns: &mut impl Turns, bell: &Bell) -> Next {
        match &mut self.stage {
            Stage::Turning { idle } => {
                *idle = if turns.step() { 0 } else { *idle + 1 };
                match *idle {
                    0 => Next::Turn,
                    idle if idle < self.spins => Next::Spin,
                    _ => {
                        self.stage = Stage::Tired;
                        Next::Turn
                    }
                }
            }
            Stage::Tired => {
                turns.park(true);
                // Its fence comes after what sessions have said, too.
                bell.announce();
                self.stage = Stage::Looking;
                Next::Turn
            }
            Stage::Looking if is_planted("thread parks without a last look") => Next::Park,
            Stage::Looking if turns.step() => Next::Rise,
            Stage::Looking => Next::Park,
        }
    }

    /// Awake again.
    pub fn rise(&mut self, turns: &mut impl Turns, bell: &Bell) {
        bell.dismiss();
        turns.park(false);
        self.stage = Stage::Turning { idle: 0 };
    }
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
        let mut round = Round::new(self.spins);
        while !stop.load(Ordering::Relaxed) {
            match round.step(turns, &self.bell) {
                Next::Turn => continue,
                Next::Spin => {
                    std::hint::spin_loop();
                    continue;
                }
                Next::Park if !stop.load(Ordering::Relaxed) => {
                    self.set.wait(PARK_MAX);
                }
                Next::Park | Next::Rise => {}
            }
            round.rise(turns, &self.bell);
            self.doorbell.clear();
        }
    }
}
