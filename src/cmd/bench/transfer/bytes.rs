//! The bytes of a case. The source writes them into its pages; the destination checks each element.
//! The check does not use the code of transfer plans.

use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvLayout};
use crate::kv::region::Region;
use crate::stdx::rng::mix;
use std::sync::atomic::Ordering;

/// Maximum pages of a pool. Up to these limits, no two words of a pool have the same value.
pub const PAGES_MAX: u64 = 1 << 20;
/// Maximum elements of a page. An element is the K or V of one head of one token in one layer.
pub const ELEMENTS_MAX: u64 = 1 << 22;
/// Maximum words of an element.
pub const WORDS_MAX: u64 = 1 << 22;

/// Makes the kernel allocate the whole region, so that no hand-off waits for page faults.
pub fn touch(region: &Region) {
    (0..region.len()).step_by(4096).for_each(|at| region.word(at).store(0, Ordering::Relaxed));
}

/// Writes a page of the source on every rank.
pub fn fill(region: &Region, layout: &KvLayout, page: PageId) {
    for_each_word(layout, page, |at, element, word| {
        region.word(at).store(value(page, element, word), Ordering::Relaxed);
    });
}

/// Checks that these pages of a destination equal the source's pages on every rank, and that all
/// other words are still as [`touch`] left them.
///
/// # Errors
/// The first wrong word, or the number of words written outside the pages.
pub fn verify(
    region: &Region,
    layout: &KvLayout,
    from: &[PageId],
    to: &[PageId],
) -> Result<(), String> {
    for (&from, &to) in from.iter().zip(to) {
        let mut wrong = None;
        for_each_word(layout, to, |at, element, word| {
            let (found, wanted) =
                (region.word(at).load(Ordering::Relaxed), value(from, element, word));
            if found != wanted && wrong.is_none() {
                wrong = Some(format!(
                    "wrong bytes: page {to} (from {from}), element {element}, word {word}: \
                     {found:#x}, not {wanted:#x}"
                ));
            }
        });
        wrong.map_or(Ok(()), Err)?;
    }
    let is_set = |at: usize| region.word(at).load(Ordering::Relaxed) != 0;
    let mut named = 0;
    to.iter()
        .for_each(|&page| for_each_word(layout, page, |at, _, _| named += usize::from(is_set(at))));
    let all = (0..region.len()).step_by(8).filter(|&at| is_set(at)).count();
    if all == named {
        Ok(())
    } else {
        Err(format!("{} words were written outside the pages", all - named))
    }
}

/// The value of a word of a token's head. It is the same on every rank that holds the head.
fn value(page: PageId, element: u32, word: u32) -> u64 {
    // 20, 22 and 22 bits: no two words have the same number.
    mix(u64::from(page.0) << 44 | u64::from(element) << 22 | u64::from(word))
}

/// Calls `each` for every word of a page on all ranks. Its arguments are the offset in the region,
/// the element (head, token, layer, and K or V), and the word of the element.
fn for_each_word(layout: &KvLayout, page: PageId, mut each: impl FnMut(usize, u32, u32)) {
    let words = (u64::from(layout.head_dim) * layout.dtype.bytes() / 8) as u32;
    for rank in 0..layout.ranks {
        for (own, head) in layout.heads_of(rank).enumerate() {
            for layer in 0..layout.layers {
                for (half, which) in [KeyValue::Key, KeyValue::Value].into_iter().enumerate() {
                    for token in 0..layout.page_size {
                        let inside = layout.offset(page, layer, which, own as u32, token);
                        let at = (u64::from(rank) * layout.rank_stride + inside) as usize;
                        let tensor = (layer * 2 + half as u32) * layout.page_size + token;
                        let element = tensor * layout.model_kv_heads + head;
                        (0..words).for_each(|word| each(at + 8 * word as usize, element, word));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_largest_cases_differ() {
        let (page, element, word) =
            (PAGES_MAX as u32 - 1, ELEMENTS_MAX as u32 - 1, WORDS_MAX as u32 - 1);
        let mut values = vec![value(PageId(page), element, word)];
        for bit in 0..22 {
            values.extend([value(PageId(0), 0, 1 << bit), value(PageId(0), 1 << bit, 0)]);
        }
        values.extend((0..20).map(|bit| value(PageId(1 << bit), 0, 0)));
        let count = values.len();
        values.sort_unstable();
        values.dedup();
        assert_eq!(values.len(), count);
    }
}
