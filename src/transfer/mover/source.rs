//! The source side of all hand-offs of one prefill worker.
//!
//! Thread: `move`. A slot's life: Begin (lease taken) → Chunks (posted in order, merged while the
//! transport is full) → Done, last byte sent, or Cancel (lease ends).
//! Invariants: a post is checked against the status word in the same step, after every earlier
//! Cancel in the ring. A lease ends exactly once. `ctl` receives every report.

use crate::cause::Cause;
use crate::ids::{Generation, SessionGeneration, SlotId};
use crate::kv::lease::{Lease, MoverRight};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{LeaseEnd, SourceCommand};
use crate::transfer::mover::{Links, Report};
use crate::transfer::status::{Move, State};
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::fake::Fake;
use crate::transfer::transport::{CompletionMode, Memory, Post, SessionLost, SourceHalf};
use crossbeam_channel::TrySendError;
use std::ops::Range;

/// Transport halves by session; the last one belongs to [`SessionId::NOBODY`].
#[derive(Debug)]
struct Sessions(Vec<Option<Box<dyn SourceHalf>>>);

impl Sessions {
    fn half(&mut self, session: SessionId) -> &mut Option<Box<dyn SourceHalf>> {
        let last = self.0.len() - 1;
        &mut self.0[if session == SessionId::NOBODY { last } else { session.0 as usize }]
    }
}

/// All sessions and slots of one prefill worker.
#[derive(Debug)]
pub struct SourceMover {
    links: Links<SourceCommand>,
    memory: Memory,
    sessions: Sessions,
    /// No session at this index or above was ever open, so a turn skips them.
    reached: usize,
    /// The last generation of each session.
    generations: Vec<SessionGeneration>,
    slots: Vec<Option<Transfer>>,
    /// Slots with something to post or to wait for.
    active: Vec<SlotId>,
    /// Completions of the current session.
    completed: Vec<SlotId>,
    right: MoverRight,
}

#[derive(Debug)]
struct Transfer {
    generation: Generation,
    target: Target,
    lease: Lease,
    /// The end of the last chunk.
    handed: Option<u32>,
    /// Tokens and record that the scheduler has sent and that are not posted yet.
    pending: Option<(Range<u32>, Option<AuxRecord>)>,
    /// Cancel was handled.
    cancelled: bool,
    /// The last chunk is posted.
    complete: bool,
    /// Done came: the destination has everything.
    done_came: bool,
}

impl SourceMover {
    /// A mover without sessions; `sessions` bounds their number.
    pub fn new(
        links: Links<SourceCommand>,
        memory: Memory,
        sessions: usize,
        right: MoverRight,
    ) -> SourceMover {
        let slots = links.status.slots();
        let nobody: Option<Box<dyn SourceHalf>> = Some(Box::new(Fake));
        SourceMover {
            memory,
            sessions: Sessions((0..sessions).map(|_| None).chain([nobody]).collect()),
            reached: 0,
            generations: vec![SessionGeneration(0); sessions + 1],
            slots: (0..slots).map(|_| None).collect(),
            active: Vec::with_capacity(slots),
            completed: Vec::with_capacity(slots),
            links,
            right,
        }
    }

    /// One turn: commands, then posts, then completions. True if there was work.
    pub fn step(&mut self) -> bool {
        let mut busy = self.take_commands();
        busy |= self.post_pending();
        busy | self.poll_sessions()
    }

    /// Takes commands while the report ring has room for their reports and for one report of each
    /// slot and session. The room matters after a stall of the mover, because many uses of a slot
    /// can be cancelled before they begin. If the report of a lost session were dropped, the
    /// session would get more transfers, and all of them would fail.
    fn take_commands(&mut self) -> bool {
        let mut busy = false;
        // `ctl` does not wake the mover after reading reports, so a full ring counts as work.
        while self.links.reports.len() < self.slots.len() {
            let Ok(command) = self.links.commands.try_recv() else { return busy };
            self.apply(command);
            busy = true;
        }
        true
    }

    /// Informs the transports of all sessions whether they must wake the mover.
    pub fn park(&mut self, parked: bool) {
        for half in self.sessions.0[..self.reached].iter_mut().flatten() {
            half.park(parked);
        }
    }

