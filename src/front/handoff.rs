//! Joins the hand-off's protocol to the world: managers to rings, links between workers of this process,
//! links to peers, and the set-up of transports.
//!
//! Thread: `ctl`. Owns: the workers of this process and their managers. What a manager wants done beyond
//! its rings is queued and done when its call has returned, so that one manager never runs inside another.

mod effects;
mod parties;
mod sessions;
mod wishes;

pub use effects::rank;
pub use parties::{Link, Member, Role, Source};
pub use wishes::{DestinationSession, Remote, SourceSession};

use crate::cause::Cause;
use crate::front::asking::{Ask, Word};
use crate::front::worker::Worker;
use crate::ids::{Room, SessionGeneration, WorkerId};
use crate::net::ConnId;
use crate::obs::log::event;
use crate::sched::mailbox::Command;
use crate::sched::request::Request;
use crate::transfer::command::{SessionId, Target};
use crate::transfer::manager::destination::Rest;
use crate::transfer::manager::rooms::{Prompt, Slot};
use crate::transfer::status::{Move, State};
use crate::transfer::transport::rdma::RdmaOffer;
use crate::transfer::transport::shm::ShmRing;
use crate::wire::message::{HostId, Message, Transport};
use effects::Effects;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Instant;
use wishes::Wish;

/// A slot of a decode worker whose source has but a name yet.
#[derive(Debug)]
struct Unresolved {
    worker: WorkerId,
    slot: Slot,
    room: Room,
    host: String,
    port: u16,
}

/// All workers of this process and the links between them and to others.
#[derive(Debug)]
pub struct Handoff {
    members: Vec<Member>,
    wishes: VecDeque<Wish>,
    /// Rings of sessions whose destination has not shown its cursor yet.
    rings: HashMap<(WorkerId, SessionId), ShmRing>,
    /// Source sessions that stand, by the link they were announced on.
    bound: HashMap<Link, (WorkerId, SessionId, SessionGeneration)>,
    /// At most one of each slot.
    unresolved: Vec<Unresolved>,
    /// Which session the holder of a token may open lanes of.
    tokens: HashMap<[u8; 16], (WorkerId, SessionId)>,
    /// Queue pairs that a source was told of and has not answered.
    offers: HashMap<(WorkerId, SessionId), RdmaOffer>,
    remote: VecDeque<Remote>,
    /// What prefill workers have said that were asked.
    words: VecDeque<(u64, Word)>,
    pumping: bool,
    offer: Offer,
}

/// What destinations of this process offer to sources.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Transports, in order of preference.
    pub transports: Vec<Transport>,
    /// This host, for shm.
    pub host: HostId,
    /// Where lanes of tcp are accepted.
    pub data: Option<SocketAddr>,
    /// Lanes of a session: the destination says how many, as its mover has to keep up with them.
    pub lanes: u16,
}

impl Handoff {
    /// A process with these workers, in order of their ids.
    pub fn new(members: Vec<Member>, offer: Offer) -> Handoff {
        Handoff {
            members,
            wishes: VecDeque::new(),
            rings: HashMap::new(),
            bound: HashMap::new(),
            unresolved: Vec::new(),
            tokens: HashMap::new(),
            offers: HashMap::new(),
            remote: VecDeque::new(),
            words: VecDeque::new(),
            pumping: false,
            offer,
        }
    }

    /// The workers, in order of their ids.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A worker.
    pub fn worker(&self, id: WorkerId) -> &Worker {
        &self.members[id.index()].worker
    }

    /// A worker, to take slots from.
    pub fn worker_mut(&mut self, id: WorkerId) -> &mut Worker {
        &mut self.members[id.index()].worker
    }

    /// Gives a request to its worker; on a decode worker `source` reads its prompt. On a prefill worker
    /// nobody waits for it where that is fake. What cannot be met ends through the engine like any other
    /// failure.
    pub fn submit(&mut self, request: Box<Request>, source: Option<&Source>, now: Instant) {
        let id = request.worker;
        let (slot, room) =
            (Slot { id: request.slot, generation: request.generation }, request.room);
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let asked = worker.tenant(slot).map(|tenant| tenant.asked(room));
        worker.engine.send(Command::Submit(request));
        let Some(asked) = asked else { return };
        let wishes = &mut self.wishes;
        let entered = match role {
            Role::Prefill { .. } if source == Some(&Source::Fake) => {
                grant_to_nobody(worker, slot, room)
            }
            Role::Prefill { manager, mover } => manager.enter(
                room,
                slot,
                asked.prompt,
                now,
                &mut Effects { worker, mover, wishes, offer: &self.offer },
            ),
            Role::Decode { manager, mover, .. } => match source {
                Some(Source::Named { host, port }) => {
                    let (host, port) = (host.clone(), *port);
                    self.remote.push_back(Remote::Resolve(host.clone()));
                    self.unresolved.push(Unresolved { worker: id, slot, room, host, port });
                    Ok(())
                }
                Some(source) => manager.enter(
                    slot,
                    asked,
                    source,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                ),
                // It reads the prompt itself.
                None => Ok(()),
            },
            Role::Mixed => Ok(()),
        };
        if let Err(cause) = entered {
            self.members[id.index()].worker.abort(slot, cause);
        }
        self.settle(now);
    }

