//! The thread of an agent's mover, or the mover itself if the owner runs it.
//!
//! Invariants: after the runner is dropped, nothing of the mover reads or writes the pool. A copy
//! that a destination still makes over shm is void. The engine can use all pages again. If the
//! mover has panicked, a NIC may still access the pool, which then stays mapped.

use crate::ids::SlotId;
use crate::kv::region::Region;
use crate::obs::log::event;
use crate::stdx::event_count::EventCount;
use crate::stdx::panic_message::panic_message;
use crate::sys::last_resort;
use crate::transfer::event_loop::{LoopTask, Waiter};
use crate::transfer::mover::Mover;
use crate::transfer::pages::PageLists;
use crate::transfer::thread_names::MOVER;
use crate::transfer::transport::Memory;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Runs the mover. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct MoverRunner {
    mover: Runner,
    lists: Arc<PageLists>,
}

#[derive(Debug)]
enum Runner {
    Here(Box<Mover>),
    Thread { stop: Arc<AtomicBool>, bell: Arc<EventCount>, thread: JoinHandle<()> },
    Ended,
}

impl MoverRunner {
    /// Runs a mover over this memory on a thread that parks at `waiter`. Without one, the owner
    /// runs its steps.
    pub(super) fn new(
        mover: Mover,
        waiter: Option<Waiter>,
        memory: &Memory,
    ) -> io::Result<MoverRunner> {
        let mover = match waiter {
            None => Runner::Here(Box::new(mover)),
            Some(waiter) => Runner::start(mover, waiter, memory.region.clone())?,
        };
        Ok(MoverRunner { mover, lists: memory.lists.clone() })
    }

    /// Runs a step. Returns false if another thread runs the mover.
    pub(super) fn step(&mut self) -> bool {
        match &mut self.mover {
            Runner::Here(mover) => {
                mover.step();
                true
            }
            Runner::Thread { .. } | Runner::Ended => false,
        }
    }

    /// Whether the thread has ended without being stopped.
    pub(super) fn has_ended(&self) -> bool {
        matches!(&self.mover, Runner::Thread { thread, .. } if thread.is_finished())
    }

    /// Whether another thread runs the mover.
    pub(super) fn is_thread(&self) -> bool {
        matches!(self.mover, Runner::Thread { .. })
    }
}

impl Runner {
    fn start(mut mover: Mover, waiter: Waiter, region: Arc<Region>) -> io::Result<Runner> {
        let (stop, bell) = (Arc::new(AtomicBool::new(false)), waiter.bell.clone());
        let stop_of_thread = stop.clone();
        let thread = thread::Builder::new().name(MOVER.into()).spawn(move || {
            let run = || last_resort::as_guest(|| waiter.run(&mut mover, &stop_of_thread));
            let ended = catch_unwind(AssertUnwindSafe(run));
            let end = || last_resort::as_guest(|| drop(mover));
            let dropped = catch_unwind(AssertUnwindSafe(end));
            if let Err(panic) = ended.and(dropped) {
                let why = panic_message(&*panic);
                event!(Error, "agent", "the mover has ended", why = why);
                // A NIC may still access the pool.
                std::mem::forget(region);
            }
        })?;
        Ok(Runner::Thread { stop, bell, thread })
    }
}

impl Drop for MoverRunner {
    fn drop(&mut self) {
        if let Runner::Thread { stop, bell, thread } =
            std::mem::replace(&mut self.mover, Runner::Ended)
        {
            stop.store(true, Ordering::Release);
            bell.notify();
            // The thread has reported a panic.
            let _ = thread.join();
        }
        for slot in 0..self.lists.shape().slots {
            self.lists.bump(SlotId(slot));
        }
    }
}
