//! The state of a session that posters and a poller share. A counter stands for the NIC between
//! them. In models that test order, the counter's accesses are relaxed: posters and poller must
//! order their own accesses.

use crate::ids::SlotId;
use crate::models::sleep::Sleep;
use crate::stdx::event_count::EventCount;
use crate::stdx::sync::{AtomicU64, Ordering};
use crate::transfer::flight::{InFlight, WorkRequestId};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

const SLOT: SlotId = SlotId(0);
const CHAIN: WorkRequestId = WorkRequestId { slot: SLOT, lane: 0, requests: 1 };
const CHAINS: u64 = 2;

/// A slot's pages, and the work in flight that uses them.
struct Shared {
    flight: InFlight,
    posted: AtomicU64,
    reaped: AtomicU64,
    pages: UnsafeCell<u64>,
    overs: AtomicU64,
}

impl Shared {
    fn new(posters: u64) -> Arc<Shared> {
        let flight = InFlight::new(1, 1);
        flight.begin(SLOT, posters);
        let zero = || AtomicU64::new(0);
        Arc::new(Shared {
            flight,
            posted: zero(),
            reaped: zero(),
            pages: UnsafeCell::new(0),
            overs: zero(),
        })
    }

    fn post(&self) {
        // SAFETY: loom fails the model if another thread writes meanwhile.
        #[allow(unsafe_code)]
        self.pages
            .with(|pages| assert_eq!(unsafe { *pages }, 0, "posted from another slot's pages"));
        self.posted.fetch_add(1, Ordering::Relaxed);
    }

    /// Reaps one completion if there is one. Returns whether there was one.
    fn reap(&self) -> bool {
        let reaped = self.reaped.load(Ordering::Relaxed);
        if self.posted.load(Ordering::Relaxed) == reaped {
            return false;
        }
        self.reaped.store(reaped + 1, Ordering::Relaxed);
        if self.flight.reap(CHAIN).unwrap() {
            self.over();
        }
        true
    }

    /// Writes the pages, which now belong to another slot.
    fn over(&self) {
        self.overs.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above, also for readers.
        #[allow(unsafe_code)]
        self.pages.with_mut(|pages| unsafe { *pages = 1 });
    }
}

/// The poster can finish before or after the last completion. A second poster, on another NIC,
/// leaves without a post.
pub fn a_slot_is_over_once_and_for_all() {
    let shared = Shared::new(2);
    let other = thread::spawn({
        let shared = shared.clone();
        move || {
            if shared.flight.leave(SLOT, 0) {
                shared.over();
            }
        }
    });
    let poller = thread::spawn({
        let shared = shared.clone();
        move || {
            for _ in 0..CHAINS {
                shared.reap();
            }
        }
    });
    for _ in 0..CHAINS {
        shared.post();
    }
    if shared.flight.leave(SLOT, CHAINS) {
        shared.over();
    }
    poller.join().unwrap();
    other.join().unwrap();
    while shared.reap() {}
    assert_eq!(shared.overs.load(Ordering::Relaxed), 1, "the slot was not over exactly once");
}

/// An entry of a work queue is written again only after its completion was reaped.
pub fn an_entry_is_written_again_when_it_was_reaped() {
    let shared = Shared::new(1);
    let entry = Arc::new(UnsafeCell::new(0u64));
    let poller = thread::spawn({
        let (shared, entry) = (shared.clone(), entry.clone());
        move || {
            if shared.posted.load(Ordering::Acquire) == 1 {
                // A provider reads the entry when it is polled.
                // SAFETY: loom fails the model if the poster writes meanwhile.
                #[allow(unsafe_code)]
                entry.with(|entry| assert_eq!(unsafe { *entry }, 1));
                shared.flight.reap(CHAIN).unwrap();
            }
        }
    });
    let mut room = 1;
    for _ in 0..CHAINS {
        if room == 0 {
            room = shared.flight.take_room(0);
        }
        if room == 0 {
            break;
        }
        // SAFETY: as above.
        #[allow(unsafe_code)]
        entry.with_mut(|entry| unsafe { *entry += 1 });
        shared.posted.fetch_add(1, Ordering::Release);
        room -= 1;
    }
    poller.join().unwrap();
}

/// A poster that has no room sleeps until it is woken. If the wake-up is lost, loom finds no thread
/// that can run.
pub fn room_wakes_a_poster_that_sleeps() {
    let shared = Shared::new(1);
    let sleep = Sleep::new();
    let waker = sleep.clone();
    let bell = Arc::new(EventCount::new(move || waker.wake()));
    shared.post();
    let poller = thread::spawn({
        let (shared, bell) = (shared.clone(), bell.clone());
        move || {
            assert!(shared.reap());
            bell.notify();
        }
    });
    let mut room = 0;
    while room == 0 {
        bell.prepare_wait();
        room = shared.flight.take_room(0);
        if room == 0 {
            sleep.sleep();
        }
        bell.cancel_wait();
    }
    shared.post();
    poller.join().unwrap();
}
