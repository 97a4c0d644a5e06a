//! The set-up of a link: a decode worker looks up and dials a source, the prefill worker accepts,
//! and both exchange identities.
//!
//! Thread: `ctl`. Invariants: unproven connections are bounded, and the oldest is closed first; a
//! peer has one incoming link, and a later one replaces it. Not here: the proof (`wire::link`).

use super::peer_link::{LinkEnd, PeerLink};
use super::{ControlLinks, display};
use crate::cause::Cause;
use crate::ids::{Role, WorkerId};
use crate::limits::UNPROVEN_CONNECTIONS_MAX;
use crate::link::handoff::{Handoff, LinkId, Source};
use crate::link::lookup::LookupResult;
use crate::net::{ConnId, Reactor};
use crate::obs::log::event;
use crate::stdx::failpoint::is_failpoint_active;
use crate::transfer::answer::TransferAnswer;
use crate::wire::auth::Side;
use crate::wire::link::ControlLink;
use crate::wire::message::{Hello, MINOR, VERSION};
use std::net::SocketAddr;
use std::time::Instant;

impl ControlLinks {
    /// Closes the oldest unproven incoming connection if there are too many.
    pub(super) fn close_oldest_unproven<E: From<TransferAnswer>>(
        &mut self,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let is_stranger = |(_, peer_link): &(&ConnId, &PeerLink)| {
            peer_link.peer.is_none() && peer_link.dialled.is_none()
        };
        let strangers = || self.links.iter().filter(is_stranger);
        if strangers().count() < UNPROVEN_CONNECTIONS_MAX {
            return;
        }
        let oldest =
            strangers().min_by_key(|(_, peer_link)| peer_link.since).map(|(&conn, _)| conn);
        if let Some(conn) = oldest {
            reactor.close(conn);
            let end =
                LinkEnd::lost("too many connections are unproven, and this one is the oldest");
            self.drop_link(conn, &end, reactor, handoff, now);
        }
    }

    pub(super) fn hello(&mut self, reactor: &mut Reactor) -> Hello {
        self.connections += 1;
        let version = |index: usize| {
            env!("CARGO_PKG_VERSION")
                .split('.')
                .nth(index)
                .and_then(|part| part.parse().ok())
                .unwrap_or(0)
        };
        Hello {
            peer: self.own.peer,
            connection: self.connections,
            capabilities: 0,
            software: [version(0), version(1), version(2)],
            ranks: 1,
            role: self.own.role,
            nonce: reactor.entropy().bytes(),
            minor: MINOR,
            keys: self.own.keys.ids(),
        }
    }

    pub(super) fn add(
        &mut self,
        conn: ConnId,
        link: ControlLink,
        dialled: Option<(WorkerId, Source)>,
        address: Option<SocketAddr>,
        now: Instant,
    ) {
        let peer_link = PeerLink {
            link,
            dialled,
            address,
            peer: None,
            bye: None,
            since: now,
            heard: now,
            next_ping: now + self.timeouts.ping_every(),
        };
        self.links.insert(conn, peer_link);
    }

    /// Whether a link to this source is dialled but not proven yet.
    pub(super) fn is_on_its_way(&self, worker: WorkerId, source: &Source) -> bool {
        self.links.values().any(|peer_link| {
            let dialled = peer_link.dialled.as_ref().map(|(worker, source)| (*worker, source));
            peer_link.peer.is_none() && dialled == Some((worker, source))
        })
    }

    /// Takes the result of a look-up and dials the control address.
    pub(super) fn handle_lookup<E: From<TransferAnswer>>(
        &mut self,
        found: LookupResult,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) {
        let LookupResult { worker, source, control, until } = found;
        let dialled = control.and_then(|address| {
            let conn = reactor.connect(&address.into(), until);
            conn.map(|conn| (conn, address)).map_err(|reason| reason.to_string())
        });
        match dialled {
            Ok((conn, address)) => {
                let hello = self.hello(reactor);
                let link = ControlLink::new(Side::Dialer, hello, self.own.keys.clone());
                self.add(conn, link, Some((worker, source)), Some(address), now);
            }
            Err(why) => {
                event!(
                    Warn,
                    "peers",
                    "prefill worker cannot be reached",
                    source = source,
                    why = why
                );
                handoff.dial_failed(worker, &source, Cause::PeerLost, now);
            }
        }
    }

    /// Opens the link of a peer that has proven itself. If a peer has several connections, the
    /// newest counts.
    pub(super) fn open_link<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        hello: &Hello,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) -> Result<(), LinkEnd> {
        let Some(peer_link) = self.links.get_mut(&conn) else { return Ok(()) };
        let wanted = match self.own.role {
            Role::Decode => Role::Prefill,
            Role::Prefill | Role::Mixed => Role::Decode,
        };
        if hello.role != wanted {
            return Err(LinkEnd::incompatible(format!(
                "expected a {wanted} worker, found a {} worker",
                hello.role
            )));
        }
        peer_link.peer = Some((hello.peer, hello.connection));
        let wire = format!("{VERSION}.{}", peer_link.link.minor());
        let dialled = peer_link.dialled.clone();
        if self.draining {
            self.say_bye(conn, Cause::Draining);
        }
        if let Some((worker, source)) = dialled {
            event!(
                Info,
                "peers",
                "control link to a prefill worker is open",
                source = source,
                link = conn,
                wire = wire
            );
            handoff.link_up(worker, &source, LinkId::Remote(conn), now);
            return Ok(());
        }
        let address = self.links.get(&conn).and_then(|peer_link| peer_link.address);
        event!(
            Info,
            "peers",
            "control link from a decode worker is open",
            address = display(address),
            link = conn,
            wire = wire
        );
        self.close_older_links(conn, hello, reactor, handoff, now)
    }

    /// Closes the other connections of this peer.
    ///
    /// # Errors
    /// One of them is newer.
    fn close_older_links<E: From<TransferAnswer>>(
        &mut self,
        conn: ConnId,
        hello: &Hello,
        reactor: &mut Reactor,
        handoff: &mut Handoff<E>,
        now: Instant,
    ) -> Result<(), LinkEnd> {
        let older: Vec<ConnId> = self
            .links
            .iter()
            .filter(|(other, peer_link)| {
                **other != conn
                    && peer_link.dialled.is_none()
                    && peer_link.peer.is_some_and(|(peer, _)| peer.id == hello.peer.id)
            })
            .map(|(&conn, _)| conn)
            .filter(|_| !is_failpoint_active("older link of a peer stays"))
            .collect();
        for other in older {
            let newer = self.links.get(&other).and_then(|peer_link| peer_link.peer).is_some_and(
                |(peer, number)| {
                    peer.incarnation == hello.peer.incarnation && number > hello.connection
                },
            );
            if newer {
                return Err(LinkEnd::lost("an older connection of a peer that has a newer one"));
            }
            reactor.close(other);
            self.drop_link(
                other,
                &LinkEnd::lost("replaced by a newer connection"),
                reactor,
                handoff,
                now,
            );
        }
        Ok(())
    }
}
