//! A prefill worker's side of the protocol: sessions that destinations announce, and rooms in which
//! both legs meet. Mirrors [`super::destination`].

mod sessions;

use crate::cause::Cause;
use crate::ids::{DecodeAllocation, PageId, Room, SessionGeneration, SlotId};
use crate::kv::groups::GroupCounts;
use crate::stdx::budget::BudgetShare;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::{HashMap, HashSet};
use crate::transfer::command::SourceCommand;
use crate::transfer::manager::choice::TransportChoice;
use crate::transfer::manager::identity::{Mismatch, WorkerIdentity};
use crate::transfer::manager::rooms::{
    AbortOutcome, ArriveOutcome, DestinationPages, DestinationRequest, EnterOutcome, MatchedLegs,
    Prompt, Rooms, Slot,
};
use crate::transfer::mover::Report;
use crate::transfer::plan::Template;
use crate::transfer::status::{Move, State, StatusTable};
use crate::transfer::target::{SessionId, Target};
use crate::wire::message::{
    Abort, AbortAck, Announce, Destination, Done, Interest, Message, PromptRecord, Ready, Status,
    TransferId, Transport,
};
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Effects of the protocol. `L` names a link to a peer.
pub trait SourceEffects<L> {
    /// Sends a message over a link.
    fn send(&mut self, link: L, message: &Message<'_>);
    /// Sends a command to the worker's mover.
    fn mover(&mut self, command: SourceCommand);
    /// Sets up this side of a transport; [`SourceManager::bound`] is called with the result.
    fn bind(&mut self, link: L, session: SessionId, how: SourceSetup<'_>);
    /// Reports to the scheduler that a slot's destination is known. If the source writes the KV,
    /// `pages` are the destination's pages for the prompt's pages from index `first` on.
    fn granted(&mut self, slot: Slot, target: Target, first: usize, pages: &[PageId]);
    /// Reports to the scheduler that a Destination will follow, so that the slot can be computed.
    fn awaited(&mut self, slot: Slot);
    /// Ends a link.
    fn hang_up(&mut self, link: L);
    /// Reports to the scheduler that a slot has failed; it is marked already.
    fn failed(&mut self, slot: Slot, cause: Cause);
    /// Logs that two workers are not compatible.
    fn refused(&mut self, link: L, mismatch: &Mismatch);
}

/// The parameters of a transport.
#[derive(Debug)]
pub struct SourceSetup<'a> {
    /// The transport and the reason.
    pub choice: TransportChoice,
    /// The destination's Announce.
    pub announce: &'a Announce,
    /// The plan of the session.
    pub template: Template,
}

/// The logprobs of a prompt, until its destination is known.
#[derive(Debug)]
pub struct HeldRecord {
    /// The payload of the message.
    pub bytes: Vec<u8>,
    /// Its share of the memory for such records, if there was so much.
    pub memory: Option<BudgetShare>,
}

impl HeldRecord {
    fn message(&self, id: TransferId) -> Message<'_> {
        Message::PromptRecord(PromptRecord { id, bytes: &self.bytes })
    }
}

/// A session that a destination has announced.
#[derive(Debug)]
struct Session<L> {
    link: L,
    generation: SessionGeneration,
    transport: Transport,
    page_size: u32,
    pages: u32,
    slots: u32,
    /// The generation of the session's index at the mover.
    mover_generation: SessionGeneration,
}

/// All sessions and rooms of one prefill worker.
#[derive(Debug)]
pub struct SourceManager<L> {
    identity: WorkerIdentity,
    allowed: Vec<Transport>,
    allocation: DecodeAllocation,
    status: Arc<StatusTable>,
    sessions: Vec<Option<Session<L>>>,
    by_link: HashMap<L, SessionId>,
    rooms: Rooms<L>,
    /// Logprobs of prompts that have no Destination and no Interest yet.
    records: HashMap<Slot, HeldRecord>,
    /// Number of sessions so far. It makes each use of an index unique.
    begun: SessionGeneration,
}

impl<L: Copy + Eq + Hash> SourceManager<L> {
    /// A worker without sessions. `allowed` lists transports in order of preference. Destinations
    /// get `allocation`. `sessions` bounds the number of sessions.
    pub fn new(
        identity: WorkerIdentity,
        allowed: Vec<Transport>,
        allocation: DecodeAllocation,
        status: Arc<StatusTable>,
        sessions: usize,
    ) -> Self {
        SourceManager {
            identity,
            allowed,
            allocation,
            status,
            sessions: (0..sessions).map(|_| None).collect(),
            by_link: HashMap::default(),
            rooms: Rooms::default(),
            records: HashMap::default(),
            begun: SessionGeneration(0),
        }
    }

