//! The destination side of all hand-offs of one decode worker.
//!
//! Thread: `move`. A slot's life: Expect (lease taken) → notices → complete, Cancel or the end of
//! its session (lease ended). If the peer writes into this worker's memory, the lease stays after
//! Cancel until Quiet or the end of the session.
//! Invariants: bytes arrive only between Expect and the end of the lease. LeaseEnd with the aux
//! record is in the scheduler's ring before the status word shows Success.

use crate::cause::Cause;
use crate::ids::{Generation, Room, SessionGeneration, SlotId};
use crate::kv::lease::{Lease, MoverRight};
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{DestinationCommand, LeaseEnd};
use crate::transfer::mover::{Links, Report};
use crate::transfer::status::{Move, State};
use crate::transfer::target::SessionId;
use crate::transfer::transport::{DestinationHalf, Landing, Landings, Memory, Notice, SessionLost};
use std::ops::Range;

/// All sessions and slots of one decode worker.
#[derive(Debug)]
pub struct DestinationMover {
    memory: Memory,
    sessions: Vec<Option<Box<dyn DestinationHalf>>>,
    /// No session at this index or above was ever open, so a turn skips them.
    reached: usize,
    /// The last generation of each session.
    generations: Vec<SessionGeneration>,
    live: ExpectedSlots,
}

/// The slots that expect bytes.
#[derive(Debug)]
struct ExpectedSlots {
    links: Links<DestinationCommand>,
    slots: Vec<Option<Expected>>,
    right: MoverRight,
    /// The session that currently delivers notices.
    current: SessionId,
}

#[derive(Debug)]
struct Expected {
    generation: Generation,
    session: SessionId,
    room: Room,
    /// Tokens of the prompt.
    tokens: u32,
    /// The first token that has not arrived. At the beginning it is the first that this worker does
    /// not hold.
    received: u32,
    landing: Landing,
    lease: Lease,
}

impl DestinationMover {
    /// A mover without sessions; `sessions` bounds their number.
    pub fn new(
        links: Links<DestinationCommand>,
        memory: Memory,
        sessions: usize,
        right: MoverRight,
    ) -> DestinationMover {
        let slots = links.status.slots();
        DestinationMover {
            memory,
            sessions: (0..sessions).map(|_| None).collect(),
            reached: 0,
            generations: vec![SessionGeneration(0); sessions],
            live: ExpectedSlots {
                links,
                slots: (0..slots).map(|_| None).collect(),
                right,
                current: SessionId(0),
            },
        }
    }

    /// One turn: commands, then the sessions' arrivals. True if there was work.
    pub fn step(&mut self) -> bool {
        let mut busy = self.take_commands();
        for index in 0..self.reached {
            let Some(half) = self.sessions[index].as_mut() else { continue };
            self.live.current = SessionId(index as u32);
            match half.step(&self.memory, &mut self.live) {
                Ok(moved) => busy |= moved,
                Err(lost) => {
                    let session = SessionId(index as u32);
                    self.close(session, lost);
                    let generation = self.generations[index];
                    self.live.report(Report::Lost { session, generation, cause: lost.cause });
                }
            }
        }
        busy
    }

    /// Publishes to the sources of all sessions whether they must ring the doorbell.
    pub fn park(&mut self, parked: bool) {
        let parked = parked && !is_failpoint_active("sources are not told of a park");
        for half in self.sessions[..self.reached].iter_mut().flatten() {
            half.park(parked);
        }
    }

    /// The memory into which peers write.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The use of a slot that holds its lease.
    pub fn holds(&self, slot: SlotId) -> Option<Generation> {
        self.live.slots[slot.index()].as_ref().map(|expected| expected.generation)
    }

    fn take_commands(&mut self) -> bool {
        let mut busy = false;
        while let Ok(command) = self.live.links.commands.try_recv() {
            self.apply(command);
            busy = true;
        }
        busy
    }

