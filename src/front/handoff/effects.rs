//! What a manager's call makes happen: commands to its rings at once, all else as a wish for after the call.
//!
//! Thread: `ctl`.

use super::{DestinationSession, Link, Offer, Source, SourceSession, Wish, random, sequence};
use crate::cause::Cause;
use crate::front::worker::{DestinationRing, SourceRing, Worker};
use crate::ids::{PageId, SessionGeneration};
use crate::obs::log::event;
use crate::sched::mailbox::Command;
use crate::transfer::command::{DestinationCommand, SessionId, SourceCommand, Target};
use crate::transfer::manager::choice::{Choice, Why};
use crate::transfer::manager::destination::{self, DestinationEffects};
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::{self, SourceEffects};
use crate::transfer::transport::rdma::RdmaOffer;
use crate::wire::Multipart;
use crate::wire::message::{
    Message, Rank, RegionLengths, ShmGrant, SocketName, TcpGrant, Token, Transport,
};
use std::collections::VecDeque;
use std::time::Duration;

/// What one worker shows of itself in a session. `lanes` lets the other side open lanes of tcp.
pub fn rank(
    worker: &Worker,
    transports: &[Transport],
    offer: &Offer,
    lanes: Option<TcpGrant>,
) -> Rank {
    let shm = transports.contains(&Transport::Shm).then(|| ShmGrant {
        host: offer.host,
        // Inside a process, and in an offer, there is nothing to dial yet.
        socket: SocketName::new(b"-").expect("one byte fits"),
        token: Token([0; 16]),
    });
    Rank {
        regions: RegionLengths { kv: worker.memory.region.len() as u64, aux: 0, notice: 0 },
        lanes: offer.lanes,
        shm,
        rdma: None,
        tcp: lanes,
        fake: transports.contains(&Transport::Fake),
    }
}

/// One manager call's way out.
pub struct Effects<'a, M> {
    /// Whose manager is called.
    pub worker: &'a mut Worker,
    /// Its mover's ring.
    pub mover: &'a mut M,
    /// For after the call.
    pub wishes: &'a mut VecDeque<Wish>,
    /// What sessions are offered.
    pub offer: &'a Offer,
}

impl<M> Effects<'_, M> {
    fn send_over(&mut self, link: Link, message: &Message<'_>) {
        let mut encoded = Multipart::new();
        message.encode(None, &mut encoded);
        self.wishes.push_back(Wish::Send { from: self.worker.id, link, message: encoded });
    }

    fn chosen(&self, mut choice: Choice, link: Link, generation: SessionGeneration) {
        // Inside a process nothing else is offered.
        if let (Link::Local { .. }, Transport::Shm) = (link, choice.transport) {
            choice.why = Why::SameHost;
        }
        let Choice { transport, why } = choice;
        // A worker that tries itself out hands over to nobody.
        if transport == Transport::Fake {
            return event!(
                Debug,
                "handoff",
                "session",
                generation = generation,
                transport = transport
            );
        }
        self.worker.memory.tally.count_session(choice);
        event!(
            Info,
            "handoff",
            "session",
            generation = generation,
            transport = transport,
            why = why
        );
    }

    fn engine_failed(&mut self, slot: Slot, cause: Cause) {
        self.worker.abort(slot, cause);
    }
}

impl SourceEffects<Link> for Effects<'_, SourceRing> {
    fn send(&mut self, link: Link, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: SourceCommand) {
        if let SourceCommand::Close { session } = command {
            self.wishes.push_back(Wish::CloseSource { worker: self.worker.id, session });
        }
        self.mover.send(command);
    }

    fn bind(&mut self, link: Link, session: SessionId, how: source::Binding<'_>) {
        let generation = how.announce.session;
        self.chosen(how.choice, link, generation);
        let session = SourceSession {
            worker: self.worker.id,
            session,
            generation,
            transport: how.choice.transport,
            rank: how.announce.ranks[0],
            template: how.template,
        };
        self.wishes.push_back(Wish::BindSource { link, session });
    }

    fn granted(&mut self, slot: Slot, target: Target, first: usize, pages: &[PageId]) {
        let Slot { id: slot, generation } = slot;
        if let Some(rails) = self.worker.rails.as_ref().filter(|_| !pages.is_empty()) {
            rails.targets.store_from(slot, first, pages);
        }
        self.worker.engine.send(Command::Granted {
            worker: self.worker.id,
            slot,
            generation,
            target,
        });
    }

    fn awaited(&mut self, slot: Slot) {
        let Slot { id: slot, generation } = slot;
        self.worker.engine.send(Command::Awaited { worker: self.worker.id, slot, generation });
    }

    fn hang_up(&mut self, link: Link) {
        self.wishes.push_back(Wish::HangUp { link });
    }

    fn failed(&mut self, slot: Slot, cause: Cause) {
        self.engine_failed(slot, cause);
    }

    fn refused(&mut self, link: Link, mismatch: &Mismatch) {
        event!(Warn, "handoff", "session refused", link = link, why = mismatch);
    }
}

