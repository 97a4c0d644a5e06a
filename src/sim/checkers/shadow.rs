//! Nobody writes into a page but the transfer that its owner has granted it to: a second copy of a decode worker's pool,
//! compared whenever its mover has moved. What changed must lie in pages that were named to a source for a transfer
//! that was open when the mover's turn began, and must be KV of that transfer's own prompt where it goes; but a copy
//! that proved void has failed its transfer in the same turn, and may have brought anything into its pages.

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

/// What a source was asked for.
#[derive(Debug)]
pub struct Grant {
    /// Which use of the slot.
    pub generation: Generation,
    /// The request.
    pub request: usize,
    /// Its whole prompt.
    pub prompt: Vec<u32>,
    /// Of that, what is to come.
    pub tokens: Range<u32>,
    /// The first page that it comes to is the one of this index.
    pub first: usize,
    /// Pages that it comes to.
    pub pages: Vec<PageId>,
}

/// Grants by slot, from Destination to the slot's release.
pub type Grants = BTreeMap<SlotId, Grant>;

/// The second copy.
#[derive(Debug, Default)]
pub struct Shadow {
    words: Vec<u64>,
    /// Slot of the open transfer that each page was granted to.
    granted: BTreeMap<PageId, SlotId>,
}

impl Shadow {
    /// Before a mover's turn: what it may write, and what is there.
    pub fn look(&mut self, process: &Process) {
        let worker = process.edge.handoff().worker(WORKER);
        let grants = process.edge.grants().iter();
        let open = grants.filter(|(slot, grant)| worker.status.is_open(**slot, grant.generation));
        self.granted =
            open.flat_map(|(&slot, grant)| grant.pages.iter().map(move |&page| (page, slot))).collect();
        self.words.clear();
        self.words.extend(words(&process.memory));
    }

    /// After it.
    pub fn compare(&self, index: usize, process: &Process) -> Checked {
        let page_words = (process.memory.layout.page_stride / 8) as usize;
        let changed = self.words.iter().zip(words(&process.memory)).enumerate();
        let changed = changed.filter(|(_, (before, now))| *before != now).map(|(at, _)| at / page_words);
        let mut last = None;
        for page in changed {
            if last.replace(page) != Some(page) {
                self.page(index, process, PageId(page as u32))?;
            }
        }
        Ok(())
    }

    /// A page in which something has changed.
    fn page(&self, index: usize, process: &Process, page: PageId) -> Checked {
        let grants = process.edge.grants();
        let Some((slot, grant)) = self.granted.get(&page).and_then(|slot| Some((slot, grants.get(slot)?)))
        else {
            let what = format!("process {index}: page {page} was written and not granted");
            return Err(Finding::new(Checker::Shadow, what));
        };
        let status = process.edge.handoff().worker(WORKER).status.load(*slot);
        if status.generation != grant.generation || status.state == State::Failed {
            return Ok(());
        }
        let layout = &process.memory.layout;
        let place = grant.pages.iter().position(|&granted| granted == page).unwrap_or(0);
        let before = (grant.first + place) as u32 * layout.page_size;
        let kv = Written::of(&grant.prompt);
        for token in 0..layout.page_size {
            for (layer, which) in
                (0..LAYERS).flat_map(|layer| [(layer, KeyValue::Key), (layer, KeyValue::Value)])
            {
                let at = layout.offset(page, layer, which, 0, token) as usize;
                let now = process.memory.region.word(at).load(Relaxed);
                let position = before + token;
                // Behind the prompt's end its last page brings what the source's has there.
                let wanted = position >= grant.tokens.end
                    || position >= grant.tokens.start && now == kv.at(position, layer, which);
                if self.words[at / 8] != now && !wanted {
                    let what = format!(
                        "process {index}: page {page} was granted to request {} and was written with other KV",
                        grant.request
                    );
                    return Err(Finding::about(Checker::Shadow, grant.request, what));
                }
            }
        }
        Ok(())
    }
}

fn words(memory: &Memory) -> impl Iterator<Item = u64> {
    let bytes = memory.layout.page_stride as usize * memory.pages as usize;
    (0..bytes / 8).map(|word| memory.region.word(word * 8).load(Relaxed))
}
