//! One step of the model over a mixed batch of prefill chunks and decode rows, against paged KV.
//!
//! Owns: the input of a step ([`batch::Batch`]) and the contract of [`Forward`].
//! Thread: the engine's.
//! Invariants: kernels are batch-invariant. The bits of a row depend only on its own tokens and KV.
//! They do not depend on neighbours, chunk size, page placement, page size or thread count.

pub mod batch;
pub mod cpu;

use crate::kv::groups::KvGroups;
use crate::kv::layout::KvLayout;
use crate::kv::region::Region;
use batch::Batch;
use std::ops::ControlFlow;

/// The KV pool that a step reads and extends. The caller holds the pages of the batch. No other
/// code writes them during the step, and no two rows share a page that the step writes.
#[derive(Clone, Copy, Debug)]
pub struct KvPool<'a> {
    /// The mapping.
    pub region: &'a Region,
    /// The layout of the memory. A page has the layers of one group.
    pub layout: &'a KvLayout,
    /// The places of the layers.
    pub groups: &'a KvGroups,
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum StepEnd {
    /// All layers are done and the wanted logits are ready.
    Complete,
    /// `on_layer` stopped the step. The written KV is incomplete and no logits are valid.
    Stopped,
}

/// A model ready to run steps. It allocates nothing after construction.
pub trait Forward: Send {
    /// Runs `batch`: writes K and V of its tokens into `kv` and computes the wanted logits. Calls
    /// `on_layer(l)` on the engine's thread when layer `l` of all rows is finished and its KV is in
    /// place.
    fn step(
        &mut self,
        batch: &Batch,
        kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd;

    /// Unscaled logits over the vocabulary, for the `index`-th wanted position of the batch in
    /// order.
    fn logits(&self, index: usize) -> &[f32];
}
