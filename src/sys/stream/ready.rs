//! Readiness of streams in memory: what epoll with edges is to sockets.
//!
//! Thread: any; the simulator has one.
//! Invariants: a change is reported once, with the state at the time of the report. A stream that
//! its program has closed is not reported.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is ready.
#[derive(Clone, Copy, Debug)]
pub struct Readiness {
    /// The program's name of the source.
    pub token: usize,
    /// Bytes, an end or a failure can be read.
    pub readable: bool,
    /// Bytes can be written, or a failure can be seen.
    pub writable: bool,
    /// The peer has ended its side, or the connection failed.
    pub read_closed: bool,
    /// The connection failed. A flag is needed, because after the peer's end no read would report
    /// the failure.
    pub broken: bool,
}

/// A stream that reports its changes.
pub(super) trait ReadySource: fmt::Debug + Send + Sync {
    /// The state to report, which counts as reported from now on. `None` if nothing is reported.
    fn readiness(&self) -> Option<Readiness>;
}

/// Changes that a program has not seen yet.
#[derive(Clone, Debug, Default)]
pub struct ReadySet(Arc<Mutex<VecDeque<Change>>>);

#[derive(Debug)]
enum Change {
    Stream(Arc<dyn ReadySource>),
    /// A listener, a waker or a signal, by its token.
    Other(usize),
}

impl ReadySet {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Change>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push_stream(&self, socket: Arc<dyn ReadySource>) {
        self.lock().push_back(Change::Stream(socket));
    }

    /// Reports a source that is not a stream.
    pub fn push(&self, token: usize) {
        self.lock().push_back(Change::Other(token));
    }

    /// Whether no change waits.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// The next change.
    pub fn next(&self) -> Option<Readiness> {
        loop {
            // The set must not be locked here while a stream is: a stream locks in reverse order.
            let change = self.lock().pop_front()?;
            let ready = match change {
                Change::Other(token) => Some(Readiness {
                    token,
                    readable: true,
                    writable: false,
                    read_closed: false,
                    broken: false,
                }),
                Change::Stream(socket) => socket.readiness(),
            };
            if ready.is_some() {
                return ready;
            }
        }
    }
}
