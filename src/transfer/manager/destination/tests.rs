//! Sessions of a decode worker with many prefill workers, one after another.

use super::*;
use crate::kv::groups::GroupCounts;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::limits::{DIAL_HOLD_OFF, RDMA_BARRED, RDMA_BREAKS_MAX};
use crate::stdx::failpoint::panic_of;
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::status::Move;
use crate::transfer::transport::fake::Fake;
use crate::wire::message as wire;
use crate::wire::message::{
    AbortAck, Announce, BitClass, Fingerprint, HostId, Rank, Refusal, Refused, ShmGrant,
    SocketName, TcpGrant, Token, Transport, Welcome,
};
use bytemuck::Zeroable;
use std::time::Duration;

const SESSIONS: usize = 4;
const REST: MissingPages<'static> = MissingPages { prefix: 0, pages: &[PageId(0)] };
const PROMPT: Prompt = Prompt { tokens: 16, hash: [1; 16] };

/// A number names a prefill worker and its link.
type Manager = DestinationManager<u32, u32>;

#[derive(Default, Debug)]
struct Effects {
    announced: Vec<SessionGeneration>,
    /// Transports of the last Announce.
    offered: Vec<Transport>,
    failed: Vec<Slot>,
    refused: usize,
    dialled: Vec<u32>,
    bound: Vec<SessionId>,
    opened: Vec<SessionId>,
    closed: Vec<SessionId>,
    ready: Vec<(Slot, SessionId)>,
    destinations: Vec<u32>,
    has_nic: bool,
    only_rdma: bool,
    interests: Vec<TransferId>,
    aborts: Vec<TransferId>,
    quiet: Vec<Slot>,
    left_out: usize,
    withdrawn: Vec<SessionId>,
    records: Vec<(Slot, Vec<u8>)>,
}

fn rank() -> Rank {
    let address = "127.0.0.1:9".parse().unwrap();
    let identity = identity();
    Rank {
        regions: identity.regions(),
        lanes: 1,
        shm: Some(ShmGrant {
            host: identity.host,
            socket: SocketName::new(b"-").unwrap(),
            token: Token([0; 16]),
        }),
        tcp: Some(TcpGrant { address, token: Token([0; 16]) }),
        rdma: Some(Zeroable::zeroed()),
        fake: false,
    }
}

fn identity() -> WorkerIdentity {
    let layout = KvLayout::page_major(16, 2, 2, 8, KvDtype::F16);
    WorkerIdentity {
        groups: GroupCounts::FULL,
        fingerprint: Fingerprint {
            config: [1; 32],
            weights: [2; 32],
            kernels: [3; 32],
            tokenizer: [4; 32],
            template: [5; 32],
        },
        bit_class: BitClass::named("x86-fma"),
        layout,
        pages: 8,
        pool_bytes: 8 * layout.page_stride,
        slots: 8,
        host: HostId([7; 16]),
    }
}

impl DestinationEffects<u32, u32> for Effects {
    fn send(&mut self, link: u32, message: &Message<'_>) {
        match message {
            Message::Announce(announce) => {
                self.offered = Transport::ALL
                    .into_iter()
                    .filter(|&way| announce.ranks[0].offers(way))
                    .collect();
                self.announced.push(announce.session);
            }
            Message::Destination(_) => self.destinations.push(link),
            Message::Interest(interest) => self.interests.push(interest.id),
            Message::Abort(abort) => self.aborts.push(abort.id),
            _ => {}
        }
    }

    fn mover(&mut self, command: DestinationCommand) {
        match command {
            DestinationCommand::Open { session, .. } => self.opened.push(session),
            DestinationCommand::Close { session } => self.closed.push(session),
            DestinationCommand::Quiet { slot: id, generation } => {
                self.quiet.push(Slot { id, generation })
            }
            _ => {}
        }
    }

    fn dial(&mut self, source: &u32) {
        self.dialled.push(*source);
    }

    fn hang_up(&mut self, _: u32) {}

    fn make_rank(&mut self, _: SessionId, _: &u32, without: &[Transport]) -> Option<Rank> {
        let mut rank = rank();
        rank.shm = rank.shm.filter(|_| !without.contains(&Transport::Shm));
        rank.tcp = rank.tcp.filter(|_| !without.contains(&Transport::Tcp));
        rank.rdma = rank.rdma.filter(|_| self.has_nic && !without.contains(&Transport::Rdma));
        self.only_rdma.then(|| (rank.shm, rank.tcp) = (None, None));
        Transport::ALL.into_iter().any(|way| rank.offers(way)).then_some(rank)
    }

