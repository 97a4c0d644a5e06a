//! Actions of the managers, other than commands in a ring. This module runs those inside this
//! process; `control` runs the others.
//!
//! Thread: `ctl`. Invariant: an action runs after the call that asked for it has returned, so one
//! manager never runs inside another. Not here: how managers ask for actions (`effects`), the
//! set-up of transports (`sessions`).

use super::Handoff;
use super::effects::{Effects, rank};
use super::endpoints::{EndpointKind, LinkId, Source, WorkerEndpoint};
use crate::ids::{SessionGeneration, WorkerId};
use crate::kv::layout::KvLayout;
use crate::limits::SESSION_SETUP_DEADLINE;
use crate::net::ConnId;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::plan::Template;
use crate::transfer::target::SessionId;
use crate::transfer::transport::rdma::PendingQueuePairs;
use crate::wire::Multipart;
use crate::wire::message::{Message, Rank, Token, Transport, Welcome};
use std::time::Instant;

/// An action that a manager wants.
#[derive(Debug)]
pub(super) enum Action {
    Send { from: WorkerId, link: LinkId, message: Multipart },
    Dial { from: WorkerId, source: Source },
    HangUp { link: LinkId },
    BindSource { link: LinkId, session: SourceSession },
    BindDestination { link: LinkId, session: DestinationSession },
    CloseSource { worker: WorkerId, session: SessionId },
    CloseDestination { worker: WorkerId, session: SessionId },
    Grant { worker: WorkerId, session: SessionId, token: Token },
    Offer { worker: WorkerId, session: SessionId, offer: PendingQueuePairs },
}

/// A source session that needs its transport.
#[derive(Debug)]
pub struct SourceSession {
    /// The prefill worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// The destination's number of the session.
    pub generation: SessionGeneration,
    /// Transport of the session.
    pub transport: Transport,
    /// The destination's offer.
    pub rank: Rank,
    /// Where the bytes go.
    pub template: Template,
}

/// A destination session that needs its transport.
#[derive(Debug)]
pub struct DestinationSession {
    /// The decode worker.
    pub worker: WorkerId,
    /// The session.
    pub session: SessionId,
    /// This worker's number of the session.
    pub generation: SessionGeneration,
    /// Transport of the session.
    pub transport: Transport,
    /// The source's half.
    pub rank: Rank,
    /// Layout of the source's KV.
    pub layout: KvLayout,
    /// Pages of the source's pool.
    pub pages: u32,
    /// Where the bytes arrive.
    pub template: Template,
}

/// An action that needs another process.
#[derive(Debug)]
pub enum RemoteAction {
    /// Send a message (not sealed yet).
    Send(ConnId, Multipart),
    /// Resolve the name of a prefill worker's host; [`Handoff::resolved`] follows.
    Resolve(String),
    /// Open a link to the prefill worker of this registry.
    Dial {
        /// The decode worker.
        worker: WorkerId,
        /// The prefill worker.
        source: Source,
        /// Deadline of the dial.
        until: Instant,
    },
    /// Close a link.
    HangUp(ConnId),
    /// Set up a source's half; [`Handoff::bound_source`] follows.
    BindSource(ConnId, SourceSession),
    /// Set up a destination's half; [`Handoff::bound_destination`] follows.
    BindDestination(ConnId, DestinationSession),
}

impl<E: From<TransferAnswer>> Handoff<E> {
    /// The next action that needs another process. Skips the set-up of a source session that has
    /// ended, because its index can belong to a session of another link. The peer would then get
    /// memory or queue pairs of the wrong session.
    pub fn poll_remote(&mut self) -> Option<RemoteAction> {
        loop {
            match self.remote_actions.pop_front()? {
                RemoteAction::BindSource(conn, session) if !self.stands(conn, &session) => {}
                remote => return Some(remote),
            }
        }
    }

    /// Runs the actions of the last call, unless they are running already.
    pub(super) fn run_actions(&mut self, now: Instant) {
        if !self.pumping {
            self.pumping = true;
            self.pump(now);
            self.pumping = false;
        }
    }

