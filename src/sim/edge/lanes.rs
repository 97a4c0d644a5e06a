//! Lanes of tcp of a process, by the rules of `peer::tcp_handshake`: dialled for a source, proven by their
//! preamble for a destination and then its mover's.

use super::{DATA_PORT, Edge, Output};
use crate::ids::SessionGeneration;
use crate::limits::{
    EARLY_LANES_MAX, PEER_PROOF_TIME_MAX, SESSION_SETUP_DEADLINE, UNPROVEN_CONNECTIONS_MAX,
};
use crate::peer::handoff::{DestinationSession, Handoff, SourceSession, rank};
use crate::sim::machines::Streams;
use crate::sim::process::WORKER;
use crate::sys::event::WaitSet;
use crate::sys::stream::memory::{self, MemoryStream};
use crate::transfer::command::DestinationCommand;
use crate::transfer::target::SessionId;
use crate::transfer::transport::tcp::{Preamble, TcpDestination, TcpSource};
use crate::transfer::transport::{Arrival, DestinationBinding};
use crate::wire::message::{Rank, Transport};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

/// Read at once of what a caller has sent.
const READ_BYTES: usize = 4096;

/// A lane that has not shown its preamble.
#[derive(Debug)]
struct Caller {
    stream: MemoryStream,
    received: Vec<u8>,
    until: Instant,
}

/// A lane whose session is not open yet.
#[derive(Debug)]
struct Early {
    session: SessionId,
    generation: SessionGeneration,
    arrival: Arrival,
    until: Instant,
}

/// Lanes on their way to a mover.
#[derive(Debug)]
pub(super) struct Lanes {
    streams: Streams,
    wait: Arc<WaitSet>,
    callers: Vec<Caller>,
    early: Vec<Early>,
    open: BTreeMap<SessionId, SessionGeneration>,
}

impl Lanes {
    pub(super) fn new(streams: Streams, wait: Arc<WaitSet>) -> Lanes {
        Lanes { streams, wait, callers: Vec::new(), early: Vec::new(), open: BTreeMap::new() }
    }

    /// The kernel has taken a connection at the data port.
    pub(super) fn accept(&mut self, stream: MemoryStream, now: Instant) {
        if self.callers.len() >= UNPROVEN_CONNECTIONS_MAX
            && let Some(oldest) =
                (0..self.callers.len()).min_by_key(|&caller| self.callers[caller].until)
        {
            self.callers.remove(oldest);
        }
        self.callers.push(Caller {
            stream,
            received: Vec::new(),
            until: now + PEER_PROOF_TIME_MAX,
        });
    }

    /// Looks at what callers have sent.
    pub(super) fn read(&mut self, handoff: &mut Handoff, now: Instant) {
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.read() {
                false => {}
                true if caller.received.len() < Preamble::BYTES => self.callers.push(caller),
                true => self.prove(caller, handoff, now),
            }
        }
    }

    /// A preamble is whole: its token says whose lane it is.
    fn prove(&mut self, mut caller: Caller, handoff: &mut Handoff, now: Instant) {
        let early = caller.received.split_off(Preamble::BYTES);
        let bytes = caller.received.as_slice().try_into().expect("as many bytes");
        let preamble = Preamble::parse(bytes).expect("a worker's preamble");
        let known = handoff
            .session_of(&preamble.token.0)
            .filter(|_| preamble.lanes == handoff.offer().lanes);
        let Some((_, session)) = known else { return };
        let arrival = Arrival { lane: preamble.lane, stream: caller.stream.into(), early };
        if self.open.get(&session) == Some(&preamble.session) {
            join(session, arrival, handoff);
        } else if self.early.len() < EARLY_LANES_MAX {
            let (generation, until) = (preamble.session, now + SESSION_SETUP_DEADLINE);
            self.early.push(Early { session, generation, arrival, until });
        }
    }

    /// The half of a destination's session, to be opened.
    pub(super) fn expect(
        &self,
        session: &DestinationSession,
        handoff: &Handoff,
    ) -> Box<DestinationBinding> {
        let slots = handoff.worker(WORKER).slots();
        let lanes = usize::from(handoff.offer().lanes);
        Box::new(TcpDestination::new(session.template.clone(), lanes, slots, self.wait.clone()))
    }

    /// The session's half is with the mover: lanes that came before go there too.
    pub(super) fn opened(
        &mut self,
        session: SessionId,
        generation: SessionGeneration,
        handoff: &mut Handoff,
    ) {
        self.open.insert(session, generation);
        for early in std::mem::take(&mut self.early) {
            if (early.session, early.generation) == (session, generation) {
                join(session, early.arrival, handoff);
            } else {
                self.early.push(early);
            }
        }
    }

    /// Closes callers that show nothing and lanes whose session never opened.
    pub(super) fn expire(&mut self, now: Instant) {
        self.callers.retain(|caller| caller.until > now);
        self.early.retain(|early| early.until > now);
    }
}

impl Caller {
    /// Reads what is there; false: it is gone.
    fn read(&mut self) -> bool {
        let mut bytes = [0; READ_BYTES];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(read) => self.received.extend(&bytes[..read]),
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
    }
}

impl Edge {
    /// Dials a destination's data port and gives the source's mover its half.
    pub(super) fn dial_lanes(&mut self, session: SourceSession) -> Result<Rank, String> {
        let lanes = self.lanes.as_ref().ok_or("there are no streams here")?;
        let grant = session.rank.tcp.ok_or("the destination names no data port")?;
        let to = usize::from(grant.address.port() - DATA_PORT);
        let Streams { room, frame, .. } = lanes.streams;
        let (streams, kernels): (Vec<_>, Vec<_>) =
            (0..session.rank.lanes).map(|_| memory::stream(false, room)).unzip();
        let worker = self.handoff.worker(session.worker);
        let told = rank(worker, &[Transport::Tcp], self.handoff.offer(), None);
        let proof = (grant.token, session.generation);
        let half =
            TcpSource::new(streams, proof, session.template, worker.slots(), lanes.wait.clone());
        let half = half.map_err(|error| error.to_string())?.with_frames_of(frame);
        self.outbox.extend(kernels.into_iter().map(|kernel| Output::Lane { to, kernel }));
        self.handoff.open_source(session.worker, session.session, Box::new(half));
        Ok(told)
    }
}

fn join(session: SessionId, arrival: Arrival, handoff: &mut Handoff) {
    if let Some(mover) = handoff.destination_mover(WORKER) {
        mover.send(DestinationCommand::Join { session, arrival });
    }
}
