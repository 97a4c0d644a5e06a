//! Chooses the worker that has most of the prompt, unless the load is out of balance. This is the
//! rule of SGLang's router, with one difference: for a prompt shorter than a block, the load
//! decides.

use super::PolicyInput;
use crate::config::CacheAwareConfig;

/// Picks the usable worker with the longest match, if that is long enough; otherwise the one with
/// the fewest blocks in its cache. If the load is out of balance, picks the one with the fewest
/// sequences.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    let CacheAwareConfig { threshold, ahead, ratio } = question.cache;
    let reserved = || question.usable().map(|place| question.workers[place].sequences);
    let (least, most) = (reserved().min()?, reserved().max()?);
    if most - least > ahead && f64::from(most) > ratio * f64::from(least) {
        return question.cheapest(|worker| worker.sequences);
    }
    let best =
        question.cheapest(|worker| (u32::MAX - question.cached(worker), worker.sequences))?;
    let matched = question.cached(&question.workers[best]).saturating_mul(question.demand.block);
    if f64::from(matched) > threshold * f64::from(question.demand.tokens) {
        return Some(best);
    }
    // A prompt that is cached as a whole, or shorter than a block, adds no blocks to a cache.
    match question.cached(&question.workers[best]) as usize == question.demand.blocks.len() {
        true => question.cheapest(|worker| (worker.sequences, worker.held)),
        false => question.cheapest(|worker| (worker.held, worker.sequences)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Candidate;
    use super::super::asked::{ask, load};
    use super::*;
    use crate::routing::demand::Demand;
    use std::sync::LazyLock;

    static SHORT: LazyLock<Demand> = LazyLock::new(|| Demand::of(1));

    #[test]
    fn a_long_match_is_followed_and_an_overload_is_not() {
        let has = |cached, held, reserved| Candidate { cached, held, ..load(true, reserved) };
        let pick = |loads: &[_]| ask(loads, 0, |_| {}, pick);
        assert_eq!(
            pick(&[has(2, 2, 0), has(4, 90, 30), has(0, 0, 9)]),
            Some(1),
            "four of ten blocks"
        );
        assert_eq!(
            pick(&[has(2, 2, 0), has(3, 90, 30), has(0, 1, 9)]),
            Some(2),
            "three are not worth it"
        );
        assert_eq!(
            pick(&[has(2, 2, 0), has(4, 90, 65), has(0, 1, 9)]),
            Some(0),
            "it has too much to do"
        );
        assert_eq!(
            pick(&[has(2, 2, 200), has(4, 90, 280), has(0, 1, 250)]),
            Some(1),
            "all have much to do"
        );
        let nothing = |question: &mut PolicyInput<'_>| question.demand = &SHORT;
        assert_eq!(
            ask(&[has(0, 1, 9), has(0, 90, 8)], 0, nothing, super::pick),
            Some(1),
            "it leaves no trace"
        );
        let gone = Candidate { usable: false, ..has(9, 9, 0) };
        assert_eq!(pick(&[gone, has(4, 90, 30)]), Some(1));
        assert_eq!(pick(&[gone]), None);
    }

    #[test]
    fn the_operators_limits_decide_if_a_cached_prefix_is_preferred() {
        let has = |cached, held, reserved| Candidate { cached, held, ..load(true, reserved) };
        let pick = |cache: CacheAwareConfig, loads: &[_]| {
            ask(loads, 0, |question| question.cache = cache, pick)
        };
        let usual = CacheAwareConfig::default();
        let (little, much) = (has(3, 90, 30), has(9, 90, 30));
        assert_eq!(
            pick(CacheAwareConfig { threshold: 0.2, ..usual }, &[has(0, 1, 9), little]),
            Some(1)
        );
        assert_eq!(
            pick(CacheAwareConfig { threshold: 1.0, ..usual }, &[has(0, 1, 9), much]),
            Some(0)
        );
        assert_eq!(pick(CacheAwareConfig { ahead: 20, ..usual }, &[has(0, 99, 9), much]), Some(0));
        assert_eq!(
            pick(CacheAwareConfig { ahead: 20, ratio: 4.0, ..usual }, &[has(0, 99, 9), much]),
            Some(1)
        );
    }
}
