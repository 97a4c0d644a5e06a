//! Runs sequences through a `CpuModel` with its own pool of pages.

use crate::model::{Model, Random};
use baton::ids::PageId;
use baton::kv::groups::KvGroups;
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::kv::page_span::{PageSpan, SequenceState};
use baton::kv::region::Region;
use baton::model::forward::batch::{Batch, BatchLimits, Logits};
use baton::model::forward::cpu::{CpuModel, CpuOptions, KernelFamily};
use baton::model::forward::{Forward, KvPool, StepEnd};
use std::ops::ControlFlow;

pub const LIMITS: BatchLimits =
    BatchLimits { tokens: 700, rows: 40, logits: 700, context: 2048, pages: 4000 };

/// How to run; results must not depend on any of it but the family and the KV type.
#[derive(Clone, Debug)]
pub struct How {
    pub kernel: KernelFamily,
    pub threads: usize,
    pub page_size: u32,
    pub kv: KvDtype,
    /// Whether window layers and full layers have pages of their own.
    pub is_grouped: bool,
    /// Seeds the order of pages.
    pub order: u64,
}

pub struct Runner {
    pub model: CpuModel,
    pub batch: Batch,
    region: Region,
    layout: KvLayout,
    groups: KvGroups,
    free: Vec<PageId>,
}

pub struct Sequence {
    pub tokens: Vec<u32>,
    pub pages: Vec<PageId>,
    /// Pages of its state.
    pub state: Vec<PageId>,
    pub done: usize,
}

impl Runner {
    pub fn new(model: &Model, how: &How) -> Runner {
        let options =
            CpuOptions { threads: how.threads, limits: LIMITS, kernel: how.kernel, pin: None };
        let c = &model.config;
        let (groups, layout) = if how.is_grouped || c.state_shape().is_some() {
            c.kv_memory(how.page_size, how.kv).unwrap()
        } else {
            let (layers, heads, dim) = (c.layers as u32, c.kv_heads as u32, c.head_dim as u32);
            let layout = KvLayout::page_major(how.page_size, layers, heads, dim, how.kv);
            (KvGroups::single(c.layers, None), layout)
        };
        let counts = groups.counts();
        let pages = counts.pages(3000 / how.page_size + 10, 3000 / how.page_size + 10)
            + LIMITS.rows as u32 * counts.state_pages;
        let mut free: Vec<PageId> = (0..pages).map(PageId).collect();
        let mut random = Random(how.order);
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        Runner {
            model: CpuModel::load(c, model, &options, &mut |_, _| {}).unwrap(),
            batch: Batch::new(LIMITS),
            region: Region::new(c"kv", (layout.page_stride * pages as u64) as usize).unwrap(),
            layout,
            groups,
            free,
        }
    }

    pub fn sequence(&mut self, tokens: &[u32]) -> Sequence {
        let pages =
            self.layout.pages_for(tokens.len() as u32) as usize * self.groups.counts().total();
        let pages = self.free.split_off(self.free.len() - pages);
        let state = self.free.len() - self.groups.counts().state_pages as usize;
        let state = self.free.split_off(state);
        Sequence { tokens: tokens.to_vec(), pages, state, done: 0 }
    }

    pub fn push(&mut self, sequence: &mut Sequence, count: usize, logits: Logits) {
        let tokens = &sequence.tokens[sequence.done..][..count];
        let start = sequence.done as u32;
        push_row(&mut self.batch, &self.groups, sequence, (tokens, start, start), logits);
        sequence.done += count;
    }

    /// Computes the last token again, as after a mask that was late.
    #[allow(dead_code)]
    pub fn push_again(&mut self, sequence: &Sequence) {
        let start = sequence.done as u32 - 1;
        let tokens = &sequence.tokens[start as usize..sequence.done];
        let row = (tokens, start, start + 1);
        push_row(&mut self.batch, &self.groups, sequence, row, Logits::Last);
    }

    pub fn step(&mut self) -> Vec<Vec<f32>> {
        let mut layers = vec![];
        let kv = KvPool { region: &self.region, layout: &self.layout, groups: &self.groups };
        let end = self.model.step(&self.batch, kv, &mut |layer| {
            layers.push(layer);
            ControlFlow::Continue(())
        });
        assert_eq!(end, StepEnd::Complete);
        assert_eq!(layers, (0..self.groups.model_layers() as u32).collect::<Vec<_>>());
        let logits =
            (0..self.batch.wanted_logits()).map(|i| self.model.logits(i).to_vec()).collect();
        self.batch.clear();
        logits
    }

    /// A step and nothing besides; the batch stays.
    pub fn step_only(&mut self) -> StepEnd {
        let kv = KvPool { region: &self.region, layout: &self.layout, groups: &self.groups };
        self.model.step(&self.batch, kv, &mut |_| ControlFlow::Continue(()))
    }

