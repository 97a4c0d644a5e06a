//! Fault injection for any transport. As the script of a test says, it holds, delays, drops,
//! repeats, reorders or changes posts, ends the session, or dies.
//!
//! It wraps either half. It injects only faults that a transport can have. Invariants, with any
//! script: a source's slot completes or is withdrawn only if none of its posts waits here.

use crate::ids::SlotId;
use crate::transfer::transport::{
    Arrival, CompletionMode, DestinationHalf, Full, Landing, Landings, Memory, Notice, Post,
    SessionLost, SourceHalf,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The active faults. Default: none.
#[derive(Clone, Copy, Default, Debug)]
pub struct Faults {
    /// Posts of a source wait, and arrivals at a destination stay unread.
    pub hold: bool,
    /// Number of steps by which each post, or each look at arrivals, is delayed.
    pub delay: u64,
    /// Number of next posts that are lost.
    pub drop: u32,
    /// Number of next posts that are posted twice.
    pub duplicate: u32,
    /// Of the waiting posts, those of the youngest slot go first.
    pub reorder: bool,
    /// Changes each post: another slot, tokens, a byte of the record.
    pub spoil: Option<fn(&mut Post)>,
    /// The session is lost after this many more steps.
    pub fail_after: Option<u64>,
    /// The half is gone and its streams are closed, without a report.
    pub dead: bool,
}

/// The test's handle.
#[derive(Clone, Default, Debug)]
pub struct Script(Arc<Mutex<Faults>>);

impl Script {
    /// A script without faults.
    pub fn new() -> Script {
        Script::default()
    }

    /// Changes the faults.
    pub fn set(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, Faults> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Capacity for waiting posts.
const WAITING: usize = 64;

/// A half with injected faults.
#[derive(Debug)]
pub struct Faulty<T> {
    /// None: dead.
    inner: Option<T>,
    script: Script,
    completion: CompletionMode,
    /// Posts, and the step from which each can pass.
    waiting: VecDeque<(u64, Post)>,
    steps: u64,
}

impl<T: SourceHalf> Faulty<T> {
    /// A source's half.
    pub fn source(inner: T, script: Script) -> Faulty<T> {
        let completion = inner.completion();
        Faulty {
            inner: Some(inner),
            script,
            completion,
            waiting: VecDeque::with_capacity(WAITING),
            steps: 0,
        }
    }
}

impl<T: DestinationHalf> Faulty<T> {
    /// A destination's half.
    pub fn destination(inner: T, script: Script) -> Faulty<T> {
        let completion = CompletionMode::Immediate;
        Faulty {
            inner: Some(inner),
            script,
            completion,
            waiting: VecDeque::with_capacity(WAITING),
            steps: 0,
        }
    }
}

impl<T> Faulty<T> {
    /// Begins a step, and returns the faults for it.
    fn turn(&mut self) -> Result<Faults, SessionLost> {
        self.steps += 1;
        let mut faults = self.script.lock();
        match &mut faults.fail_after {
            Some(0) => return Err(SessionLost::GONE),
            Some(left) => *left -= 1,
            None => {}
        }
        if faults.dead {
            self.inner = None;
            self.waiting.clear();
        }
        Ok(*faults)
    }

    /// The next post that can pass. Posts of one slot keep their order.
    fn next_due(&self, faults: &Faults) -> Option<usize> {
        let due = |index: usize| {
            let (from, post) = &self.waiting[index];
            let first = self.waiting.iter().take(index).all(|(_, other)| other.slot != post.slot);
            *from <= self.steps && first
        };
        let mut indices = 0..self.waiting.len();
        if faults.reorder {
            indices.rfind(|&index| due(index))
        } else {
            indices.find(|&index| due(index))
        }
    }
}

impl<T: SourceHalf> SourceHalf for Faulty<T> {
    fn completion(&self) -> CompletionMode {
        self.completion
    }

    fn post(&mut self, _memory: &Memory, post: &Post) -> Result<(), Full> {
        let mut faults = self.script.lock();
        let mut post = post.clone();
        if let Some(spoil) = faults.spoil {
            spoil(&mut post);
        }
        let due = self.steps + faults.delay;
        if faults.drop > 0 {
            faults.drop -= 1;
            return Ok(());
        }
        if faults.duplicate > 0 {
            faults.duplicate -= 1;
            self.waiting.push_back((due, post.clone()));
        }
        self.waiting.push_back((due, post));
        Ok(())
    }

    fn step(
        &mut self,
        memory: &Memory,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        let faults = self.turn()?;
        let Some(inner) = self.inner.as_mut().filter(|_| !faults.hold) else { return Ok(false) };
        let moved = inner.step(memory, &mut |slot| {
            if self.waiting.iter().all(|(_, post)| post.slot != slot) {
                completed(slot);
            }
        })?;
        let mut posted = false;
        while let Some(index) = self.next_due(&faults) {
            let post = &self.waiting[index].1;
            if self.inner.as_mut().is_none_or(|inner| inner.post(memory, post).is_err()) {
                break;
            }
            self.waiting.remove(index);
            posted = true;
        }
        Ok(moved | posted | !self.waiting.is_empty())
    }

    fn withdraw(&mut self, slot: SlotId) -> bool {
        self.waiting.retain(|(_, post)| post.slot != slot);
        self.inner.as_mut().is_none_or(|inner| inner.withdraw(slot))
    }

    fn park(&mut self, parked: bool) {
        if let Some(inner) = &mut self.inner {
            inner.park(parked);
        }
    }
}

impl<T: DestinationHalf> DestinationHalf for Faulty<T> {
    fn landing(&self) -> Landing {
        self.inner.as_ref().map_or(Landing::Moved, DestinationHalf::landing)
    }

    fn join(&mut self, arrival: Arrival) {
        if let Some(inner) = &mut self.inner {
            inner.join(arrival);
        }
    }

    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost> {
        let faults = self.turn()?;
        let late = faults.hold || !self.steps.is_multiple_of(faults.delay + 1);
        let Some(inner) = self.inner.as_mut().filter(|_| !late) else { return Ok(false) };
        inner.step(memory, landings)
    }

    fn revoke(&mut self, slot: SlotId) {
        if let Some(inner) = &mut self.inner {
            inner.revoke(slot);
        }
    }

    fn expect(&mut self, notice: &Notice, first: u32, landings: &mut dyn Landings) {
        if let Some(inner) = &mut self.inner {
            inner.expect(notice, first, landings);
        }
    }

    fn park(&mut self, parked: bool) {
        if let Some(inner) = &mut self.inner {
            inner.park(parked);
        }
    }
}
