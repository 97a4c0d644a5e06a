//! The scheduler's ends of the hand-off: [`SourceHandle`] at a prefill worker,
//! [`DestinationHandle`] at a decode worker.
//!
//! Thread: `engine`. No function here blocks or allocates.

use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId};
use crate::kv::lease::Lease;
use crate::kv::page_span::PageSpan;
use crate::stdx::event_count::EventCount;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{Cancel, DestinationCommand, LeaseEnd, SourceCommand};
use crate::transfer::pages::PageLists;
use crate::transfer::status::{Move, SlotStatus, StatusTable};
use crate::transfer::target::{SessionId, Target};
use crossbeam_channel as channel;
use std::ops::Range;
use std::sync::Arc;

/// The ring to the mover has no room now, and nothing has changed. Try again in the next turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingFull;

/// The scheduler's end of a worker's transfers; `C` is its mover's command type.
#[derive(Debug)]
pub struct TransferHandle<C> {
    /// The status table of this worker.
    pub status: Arc<StatusTable>,
    /// Page lists by slot: the pages that peers pull from, or the pages that receive KV.
    pub pages: Arc<PageLists>,
    /// To the mover.
    pub commands: channel::Sender<C>,
    /// From the mover.
    pub ends: channel::Receiver<LeaseEnd>,
    /// Wakes the mover.
    pub bell: Arc<EventCount>,
}

/// A prefill worker's end.
pub type SourceHandle = TransferHandle<SourceCommand>;

/// A decode worker's end.
pub type DestinationHandle = TransferHandle<DestinationCommand>;

impl<C: Cancel> TransferHandle<C> {
    /// The slot's status.
    pub fn status(&self, slot: SlotId) -> SlotStatus {
        self.status.load(slot)
    }

    /// Whether the ring has room for one more command of each kind. Cancel and Quiet always have
    /// room.
    pub fn has_room(&self) -> bool {
        let capacity = self.commands.capacity().unwrap_or(usize::MAX);
        self.commands.len() + 2 * self.status.slots() + 2 < capacity
    }

    /// Marks the slot Failed. If it was open, also sends Cancel in the same ring as all other
    /// commands.
    pub fn fail(&self, slot: SlotId, generation: Generation, cause: Cause) -> bool {
        let failed = self.status.advance(slot, generation, Move::Fail(cause)).is_ok();
        if failed {
            self.send_command(C::cancel(slot, generation));
        }
        failed
    }

    /// The next lease that has ended.
    pub fn poll_end(&self) -> Option<LeaseEnd> {
        self.ends.try_recv().ok()
    }

    fn send_command(&self, command: C) {
        let sent = self.commands.try_send(command);
        debug_assert!(sent.is_ok(), "ring to the mover overflowed");
        self.bell.notify();
    }
}

impl SourceHandle {
    /// Sends the prompt's pages to the mover, before the first chunk. `pages` can lack first ones
    /// that the target does not need. The caller has checked [`SourceHandle::has_room`].
    pub fn begin<'a>(
        &self,
        slot: SlotId,
        generation: Generation,
        target: Target,
        pages: impl IntoIterator<Item = PageSpan<'a>>,
        lease: Lease,
    ) {
        pages.into_iter().for_each(|span| self.pages.store(slot, span));
        self.send_command(SourceCommand::Begin { slot, generation, target, lease });
    }

    /// Gives the KV of `tokens` to the mover, with the aux record if they are the last. The caller
    /// has checked [`SourceHandle::has_room`].
    pub fn chunk(
        &self,
        slot: SlotId,
        generation: Generation,
        tokens: Range<u32>,
        last: Option<AuxRecord>,
    ) {
        debug_assert!(tokens.start <= tokens.end, "tokens are in order");
        self.send_command(SourceCommand::Chunk { slot, generation, tokens, last });
    }
}

impl DestinationHandle {
    /// Leases the pages of `tokens` to the transfer; `pages` lists at least these. Sets
    /// WaitingForInput and sends the command to the mover *before* the caller sends Destination.
    /// False if the slot has failed in the meantime; the mover then ends the lease at once.
    pub fn expect<'a>(
        &self,
        slot: SlotId,
        generation: Generation,
        from: (SessionId, Room),
        tokens: Range<u32>,
        pages: impl IntoIterator<Item = PageSpan<'a>>,
        lease: Lease,
    ) -> bool {
        debug_assert!(tokens.start < tokens.end, "a prefix leaves tokens to transfer");
        pages.into_iter().for_each(|span| self.pages.store(slot, span));
        let (session, room) = from;
        let granted = self.status.advance(slot, generation, Move::Grant).is_ok();
        self.send_command(DestinationCommand::Expect {
            slot,
            generation,
            session,
            room,
            tokens,
            lease,
        });
        granted
    }
}
