//! The KV memory of a simulated engine: which pages it uses, and what they must contain.
//!
//! Invariants: a page that the engine does not use holds its guard, a pattern that nothing else
//! writes. A transfer that ends too early, or writes later, breaks a guard, or hands one over.

use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvLayout};
use crate::kv::region::Region;
use crate::stdx::rng::{Rng, scramble};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Elements of a head: a word of 8 bytes for each token, layer, and K or V.
const HEAD_DIM: u32 = 4;
const LAYERS: u32 = 2;

/// The prompt of an attempt.
#[derive(Clone, Copy, Debug)]
pub struct SimPrompt {
    /// Number of tokens.
    pub tokens: u32,
    /// What its ids and its KV follow from.
    pub seed: u64,
}

impl SimPrompt {
    /// The ids of its tokens.
    pub fn ids(self) -> Vec<u32> {
        (0..u64::from(self.tokens)).map(|token| scramble(self.seed ^ token) as u32).collect()
    }

    fn word(self, token: u32, place: u32) -> u64 {
        scramble(self.seed ^ u64::from(token) << 16 ^ u64::from(place) << 40)
    }
}

/// The memory of an engine.
#[derive(Debug)]
pub struct EngineMemory {
    region: Arc<Region>,
    layout: KvLayout,
    /// By page: its guard while the engine does not use it.
    guards: Vec<Option<u64>>,
    dice: Rng,
}

impl EngineMemory {
    /// Memory of so many pages, none of them in use.
    pub fn new(layout: KvLayout, pages: u32, dice: Rng) -> EngineMemory {
        let bytes = u64::from(pages) * layout.page_bytes();
        let region = Region::new(c"sim-kv", bytes as usize).expect("memory can be had");
        let guards = vec![None; pages as usize];
        let mut memory = EngineMemory { region: Arc::new(region), layout, guards, dice };
        memory.give_back(&(0..pages).map(PageId).collect::<Vec<_>>());
        memory
    }

    /// A layout for pages of this size; `pages` if layers come before pages.
    pub fn layout_of(page_size: u32, pages: Option<u32>) -> KvLayout {
        use crate::kv::layout::KvDtype::F16;
        match pages {
            Some(pages) => KvLayout::layer_major(page_size, LAYERS, 1, HEAD_DIM, F16, pages),
            None => KvLayout::page_major(page_size, LAYERS, 1, HEAD_DIM, F16),
        }
    }

    /// The bytes.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Where KV lies in them.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Takes pages for so many tokens, in random order. `None`: too few are free.
    ///
    /// # Errors
    /// The guard of a page is broken.
    pub fn take(&mut self, tokens: u32) -> Result<Option<Vec<PageId>>, String> {
        let free = self.guards.iter().enumerate().filter(|(_, guard)| guard.is_some());
        let mut free: Vec<_> = free.map(|(page, _)| PageId(page as u32)).collect();
        let wanted = self.layout.pages_for(tokens) as usize;
        if free.len() < wanted {
            return Ok(None);
        }
        let pages = (0..wanted).map(|_| {
            let last = free.len() as u64 - 1;
            free.swap_remove(self.dice.range_u64(0, last) as usize)
        });
        let pages: Vec<_> = pages.collect();
        for &page in &pages {
            self.check_guard(page)?;
            self.guards[page.index()] = None;
        }
        Ok(Some(pages))
    }

    /// Writes new guards over pages that are not used any more.
    pub fn give_back(&mut self, pages: &[PageId]) {
        for &page in pages {
            let guard = self.dice.next_u64();
            for (place, at) in self.words(page, 0..self.layout.page_size) {
                self.region.word(at).store(scramble(guard ^ u64::from(place)), Relaxed);
            }
            self.guards[page.index()] = Some(guard);
        }
    }

    /// Writes new guards over all pages: the agent has ended.
    pub fn give_back_all(&mut self) {
        self.give_back(&(0..self.guards.len() as u32).map(PageId).collect::<Vec<_>>());
    }

    /// Number of pages in use.
    pub fn used(&self) -> usize {
        self.guards.iter().filter(|guard| guard.is_none()).count()
    }

    /// Checks the guards of all pages that are not used.
    ///
    /// # Errors
    /// One is broken.
    pub fn check_guards(&self) -> Result<(), String> {
        (0..self.guards.len() as u32).try_for_each(|page| self.check_guard(PageId(page)))
    }

    fn check_guard(&self, page: PageId) -> Result<(), String> {
        let Some(guard) = self.guards[page.index()] else { return Ok(()) };
        let is_right = |(place, at): (u32, usize)| {
            self.region.word(at).load(Relaxed) == scramble(guard ^ u64::from(place))
        };
        match self.words(page, 0..self.layout.page_size).all(is_right) {
            true => Ok(()),
            false => Err(format!("{page:?} was written and is not in use")),
        }
    }

    /// Computes the KV of these tokens.
    pub fn compute(&self, prompt: SimPrompt, tokens: Range<u32>, pages: &[PageId]) {
        for token in tokens {
            for (place, at) in self.token_words(token, pages) {
                self.region.word(at).store(prompt.word(token, place), Relaxed);
            }
        }
    }

    /// Checks the KV of these tokens.
    ///
    /// # Errors
    /// A token has the KV of another one.
    pub fn check(
        &self,
        prompt: SimPrompt,
        tokens: Range<u32>,
        pages: &[PageId],
    ) -> Result<(), String> {
        let is_wrong = |&token: &u32| {
            let mut words = self.token_words(token, pages);
            words.any(|(place, at)| self.region.word(at).load(Relaxed) != prompt.word(token, place))
        };
        match tokens.clone().find(is_wrong) {
            Some(token) => Err(format!("the KV of token {token} of {tokens:?} is wrong")),
            None => Ok(()),
        }
    }

    fn token_words(
        &self,
        token: u32,
        pages: &[PageId],
    ) -> impl Iterator<Item = (u32, usize)> + use<'_> {
        let within = token % self.layout.page_size;
        let page = pages[(token / self.layout.page_size) as usize];
        let words = self.words(page, within..within + 1);
        // The places of a token are the same in pages of any size.
        words.map(move |(place, at)| (place % (2 * LAYERS), at))
    }

    /// Number and offset of each word of these tokens of a page.
    fn words(
        &self,
        page: PageId,
        tokens: Range<u32>,
    ) -> impl Iterator<Item = (u32, usize)> + use<'_> {
        tokens.flat_map(move |token| {
            (0..2 * LAYERS).map(move |place| {
                let which = if place % 2 == 0 { KeyValue::Key } else { KeyValue::Value };
                let at = self.layout.offset(page, place / 2, which, 0, token);
                (token * 2 * LAYERS + place, at as usize)
            })
        })
    }
}
