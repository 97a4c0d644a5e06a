//! The hand-off: connects the managers of `transfer` to rings, to links between workers, and to the
//! set-up of transports.
//!
//! Owns: the workers of this process and their managers. Thread: `ctl`. Invariant: an action of a
//! manager other than a command in its rings runs after the manager's call, so one manager never
//! runs inside another. Not here: the table of requests (`worker::requests`) and the client that
//! asks prefill (`worker::prefill_client`). The table calls the hand-off. The hand-off imports
//! neither of them; its answers go through the engine.

mod actions;
mod effects;
mod endpoints;
mod prompt_records;
mod sessions;
#[cfg(test)]
mod tests;

pub use actions::{DestinationSession, RemoteAction, SourceSession};
pub use effects::rank;
pub use endpoints::{EndpointKind, LinkId, Source, WorkerEndpoint};

use crate::cause::Cause;
use crate::ids::{Room, SessionGeneration, WorkerId};
use crate::link::local_worker::LocalWorker;
use crate::net::ConnId;
use crate::net::Entropy;
use crate::obs::log::event;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::HashMap;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::manager::destination::MissingPages;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::status::{Move, State};
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::rdma::PendingQueuePairs;
use crate::transfer::transport::shm::ShmRing;
use crate::wire::message::{HostId, Message, Transport};
use actions::Action;
use effects::Effects;
use effects::Outbox;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Instant;

/// A slot of a decode worker that waits for the address of its source's name.
#[derive(Debug)]
struct Unresolved {
    worker: WorkerId,
    slot: Slot,
    room: Room,
    host: String,
    port: u16,
}

/// All workers of this process, and the links between them and to others. Their engines take
/// messages of type `E`.
#[derive(Debug)]
pub struct Handoff<E = TransferAnswer> {
    endpoints: Vec<WorkerEndpoint<E>>,
    /// Rings of sessions that wait for the destination's cursor.
    rings: HashMap<(WorkerId, SessionId), ShmRing>,
    /// Open source sessions, by the link that announced them.
    bound: HashMap<LinkId, (WorkerId, SessionId, SessionGeneration)>,
    /// Slots that wait for a name, at most one entry for each.
    unresolved: Vec<Unresolved>,
    /// Session by token: a token opens lanes of one session.
    tokens: HashMap<[u8; 16], (WorkerId, SessionId)>,
    /// Queue pairs offered to a source that has not answered yet.
    offers: HashMap<(WorkerId, SessionId), PendingQueuePairs>,
    remote_actions: VecDeque<RemoteAction>,
    pumping: bool,
    outbox: Outbox,
}

/// The offer that destinations of this process make to sources.
#[derive(Clone, Debug)]
pub struct TransportCapabilities {
    /// Transports, in order of preference.
    pub transports: Vec<Transport>,
    /// This host, for shm.
    pub host: HostId,
    /// Address that accepts TCP lanes.
    pub data: Option<SocketAddr>,
    /// Lanes of a session. The destination sets the number, because its mover must keep up with
    /// them.
    pub lanes: u16,
}

impl<E: From<TransferAnswer>> Handoff<E> {
    /// The hand-off of a process with these workers, in the order of their ids. Tokens and packet
    /// sequence numbers come from `entropy`.
    pub fn new(
        endpoints: Vec<WorkerEndpoint<E>>,
        offer: TransportCapabilities,
        entropy: Entropy,
    ) -> Handoff<E> {
        let is_sorted = |(index, at): (usize, &WorkerEndpoint<E>)| at.worker.id.index() == index;
        assert!(endpoints.iter().enumerate().all(is_sorted), "workers are in the order of ids");
        Handoff {
            endpoints,
            rings: HashMap::default(),
            bound: HashMap::default(),
            unresolved: Vec::new(),
            tokens: HashMap::default(),
            offers: HashMap::default(),
            remote_actions: VecDeque::new(),
            pumping: false,
            outbox: Outbox { actions: VecDeque::new(), records: VecDeque::new(), offer, entropy },
        }
    }

    /// The workers, in the order of their ids.
    pub fn members(&self) -> &[WorkerEndpoint<E>] {
        &self.endpoints
    }

    /// A worker.
    pub fn worker(&self, id: WorkerId) -> &LocalWorker<E> {
        &self.endpoints[id.index()].worker
    }

