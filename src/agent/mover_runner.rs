//! The thread of an agent's mover, or the mover itself if the owner runs it.

use crate::stdx::event_count::EventCount;
use crate::transfer::event_loop::{LoopTask, Waiter};
use crate::transfer::mover::Mover;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Runs the mover. Dropping it ends the thread.
#[derive(Debug)]
pub(super) enum MoverRunner {
    Here(Box<Mover>),
    Thread { stop: Arc<AtomicBool>, bell: Arc<EventCount>, thread: Option<JoinHandle<()>> },
}

impl MoverRunner {
    /// Starts the thread.
    pub(super) fn start(mut mover: Mover, waiter: Waiter) -> io::Result<MoverRunner> {
        let (stop, bell) = (Arc::new(AtomicBool::new(false)), waiter.bell.clone());
        let stop_of_thread = stop.clone();
        let thread = thread::Builder::new()
            .name("move-0".into())
            .spawn(move || waiter.run(&mut mover, &stop_of_thread))?;
        Ok(MoverRunner::Thread { stop, bell, thread: Some(thread) })
    }

    /// Runs a step. Returns false if another thread runs the mover.
    pub(super) fn step(&mut self) -> bool {
        match self {
            MoverRunner::Here(mover) => {
                mover.step();
                true
            }
            MoverRunner::Thread { .. } => false,
        }
    }

    /// Whether another thread runs the mover.
    pub(super) fn is_thread(&self) -> bool {
        matches!(self, MoverRunner::Thread { .. })
    }
}

impl Drop for MoverRunner {
    fn drop(&mut self) {
        if let MoverRunner::Thread { stop, bell, thread } = self {
            stop.store(true, Ordering::Release);
            bell.notify();
            // A panicked thread has already reported the panic.
            let _ = thread.take().map(JoinHandle::join);
        }
    }
}
