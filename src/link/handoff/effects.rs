//! Effects of a manager's call. Commands go into the worker's rings at once. Other effects become
//! actions that run after the call.
//!
//! Thread: `ctl`. Not here: how actions run (`actions`).

use super::{Action, DestinationSession, LinkId, Source, SourceSession, TransportCapabilities};
use crate::cause::Cause;
use crate::ids::{PageId, SessionGeneration, WorkerId};
use crate::kv::page_span::PageSpan;
use crate::link::local_worker::{DestinationRing, LocalWorker, SourceRing};
use crate::net::Entropy;
use crate::obs::log::event;
use crate::transfer::answer::TransferAnswer;
use crate::transfer::command::{DestinationCommand, SourceCommand};
use crate::transfer::manager::choice::{ChoiceReason, TransportChoice};
use crate::transfer::manager::destination::{self, DestinationEffects};
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::manager::source::{self, SourceEffects};
use crate::transfer::target::{SessionId, Target};
use crate::transfer::transport::rdma::PendingQueuePairs;
use crate::wire::Multipart;
use crate::wire::message::{
    Message, Rank, RegionLengths, ShmGrant, SocketName, TcpGrant, Token, Transport,
};
use std::collections::VecDeque;
use std::time::Duration;

/// The rank that a worker announces in a session. `lanes` allows the other side to open TCP lanes.
pub fn rank<E>(
    worker: &LocalWorker<E>,
    transports: &[Transport],
    offer: &TransportCapabilities,
    lanes: Option<TcpGrant>,
) -> Rank {
    let shm = transports.contains(&Transport::Shm).then(|| ShmGrant {
        host: offer.host,
        // An offer has no socket to dial, and a session inside a process has none either.
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

/// Collects the effects of one manager call.
pub struct Effects<'a, E, M> {
    /// The worker of the manager.
    pub worker: &'a mut LocalWorker<E>,
    /// The ring of its mover.
    pub mover: &'a mut M,
    /// What all managers share.
    pub outbox: &'a mut Outbox,
}

/// What the managers of all workers of a process share.
#[derive(Debug)]
pub struct Outbox {
    /// Actions to run after the call.
    pub actions: VecDeque<Action>,
    /// Logprobs of prompts that have arrived, with the slot of their request.
    pub records: VecDeque<(WorkerId, Slot, Vec<u8>)>,
    /// The transports that destinations offer.
    pub offer: TransportCapabilities,
    /// Random numbers for tokens and queue pairs.
    pub entropy: Entropy,
}

impl<E: From<TransferAnswer>, M> Effects<'_, E, M> {
    fn send_over(&mut self, link: LinkId, message: &Message<'_>) {
        let mut encoded = Multipart::new();
        message.encode(None, &mut encoded);
        self.outbox.actions.push_back(Action::Send {
            from: self.worker.id,
            link,
            message: encoded,
        });
    }

    fn chosen(&self, mut choice: TransportChoice, link: LinkId, generation: SessionGeneration) {
        // Inside a process, shm is the only transport.
        if let (LinkId::Local { .. }, Transport::Shm) = (link, choice.transport) {
            choice.why = ChoiceReason::SameHost;
        }
        let TransportChoice { transport, why } = choice;
        // A self-test hands over to no real worker, so no counter includes it.
        if transport == Transport::Fake {
            return event!(
                Debug,
                "handoff",
                "transport of a session chosen",
                link = link,
                generation = generation,
                transport = transport
            );
        }
        self.worker.memory.counters.count_session(choice);
        event!(
            Info,
            "handoff",
            "transport of a session chosen",
            link = link,
            generation = generation,
            transport = transport,
            why = why
        );
    }

    fn engine_failed(&mut self, slot: Slot, cause: Cause) {
        self.worker.abort(slot, cause);
    }
}

impl<E: From<TransferAnswer>> SourceEffects<LinkId> for Effects<'_, E, SourceRing> {
    fn send(&mut self, link: LinkId, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: SourceCommand) {
        if let SourceCommand::Close { session } = command {
            self.outbox.actions.push_back(Action::CloseSource { worker: self.worker.id, session });
        }
        self.mover.send(command);
    }

    fn bind(&mut self, link: LinkId, session: SessionId, how: source::SourceSetup<'_>) {
        debug_assert_eq!(how.announce.ranks.len(), 1, "an accepted Announce has one rank");
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
        self.outbox.actions.push_back(Action::BindSource { link, session });
    }

    fn granted(&mut self, slot: Slot, target: Target, first: usize, pages: &[PageId]) {
        debug_assert!(
            self.worker.slot_request(slot).is_some(),
            "a grant is for a request with its slot"
        );
        let Slot { id: slot, generation } = slot;
        if let Some(rails) = self.worker.rails.as_ref().filter(|_| !pages.is_empty()) {
            rails.targets.store(slot, PageSpan { first, pages });
        }
        self.worker.tell(TransferAnswer::Granted {
            worker: self.worker.id,
            slot,
            generation,
            target,
        });
    }

    fn awaited(&mut self, slot: Slot) {
        let Slot { id: slot, generation } = slot;
        self.worker.tell(TransferAnswer::Awaited { worker: self.worker.id, slot, generation });
    }

    fn hang_up(&mut self, link: LinkId) {
        self.outbox.actions.push_back(Action::HangUp { link });
    }

    fn failed(&mut self, slot: Slot, cause: Cause) {
        self.engine_failed(slot, cause);
    }

    fn refused(&mut self, link: LinkId, mismatch: &Mismatch) {
        event!(Warn, "handoff", "session refused", link = link, why = mismatch);
    }
}