    /// A worker, mutable, so that a caller can take slots.
    pub fn worker_mut(&mut self, id: WorkerId) -> &mut LocalWorker<E> {
        &mut self.endpoints[id.index()].worker
    }

    /// Lets the request in `slot` take part in the hand-off of `room`. On a decode worker, `source`
    /// computes the prompt; without a source, no hand-off takes place. On a prefill worker,
    /// [`Source::Fake`] means that no decode worker will ask for the KV. The engine must already
    /// have the request, because a failure comes as its answer.
    pub fn enter(
        &mut self,
        id: WorkerId,
        slot: Slot,
        room: Room,
        source: Option<&Source>,
        now: Instant,
    ) {
        let WorkerEndpoint { worker, kind: role, .. } = &mut self.endpoints[id.index()];
        let asked = worker.slot_request(slot).map(|slot_request| slot_request.prompt_request(room));
        let Some(asked) = asked else { return };
        let entered = match role {
            EndpointKind::Prefill { .. } if source == Some(&Source::Fake) => {
                grant_to_nobody(worker, slot, room)
            }
            EndpointKind::Prefill { manager, mover } => manager.enter(
                room,
                slot,
                asked.prompt,
                now,
                &mut Effects { worker, mover, outbox: &mut self.outbox },
            ),
            EndpointKind::Decode { manager, mover, .. } => match source {
                Some(Source::Named { host, port }) => {
                    let (host, port) = (host.clone(), *port);
                    self.remote_actions.push_back(RemoteAction::Resolve(host.clone()));
                    self.unresolved.push(Unresolved { worker: id, slot, room, host, port });
                    Ok(())
                }
                Some(source) => manager.enter(
                    slot,
                    asked,
                    source,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                ),
                // This worker computes the prompt itself.
                None => Ok(()),
            },
            EndpointKind::Mixed => Ok(()),
        };
        if let Err(cause) = entered {
            self.endpoints[id.index()].worker.abort(slot, cause);
        }
        self.run_actions(now);
    }

    /// Takes the outcome of a name's resolution: the slots that wait for the name enter their
    /// session, or fail.
    pub fn resolved(&mut self, name: &str, address: Result<IpAddr, String>, now: Instant) {
        if let Err(why) = &address {
            event!(Warn, "handoff", "prefill worker cannot be found", host = name, why = why);
        }
        let (named, others) = std::mem::take(&mut self.unresolved)
            .into_iter()
            .partition(|waiting| waiting.host == name);
        self.unresolved = others;
        let named: Vec<Unresolved> = named;
        for Unresolved { worker: id, slot, room, port, .. } in named {
            let WorkerEndpoint {
                worker, kind: EndpointKind::Decode { manager, mover, .. }, ..
            } = &mut self.endpoints[id.index()]
            else {
                continue;
            };
            let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
            let Some(asked) = effects
                .worker
                .slot_request(slot)
                .map(|slot_request| slot_request.prompt_request(room))
            else {
                continue;
            };
            let entered = address.as_ref().map_err(|_| Cause::PeerLost).and_then(|&ip| {
                let source = Source::Remote(SocketAddr::new(ip, port));
                manager.enter(slot, asked, &source, now, effects)
            });
            if let Err(cause) = entered {
                self.endpoints[id.index()].worker.abort(slot, cause);
            }
        }
        self.run_actions(now);
    }

