//! Where workers are: two on one machine hand over through its memory, others by their NICs where both have one, else
//! by streams, as `--transfer auto` has it.
//!
//! Not here: what the network does with what NICs write (`cluster::writes`) and streams carry (`cluster::lanes`).

use super::agenda::Nanos;
use super::dice::Dice;
use crate::config::flags::SimTransfer;
use crate::transfer::transport::rdma::Settings;
use crate::transfer::transport::tcp::FRAME_MAX;
use crate::wire::message::HostId;

/// NICs, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Nics {
    /// Queue pairs of a session.
    pub settings: Settings,
    /// How long one sends again what is not acknowledged.
    pub patience: Nanos,
}

/// Streams of tcp, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// Of a session.
    pub lanes: u16,
    /// Most bytes of KV in a frame.
    pub frame: u64,
    /// Bytes that a kernel keeps of what was written, and of what has come or is on its way.
    pub room: usize,
    /// Most bytes that travel together.
    pub segment: usize,
}

/// Machines of a cluster.
#[derive(Clone, Debug)]
pub struct Machines {
    /// By worker.
    of: Vec<u8>,
    /// By worker.
    has_nic: Vec<bool>,
    /// None where nobody has any.
    pub nics: Option<Nics>,
    /// None where nobody has any.
    pub streams: Option<Streams>,
}

impl Machines {
    /// Of so many workers: on one, each on its own, or on two, where that is not asked for.
    pub fn draw(
        [dice, of_streams]: [&mut Dice; 2],
        workers: usize,
        transfer: SimTransfer,
    ) -> Machines {
        let apart = match transfer {
            SimTransfer::Rdma | SimTransfer::Tcp => 2,
            SimTransfer::Auto => dice.pick(&[0, 0, 1, 2]),
            SimTransfer::Shm => 0,
        };
        let place = |worker| match apart {
            0 => 0,
            1 => dice.draw() as u8 % 2,
            _ => worker as u8,
        };
        let of = (0..workers).map(place).collect();
        let settings = Settings {
            lanes: dice.pick(&[1, 2, 3]),
            // Fewer take as many turns of the network as a long prompt has writes.
            requests: dice.pick(&[8, 20, 64]),
            pieces: dice.pick(&[1, 4]),
        };
        // What is not acknowledged is sent again six times, each after 67 ms (`Route`), which some NICs multiply.
        let patience = (7 << 14) * 4096 * dice.pick(&[1, 4]);
        let streams = Streams {
            lanes: of_streams.pick(&[1, 2, 4]),
            frame: of_streams.pick(&[500, 4000, FRAME_MAX]),
            room: of_streams.pick(&[400, 4000, 64 << 10]),
            segment: of_streams.pick(&[200, 1460, 9000]),
        };
        // NICs at one in so many, and whether there are streams as well.
        let (nic, is_streamed) = match transfer {
            SimTransfer::Auto => {
                of_streams.pick(&[(1, false), (1, true), (2, true), (0, true), (0, true)])
            }
            SimTransfer::Rdma => (1, false),
            SimTransfer::Tcp | SimTransfer::Shm => (0, true),
        };
        let has_nic: Vec<bool> =
            (0..workers).map(|_| apart > 0 && nic > 0 && of_streams.one_in(nic)).collect();
        Machines {
            of,
            nics: has_nic.contains(&true).then_some(Nics { settings, patience }),
            has_nic,
            streams: (apart > 0 && is_streamed).then_some(streams),
        }
    }

    /// The NIC of a worker's machine.
    pub fn nic(&self, worker: usize) -> Option<Nics> {
        self.nics.filter(|_| self.has_nic[worker])
    }

    /// As a worker tells its peers.
    pub fn host(&self, worker: usize) -> HostId {
        HostId([7 + self.of[worker]; 16])
    }

    /// How long NICs between these two try; none where they hand over without.
    pub fn patience(&self, one: usize, other: usize) -> Option<Nanos> {
        let both = self.has_nic[one] && self.has_nic[other];
        self.nics.filter(|_| both && self.of[one] != self.of[other]).map(|nics| nics.patience)
    }

    /// Whether these two may hand over by streams.
    pub fn may_stream(&self, one: usize, other: usize) -> bool {
        self.streams.is_some() && self.of[one] != self.of[other]
    }
}
