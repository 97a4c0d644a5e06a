//! The loop of each data-plane thread: it takes turns while there is work, then parks.
//!
//! Thread: `move`, `post`, `poll`, each with a [`Waiter`] of its own. It parks in one wait set (its
//! doorbell, sockets, completion channels), and never longer than a bound.
//! Invariants: no wake-up is lost, by the rules of [`EventCount`]: announce, look once more, park.
//! Not here: the work of a turn.

use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::seal::seal_thread;
use crate::sys::event::{EventFd, WaitInterest, WaitSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Longest park without a wake-up. It only bounds a wait; threads are woken when there is work.
const PARK_MAX: Duration = Duration::from_secs(1);
/// Turns without work before parking; a turn takes some tens of nanoseconds per session.
const SPINS: u32 = 200;

/// The work of a thread, repeated by its loop.
pub trait LoopTask {
    /// Takes one turn; true if there was work.
    fn step(&mut self) -> bool;

    /// Publishes to other processes whether they must wake the thread.
    fn park(&mut self, parked: bool);
}

/// The next action after a step of an [`EventLoop`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextStep {
    /// Take a turn.
    Turn,
    /// Take a turn after the shortest possible pause.
    Spin,
    /// Sleep until a wake-up, then call [`EventLoop::resume`].
    Park,
    /// Call [`EventLoop::resume`] at once, because the last look found work.
    Resume,
}

/// The state of a thread's loop: takes turns, has no work, or is about to park. It does not contain
/// the thread and its sleep, so that a simulation can run the same steps and interleave other
/// threads.
#[derive(Debug)]
pub struct EventLoop {
    spins: u32,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Takes turns; the last `idle` of them had no work.
    Turning { idle: u32 },
    /// Has no work, and is about to announce that it parks.
    Tired,
    /// Has announced that it parks, and looks once more.
    Looking,
}

impl EventLoop {
    /// A loop that takes `spins` turns without work before it parks.
    pub fn new(spins: u32) -> EventLoop {
        EventLoop { spins, stage: Stage::Turning { idle: 0 } }
    }

    /// Takes a turn, or announces that the thread will park.
    pub fn step(&mut self, turns: &mut impl LoopTask, bell: &EventCount) -> NextStep {
        match &mut self.stage {
            Stage::Turning { idle } => {
                *idle = if turns.step() { 0 } else { *idle + 1 };
                match *idle {
                    0 => NextStep::Turn,
                    idle if idle < self.spins => NextStep::Spin,
                    _ => {
                        self.stage = Stage::Tired;
                        NextStep::Turn
                    }
                }
            }
            Stage::Tired => {
                turns.park(true);
                // Its fence also orders the stores of the sessions' `park`.
                bell.prepare_wait();
                self.stage = Stage::Looking;
                NextStep::Turn
            }
            Stage::Looking if is_failpoint_active("thread parks without a last look") => {
                NextStep::Park
            }
            Stage::Looking if turns.step() => NextStep::Resume,
            Stage::Looking => NextStep::Park,
        }
    }

    /// The thread is awake again.
    pub fn resume(&mut self, turns: &mut impl LoopTask, bell: &EventCount) {
        bell.cancel_wait();
        turns.park(false);
        self.stage = Stage::Turning { idle: 0 };
    }
}

/// The place where a thread parks, and the events that wake it.
#[derive(Debug)]
pub struct Waiter {
    /// For threads of this process.
    pub bell: Arc<EventCount>,
    /// The same for peers in other processes.
    pub doorbell: EventFd,
    /// Doorbell and sockets; each transport adds its own.
    pub set: Arc<WaitSet>,
    spins: u32,
}

impl Waiter {
    /// A place to park. Set `spin` to false if there are more threads than cores.
    pub fn new(spin: bool) -> io::Result<Waiter> {
        let doorbell = EventFd::new()?;
        let set = Arc::new(WaitSet::new()?);
        set.add(doorbell.as_fd(), WaitInterest::Readable)?;
        let wake = doorbell.duplicate()?;
        let bell = Arc::new(EventCount::new(move || wake.signal()));
        Ok(Waiter { bell, doorbell, set, spins: if spin { SPINS } else { 1 } })
    }

    /// Whether the thread must wake from its park. A simulation asks this in place of a park.
    pub fn is_woken(&self) -> bool {
        self.set.wait(Duration::ZERO)
    }

    /// A loop for the thread that parks here.
    pub fn event_loop(&self) -> EventLoop {
        EventLoop::new(self.spins)
    }

    /// The thread is awake again.
    pub fn resume(&self, round: &mut EventLoop, turns: &mut impl LoopTask) {
        round.resume(turns, &self.bell);
        self.doorbell.clear();
    }

    /// The thread function: takes turns until `stop`, and parks without work.
    pub fn run(&self, turns: &mut impl LoopTask, stop: &AtomicBool) {
        let _seal = seal_thread();
        let mut round = self.event_loop();
        while !stop.load(Ordering::Relaxed) {
            match round.step(turns, &self.bell) {
                NextStep::Turn => continue,
                NextStep::Spin => {
                    std::hint::spin_loop();
                    continue;
                }
                NextStep::Park if !stop.load(Ordering::Relaxed) => {
                    self.set.wait(PARK_MAX);
                }
                NextStep::Park | NextStep::Resume => {}
            }
            self.resume(&mut round, turns);
        }
    }
}
