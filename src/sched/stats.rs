//! What a worker tells of itself: numbers written by the engine each turn and read by `ctl` at any time.
//! Page counts are of one instant, as their sum is promised; the rest need not fit together to the last one.

use crate::kv::pool::{PageCounts, PagePool};
use crate::obs::registry::GaugeGroup;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Figures of one worker.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// In the order of [`PageCounts`].
    pages: GaugeGroup<4>,
    /// Requests whose other side has not been heard of: bootstrap queue, or waiting for a session.
    pub bootstrapping: AtomicU32,
    /// Requests that wait for pages or for their turn: waiting queue of prefill and mixed, preallocation
    /// queue of decode.
    pub waiting: AtomicU32,
    /// Requests whose KV is on its way: inflight queue of prefill, transfer queue of decode.
    pub transferring: AtomicU32,
    /// Decode: KV is here, the running batch is full.
    pub arrived: AtomicU32,
    /// Requests that compute: prompts in chunks or the running batch.
    pub running: AtomicU32,
    /// Requests that ran until others needed their pages, and wait for new ones.
    pub retracted: AtomicU32,
    /// Pages of the host tier that hold KV of those.
    pub swapped: AtomicU32,
    /// Requests that are over for their client and wait for their lease.
    pub ending: AtomicU32,
    /// Prompt tokens of requests that wait or compute, not computed yet.
    pub waiting_tokens: AtomicU64,
    /// Prompt tokens computed since start.
    pub prompt_tokens_total: AtomicU64,
    /// Tokens of prompts read here that the prefix cache had since start; of decode, which reads few, not those that
    /// only were not sent.
    pub prompt_cached_total: AtomicU64,
    /// Prompt tokens that the prefix cache was asked for since start.
    pub prefix_asked_total: AtomicU64,
    /// Of them, those that it had: neither computed nor, on decode, sent.
    pub prefix_found_total: AtomicU64,
    /// Times since start that a running request gave up its pages.
    pub retracted_total: AtomicU64,
    /// Times since start that one got pages again.
    pub resumed_total: AtomicU64,
    /// Tokens computed again since start, since their KV was dropped.
    pub recomputed_tokens_total: AtomicU64,
    /// Tokens generated since start.
    pub generated_tokens_total: AtomicU64,
}

/// Requests by stage, counted anew each turn.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::sched) struct Census {
    pub bootstrapping: u32,
    pub waiting: u32,
    pub transferring: u32,
    pub arrived: u32,
    pub running: u32,
    pub retracted: u32,
    pub swapped: u32,
    pub ending: u32,
    pub waiting_tokens: u64,
}

impl WorkerStats {
    /// Of a worker without requests, whose pages are all free.
    pub fn new(pages: u32) -> WorkerStats {
        let stats = WorkerStats::default();
        stats.pages.set([pages.into(), 0, 0, 0]);
        stats
    }

    /// Pages of the pool by state, all of one instant.
    pub fn pages(&self) -> PageCounts {
        let [free, cached, in_use, leased] = self.pages.values().map(|count| count as u32);
        PageCounts { free, cached, in_use, leased }
    }

    pub(in crate::sched) fn publish(&self, pool: &PagePool, census: Census) {
        let set = |gauge: &AtomicU32, value| gauge.store(value, Ordering::Relaxed);
        let (pages, lookups) = (pool.counts(), pool.lookups());
        self.pages.set([pages.free, pages.cached, pages.in_use, pages.leased].map(u64::from));
        set(&self.bootstrapping, census.bootstrapping);
        set(&self.waiting, census.waiting);
        set(&self.transferring, census.transferring);
        set(&self.arrived, census.arrived);
        set(&self.running, census.running);
        set(&self.retracted, census.retracted);
        set(&self.swapped, census.swapped);
        set(&self.ending, census.ending);
        self.waiting_tokens.store(census.waiting_tokens, Ordering::Relaxed);
        self.prefix_asked_total.store(lookups.asked, Ordering::Relaxed);
        self.prefix_found_total.store(lookups.found, Ordering::Relaxed);
    }

    pub(in crate::sched) fn computed(&self, tokens: u32) {
        self.prompt_tokens_total.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    pub(in crate::sched) fn had(&self, tokens: u32) {
        self.prompt_cached_total.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    pub(in crate::sched) fn recomputed(&self, tokens: u32) {
        self.recomputed_tokens_total.fetch_add(tokens.into(), Ordering::Relaxed);
    }

    pub(in crate::sched) fn retracted(&self) {
        self.retracted_total.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::sched) fn resumed(&self) {
        self.resumed_total.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::sched) fn generated(&self, tokens: u32) {
        self.generated_tokens_total.fetch_add(tokens.into(), Ordering::Relaxed);
    }
}
