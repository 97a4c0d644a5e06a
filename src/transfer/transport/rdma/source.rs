//! The writing half: a session's lanes on all its NICs, and the work in flight of each slot.
//!
//! Thread: `ctl` makes it, the mover owns it. Posting and polling run in the mover (fused), or in
//! two threads per NIC (split). Both forms use [`Posting`] and [`Reaping`]; the split form calls
//! them through a ring.
//! Invariants: a slot has one post at a time; it is quiet when its [`InFlight`] count reaches zero;
//! dropping this destroys the queue pairs.

use super::completions::Reaping;
use super::flight::InFlight;
use super::lane::{Lane, PIECES_MAX};
use super::posts::Posting;
use super::rails::{Opened, Rails};
use super::split::{NicReport, NicSessionHandle, PosterCommand};
use crate::ids::SlotId;
use crate::sys::event::{WaitInterest, WaitSet};
use crate::transfer::plan::Template;
use crate::transfer::transport::{
    CompletionMode, Full, Memory, Post, SessionLost, SourceHalf, share,
};
use crate::wire::message::{QueuePairName, RailGrant, RdmaGrant};
use crossbeam_channel as channel;
use std::io;
use std::sync::Arc;

/// The source's half of a session.
#[derive(Debug)]
pub struct RdmaSource {
    sides: Sides,
    template: Arc<Template>,
    flight: Arc<InFlight>,
    /// Lanes of each NIC.
    lanes: usize,
    /// By slot: the number of NICs, counted from the first, with an unfinished post of it.
    under_way: Box<[u8]>,
}

/// The posting and polling sides, by NIC.
#[derive(Debug)]
enum Sides {
    Fused(Box<[(Posting, Reaping)]>),
    Split { sessions: Box<[NicSessionHandle]>, reports: channel::Receiver<NicReport> },
}

impl RdmaSource {
    /// A session with the destination that sent the grant `peer`. Also returns the grant for the
    /// answer. `wait` is where the mover parks; `sequences` returns numbers that cannot be guessed.
    pub fn new(
        rails: &Arc<Rails>,
        peer: &RdmaGrant,
        template: Template,
        wait: &WaitSet,
        mut sequences: impl FnMut() -> u32,
    ) -> io::Result<(RdmaSource, RdmaGrant)> {
        let mut joined = Vec::new();
        for (place, (nic, names)) in partners(rails, peer) {
            let mut opened = rails.open(place, names.len(), false, &mut sequences)?;
            opened.connect(nic, names)?;
            if let Some(events) = opened.completions.events() {
                let wait = rails.nic_threads(place).map_or(wait, |threads| threads.wait());
                wait.add(events, WaitInterest::Readable)?;
            }
            joined.push((nic, opened));
        }
        let grant = rails.grant(joined.iter().map(|(nic, opened)| (nic.number, opened)));
        let pairs = || joined.iter().flat_map(|(_, opened)| &opened.pairs);
        let granted = pairs().map(|pair| pair.capacity().pieces).min().unwrap_or(1);
        let pieces_max = (granted.min(rails.settings().pieces) as usize).clamp(1, PIECES_MAX);
        let (template, lanes_all) = (Arc::new(template), pairs().count());
        let flight = Arc::new(InFlight::new(lanes_all, rails.slots()));
        let lanes = lanes_all / joined.len().max(1);
        let mut numbers = 0..;
        let sides = joined.into_iter().map(|(nic, opened)| {
            let Opened { pairs, completions, rail: place, .. } = opened;
            let lane = |pair| Lane::new(pair, (rails, place), (peer, nic), pieces_max);
            let lanes = pairs.into_iter().zip(&mut numbers).map(lane).collect();
            let posting =
                Posting::new(lanes, lanes_all, template.clone(), rails.clone(), flight.clone());
            (place, (posting, Reaping::new(completions, (rails.clone(), place), flight.clone())))
        });
        let sides = if rails.is_split() {
            // Each slot has at most one completion in the ring, and each side of each NIC at most
            // one loss.
            let (reporting, reports) = channel::bounded(rails.slots() + 2 * RdmaGrant::RAILS_MAX);
            let sessions = sides.map(|(place, sides)| {
                let threads = rails
                    .nic_threads(place)
                    .ok_or_else(|| io::Error::other("a NIC without threads"))?;
                threads.add_session(sides, rails.slots(), &reporting)
            });
            Sides::Split { sessions: sessions.collect::<io::Result<_>>()?, reports }
        } else {
            Sides::Fused(sides.map(|(_, sides)| sides).collect())
        };
        let under_way = vec![0; rails.slots()].into();
        Ok((RdmaSource { sides, template, flight, lanes, under_way }, grant))
    }

