//! The thread that moves bytes or posts them: both halves in one thread, one [`Mover`] over all
//! workers of the process. Parks in one wait set (its doorbell, sockets).
//!
//! Thread: `move`. Owns: live leases of transfers, and alone may end them. Never allocates after a session
//! is set up, never logs per block.

pub mod destination;
pub mod source;

use crate::cause::Cause;
use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::stdx::bell::Bell;
use crate::stdx::seal::seal_thread;
use crate::sys::event::{EventCounter, Interest, WaitSet};
use crate::transfer::command::{LeaseEnd, SessionId};
use crate::transfer::status::StatusTable;
use crossbeam_channel as channel;
use destination::DestinationMover;
use source::SourceMover;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// From a mover to `ctl`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Report {
    /// Source: Cancel was taken and everything posted has completed; nothing will be posted.
    Withdrawn {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
    },
    /// Destination: everything is here and proven; the source may be told Done.
    Arrived {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// The attempt.
        room: Room,
        /// From where.
        session: SessionId,
    },
    /// Destination: the room failed here (void copy, nonsense from the peer).
    Failed {
        /// The slot.
        slot: SlotId,
        /// Its generation.
        generation: Generation,
        /// Why.
        cause: Cause,
    },
    /// The session's way is gone.
    Lost {
        /// Which.
        session: SessionId,
        /// As it was opened: the index may be another session's by now.
        generation: SessionGeneration,
        /// Why.
        cause: Cause,
    },
}

/// A mover's ends of one worker's rings; `C` is what it is told.
#[derive(Debug)]
pub struct Links<C> {
    /// From `ctl` and `engine`.
    pub commands: channel::Receiver<C>,
    /// Leases back to `engine`.
    pub ends: channel::Sender<LeaseEnd>,
    /// To `ctl`.
    pub reports: channel::Sender<Report>,
    /// The engine's.
    pub engine: Arc<Bell>,
    /// `ctl`'s.
    pub ctl: Arc<Bell>,
    /// The worker's slots.
    pub status: Arc<StatusTable>,
}

/// How long a mover parks when nothing rings: a bound on every wait, not a schedule.
const PARK_MAX: Duration = Duration::from_secs(1);
/// Turns without work before parking; a turn is some tens of nanoseconds per session.
const SPINS: u32 = 200;

/// All transfers of this process.
#[derive(Debug)]
pub struct Mover {
    /// Prefill workers.
    pub sources: Vec<SourceMover>,
    /// Decode workers.
    pub destinations: Vec<DestinationMover>,
}

impl Mover {
    /// One turn over everything; true when something moved.
    pub fn step(&mut self) -> bool {
        let mut moved = false;
        for source in &mut self.sources {
            moved |= source.step();
        }
        for destination in &mut self.destinations {
            moved |= destination.step();
        }
        moved
    }

    fn park(&mut self, parked: bool) {
        for source in &mut self.sources {
            source.park(parked);
        }
        for destination in &mut self.destinations {
            destination.park(parked);
        }
    }

    /// The thread function: turns until `stop`, parked when there is nothing to do.
    pub fn run(mut self, waiter: &Waiter, stop: &AtomicBool) {
        let _seal = seal_thread();
        let mut idle = 0;
        while !stop.load(Ordering::Relaxed) {
            if self.step() {
                idle = 0;
                continue;
            }
            idle += 1;
            if idle < waiter.spins {
                std::hint::spin_loop();
                continue;
            }
            self.park(true);
            // Its fence comes after what sessions have said, too.
            waiter.bell.announce();
            if !self.step() && !stop.load(Ordering::Relaxed) {
                waiter.set.wait(PARK_MAX);
            }
            waiter.bell.dismiss();
            self.park(false);
            waiter.doorbell.clear();
            idle = 0;
        }
    }
}

/// Where a mover parks and what wakes it.
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
}