    /// Stops when layer `last` is done.
    pub fn step_until(&mut self, last: u32) -> (StepEnd, u32) {
        let kv = KvPool { region: &self.region, layout: &self.layout, groups: &self.groups };
        let mut seen = 0;
        let end = self.model.step(&self.batch, kv, &mut |layer| {
            seen += 1;
            if layer == last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        self.batch.clear();
        (end, seen)
    }

    /// All logits of one sequence, fed in pieces of `chunk`.
    pub fn logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        self.logits_and_kv(tokens, chunk).0
    }

    /// Logits, and what is stored at the end.
    pub fn logits_and_kv(&mut self, tokens: &[u32], chunk: usize) -> (Vec<Vec<f32>>, Vec<u8>) {
        let mut sequence = self.sequence(tokens);
        let mut all = vec![];
        while sequence.done < tokens.len() {
            let count = chunk.min(tokens.len() - sequence.done);
            self.push(&mut sequence, count, Logits::All);
            all.extend(self.step());
        }
        let stored = self.kv_bytes(&sequence);
        self.free.append(&mut sequence.pages);
        self.free.append(&mut sequence.state);
        (all, stored)
    }

    /// Gives the keys and values at these positions bytes that are no numbers.
    #[allow(dead_code)]
    pub fn overwrite(&mut self, sequence: &Sequence, positions: std::ops::Range<u32>) {
        let l = &self.layout;
        for position in positions {
            for layer in 0..self.groups.model_layers() {
                let (page, layer) = self.place(sequence, layer, position);
                for which in [KeyValue::Key, KeyValue::Value] {
                    for head in 0..l.kv_heads {
                        let at = l.offset(page, layer, which, head, position % l.page_size);
                        let bytes = (l.head_dim as u64 * l.dtype.bytes()) as usize;
                        // SAFETY: inside the region, and no step runs.
                        unsafe { self.region.base().add(at as usize).write_bytes(0xff, bytes) };
                    }
                }
            }
        }
    }

    /// The page of a token in a layer of the model, and the layer's index on it.
    fn place(&self, sequence: &Sequence, layer: usize, position: u32) -> (PageId, u32) {
        let place = self.groups.place(layer).expect("a layer with keys and values");
        let pages = sequence.pages.len() / self.groups.counts().total();
        let page = place.group * pages + (position / self.layout.page_size) as usize;
        (sequence.pages[page], place.layer)
    }

    /// Every stored byte of a sequence, in an order that knows no pages.
    pub fn kv_bytes(&self, sequence: &Sequence) -> Vec<u8> {
        let l = &self.layout;
        let mut bytes = vec![];
        if let Some(state) = self.groups.state() {
            let shape = *state.shape();
            for index in 0..shape.layers * shape.pieces {
                let place = state.place(index / shape.pieces, index % shape.pieces);
                let page = sequence.state[place.page].index() as u64 * l.page_stride;
                for i in 0..shape.piece_bytes() {
                    let at = (page + place.offset + i) as usize;
                    // SAFETY: inside the region, and no step runs.
                    bytes.push(unsafe { self.region.base().add(at).read() });
                }
            }
        }
        let has_kv = |layer: &usize| self.groups.place(*layer).is_some();
        for layer in (0..self.groups.model_layers()).filter(has_kv) {
            for which in [KeyValue::Key, KeyValue::Value] {
                for head in 0..l.kv_heads {
                    for position in 0..sequence.done as u32 {
                        let (page, layer) = self.place(sequence, layer, position);
                        let at = l.offset(page, layer, which, head, position % l.page_size);
                        for i in 0..l.head_dim as u64 * l.dtype.bytes() {
                            // SAFETY: inside the region, and no step runs.
                            bytes.push(unsafe { self.region.base().add((at + i) as usize).read() });
                        }
                    }
                }
            }
        }
        bytes
    }
}

/// Adds `tokens` from `start` on, behind `seen` tokens that the state has seen.
fn push_row(
    batch: &mut Batch,
    groups: &KvGroups,
    sequence: &Sequence,
    (tokens, start, seen): (&[u32], u32, u32),
    logits: Logits,
) {
    let state = SequenceState::in_place(&sequence.state, seen);
    let each = sequence.pages.len() / groups.counts().total().max(1);
    let spans = sequence.pages.chunks(each.max(1)).map(PageSpan::whole);
    batch.push_joined([tokens, &[]], start, (spans, state), logits).unwrap();
}

pub fn bits(logits: &[Vec<f32>]) -> Vec<Vec<u32>> {
    logits.iter().map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}
