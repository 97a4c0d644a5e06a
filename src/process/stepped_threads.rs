//! The threads of a worker, stepped by a caller: the simulator. They take the same steps as the
//! threads that `Threads::start` starts, and they park and wake by the same rules.
//!
//! Thread: the caller's. Invariant: a parked mover, poster or poller takes no step until its bell,
//! its doorbell, a NIC or a lane wakes it. It parks without a time limit, so a lost wake-up shows.
//! A lost wake-up of the engine only costs time.

use super::ProcessError;
use super::model::LoadedModel;
use super::threads::{self, RoleThreads, ThreadParts};
use crate::ids::{Generation, SlotId};
use crate::kv::pool::PagePool;
use crate::model::forward::Forward;
use crate::sched::engine::{Engine, EngineLoop, WAITING_PARK};
use crate::sched::masks::MaskWorker;
use crate::sched::messages::EngineEvent;
use crate::sched::worker::WriteLease;
use crate::stdx::event_count::EventCount;
use crate::transfer::event_loop::{EventLoop, LoopTask, NextStep, Waiter};
use crate::transfer::mover::Mover;
use crate::transfer::transport::Memory;
use crate::transfer::transport::rdma::{Poller, Poster, Split};
use crossbeam_channel::Sender;
use std::sync::Arc;
use std::time::Instant;

/// An idle engine parks this many times as long as in production, so that a run has fewer turns.
const IDLE_STRETCH: u32 = 10;

/// An engine, a mover, and the posters and pollers of NICs, without threads.
pub struct SteppedThreads {
    engine: Engine,
    engine_loop: EngineLoop,
    engine_bell: Arc<EventCount>,
    engine_steps: u64,
    /// The end of the engine's park.
    engine_parks_until: Option<Instant>,
    masks: MaskWorker,
    mover: SteppedLoop<Mover>,
    nics: Vec<(SteppedLoop<Poster>, SteppedLoop<Poller>)>,
}

/// The loop of a data-plane thread.
struct SteppedLoop<T> {
    task: T,
    event_loop: EventLoop,
    waiter: Waiter,
    is_parked: bool,
}

impl<T: LoopTask> SteppedLoop<T> {
    fn new((task, waiter): (T, Waiter)) -> SteppedLoop<T> {
        SteppedLoop { task, event_loop: waiter.event_loop(), waiter, is_parked: false }
    }

    /// Takes a step, unless it parks and nothing wakes it. Returns whether it parks.
    fn step(&mut self, has_ready_lane: bool) -> bool {
        let SteppedLoop { task, event_loop, waiter, is_parked } = self;
        if *is_parked {
            if !has_ready_lane && !waiter.is_woken() {
                return true;
            }
            waiter.resume(event_loop, task);
            *is_parked = false;
        }
        match event_loop.step(task, &waiter.bell) {
            NextStep::Turn | NextStep::Spin => {}
            NextStep::Resume => waiter.resume(event_loop, task),
            NextStep::Park => *is_parked = true,
        }
        *is_parked
    }

    fn is_woken(&self) -> bool {
        self.is_parked && self.waiter.is_woken()
    }

    fn stays_parked(&self) -> bool {
        self.is_parked && !self.waiter.is_woken()
    }
}

impl RoleThreads for SteppedThreads {
    fn start(parts: ThreadParts, loaded: &LoadedModel) -> Result<SteppedThreads, ProcessError> {
        let stepped = |Split { poster, poller, .. }: Split| {
            (SteppedLoop::new(poster), SteppedLoop::new(poller))
        };
        Ok(SteppedThreads {
            engine: parts.engine,
            engine_loop: threads::engine_loop(loaded),
            engine_bell: parts.engine_bell,
            engine_steps: 0,
            engine_parks_until: None,
            masks: parts.masks,
            mover: SteppedLoop::new((parts.mover, parts.waiter)),
            nics: parts.splits.into_iter().map(stepped).collect(),
        })
    }

    fn stop(self) -> Result<Box<dyn Forward>, ProcessError> {
        Ok(self.engine.into_forward())
    }
}

impl SteppedThreads {
    /// Takes a turn of the engine, unless it parks. Returns the end of its park, or `None` if it
    /// has computed. `now` is the time of its clock.
    pub fn step_engine(&mut self, now: Instant) -> Option<Instant> {
        if let Some(until) = self.engine_parks_until
            && now < until
            && self.engine_bell.is_parked()
        {
            return Some(until);
        }
        self.engine_bell.cancel_wait();
        self.engine_steps += 1;
        let park = self.engine_loop.step(&mut self.engine, &self.engine_bell);
        let stretch = |park| if park > WAITING_PARK { park * IDLE_STRETCH } else { park };
        self.engine_parks_until = park.map(|park| now + stretch(park));
        self.engine_parks_until
    }

    /// Computes all masks that are asked for.
    pub fn step_masks(&mut self) {
        while self.masks.step() {}
    }

    /// Takes a step of the mover's loop, unless it parks. `has_ready_lane` says whether a lane
    /// wakes it. Returns whether it parks.
    pub fn step_mover(&mut self, has_ready_lane: bool) -> bool {
        self.mover.step(has_ready_lane)
    }

    /// Takes a step of each poster and poller. Returns whether all park.
    pub fn step_nics(&mut self) -> bool {
        let step = |parked, (poster, poller): &mut (SteppedLoop<Poster>, SteppedLoop<Poller>)| {
            let (post, poll) = (poster.step(false), poller.step(false));
            parked && post && poll
        };
        self.nics.iter_mut().fold(true, step)
    }

    /// Whether the mover, the posters and the pollers all park, and nothing but a lane wakes one.
    pub fn does_data_stay_parked(&self) -> bool {
        let mut nics = self.nics.iter();
        self.mover.stays_parked()
            && nics.all(|(poster, poller)| poster.stays_parked() && poller.stays_parked())
    }

    /// Whether the engine parks and must wake.
    pub fn is_engine_woken(&self) -> bool {
        self.engine_parks_until.is_some() && !self.engine_bell.is_parked()
    }

    /// Whether the mover, a poster or a poller parks and must wake, lanes apart.
    pub fn is_data_woken(&self) -> bool {
        let mut nics = self.nics.iter();
        self.mover.is_woken() || nics.any(|(poster, poller)| poster.is_woken() || poller.is_woken())
    }

    /// The KV memory of a decode worker, into which its peers write.
    pub fn destination(&self) -> Option<&Memory> {
        self.mover.task.destinations.first().map(|destination| destination.memory())
    }

    /// Where the engine's events go.
    pub fn engine_events(&self) -> &Sender<EngineEvent> {
        self.engine.events()
    }

    /// The KV pages of each worker.
    pub fn pools(&self) -> impl Iterator<Item = &PagePool> {
        self.engine.pools()
    }

    /// The pages into which transfers write, as the scheduler knows them.
    pub fn write_leases(&self) -> Vec<WriteLease<'_>> {
        self.engine.write_leases()
    }

    /// Steps that the engine has taken.
    pub fn engine_steps(&self) -> u64 {
        self.engine_steps
    }

    /// Commands that no step of the engine has taken.
    pub fn waiting_commands(&self) -> usize {
        self.engine.waiting_commands()
    }

    /// Whether this use of a slot has a lease at the mover, as the scheduler knows it.
    pub fn has_lease(&self, slot: SlotId, generation: Generation) -> bool {
        self.engine.has_lease(slot, generation)
    }

    /// The use of a slot for which the mover holds the lease.
    pub fn held_lease(&self, slot: SlotId) -> Option<Generation> {
        self.mover.task.destinations.first()?.holds(slot)
    }
}