    fn apply(&mut self, command: DestinationCommand) {
        match command {
            DestinationCommand::Open { session, generation, binding } => {
                // An earlier session of this index is over.
                self.close(session, SessionLost::GONE);
                self.generations[session.0 as usize] = generation;
                self.sessions[session.0 as usize] = Some(binding);
                self.reached = self.reached.max(session.0 as usize + 1);
            }
            DestinationCommand::Close { session } => self.close(session, SessionLost::GONE),
            DestinationCommand::Join { session, arrival } => {
                if let Some(half) = self.sessions[session.0 as usize].as_mut() {
                    half.join(arrival);
                }
            }
            DestinationCommand::Expect { slot, generation, session, room, tokens, lease } => {
                let half = self.sessions[session.0 as usize].as_ref();
                let landing = half.map_or(Landing::Moved, |half| half.landing());
                let expected = Expected {
                    generation,
                    session,
                    room,
                    received: tokens.start,
                    tokens: tokens.end,
                    landing,
                    lease,
                };
                self.expect(slot, expected);
            }
            DestinationCommand::Cancel { slot, generation } => {
                let held = self.live.slots[slot.index()].as_ref();
                if let Some(expected) = held.filter(|expected| expected.generation == generation) {
                    let (session, landing) = (expected.session, expected.landing);
                    if let Some(half) = self.sessions[session.0 as usize].as_mut() {
                        half.revoke(slot);
                    }
                    let ends = match landing {
                        Landing::Moved => !is_failpoint_active("cancel keeps the lease"),
                        Landing::Written => {
                            is_failpoint_active("cancel ends a lease that is written to")
                        }
                    };
                    if ends {
                        self.live.end(slot, None);
                    }
                }
            }
            // Quiet can overtake Cancel: the slot was marked Failed before Quiet was sent.
            DestinationCommand::Quiet { slot, generation } => {
                let held = self.live.slots[slot.index()].as_ref();
                let same = held.is_some_and(|expected| expected.generation == generation);
                if same && !self.live.links.status.is_open(slot, generation) {
                    self.live.end(slot, None);
                }
            }
        }
    }

    fn expect(&mut self, slot: SlotId, expected: Expected) {
        let Expected { session, generation, room, landing, received, .. } = expected;
        debug_assert!(self.live.slots[slot.index()].is_none(), "slot {slot} expected twice");
        debug_assert_eq!(expected.lease.slot(), slot, "the lease is the slot's");
        debug_assert!(received < expected.tokens, "a prefix leaves tokens to transfer");
        self.live.slots[slot.index()] = Some(expected);
        self.live.current = session;
        if !self.live.links.status.is_open(slot, generation) {
            // The slot was marked Failed before Expect. Its Cancel is before or behind Expect in
            // the ring. The mover does not know whether Destination was sent; Quiet follows in both
            // cases.
            if landing == Landing::Moved {
                self.live.end(slot, None);
            }
            return;
        }
        match self.sessions[session.0 as usize].as_mut() {
            Some(half) => half.expect(&Notice { slot, generation, room }, received, &mut self.live),
            // The session ended while the scheduler leased the pages.
            None => self.live.fail(slot, Cause::PeerLost),
        }
    }

    /// Ends the session and everything bound to it. Dropping the half unmaps or closes its
    /// transport.
    fn close(&mut self, session: SessionId, lost: SessionLost) {
        let Some(mut half) = self.sessions[session.0 as usize].take() else { return };
        for index in 0..self.live.slots.len() {
            let slot = SlotId(index as u32);
            if self.live.slots[index].as_ref().is_some_and(|expected| expected.session == session) {
                half.revoke(slot);
            }
        }
        // After its half is dropped, no byte of a session can arrive. Only then its leases end.
        match is_failpoint_active("queue pairs outlive their session") {
            true => std::mem::forget(half),
            false => drop(half),
        }
        for index in 0..self.live.slots.len() {
            if let Some(expected) =
                self.live.slots[index].as_mut().filter(|held| held.session == session)
            {
                expected.landing = Landing::Moved;
                let slot = SlotId(index as u32);
                self.live.fail(slot, lost.cause_for(slot));
            }
        }
    }
}

