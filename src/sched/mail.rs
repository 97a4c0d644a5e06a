//! The engine's ends of the two rings to `ctl`, with an inbox in between so that an abort is seen while a
//! step runs.
//!
//! Thread: `engine`. Invariant: events never outgrow the ring, since a turn begins only with room for the
//! most that one turn tells ([`events_per_turn`]).

use crate::ids::{Generation, SlotId, WorkerId};
use crate::limits::COMMANDS_PER_TURN;
use crate::sched::mailbox::{Command, Event};
use crate::stdx::bell::Bell;
use crossbeam_channel as channel;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most events of one turn of an engine whose workers have `slots` slots in all: each request may be told
/// Expecting or Computed, two tokens, Finished and Released, and each command of a turn may end one more request, or empty a cache.
pub const fn events_per_turn(slots: usize) -> usize {
    5 * slots + 2 * COMMANDS_PER_TURN
}

/// Commands in, events out.
#[derive(Debug)]
pub struct Mail {
    commands: channel::Receiver<Command>,
    inbox: VecDeque<Command>,
    events: channel::Sender<Event>,
    bell: Arc<Bell>,
    unread: bool,
}

impl Mail {
    /// The ends of both rings; `bell` wakes `ctl`.
    pub fn new(
        commands: channel::Receiver<Command>,
        events: channel::Sender<Event>,
        bell: Arc<Bell>,
    ) -> Mail {
        let inbox = VecDeque::with_capacity(COMMANDS_PER_TURN);
        Mail { commands, inbox, events, bell, unread: false }
    }

    /// Events that still fit.
    pub fn room(&self) -> usize {
        self.events.capacity().unwrap_or(usize::MAX).saturating_sub(self.events.len())
    }

    /// Moves waiting commands into the inbox, as many as it takes.
    pub fn pull(&mut self) {
        while self.inbox.len() < COMMANDS_PER_TURN
            && let Ok(command) = self.commands.try_recv()
        {
            self.inbox.push_back(command);
        }
    }

    /// The next command of the inbox.
    pub fn take(&mut self) -> Option<Command> {
        self.inbox.pop_front()
    }

    /// The first command of the inbox of which `wanted` makes something, out of its turn.
    pub fn take_early<T>(&mut self, mut wanted: impl FnMut(&Command) -> Option<T>) -> Option<T> {
        let found =
            self.inbox.iter().enumerate().find_map(|(at, command)| Some((at, wanted(command)?)));
        let (at, found) = found?;
        self.inbox.remove(at);
        Some(found)
    }

    /// Whether a command in the inbox aborts this request.
    pub fn aborts(&self, worker: WorkerId, slot: SlotId, generation: Generation) -> bool {
        self.inbox.iter().any(|command| match command {
            Command::Abort { worker: w, slot: s, generation: g, .. } => {
                (*w, *s, *g) == (worker, slot, generation)
            }
            _ => false,
        })
    }

    /// Tells `ctl`; it is woken by [`Mail::flush`].
    pub fn tell(&mut self, event: Event) {
        let told = self.events.try_send(event);
        debug_assert!(
            !matches!(told, Err(channel::TrySendError::Full(_))),
            "events outgrew their ring"
        );
        self.unread = true;
    }

    /// Wakes `ctl` if there is something new.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unread) {
            self.bell.ring();
        }
    }
}