impl DestinationEffects<Link, Source> for Effects<'_, DestinationRing> {
    fn send(&mut self, link: Link, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: DestinationCommand) {
        if let DestinationCommand::Close { session } = command {
            self.wishes.push_back(Wish::CloseDestination { worker: self.worker.id, session });
        }
        self.mover.send(command);
    }

    fn dial(&mut self, source: &Source) {
        self.wishes.push_back(Wish::Dial { from: self.worker.id, source: source.clone() });
    }

    fn hang_up(&mut self, link: Link) {
        self.wishes.push_back(Wish::HangUp { link });
    }

    fn offer(
        &mut self,
        session: SessionId,
        source: &Source,
        without: &[Transport],
    ) -> Option<Rank> {
        let mut transports = match source {
            Source::Fake => vec![Transport::Fake],
            _ => self.offer.transports.clone(),
        };
        transports.retain(|transport| !without.contains(transport));
        let lanes =
            self.offer.data.filter(|_| transports.contains(&Transport::Tcp)).map(|address| {
                let token = Token(random());
                self.wishes.push_back(Wish::Grant { worker: self.worker.id, session, token });
                TcpGrant { address, token }
            });
        let mut offered = rank(self.worker, &transports, self.offer, lanes);
        if let Some(rails) =
            self.worker.rails.as_ref().filter(|_| transports.contains(&Transport::Rdma))
        {
            match RdmaOffer::new(rails, sequence) {
                Ok(offer) => {
                    offered.rdma = Some(offer.grant());
                    self.wishes.push_back(Wish::Offer { worker: self.worker.id, session, offer });
                }
                Err(why) => event!(Warn, "handoff", "rdma cannot be offered", why = why),
            }
        }
        let is_open = Transport::ALL.into_iter().any(|transport| offered.offers(transport));
        is_open.then_some(offered)
    }

    fn withdraw(&mut self, session: SessionId) {
        self.wishes.push_back(Wish::CloseDestination { worker: self.worker.id, session });
    }

    fn bind(&mut self, link: Link, session: SessionId, how: destination::Binding<'_>) {
        let Some(&rank) = how.welcome.ranks.first() else { return };
        self.chosen(how.choice, link, how.welcome.session);
        let session = DestinationSession {
            worker: self.worker.id,
            session,
            generation: how.welcome.session,
            transport: how.welcome.transport,
            rank,
            layout: how.layout,
            pages: how.welcome.kv.pages,
            template: how.template,
        };
        self.wishes.push_back(Wish::BindDestination { link, session });
    }

    fn ready(&mut self, slot: Slot, session: SessionId) {
        let Slot { id: slot, generation } = slot;
        self.worker.engine.send(Command::SessionReady {
            worker: self.worker.id,
            slot,
            generation,
            session,
        });
    }

    fn failed(&mut self, slot: Slot, cause: Cause) {
        self.engine_failed(slot, cause);
    }

    fn left_out(&mut self, source: &Source, transport: Transport, time: Duration) {
        event!(
            Warn,
            "handoff",
            "what carries nothing is left out for a while",
            source = source,
            transport = transport,
            seconds = time.as_secs()
        );
    }

    fn refused(&mut self, source: &Source, mismatch: &Mismatch) {
        event!(Warn, "handoff", "session refused", source = source, why = mismatch);
    }
}
