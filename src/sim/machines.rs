//! Where workers are: two on one machine hand over through its memory, others by their NICs, as `--transfer auto` has it.
//!
//! Not here: what the network between NICs does with what they write (`cluster::writes`).

use super::agenda::Nanos;
use super::dice::Dice;
use crate::config::flags::SimTransfer;
use crate::transfer::transport::rdma::Settings;
use crate::wire::message::HostId;

/// NICs, all alike.
#[derive(Clone, Copy, Debug)]
pub struct Nics {
    /// Queue pairs of a session.
    pub settings: Settings,
    /// How long one sends again what is not acknowledged.
    pub patience: Nanos,
}

/// Machines of a cluster.
#[derive(Clone, Debug)]
pub struct Machines {
    /// By worker.
    of: Vec<u8>,
    /// None where all are on one.
    pub nics: Option<Nics>,
}

impl Machines {
    /// Of so many workers: on one, each on its own, or on two, where that is not asked for.
    pub fn draw(dice: &mut Dice, workers: usize, transfer: SimTransfer) -> Machines {
        let apart = match transfer {
            SimTransfer::Rdma => 2,
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
        Machines { of, nics: (apart > 0).then_some(Nics { settings, patience }) }
    }

    /// As a worker tells its peers.
    pub fn host(&self, worker: usize) -> HostId {
        HostId([7 + self.of[worker]; 16])
    }

    /// How long NICs between these two try; none where they hand over without.
    pub fn patience(&self, one: usize, other: usize) -> Option<Nanos> {
        self.nics.filter(|_| self.of[one] != self.of[other]).map(|nics| nics.patience)
    }
}
