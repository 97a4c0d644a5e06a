//! Only the transfer that has the grant of a page writes into it. The checker keeps a copy of a
//! decode worker's pool, and compares it after each turn of the mover.
//!
//! A changed page must be granted to a transfer that was open when the mover's turn began. It must
//! hold KV of that transfer's own prompt, at the right place. One exception: a copy that proves
//! void fails its transfer in the same turn, and its pages can then hold any bytes. A NIC writes
//! without the mover, even for a while after a failure. It must write only to pages under a lease
//! that the mover has not ended, and only that transfer's KV.

use super::{Checked, Checker, Finding};
use crate::ids::{Generation, PageId, SlotId};
use crate::kv::layout::KeyValue;
use crate::sim::model::{LAYERS, Written};
use crate::sim::process::{Process, WORKER};
use crate::transfer::status::State;
use crate::transfer::transport::Memory;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// The state of a lease after the mover's turns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GrantState {
    /// The mover has not taken it yet.
    Granted,
    /// The mover holds it.
    Held,
    /// The mover has ended it: no write for this transfer follows.
    Ended,
}

/// The grant of pages to a source.
#[derive(Debug)]
pub struct Grant {
    /// Generation of the slot.
    pub generation: Generation,
    /// The request.
    pub request: usize,
    /// Its whole prompt.
    pub prompt: Vec<u32>,
    /// The tokens of the prompt that the source sends.
    pub tokens: Range<u32>,
    /// Index of the first page for the tokens.
    pub first: usize,
    /// The pages for the tokens.
    pub pages: Vec<PageId>,
    /// The lease of these pages.
    pub lease: GrantState,
}

impl Grant {
    /// Records the generation of the slot for which the mover holds a lease.
    pub fn note(&mut self, held: Option<Generation>) {
        self.lease = match self.lease {
            _ if held == Some(self.generation) => GrantState::Held,
            GrantState::Held => GrantState::Ended,
            other => other,
        };
    }

    /// The byte offset of the first word in a page that differs from the KV to be sent. Only the
    /// bits of `looked_at` count.
    fn other_word(
        &self,
        memory: &Memory,
        page: PageId,
        looked_at: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        let place = self.pages.iter().position(|&granted| granted == page).unwrap_or(0);
        other_word(memory, (page, self.first + place), &self.prompt, &self.tokens, looked_at)
    }

    /// The finding for a page with wrong KV.
    fn other_kv(&self, process: usize, page: PageId) -> Finding {
        let request = self.request;
        let what = format!(
            "process {process}: page {page} was granted to request {request} \
             and was written with other KV"
        );
        Finding::about(Checker::Shadow, request, what)
    }
}

/// Grants by slot, from the Destination message to the slot's release.
pub type Grants = BTreeMap<SlotId, Grant>;

/// The copy of a pool.
#[derive(Debug, Default)]
pub struct Shadow {
    words: Vec<u64>,
    /// Slot of the open transfer that each page was granted to.
    granted: BTreeMap<PageId, SlotId>,
}

impl Shadow {
    /// Before a mover's turn, records the granted pages and the words of the pool.
    pub fn look(&mut self, process: &Process) {
        let worker = process.edge.handoff().worker(WORKER);
        let grants = process.edge.grants().iter();
        let open = grants.filter(|(slot, grant)| worker.status.is_open(**slot, grant.generation));
        self.granted = open
            .flat_map(|(&slot, grant)| grant.pages.iter().map(move |&page| (page, slot)))
            .collect();
        self.words.clear();
        self.words.extend(words(&process.memory));
    }

    /// After the turn, compares them.
    pub fn compare(&self, index: usize, process: &Process) -> Checked {
        let page_words = (process.memory.layout.page_stride / 8) as usize;
        let changed = self.words.iter().zip(words(&process.memory)).enumerate();
        let changed =
            changed.filter(|(_, (before, now))| *before != now).map(|(at, _)| at / page_words);
        let mut last = None;
        for page in changed {
            if last.replace(page) != Some(page) {
                self.page(index, process, PageId(page as u32))?;
            }
        }
        Ok(())
    }

