//! A model that is nothing but a check of paged KV: each token writes a hash of itself and its position,
//! and logits are a hash over all KV up to the position, read back through the pages.
#![allow(unsafe_code)]

use baton::ids::PageId;
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::model::forward::batch::{Batch, Logits};
use baton::model::forward::{Forward, KvPool, StepEnd};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub const LAYERS: u32 = 3;
pub const VOCAB: u32 = 40;

pub fn layout(page_size: u32) -> KvLayout {
    KvLayout::page_major(page_size, LAYERS, 1, 2, KvDtype::F32)
}

pub fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Address of the eight bytes of one token's only head.
pub fn cell(kv: KvPool<'_>, pages: &[PageId], position: u32, layer: u32, which: KeyValue) -> *mut u64 {
    let page = pages[(position / kv.layout.page_size) as usize];
    let offset = kv.layout.offset(page, layer, which, 0, position % kv.layout.page_size);
    assert!(offset as usize + 8 <= kv.region.len());
    // SAFETY: within the mapping, as just checked.
    unsafe { kv.region.base().add(offset as usize).as_ptr().cast() }
}

pub fn read(cell: *mut u64) -> u64 {
    // SAFETY: `cell` gives addresses inside a live mapping; tests run in one thread.
    unsafe { cell.read_unaligned() }
}

pub fn write(cell: *mut u64, value: u64) {
    // SAFETY: as in `read`.
    unsafe { cell.write_unaligned(value) }
}

/// What a test sees of the model's work.
#[derive(Default)]
pub struct Watch {
    /// Layers run.
    pub layers: AtomicU64,
    /// Nanoseconds since the rig's start; each token adds [`Watch::token_ns`].
    pub now_ns: AtomicU64,
    pub token_ns: AtomicU64,
    /// Token ranges of the rows of each step, when recording.
    pub steps: Mutex<Option<Vec<Vec<Range<u32>>>>>,
    /// Called after each layer.
    pub hook: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

pub struct PseudoModel {
    pub watch: Arc<Watch>,
    logits: Vec<f32>,
    scratch: Vec<f32>,
}

impl PseudoModel {
    pub fn new(watch: Arc<Watch>, logits: usize) -> PseudoModel {
        PseudoModel {
            watch,
            logits: Vec::with_capacity(logits * VOCAB as usize),
            scratch: Vec::with_capacity(VOCAB as usize),
        }
    }

    fn fill_logits(&mut self, kv: KvPool<'_>, pages: &[PageId], last: u32) {
        let mut state = 7;
        for position in 0..=last {
            for layer in 0..LAYERS {
                state = mix(state ^ read(cell(kv, pages, position, layer, KeyValue::Key)));
                state = mix(state ^ read(cell(kv, pages, position, layer, KeyValue::Value)));
            }
        }
        self.scratch.clear();
        self.scratch.extend((0..VOCAB).map(|id| (mix(state ^ u64::from(id)) % 1000) as f32 / 200.0));
        self.logits.extend_from_slice(&self.scratch);
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
        if let Some(steps) = &mut *self.watch.steps.lock().unwrap() {
            let range = |row| row_range(batch, row);
            steps.push(batch.rows().iter().map(range).collect());
        }
        let ns = self.watch.token_ns.load(Ordering::Relaxed) * batch.tokens().len() as u64;
        self.watch.now_ns.fetch_add(ns, Ordering::Relaxed);
        for layer in 0..LAYERS {
            for row in batch.rows() {
                let (tokens, pages) = (&batch.tokens()[batch.token_range(row)], batch.pages(row));
                for (position, &token) in (row.start..).zip(tokens) {
                    let hash = mix(u64::from(token) << 40 ^ u64::from(position) << 8 ^ u64::from(layer));
                    write(cell(kv, pages, position, layer, KeyValue::Key), hash);
                    write(cell(kv, pages, position, layer, KeyValue::Value), !hash);
                }
            }
            self.watch.layers.fetch_add(1, Ordering::Relaxed);
            if let Some(hook) = &mut *self.watch.hook.lock().unwrap() {
                hook();
            }
            if on_layer(layer).is_break() {
                return StepEnd::Stopped;
            }
        }
        self.logits.clear();
        for row in batch.rows() {
            match row.logits {
                Logits::None => {}
                Logits::Last => self.fill_logits(kv, batch.pages(row), row_range(batch, row).end - 1),
                Logits::All => unimplemented_rows(),
            }
        }
        StepEnd::Complete
    }

    fn logits(&self, index: usize) -> &[f32] {
        &self.logits[index * VOCAB as usize..][..VOCAB as usize]
    }
}

fn unimplemented_rows() {
    panic!("schedulers ask for the last token's logits only");
}

fn row_range(batch: &Batch, row: &baton::model::forward::batch::Row) -> Range<u32> {
    row.start..row.start + batch.token_range(row).len() as u32
}
