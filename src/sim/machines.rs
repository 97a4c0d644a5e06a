//! The machines of the workers. As with `--transfer auto`, two workers on one machine use shared
//! memory. Others use their NICs if both have one, else TCP streams.
//!
//! Not here: the network for writes of NICs (`cluster::writes`) and for bytes of streams
//! (`cluster::lanes`).

use crate::cli::flags::SimTransfer;
use crate::stdx::event_queue::Nanos;
use crate::stdx::rng::Rng;
use crate::transfer::transport::rdma::Settings;
use crate::transfer::transport::tcp::FRAME_MAX;
use crate::wire::message::HostId;

/// The settings of all NICs.
#[derive(Clone, Copy, Debug)]
pub struct Nics {
    /// Queue pairs of a session.
    pub settings: Settings,
    /// Time for which a NIC resends unacknowledged packets.
    pub patience: Nanos,
}

/// The settings of all TCP streams.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// Lanes per session.
    pub lanes: u16,
    /// Maximum bytes of KV in a frame.
    pub frame: u64,
    /// Size in bytes of a kernel's send buffer, and of its receive buffer including data in flight.
    pub room: usize,
    /// Maximum bytes of a segment.
    pub segment: usize,
}

/// The machines of a cluster.
#[derive(Clone, Debug)]
pub struct Machines {
    /// Machine of each worker.
    of: Vec<u8>,
    /// Whether the machine of each worker has a NIC.
    has_nic: Vec<bool>,
    /// `None` if no worker has a NIC.
    pub nics: Option<Nics>,
    /// `None` if no worker uses streams.
    pub streams: Option<Streams>,
}

impl Machines {
    /// Draws the machines of `workers` workers: one machine, two machines, or one for each worker.
    /// `transfer` can fix the choice.
    pub fn draw(
        [dice, of_streams]: [&mut Rng; 2],
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
            1 => dice.next_u64() as u8 % 2,
            _ => worker as u8,
        };
        let of = (0..workers).map(place).collect();
        let settings = Settings {
            lanes: dice.pick(&[1, 2, 3]),
            // With fewer requests, a long prompt takes one turn of the network for each write.
            requests: dice.pick(&[8, 20, 64]),
            pieces: dice.pick(&[1, 4]),
        };
        // A NIC resends unacknowledged packets six times, each after 67 ms (`Route`). Some NICs
        // multiply that.
        let patience = (7 << 14) * 4096 * dice.pick(&[1, 4]);
        let streams = Streams {
            lanes: of_streams.pick(&[1, 2, 4]),
            frame: of_streams.pick(&[500, 4000, FRAME_MAX]),
            room: of_streams.pick(&[400, 4000, 64 << 10]),
            segment: of_streams.pick(&[200, 1460, 9000]),
        };
        // One worker in `nic` has a NIC (0: none). `is_streamed`: there are also streams.
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

    /// The host id that a worker announces to its peers.
    pub fn host(&self, worker: usize) -> HostId {
        HostId([7 + self.of[worker]; 16])
    }

    /// Time for which NICs between these two workers resend; `None` if they hand over without NICs.
    pub fn patience(&self, one: usize, other: usize) -> Option<Nanos> {
        let both = self.has_nic[one] && self.has_nic[other];
        self.nics.filter(|_| both && self.of[one] != self.of[other]).map(|nics| nics.patience)
    }

    /// Whether these two workers can hand over by streams.
    pub fn may_stream(&self, one: usize, other: usize) -> bool {
        self.streams.is_some() && self.of[one] != self.of[other]
    }
}
