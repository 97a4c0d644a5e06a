//! One step of the model over a mixed batch of prefill chunks and decode rows against paged KV.
//!
//! Thread: the engine's. Owns: what a step is given ([`batch::Batch`]) and the contract of
//! [`Forward`]. Invariant: kernels are batch-invariant, so a row's bits depend on nothing but its
//! own tokens and KV: not on neighbours, chunk size, page placement, page size or thread count.

pub mod batch;
pub mod cpu;

use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use batch::Batch;
use std::ops::ControlFlow;

/// The KV pool that a step reads and extends. The caller holds the pages of the batch: nobody else
/// writes them during the step, and no two rows share a page that is written.
#[derive(Clone, Copy, Debug)]
pub struct KvPool<'a> {
    /// The mapping.
    pub region: &'a Region,
    /// Where things lie in it.
    pub layout: &'a KvLayout,
}

/// How a step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum StepEnd {
    /// All layers done; logits of the rows that want them are ready.
    Complete,
    /// `on_layer` asked to stop; the KV written is incomplete and no logits are valid.
    Stopped,
}

/// A model ready to run steps. Allocates nothing after construction.
pub trait Forward: Send {
    /// Runs `batch`: writes K and V of its tokens into `kv` and computes the logits asked for.
    /// `on_layer(l)` is called on the engine's thread when layer `l` of all rows is finished and
    /// its KV is in place.
    fn step(
        &mut self,
        batch: &Batch,
        kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd;

    /// Unscaled logits over the vocabulary of the `index`-th wanted position, counted through the
    /// batch in order.
    fn logits(&self, index: usize) -> &[f32];
}
