//! Wakes the reactor from another thread. Wakes that come together cost one system call.
//!
//! Thread: any. Invariant: the thread that handles the next `Woken` sees what another thread did
//! before `wake`. Each access to the flag is an exchange. So the reader's exchange acquires the
//! stores before each earlier exchange.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A handle that makes `poll` return with `Woken`.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Shared>);

struct Shared {
    target: Target,
    pending: AtomicBool,
}

enum Target {
    System(mio::Waker),
    Memory(Box<dyn Fn() + Send + Sync>),
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("pending", &self.pending).finish_non_exhaustive()
    }
}

impl Waker {
    pub(super) fn system(waker: mio::Waker) -> Waker {
        Waker::of(Target::System(waker))
    }

    pub(super) fn memory(wake: impl Fn() + Send + Sync + 'static) -> Waker {
        Waker::of(Target::Memory(Box::new(wake)))
    }

    fn of(target: Target) -> Waker {
        Waker(Arc::new(Shared { target, pending: AtomicBool::new(false) }))
    }

    /// Wakes the reactor, now or at its next poll.
    pub fn wake(&self) {
        if !self.0.pending.swap(true, Ordering::AcqRel) {
            match &self.0.target {
                // The write to its counter can only fail if the reactor is gone.
                Target::System(waker) => drop(waker.wake()),
                Target::Memory(wake) => wake(),
            }
        }
    }

    /// Resets the flag, because the reactor is about to report the wake. A later wake causes a new
    /// event.
    pub(super) fn clear(&self) {
        self.0.pending.swap(false, Ordering::AcqRel);
    }
}
