//! Statistics of a worker. The engine writes them each turn and `ctl` reads them at any time.
//!
//! Invariant: the page counts are from one instant, so their sum is exact. The other numbers can be
//! from slightly different instants.

use crate::kv::pool::{PageCounts, PagePool};
use crate::obs::instruments::GaugeGroup;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Statistics of one worker.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// In the order of [`PageCounts`].
    pages: GaugeGroup<4>,
    /// Requests that wait for the other side: bootstrap queue, or waiting for a session.
    pub bootstrapping: AtomicU32,
    /// Requests that wait for pages or for their turn: waiting queue of prefill and mixed,
    /// preallocation queue of decode.
    pub waiting: AtomicU32,
    /// Requests with KV in transfer: inflight queue of prefill, transfer queue of decode.
    pub transferring: AtomicU32,
    /// Decode: KV is here, the running batch is full.
    pub arrived: AtomicU32,
    /// Requests that compute: prompts in chunks or the running batch.
    pub running: AtomicU32,
    /// Retracted requests that wait for new pages.
    pub retracted: AtomicU32,
    /// Pages of the host tier that hold KV of retracted requests.
    pub swapped: AtomicU32,
    /// Requests that have ended for their client and wait for their lease.
    pub ending: AtomicU32,
    /// Uncomputed prompt tokens of waiting or computing requests.
    pub waiting_tokens: AtomicU64,
    /// Prompt tokens computed since start.
    pub prompt_tokens_total: AtomicU64,
    /// Cached tokens of prompts that this worker computes, since start. A decode worker does not
    /// count the cached tokens of transferred prompts.
    pub prompt_cached_total: AtomicU64,
    /// Prompt tokens looked up in the prefix cache since start.
    pub prefix_asked_total: AtomicU64,
    /// Of these, tokens found: neither computed nor, on decode, transferred.
    pub prefix_found_total: AtomicU64,
    /// Retractions since start.
    pub retracted_total: AtomicU64,
    /// Resumptions after retraction since start.
    pub resumed_total: AtomicU64,
    /// Tokens recomputed since start because their KV was dropped.
    pub recomputed_tokens_total: AtomicU64,
    /// Tokens generated since start.
    pub generated_tokens_total: AtomicU64,
}

/// Requests by stage, counted in each turn.
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
    /// Statistics of a worker without requests and with all pages free.
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

    /// Whether the worker holds nothing of any request.
    ///
    /// # Errors
    /// What it holds, and how many.
    pub fn check_idle(&self) -> Result<(), String> {
        let PageCounts { in_use, leased, .. } = self.pages();
        let read = |gauge: &AtomicU32| gauge.load(Ordering::Relaxed);
        let held = [
            ("requests without the other leg", read(&self.bootstrapping)),
            ("waiting requests", read(&self.waiting)),
            ("transfers", read(&self.transferring)),
            ("arrived requests", read(&self.arrived)),
            ("running requests", read(&self.running)),
            ("retracted requests", read(&self.retracted)),
            ("pages of KV of retracted requests", read(&self.swapped)),
            ("leases of requests that are over", read(&self.ending)),
            ("pages in use", in_use),
            ("leased pages", leased),
        ];
        match held.into_iter().find(|&(_, count)| count > 0) {
            Some((what, count)) => Err(format!("{count} {what}")),
            None => Ok(()),
        }
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
