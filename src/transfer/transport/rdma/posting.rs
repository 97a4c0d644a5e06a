//! The posting side of a session on one NIC: plans become chains of work requests, one doorbell and one completion
//! each. A chain is of one slot.
//!
//! Thread: `move`, or `post` where posting and reaping are split. Invariant: nothing of a slot is posted unless this
//! side is counted in its [`Flight`], which it leaves once, with its last chain or when the slot is withdrawn.
//! Dropped, its queue pairs are gone, and the NIC reads and writes nothing more for them.

use super::flight::{Flight, Ticket};
use super::lane::{CHAIN_MAX, Lane};
use super::rails::Rails;
use crate::cause::Cause;
use crate::ids::SlotId;
use crate::transfer::plan::Template;
use crate::transfer::transport::{Lost, Post, share};
use std::sync::Arc;

/// Chains of a lane in a turn: as many as most lanes have room for, few enough that a Cancel need not wait.
const TURN_CHAINS: usize = 8;

/// Lanes of one NIC, and what they are to post.
#[derive(Debug)]
pub(super) struct Posting {
    lanes: Box<[Lane]>,
    /// Of the whole session.
    lanes_all: usize,
    template: Arc<Template>,
    rails: Arc<Rails>,
    flight: Arc<Flight>,
    /// By slot, one at a time; the mover merges the rest.
    posts: Box<[Option<Held>]>,
}

#[derive(Debug)]
struct Held {
    post: Post,
    /// Lanes here that have not posted their share.
    unposted: u32,
    /// Chains.
    posted: u64,
}

impl Posting {
    pub(super) fn new(
        lanes: Box<[Lane]>,
        lanes_all: usize,
        template: Arc<Template>,
        rails: Arc<Rails>,
        flight: Arc<Flight>,
    ) -> Posting {
        let posts = (0..rails.slots()).map(|_| None).collect();
        Posting { lanes, lanes_all, template, rails, flight, posts }
    }

    /// Takes a post on, of which there is something for a lane here; the slot's flight counts this side.
    pub(super) fn take(&mut self, post: Post) {
        let (slot, tells) = (post.slot, post.last.is_some());
        let bytes = self.template.bytes(post.tokens.clone());
        let mut unposted = 0;
        for lane in &mut self.lanes {
            let share = share(bytes, lane.number.into(), self.lanes_all);
            // Few tokens are not for all lanes, but each says when it has brought its last.
            if !share.is_empty() || tells {
                lane.queue.push_back((slot, share.start));
                unposted += 1;
            }
        }
        self.posts[slot.index()] = Some(Held { post, unposted, posted: 0 });
    }

    /// Drops what of a slot is not posted, and posts no more of it. True: with that the slot is over.
    pub(super) fn withdraw(&mut self, slot: SlotId) -> bool {
        for lane in &mut self.lanes {
            lane.queue.retain(|&(queued, _)| queued != slot);
        }
        self.posts[slot.index()].take().is_some_and(|held| self.flight.leave(slot, held.posted))
    }

    /// Posts what there is and there is room for. Tells of slots that are over already.
    pub(super) fn step(&mut self, completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
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

    /// Posts one chain of a lane, if there is something and room.
    fn post_chain(
        &mut self,
        index: usize,
        completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, Lost> {
        let Posting { lanes, lanes_all, template, rails, flight, posts } = self;
        let lane = &mut lanes[index];
        let Some(&(slot, at)) = lane.queue.front() else { return Ok(false) };
        // Looked at no sooner than it is needed: who reaps writes it. The immediate takes one as well.
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
        let chain = Ticket { slot, lane: lane.number, requests: lane.filled() as u16 };
        memory.tally.add(u64::from(chain.requests), 1);
        lane.room -= u32::from(chain.requests);
        lane.ring(chain).map_err(|_| Lost::because(Cause::Internal))?;
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
