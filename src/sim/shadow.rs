//! The memory of decode workers: what peers write belongs to a transfer with a lease.
//!
//! Invariants: a page that changes in a step of the mover, or that a NIC writes, is under a lease
//! that the mover has not ended. It receives KV of the lease's own prompt, at its own place. A copy
//! that proves void fails its transfer in the same step, and its pages can then hold any bytes. A
//! write outside the pool is an aux record, which movers check.

use super::model::{StateWords, Written};
use crate::ids::{Generation, PageId, SlotId};
use crate::kv::groups::{KvGroups, LayerPlace};
use crate::kv::layout::KeyValue;
use crate::kv::page_span::PageSpan;
use crate::process::stepped_threads::SteppedThreads;
use crate::sched::worker::WriteLease;
use crate::transfer::transport::Memory;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Only a pool with at most this many bytes is compared, because a run compares it often.
const COMPARED_MAX: usize = 64 << 10;

/// What the mover may write.
#[derive(Debug)]
pub struct PoolShadow {
    /// The places of the layers.
    groups: KvGroups,
    /// The words of the pool before a step of the mover; empty if the pool is large.
    words: Vec<u64>,
    /// Leases that the mover holds.
    held: BTreeMap<SlotId, Generation>,
    /// Leases that the mover has ended, and the scheduler does not know it.
    ended: BTreeSet<(SlotId, Generation)>,
    /// The prompts of leases that the mover has taken since [`PoolShadow::take_begun`].
    begun: Vec<Vec<u32>>,
}

impl PoolShadow {
    /// A shadow of a pool with these groups of layers.
    pub fn new(groups: KvGroups) -> PoolShadow {
        PoolShadow {
            groups,
            words: Vec::new(),
            held: BTreeMap::new(),
            ended: BTreeSet::new(),
            begun: Vec::new(),
        }
    }

    /// Copies the pool before a step of the mover, if transfers can write into it.
    pub fn copy(&mut self, threads: &SteppedThreads) {
        let leases = threads.write_leases();
        let known = |&(slot, generation): &(SlotId, Generation)| {
            leases.iter().any(|lease| (lease.slot, lease.generation) == (slot, generation))
        };
        self.ended.retain(known);
        self.words.clear();
        if let Some(pool) = threads.destination().filter(|memory| bytes(memory) <= COMPARED_MAX) {
            self.words.extend(words(pool));
        }
    }

    /// Compares the pool after the step.
    ///
    /// # Errors
    /// A change was not allowed.
    pub fn compare(&mut self, threads: &SteppedThreads) -> Result<(), String> {
        let leases = threads.write_leases();
        if let Some(memory) = threads.destination().filter(|_| !self.words.is_empty()) {
            let stride = memory.layout.page_stride as usize;
            let pages = self.words.chunks(stride / 8).enumerate();
            let is_changed = |&(page, before): &(usize, &[u64])| {
                let now = (page * stride..).step_by(8).map(|at| memory.region.word(at));
                before.iter().zip(now).any(|(before, now)| *before != now.load(Relaxed))
            };
            for (page, _) in pages.filter(is_changed) {
                let page = PageId(page as u32);
                let lease = self.lease_of(&leases, page)?;
                if threads.held_lease(lease.slot) == Some(lease.generation) {
                    let changed = |at: usize| {
                        whole_bytes(self.words[at / 8] ^ memory.region.word(at).load(Relaxed))
                    };
                    check_content((memory, &self.groups), lease, page, changed)?;
                }
            }
        }
        let holds =
            |lease: &WriteLease<'_>| threads.held_lease(lease.slot) == Some(lease.generation);
        let held = || leases.iter().filter(|lease| holds(lease));
        let is_new =
            |lease: &&WriteLease<'_>| self.held.get(&lease.slot) != Some(&lease.generation);
        self.begun.extend(held().filter(is_new).map(|lease| lease.prompt.to_vec()));
        let now: BTreeMap<_, _> = held().map(|it| (it.slot, it.generation)).collect();
        let before = std::mem::replace(&mut self.held, now);
        let ended = before.into_iter().filter(|(slot, of)| self.held.get(slot) != Some(of));
        self.ended.extend(ended);
        Ok(())
    }

    /// Takes the prompts of the transfers that have begun.
    pub fn take_begun(&mut self) -> Vec<Vec<u32>> {
        std::mem::take(&mut self.begun)
    }

