//! The engine's ends of the two rings to `ctl`, and an inbox for commands. With the inbox, the
//! engine can find an abort while a step runs.
//!
//! Thread: `engine`.
//! Invariants: events never overflow the ring. A turn begins only with room for its maximum of
//! events ([`events_per_turn`]).

use crate::ids::{Generation, SlotId, WorkerId};
use crate::limits::COMMANDS_PER_TURN;
use crate::sched::messages::{EngineCommand, EngineEvent};
use crate::stdx::event_count::EventCount;
use crate::transfer::answer::TransferAnswer;
use crossbeam_channel as channel;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most events of one turn of an engine with `slots` slots in all its workers. Each request may
/// send Expecting or Computed, two tokens, Finished and Released. Each command of a turn may end
/// one more request, or flush a cache.
pub const fn events_per_turn(slots: usize) -> usize {
    5 * slots + 2 * COMMANDS_PER_TURN
}

/// Commands in, events out.
#[derive(Debug)]
pub struct EngineChannel {
    commands: channel::Receiver<EngineCommand>,
    inbox: VecDeque<EngineCommand>,
    events: channel::Sender<EngineEvent>,
    bell: Arc<EventCount>,
    unread: bool,
}

impl EngineChannel {
    /// The ends of both rings. `bell` wakes `ctl`.
    pub fn new(
        commands: channel::Receiver<EngineCommand>,
        events: channel::Sender<EngineEvent>,
        bell: Arc<EventCount>,
    ) -> EngineChannel {
        let inbox = VecDeque::with_capacity(COMMANDS_PER_TURN);
        EngineChannel { commands, inbox, events, bell, unread: false }
    }

    /// Where its events go, for checks.
    pub fn events(&self) -> &channel::Sender<EngineEvent> {
        &self.events
    }

    /// Number of events that still fit.
    pub fn free_event_places(&self) -> usize {
        self.events.capacity().unwrap_or(usize::MAX).saturating_sub(self.events.len())
    }

    /// Commands that no step has taken, for checks.
    pub fn waiting_commands(&self) -> usize {
        self.commands.len() + self.inbox.len()
    }

    /// Moves waiting commands into the inbox until it is full.
    pub fn pull_commands(&mut self) {
        while self.inbox.len() < COMMANDS_PER_TURN
            && let Ok(command) = self.commands.try_recv()
        {
            self.inbox.push_back(command);
        }
    }

    /// The next command of the inbox.
    pub fn take_command(&mut self) -> Option<EngineCommand> {
        self.inbox.pop_front()
    }

    /// Takes the first command in the inbox for which `wanted` returns a value, before earlier
    /// commands.
    pub fn take_early<T>(
        &mut self,
        mut wanted: impl FnMut(&EngineCommand) -> Option<T>,
    ) -> Option<T> {
        let found =
            self.inbox.iter().enumerate().find_map(|(at, command)| Some((at, wanted(command)?)));
        let (at, found) = found?;
        self.inbox.remove(at);
        Some(found)
    }

    /// Whether a command in the inbox aborts this request.
    pub fn aborts(&self, worker: WorkerId, slot: SlotId, generation: Generation) -> bool {
        self.inbox.iter().any(|command| match command {
            EngineCommand::Answer(TransferAnswer::Abort {
                worker: w,
                slot: s,
                generation: g,
                ..
            }) => (*w, *s, *g) == (worker, slot, generation),
            _ => false,
        })
    }

    /// Sends an event to `ctl`. [`EngineChannel::flush`] wakes it.
    pub fn send_event(&mut self, event: impl Into<EngineEvent>) {
        let sent = self.events.try_send(event.into());
        debug_assert!(
            !matches!(sent, Err(channel::TrySendError::Full(_))),
            "events outgrew their ring"
        );
        self.unread = true;
    }

    /// Wakes `ctl` if there are new events.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unread) {
            self.bell.notify();
        }
    }
}