    fn bind(&mut self, _: u32, session: SessionId, _: DestinationSetup<'_>) {
        self.bound.push(session);
    }

    fn record(&mut self, slot: Slot, bytes: &[u8]) {
        self.records.push((slot, bytes.to_vec()));
    }

    fn ready(&mut self, slot: Slot, session: SessionId) {
        self.ready.push((slot, session));
    }

    fn failed(&mut self, slot: Slot, _: Cause) {
        self.failed.push(slot);
    }

    fn withdraw(&mut self, session: SessionId) {
        self.withdrawn.push(session);
    }

    fn left_out(&mut self, source: &u32, transport: Transport, _: Duration) {
        assert_eq!((*source, transport), (1, Transport::Rdma));
        self.left_out += 1;
    }

    fn refused(&mut self, _: &u32, mismatch: &Mismatch) {
        assert!(
            ["transport", "processes of a worker"].contains(&&mismatch.field[..]),
            "{mismatch}"
        );
        self.refused += 1;
    }
}

/// A decode worker with few sessions.
struct Worker {
    manager: Manager,
    status: Arc<StatusTable>,
    effects: Effects,
    now: Instant,
}

impl Worker {
    fn new() -> Worker {
        let status = Arc::new(StatusTable::new(8));
        let manager = Manager::new(identity(), status.clone(), SESSIONS);
        Worker { manager, status, effects: Effects::default(), now: Instant::now() }
    }

    /// A request with a prompt that `source` computes.
    fn enter(&mut self, slot: u32, source: u32) -> Result<Slot, Cause> {
        let id = SlotId(slot);
        let slot = Slot { id, generation: self.status.open(id) };
        let deadline = self.now + SESSION_SETUP_DEADLINE;
        let asked = PromptRequest { room: Room(7), prompt: PROMPT, deadline };
        let entered = self.manager.enter(slot, asked, &source, self.now, &mut self.effects);
        entered.map(|()| slot)
    }

    fn leave(&mut self, slot: Slot) {
        self.manager.leave(slot, None, self.now, &mut self.effects);
    }

    /// From the dial to a ready session; returns its index.
    fn set_up(&mut self, source: u32) -> SessionId {
        self.set_up_by(Transport::Tcp, source)
    }

    fn set_up_by(&mut self, transport: Transport, source: u32) -> SessionId {
        let Worker { manager, effects, now, .. } = self;
        assert_eq!(effects.dialled.pop(), Some(source));
        manager.link_up(&source, source, *now, effects);
        let session = effects.announced.pop().unwrap();
        let identity = identity();
        let kv = identity.kv_claim();
        let welcome = Welcome { session, transport, late: false, kv, ranks: vec![rank()] };
        manager.receive(source, &Message::Welcome(Box::new(welcome)), *now, effects);
        let generation = session;
        let session = effects.bound.pop().unwrap();
        manager.bound(session, generation, Ok(Box::new(Fake)), *now, effects);
        assert_eq!(effects.ready.last().map(|&(_, found)| found), Some(session));
        session
    }

    /// A room with a source that writes into this worker's pages, or can do so once Destination is
    /// sent.
    fn written_to(&mut self, sent: bool) -> (Slot, SessionId) {
        self.effects.has_nic = true;
        let slot = self.enter(0, 1).unwrap();
        let session = match self.effects.dialled.is_empty() {
            true => self.effects.ready.last().unwrap().1,
            false => self.set_up_by(Transport::Rdma, 1),
        };
        if sent {
            self.manager.expecting(slot, REST, self.now, &mut self.effects);
        }
        let failed = Move::Fail(Cause::ClientGone);
        self.status.advance(slot.id, slot.generation, failed).unwrap();
        self.manager.leave(slot, Some(Cause::ClientGone), self.now, &mut self.effects);
        (slot, session)
    }

    /// An RDMA session: its source reports why the room failed, and hangs up.
    fn break_rdma(&mut self, cause: Cause) {
        let slot = self.enter(0, 1).unwrap();
        self.set_up_by(Transport::Rdma, 1);
        self.manager.expecting(slot, REST, self.now, &mut self.effects);
        let id = TransferId { room: Room(7), slot: slot.id, generation: slot.generation };
        let status =
            Message::Status(wire::Status { id, state: State::Failed as u8, cause: Some(cause) });
        self.manager.receive(1, &status, self.now, &mut self.effects);
        assert_eq!(self.status.load(slot.id).cause, Some(cause), "the reported cause");
        self.die(1);
        self.leave(slot);
    }

