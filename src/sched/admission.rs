//! The arithmetic of admission (design, section 8), in whole pages. Pure; the one place that decides.
//!
//! A request gets its pages for what it has, prompt and output, and is promised a *reserve* ahead of that, not all that
//! it may ever take: most answers end long before their `max_new`. Who then finds the pool empty is retracted
//! ([`super::retraction`]), and newcomers leave what those take who were. A prefill worker sees `max_new` = 1.

use crate::kv::pool::{PageCounts, Reusable};
use crate::sched::config::SchedConfig;
use crate::sched::request::Request;

/// What a request wants of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claim {
    /// Pages that it has.
    pub held: u32,
    /// Pages of all its tokens and its reserve: what it is promised.
    pub soon: u32,
}

impl Claim {
    /// Of a request as long as it is now.
    pub fn of(config: &SchedConfig, request: &Request) -> Claim {
        let tokens = (request.prompt.len() + request.output.len()) as u32;
        let left = request.max_new.saturating_sub(request.output.len() as u32);
        // One that nothing but its length ends will take it all.
        let ahead = if request.ignore_eos { left } else { left.min(config.reserve) };
        let pages = |ahead: u32| tokens.saturating_add(ahead).div_ceil(config.page_size);
        Claim { held: request.pages.len() as u32, soon: pages(ahead) }
    }

    /// What it is promised and does not have.
    pub fn owed(&self) -> u32 {
        self.soon.saturating_sub(self.held)
    }
}

/// What all requests of a worker want of its pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Claims {
    owed: u32,
    retracted: u32,
}

impl Claims {
    /// Of one that holds pages.
    pub fn hold(&mut self, claim: Claim) {
        self.owed += claim.owed();
    }

    /// Of one that was retracted.
    pub fn retract(&mut self, claim: Claim) {
        self.retracted += claim.soon;
    }

    /// What those may take who were retracted.
    pub fn room_for_retracted(&self, counts: PageCounts) -> Room {
        Room { pages: (counts.free + counts.cached).saturating_sub(self.owed) }
    }

    /// What newcomers may take.
    pub fn room_for_newcomers(&self, counts: PageCounts) -> Room {
        let Room { pages } = self.room_for_retracted(counts);
        Room { pages: pages.saturating_sub(self.retracted) }
    }
}

/// Pages that may be given away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Free or evictable, and nobody else's.
    pub pages: u32,
}

impl Room {
    /// Somebody was let in, whose taking left so many pages fewer.
    pub fn take(&mut self, pages: u32) {
        self.pages = self.pages.saturating_sub(pages);
    }
}

/// What a request that needs so many pages takes of a [`Room`]: all but what the prefix cache has of them, and of that
/// the pages that nobody holds, since they are evictable no longer.
pub const fn charge(need: u32, reusable: Reusable) -> u32 {
    (need + reusable.idle).saturating_sub(reusable.pages)
}

/// Whether an empty pool of `pages` pages could hold the request. What could not is refused at arrival.
pub fn fits_empty(config: &SchedConfig, pages: u32, request: &Request) -> bool {
    let prompt = request.prompt.len();
    let tokens = prompt.saturating_add(request.max_new as usize);
    prompt > 0
        && request.max_new > 0
        && tokens <= config.context as usize
        && tokens.div_ceil(config.page_size as usize) <= pages as usize
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
    fn what_was_promised_is_not_given_away() {
        let mut claims = Claims::default();
        assert_eq!(claims.room_for_newcomers(counts(8)).pages, 10);
        claims.hold(claim(4, 7));
        claims.hold(claim(5, 6));
        assert_eq!(claims.room_for_newcomers(counts(8)).pages, 10 - 3 - 1);
        claims.hold(claim(0, 9));
        assert_eq!(claims.room_for_newcomers(counts(8)).pages, 0);
    }

    #[test]
    fn newcomers_leave_what_retracted_ones_take() {
        let mut claims = Claims::default();
        claims.retract(claim(0, 6));
        assert_eq!(claims.room_for_newcomers(counts(8)).pages, 4);
        assert_eq!(claims.room_for_retracted(counts(8)).pages, 10);
    }

    #[test]
    fn who_takes_idle_pages_of_the_cache_pays_for_them() {
        let charge = |pages, idle| charge(10, Reusable { pages, idle });
        assert_eq!((charge(0, 0), charge(4, 0), charge(4, 3), charge(4, 4)), (10, 6, 9, 10));
    }
}
