//! Nobody writes into a page that its owner did not grant: a second copy of a decode worker's pool, compared
//! whenever its mover has moved. What changed must be in pages that were named to a source for a transfer that
//! was still open when the mover's turn began.

use super::{Checked, Checker, Finding};
use crate::ids::{Generation, PageId, SlotId};
use crate::sim::process::{Process, WORKER};
use crate::transfer::transport::Memory;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

/// Pages by slot, from Destination to the slot's release.
pub type Grants = BTreeMap<SlotId, (Generation, Vec<PageId>)>;

/// The second copy.
#[derive(Debug, Default)]
pub struct Shadow {
    words: Vec<u64>,
    granted: BTreeSet<PageId>,
}

impl Shadow {
    /// Before a mover's turn: what it may write, and what is there.
    pub fn look(&mut self, process: &Process) {
        let worker = process.edge.handoff().worker(WORKER);
        let open = |slot: &SlotId, generation| worker.status.is_open(*slot, generation);
        let grants = process.edge.grants().iter().filter(|(slot, (generation, _))| open(slot, *generation));
        self.granted = grants.flat_map(|(_, (_, pages))| pages.iter().copied()).collect();
        self.words.clear();
        self.words.extend(words(&process.memory));
    }

    /// After it.
    pub fn compare(&self, index: usize, process: &Process) -> Checked {
        let page_words = (process.memory.layout.page_stride / 8) as usize;
        let changed = self.words.iter().zip(words(&process.memory)).enumerate();
        let changed = changed.filter(|(_, (before, now))| *before != now).map(|(at, _)| at / page_words);
        match changed.map(|page| PageId(page as u32)).find(|page| !self.granted.contains(page)) {
            Some(page) => {
                let what = format!("process {index}: page {page} was written and not granted");
                Err(Finding::new(Checker::Shadow, what))
            }
            None => Ok(()),
        }
    }
}

fn words(memory: &Memory) -> impl Iterator<Item = u64> {
    let bytes = memory.layout.page_stride as usize * memory.pages as usize;
    (0..bytes / 8).map(|word| memory.region.word(word * 8).load(Relaxed))
}