    /// The scheduler of a decode worker has leased pages: sends Destination.
    pub fn handle_expecting(&mut self, id: WorkerId, slot: Slot, tokens: Range<u32>, now: Instant) {
        let WorkerEndpoint { worker, kind: EndpointKind::Decode { manager, mover, .. }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        debug_assert!(tokens.start <= tokens.end, "the missing tokens follow the prefix");
        let page_size = worker.layout().page_size;
        let pages = (tokens.start / page_size)..tokens.end.div_ceil(page_size);
        debug_assert!(
            worker.slot_request(slot).is_none_or(|slot_request| {
                let prompt = slot_request.prompt.tokens;
                let crossing = worker.groups().crossing_pages(prompt, tokens.start, page_size);
                pages.len() as u64 == crossing
            }),
            "a decode worker expects its whole prompt"
        );
        let pages: Vec<_> = (pages.start as usize..pages.end as usize)
            .map(|index| worker.lists().page(slot.id, index))
            .collect();
        let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
        let rest = MissingPages { prefix: tokens.start, pages: &pages };
        let transport = manager.expecting(slot, rest, now, effects);
        worker.record_transport(slot, tokens.start, transport);
        self.run_actions(now);
    }

    /// The scheduler of a prefill worker has computed a prompt that has no Destination yet.
    pub fn handle_computed(&mut self, id: WorkerId, slot: Slot, now: Instant) {
        let WorkerEndpoint { worker, kind: EndpointKind::Prefill { manager, mover }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        let effects = &mut Effects { worker, mover, outbox: &mut self.outbox };
        manager.computed(slot, effects);
        self.run_actions(now);
    }

    /// Whether no request has a slot, and no destination waits for a prompt.
    ///
    /// # Errors
    /// What is left, and where.
    pub fn check_idle(&self) -> Result<(), String> {
        for WorkerEndpoint { worker, kind, .. } in &self.endpoints {
            let slots = worker.slots() - worker.free_slots();
            let rooms = kind.open_rooms();
            if slots + rooms > 0 {
                return Err(format!("{}: {slots} slots, {rooms} rooms", worker.id));
            }
        }
        Ok(())
    }

    /// Number of prompts that workers still owe destinations, or wait for.
    pub fn open_rooms(&self) -> usize {
        self.endpoints.iter().map(|endpoint| endpoint.kind.open_rooms()).sum()
    }

    /// Whether the hand-offs without a request here have no write under way, and their destinations
    /// have confirmed them.
    ///
    /// # Errors
    /// The number of hand-offs for which that does not hold.
    pub fn check_confirmed(&self) -> Result<(), String> {
        match self.unconfirmed() {
            0 => Ok(()),
            unconfirmed => Err(format!("{unconfirmed} ends that a destination has not confirmed")),
        }
    }

    /// Number of hand-offs without a request here that have writes under way, or that their
    /// destinations have not confirmed. They would fail there if their link ended now.
    pub fn unconfirmed(&self) -> usize {
        let unconfirmed = |member: &WorkerEndpoint<E>| match &member.kind {
            EndpointKind::Prefill { manager, .. } => manager.unconfirmed_rooms(),
            EndpointKind::Decode { .. } | EndpointKind::Mixed => 0,
        };
        self.endpoints.iter().map(unconfirmed).sum()
    }

    /// Whether a decode worker has asked for the prompt in this slot, or no decode worker ever
    /// will.
    pub fn has_destination_request(&self, id: WorkerId, slot: Slot) -> bool {
        let WorkerEndpoint { worker, kind: role, .. } = &self.endpoints[id.index()];
        match role {
            EndpointKind::Prefill { manager, .. } => {
                // A fake hand-off is granted at once, and a failed one waits for no decode worker.
                manager.has_destination_request(slot)
                    || worker.status.load(slot.id).state != State::Bootstrapping
            }
            EndpointKind::Decode { .. } | EndpointKind::Mixed => true,
        }
    }

    /// A request of a destination does not need the KV of its source any more.
    pub fn handle_declined(&mut self, id: WorkerId, slot: Slot) {
        if let EndpointKind::Decode { manager, .. } = &mut self.endpoints[id.index()].kind {
            manager.decline(slot);
        }
    }

    /// The scheduler has ended a request.
    pub fn handle_finished(
        &mut self,
        id: WorkerId,
        slot: Slot,
        failure: Option<Cause>,
        now: Instant,
    ) {
        let is_client_gone = failure == Some(Cause::ClientGone);
        if is_client_gone && is_failpoint_active("leg of a client that left stays in its hand-off")
        {
            return;
        }
        if !is_failpoint_active("name outlives its request") {
            self.unresolved.retain(|waiting| (waiting.worker, waiting.slot) != (id, slot));
        }
        let WorkerEndpoint { worker, kind: role, .. } = &mut self.endpoints[id.index()];
        match role {
            EndpointKind::Prefill { manager, mover } => {
                manager.leave(
                    slot,
                    failure,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                );
            }
            EndpointKind::Decode { manager, mover, .. } => {
                manager.leave(
                    slot,
                    failure,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                );
            }
            EndpointKind::Mixed => {}
        }
        self.run_actions(now);
    }

    /// The scheduler has returned a request: frees its slot.
    pub fn release_slot(&mut self, id: WorkerId, slot: Slot) {
        self.endpoints[id.index()].worker.release(slot);
    }

    /// Whether a mover's report waits.
    pub fn has_events(&self) -> bool {
        self.endpoints
            .iter()
            .any(|member| member.reports.as_ref().is_some_and(|reports| !reports.is_empty()))
    }

    /// Takes reports of movers. Returns whether there were any.
    pub fn step(&mut self, now: Instant) -> bool {
        let mut busy = false;
        for index in 0..self.endpoints.len() {
            while let Some(report) =
                self.endpoints[index].reports.as_ref().and_then(|ring| ring.try_recv().ok())
            {
                busy = true;
                let WorkerEndpoint { worker, kind: role, .. } = &mut self.endpoints[index];
                match role {
                    EndpointKind::Prefill { manager, mover } => {
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, outbox: &mut self.outbox },
                        );
                    }
                    EndpointKind::Decode { manager, mover, .. } => {
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, outbox: &mut self.outbox },
                        );
                    }
                    EndpointKind::Mixed => {}
                }
                self.run_actions(now);
            }
        }
        busy
    }

    /// Asserts the rules that hold between calls. Debug builds call it at each tick.
    ///
    /// # Panics
    /// An action was not run, or a slot waits for two names. A session, an offer or a token belongs
    /// to a worker of another process, or a token to a session that has ended.
    pub fn invariants(&self) {
        assert!(
            !self.pumping && self.outbox.actions.is_empty(),
            "actions are done when a call returns"
        );
        for (index, waiting) in self.unresolved.iter().enumerate() {
            let is_same =
                |other: &Unresolved| (other.worker, other.slot) == (waiting.worker, waiting.slot);
            assert!(!self.unresolved[..index].iter().any(is_same), "a slot waits for one name");
            let worker = &self.endpoints[waiting.worker.index()].worker;
            assert!(worker.slot_request(waiting.slot).is_some(), "a slot that waits has a request");
        }
        let sessions = self.bound.values().map(|bound| bound.0);
        let workers = sessions
            .chain(self.rings.keys().map(|ring| ring.0))
            .chain(self.offers.keys().map(|offer| offer.0))
            .chain(self.tokens.values().map(|token| token.0))
            .chain(self.unresolved.iter().map(|waiting| waiting.worker));
        for worker in workers {
            assert!(
                worker.index() < self.endpoints.len(),
                "a session is of a worker of this process"
            );
        }
        self.endpoints.iter().for_each(WorkerEndpoint::invariants);
        for (link, &(worker, session, _)) in &self.bound {
            let EndpointKind::Prefill { manager, .. } = &self.endpoints[worker.index()].kind else {
                panic!("a source session is of a prefill worker");
            };
            let is_open = manager.mover_generation(session).is_some();
            assert!(is_open, "the session of link {link} is bound while it is open");
        }
        for &(worker, session) in self.tokens.values() {
            let is_open = match &self.endpoints[worker.index()].kind {
                EndpointKind::Decode { manager, .. } => manager.is_open(session),
                EndpointKind::Prefill { .. } | EndpointKind::Mixed => false,
            };
            assert!(is_open, "a token opens lanes of a session that is open");
        }
        let mut granted: Vec<_> = self.tokens.values().collect();
        granted.sort_unstable_by_key(|session| (session.0.0, session.1.0));
        assert!(granted.windows(2).all(|pair| pair[0] != pair[1]), "a session has one token");
    }

    /// Ends overdue rooms and sessions in the managers, and sends commands that found a full ring.
    pub fn expire(&mut self, now: Instant) {
        for index in 0..self.endpoints.len() {
            let WorkerEndpoint { worker, kind: role, .. } = &mut self.endpoints[index];
            worker.engine.flush();
            match role {
                EndpointKind::Prefill { manager, mover } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, outbox: &mut self.outbox });
                }
                EndpointKind::Decode { manager, mover, .. } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, outbox: &mut self.outbox });
                }
                EndpointKind::Mixed => {}
            }
        }
        self.run_actions(now);
        if cfg!(debug_assertions) {
            self.invariants();
        }
    }

    /// Refuses Destinations and Interests for rooms that no request of this process uses.
    pub fn refuse_early(&mut self, cause: Cause, now: Instant) {
        for WorkerEndpoint { worker, kind: role, .. } in &mut self.endpoints {
            if let EndpointKind::Prefill { manager, mover } = role {
                manager.refuse_early(
                    cause,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                );
            }
        }
        self.run_actions(now);
    }

    /// Refuses a request for `room` that can still come to a prefill worker of this process.
    pub fn refuse_room(&mut self, room: Room, now: Instant) {
        for WorkerEndpoint { kind, .. } in &mut self.endpoints {
            if let EndpointKind::Prefill { manager, .. } = kind {
                manager.refuse_room(room, now);
            }
        }
    }

    /// Whether a prefill worker would refuse a request for this room, because the room is over.
    pub fn is_over(&self, worker: WorkerId, room: Room) -> bool {
        match &self.endpoints[worker.index()].kind {
            EndpointKind::Prefill { manager, .. } => manager.is_over(room),
            EndpointKind::Decode { .. } | EndpointKind::Mixed => false,
        }
    }

    /// The offer of destinations of this process.
    pub fn offer(&self) -> &TransportCapabilities {
        &self.outbox.offer
    }

    /// A dialled link is open and proven.
    pub fn link_up(&mut self, id: WorkerId, source: &Source, link: LinkId, now: Instant) {
        let WorkerEndpoint { worker, kind: EndpointKind::Decode { manager, mover, .. }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        manager.link_up(
            source,
            link,
            now,
            &mut Effects { worker, mover, outbox: &mut self.outbox },
        );
        self.run_actions(now);
    }

    /// A prefill worker could not be reached, or has not proven itself.
    pub fn dial_failed(&mut self, id: WorkerId, source: &Source, cause: Cause, now: Instant) {
        let WorkerEndpoint { worker, kind: EndpointKind::Decode { manager, mover, .. }, .. } =
            &mut self.endpoints[id.index()]
        else {
            return;
        };
        manager.dial_failed(
            source,
            cause,
            now,
            &mut Effects { worker, mover, outbox: &mut self.outbox },
        );
        self.run_actions(now);
    }

    /// A link to another process is dead.
    pub fn link_down(&mut self, conn: ConnId, cause: Cause, now: Instant) {
        let link = LinkId::Remote(conn);
        for WorkerEndpoint { worker, kind: role, .. } in &mut self.endpoints {
            match role {
                EndpointKind::Prefill { manager, mover } => {
                    manager
                        .link_down(link, &mut Effects { worker, mover, outbox: &mut self.outbox });
                }
                EndpointKind::Decode { manager, mover, .. } => {
                    manager.link_down(
                        link,
                        cause,
                        now,
                        &mut Effects { worker, mover, outbox: &mut self.outbox },
                    );
                }
                EndpointKind::Mixed => {}
            }
        }
        self.run_actions(now);
    }

    /// Takes a message of another process. Only one worker of a process has links to other
    /// processes, and the message is for that worker.
    pub fn receive_message(&mut self, conn: ConnId, message: &Message<'_>, now: Instant) {
        self.deliver_message(WorkerId(0), LinkId::Remote(conn), message, now);
        self.run_actions(now);
    }
}

/// Grants a prefill worker's hand-off to the fake destination. No manager has this room.
fn grant_to_nobody<E: From<TransferAnswer>>(
    worker: &mut LocalWorker<E>,
    slot: Slot,
    room: Room,
) -> Result<(), Cause> {
    let Slot { id: slot, generation } = slot;
    worker.status.advance(slot, generation, Move::Grant).map_err(|_| Cause::OtherLeg)?;
    let target = Target { session: SessionId::NOBODY, slot, generation, room, prefix: 0 };
    worker.tell(TransferAnswer::Granted { worker: worker.id, slot, generation, target });
    Ok(())
}

/// The digest of a prompt, which both legs compare.
pub fn prompt_of(ids: &[u32]) -> Prompt {
    Prompt { tokens: ids.len() as u32, hash: crate::wire::message::ids_hash(ids) }
}

/// A room for a new attempt: 63 random bits.
pub fn room_of(random: u64) -> Room {
    Room(random >> 1)
}
