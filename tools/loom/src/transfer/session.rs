//! A session on one NIC with its two threads, as the mover has it: the product's but for the verbs. In the place of
//! posting and reaping is a queue pair that completes what is posted at once, and wakes who waits for it.

use super::flight::{Flight, Ticket};
use super::split::{Desk, Job, Poller, Poster, Said, Seat, Split};
use super::transport::{Lost, Post};
use crate::channel;
use crate::ids::{Generation, Room, SlotId};
use crate::stdx::bell::Bell;
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::command::{SessionId, Target};
use crate::transfer::waiter::Waiter;
use loom::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

const SLOT: SlotId = SlotId(0);
const CHAIN: Ticket = Ticket { slot: SLOT, lane: 0, requests: 1 };

/// A queue pair, and what a NIC reads for it.
pub struct Pair {
    flight: Flight,
    posted: AtomicU64,
    reaped: AtomicU64,
    /// Read by who posts, and by the NIC.
    pages: UnsafeCell<u64>,
    /// Read by who reaps.
    queue: UnsafeCell<u64>,
    /// Of who waits for completions.
    event: Bell,
}

impl Pair {
    pub fn has_posted(&self) -> bool {
        self.posted.load(Ordering::Relaxed) > 0
    }

    pub fn has_reaped(&self) -> bool {
        self.reaped.load(Ordering::Relaxed) > 0
    }

    /// The slot's pages are another's.
    #[allow(unsafe_code)]
    pub fn reuse_pages(&self) {
        // SAFETY: loom fails the model where another thread may be at it.
        self.pages.with_mut(|pages| unsafe { *pages += 1 });
    }

    /// So is the queue's memory: the session is gone.
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

/// In the place of the product's: what it posts it reads the pages for.
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
    pub fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        let Posting(pair, post) = self;
        if post.take().is_none() {
            return Ok(false);
        }
        // SAFETY: loom fails the model where another thread may write it.
        pair.pages.with(|pages| unsafe { *pages });
        pair.posted.fetch_add(1, Ordering::Relaxed);
        pair.event.ring();
        if pair.flight.leave(SLOT, 1) {
            completed(SLOT);
        }
        Ok(true)
    }
}

/// Likewise.
#[derive(Debug)]
pub struct Reaping(Arc<Pair>);

impl Reaping {
    #[allow(unsafe_code)]
    pub fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
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
        if parked { self.0.event.announce() } else { self.0.event.dismiss() }
    }
}

/// A thread's turns, and where it parks.
pub type Thread<T> = (T, Waiter);

/// A NIC: where sessions are brought to its threads, and its one queue pair.
pub struct Nic {
    desk: Desk,
    pub pair: Arc<Pair>,
}

impl Nic {
    pub fn new(mover: &Arc<Bell>) -> (Nic, Thread<Poster>, Thread<Poller>) {
        let (Split { poster, poller, .. }, desk) = Split::new("nic", mover, false).unwrap();
        let zero = || AtomicU64::new(0);
        let doorbell = poller.1.doorbell.duplicate().unwrap();
        let pair = Arc::new(Pair {
            flight: Flight::new(1, 1),
            posted: zero(),
            reaped: zero(),
            pages: UnsafeCell::new(0),
            queue: UnsafeCell::new(0),
            event: Bell::new(move || doorbell.signal()),
        });
        (Nic { desk, pair }, poster, poller)
    }

    pub fn seat(&self) -> Session {
        let (saying, said) = channel::bounded(3);
        let sides = (Posting(self.pair.clone(), None), Reaping(self.pair.clone()));
        let seat = self.desk.seat(sides, 1, &saying).unwrap();
        Session { seat, said, pair: self.pair.clone() }
    }
}

/// The mover's end.
pub struct Session {
    seat: Seat,
    said: channel::Receiver<Said>,
    pair: Arc<Pair>,
}

impl Session {
    /// Has the slot's one chunk posted.
    pub fn post(&self) {
        self.pair.flight.begin(SLOT, 1);
        let target = Target {
            session: SessionId(0),
            slot: SLOT,
            generation: Generation(1),
            room: Room(7),
            prefix: 0,
        };
        self.seat.tell(Job::Post(Post { slot: SLOT, target, tokens: 0..1, last: None }));
    }

    pub fn cancel(&self) {
        self.seat.tell(Job::Cancel(SLOT));
    }

    /// How often it was said since the last look that the slot is over.
    pub fn overs(&self) -> usize {
        std::iter::from_fn(|| self.said.try_recv().ok()).count()
    }
}
