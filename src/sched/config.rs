//! What a scheduler is told at start: plain numbers, resolved and checked by `config`.

use crate::kv::pool::PagePool;
use crate::model::forward::batch::BatchLimits;

/// Bounds of an engine's turns, the same for all its workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SchedConfig {
    /// Requests that decode together.
    pub max_running: usize,
    /// Requests that wait for pages or their turn beyond those that could begin at once.
    pub max_queued: usize,
    /// Prompt tokens of one turn.
    pub max_prefill_tokens: u32,
    /// Prompt tokens of one turn too; the field has two flags.
    pub chunked_prefill_size: u32,
    /// A chunk should take no longer, in milliseconds; 0 is no bound.
    pub chunk_ms: u32,
    /// Tokens of one page.
    pub page_size: u32,
    /// Tokens of one sequence, prompt and output.
    pub context: u32,
    /// Tokens ahead of what it has that a request is promised pages for; beyond them it may be retracted.
    pub reserve: u32,
    /// KV is kept for prompts that begin the same.
    pub prefix_cache: bool,
    /// Token ids are below this.
    pub vocab: u32,
}

impl SchedConfig {
    /// Requests whose KV is on its way, or here while the batch is full. They have places of their own, so that the batch
    /// does not wait for what could have been sent before.
    pub fn max_arriving(&self) -> usize {
        2 * self.max_running
    }

    /// Requests that a worker holds at most, one slot each.
    pub fn slots(&self) -> usize {
        self.max_running + self.max_arriving() + self.max_queued
    }

    /// Prompt tokens of one turn before speed is considered: at least a page, so that chunks can end on one.
    pub fn chunk_tokens(&self) -> u32 {
        self.max_prefill_tokens.min(self.chunked_prefill_size).max(self.page_size)
    }

    /// A worker's page pool.
    pub fn pool(&self, pages: u32) -> PagePool {
        if self.prefix_cache {
            PagePool::with_cache(pages, self.page_size)
        } else {
            PagePool::new(pages)
        }
    }

    /// Capacities of a batch, and of the forward pass, that no turn outgrows.
    pub fn batch_limits(&self) -> BatchLimits {
        BatchLimits {
            tokens: self.max_running.max(self.chunk_tokens() as usize),
            rows: self.max_running,
            logits: self.max_running,
            context: self.context as usize,
            pages: self.max_running * self.context.div_ceil(self.page_size) as usize,
        }
    }
}
