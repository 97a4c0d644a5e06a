//! What managers want done beyond their rings: between workers of this process it is done here, the rest by who has the links to
//! others (`peers`).
//!
//! Thread: `ctl`. Invariant: it is done when the call that wanted it has returned, so that one manager never runs inside
//! another. Not here: what a manager wants (`effects`), the set-up of transports (`sessions`).

use super::Handoff;
use super::effects::{Effects, rank};
use super::parties::{Link, Member, Role, Source};
use crate::front::asking::Ask;
use crate::ids::{SessionGeneration, WorkerId};
use crate::kv::layout::KvLayout;
use crate::limits::SESSION_SETUP_DEADLINE;
use crate::net::ConnId;
use crate::transfer::command::SessionId;
use crate::transfer::plan::Template;
use crate::transfer::transport::rdma::RdmaOffer;
use crate::wire::Multipart;
use crate::wire::message::{Message, Rank, Token, Transport, Welcome};
use std::time::Instant;

/// What a manager wants done.
#[derive(Debug)]
pub(super) enum Wish {
    Send { from: WorkerId, link: Link, message: Multipart },
    Dial { from: WorkerId, source: Source },
    HangUp { link: Link },
    BindSource { link: Link, session: SourceSession },
    BindDestination { link: Link, session: DestinationSession },
    CloseSource { worker: WorkerId, session: SessionId },
    CloseDestination { worker: WorkerId, session: SessionId },
    Grant { worker: WorkerId, session: SessionId, token: Token },
    Offer { worker: WorkerId, session: SessionId, offer: RdmaOffer },
}

/// A source's session whose transport is to be set up.
#[derive(Debug)]
pub struct SourceSession {
    /// The prefill worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// As the destination counts it.
    pub generation: SessionGeneration,
    /// How bytes are to move.
    pub transport: Transport,
    /// What the destination offers.
    pub rank: Rank,
    /// Where they go.
    pub template: Template,
}

/// A destination's session whose transport is to be set up.
#[derive(Debug)]
pub struct DestinationSession {
    /// The decode worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// As this worker counts it.
    pub generation: SessionGeneration,
    /// How bytes are to move.
    pub transport: Transport,
    /// The source's half.
    pub rank: Rank,
    /// Where KV lies at the source.
    pub layout: KvLayout,
    /// Pages of the source's pool.
    pub pages: u32,
    /// Where the bytes come to.
    pub template: Template,
}

/// What is to be done for links to other processes.
#[derive(Debug)]
pub enum Remote {
    /// Send a message (not sealed yet).
    Send(ConnId, Multipart),
    /// Ask a prefill worker for a request's KV; [`Handoff::hear`] follows.
    Ask(Box<Ask>),
    /// What was asked for this request is of no interest any more.
    Unask(u64),
    /// Resolve the name of a prefill worker's host; [`Handoff::resolved`] follows.
    Resolve(String),
    /// Open a link to the prefill worker at this registry.
    Dial {
        /// The decode worker.
        worker: WorkerId,
        /// Whom.
        source: Source,
        /// When it is given up.
        until: Instant,
    },
    /// Close a link.
    HangUp(ConnId),
    /// Set up a source's half; [`Handoff::bound_source`] follows.
    BindSource(ConnId, SourceSession),
    /// Set up a destination's half; [`Handoff::bound_destination`] follows.
    BindDestination(ConnId, DestinationSession),
}

impl Handoff {
    /// What is to be done for links to other processes. What a source's session needs is not, once that has gone: its
    /// place may be another link's already, whose destination would be told of memory or queue pairs that are not its.
    pub fn poll_remote(&mut self) -> Option<Remote> {
        loop {
            match self.remote.pop_front()? {
                Remote::BindSource(conn, session) if !self.stands(conn, &session) => {}
                remote => return Some(remote),
            }
        }
    }

    /// Does what the last call made necessary, unless that is under way.
    pub(super) fn settle(&mut self, now: Instant) {
        if !self.pumping {
            self.pumping = true;
            self.pump(now);
            self.pumping = false;
        }
    }