impl ExpectedSlots {
    /// Ends the slot's lease; no byte can arrive in its pages any more.
    fn end(
        &mut self,
        slot: SlotId,
        aux: Option<AuxRecord>,
    ) -> Option<(Generation, Room, SessionId)> {
        let Expected { generation, session, room, lease, .. } = self.slots[slot.index()].take()?;
        let sent = self.links.ends.try_send(LeaseEnd { ended: lease.end(&self.right), aux });
        debug_assert!(sent.is_ok(), "one lease end per slot fits");
        self.links.engine.notify();
        Some((generation, room, session))
    }

    /// Ends the lease and sends its end with the record, then makes the last move.
    fn succeed(&mut self, slot: SlotId, step: Move, aux: AuxRecord) {
        let Some((generation, room, session)) = self.end(slot, Some(aux)) else { return };
        // The move is forbidden if the slot was just marked Failed. Its Cancel then finds no lease
        // to end.
        if self.links.status.advance(slot, generation, step).is_ok() {
            self.report(Report::Arrived { slot, generation, room, session });
        }
        self.links.engine.notify();
    }

    fn report(&self, report: Report) {
        // A full ring means that `ctl` is stuck. Its deadlines then end the affected transfers.
        let _ = self.links.reports.try_send(report);
        self.links.ctl.notify();
    }
}

impl Landings for ExpectedSlots {
    fn current(&self, slot: SlotId) -> Option<Notice> {
        let expected = self.slots.get(slot.index())?.as_ref()?;
        let Expected { generation, room, .. } = *expected;
        (expected.session == self.current).then_some(Notice { slot, generation, room })
    }

    fn expected(&mut self, notice: &Notice) -> Option<Range<u32>> {
        let expected = self.slots.get(notice.slot.index())?.as_ref()?;
        let same = expected.generation == notice.generation
            && expected.room == notice.room
            && expected.session == self.current;
        if !same {
            return None;
        }
        let started = self.links.status.advance(notice.slot, expected.generation, Move::Start);
        let open =
            started.is_ok() || self.links.status.load(notice.slot).state == State::Transferring;
        open.then_some(expected.received..expected.tokens)
    }

    fn landed(&mut self, slot: SlotId, end: u32) {
        if let Some(expected) = self.slots[slot.index()].as_mut() {
            debug_assert!(
                (expected.received..=expected.tokens).contains(&end),
                "KV lands in order, within the prompt"
            );
            expected.received = end;
        }
    }

    fn complete(&mut self, slot: SlotId, aux: AuxRecord) {
        self.succeed(slot, Move::Finish, aux);
    }

    fn lane_ended(&mut self, slot: SlotId, lane: u8, all: u32, aux: &AuxRecord) {
        let Some(expected) = &self.slots[slot.index()] else { return };
        let step = Move::EndLane { lane, all };
        if (self.links.status.load(slot).lanes | 1 << lane) & all == all {
            return self.succeed(slot, step, *aux);
        }
        // The move is forbidden if the slot was just marked Failed. Its Cancel follows.
        let _ = self.links.status.advance(slot, expected.generation, step);
    }

    fn fail(&mut self, slot: SlotId, cause: Cause) {
        let Some(expected) = &self.slots[slot.index()] else { return };
        let generation = expected.generation;
        if expected.landing == Landing::Moved {
            self.end(slot, None);
        }
        if self.links.status.advance(slot, generation, Move::Fail(cause)).is_ok() {
            self.report(Report::Failed { slot, generation, cause });
        }
        self.links.engine.notify();
    }
}
