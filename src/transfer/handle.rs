//! The scheduler's ends of the hand-off: [`Sender`] at a prefill worker, [`Receiver`] at a decode
//! worker. Thread: `engine`. Nothing here blocks or allocates.

use crate::cause::Cause;
use crate::ids::{Generation, PageId, Room, SlotId};
use crate::kv::lease::Lease;
use crate::stdx::bell::Bell;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{
    Cancel, DestinationCommand, LeaseEnd, SessionId, SourceCommand, Target,
};
use crate::transfer::pages::PageLists;
use crate::transfer::status::{Move, Status, StatusTable};
use crossbeam_channel as channel;
use std::ops::Range;
use std::sync::Arc;

/// The ring to the mover has no room for this now; nothing was done. Try again next turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingFull;

/// The scheduler's end of a worker's transfers; `C` is what its mover is told.
#[derive(Debug)]
pub struct Handle<C> {
    /// Slots of this worker.
    pub status: Arc<StatusTable>,
    /// Page lists by slot: shown to peers that pull, or where this worker wants the KV.
    pub pages: Arc<PageLists>,
    /// To the mover.
    pub commands: channel::Sender<C>,
    /// From the mover.
    pub ends: channel::Receiver<LeaseEnd>,
    /// The mover's.
    pub bell: Arc<Bell>,
}

/// A prefill worker's end.
pub type Sender = Handle<SourceCommand>;

/// A decode worker's end.
pub type Receiver = Handle<DestinationCommand>;

impl<C: Cancel> Handle<C> {
    /// The slot's status.
    pub fn status(&self, slot: SlotId) -> Status {
        self.status.load(slot)
    }

    /// Whether the mover can be told one thing more of each kind; Cancel and Quiet always have room.
    pub fn has_room(&self) -> bool {
        let capacity = self.commands.capacity().unwrap_or(usize::MAX);
        self.commands.len() + 2 * self.status.slots() + 2 < capacity
    }

    /// Marks the slot Failed and, when it was open, sends Cancel down the same ring as everything else.
    pub fn fail(&self, slot: SlotId, generation: Generation, cause: Cause) -> bool {
        let failed = self.status.advance(slot, generation, Move::Fail(cause)).is_ok();
        if failed {
            self.tell(C::cancel(slot, generation));
        }
        failed
    }

    /// The next lease that has ended.
    pub fn poll_end(&self) -> Option<LeaseEnd> {
        self.ends.try_recv().ok()
    }

    fn tell(&self, command: C) {
        let told = self.commands.try_send(command);
        debug_assert!(told.is_ok(), "ring to the mover overflowed");
        self.bell.ring();
    }
}

impl Sender {
    /// Tells the mover which pages the prompt takes. Before the first chunk; [`Sender::has_room`] was asked.
    pub fn begin(
        &self,
        slot: SlotId,
        generation: Generation,
        target: Target,
        pages: &[PageId],
        lease: Lease,
    ) {
        self.pages.store(slot, pages);
        self.tell(SourceCommand::Begin { slot, generation, target, lease });
    }

    /// Hands over KV of `tokens`, with the aux record when they are the last. [`Sender::has_room`] was asked.
    pub fn chunk(
        &self,
        slot: SlotId,
        generation: Generation,
        tokens: Range<u32>,
        last: Option<AuxRecord>,
    ) {
        self.tell(SourceCommand::Chunk { slot, generation, tokens, last });
    }
}

impl Receiver {
    /// Leases what `tokens` take of `pages`, which are those of the whole prompt, to the transfer: sets WaitingForInput
    /// and tells the mover, *before* the caller lets Destination leave. False when the slot has failed
    /// meanwhile; the mover then ends the lease at once.
    pub fn expect(
        &self,
        slot: SlotId,
        generation: Generation,
        from: (SessionId, Room),
        tokens: Range<u32>,
        pages: &[PageId],
        lease: Lease,
    ) -> bool {
        self.pages.store(slot, pages);
        let (session, room) = from;
        let granted = self.status.advance(slot, generation, Move::Grant).is_ok();
        self.tell(DestinationCommand::Expect { slot, generation, session, room, tokens, lease });
        granted
    }
}