    fn pump(&mut self, now: Instant) {
        while let Some(action) = self.outbox.actions.pop_front() {
            match action {
                Action::Send { from, link: LinkId::Local { source, destination }, message } => {
                    self.send_local(from, (source, destination), &message, now);
                }
                Action::Send { link: LinkId::Remote(conn), message, .. } => {
                    self.remote_actions.push_back(RemoteAction::Send(conn, message));
                }
                Action::Dial { from, source } => self.dial_source(from, source, now),
                Action::HangUp { link: LinkId::Local { .. } } => {}
                Action::HangUp { link: LinkId::Remote(conn) } => {
                    self.remote_actions.push_back(RemoteAction::HangUp(conn))
                }
                Action::BindSource { link, session } => {
                    self.bound.insert(link, (session.worker, session.session, session.generation));
                    match link {
                        LinkId::Local { .. } => self.bind_source(&session),
                        LinkId::Remote(conn) => {
                            self.remote_actions.push_back(RemoteAction::BindSource(conn, session))
                        }
                    }
                }
                Action::CloseDestination { worker, session } => {
                    self.offers.remove(&(worker, session));
                    // Tokens of an ended session are void.
                    if !is_failpoint_active("token outlives its session") {
                        self.tokens.retain(|_, held| *held != (worker, session));
                    }
                }
                Action::BindDestination { link: LinkId::Remote(conn), session } => {
                    // The source has chosen another transport.
                    if session.transport != Transport::Rdma {
                        self.offers.remove(&(session.worker, session.session));
                    }
                    self.remote_actions.push_back(RemoteAction::BindDestination(conn, session));
                }
                Action::BindDestination { link, session } => {
                    let (worker, id) = (session.worker, session.session);
                    let half = self.bind_destination(link, &session);
                    self.bound_destination(worker, id, session.generation, half, now);
                }
                Action::CloseSource { worker, session } => {
                    self.rings.remove(&(worker, session));
                    self.bound.retain(|_, held| (held.0, held.1) != (worker, session));
                }
                Action::Offer { worker, session, offer } => {
                    drop(self.offers.insert((worker, session), offer))
                }
                Action::Grant { worker, session, token } => {
                    self.tokens.retain(|_, held| *held != (worker, session));
                    let before = self.tokens.insert(token.0, (worker, session));
                    debug_assert!(before.is_none(), "a token opens one session");
                }
            }
        }
    }

    /// Delivers a message between two workers of this process. A worker's link to itself leads to
    /// the fake source, which accepts each session and reads nothing.
    fn send_local(
        &mut self,
        from: WorkerId,
        (source, destination): (WorkerId, WorkerId),
        message: &Multipart,
        now: Instant,
    ) {
        if source == destination {
            return self.take_fake(from, message, now);
        }
        let to = if from == source { destination } else { source };
        match Message::decode(message.parts(), None) {
            Ok(Some(message)) => {
                self.deliver_message(to, LinkId::Local { source, destination }, &message, now);
            }
            _ => debug_assert!(false, "a message of our own does not decode"),
        }
    }

    /// Workers of one process need no handshake, because they start together.
    fn dial_source(&mut self, worker: WorkerId, source: Source, now: Instant) {
        let home = match source {
            Source::Local(home) => home,
            Source::Fake => worker,
            Source::Remote(_) | Source::Named { .. } => {
                let until = now + SESSION_SETUP_DEADLINE;
                return self.remote_actions.push_back(RemoteAction::Dial { worker, source, until });
            }
        };
        let link = LinkId::Local { source: home, destination: worker };
        self.link_up(worker, &source, link, now);
    }

    pub(super) fn deliver_message(
        &mut self,
        to: WorkerId,
        link: LinkId,
        message: &Message<'_>,
        now: Instant,
    ) {
        let WorkerEndpoint { worker, kind: role, .. } = &mut self.endpoints[to.index()];
        match role {
            EndpointKind::Prefill { manager, mover } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                );
            }
            EndpointKind::Decode { manager, mover, .. } => {
                manager.receive(
                    link,
                    message,
                    now,
                    &mut Effects { worker, mover, outbox: &mut self.outbox },
                );
            }
            EndpointKind::Mixed => {}
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
            ranks: vec![rank(worker, &[Transport::Fake], &self.outbox.offer, None)],
        };
        let link = LinkId::Local { source: from, destination: from };
        self.deliver_message(from, link, &Message::Welcome(Box::new(welcome)), now);
    }
}
