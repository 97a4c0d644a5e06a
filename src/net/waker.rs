//! Wakes the reactor from another thread. Wakes that come together cost one system call.
//!
//! Thread: any. Invariant: the thread that handles the next `Woken` sees what another thread did
//! before `wake`. All accesses to the flag are exchanges, so that of the reader acquires all stores
//! before earlier ones.

use mio::{Registry, Token};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A handle that makes `poll` return with `Woken`.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    waker: mio::Waker,
    pending: AtomicBool,
}

impl Waker {
    pub(super) fn new(registry: &Registry, token: Token) -> io::Result<Waker> {
        let waker = mio::Waker::new(registry, token)?;
        Ok(Waker(Arc::new(Shared { waker, pending: AtomicBool::new(false) })))
    }

    /// Wakes the reactor, now or at its next poll.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            // The write to its counter can only fail if the reactor is gone.
            let _ = self.0.waker.wake();
        }
    }

    /// Resets the flag, because the reactor is about to report the wake. A later wake causes a new
    /// event.
    pub(super) fn clear(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }
}
