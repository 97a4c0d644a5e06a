//! The bytes of a case: written into a source's pages, and looked for in a destination's, element by element, which
//! knows nothing of plans.

use super::case::mix;
use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvLayout};
use crate::kv::region::Region;
use std::sync::atomic::Ordering;

/// Pages of a pool that can be told apart by their bytes,
pub const PAGES_MAX: u64 = 1 << 20;
/// elements of a page, each the half of a token's head in a layer,
pub const ELEMENTS_MAX: u64 = 1 << 22;
/// and words of an element.
pub const WORDS_MAX: u64 = 1 << 22;

/// Has the kernel give all of it, so that no hand-off waits for that.
pub fn touch(region: &Region) {
    (0..region.len()).step_by(4096).for_each(|at| region.word(at).store(0, Ordering::Relaxed));
}

/// Writes a source's page on every rank.
pub fn fill(region: &Region, layout: &KvLayout, page: PageId) {
    for_each_word(layout, page, |at, element, word| {
        region.word(at).store(value(page, element, word), Ordering::Relaxed);
    });
}

/// Whether these pages of a destination hold, on every rank, what the source's hold, and the rest of what
/// [`touch`] has left still nothing.
///
/// # Errors
/// Which word does not, or how many there are beside them.
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
                    "wrong bytes: page {to} (from {from}), element {element}, word {word}: {found:#x}, not {wanted:#x}"
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
        Err(format!("{} words were written beside the pages", all - named))
    }
}

/// A word of a token's head, which is the same on every rank that holds it.
fn value(page: PageId, element: u32, word: u32) -> u64 {
    // Fewer than 2^20 pages, 2^22 elements of 2^22 words: no two have one number.
    mix(u64::from(page.0) << 44 | u64::from(element) << 22 | u64::from(word))
}

/// Offset in the region, which head of which token, layer and half, and which word of it; of one page, all ranks.
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