    fn apply(&mut self, command: SourceCommand) {
        match command {
            SourceCommand::Open { session, generation, binding } => {
                // An earlier session of this index is over.
                self.close(session, SessionLost::GONE);
                self.generations[session.0 as usize] = generation;
                *self.sessions.half(session) = Some(binding);
                self.reached = self.reached.max(session.0 as usize + 1);
            }
            SourceCommand::Close { session } => self.close(session, SessionLost::GONE),
            SourceCommand::Begin { slot, generation, target, lease } => {
                let transfer = Transfer {
                    generation,
                    target,
                    lease,
                    handed: None,
                    pending: None,
                    cancelled: false,
                    complete: false,
                    done_came: false,
                };
                self.begin(slot, transfer);
            }
            SourceCommand::Chunk { slot, generation, tokens, last } => {
                if let Some(transfer) = self.live(slot, generation) {
                    transfer.add(tokens, last);
                }
            }
            SourceCommand::Cancel { slot, generation } => self.cancel(slot, generation),
            SourceCommand::Done { slot, generation } => self.done(slot, generation),
        }
    }

    /// Takes the lease of a transfer. If the slot was marked Failed before Begin, its Cancel is
    /// before or behind Begin in the ring. Its lease then ends here, and Cancel finds no transfer.
    fn begin(&mut self, slot: SlotId, transfer: Transfer) {
        debug_assert!(self.slots[slot.index()].is_none(), "slot {slot} begun twice");
        let open = self.links.status.is_open(slot, transfer.generation)
            && self.sessions.half(transfer.target.session).is_some();
        if !open {
            let lost = Move::Fail(Cause::PeerLost);
            let _ = self.links.status.advance(slot, transfer.generation, lost);
        }
        debug_assert_eq!(transfer.lease.slot(), slot, "the lease is the slot's");
        debug_assert!(!self.active.contains(&slot), "a slot is active once");
        self.slots[slot.index()] = Some(transfer);
        self.active.push(slot);
        if !open {
            self.end_lease(slot);
        }
    }

    /// The transfer of this use of the slot, if it has begun.
    fn live(&mut self, slot: SlotId, generation: Generation) -> Option<&mut Transfer> {
        self.slots[slot.index()].as_mut().filter(|transfer| transfer.generation == generation)
    }

    /// Cancels a use of a slot. If it never began, it has no lease and no posts, so it is quiet at
    /// once.
    fn cancel(&mut self, slot: SlotId, generation: Generation) {
        match self.live(slot, generation) {
            Some(transfer) => {
                transfer.cancelled = true;
                transfer.pending = None;
                self.try_withdraw(slot);
            }
            None => self.report(Report::Withdrawn { slot, generation }),
        }
    }

    /// Handles the peer's Done. It ends the lease only if no operation of this side still reads the
    /// pages.
    fn done(&mut self, slot: SlotId, generation: Generation) {
        let Some(transfer) = self.live(slot, generation) else { return };
        transfer.done_came = true;
        let session = transfer.target.session;
        let half = self.sessions.half(session).as_ref();
        if half.is_some_and(|half| half.completion() == CompletionMode::Pulled) {
            self.finish(slot);
        }
    }

    fn try_withdraw(&mut self, slot: SlotId) {
        let Some(transfer) = &self.slots[slot.index()] else { return };
        let (generation, session) = (transfer.generation, transfer.target.session);
        let half = self.sessions.half(session).as_mut();
        if half.is_none_or(|half| half.withdraw(slot)) {
            self.withdrawn(slot, generation);
        }
    }

    fn post_pending(&mut self) -> bool {
        let mut posted = false;
        for index in (0..self.active.len()).rev() {
            posted |= self.post(self.active[index]);
        }
        posted
    }

    fn post(&mut self, slot: SlotId) -> bool {
        let Some(transfer) = self.slots[slot.index()].as_mut() else { return false };
        let Some((tokens, last)) = &transfer.pending else { return false };
        let generation = transfer.generation;
        // The state is set before the first post; a slot that has failed posts nothing more.
        let started = self.links.status.advance(slot, generation, Move::Start);
        if started.is_err() && self.links.status.load(slot).state != State::Transferring {
            transfer.pending = None;
            return false;
        }
        let Some(half) = self.sessions.half(transfer.target.session).as_mut() else {
            // The session is closed: `close` has failed the slot, and its Cancel will follow.
            transfer.pending = None;
            return false;
        };
        debug_assert!(
            tokens.start >= transfer.target.prefix,
            "the destination holds these tokens and named no pages for them"
        );
        let post = Post { slot, target: transfer.target, tokens: tokens.clone(), last: *last };
        if half.post(&self.memory, &post).is_err() {
            return false;
        }
        transfer.complete = last.is_some();
        transfer.pending = None;
        if transfer.complete && half.completion() == CompletionMode::Immediate {
            self.finish(slot);
        }
        true
    }

