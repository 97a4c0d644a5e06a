//! Replaces crossbeam's bounded channels, because proving their internals is not the task here.
//!
//! Invariants: it orders no more than crossbeam does, which is Release by the sender of a message
//! and Acquire by the receiver of that message. Places are not reused.

use crate::stdx::sync::{AtomicBool, AtomicU64, Ordering};
use loom::cell::UnsafeCell;
use std::fmt;
use std::sync::Arc;

/// The most messages that a model sends through one channel.
const PLACES: usize = 4;

struct Channel<T> {
    places: Vec<Place<T>>,
    sent: AtomicU64,
    received: AtomicU64,
    capacity: usize,
}

struct Place<T> {
    full: AtomicBool,
    message: UnsafeCell<Option<T>>,
}

/// As crossbeam's `Sender`.
pub struct Sender<T>(Arc<Channel<T>>);

/// As crossbeam's `Receiver`.
pub struct Receiver<T>(Arc<Channel<T>>);

/// The channel has no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TryRecvError;

/// The channel is full. This never happens, because no model fills a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrySendError<T> {
    Full(T),
}

// SAFETY: a place is written by the one sender that has its index, and read by the one receiver
// after `full` is set. Loom fails the model if this is not true.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for Channel<T> {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl<T: Send> Send for Channel<T> {}

pub fn bounded<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let place = || Place { full: AtomicBool::new(false), message: UnsafeCell::new(None) };
    let places = (0..PLACES).map(|_| place()).collect();
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let channel = Arc::new(Channel { places, sent, received, capacity });
    (Sender(channel.clone()), Receiver(channel))
}

impl<T> Sender<T> {
    #[allow(unsafe_code)]
    pub fn try_send(&self, message: T) -> Result<(), TrySendError<T>> {
        let at = self.0.sent.fetch_add(1, Ordering::Relaxed) as usize;
        let place = &self.0.places[at];
        // SAFETY: no other sender has this index.
        place.message.with_mut(|cell| unsafe { *cell = Some(message) });
        place.full.store(true, Ordering::Release);
        Ok(())
    }

    pub fn capacity(&self) -> Option<usize> {
        Some(self.0.capacity)
    }

    pub fn len(&self) -> usize {
        (self.0.sent.load(Ordering::Relaxed) - self.0.received.load(Ordering::Relaxed)) as usize
    }
}

impl<T> Receiver<T> {
    #[allow(unsafe_code)]
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let at = self.0.received.load(Ordering::Relaxed);
        let Some(place) = self.0.places.get(at as usize) else { return Err(TryRecvError) };
        if !place.full.load(Ordering::Acquire) {
            return Err(TryRecvError);
        }
        self.0.received.store(at + 1, Ordering::Relaxed);
        // SAFETY: the sender has finished with this place.
        place.message.with_mut(|cell| unsafe { (*cell).take() }).ok_or(TryRecvError)
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        Sender(self.0.clone())
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

impl<T> fmt::Debug for Receiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiver")
    }
}
