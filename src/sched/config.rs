//! Settings of a scheduler: plain numbers, resolved and checked by `cli`.

use crate::kv::groups::GroupCounts;
use crate::kv::pool::PagePool;
use crate::kv::window::KvWindow;
use crate::limits::PROMPT_LOGPROBS_ROWS;
use crate::model::forward::batch::BatchLimits;

/// Limits of an engine's turns, the same for all its workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SchedConfig {
    /// Most requests that decode together.
    pub max_running: usize,
    /// Most requests that wait for pages or their turn. Requests that could begin at once do not
    /// count.
    pub max_queued: usize,
    /// Most prompt tokens of one turn.
    pub max_prefill_tokens: u32,
    /// A second limit on the prompt tokens of one turn, because other engines have two flags for
    /// it.
    pub chunked_prefill_size: u32,
    /// Longest time of a chunk in milliseconds; 0: no limit.
    pub chunk_ms: u32,
    /// Tokens of one page.
    pub page_size: u32,
    /// Tokens of the largest page of a destination, a multiple of `page_size`.
    pub largest_page: u32,
    /// Most tokens of one sequence, prompt and output.
    pub context: u32,
    /// The groups of layers, each with pages of its own.
    pub groups: GroupCounts,
    /// Tokens beyond its current length for which admission reserves pages. A request that
    /// generates more can be retracted.
    pub reserve: u32,
    /// Whether KV is kept for prompts with the same prefix.
    pub prefix_cache: bool,
    /// Tokens between two places of checkpoints, if no layer has keys and values. Otherwise, they
    /// are behind pages.
    pub checkpoint_gap: u32,
    /// Most pages of the cache with checkpoints of recurrent state; 0: prompts of a model with
    /// state are computed from their beginning.
    pub checkpoint_pages: u32,
    /// Fewest tokens that a checkpoint spares a later prompt.
    pub checkpoint_tokens: u32,
    /// Size of the vocabulary; token ids are below it.
    pub vocab: u32,
}

impl SchedConfig {
    /// Most requests with KV in transfer, or with KV that arrived while the batch was full. They
    /// have separate places, so that the batch does not wait for KV that could be sent earlier.
    pub fn max_arriving(&self) -> usize {
        2 * self.max_running
    }

    /// Most requests of a worker, one slot each.
    pub fn slots(&self) -> usize {
        self.max_running + self.max_arriving() + self.max_queued
    }

    /// Prompt tokens of one turn before the measured speed is applied. At least a page, so that
    /// chunks can end on a page boundary.
    pub fn chunk_tokens(&self) -> u32 {
        self.max_prefill_tokens.min(self.chunked_prefill_size).max(self.page_size)
    }

    /// Tokens of a page of the prefix cache.
    pub fn cache_page_size(&self) -> u32 {
        if self.groups.total() == 0 { self.checkpoint_gap } else { self.page_size }
    }

    /// Pages that a request can read beside its own ones: those of a checkpoint.
    pub fn origin_pages(&self) -> u32 {
        let has_checkpoints = self.prefix_cache && self.checkpoint_pages > 0;
        if has_checkpoints { self.groups.state_pages } else { 0 }
    }

    /// The pages that a sequence needs in window groups.
    pub fn window(&self) -> KvWindow {
        KvWindow::new(self.groups.window, self.page_size)
    }

    /// Makes a worker's page pool.
    pub fn pool(&self, pages: u32) -> PagePool {
        if self.prefix_cache {
            PagePool::with_cache(pages, self.cache_page_size())
                .with_checkpoints(self.checkpoint_pages)
        } else {
            PagePool::new(pages)
        }
    }

    /// Capacities of a batch, and of the forward pass, that no turn exceeds.
    pub fn batch_limits(&self) -> BatchLimits {
        BatchLimits {
            tokens: self.max_running.max(self.chunk_tokens() as usize),
            rows: self.max_running,
            // Each row can need one, and prompts with logprobs share the others: a page at least.
            logits: self.max_running + PROMPT_LOGPROBS_ROWS.max(self.page_size as usize),
            context: self.context as usize,
            pages: self.max_running
                * self.context.div_ceil(self.page_size) as usize
                * self.groups.total()
                // Of the state that a row reads, and of that which it writes.
                + 2 * self.max_running * self.groups.state_pages as usize,
        }
    }
}
