//! In the place of movers, managers and transports: takes what schedulers tell their movers, makes the same moves of the
//! status tables and ends the same leases, in the order of a pulled transfer.
//!
//! Owns: live leases. A flow is one chunk of KV on its way. Not here: how long it takes (`nic`, `cluster`), failures:
//! nobody dies in the load mode. A worker may refuse a request, so that nothing of it is sent.

use crate::ids::{Generation, SlotId};
use crate::kv::lease::{Lease, MoverRight};
use crate::transfer::aux::AuxRecord;
use crate::transfer::command::{DestinationCommand, LeaseEnd, SourceCommand, Target};
use crate::transfer::mover::Links;
use crate::transfer::status::{Move, State};

/// One use of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Use {
    /// The slot.
    pub slot: SlotId,
    /// Which use of it.
    pub generation: Generation,
}

/// KV of one chunk, on its way.
#[derive(Debug)]
pub struct Flow {
    /// The host that sends it,
    pub from: usize,
    /// and its slot.
    pub source: Use,
    /// The host that takes it,
    pub to: usize,
    /// and its slot.
    pub destination: Use,
    /// Tokens whose KV it is.
    pub tokens: u32,
    /// With the last of a request.
    pub last: Option<AuxRecord>,
}

/// The mover's half of a prefill worker.
#[derive(Debug)]
pub struct SourceHalf {
    links: Links<SourceCommand>,
    right: MoverRight,
    /// By slot: whose lease is out.
    leaving: Box<[Option<(Target, Lease)>]>,
}

/// The mover's half of a decode worker.
#[derive(Debug)]
pub struct DestinationHalf {
    links: Links<DestinationCommand>,
    right: MoverRight,
    /// By slot: what is expected.
    expected: Box<[Option<Lease>]>,
}

impl SourceHalf {
    /// The mover's ends of a worker's rings.
    pub fn new(links: Links<SourceCommand>) -> SourceHalf {
        let leaving = (0..links.status.slots()).map(|_| None).collect();
        SourceHalf { links, right: MoverRight::for_mover_thread(), leaving }
    }

    /// What the scheduler tells.
    pub fn links(&self) -> &Links<SourceCommand> {
        &self.links
    }

    /// Takes in at most `count` commands; the chunks among them leave host `from`.
    ///
    /// # Panics
    /// On a command that only a cluster in which something fails has.
    pub fn take(&mut self, count: usize, from: usize, flows: &mut Vec<Flow>) {
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
                    flows.push(Flow {
                        from,
                        source: Use { slot, generation },
                        to: target.session.0 as usize,
                        destination: Use { slot: target.slot, generation: target.generation },
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
                other => unreachable!("nothing fails here, and yet: {other:?}"),
            }
        }
    }

    /// The destination has everything: the lease ends, then the state is set.
    pub fn done(&mut self, source: Use) {
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

impl DestinationHalf {
    /// The mover's ends of a worker's rings.
    pub fn new(links: Links<DestinationCommand>) -> DestinationHalf {
        let expected = (0..links.status.slots()).map(|_| None).collect();
        DestinationHalf { links, right: MoverRight::for_mover_thread(), expected }
    }

    /// Takes in what the scheduler has told.
    ///
    /// # Panics
    /// On a command that only a cluster in which something fails has.
    pub fn take(&mut self) {
        for command in self.links.commands.try_iter() {
            match command {
                DestinationCommand::Expect { slot, lease, .. } => {
                    self.expected[slot.index()] = Some(lease)
                }
                // Its prefill worker has refused the request, and sends nothing.
                DestinationCommand::Cancel { slot, .. } => {
                    if let Some(lease) = self.expected[slot.index()].take() {
                        let end = LeaseEnd { ended: lease.end(&self.right), aux: None };
                        assert!(
                            self.links.ends.try_send(end).is_ok(),
                            "the ring has room for all slots"
                        );
                    }
                }
                other => unreachable!("nothing fails here, and yet: {other:?}"),
            }
        }
    }

    /// A chunk is here. With the last the lease ends, with the record, before Success can be seen.
    pub fn land(&mut self, destination: Use, last: Option<AuxRecord>) {
        let Use { slot, generation } = destination;
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