    fn nics(&self) -> usize {
        match &self.sides {
            Sides::Fused(sides) => sides.len(),
            Sides::Split { sessions, .. } => sessions.len(),
        }
    }
}

impl SourceHalf for RdmaSource {
    fn completion(&self) -> CompletionMode {
        CompletionMode::Pushed
    }

    fn post(&mut self, _memory: &Memory, post: &Post) -> Result<(), Full> {
        let slot = post.slot;
        if self.under_way[slot.index()] > 0 {
            return Err(Full);
        }
        let (bytes, nics) = (self.template.bytes(post.tokens.clone()), self.nics());
        // A short chunk uses only the first lanes; all lanes announce the last chunk.
        let has_some = |&nic: &usize| {
            post.last.is_some() || !share(bytes, nic * self.lanes, nics * self.lanes).is_empty()
        };
        let taking = (0..nics).take_while(has_some).count();
        if taking == 0 {
            return Ok(());
        }
        self.flight.begin(slot, taking as u64);
        self.under_way[slot.index()] = taking as u8;
        let own = || {
            let mut post = post.clone();
            if let Some(aux) = &mut post.last {
                aux.generation = post.target.generation.0;
            }
            post
        };
        match &mut self.sides {
            Sides::Fused(sides) => {
                sides[..taking].iter_mut().for_each(|(posting, _)| posting.take(own()))
            }
            Sides::Split { sessions, .. } => sessions[..taking]
                .iter()
                .for_each(|session| session.send(PosterCommand::Post(own()))),
        }
        Ok(())
    }

    fn step(
        &mut self,
        _memory: &Memory,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        let RdmaSource { sides, under_way, .. } = self;
        let mut over = |slot: SlotId| {
            under_way[slot.index()] = 0;
            completed(slot);
        };
        let mut moved = false;
        match sides {
            Sides::Fused(sides) => {
                for (_, reaping) in &mut *sides {
                    moved |= reaping.step(&mut over)?;
                }
                for (posting, _) in sides {
                    moved |= posting.step(&mut over)?;
                }
            }
            Sides::Split { reports, .. } => {
                while let Ok(report) = reports.try_recv() {
                    match report {
                        NicReport::Completed(slot) => over(slot),
                        NicReport::Lost(lost) => return Err(lost),
                    }
                    moved = true;
                }
            }
        }
        Ok(moved)
    }

    fn withdraw(&mut self, slot: SlotId) -> bool {
        let under_way = &mut self.under_way[slot.index()];
        if *under_way == 0 {
            return true;
        }
        let taking = usize::from(*under_way);
        match &mut self.sides {
            Sides::Fused(sides) => {
                for (posting, _) in &mut sides[..taking] {
                    if posting.withdraw(slot) {
                        *under_way = 0;
                    }
                }
                *under_way == 0
            }
            // The posters leave, and the last completion ends the slot. It is reported like every
            // other completion.
            Sides::Split { sessions, .. } => {
                sessions[..taking]
                    .iter()
                    .for_each(|session| session.send(PosterCommand::Cancel(slot)));
                false
            }
        }
    }

    /// If split, pollers arm the completions themselves and ring the mover.
    fn park(&mut self, parked: bool) {
        if let Sides::Fused(sides) = &mut self.sides {
            sides.iter_mut().for_each(|(_, reaping)| reaping.park(parked));
        }
    }
}

/// Pairs of this worker's and the destination's NICs: those with equal numbers, or, if there are
/// none, in their order.
fn partners<'a>(
    rails: &Rails,
    peer: &'a RdmaGrant,
) -> Vec<(usize, (&'a RailGrant, &'a [QueuePairName]))> {
    let ours = rails.usable();
    let same = |number| ours.iter().copied().find(|&place| rails.rail(place).number == number);
    let pairs: Vec<_> =
        peer.rails().filter_map(|theirs| Some((same(theirs.0.number)?, theirs))).collect();
    if pairs.is_empty() { ours.iter().copied().zip(peer.rails()).collect() } else { pairs }
}