    /// Checks a page that has changed.
    fn page(&self, index: usize, process: &Process, page: PageId) -> Checked {
        let grants = process.edge.grants();
        let Some((slot, grant)) =
            self.granted.get(&page).and_then(|slot| Some((slot, grants.get(slot)?)))
        else {
            let what = format!("process {index}: page {page} was written and not granted");
            return Err(Finding::new(Checker::Shadow, what));
        };
        let status = process.edge.handoff().worker(WORKER).status.load(*slot);
        if status.generation != grant.generation || status.state == State::Failed {
            return Ok(());
        }
        let memory = &process.memory;
        let changed =
            |at: usize| whole_bytes(self.words[at / 8] ^ memory.region.word(at).load(Relaxed));
        match grant.other_word(memory, page, changed) {
            Some(_) => Err(grant.other_kv(index, page)),
            None => Ok(()),
        }
    }
}

/// Checks a NIC's write of `bytes` bytes at this address. A write outside the pool is an aux
/// record, which movers check.
pub fn written(index: usize, process: &Process, address: u64, bytes: u64) -> Checked {
    let memory = &process.memory;
    let base = memory.region.base().as_ptr().addr() as u64;
    let Some(from) =
        address.checked_sub(base).filter(|from| from + bytes <= memory.region.len() as u64)
    else {
        return Ok(());
    };
    let range = from as usize..(from + bytes) as usize;
    let stride = memory.layout.page_stride;
    for page in (from / stride..(from + bytes).div_ceil(stride)).map(|page| PageId(page as u32)) {
        let grants = process.edge.grants().values();
        let Some(grant) = grants
            .filter(|grant| grant.lease != GrantState::Ended)
            .find(|grant| grant.pages.contains(&page))
        else {
            let what = format!("process {index}: page {page} was written and not granted");
            return Err(Finding::new(Checker::Shadow, what));
        };
        if grant
            .other_word(memory, page, |at| if range.contains(&at) { u64::MAX } else { 0 })
            .is_some()
        {
            return Err(grant.other_kv(index, page));
        }
    }
    Ok(())
}

/// The byte offset of the first word in a page that differs from the KV of `tokens` of this
/// prompt. The page is the one with this index in the sequence. Only the bits of `looked_at` count,
/// because a stream can bring a part of a word.
pub fn other_word(
    memory: &Memory,
    (page, index): (PageId, usize),
    prompt: &[u32],
    tokens: &Range<u32>,
    looked_at: impl Fn(usize) -> u64,
) -> Option<usize> {
    let layout = &memory.layout;
    let before = index as u32 * layout.page_size;
    let kv = Written::of(prompt);
    let places = (0..LAYERS).flat_map(|layer| [(layer, KeyValue::Key), (layer, KeyValue::Value)]);
    let mut words = places.flat_map(|place| (0..layout.page_size).map(move |token| (token, place)));
    words.find_map(|(token, (layer, which))| {
        let at = layout.offset(page, layer, which, 0, token) as usize;
        let position = before + token;
        // After the prompt's end, the last page has the bytes of the source's page.
        let bits = looked_at(at);
        let is_right = || {
            let other = || memory.region.word(at).load(Relaxed) ^ kv.at(position, layer, which);
            position >= tokens.end || position >= tokens.start && other() & bits == 0
        };
        (bits != 0 && !is_right()).then_some(at)
    })
}

/// All bits of each byte that has a bit set.
pub fn whole_bytes(bits: u64) -> u64 {
    let bytes = bits.to_ne_bytes();
    u64::from_ne_bytes(bytes.map(|byte| if byte == 0 { 0 } else { u8::MAX }))
}

/// The words of a pool.
pub fn words(memory: &Memory) -> impl Iterator<Item = u64> {
    let bytes = memory.layout.page_stride as usize * memory.pages as usize;
    (0..bytes / 8).map(|word| memory.region.word(word * 8).load(Relaxed))
}
