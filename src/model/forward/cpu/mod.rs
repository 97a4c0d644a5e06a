//! The forward pass on CPU: weights repacked for the kernels, and a step through all layers.
//!
//! Thread: `step` on the engine's, with helpers of its own. Invariants: after `load` nothing
//! allocates; a row's bits depend on its own tokens and KV and on the kernel family alone.
//! Leaves to others: files (`model`), pages (`kv`, `sched`), sampling.

mod arena;
mod attention;
mod block;
mod element;
mod load;
mod matrix;
mod multiply;
mod paged;
mod panel;
mod plan;
mod rope;
mod simd;
mod step;
mod unpack;

pub use simd::{KernelFamily, available_kernels};

use super::batch::{Batch, BatchLimits};
use super::{Forward, KvPool, StepEnd};
use crate::model::config::ModelConfig;
use crate::model::weights::{LoadError, WeightSource};
use crate::stdx::team::Team;
use load::Weights;
use plan::Plan;
use rope::Rope;
use simd::Dispatch;
use std::ops::ControlFlow;
use step::Scratch;

/// How a model is to run.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Compute threads, the engine's own included.
    pub threads: usize,
    /// Largest batch.
    pub limits: BatchLimits,
    /// `None` takes the fastest that the CPU has.
    pub kernel: Option<KernelFamily>,
    /// Cores of the threads; the first is the engine's own, which pins itself.
    pub pin: Option<Vec<usize>>,
}

/// Bytes that a model holds besides KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Repacked weights.
    pub weights: usize,
    /// Activations, logits, working memory of the threads.
    pub scratch: usize,
}

/// A model on CPU.
pub struct CpuModel {
    config: ModelConfig,
    weights: Weights,
    rope: Rope,
    dispatch: Dispatch,
    team: Team,
    plan: Plan,
    scratch: Scratch,
}

impl CpuModel {
    /// Checks and repacks all weights; `progress(done, total)` counts tensors.
    pub fn load(
        config: &ModelConfig,
        weights: &dyn WeightSource,
        options: &CpuOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<CpuModel, LoadError> {
        let available = available_kernels();
        let family = options.kernel.or(available.last().copied()).unwrap_or(KernelFamily::Portable);
        let dispatch = Dispatch::new(family).ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|family| family.name()).collect();
            LoadError::field(weights.describe(), "kernel family", names.join(" or "), family)
        })?;
        let mut team = Team::new("team", options.threads, options.pin.as_deref())
            .map_err(|error| LoadError::io("compute threads", error))?;
        let weights = Weights::load(config, weights, &mut team, progress)?;
        let scratch = Scratch::new(config, &weights, &options.limits, team.threads());
        Ok(CpuModel {
            rope: Rope::new(config),
            plan: Plan::new(&options.limits),
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
    pub fn memory_bytes(&self) -> Memory {
        Memory { weights: self.weights.memory(), scratch: self.scratch.memory() }
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

#[cfg(test)]
mod tests;
