//! A model that only checks paged KV. Each token writes a hash of itself, its position and the hash
//! of the previous token. Logits are a hash over all KV up to the position, or over that of its
//! window, read back through the pages. A page that is missing, stale or of another prefix changes
//! the next token. With recurrent state, each token also scrambles the words of the state, and
//! logits depend on them, too.
//!
//! Owns no weights. Not here: the expected tokens of a request (`workload`); [`Fold`] gives them.

use crate::ids::PageId;
use crate::kv::groups::KvGroups;
use crate::kv::layout::{KeyValue, KvDtype, KvLayout};
use crate::kv::state_layout::{StateLayout, StateShape};
use crate::model::forward::batch::{Batch, Logits, Row};
use crate::model::forward::{Forward, KvPool, StepEnd};
use crate::stdx::rng::scramble;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Layers of the model.
pub const LAYERS: u32 = 3;
/// Number of token ids.
pub const VOCAB: u32 = 40;
/// The id that ends an answer, unless the request ignores it.
pub const END: u32 = VOCAB - 1;

/// The KV layout: one head, and eight bytes per token for keys and for values.
pub const fn layout(page_size: u32) -> KvLayout {
    KvLayout::page_major(page_size, LAYERS, 1, 2, KvDtype::F32)
}

/// By layer: how many tokens a token sees; `None`: all.
pub type Windows = [Option<u32>; LAYERS as usize];

/// The kinds of the model's layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SimLayers {
    /// The windows.
    pub windows: Windows,
    /// Whether there are recurrent layers beside them.
    pub has_state: bool,
}

impl SimLayers {
    /// The groups of the layers, with pages of `page_size` tokens.
    pub fn groups(&self, page_size: u32) -> KvGroups {
        let groups = KvGroups::of(&self.windows);
        if !self.has_state {
            return groups;
        }
        let page = KvLayout::page_major(page_size, groups.layers(), 1, 2, KvDtype::F32);
        let state = StateLayout::new(STATE, page.page_bytes());
        groups.with_state(state.expect("a page holds the KV of a token, which is two pieces"))
    }
}

/// A piece is one word.
const STATE: StateShape = StateShape { layers: 2, pieces: 3, piece_elements: 2 };

/// The words of a sequence's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StateWords([u64; (STATE.layers * STATE.pieces) as usize]);

impl StateWords {
    /// The state behind these tokens.
    pub fn of(tokens: &[u32]) -> StateWords {
        let mut words = StateWords::default();
        (0..).zip(tokens).for_each(|(position, &token)| words.add(token, position));
        words
    }

    fn add(&mut self, token: u32, position: u32) {
        for (index, word) in (0..).zip(&mut self.0) {
            *word = scramble(
                *word ^ scramble(u64::from(token) << 40 ^ u64::from(position) << 8 ^ index),
            );
        }
    }

    fn hash(&self) -> u64 {
        self.0.iter().fold(3, |hash, word| scramble(hash ^ word))
    }

    /// The words on a page of the state, with their offsets on it.
    pub fn on_page(self, state: StateLayout, page: usize) -> impl Iterator<Item = (u64, u64)> {
        let words = (0..).zip(self.0).map(move |(index, word)| {
            (state.place(index / STATE.pieces, index % STATE.pieces), word)
        });
        words.filter(move |(place, _)| place.page == page).map(|(place, word)| (place.offset, word))
    }
}

/// A word of the state on these pages in the pool's memory.
fn state_cell<'a>(kv: KvPool<'a>, pages: &[PageId], index: u32) -> &'a AtomicU64 {
    let state = kv.groups.state().expect("the model has state");
    let place = state.place(index / STATE.pieces, index % STATE.pieces);
    let page = pages[place.page].index() as u64;
    kv.region.word((page * kv.layout.page_stride + place.offset) as usize)
}

/// The eight bytes of one token in one layer, as a word of the pool's memory.
fn cell<'a>(
    kv: KvPool<'a>,
    (batch, row): (&Batch, &Row),
    position: u32,
    layer: u32,
    which: KeyValue,
) -> &'a AtomicU64 {
    let KvPool { region, layout, groups } = kv;
    let place = groups.place(layer as usize).expect("all layers have keys and values");
    let page = batch.pages(row, place.group)[(position / layout.page_size) as usize];
    region.word(layout.offset(page, place.layer, which, 0, position % layout.page_size) as usize)
}

