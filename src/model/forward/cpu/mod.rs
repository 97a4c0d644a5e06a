//! The forward pass on CPU: weights repacked for the kernels, and a step through all layers.
//!
//! Thread: `step` runs on the engine's thread, with helper threads.
//! Invariants: after `load` nothing allocates. The bits of a row depend only on its own tokens and
//! KV and on the bit class of the kernels.
//! Not here: files (`model`), pages (`kv`, `sched`), sampling.

mod arena;
mod attention;
mod block;
mod delta;
mod element;
mod experts;
mod head_run;
mod layer_weights;
mod load;
mod mamba;
mod matrix;
mod matrix_product;
mod paged_kv;
mod panel;
mod plan;
mod quantized_block;
mod recurrent;
mod rope;
mod simd;
mod step;
mod step_team;
#[cfg(test)]
mod tests;

pub use crate::config::KernelFamily;
pub use simd::{available_kernels, fastest_kernels};

use super::batch::{Batch, BatchLimits};
use super::{Forward, KvPool, StepEnd};
use crate::model::config::ModelConfig;
use crate::model::weights::{LoadError, WeightSource};
use crate::stdx::team::Team;
use crate::sys::affinity;
use layer_weights::ModelWeights;
use plan::StepPlan;
use rope::Rope;
use simd::Dispatch;
use std::ops::ControlFlow;
use step::StepScratch;

/// Options of a model on CPU.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Compute threads, including the engine's.
    pub threads: usize,
    /// Largest batch.
    pub limits: BatchLimits,
    /// The kernel family; [`fastest_kernels`] is the one that most callers want.
    pub kernel: KernelFamily,
    /// The CPU of each thread beside the engine's; `None`: they run on the CPUs of the thread that
    /// loads the model.
    pub pin: Option<Vec<usize>>,
}

/// Bytes that a model holds, without KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelMemory {
    /// Repacked weights.
    pub weights: usize,
    /// Activations, logits, working memory of the threads.
    pub scratch: usize,
}

/// A model on CPU.
pub struct CpuModel {
    config: ModelConfig,
    weights: ModelWeights,
    rope: Rope,
    /// Of window layers, if they have frequencies of their own.
    window_rope: Option<Rope>,
    dispatch: Dispatch,
    team: Team,
    plan: StepPlan,
    scratch: StepScratch,
}

impl CpuModel {
    /// Checks and repacks all weights; `progress(done, total)` counts tensors.
    pub fn load(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        options: &CpuOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<CpuModel, LoadError> {
        let dispatch = Dispatch::new(options.kernel).ok_or_else(|| {
            let names: Vec<&str> = available_kernels().iter().map(|family| family.name()).collect();
            let expected = names.join(" or ");
            LoadError::field(weights.describe(), "kernel family", expected, options.kernel)
        })?;
        let pin = options.pin.clone().unwrap_or_default();
        let begin = move |helper: usize| {
            if let Some(&cpu) = pin.get(helper - 1) {
                // Without its CPU, the helper runs on those of its starter.
                let _ = affinity::restrict(&[cpu]);
            }
        };
        let mut team = Team::new("team", options.threads, begin)
            .map_err(|error| LoadError::io("compute threads", error))?;
        let weights = ModelWeights::load(config, weights, &mut team, progress)?;
        let scratch = StepScratch::new(config, &weights, &options.limits, team.threads());
        Ok(CpuModel {
            rope: Rope::new(config),
            window_rope: config.gemma.as_ref().map(|gemma| Rope::of_windows(config, gemma)),
            plan: StepPlan::new(&options.limits),
            config: config.clone(),
            weights,
            dispatch,
            team,
            scratch,
        })
    }

    /// The kernels in use.
    pub fn kernel_family(&self) -> KernelFamily {
        self.dispatch.family()
    }

    /// Bytes held.
    pub fn memory_bytes(&self) -> ModelMemory {
        ModelMemory { weights: self.weights.memory(), scratch: self.scratch.memory() }
    }
}

impl Forward for CpuModel {
    fn step(
        &mut self,
        batch: &Batch,
        kv: KvPool<'_>,
        on_layer: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> StepEnd {
        self.run_step(batch, kv, on_layer)
    }

    fn logits(&self, index: usize) -> &[f32] {
        self.scratch.logits(index, self.config.vocab)
    }
}