    fn answer(&mut self, slot: Slot, quiet: bool) {
        let id = TransferId { room: Room(7), slot: slot.id, generation: slot.generation };
        let ack = Message::AbortAck(AbortAck { id, quiet, cause: Cause::ClientGone });
        self.manager.receive(1, &ack, self.now, &mut self.effects);
    }

    /// A complete hand-off.
    fn hand_off(&mut self, source: u32) -> SessionId {
        let slot = self.enter(0, source).unwrap();
        let session = self.set_up(source);
        self.manager.expecting(slot, REST, self.now, &mut self.effects);
        assert_eq!(self.effects.destinations.pop(), Some(source));
        self.leave(slot);
        session
    }

    fn die(&mut self, source: u32) {
        self.manager.link_down(source, Cause::PeerLost, self.now, &mut self.effects);
        self.now += DIAL_HOLD_OFF;
    }
}

#[test]
fn prefill_workers_may_come_and_go_forever() {
    let mut worker = Worker::new();
    for source in 0..10 * SESSIONS as u32 {
        worker.hand_off(source);
        worker.die(source);
    }
    // The same holds for sources that never answer.
    for source in 1000..1000 + 10 * SESSIONS as u32 {
        let slot = worker.enter(0, source).unwrap();
        worker.manager.dial_failed(&source, Cause::PeerLost, worker.now, &mut worker.effects);
        worker.leave(slot);
        assert_eq!(worker.effects.dialled.pop(), Some(source));
    }
    worker.hand_off(9);
    assert_eq!(worker.manager.open_slots(), 0);
}

#[test]
fn a_source_that_is_down_gives_way_before_one_that_is_idle() {
    let mut worker = Worker::new();
    let sessions: Vec<SessionId> =
        (0..SESSIONS as u32).map(|source| worker.hand_off(source)).collect();
    worker.die(2);
    worker.die(1);
    assert_eq!(worker.hand_off(91), sessions[2]);
    assert_eq!(worker.hand_off(92), sessions[1]);
    // Sessions that were ready continue unchanged.
    let slot = worker.enter(0, 3).unwrap();
    assert_eq!(worker.effects.ready.pop(), Some((slot, sessions[3])));
    assert!(worker.effects.dialled.is_empty());
}

#[test]
fn the_idle_session_that_was_used_longest_ago_ends_for_a_new_source() {
    let mut worker = Worker::new();
    let sessions: Vec<SessionId> =
        (0..SESSIONS as u32).map(|source| worker.hand_off(source)).collect();
    worker.now += Duration::from_secs(1);
    let slot = worker.enter(0, 0).unwrap();
    worker.leave(slot);
    assert_eq!(worker.hand_off(90), sessions[1], "source 1 was used longest ago");
    assert_eq!(worker.effects.closed, [sessions[1]], "its session ends first");
    let held =
        [(1, 0), (2, 2), (3, 3), (4, 90)].map(|(slot, source)| worker.enter(slot, source).unwrap());
    assert_eq!(worker.enter(0, 91), Err(Cause::Overloaded), "each session has a slot");
    held.into_iter().for_each(|slot| worker.leave(slot));
    worker.hand_off(1);
}

#[test]
fn a_source_with_an_open_slot_keeps_its_session() {
    let mut worker = Worker::new();
    for source in 0..SESSIONS as u32 {
        worker.hand_off(source);
    }
    let held = worker.enter(1, 0).unwrap();
    for source in 1..SESSIONS as u32 {
        worker.enter(source + 1, source).unwrap();
    }
    worker.die(0);
    assert_eq!(
        worker.enter(0, 90),
        Err(Cause::Overloaded),
        "the scheduler has not let go of its slot"
    );
    worker.leave(held);
    worker.hand_off(90);
}

/// A late lane of the old session names its index and generation, so the new session has another
/// generation.
#[test]
fn generations_of_an_index_go_on_with_its_next_source() {
    let mut worker = Worker::new();
    let mut seen = [SessionGeneration(0); SESSIONS];
    for source in 0..3 * SESSIONS as u32 {
        let index = worker.hand_off(source).0 as usize;
        let generation = worker.manager.sources[&source].generation;
        assert!(generation.0 > seen[index].0, "{generation:?} of index {index} was used before");
        seen[index] = generation;
        worker.die(source);
    }
}

