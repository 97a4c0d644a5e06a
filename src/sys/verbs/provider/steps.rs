//! The three steps of a request: it departs, it lands, and its source receives the answer. They are
//! for a simulator with its own network and clock.
//!
//! The network owns packets in flight. They land even if their source ends, unless their
//! destination was reset. The requests of each queue pair land and are answered in order. The
//! caller decides when queue pairs take their steps, and in which order.

use super::Fabric;
use crate::sys::verbs::abi;
use crate::sys::verbs::device::Device;
use crate::sys::verbs::provider::wire::Landing;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The outcome of a request at its destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landed {
    /// Its bytes have landed. The source must still be answered.
    Here {
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// No receive was posted. The source waits, and the packet must land again.
    Later,
    /// It was refused. The source must still be answered.
    Refused,
    /// No queue pair is there to answer.
    Unanswered,
}

impl Fabric {
    /// A device at this place. The place distinguishes its queue pairs from those of other devices.
    pub fn device_in(&self, place: u32) -> Arc<Device> {
        self.0.place.store(place, Ordering::Relaxed);
        self.device()
    }

    /// The queue pairs of a place with a request that can depart.
    pub fn leaving(&self, place: u32) -> Vec<u32> {
        let wire = self.0.wire();
        let leaving = wire.pairs.iter().filter(|(_, pair)| {
            let runs = matches!(pair.state, abi::QPS_RTS | abi::QPS_ERR);
            pair.place == place && runs && pair.queue.front().is_some()
        });
        leaving.map(|(&number, _)| number).collect()
    }

    /// The place of a queue pair's peer, if both exist.
    pub fn place_of_peer(&self, number: u32) -> Option<u32> {
        let wire = self.0.wire();
        let peer = wire.pairs.get(&number)?.peer;
        wire.pairs.get(&peer).map(|peer| peer.place)
    }

    /// Whether a queue pair with this number exists.
    pub fn has_pair(&self, number: u32) -> bool {
        self.0.wire().pairs.contains_key(&number)
    }

    /// The next request of a queue pair departs: its bytes are read from memory, or it fails at its
    /// source. Returns false if there is none.
    pub fn depart(&self, number: u32) -> bool {
        self.0.wire().depart(number)
    }

    /// The oldest packet in flight from a queue pair lands at the other end. `None`: no packet is
    /// in flight.
    pub fn land(&self, number: u32) -> Option<Landed> {
        Some(match self.0.wire().land_oldest(number)? {
            Landing::Done(address, bytes) => Landed::Here { address, bytes },
            Landing::Later => Landed::Later,
            Landing::Refused(abi::WC_RETRY_EXC_ERR) => Landed::Unanswered,
            Landing::Refused(_) => Landed::Refused,
        })
    }

    /// A queue pair receives the answer for its oldest landed request.
    pub fn answer(&self, number: u32) {
        self.0.wire().answer(number);
    }

    /// A queue pair has had no answer for too long: its oldest request fails and the others are
    /// flushed. Returns false if it waits for none.
    pub fn give_up(&self, number: u32) -> bool {
        self.0.wire().give_up(number)
    }
}