    /// Checks a NIC's write of `bytes` bytes at this address.
    ///
    /// # Errors
    /// It was not allowed.
    pub fn check_write(
        &self,
        threads: &SteppedThreads,
        address: u64,
        bytes: u64,
    ) -> Result<(), String> {
        let Some(memory) = threads.destination() else { return Ok(()) };
        let base = memory.region.base().as_ptr().addr() as u64;
        let end = memory.region.len() as u64;
        let Some(from) = address.checked_sub(base).filter(|from| from + bytes <= end) else {
            return Ok(());
        };
        let (stride, leases) = (memory.layout.page_stride, threads.write_leases());
        let range: Range<usize> = from as usize..(from + bytes) as usize;
        for page in from / stride..(from + bytes).div_ceil(stride) {
            let page = PageId(page as u32);
            let lease = self.lease_of(&leases, page)?;
            let written = |at: usize| if range.contains(&at) { u64::MAX } else { 0 };
            check_content((memory, &self.groups), lease, page, written)?;
        }
        Ok(())
    }

    fn lease_of<'a>(
        &self,
        leases: &'a [WriteLease<'a>],
        page: PageId,
    ) -> Result<&'a WriteLease<'a>, String> {
        let covers = |lease: &&WriteLease<'_>| {
            lease.pages.iter().any(|span| span.pages.contains(&page))
                && !self.ended.contains(&(lease.slot, lease.generation))
        };
        let lease = leases.iter().find(covers);
        lease.ok_or_else(|| format!("page {page} was written and is not leased"))
    }
}

/// Checks the words of a page that were written: only the bits of `written` count.
fn check_content(
    (memory, groups): (&Memory, &KvGroups),
    lease: &WriteLease<'_>,
    page: PageId,
    written: impl Fn(usize) -> u64,
) -> Result<(), String> {
    let place = |(group, span): (usize, &PageSpan<'_>)| {
        let at = span.pages.iter().position(|&leased| leased == page)?;
        Some((page, group, span.first + at))
    };
    let place = lease.pages.iter().enumerate().find_map(place).expect("it is covered");
    match other_word((memory, groups), place, lease.prompt, written) {
        Some(_) => Err(format!("page {page} of slot {} was written with other KV", lease.slot)),
        None => Ok(()),
    }
}

fn bytes(memory: &Memory) -> usize {
    memory.layout.page_stride as usize * memory.pages as usize
}

/// The byte offset of the first word in a page that differs from the KV of this prompt. The page is
/// the one with this index in the sequence, in this group. Only the bits of `looked_at` count,
/// because a stream can bring a part of a word.
fn other_word(
    (memory, groups): (&Memory, &KvGroups),
    (page, group, index): (PageId, usize, usize),
    prompt: &[u32],
    looked_at: impl Fn(usize) -> u64,
) -> Option<usize> {
    let layout = &memory.layout;
    if let Some(state) = groups.state().filter(|_| group == groups.counts().total()) {
        let mut words = StateWords::of(prompt).on_page(*state, index);
        return words.find_map(|(offset, expected)| {
            let at = (u64::from(page.0) * layout.page_stride + offset) as usize;
            let other = memory.region.word(at).load(Relaxed) ^ expected;
            (other & looked_at(at) != 0).then_some(at)
        });
    }
    let before = index as u32 * layout.page_size;
    let kv = Written::of(prompt);
    let places =
        (0..layout.layers).flat_map(|layer| [(layer, KeyValue::Key), (layer, KeyValue::Value)]);
    let mut words = places.flat_map(|place| (0..layout.page_size).map(move |token| (token, place)));
    words.find_map(|(token, (layer, which))| {
        let at = layout.offset(page, layer, which, 0, token) as usize;
        let position = before + token;
        // After the prompt's end, the last page has the bytes of the source's page.
        let bits = looked_at(at);
        let is_right = || {
            let Some(layer) = groups.layer_at(LayerPlace { group, layer }) else { return true };
            let expected = || kv.at(position, layer as u32, which);
            let other = || memory.region.word(at).load(Relaxed) ^ expected();
            position >= prompt.len() as u32 || other() & bits == 0
        };
        (bits != 0 && !is_right()).then_some(at)
    })
}

/// All bits of each byte that has a bit set.
fn whole_bytes(bits: u64) -> u64 {
    let bytes = bits.to_ne_bytes();
    u64::from_ne_bytes(bytes.map(|byte| if byte == 0 { 0 } else { u8::MAX }))
}

/// The words of a pool.
fn words(memory: &Memory) -> impl Iterator<Item = u64> {
    let bytes = memory.layout.page_stride as usize * memory.pages as usize;
    (0..bytes / 8).map(|word| memory.region.word(word * 8).load(Relaxed))
}