/// The source's answer to the last announced session.
fn welcome(transport: Transport, session: SessionGeneration) -> Message<'static> {
    let kv = identity().kv_claim();
    Message::Welcome(Box::new(Welcome { session, transport, late: false, kv, ranks: vec![rank()] }))
}

#[test]
fn a_transport_that_fails_here_leads_to_an_announce_without_it() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    assert_eq!(effects.offered, [Transport::Shm, Transport::Tcp]);
    let first = effects.announced.pop().unwrap();
    manager.receive(1, &welcome(Transport::Shm, first), *now, effects);
    let session = effects.bound.pop().unwrap();
    manager.bound(session, first, Err("no descriptors".into()), *now, effects);
    assert_eq!((&effects.offered[..], &effects.opened[..]), (&[Transport::Tcp][..], &[][..]));
    let second = effects.announced.pop().unwrap();
    assert_ne!(first, second, "a late answer must not be taken for the new session's");
    manager.receive(1, &welcome(Transport::Shm, first), *now, effects);
    assert!(effects.bound.is_empty());
    manager.receive(1, &welcome(Transport::Tcp, second), *now, effects);
    // Late events of the first attempt neither open nor end the second.
    let again = effects.bound.pop().unwrap();
    manager.bound(again, first, Ok(Box::new(Fake)), *now, effects);
    manager.bound(again, first, Err("late".into()), *now, effects);
    assert_eq!((&effects.opened[..], &effects.announced[..]), (&[][..], &[][..]));
    manager.bound(again, second, Ok(Box::new(Fake)), *now, effects);
    assert_eq!(effects.opened, [session]);
    assert_eq!((&effects.ready[..], effects.failed.len()), (&[(slot, session)][..], 0));
}

#[test]
fn a_transport_that_fails_at_the_source_leads_to_an_announce_without_it_until_none_is_left() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    for left in [&[Transport::Tcp][..], &[]] {
        let session = effects.announced.pop().unwrap();
        let refused = Refused {
            session,
            reason: Refusal::Transport,
            field: "transport",
            source: "no memory",
            destination: "",
        };
        manager.receive(1, &Message::Refused(refused), *now, effects);
        match left {
            [] => assert_eq!(effects.announced, []),
            left => assert_eq!(effects.offered, left),
        }
    }
    assert_eq!((effects.refused, &effects.failed[..]), (2, &[slot][..]));
    // The next dial offers everything again.
    manager.leave(slot, None, *now, effects);
    worker.now += DIAL_HOLD_OFF;
    worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    assert_eq!(effects.offered, [Transport::Shm, Transport::Tcp]);
}

#[test]
fn a_source_of_several_processes_is_a_mismatch() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    let session = effects.announced.pop().unwrap();
    let Message::Welcome(mut several) = welcome(Transport::Shm, session) else { unreachable!() };
    several.ranks.push(rank());
    manager.receive(1, &Message::Welcome(several), *now, effects);
    assert_eq!((effects.bound.len(), effects.refused, &effects.failed[..]), (0, 1, &[slot][..]));
}

/// The class decides if both sides have one, else the family.
#[test]
fn kernels_of_another_bit_class_are_a_mismatch() {
    let ours = identity();
    let accept = |kernels: u8, bit_class: BitClass| {
        let announce = Announce {
            session: SessionGeneration(1),
            fingerprint: Fingerprint { kernels: [kernels; 32], ..ours.fingerprint },
            bit_class,
            kv: ours.kv_claim(),
            aux: ours.aux_claim(),
            ranks: vec![rank()],
        };
        ours.accept(&announce).map(|_| ()).map_err(|mismatch| mismatch.to_string())
    };
    assert_eq!(accept(3, ours.bit_class), Ok(()));
    assert_eq!(accept(9, ours.bit_class), Ok(()), "another family of the class");
    assert_eq!(accept(3, BitClass::UNKNOWN), Ok(()), "the same family, of release 0.1");
    assert_eq!(
        accept(9, BitClass::UNKNOWN).unwrap_err(),
        "kernels differs: source has 030303030303, destination has 090909090909"
    );
    assert_eq!(
        accept(3, BitClass::named("portable")).unwrap_err(),
        "bit_class differs: source has x86-fma, destination has portable; give both workers the \
         same --kernels"
    );
}

