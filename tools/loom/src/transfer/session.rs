//! A session on one NIC with its two threads, as the mover has it. Only the verbs are not the
//! product's. A queue pair of the model completes each post at once, and wakes the thread that
//! waits for the completion.

use super::flight::{InFlight, WorkRequestId};
use super::split::{NicReport, NicSessionHandle, NicThreads, Poller, Poster, PosterCommand, Split};
use super::transport::{Post, SessionLost};
use crate::channel;
use crate::ids::{Generation, Room, SlotId};
use crate::stdx::event_count::EventCount;
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::event_loop::Waiter;
use crate::transfer::target::{SessionId, Target};
use loom::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

const SLOT: SlotId = SlotId(0);
const CHAIN: WorkRequestId = WorkRequestId { slot: SLOT, lane: 0, requests: 1 };

/// A queue pair, and the memory that a NIC reads for it.
pub struct Pair {
    flight: InFlight,
    posted: AtomicU64,
    reaped: AtomicU64,
    /// Read by the poster and by the NIC.
    pages: UnsafeCell<u64>,
    /// Read by the poller.
    queue: UnsafeCell<u64>,
    /// Wakes the thread that waits for completions.
    event: EventCount,
}

impl Pair {
    pub fn has_posted(&self) -> bool {
        self.posted.load(Ordering::Relaxed) > 0
    }

    pub fn has_reaped(&self) -> bool {
        self.reaped.load(Ordering::Relaxed) > 0
    }

    /// Writes the slot's pages, which now belong to another slot.
    #[allow(unsafe_code)]
    pub fn reuse_pages(&self) {
        // SAFETY: loom fails the model if another thread can access them.
        self.pages.with_mut(|pages| unsafe { *pages += 1 });
    }

    /// Writes the queue's memory, which is reused because the session has ended.
    #[allow(unsafe_code)]
    pub fn reuse_queue(&self) {
        // SAFETY: as above.
        self.queue.with_mut(|queue| unsafe { *queue += 1 });
    }
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pair")
    }
}

/// Replaces the product's type. A step reads the pages of its post.
#[derive(Debug)]
pub struct Posting(Arc<Pair>, Option<Post>);

impl Posting {
    pub fn take(&mut self, post: Post) {
        self.1 = Some(post);
    }

    pub fn withdraw(&mut self, slot: SlotId) -> bool {
        self.1.take().is_some_and(|_| self.0.flight.leave(slot, 0))
    }

    #[allow(unsafe_code)]
    pub fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, SessionLost> {
        let Posting(pair, post) = self;
        if post.take().is_none() {
            return Ok(false);
        }
        // SAFETY: loom fails the model if another thread can write them.
        pair.pages.with(|pages| unsafe { *pages });
        pair.posted.fetch_add(1, Ordering::Relaxed);
        pair.event.notify();
        if pair.flight.leave(SLOT, 1) {
            completed(SLOT);
        }
        Ok(true)
    }
}

/// Replaces the product's type. A step reads the queue.
#[derive(Debug)]
pub struct Reaping(Arc<Pair>);

impl Reaping {
    #[allow(unsafe_code)]
    pub fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, SessionLost> {
        let Reaping(pair) = self;
        // SAFETY: as above.
        pair.queue.with(|queue| unsafe { *queue });
        if pair.has_reaped() || !pair.has_posted() {
            return Ok(false);
        }
        pair.reaped.store(1, Ordering::Relaxed);
        if pair.flight.reap(CHAIN).unwrap() {
            completed(SLOT);
        }
        Ok(true)
    }

    pub fn park(&mut self, parked: bool) {
        if parked { self.0.event.prepare_wait() } else { self.0.event.cancel_wait() }
    }
}

/// A thread's turns, and its waiter.
pub type Thread<T> = (T, Waiter);

/// A NIC: the handle that adds sessions to its threads, and its one queue pair.
pub struct Nic {
    threads: NicThreads,
    pub pair: Arc<Pair>,
}

impl Nic {
    pub fn new(mover: &Arc<EventCount>) -> (Nic, Thread<Poster>, Thread<Poller>) {
        let (Split { poster, poller, .. }, threads) = Split::new("nic", mover, false).unwrap();
        let zero = || AtomicU64::new(0);
        let doorbell = poller.1.doorbell.duplicate().unwrap();
        let pair = Arc::new(Pair {
            flight: InFlight::new(1, 1),
            posted: zero(),
            reaped: zero(),
            pages: UnsafeCell::new(0),
            queue: UnsafeCell::new(0),
            event: EventCount::new(move || doorbell.signal()),
        });
        (Nic { threads, pair }, poster, poller)
    }

    pub fn add_session(&self) -> Session {
        let (reporting, reports) = channel::bounded(3);
        let sides = (Posting(self.pair.clone(), None), Reaping(self.pair.clone()));
        let handle = self.threads.add_session(sides, 1, &reporting).unwrap();
        Session { handle, reports, pair: self.pair.clone() }
    }
}

/// The mover's end of a session.
pub struct Session {
    handle: NicSessionHandle,
    reports: channel::Receiver<NicReport>,
    pair: Arc<Pair>,
}

impl Session {
    /// Sends the job that posts the slot's one chunk.
    pub fn post(&self) {
        self.pair.flight.begin(SLOT, 1);
        let target = Target {
            session: SessionId(0),
            slot: SLOT,
            generation: Generation(1),
            room: Room(7),
            prefix: 0,
        };
        self.handle.send(PosterCommand::Post(Post {
            slot: SLOT,
            target,
            tokens: 0..1,
            last: None,
        }));
    }

    pub fn cancel(&self) {
        self.handle.send(PosterCommand::Cancel(SLOT));
    }

    /// Number of reports since the last call that the slot is over.
    pub fn overs(&self) -> usize {
        std::iter::from_fn(|| self.reports.try_recv().ok()).count()
    }
}