/// Whether the token at `last` sees the one at `position` in a layer.
fn sees(windows: &Windows, last: u32, position: u32, layer: u32) -> bool {
    windows[layer as usize].is_none_or(|window| last - position < window)
}

/// The key and value of a token. `before` is the key of the token before it.
fn written(before: u64, token: u32, position: u32, layer: u32) -> (u64, u64) {
    let hash = scramble(
        before ^ scramble(u64::from(token) << 40 ^ u64::from(position) << 8 ^ u64::from(layer)),
    );
    (hash, !hash)
}

/// The correct KV of a sequence.
#[derive(Debug)]
pub struct Written(Vec<[(u64, u64); LAYERS as usize]>);

impl Written {
    /// The KV of these tokens.
    pub fn of(tokens: &[u32]) -> Written {
        let mut keys = [0; LAYERS as usize];
        let token = |(position, &token): (usize, &u32)| {
            std::array::from_fn(|layer| {
                let pair = written(keys[layer], token, position as u32, layer as u32);
                keys[layer] = pair.0;
                pair
            })
        };
        Written(tokens.iter().enumerate().map(token).collect())
    }

    /// The key or value of the token at `position`.
    pub fn at(&self, position: u32, layer: u32, which: KeyValue) -> u64 {
        let (key, value) = self.0[position as usize][layer as usize];
        if which == KeyValue::Key { key } else { value }
    }
}

/// The hash over KV from which logits are computed.
#[derive(Clone, Debug)]
pub struct Fold {
    layers: SimLayers,
    /// The KV of all tokens.
    all: Vec<[(u64, u64); LAYERS as usize]>,
    /// Keys of the last token, by layer; 0 before the first token.
    keys: [u64; LAYERS as usize],
    state: StateWords,
}

impl Fold {
    /// The hash of a model with these layers, before the first token.
    pub fn new(layers: SimLayers) -> Fold {
        let (all, keys, state) = (Vec::new(), Default::default(), StateWords::default());
        Fold { layers, all, keys, state }
    }

    /// Adds a token with its correct KV.
    pub fn add(&mut self, token: u32, position: u32) {
        let pairs = std::array::from_fn(|layer| {
            let pair = written(self.keys[layer], token, position, layer as u32);
            self.keys[layer] = pair.0;
            pair
        });
        self.all.push(pairs);
        self.state.add(token, position);
    }

    /// Logits of the next token.
    pub fn logits(&self) -> impl Iterator<Item = f32> + use<> {
        let last = (self.all.len() as u32).saturating_sub(1);
        let kv = |position: u32, layer: u32| self.all[position as usize][layer as usize];
        let state = self.layers.has_state.then_some(&self.state);
        logits(hash((&self.layers.windows, state), 0..self.all.len() as u32, last, kv))
    }
}

/// The hash of the state behind the token at `last`, and of the KV that it sees, in order.
fn hash(
    (windows, state): (&Windows, Option<&StateWords>),
    positions: Range<u32>,
    last: u32,
    kv: impl Fn(u32, u32) -> (u64, u64),
) -> u64 {
    let places = positions.flat_map(|position| (0..LAYERS).map(move |layer| (position, layer)));
    let seen = places.filter(|&(position, layer)| sees(windows, last, position, layer));
    seen.fold(state.map_or(7, StateWords::hash), |hash, (position, layer)| {
        let (key, value) = kv(position, layer);
        scramble(scramble(hash ^ key) ^ value)
    })
}

fn logits(hash: u64) -> impl Iterator<Item = f32> {
    (0..VOCAB).map(move |id| (scramble(hash ^ u64::from(id)) % 1000) as f32 / 200.0)
}

/// A function that the model calls after each layer.
pub type Hook = Box<dyn FnMut() + Send>;

/// Counters and settings of the model, shared with other threads.
#[derive(Default)]
pub struct Watch {
    /// Layers computed so far.
    pub layers: AtomicU64,
    /// Time of all steps so far, in nanoseconds.
    pub now_ns: AtomicU64,
    /// Time of one token, in nanoseconds.
    pub token_ns: AtomicU64,
    /// Token ranges of the rows of each step. `None`: not recorded.
    pub steps: Mutex<Option<Vec<Vec<Range<u32>>>>>,
    /// Called after each layer.
    pub hook: Mutex<Option<Hook>>,
}