#[test]
fn an_announce_of_several_processes_is_a_mismatch() {
    let ours = identity();
    let announce = |ranks: Vec<Rank>| Announce {
        session: SessionGeneration(1),
        fingerprint: ours.fingerprint,
        bit_class: ours.bit_class,
        kv: ours.kv_claim(),
        aux: ours.aux_claim(),
        ranks,
    };
    assert!(ours.accept(&announce(vec![rank()])).is_ok());
    let error = ours.accept(&announce(vec![rank(), rank()])).unwrap_err();
    assert_eq!((error.field.as_str(), error.destination.as_str()), ("processes of a worker", "2"));
}

#[test]
fn a_transport_that_was_not_offered_is_a_mismatch() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    let session = effects.announced.pop().unwrap();
    manager.receive(1, &welcome(Transport::Fake, session), *now, effects);
    assert_eq!((effects.bound.len(), effects.refused, &effects.failed[..]), (0, 1, &[slot][..]));
}

#[test]
fn a_way_lost_late_ends_no_later_session() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let session = worker.set_up(1);
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_down(1, Cause::PeerLost, *now, effects);
    manager.leave(slot, None, *now, effects);
    let slot = worker.enter(0, 1).unwrap();
    assert_eq!(worker.set_up(1), session);
    let Worker { manager, effects, now, .. } = &mut worker;
    effects.failed.clear();
    for (generation, failed) in [(1, &[][..]), (2, &[slot][..])] {
        let lost = Report::Lost {
            session,
            generation: SessionGeneration(generation),
            cause: Cause::PeerLost,
        };
        manager.report(lost, *now, effects);
        assert_eq!(effects.failed, failed);
    }
}

#[test]
fn pages_that_a_source_writes_to_wait_for_its_answer() {
    let mut worker = Worker::new();
    let (slot, _) = worker.written_to(true);
    assert_eq!(worker.effects.aborts.len(), 1);
    assert_eq!(worker.effects.quiet, [], "it may be writing");
    let other = Slot { generation: crate::ids::Generation(slot.generation.0 + 1), ..slot };
    worker.answer(other, true);
    assert_eq!(worker.effects.quiet, [], "an answer for another use of the slot");
    worker.answer(slot, true);
    worker.answer(slot, true);
    assert_eq!(worker.effects.quiet, [slot], "once");
    // A source that does not know the room cannot be writing.
    let (slot, _) = worker.written_to(false);
    assert_eq!(worker.effects.aborts.len(), 1, "nothing to abort");
    assert_eq!(worker.effects.quiet.pop(), Some(slot));
    assert_eq!(worker.effects.closed, [], "the session stays");
}

#[test]
fn a_record_is_for_one_use_of_a_slot() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    worker.set_up(1);
    worker.manager.expecting(slot, REST, worker.now, &mut worker.effects);
    let id = TransferId { room: Room(7), slot: slot.id, generation: slot.generation };
    let mut send = |link: u32, id: TransferId| {
        let record = Message::PromptRecord(wire::PromptRecord { id, bytes: &[1, 2] });
        worker.manager.receive(link, &record, worker.now, &mut worker.effects);
        worker.effects.records.drain(..).collect::<Vec<_>>()
    };
    assert_eq!(send(2, id), [], "another source");
    assert_eq!(send(1, TransferId { room: Room(8), ..id }), []);
    assert_eq!(send(1, id), [(slot, vec![1, 2])]);
    assert_eq!(send(1, id), [], "a second record");
    let other = crate::ids::Generation(slot.generation.0 + 1);
    assert_eq!(send(1, TransferId { generation: other, ..id }), []);
    worker.leave(slot);
    let record = Message::PromptRecord(wire::PromptRecord { id, bytes: &[1] });
    worker.manager.receive(1, &record, worker.now, &mut worker.effects);
    assert_eq!(worker.effects.records, []);
}

#[test]
fn a_source_that_cannot_say_quiet_or_does_not_answer_loses_the_session() {
    for answers in [true, false] {
        let mut worker = Worker::new();
        let (slot, session) = worker.written_to(true);
        if answers {
            worker.answer(slot, false);
        } else {
            worker.now += ABORT_ANSWER_MAX / 2;
            worker.manager.expire(worker.now, &mut worker.effects);
            assert_eq!(worker.effects.closed, [], "it has time");
            worker.now += ABORT_ANSWER_MAX;
            worker.manager.expire(worker.now, &mut worker.effects);
        }
        assert_eq!(worker.effects.closed, [session], "only a reset ensures it");
        assert_eq!(worker.effects.quiet, []);
        // No answer is due any more, and a new session can be opened.
        worker.now += ABORT_ANSWER_MAX;
        worker.manager.expire(worker.now, &mut worker.effects);
        assert_eq!(worker.effects.closed, [session]);
        worker.written_to(false);
    }
}

