//! The posting side of a session on one NIC: plans become chains of work requests, with one
//! doorbell and one completion per chain. A chain belongs to one slot.
//!
//! Thread: `move`, or `post` if posting and polling are split.
//! Invariants: work of a slot is posted only while this side is counted in the session's
//! [`InFlight`]. It leaves that count once, with its last chain or when the slot is withdrawn. If
//! the value is dropped, its queue pairs are destroyed, and the NIC reads and writes nothing more
//! for them.

use super::flight::{InFlight, WorkRequestId};
use super::lane::{CHAIN_MAX, Lane};
use super::rails::Rails;
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::transfer::plan::Template;
use crate::transfer::transport::{Post, SessionLost, share};
use std::sync::Arc;

/// Chains of a lane per turn. Most lanes have room for as many, and a Cancel does not wait long for
/// them.
const TURN_CHAINS: usize = 8;

/// The lanes of one NIC and their pending posts.
#[derive(Debug)]
pub(super) struct Posting {
    lanes: Box<[Lane]>,
    /// Lanes of the whole session.
    lanes_all: usize,
    template: Arc<Template>,
    rails: Arc<Rails>,
    flight: Arc<InFlight>,
    /// By slot, one at a time; the mover merges further chunks.
    posts: Box<[Option<PendingPost>]>,
}

#[derive(Debug)]
struct PendingPost {
    post: Post,
    /// Lanes of this NIC that have not posted their share.
    unposted: u32,
    /// Chains posted.
    posted: u64,
}

impl Posting {
    pub(super) fn new(
        lanes: Box<[Lane]>,
        lanes_all: usize,
        template: Arc<Template>,
        rails: Arc<Rails>,
        flight: Arc<InFlight>,
    ) -> Posting {
        let posts = (0..rails.slots()).map(|_| None).collect();
        Posting { lanes, lanes_all, template, rails, flight, posts }
    }

    /// Accepts a post with work for a lane of this NIC. [`InFlight`] already counts this side for
    /// the slot.
    pub(super) fn take(&mut self, post: Post) {
        let (slot, tells) = (post.slot, post.last.is_some());
        let bytes = self.template.bytes(post.tokens.clone());
        let mut unposted = 0;
        for lane in &mut self.lanes {
            let share = share(bytes, lane.number.into(), self.lanes_all);
            // A short chunk does not use all lanes. With the last chunk, each lane announces its
            // end.
            if !share.is_empty() || tells {
                lane.queue.push_back((slot, share.start));
                unposted += 1;
            }
        }
        self.posts[slot.index()] = Some(PendingPost { post, unposted, posted: 0 });
    }

    /// Drops the unposted work of a slot, and posts no more of it. True if that completes the slot.
    pub(super) fn withdraw(&mut self, slot: SlotId) -> bool {
        for lane in &mut self.lanes {
            lane.queue.retain(|&(queued, _)| queued != slot);
        }
        self.posts[slot.index()].take().is_some_and(|held| self.flight.leave(slot, held.posted))
    }

    /// Posts while there is work and room. Calls `completed` for slots that are complete already.
    pub(super) fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, SessionLost> {
        let mut moved = false;
        for index in 0..self.lanes.len() {
            for _ in 0..TURN_CHAINS {
                if !self.post_chain(index, completed)? {
                    break;
                }
                moved = true;
            }
        }
        Ok(moved)
    }

    /// Posts one chain of a lane, if there is work and room.
    fn post_chain(
        &mut self,
        index: usize,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        let Posting { lanes, lanes_all, template, rails, flight, posts } = self;
        let lane = &mut lanes[index];
        let Some(&(slot, at)) = lane.queue.front() else { return Ok(false) };
        // Loaded only when needed, because the polling side writes it. The immediate needs a
        // request too.
        if lane.room <= CHAIN_MAX as u32 {
            lane.room += flight.take_room(lane.number);
        }
        let most = (lane.room as usize).min(CHAIN_MAX);
        let place = &mut posts[slot.index()];
        let Some(held) = place.as_mut().filter(|_| most >= 2) else { return Ok(false) };
        let (post, memory) = (&held.post, rails.memory());
        let end = share(template.bytes(post.tokens.clone()), lane.number.into(), *lanes_all).end;
        let runs = template.runs(
            post.tokens.clone(),
            at..end,
            |page| memory.lists.page(slot, page),
            |page| rails.targets.page(slot, page),
        );
        let next = at + lane.fill(slot, runs, most - 1);
        let ends = next == end;
        if ends {
            if let Some(aux) = &post.last {
                lane.tell(slot, post.target, aux, rails);
            }
            lane.queue.pop_front();
            held.unposted -= 1;
        } else if let Some(front) = lane.queue.front_mut() {
            front.1 = next;
        }
        let chain = WorkRequestId { slot, lane: lane.number, requests: lane.filled() as u16 };
        memory.counters.add(u64::from(chain.requests), 1);
        lane.room -= u32::from(chain.requests);
        lane.ring(chain).map_err(|_| SessionLost::because(Cause::Internal))?;
        held.posted += 1;
        if held.unposted == 0 {
            let over = flight.leave(slot, held.posted);
            *place = None;
            if over {
                completed(slot);
            }
        }
        Ok(true)
    }
}