/// The model.
pub struct PseudoModel {
    watch: Arc<Watch>,
    layers: SimLayers,
    logits: Vec<f32>,
}

impl PseudoModel {
    /// A model that gives at most `logits` rows of logits in a step.
    pub fn new(watch: Arc<Watch>, logits: usize, layers: SimLayers) -> PseudoModel {
        PseudoModel { watch, layers, logits: Vec::with_capacity(logits * VOCAB as usize) }
    }

    fn look(&mut self, batch: &Batch) {
        if let Some(steps) = &mut *self.watch.steps.lock().expect("no panic while locked") {
            steps.push(batch.rows().iter().map(|row| positions(batch, row)).collect());
        }
        let ns = self.watch.token_ns.load(Ordering::Relaxed) * batch.tokens().len() as u64;
        self.watch.now_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn fill_logits(
        &mut self,
        kv: KvPool<'_>,
        row: (&Batch, &Row),
        (last, state): (u32, &StateWords),
    ) {
        let read = |position, layer| {
            let read = |which| cell(kv, row, position, layer, which).load(Ordering::Relaxed);
            (read(KeyValue::Key), read(KeyValue::Value))
        };
        let layers = (&self.layers.windows, self.layers.has_state.then_some(state));
        self.logits.extend(logits(hash(layers, 0..last + 1, last, read)));
    }

    /// Advances the state of a row, and computes the wanted logits.
    fn finish_row(&mut self, kv: KvPool<'_>, (batch, row): (&Batch, &Row)) {
        let mut state = StateWords::default();
        if self.layers.has_state && row.seen > 0 {
            let words = (0..).zip(&mut state.0);
            words.for_each(|(index, word)| {
                *word = state_cell(kv, batch.origin_pages(row), index).load(Ordering::Relaxed);
            });
        }
        let (positions, tokens) = (positions(batch, row), batch.token_range(row));
        for (position, &token) in positions.clone().zip(&batch.tokens()[tokens]) {
            if position >= row.seen {
                state.add(token, position);
            }
            match row.logits {
                Logits::Last if position + 1 < positions.end => {}
                Logits::None => {}
                Logits::Last | Logits::All => {
                    self.fill_logits(kv, (batch, row), (position, &state));
                }
            }
        }
        if self.layers.has_state {
            let words = (0..).zip(state.0);
            words.for_each(|(index, word)| {
                state_cell(kv, batch.state_pages(row), index).store(word, Ordering::Relaxed);
            });
        }
    }
}

impl Forward for PseudoModel {
    fn step(
        &mut self,
        batch: &Batch,
        kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd {
        assert!(!batch.rows().is_empty());
        self.look(batch);
        for layer in 0..LAYERS {
            for row in batch.rows() {
                let (tokens, of) = (&batch.tokens()[batch.token_range(row)], (batch, row));
                let key_of =
                    |position| cell(kv, of, position, layer, KeyValue::Key).load(Ordering::Relaxed);
                let mut before = row.start.checked_sub(1).map_or(0, key_of);
                for (position, &token) in (row.start..).zip(tokens) {
                    let (key, value) = written(before, token, position, layer);
                    before = key;
                    cell(kv, of, position, layer, KeyValue::Key).store(key, Ordering::Relaxed);
                    cell(kv, of, position, layer, KeyValue::Value).store(value, Ordering::Relaxed);
                }
            }
            self.watch.layers.fetch_add(1, Ordering::Relaxed);
            if let Some(hook) = &mut *self.watch.hook.lock().expect("no panic while locked") {
                hook();
            }
            if on_layer(layer).is_break() {
                return StepEnd::Stopped;
            }
        }
        self.logits.clear();
        batch.rows().iter().for_each(|row| self.finish_row(kv, (batch, row)));
        StepEnd::Complete
    }

    fn logits(&self, index: usize) -> &[f32] {
        &self.logits[index * VOCAB as usize..][..VOCAB as usize]
    }
}

fn positions(batch: &Batch, row: &Row) -> Range<u32> {
    row.start..row.start + batch.token_range(row).len() as u32
}