    /// Adds a request. Its slot is in Bootstrapping. An error ends the request.
    pub fn enter(
        &mut self,
        room: Room,
        slot: Slot,
        prompt: Prompt,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) -> Result<(), Cause> {
        let generation = self.status.load(slot.id).generation;
        debug_assert_eq!(generation, slot.generation, "a request enters in its use of a slot");
        match self.rooms.enter(room, slot, prompt, now) {
            EnterOutcome::Waits => Ok(()),
            EnterOutcome::Meets(met) => {
                self.meet(met, now, effects);
                Ok(())
            }
            EnterOutcome::Differs(wanted) => {
                self.turn_down(&wanted, Cause::Mismatch, effects);
                Err(Cause::Mismatch)
            }
            EnterOutcome::Refused(cause) => Err(cause),
        }
    }

    /// Whether the Destination or Interest of a request has arrived.
    pub fn has_destination_request(&self, slot: Slot) -> bool {
        self.rooms.partner(slot).is_some()
    }

    /// Handles a prompt in `slot` that is completely computed. If the destination has sent only an
    /// Interest, sends Ready; its Destination follows.
    pub fn computed(&mut self, slot: Slot, effects: &mut impl SourceEffects<L>) {
        let interested = self.rooms.partner(slot).filter(|(_, wanted)| wanted.place.is_none());
        if let Some((room, wanted)) =
            interested.filter(|_| !is_failpoint_active("ready is not told"))
        {
            effects.send(wanted.link, &Message::Ready(Ready { id: transfer_id(room, &wanted) }));
        }
    }

    /// Sends the logprobs of a prompt in `slot` to its destination, as soon as that is known.
    pub fn send_record(
        &mut self,
        slot: Slot,
        record: HeldRecord,
        effects: &mut impl SourceEffects<L>,
    ) {
        debug_assert!(!self.records.contains_key(&slot), "a prompt has one record");
        match self.rooms.partner(slot) {
            Some((room, wanted)) => {
                effects.send(wanted.link, &record.message(transfer_id(room, &wanted)))
            }
            None => drop(self.records.insert(slot, record)),
        }
    }

    /// Removes a request that has ended here. Sends a failure to the other side, if there is one.
    pub fn leave(
        &mut self,
        slot: Slot,
        failure: Option<Cause>,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        if let (Some(cause), Some((room, wanted))) = (failure, self.rooms.partner(slot)) {
            let id = transfer_id(room, &wanted);
            let status = Status { id, state: State::Failed as u8, cause: Some(cause) };
            effects.send(wanted.link, &Message::Status(status));
        }
        self.records.remove(&slot);
        let status = self.status.load(slot.id);
        let complete = status.generation == slot.generation && status.state == State::Success;
        if !is_failpoint_active("room stays after its request") {
            self.rooms.leave(slot, complete, now);
        }
    }