    /// A name is resolved, or cannot be: its slots enter their session, or fail.
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
            let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
                &mut self.members[id.index()]
            else {
                continue;
            };
            let effects =
                &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
            let Some(asked) = effects.worker.tenant(slot).map(|tenant| tenant.asked(room)) else {
                continue;
            };
            let entered = address.as_ref().map_err(|_| Cause::PeerLost).and_then(|&ip| {
                let source = Source::Remote(SocketAddr::new(ip, port));
                manager.enter(slot, asked, &source, now, effects)
            });
            if let Err(cause) = entered {
                self.members[id.index()].worker.abort(slot, cause);
            }
        }
        self.settle(now);
    }

    /// The scheduler of a decode worker has leased pages: Destination leaves.
    pub fn expecting(&mut self, id: WorkerId, slot: Slot, tokens: Range<u32>, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        let pages =
            (tokens.start / worker.layout().page_size)..worker.layout().pages_for(tokens.end);
        let pages: Vec<_> = (pages.start as usize..pages.end as usize)
            .map(|index| worker.lists().page(slot.id, index))
            .collect();
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        let rest = Rest { prefix: tokens.start, pages: &pages };
        let transport = manager.expecting(slot, rest, now, effects);
        worker.expects(slot, tokens.start, transport);
        self.settle(now);
    }

    /// The scheduler of a prefill worker has computed what nobody has a Destination for yet.
    pub fn computed(&mut self, id: WorkerId, slot: Slot, now: Instant) {
        let Member { worker, role: Role::Prefill { manager, mover }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        let effects = &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer };
        manager.computed(slot, effects);
        self.settle(now);
    }

    /// Hand-overs that have ended well here, and of which their destinations have not said so.
    pub fn unheard(&self) -> usize {
        let unheard = |member: &Member| match &member.role {
            Role::Prefill { manager, .. } => manager.unheard_rooms(),
            Role::Decode { .. } | Role::Mixed => 0,
        };
        self.members.iter().map(unheard).sum()
    }

    /// Whether a destination has asked for a prompt that is read here, or nobody will.
    pub fn is_asked_for(&self, id: WorkerId, slot: Slot) -> bool {
        let Member { worker, role, .. } = &self.members[id.index()];
        match role {
            Role::Prefill { manager, .. } => {
                // What is handed over to nobody has been granted, and nobody asks for what has failed.
                manager.is_asked_for(slot)
                    || worker.status.load(slot.id).state != State::Bootstrapping
            }
            Role::Decode { .. } | Role::Mixed => true,
        }
    }

    /// The scheduler has ended a request.
    pub fn finished(&mut self, id: WorkerId, slot: Slot, failure: Option<Cause>, now: Instant) {
        self.unresolved.retain(|waiting| (waiting.worker, waiting.slot) != (id, slot));
        let Member { worker, role, .. } = &mut self.members[id.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.leave(
                    slot,
                    failure,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Decode { manager, mover, .. } => {
                manager.leave(
                    slot,
                    failure,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Mixed => {}
        }
        self.settle(now);
    }

    /// The scheduler has given a request back.
    pub fn released(&mut self, id: WorkerId, slot: Slot) {
        self.members[id.index()].worker.release(slot);
    }

    /// Asks a prefill worker for a request's KV.
    pub fn ask(&mut self, ask: Ask) {
        self.remote.push_back(Remote::Ask(Box::new(ask)));
    }

    /// Nobody waits any more for what was asked for a request.
    pub fn unask(&mut self, exchange: u64) {
        self.remote.push_back(Remote::Unask(exchange));
    }

    /// A prefill worker that was asked has said this.
    pub fn hear(&mut self, exchange: u64, word: Word) {
        self.words.push_back((exchange, word));
    }

    /// The next word, and of which request it is.
    pub fn poll_word(&mut self) -> Option<(u64, Word)> {
        self.words.pop_front()
    }

    /// Whether a mover, or a prefill worker that was asked, has something to say.
    pub fn has_news(&self) -> bool {
        !self.words.is_empty()
            || self
                .members
                .iter()
                .any(|member| member.reports.as_ref().is_some_and(|reports| !reports.is_empty()))
    }

    /// Takes in what movers say, sends what waited, ends what is overdue. True when there was something.
    pub fn turn(&mut self, now: Instant) -> bool {
        let mut busy = false;
        for index in 0..self.members.len() {
            while let Some(report) =
                self.members[index].reports.as_ref().and_then(|ring| ring.try_recv().ok())
            {
                busy = true;
                let Member { worker, role, .. } = &mut self.members[index];
                let wishes = &mut self.wishes;
                match role {
                    Role::Prefill { manager, mover } => {
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, wishes, offer: &self.offer },
                        );
                    }
                    Role::Decode { manager, mover, .. } => {
                        manager.report(
                            report,
                            now,
                            &mut Effects { worker, mover, wishes, offer: &self.offer },
                        );
                    }
                    Role::Mixed => {}
                }
                self.settle(now);
            }
        }
        busy
    }

    /// Ends what is overdue in the managers, and sends what found a full ring.
    pub fn expire(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            let Member { worker, role, .. } = &mut self.members[index];
            worker.engine.flush();
            let wishes = &mut self.wishes;
            match role {
                Role::Prefill { manager, mover } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, wishes, offer: &self.offer });
                }
                Role::Decode { manager, mover, .. } => {
                    mover.flush();
                    manager.expire(now, &mut Effects { worker, mover, wishes, offer: &self.offer });
                }
                Role::Mixed => {}
            }
        }
        self.settle(now);
    }

    /// Turns down what destinations want of rooms that no request of this process is in.
    pub fn refuse_early(&mut self, cause: Cause, now: Instant) {
        for Member { worker, role, .. } in &mut self.members {
            if let Role::Prefill { manager, mover } = role {
                let wishes = &mut self.wishes;
                manager.refuse_early(
                    cause,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
        }
        self.settle(now);
    }

    /// What destinations of this process offer.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// A link that was dialled is open and proven.
    pub fn link_up(&mut self, id: WorkerId, source: &Source, link: Link, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        manager.link_up(
            source,
            link,
            now,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// A prefill worker could not be reached or proven.
    pub fn dial_failed(&mut self, id: WorkerId, source: &Source, cause: Cause, now: Instant) {
        let Member { worker, role: Role::Decode { manager, mover, .. }, .. } =
            &mut self.members[id.index()]
        else {
            return;
        };
        manager.dial_failed(
            source,
            cause,
            now,
            &mut Effects { worker, mover, wishes: &mut self.wishes, offer: &self.offer },
        );
        self.settle(now);
    }

    /// A link to another process is dead.
    pub fn link_down(&mut self, conn: ConnId, cause: Cause, now: Instant) {
        let link = Link::Remote(conn);
        self.bound.remove(&link);
        for Member { worker, role, .. } in &mut self.members {
            let wishes = &mut self.wishes;
            match role {
                Role::Prefill { manager, mover } => {
                    manager.link_down(
                        link,
                        &mut Effects { worker, mover, wishes, offer: &self.offer },
                    );
                }
                Role::Decode { manager, mover, .. } => {
                    manager.link_down(
                        link,
                        cause,
                        now,
                        &mut Effects { worker, mover, wishes, offer: &self.offer },
                    );
                }
                Role::Mixed => {}
            }
        }
        self.settle(now);
    }

    /// A message has come from another process. It is for the one worker that talks to others.
    pub fn receive(&mut self, conn: ConnId, message: &Message<'_>, now: Instant) {
        self.give(WorkerId(0), Link::Remote(conn), message, now);
        self.settle(now);
    }
}

/// Has a prefill worker hand over to nobody, without a Destination: no manager knows of the room.
fn grant_to_nobody(worker: &mut Worker, slot: Slot, room: Room) -> Result<(), Cause> {
    let Slot { id: slot, generation } = slot;
    worker.status.advance(slot, generation, Move::Grant).map_err(|_| Cause::OtherLeg)?;
    let target = Target { session: SessionId::NOBODY, slot, generation, room, prefix: 0 };
    worker.engine.send(Command::Granted { worker: worker.id, slot, generation, target });
    Ok(())
}

/// A prompt as both legs compare it.
pub fn prompt_of(ids: &[u32]) -> Prompt {
    Prompt { tokens: ids.len() as u32, hash: crate::wire::message::ids_hash(ids) }
}

/// A room for a new attempt: 63 random bits.
pub fn room_of(random: u64) -> Room {
    Room(random >> 1)
}

/// Where a queue pair's packets begin to count.
fn sequence() -> u32 {
    u32::from_le_bytes(random())
}

/// Bytes nobody can guess.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // The kernel's generator does not fail once it is seeded.
    let _ = getrandom::fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
