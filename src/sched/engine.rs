//! The engine: one thread that steps its workers in turn.
//!
//! Owns: the workers, the model, the sampler, one batch, the ends of the rings.
//! Thread: `engine`.
//! Invariants: a turn begins only with room for all its events and takes a bounded number of
//! commands. It neither allocates nor frees: boxes come from `ctl` and return to it.
//! Not here: notifications to the engine (`ctl`, the movers), the team of compute threads
//! (`forward`).

use crate::ids::{Generation, SlotId};
use crate::kv::pool::PagePool;
use crate::model::forward::Forward;
use crate::model::forward::batch::Batch;
use crate::model::sampler::Sampler;
use crate::sched::channel::{EngineChannel, events_per_turn};
use crate::sched::config::SchedConfig;
use crate::sched::messages::EngineEvent;
use crate::sched::worker::{Activity, TurnContext, Worker, WriteLease};
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::seal::seal_thread;
use crossbeam_channel::Sender;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest sleep while requests wait. Every event comes with a notification. This limits how late a
/// deadline is noticed.
pub const WAITING_PARK: Duration = Duration::from_millis(1);
/// Longest sleep of an engine without requests, so that its progress counter keeps moving.
const IDLE_PARK: Duration = Duration::from_millis(100);

/// Steps its workers.
pub struct Engine {
    workers: Vec<Box<dyn Worker>>,
    forward: Box<dyn Forward>,
    sampler: Sampler,
    batch: Batch,
    channel: EngineChannel,
    clock: Box<dyn Fn() -> Instant + Send>,
    progress: Arc<AtomicU64>,
    /// Most events of a turn.
    events: usize,
}

impl Engine {
    /// Makes an engine. Workers are stepped in the given order: prefill before decode, so that a
    /// chunk's last KV leaves early. `forward` accepts batches of [`SchedConfig::batch_limits`].
    /// `clock` gives the time inside a turn ([`Instant::now`] except in tests).
    pub fn new(
        config: &SchedConfig,
        workers: Vec<Box<dyn Worker>>,
        forward: Box<dyn Forward>,
        channel: EngineChannel,
        clock: Box<dyn Fn() -> Instant + Send>,
    ) -> Engine {
        let slots = workers.iter().map(|worker| worker.slots()).sum();
        Engine {
            workers,
            forward,
            sampler: Sampler::new(config.vocab as usize),
            batch: Batch::new(config.batch_limits()),
            channel,
            clock,
            progress: Arc::default(),
            events: events_per_turn(slots),
        }
    }

    /// The time of its clock.
    pub fn now(&self) -> Instant {
        (self.clock)()
    }

    /// Counts turns and layers. If the count does not change, the engine hangs.
    pub fn progress(&self) -> &Arc<AtomicU64> {
        &self.progress
    }

    /// Whether this use of a slot has a lease at the mover, for checks.
    pub fn has_lease(&self, slot: SlotId, generation: Generation) -> bool {
        self.workers.iter().any(|worker| worker.has_lease(slot, generation))
    }

    /// Commands that no step has taken, for checks.
    pub fn waiting_commands(&self) -> usize {
        self.channel.waiting_commands()
    }

    /// Where its events go, for checks.
    pub fn events(&self) -> &Sender<EngineEvent> {
        self.channel.events()
    }

    /// The KV pages of each worker, for checks.
    pub fn pools(&self) -> impl Iterator<Item = &PagePool> {
        self.workers.iter().map(|worker| worker.pool())
    }

    /// The pages into which transfers write, for checks.
    pub fn write_leases(&self) -> Vec<WriteLease<'_>> {
        self.workers.iter().flat_map(|worker| worker.write_leases()).collect()
    }

    /// Ends the workers and returns the model for another engine.
    pub fn into_forward(self) -> Box<dyn Forward> {
        self.forward
    }

    /// One turn: commands, then one step of each worker.
    pub fn step(&mut self, now: Instant) -> Activity {
        self.progress.fetch_add(1, Ordering::Relaxed);
        if self.channel.free_event_places() < self.events {
            return Activity::Waiting;
        }
        let is_late = is_failpoint_active("commands are taken after the step");
        let mut activity = if is_late { Activity::Idle } else { self.take_commands(now) };
        for worker in &mut self.workers {
            let mut turn = TurnContext {
                now,
                forward: &mut *self.forward,
                batch: &mut self.batch,
                sampler: &mut self.sampler,
                channel: &mut self.channel,
                clock: &*self.clock,
                progress: &self.progress,
            };
            activity = activity.max(worker.step(&mut turn));
            self.channel.flush();
        }
        if is_late {
            activity = activity.max(self.take_commands(now));
        }
        // Most steps of an idle engine change no page.
        if cfg!(debug_assertions) && activity != Activity::Idle {
            self.pools().for_each(PagePool::invariants);
        }
        activity
    }

    fn take_commands(&mut self, now: Instant) -> Activity {
        self.channel.pull_commands();
        let mut activity = Activity::Idle;
        while let Some(command) = self.channel.take_command() {
            activity = Activity::Busy;
            let id = command.worker();
            match self.workers.iter_mut().find(|worker| worker.id() == id) {
                Some(worker) => worker.handle_command(command, now, &mut self.channel),
                None => debug_assert!(false, "command for worker {id}, which is not here"),
            }
        }
        activity
    }
}

/// The state of the engine's thread. It does not contain the thread and its sleep, so that a
/// simulation can run the same steps.
#[derive(Debug)]
pub struct EngineLoop {
    spins: u32,
    /// Turns without work, one after the other.
    empty: u32,
}

impl EngineLoop {
    /// A loop that takes `spins` turns without work before it parks; 0 if threads outnumber cores.
    pub fn new(spins: u32) -> EngineLoop {
        EngineLoop { spins, empty: 0 }
    }

    /// Takes a turn. Returns how long the thread parks; `bell` ends the park. `None`: it does not
    /// park. The thread then calls [`EventCount::cancel_wait`].
    pub fn step(&mut self, engine: &mut Engine, bell: &EventCount) -> Option<Duration> {
        if self.empty >= self.spins {
            bell.prepare_wait();
        }
        // After the announcement the engine must look for work once more. This turn does so.
        let park = match engine.step(engine.now()) {
            Activity::Busy => {
                self.empty = 0;
                return None;
            }
            Activity::Waiting => WAITING_PARK,
            Activity::Idle => IDLE_PARK,
        };
        if self.empty < self.spins {
            self.empty += 1;
            return None;
        }
        Some(park)
    }
}

/// Runs the engine's thread until `stop`. `bell` must unpark this thread.
pub fn run(engine: &mut Engine, bell: &EventCount, stop: &AtomicBool, mut round: EngineLoop) {
    let _seal = seal_thread();
    while !stop.load(Ordering::Acquire) {
        if let Some(park) = round.step(engine, bell) {
            thread::park_timeout(park);
        }
        bell.cancel_wait();
        std::hint::spin_loop();
    }
}
