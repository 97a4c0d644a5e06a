//! The replacement of movers, managers and transports. It takes the commands to the movers, makes
//! the same changes in the status tables, and ends the same leases. The order is that of a pulled
//! transfer.
//!
//! Owns: live leases. A flow is one chunk of KV in transit. Not here: its duration (`nic`,
//! `cluster`), and failures, because no worker dies in the load mode. A worker can refuse a
//! request; then none of its KV is sent.

use crate::ids::{Generation, SlotId};
use crate::kv::lease::{Lease, MoverRight};
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{DestinationCommand, LeaseEnd, SourceCommand};
use crate::transfer::mover::Links;
use crate::transfer::status::{Move, State};
use crate::transfer::target::Target;

/// One use of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotUse {
    /// The slot.
    pub slot: SlotId,
    /// Generation of this use.
    pub generation: Generation,
}

/// KV of one chunk, in transit.
#[derive(Debug)]
pub struct ChunkTransfer {
    /// The host that sends it,
    pub from: usize,
    /// and its slot.
    pub source: SlotUse,
    /// The host that receives it,
    pub to: usize,
    /// and its slot.
    pub destination: SlotUse,
    /// Number of tokens in the chunk.
    pub tokens: u32,
    /// The aux record, with the last chunk of a request.
    pub last: Option<AuxRecord>,
}

/// The replacement of a prefill worker's mover.
#[derive(Debug)]
pub struct SourceMoverStub {
    links: Links<SourceCommand>,
    right: MoverRight,
    /// By slot: the target and the lease of a transfer in progress.
    leaving: Box<[Option<(Target, Lease)>]>,
}

/// The replacement of a decode worker's mover.
#[derive(Debug)]
pub struct DestinationMoverStub {
    links: Links<DestinationCommand>,
    right: MoverRight,
    /// By slot: the lease of an expected transfer.
    expected: Box<[Option<Lease>]>,
}

impl SourceMoverStub {
    /// The mover's ends of a worker's rings.
    pub fn new(links: Links<SourceCommand>) -> SourceMoverStub {
        let leaving = (0..links.status.slots()).map(|_| None).collect();
        SourceMoverStub { links, right: MoverRight::for_mover_thread(), leaving }
    }

    /// The mover's ends of the rings.
    pub fn links(&self) -> &Links<SourceCommand> {
        &self.links
    }

    /// Takes at most `count` commands. The chunks among them leave host `from`.
    ///
    /// # Panics
    /// A command occurs that is possible only after a failure.
    pub fn take(&mut self, count: usize, from: usize, flows: &mut Vec<ChunkTransfer>) {
        for _ in 0..count {
            let Ok(command) = self.links.commands.try_recv() else { return };
            match command {
                SourceCommand::Begin { slot, target, lease, .. } => {
                    self.leaving[slot.index()] = Some((target, lease));
                }
                SourceCommand::Chunk { slot, generation, tokens, last } => {
                    let (target, _) =
                        self.leaving[slot.index()].as_ref().expect("chunks follow Begin");
                    if self.links.status.load(slot).state == State::WaitingForInput {
                        advance(&self.links.status, slot, generation, Move::Start);
                    }
                    flows.push(ChunkTransfer {
                        from,
                        source: SlotUse { slot, generation },
                        to: target.session.0 as usize,
                        destination: SlotUse { slot: target.slot, generation: target.generation },
                        tokens: tokens.end - tokens.start,
                        last,
                    });
                }
                // One of the two workers has refused the request.
                SourceCommand::Cancel { slot, .. } => {
                    assert!(
                        self.leaving[slot.index()].is_none(),
                        "a request is refused before it begins"
                    );
                }
                other => unreachable!("nothing fails here: {other:?}"),
            }
        }
    }

    /// Ends the lease and then sets the state, because the destination has all KV.
    pub fn done(&mut self, source: SlotUse) {
        let (_, lease) =
            self.leaving[source.slot.index()].take().expect("what was sent was leased");
        let sent = self.links.ends.try_send(LeaseEnd { ended: lease.end(&self.right), aux: None });
        assert!(sent.is_ok(), "the ring of ended leases has room for all slots");
        advance(&self.links.status, source.slot, source.generation, Move::Finish);
    }

    /// Whether no lease is out.
    pub fn is_idle(&self) -> bool {
        self.leaving.iter().all(Option::is_none)
            && self.links.commands.is_empty()
            && self.links.ends.is_empty()
    }
}

impl DestinationMoverStub {
    /// The mover's ends of a worker's rings.
    pub fn new(links: Links<DestinationCommand>) -> DestinationMoverStub {
        let expected = (0..links.status.slots()).map(|_| None).collect();
        DestinationMoverStub { links, right: MoverRight::for_mover_thread(), expected }
    }

    /// Takes the scheduler's commands.
    ///
    /// # Panics
    /// A command occurs that is possible only after a failure.
    pub fn take(&mut self) {
        for command in self.links.commands.try_iter() {
            match command {
                DestinationCommand::Expect { slot, lease, .. } => {
                    self.expected[slot.index()] = Some(lease)
                }
                // Its prefill worker has refused the request and sends nothing.
                DestinationCommand::Cancel { slot, .. } => {
                    if let Some(lease) = self.expected[slot.index()].take() {
                        let end = LeaseEnd { ended: lease.end(&self.right), aux: None };
                        assert!(
                            self.links.ends.try_send(end).is_ok(),
                            "the ring has room for all slots"
                        );
                    }
                }
                other => unreachable!("nothing fails here: {other:?}"),
            }
        }
    }

    /// Handles a chunk that has landed. With the last chunk, the lease ends with the aux record,
    /// before Success is visible.
    pub fn land(&mut self, destination: SlotUse, last: Option<AuxRecord>) {
        let SlotUse { slot, generation } = destination;
        let status = &self.links.status;
        if status.load(slot).state == State::WaitingForInput {
            advance(status, slot, generation, Move::Start);
        }
        if let Some(mut aux) = last {
            aux.generation = generation.0;
            let lease = self.expected[slot.index()].take().expect("what comes was expected");
            let sent = self
                .links
                .ends
                .try_send(LeaseEnd { ended: lease.end(&self.right), aux: Some(aux) });
            assert!(sent.is_ok(), "the ring of ended leases has room for all slots");
            advance(status, slot, generation, Move::Finish);
        }
    }

    /// Whether no lease is out.
    pub fn is_idle(&self) -> bool {
        self.expected.iter().all(Option::is_none)
            && self.links.commands.is_empty()
            && self.links.ends.is_empty()
    }
}

fn advance(
    status: &crate::transfer::status::StatusTable,
    slot: SlotId,
    generation: Generation,
    step: Move,
) {
    let moved = status.advance(slot, generation, step);
    assert!(moved.is_ok(), "{step:?} of slot {slot}: {moved:?}");
}
