//! A request's way in its three steps, for who has a network and a clock: it leaves, it lands, its source hears of that.
//!
//! What is on its way is the network's: it lands whatever becomes of its source meanwhile, unless its destination was
//! reset. Each queue pair's requests land and are answered in their order; in which order queue pairs take their steps,
//! and when, is the caller's.

use super::Fabric;
use crate::sys::verbs::abi;
use crate::sys::verbs::device::Device;
use crate::sys::verbs::provider::wire::Landing;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What became of a request where it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landed {
    /// Its bytes lie there; its source is to hear of that.
    Here {
        /// From this address on.
        address: u64,
        /// So many.
        bytes: u64,
    },
    /// There was no receive for it, as its source hears, which waits: it comes again.
    Later,
    /// It was refused, as its source is to hear.
    Refused,
    /// Nobody is there who would answer.
    Unanswered,
}

impl Fabric {
    /// A device in the place of this number, by which its queue pairs are told apart from those of others.
    pub fn device_in(&self, place: u32) -> Arc<Device> {
        self.0.place.store(place, Ordering::Relaxed);
        self.device()
    }

    /// The queue pairs of a place whose next request may leave.
    pub fn leaving(&self, place: u32) -> Vec<u32> {
        let wire = self.0.wire();
        let leaving = wire.pairs.iter().filter(|(_, pair)| {
            let runs = matches!(pair.state, abi::QPS_RTS | abi::QPS_ERR);
            pair.place == place && runs && pair.queue.front().is_some()
        });
        leaving.map(|(&number, _)| number).collect()
    }

    /// Where the other end of a queue pair is, as long as both are there.
    pub fn place_of_peer(&self, number: u32) -> Option<u32> {
        let wire = self.0.wire();
        let peer = wire.pairs.get(&number)?.peer;
        wire.pairs.get(&peer).map(|peer| peer.place)
    }

    /// Whether there is a queue pair of this number.
    pub fn has_pair(&self, number: u32) -> bool {
        self.0.wire().pairs.contains_key(&number)
    }

    /// The next request of a queue pair leaves, its bytes read from memory, or fails where it is. False: there is none.
    pub fn depart(&self, number: u32) -> bool {
        self.0.wire().depart(number)
    }

    /// The next of what is on its way from a queue pair comes to the other end. None: nothing is.
    pub fn land(&self, number: u32) -> Option<Landed> {
        Some(match self.0.wire().land_oldest(number)? {
            Landing::Done(address, bytes) => Landed::Here { address, bytes },
            Landing::Later => Landed::Later,
            Landing::Refused(abi::WC_RETRY_EXC_ERR) => Landed::Unanswered,
            Landing::Refused(_) => Landed::Refused,
        })
    }

    /// A queue pair hears what became of its oldest request that has come to the other end.
    pub fn answer(&self, number: u32) {
        self.0.wire().answer(number);
    }

    /// A queue pair has heard nothing for too long: its oldest request fails, the others are flushed. False: it waits
    /// for none.
    pub fn give_up(&self, number: u32) -> bool {
        self.0.wire().give_up(number)
    }
}
