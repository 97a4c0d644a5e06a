//! The parts that both engines have: their memory, their pages, and the loop that waits.

use baton::agent::{Agent, AgentConfig};
use baton::cause::Cause;
use baton::ids::{PageId, Room};
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::kv::region::Region;
use baton::transfer::aux::{AUX_PAYLOAD_BYTES, AuxRecord};
use baton::transfer::command::Cancel;
use baton::transfer::manager::rooms::{Prompt, Slot};
use baton::wire::message::ids_hash;
use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

const PAGES: u32 = 64;
/// The source keeps KV layer by layer, the destination page by page. Both have 2 layers and 1 head
/// of 4 elements of 2 bytes, which are one word of a region.
pub const SOURCE_LAYOUT: KvLayout = KvLayout::layer_major(16, 2, 1, 4, KvDtype::F16, PAGES);
pub const DESTINATION_LAYOUT: KvLayout = KvLayout::page_major(8, 2, 1, 4, KvDtype::F16);
const WORDS_OF_A_TOKEN: [(u32, KeyValue); 4] =
    [(0, KeyValue::Key), (0, KeyValue::Value), (1, KeyValue::Key), (1, KeyValue::Value)];
/// The content of each aux record. The mover does not read it.
pub const AUX_PAYLOAD: [u8; AUX_PAYLOAD_BYTES] = [42; AUX_PAYLOAD_BYTES];

pub fn text(error: impl Display) -> String {
    error.to_string()
}

pub fn config(layout: KvLayout) -> Result<AgentConfig, String> {
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let bytes = u64::from(PAGES) * layout.page_bytes();
    let region = Arc::new(Region::new(c"kv", bytes as usize).map_err(text)?);
    // A real engine puts a hash here, of its model and of everything else that decides the KV.
    let kind = [1; 32];
    // Both processes run on this host. Across hosts, a cluster key proves a peer.
    Ok(AgentConfig::new(region, layout, PAGES, kind, host))
}

/// Pages for a prompt. This engine serves one request at a time, so each uses the same pages.
pub fn pages_for(layout: &KvLayout, tokens: u32) -> Vec<PageId> {
    (0..layout.pages_for(tokens)).map(PageId).collect()
}

/// The values that must be equal for both legs. The ids of this prompt are 0, 1, 2 and so on.
pub fn prompt(tokens: u32) -> Prompt {
    Prompt { tokens, hash: ids_hash(&(0..tokens).collect::<Vec<u32>>()) }
}

/// The words of the KV of `tokens`: offset in the region, and value.
pub fn kv_words<C>(
    agent: &Agent<C>,
    room: Room,
    tokens: Range<u32>,
    pages: &[PageId],
) -> Vec<(usize, u64)> {
    let (layout, mut words) = (&agent.memory.layout, Vec::new());
    for token in tokens {
        let (page, within) = (token / layout.page_size, token % layout.page_size);
        for (number, &(layer, which)) in WORDS_OF_A_TOKEN.iter().enumerate() {
            let at = layout.offset(pages[page as usize], layer, which, 0, within);
            let value = room.0 << 32 | u64::from(token) << 8 | number as u64;
            words.push((at as usize, value));
        }
    }
    words
}

/// The number of these words that the memory does not have.
pub fn count_differences<C>(agent: &Agent<C>, words: &[(usize, u64)]) -> usize {
    let region = &agent.memory.region;
    words.iter().filter(|&&(at, value)| region.word(at).load(Ordering::Relaxed) != value).count()
}

/// Runs the agent until `poll` returns something. A real engine computes a batch between turns.
pub fn wait_for<C: Cancel, T>(
    agent: &mut Agent<C>,
    until: Instant,
    mut poll: impl FnMut(&mut Agent<C>) -> Option<T>,
) -> Result<T, String> {
    loop {
        agent.bell().prepare_wait();
        let found = poll(agent);
        if found.is_none() {
            agent.turn(true, |_| Ok(()))?;
        }
        agent.bell().cancel_wait();
        if let Some(found) = found {
            return Ok(found);
        }
        check(Instant::now() < until, "the deadline is over")?;
    }
}

/// Waits until the transfer and its lease have ended, and frees the slot.
pub fn end<C: Cancel>(
    agent: &mut Agent<C>,
    slot: Slot,
    until: Instant,
) -> Result<(Option<Cause>, Option<AuxRecord>), String> {
    let (_, aux) = wait_for(agent, until, Agent::poll_end)?;
    let cause = wait_for(agent, until, |agent| {
        let status = agent.status(slot);
        status.state.is_terminal().then_some(status.cause)
    })?;
    agent.leave(slot, cause);
    Ok((cause, aux))
}

pub fn check(holds: bool, otherwise: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}
