//! The arithmetic of admission (design, section 8), in whole pages. Pure; the one place that decides.
//!
//! There is no retraction yet. So a request that runs must never find the pool empty: it is promised all it
//! may ever take, prompt and `max_new`, when it is admitted. In the terms of section 8: `ratio` is 1, the
//! reserve of a request is all of `max_new − generated` without a cap, R (what retraction would free) is 0,
//! and nothing is retracted; the largest single need is then part of the sum. A prefill worker sees
//! `max_new` = 1. The page that section 8 adds for alignment is not needed where prompts start on pages.

use crate::kv::pool::Reusable;
use crate::sched::config::SchedConfig;
use crate::sched::request::Request;

/// What may still be given away: pages free or evictable and not promised to requests already admitted.
pub const fn allocatable(free: u32, evictable: u32, promised: u32) -> u32 {
    (free + evictable).saturating_sub(promised)
}

/// Pages that a request takes in the end: prompt and everything it may generate.
pub const fn need(page_size: u32, prompt: u32, max_new: u32) -> u32 {
    prompt.saturating_add(max_new).div_ceil(page_size)
}

/// What a request takes of [`allocatable`] when it is admitted: all it needs but what the prefix cache has of it, and of
/// that the pages that nobody holds, since they are evictable no longer.
pub const fn charge(need: u32, reusable: Reusable) -> u32 {
    (need + reusable.idle).saturating_sub(reusable.pages)
}

/// Of an admitted request's need, what it does not hold yet. It is charged to all who come later.
pub const fn promised(need: u32, held: u32) -> u32 {
    need.saturating_sub(held)
}

/// Whether an empty pool of `pages` pages could hold the request. What could not is refused at arrival.
pub fn fits_empty(config: &SchedConfig, pages: u32, request: &Request) -> bool {
    let prompt = request.prompt.len();
    let tokens = prompt.saturating_add(request.max_new as usize);
    prompt > 0
        && request.max_new > 0
        && tokens <= config.context as usize
        && need(config.page_size, prompt as u32, request.max_new) <= pages
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn needs_are_whole_pages() {
        assert_eq!(need(16, 16, 1), 2);
        assert_eq!(need(16, 15, 1), 1);
        assert_eq!(need(16, u32::MAX, u32::MAX), u32::MAX / 16 + 1);
        assert_eq!(allocatable(3, 2, 9), 0);
    }

    #[test]
    fn who_takes_idle_pages_of_the_cache_pays_for_them() {
        let charge = |pages, idle| charge(10, Reusable { pages, idle });
        assert_eq!((charge(0, 0), charge(4, 0), charge(4, 3), charge(4, 4)), (10, 6, 9, 10));
    }

    proptest! {
        /// Whatever arrives and however far each has come: who was admitted gets every page it asks for.
        #[test]
        fn a_promise_is_kept(
            total in 1u32..100,
            requests in prop::collection::vec((1u32..200, 1u32..200, 0u32..400), 1..40),
        ) {
            let page_size = 16;
            let mut free = total;
            let mut live: Vec<(u32, u32)> = Vec::new();
            for (prompt, max_new, progress) in requests {
                let owed = live.iter().map(|&(need, held)| promised(need, held)).sum();
                let wanted = need(page_size, prompt, max_new);
                if wanted <= allocatable(free, 0, owed) {
                    let held = prompt.div_ceil(page_size);
                    free -= held;
                    live.push((wanted, held));
                }
                for (need, held) in &mut live {
                    let grown = (*held + progress / page_size).min(*need);
                    prop_assert!(grown - *held <= free, "a running request found the pool empty");
                    free -= grown - *held;
                    *held = grown;
                }
            }
        }
    }
}
