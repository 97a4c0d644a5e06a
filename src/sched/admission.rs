//! The arithmetic of admission (docs/design/memory.md), in whole pages. It has no side effects.
//! Only this module decides whether a request fits the pool.
//!
//! A request gets pages for its current tokens, prompt and output, except for those behind its
//! window. A prompt that is computed here gets all its pages at once. Admission also counts a
//! *reserve* ahead for it, but not its maximum, because most answers end long before their
//! `max_new`. If the pool runs empty, requests are retracted ([`super::retraction`]). New requests
//! leave room for retracted ones. For a prefill worker `max_new` is 1.

use crate::kv::pool::{PageCounts, PagePool, Reusable};
use crate::sched::config::SchedConfig;
use crate::sched::request::EngineRequest;

/// The pages that a request needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claim {
    /// Pages that it has. Those that it gives back within its reserve do not count if other
    /// requests use them, because they do not become free.
    pub held: u32,
    /// Pages that it needs at its current length, and up to the end of its reserve.
    pub soon: u32,
}

impl Claim {
    /// The claim of a request at its current length.
    pub fn of(config: &SchedConfig, request: &EngineRequest, pool: &PagePool) -> Claim {
        let pages = &request.pages;
        let gone = pages_gone_soon(config, request, pages.behind() as u32);
        let lost = if gone == 0 { 0 } else { gone.min(pages.count_shared(pool)) };
        Claim { held: pages.count() - lost, soon: pages_soon(config, request) }
    }

    /// Reserved pages that it does not have yet.
    pub fn owed(&self) -> u32 {
        self.soon.saturating_sub(self.held)
    }
}

/// Its tokens at the end of its reserve.
fn tokens_soon(config: &SchedConfig, request: &EngineRequest) -> u32 {
    let tokens = (request.prompt.len() + request.output.len()) as u32;
    let left = request.max_new.saturating_sub(request.output.len() as u32);
    // A request that does not end at an end-of-sequence token uses its whole length.
    tokens.saturating_add(if request.ignore_eos { left } else { left.min(config.reserve) })
}

/// Pages that a request needs at its current length, and up to the end of its reserve.
pub fn pages_soon(config: &SchedConfig, request: &EngineRequest) -> u32 {
    let (window, tokens) = (config.window(), tokens_soon(config, request));
    config.groups.pages(window.pages(tokens), window.most_pages(tokens))
}

/// Pages that a request gives back up to the end of its reserve. In window groups it has given back
/// those before the `behind`-th one.
pub fn pages_gone_soon(config: &SchedConfig, request: &EngineRequest, behind: u32) -> u32 {
    let gone = config.window().pages_behind(tokens_soon(config, request));
    config.groups.windowed * gone.saturating_sub(behind)
}

/// The pages that all requests of a worker need.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claims {
    owed: u32,
    retracted: u32,
}

impl Claims {
    /// Adds a request that holds pages.
    pub fn hold(&mut self, claim: Claim) {
        self.owed += claim.owed();
    }

    /// Adds a retracted request that needs `pages` pages.
    pub fn retract(&mut self, pages: u32) {
        self.retracted += pages;
    }

    /// Pages that retracted requests can take.
    pub fn budget_for_retracted(&self, counts: PageCounts) -> PageBudget {
        PageBudget { pages: (counts.free + counts.cached).saturating_sub(self.owed) }
    }

    /// Pages that new requests can take.
    pub fn budget_for_new(&self, counts: PageCounts) -> PageBudget {
        let PageBudget { pages } = self.budget_for_retracted(counts);
        PageBudget { pages: pages.saturating_sub(self.retracted) }
    }
}

/// Pages that can be assigned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageBudget {
    /// Pages that are free or evictable, and not reserved for a request.
    pub pages: u32,
}

impl PageBudget {
    /// Takes the pages of an admitted request from the budget.
    pub fn take_pages(&mut self, pages: u32) {
        self.pages = self.pages.saturating_sub(pages);
    }
}

/// Pages that a request of `need` pages takes from a [`PageBudget`]. Pages that the prefix cache
/// has are not charged if a request holds them. Cached pages without a holder are charged, because
/// they are no longer evictable. So are `gone` pages of window groups, because the request gives
/// them back within its reserve: if others use them, they do not become free. The pages of an idle
/// checkpoint are charged beside its own state pages.
pub fn charge(need: u32, reusable: &Reusable, gone: u32) -> u32 {
    let held = reusable.pages - reusable.idle;
    debug_assert!(reusable.held_windowed <= held, "window groups are a part of all groups");
    need.saturating_sub(held - gone.min(reusable.held_windowed)) + reusable.idle_state
}

/// Whether an empty pool of `pages` pages could hold the request. If not, it is refused at arrival.
pub fn fits_empty(config: &SchedConfig, pages: u32, request: &EngineRequest) -> bool {
    let prompt = request.prompt.len();
    let tokens = prompt.saturating_add(request.max_new as usize);
    prompt > 0
        && request.max_new > 0
        && tokens <= config.context as usize
        && tokens.div_ceil(config.page_size as usize) * config.groups.total()
            + config.groups.state_pages as usize
            <= pages as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(held: u32, soon: u32) -> Claim {
        Claim { held, soon }
    }

    fn counts(free: u32) -> PageCounts {
        PageCounts { free, cached: 2, in_use: 9, leased: 0 }
    }

    #[test]
    fn promised_pages_are_not_given_to_newcomers() {
        let mut claims = Claims::default();
        assert_eq!(claims.budget_for_new(counts(8)).pages, 10);
        claims.hold(claim(4, 7));
        claims.hold(claim(5, 6));
        assert_eq!(claims.budget_for_new(counts(8)).pages, 10 - 3 - 1);
        claims.hold(claim(0, 9));
        assert_eq!(claims.budget_for_new(counts(8)).pages, 0);
    }

    #[test]
    fn newcomers_leave_the_pages_that_retracted_requests_take() {
        let mut claims = Claims::default();
        claims.retract(6);
        assert_eq!(claims.budget_for_new(counts(8)).pages, 4);
        assert_eq!(claims.budget_for_retracted(counts(8)).pages, 10);
    }

    #[test]
    fn a_request_is_charged_for_the_idle_cache_pages_that_it_takes() {
        let charge =
            |pages: u32, idle| charge(10, &Reusable { pages, idle, ..Reusable::default() }, 0);
        assert_eq!((charge(0, 0), charge(4, 0), charge(4, 3), charge(4, 4)), (10, 6, 9, 10));
    }

    #[test]
    fn a_request_is_charged_for_the_shared_window_pages_that_it_gives_back() {
        let reusable = Reusable { pages: 8, idle: 1, held_windowed: 3, ..Reusable::default() };
        let charge = |gone| charge(10, &reusable, gone);
        // The held pages of full groups are shared up to the end.
        assert_eq!([0, 2, 3, 9].map(charge), [3, 5, 6, 6]);
    }
}