#[test]
fn a_room_that_its_source_has_refused_is_not_aborted_as_well() {
    let mut worker = Worker::new();
    worker.effects.has_nic = true;
    let slot = worker.enter(0, 1).unwrap();
    worker.set_up_by(Transport::Rdma, 1);
    worker.manager.expecting(slot, REST, worker.now, &mut worker.effects);
    // For example, the room belongs to another request there.
    worker.answer(slot, true);
    assert_eq!(worker.effects.quiet, [slot]);
    worker.manager.leave(slot, Some(Cause::Refused), worker.now, &mut worker.effects);
    assert!(worker.effects.aborts.is_empty(), "no answer would come");
    worker.now += 2 * ABORT_ANSWER_MAX;
    worker.manager.expire(worker.now, &mut worker.effects);
    assert_eq!(worker.effects.closed, [], "the session must stay");
}

#[test]
fn no_destination_leaves_for_a_slot_that_has_failed() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    worker.set_up(1);
    // The session, and with it the lease, is lost just before the scheduler reports the leased
    // pages.
    worker.die(1);
    worker.enter(1, 1).unwrap();
    worker.set_up(1);
    let way = worker.manager.expecting(slot, REST, worker.now, &mut worker.effects);
    assert_eq!((way, &worker.effects.destinations[..]), (None, &[][..]));
}

/// If RDMA can be set up but carries no bytes, the requests that use it fail. Then RDMA is left
/// out, so that no other requests fail.
#[test]
fn rdma_that_breaks_again_and_again_is_left_out_for_a_while() {
    let mut worker = Worker::new();
    worker.effects.has_nic = true;
    for _ in 1..RDMA_BREAKS_MAX {
        worker.break_rdma(Cause::Unreachable);
        // Bytes arrive in between: the fabric works.
        let slot = worker.enter(0, 1).unwrap();
        let session = worker.set_up_by(Transport::Rdma, 1);
        let Slot { id, generation } = slot;
        let arrived = Report::Arrived { slot: id, generation, room: Room(7), session };
        worker.manager.report(arrived, worker.now, &mut worker.effects);
        worker.die(1);
        worker.leave(slot);
    }
    assert_eq!(worker.effects.left_out, 0);
    for _ in 0..RDMA_BREAKS_MAX {
        assert_eq!(worker.effects.left_out, 0);
        // A peer that ends a room, or refuses writes, says nothing about the fabric.
        worker.break_rdma(Cause::OtherLeg);
        worker.break_rdma(Cause::Denied);
        worker.break_rdma(Cause::Unreachable);
        assert!(worker.effects.offered.contains(&Transport::Rdma));
    }
    assert_eq!(worker.effects.left_out, 1, "and this is logged");
    let slot = worker.enter(0, 1).unwrap();
    worker.set_up(1);
    assert!(!worker.effects.offered.contains(&Transport::Rdma));
    worker.die(1);
    worker.leave(slot);
    // Without another transport it is tried anyway.
    worker.effects.only_rdma = true;
    worker.break_rdma(Cause::Unreachable);
    worker.effects.only_rdma = false;
    // A session with another transport ends when the time is over and no slot waits in it.
    let slot = worker.enter(0, 1).unwrap();
    let session = worker.set_up(1);
    worker.now += RDMA_BARRED;
    worker.effects.closed.clear();
    worker.manager.expire(worker.now, &mut worker.effects);
    assert_eq!(worker.effects.closed, []);
    worker.leave(slot);
    worker.manager.expire(worker.now, &mut worker.effects);
    assert_eq!(worker.effects.closed, [session]);
    worker.enter(0, 1).unwrap();
    worker.set_up_by(Transport::Rdma, 1);
    assert!(worker.effects.offered.contains(&Transport::Rdma));
}

#[test]
fn an_offer_is_withdrawn_if_no_session_was_established() {
    let mut worker = Worker::new();
    worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    manager.link_down(1, Cause::PeerLost, *now, effects);
    assert_eq!((effects.withdrawn.len(), effects.closed.len()), (1, 0));
}