    /// Handles a message about sessions and transfers.
    pub fn receive(
        &mut self,
        link: L,
        message: &Message<'_>,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        match message {
            Message::Announce(announce) => self.announce(link, announce, effects),
            Message::Destination(destination) => self.destination(link, destination, now, effects),
            Message::Interest(interest) => self.interest(link, interest, now, effects),
            Message::Abort(abort) => self.abort(link, abort, now, effects),
            Message::Done(done) => self.done(link, done, effects),
            // The other messages are for a destination, or for the link itself.
            _ => {}
        }
    }

    /// Handles a report of the mover.
    pub fn report(&mut self, report: Report, now: Instant, effects: &mut impl SourceEffects<L>) {
        match report {
            Report::Withdrawn { slot, generation } => {
                if let Some((room, wanted)) =
                    self.rooms.withdrawn(Slot { id: slot, generation }, now)
                {
                    let cause = self.status.load(slot).cause.unwrap_or(Cause::Internal);
                    let ack = AbortAck { id: transfer_id(room, &wanted), quiet: true, cause };
                    effects.send(wanted.link, &Message::AbortAck(ack));
                }
            }
            Report::Lost { session, generation, .. } => {
                let lost = self.sessions[session.0 as usize].as_ref();
                if let Some(lost) = lost.filter(|lost| lost.mover_generation == generation) {
                    let (link, transport) = (lost.link, lost.transport);
                    self.close(session, effects);
                    // The destination can miss the loss, for example if a lane never reached it. If
                    // the source writes into its pages, the destination must also reset the session
                    // before it reuses them.
                    if transport.writes_remotely()
                        && !is_failpoint_active("link outlives its queue pairs")
                    {
                        self.tell_causes(link, effects);
                        effects.hang_up(link);
                    } else if transport == Transport::Tcp {
                        effects.hang_up(link);
                    }
                    self.fail_rooms(link, Cause::Flushed, effects);
                }
            }
            Report::Arrived { .. } | Report::Failed { .. } => {}
        }
    }

    /// Forgets expired entries and refuses Destinations without a request.
    pub fn expire(&mut self, now: Instant, effects: &mut impl SourceEffects<L>) {
        let mut unclaimed = Vec::new();
        self.rooms.expire(now, |_, wanted| unclaimed.push(wanted));
        for wanted in unclaimed {
            self.turn_down(&wanted, wanted.unclaimed(), effects);
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Asserts the rules that hold between calls. Debug builds call it at each tick.
    ///
    /// # Panics
    /// A session and its link do not name each other, two uses of an index have one number, or a
    /// Destination belongs to a session that has ended.
    pub fn invariants(&self) {
        self.rooms.invariants();
        let mut uses = HashSet::default();
        for (index, session) in self.sessions.iter().enumerate() {
            let Some(session) = session else { continue };
            let of_link = self.by_link.get(&session.link);
            assert_eq!(of_link, Some(&SessionId(index as u32)), "a link leads to its session");
            assert!(
                uses.insert(session.mover_generation),
                "each use of an index has a number of its own"
            );
        }
        assert_eq!(self.by_link.len(), uses.len(), "a link leads to a session that is open");
        for wanted in self.rooms.destinations() {
            let session = self.by_link.get(&wanted.link);
            assert_eq!(
                session,
                Some(&wanted.target.session),
                "a Destination ends with its session"
            );
        }
    }

    /// Refuses all Destinations that wait for a request, because no more requests come to this
    /// worker.
    pub fn refuse_early(
        &mut self,
        cause: Cause,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        for wanted in self.rooms.take_early(now) {
            self.turn_down(&wanted, cause, effects);
        }
    }

    /// Refuses a request for `room` that can still come.
    pub fn refuse_room(&mut self, room: Room, now: Instant) {
        self.rooms.refuse(room, now);
    }

    /// Whether a request for this room would be refused, because the room is over.
    pub fn is_over(&self, room: Room) -> bool {
        self.rooms.is_over(room)
    }

    /// Rooms without a request here, while writes are under way, or the destination has not
    /// confirmed that it has everything. If their link ended now, they would fail there.
    pub fn unconfirmed_rooms(&self) -> usize {
        self.rooms.unconfirmed()
    }

    /// Rooms that are not over.
    pub fn open_rooms(&self) -> usize {
        self.rooms.open()
    }

    fn destination(
        &mut self,
        link: L,
        asked: &Destination<'_>,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        let Some((id, session)) = self.session_of(link, asked.session) else { return };
        let TransferId { room, slot, generation } = asked.id;
        let target = Target { session: id, slot, generation, room, prefix: asked.prefix_tokens };
        let prompt = Prompt { tokens: asked.tokens, hash: asked.ids_hash };
        let pages = if session.transport.writes_remotely() {
            asked.pages.iter().collect()
        } else {
            Arc::default()
        };
        let first = (asked.prefix_tokens / session.page_size) as usize;
        let left = Duration::from_millis(asked.deadline_ms.into());
        let wanted = DestinationRequest {
            link,
            target,
            prompt,
            place: Some(DestinationPages { pages, first }),
            left,
        };
        if !names_its_pages(session, self.identity.groups, asked) {
            self.turn_down(&wanted, Cause::Mismatch, effects);
            // No other Destination comes for the KV that was computed for its Interest.
            if let Some(slot) = self.rooms.interested(&wanted) {
                self.fail(slot, Cause::Mismatch, effects);
            }
            return;
        }
        self.arrive(wanted, now, effects);
    }

    fn interest(
        &mut self,
        link: L,
        asked: &Interest,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        let Some((id, session)) = self.session_of(link, asked.session) else { return };
        let TransferId { room, slot, generation } = asked.id;
        let target = Target { session: id, slot, generation, room, prefix: 0 };
        let prompt = Prompt { tokens: asked.tokens, hash: asked.ids_hash };
        let is_offered =
            self.allocation == DecodeAllocation::Late && asked.id.slot.0 < session.slots;
        let left = Duration::from_millis(asked.deadline_ms.into());
        let wanted = DestinationRequest { link, target, prompt, place: None, left };
        match is_offered {
            true => self.arrive(wanted, now, effects),
            false => self.turn_down(&wanted, Cause::Mismatch, effects),
        }
    }

    fn arrive(
        &mut self,
        wanted: DestinationRequest<L>,
        now: Instant,
        effects: &mut impl SourceEffects<L>,
    ) {
        match self.rooms.arrive(wanted.target.room, wanted.clone(), now) {
            ArriveOutcome::Kept => {}
            ArriveOutcome::Meets(met) => self.meet(met, now, effects),
            ArriveOutcome::Differs(slot) => {
                self.turn_down(&wanted, Cause::Mismatch, effects);
                self.fail(slot, Cause::Mismatch, effects);
            }
            ArriveOutcome::Refused(cause) => self.turn_down(&wanted, cause, effects),
        }
    }

    /// Handles a room in which both legs have met: sets the state, then informs the scheduler.
    fn meet(&mut self, met: MatchedLegs<L>, now: Instant, effects: &mut impl SourceEffects<L>) {
        let MatchedLegs { slot, wanted } = met;
        debug_assert_eq!(
            self.by_link.get(&wanted.link),
            Some(&wanted.target.session),
            "legs meet in an open session"
        );
        let goes_on = match &wanted.place {
            Some(place) if self.status.advance(slot.id, slot.generation, Move::Grant).is_ok() => {
                effects.granted(slot, wanted.target, place.first, &place.pages);
                true
            }
            None if self.status.is_open(slot.id, slot.generation) => {
                effects.awaited(slot);
                true
            }
            _ => false,
        };
        if let Some(record) = self.records.remove(&slot).filter(|_| goes_on) {
            let id = transfer_id(wanted.target.room, &wanted);
            effects.send(wanted.link, &record.message(id));
        }
        if !goes_on {
            // Failed before it was granted: nothing was posted, and the mover may have reported
            // that before the legs met.
            let _ = self.rooms.withdrawn(slot, now);
            self.turn_down(&wanted, Cause::OtherLeg, effects);
        }
    }

    /// Refuses a Destination. No write for it is posted now or later.
    fn turn_down(
        &self,
        wanted: &DestinationRequest<L>,
        cause: Cause,
        effects: &mut impl SourceEffects<L>,
    ) {
        let ack = AbortAck { id: transfer_id(wanted.target.room, wanted), quiet: true, cause };
        effects.send(wanted.link, &Message::AbortAck(ack));
    }

    fn abort(&mut self, link: L, abort: &Abort, now: Instant, effects: &mut impl SourceEffects<L>) {
        let target = Slot { id: abort.id.slot, generation: abort.id.generation };
        match self.rooms.abort(abort.id.room, link, target, now) {
            AbortOutcome::Answer => {
                let ack = AbortAck { id: abort.id, quiet: true, cause: abort.cause };
                effects.send(link, &Message::AbortAck(ack));
            }
            AbortOutcome::Stop(slot) => {
                self.fail(slot, abort.cause, effects);
                let ack = AbortAck { id: abort.id, quiet: true, cause: abort.cause };
                effects.send(link, &Message::AbortAck(ack));
            }
            AbortOutcome::Fail(slot) => {
                if !self.fail(slot, abort.cause, effects) {
                    // The slot had ended already. Either everything posted has completed, or the
                    // mover reports after its Cancel.
                    let state = self.status.load(slot.id).state;
                    if state == State::Success
                        && let Some((room, wanted)) = self.rooms.withdrawn(slot, now)
                    {
                        let ack = AbortAck {
                            id: transfer_id(room, &wanted),
                            quiet: true,
                            cause: abort.cause,
                        };
                        effects.send(link, &Message::AbortAck(ack));
                    }
                }
            }
            AbortOutcome::Waits | AbortOutcome::Stale => {}
        }
    }

    fn done(&mut self, link: L, done: &Done, effects: &mut impl SourceEffects<L>) {
        let target = Slot { id: done.id.slot, generation: done.id.generation };
        if let Some(slot) = self.rooms.done(done.id.room, link, target) {
            effects.mover(SourceCommand::Done { slot: slot.id, generation: slot.generation });
        }
    }

    /// Marks the slot Failed, sends Cancel to the mover, then informs the scheduler.
    fn fail(&self, slot: Slot, cause: Cause, effects: &mut impl SourceEffects<L>) -> bool {
        let failed = self.status.advance(slot.id, slot.generation, Move::Fail(cause)).is_ok();
        if failed {
            effects.mover(SourceCommand::Cancel { slot: slot.id, generation: slot.generation });
            effects.failed(slot, cause);
        }
        failed
    }
}

/// Checks the pages of a Destination. Its prefix has whole pages and leaves tokens to transfer;
/// without groups of layers there is none. It names the pages that cross
/// ([`GroupCounts::crossing_pages`]). All pages are in its pool, and its slot exists.
fn names_its_pages<L>(session: &Session<L>, groups: GroupCounts, asked: &Destination<'_>) -> bool {
    let crossing = || groups.crossing_pages(asked.tokens, asked.prefix_tokens, session.page_size);
    asked.prefix_tokens < asked.tokens
        && asked.prefix_tokens.is_multiple_of(session.page_size)
        && (groups.total() > 0 || asked.prefix_tokens == 0)
        && asked.pages.len() as u64 == crossing()
        && asked.pages.iter().all(|page| page.0 < session.pages)
        && asked.id.slot.0 < session.slots
}

fn transfer_id<L>(room: Room, wanted: &DestinationRequest<L>) -> TransferId {
    TransferId { room, slot: wanted.target.slot, generation: wanted.target.generation }
}

/// A slot, from its name on the wire.
impl From<TransferId> for Slot {
    fn from(id: TransferId) -> Slot {
        Slot { id: SlotId(id.slot.0), generation: id.generation }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::IdsHash;

    /// A pool of 100 pages of 16 tokens, four slots.
    fn names(tokens: u32, prefix_tokens: u32, pages: &[u32], slot: u32) -> bool {
        names_in(GroupCounts::FULL, tokens, prefix_tokens, pages, slot)
    }

    fn names_in(
        groups: GroupCounts,
        tokens: u32,
        prefix_tokens: u32,
        pages: &[u32],
        slot: u32,
    ) -> bool {
        let session = Session {
            link: (),
            generation: SessionGeneration(1),
            transport: Transport::Rdma,
            page_size: 16,
            pages: 100,
            slots: 4,
            mover_generation: SessionGeneration(1),
        };
        let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
        let asked = Destination {
            id: TransferId {
                room: Room(1),
                slot: SlotId(slot),
                generation: crate::ids::Generation(1),
            },
            session: SessionGeneration(1),
            tokens,
            prefix_tokens,
            ids_hash: IdsHash::default(),
            aux_index: slot,
            deadline_ms: 1000,
            pages: pages.as_slice().into(),
        };
        names_its_pages(&session, groups, &asked)
    }

    #[test]
    fn a_destination_of_state_alone_has_no_prefix() {
        let state = GroupCounts { full: 0, state_pages: 2, ..GroupCounts::FULL };
        assert!(names_in(state, 100, 0, &[4, 5], 0));
        assert!(!names_in(state, 100, 16, &[4, 5], 0), "tokens before a state");
        assert!(!names_in(state, 100, 0, &[4], 0), "a part of the state");
        // Beside a group, state is behind the pages of the tokens.
        let both = GroupCounts { state_pages: 2, ..GroupCounts::FULL };
        assert!(names_in(both, 33, 16, &[1, 2, 4, 5], 0));
        assert!(!names_in(both, 33, 16, &[1, 2], 0), "no state");
    }

    #[test]
    fn a_destination_names_exactly_the_pages_behind_its_prefix() {
        assert!(names(1, 0, &[99], 3));
        assert!(names(33, 0, &[1, 2, 3], 0));
        assert!(names(33, 16, &[2, 3], 0));
        assert!(names(33, 32, &[3], 0));
        for (tokens, prefix, pages, slot, why) in [
            (33, 0, &[1, 2][..], 0, "a page too few"),
            (33, 0, &[1, 2, 3, 4], 0, "a page too many"),
            (33, 16, &[1, 2, 3], 0, "a page of the prefix"),
            (33, 15, &[1, 2, 3], 0, "part of a page held"),
            (33, 17, &[2, 3], 0, "part of a page held"),
            (33, 33, &[3], 0, "nothing left to hand over"),
            (32, 32, &[], 0, "nothing left to hand over"),
            (16, 32, &[], 0, "more held than there is"),
            (1, 0, &[100], 0, "beyond the pool"),
            (1, 0, &[0], 4, "no such slot"),
        ] {
            assert!(!names(tokens, prefix, pages, slot), "{why}: {tokens}, {prefix}");
        }
    }
}