    fn pump(&mut self, now: Instant) {
        while let Some(wish) = self.wishes.pop_front() {
            match wish {
                // A link to oneself leads to the fake source, which takes every session and reads nothing.
                Wish::Send { from, link: Link::Local { source, destination }, message }
                    if source == destination =>
                {
                    self.take_fake(from, &message, now);
                }
                Wish::Send { from, link: Link::Local { source, destination }, message } => {
                    let to = if from == source { destination } else { source };
                    let Ok(Some(message)) = Message::decode(message.parts(), None) else {
                        debug_assert!(false, "a message of our own does not decode");
                        continue;
                    };
                    self.give(to, Link::Local { source, destination }, &message, now);
                }
                Wish::Send { link: Link::Remote(conn), message, .. } => {
                    self.remote.push_back(Remote::Send(conn, message));
                }
                // Workers of one process need no handshake: they were started together.
                Wish::Dial { from, source: Source::Local(at) } => {
                    self.link_up(
                        from,
                        &Source::Local(at),
                        Link::Local { source: at, destination: from },
                        now,
                    );
                }
                Wish::Dial { from, source: Source::Fake } => {
                    self.link_up(
                        from,
                        &Source::Fake,
                        Link::Local { source: from, destination: from },
                        now,
                    );
                }
                Wish::Dial { from: worker, source } => {
                    let until = now + SESSION_SETUP_DEADLINE;
                    self.remote.push_back(Remote::Dial { worker, source, until });
                }
                Wish::HangUp { link: Link::Local { .. } } => {}
                Wish::HangUp { link: Link::Remote(conn) } => {
                    self.remote.push_back(Remote::HangUp(conn))
                }
                Wish::BindSource { link, session } => {
                    self.bound.insert(link, (session.worker, session.session, session.generation));
                    match link {
                        Link::Local { .. } => self.bind_source(&session),
                        Link::Remote(conn) => {
                            self.remote.push_back(Remote::BindSource(conn, session))
                        }
                    }
                }
                Wish::CloseDestination { worker, session } => {
                    self.offers.remove(&(worker, session));
                    // What it announced is over, and opens nothing any more.
                    self.tokens.retain(|_, held| *held != (worker, session));
                }
                Wish::BindDestination { link: Link::Remote(conn), session } => {
                    // Another way was taken.
                    if session.transport != Transport::Rdma {
                        self.offers.remove(&(session.worker, session.session));
                    }
                    self.remote.push_back(Remote::BindDestination(conn, session));
                }
                Wish::BindDestination { link, session } => {
                    let (worker, id) = (session.worker, session.session);
                    let half = self.bind_destination(link, &session);
                    self.bound_destination(worker, id, session.generation, half, now);
                }
                Wish::CloseSource { worker, session } => {
                    self.rings.remove(&(worker, session));
                    self.bound.retain(|_, held| (held.0, held.1) != (worker, session));
                }
                Wish::Offer { worker, session, offer } => {
                    drop(self.offers.insert((worker, session), offer))
                }
                Wish::Grant { worker, session, token } => {
                    self.tokens.retain(|_, held| *held != (worker, session));
                    self.tokens.insert(token.0, (worker, session));
                }
            }
        }
    }

    pub(super) fn give(&mut self, to: WorkerId, link: Link, message: &Message<'_>, now: Instant) {
        let Member { worker, role, .. } = &mut self.members[to.index()];
        let wishes = &mut self.wishes;
        match role {
            Role::Prefill { manager, mover } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Decode { manager, mover, .. } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, wishes, offer: &self.offer },
                );
            }
            Role::Mixed => {}
        }
    }

    fn take_fake(&mut self, from: WorkerId, message: &Multipart, now: Instant) {
        let Ok(Some(Message::Announce(announce))) = Message::decode(message.parts(), None) else {
            return;
        };
        let worker = self.worker(from);
        let welcome = Welcome {
            session: announce.session,
            transport: Transport::Fake,
            late: false,
            kv: announce.kv,
            ranks: vec![rank(worker, &[Transport::Fake], &self.offer, None)],
        };
        let link = Link::Local { source: from, destination: from };
        self.give(from, link, &Message::Welcome(Box::new(welcome)), now);
    }
}