    fn poll_sessions(&mut self) -> bool {
        let mut busy = false;
        for index in 0..self.reached {
            let Some(half) = self.sessions.0[index].as_mut() else { continue };
            let completed = &mut self.completed;
            let stepped = half.step(&self.memory, &mut |slot| completed.push(slot));
            while let Some(slot) = self.completed.pop() {
                self.complete(slot);
            }
            match stepped {
                Ok(moved) => busy |= moved,
                Err(lost) => {
                    let session = SessionId(index as u32);
                    self.close(session, lost);
                    let generation = self.generations[index];
                    self.report(Report::Lost { session, generation, cause: lost.cause });
                }
            }
        }
        busy
    }

    /// Handles a slot without outstanding operations.
    fn complete(&mut self, slot: SlotId) {
        let Some(transfer) = &self.slots[slot.index()] else { return };
        if transfer.cancelled {
            let generation = transfer.generation;
            self.withdrawn(slot, generation);
        } else if transfer.complete {
            self.finish(slot);
        }
    }

    /// Reports that a use of a slot is quiet. The report comes before the end of the lease, because
    /// that end frees the slot for a new use.
    fn withdrawn(&mut self, slot: SlotId, generation: Generation) {
        debug_assert!(
            !self.links.status.is_open(slot, generation),
            "a slot is withdrawn after it has ended"
        );
        self.report(Report::Withdrawn { slot, generation });
        self.end_lease(slot);
    }

    /// Ends a transfer of which the destination has everything: first the lease ends, then the
    /// status word shows Success.
    fn finish(&mut self, slot: SlotId) {
        let Some(transfer) = &self.slots[slot.index()] else { return };
        if transfer.cancelled || !transfer.complete {
            return;
        }
        let generation = transfer.generation;
        self.end_lease(slot);
        // The move is forbidden if the slot was just marked Failed. Its Cancel then finds no
        // transfer.
        let _ = self.links.status.advance(slot, generation, Move::Finish);
        self.links.engine.notify();
        self.links.ctl.notify();
    }

    /// Drops the session, which closes its streams. Fails every transfer bound to it, unless its
    /// destination has everything.
    fn close(&mut self, session: SessionId, lost: SessionLost) {
        *self.sessions.half(session) = None;
        for index in 0..self.slots.len() {
            let Some(transfer) = &self.slots[index] else { continue };
            if transfer.target.session != session {
                continue;
            }
            let (slot, generation) = (SlotId(index as u32), transfer.generation);
            let step = match transfer.done_came && transfer.complete {
                true => Move::Finish,
                false => Move::Fail(lost.cause_for(slot)),
            };
            let _ = self.links.status.advance(slot, generation, step);
            self.end_lease(slot);
        }
        self.links.engine.notify();
    }

    /// Ends the lease of a slot and changes its lease word. A peer that is still copying then sees
    /// that its copy is void.
    fn end_lease(&mut self, slot: SlotId) {
        let Some(transfer) = self.slots[slot.index()].take() else { return };
        self.memory.lists.bump(slot);
        self.active.retain(|&active| active != slot);
        let end = LeaseEnd { ended: transfer.lease.end(&self.right), aux: None };
        let sent = self.links.ends.try_send(end);
        debug_assert!(sent.is_ok(), "one lease end per slot fits");
        self.links.engine.notify();
    }

    fn report(&self, report: Report) {
        let sent = self.links.reports.try_send(report);
        let is_dropped = matches!(sent, Err(TrySendError::Full(_)));
        debug_assert!(!is_dropped, "the ring has room for two reports of each slot");
        self.links.ctl.notify();
    }
}

impl Transfer {
    /// Adds a chunk. Chunks come in order, and chunks that wait because the transport is full are
    /// merged.
    fn add(&mut self, tokens: Range<u32>, last: Option<AuxRecord>) {
        if self.cancelled {
            return;
        }
        // If a chunk were missing, merged chunks would hide the gap, and the destination would use
        // old data of the pages.
        let follows = self.handed.is_none_or(|end| end == tokens.start);
        assert!(follows, "a chunk at {} does not follow the last", tokens.start);
        self.handed = Some(tokens.end);
        self.pending = Some(match self.pending.take() {
            Some((waiting, _)) if !is_failpoint_active("waiting chunk is dropped") => {
                (waiting.start..tokens.end, last)
            }
            _ => (tokens, last),
        });
    }
}