impl<E: From<TransferAnswer>> DestinationEffects<LinkId, Source>
    for Effects<'_, E, DestinationRing>
{
    fn send(&mut self, link: LinkId, message: &Message<'_>) {
        self.send_over(link, message);
    }

    fn mover(&mut self, command: DestinationCommand) {
        if let DestinationCommand::Close { session } = command {
            self.outbox
                .actions
                .push_back(Action::CloseDestination { worker: self.worker.id, session });
        }
        self.mover.send(command);
    }

    fn dial(&mut self, source: &Source) {
        self.outbox
            .actions
            .push_back(Action::Dial { from: self.worker.id, source: source.clone() });
    }

    fn hang_up(&mut self, link: LinkId) {
        self.outbox.actions.push_back(Action::HangUp { link });
    }

    fn record(&mut self, slot: Slot, bytes: &[u8]) {
        self.outbox.records.push_back((self.worker.id, slot, bytes.to_vec()));
    }

    fn make_rank(
        &mut self,
        session: SessionId,
        source: &Source,
        without: &[Transport],
    ) -> Option<Rank> {
        let mut transports = match source {
            Source::Fake => vec![Transport::Fake],
            _ => self.outbox.offer.transports.clone(),
        };
        transports.retain(|transport| !without.contains(transport));
        let lanes = self.outbox.offer.data.filter(|_| transports.contains(&Transport::Tcp)).map(
            |address| {
                let token = Token(self.outbox.entropy.bytes());
                self.outbox.actions.push_back(Action::Grant {
                    worker: self.worker.id,
                    session,
                    token,
                });
                TcpGrant { address, token }
            },
        );
        let mut offered = rank(self.worker, &transports, &self.outbox.offer, lanes);
        if let Some(rails) =
            self.worker.rails.as_ref().filter(|_| transports.contains(&Transport::Rdma))
        {
            match PendingQueuePairs::new(rails, || self.outbox.entropy.next_u32()) {
                Ok(offer) => {
                    offered.rdma = Some(offer.grant());
                    self.outbox.actions.push_back(Action::Offer {
                        worker: self.worker.id,
                        session,
                        offer,
                    });
                }
                Err(why) => event!(Warn, "handoff", "rdma cannot be offered", why = why),
            }
        }
        let is_absent = |transport: &Transport| !offered.offers(*transport);
        debug_assert!(without.iter().all(is_absent), "an offer leaves out what it must");
        let is_open = Transport::ALL.into_iter().any(|transport| offered.offers(transport));
        is_open.then_some(offered)
    }

    fn withdraw(&mut self, session: SessionId) {
        self.outbox.actions.push_back(Action::CloseDestination { worker: self.worker.id, session });
    }

    fn bind(&mut self, link: LinkId, session: SessionId, how: destination::DestinationSetup<'_>) {
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
        self.outbox.actions.push_back(Action::BindDestination { link, session });
    }

    fn ready(&mut self, slot: Slot, session: SessionId) {
        debug_assert!(self.worker.slot_request(slot).is_some(), "a request waits in its slot");
        let Slot { id: slot, generation } = slot;
        self.worker.tell(TransferAnswer::SessionReady {
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
            "a transport that carried no data is left out for a while",
            source = source,
            transport = transport,
            seconds = time.as_secs()
        );
    }

    fn refused(&mut self, source: &Source, mismatch: &Mismatch) {
        event!(Warn, "handoff", "session refused", source = source, why = mismatch);
    }
}