/// A source that allocates late gets an Interest, and pages are leased after its Ready.
#[test]
fn a_late_source_is_asked_to_compute_before_pages_are_leased() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    manager.link_up(&1, 1, *now, effects);
    let generation = effects.announced.pop().unwrap();
    let kv = identity().kv_claim();
    let welcome = Welcome {
        session: generation,
        transport: Transport::Tcp,
        late: true,
        kv,
        ranks: vec![rank()],
    };
    manager.receive(1, &Message::Welcome(Box::new(welcome)), *now, effects);
    let session = effects.bound.pop().unwrap();
    manager.bound(session, generation, Ok(Box::new(Fake)), *now, effects);
    let id = TransferId { room: Room(7), slot: slot.id, generation: slot.generation };
    assert_eq!((&effects.interests[..], &effects.ready[..]), (&[id][..], &[][..]));
    // The same for a request that comes when the session is ready.
    let other = worker.enter(1, 1).unwrap();
    let Worker { manager, effects, now, .. } = &mut worker;
    let other = TransferId { room: Room(7), slot: other.id, generation: other.generation };
    assert_eq!((&effects.interests[..], &effects.ready[..]), (&[id, other][..], &[][..]));
    let stale = TransferId { generation: crate::ids::Generation(id.generation.0 + 1), ..id };
    let foreign = TransferId { room: Room(8), ..id };
    for unknown in [stale, foreign] {
        manager.receive(1, &Message::Ready(wire::Ready { id: unknown }), *now, effects);
    }
    assert_eq!(effects.ready, []);
    for _ in 0..3 {
        manager.receive(1, &Message::Ready(wire::Ready { id }), *now, effects);
    }
    assert_eq!(effects.ready, [(slot, session)], "once");
    manager.expecting(slot, REST, *now, effects);
    assert_eq!(effects.destinations, [1]);
    // A client leaves early: the source gets an Abort, because it may be computing.
    let left = Slot::from(other);
    worker.status.advance(left.id, left.generation, Move::Fail(Cause::ClientGone)).unwrap();
    worker.manager.leave(left, Some(Cause::ClientGone), worker.now, &mut worker.effects);
    assert_eq!(worker.effects.aborts, [other]);
}

#[test]
fn invariants_find_an_answer_that_is_awaited_after_a_reset() {
    let mut worker = Worker::new();
    worker.written_to(true);
    worker.manager.invariants();
    worker.die(1);
    worker.manager.invariants();

    worker.written_to(true);
    let message = panic_of("answer is awaited after a reset", || {
        worker.die(1);
        worker.manager.invariants();
    });
    assert!(message.contains("only a source that can write owes an answer"), "{message}");
}

/// Link and mover report the same death. The second report says nothing about the next session.
#[test]
fn a_session_ends_once_however_many_report_its_end() {
    let mut worker = Worker::new();
    let session = worker.hand_off(1);
    let generation = worker.manager.sources[&1].generation;
    let lost = Report::Lost { session, generation, cause: Cause::PeerLost };
    worker.manager.link_down(1, Cause::PeerLost, worker.now, &mut worker.effects);
    worker.manager.report(lost, worker.now, &mut worker.effects);
    let slot = worker.enter(0, 1).unwrap();
    assert_eq!(worker.effects.dialled, [1], "it is dialled at once");
    worker.manager.report(lost, worker.now, &mut worker.effects);
    worker.set_up(1);
    assert_eq!(worker.effects.failed, [], "the request waits for the next session");
    worker.leave(slot);
}

/// The deadline of a set-up has passed, and then the dial fails.
#[test]
fn a_dial_that_fails_after_its_deadline_changes_nothing() {
    let mut worker = Worker::new();
    let slot = worker.enter(0, 1).unwrap();
    worker.now += SESSION_SETUP_DEADLINE;
    worker.manager.expire(worker.now, &mut worker.effects);
    worker.leave(slot);
    worker.now += DIAL_HOLD_OFF - Duration::from_millis(1);
    worker.manager.dial_failed(&1, Cause::PeerLost, worker.now, &mut worker.effects);
    worker.now += Duration::from_millis(1);
    worker.effects.dialled.clear();
    worker.enter(0, 1).unwrap();
    assert_eq!(worker.effects.dialled, [1], "the source is held off once");
}
