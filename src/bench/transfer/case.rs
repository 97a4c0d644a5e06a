//! What is handed over: how many pages of how many buffers, from which pages to which, and with what bytes.
//!
//! Arithmetic only. Both processes derive page lists and bytes from the case alone.

use crate::ids::PageId;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::limits::CONTEXT_MAX;
use serde::{Deserialize, Serialize};

/// Lists of pages taken in turn, so that no repetition finds what the one before it left in the caches.
pub const LISTS: u32 = 4;

/// Which side's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// Prefill's.
    Source,
    /// Decode's.
    Destination,
}

/// How a request's pages lie in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Spread {
    /// One run.
    Contiguous,
    /// In random order.
    Fragmented,
}

/// How a pool keeps its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayoutKind {
    /// A block per page and buffer, as other engines.
    LayerMajor,
    /// A block per page, as ours.
    PageMajor,
}

impl LayoutKind {
    /// As typed and reported.
    pub const fn name(self) -> &'static str {
        match self {
            LayoutKind::LayerMajor => "layer-major",
            LayoutKind::PageMajor => "page-major",
        }
    }
}

/// A shape of KV and of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Case {
    /// As typed and reported.
    pub name: String,
    /// Pages of a request.
    pub pages: u32,
    /// Buffers, one for each layer's K and one for its V; 1: both in one.
    pub buffers: u32,
    /// Bytes of a page in a buffer.
    pub item_bytes: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Pages of the pool.
    pub pool: u32,
    /// Of the request's pages.
    pub spread: Spread,
}

/// A case whose numbers make no KV: what is wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaseError(pub String);

const KIB: u32 = 1024;
/// Memory for a pool; there are up to four of that size.
const POOL_BYTES_MAX: u64 = 16 << 30;

impl Case {
    /// The cases that are always the same, so that figures can be compared.
    pub fn known() -> Vec<Case> {
        use Spread::{Contiguous, Fragmented};
        let case = |name: &str, pages, buffers, item_bytes, page_size, pool, spread| Case {
            name: name.into(),
            pages,
            buffers,
            item_bytes,
            page_size,
            pool,
            spread,
        };
        vec![
            case("tiny-2k", 1, 1, 2 * KIB, 1, 64, Fragmented),
            case("smol-128", 8, 60, 6 * KIB, 16, 640, Fragmented),
            case("smol-1024", 64, 60, 6 * KIB, 16, 640, Fragmented),
            case("smol-8192", 512, 60, 6 * KIB, 16, 640, Fragmented),
            case("qwen-128", 8, 56, 32 * KIB, 16, 160, Fragmented),
            case("qwen-1024", 64, 56, 32 * KIB, 16, 256, Fragmented),
            case("qwen-8192", 512, 56, 32 * KIB, 16, 640, Fragmented),
            case("qwen-p1-contig-1024", 1024, 56, 2 * KIB, 1, 4096, Contiguous),
            case("qwen-p1-frag-1024", 1024, 56, 2 * KIB, 1, 4096, Fragmented),
        ]
    }

    /// Smaller ones, for where memory and processors are emulated.
    pub fn small() -> Vec<Case> {
        let known = Case::known();
        let cut = |base: &str, name: &str, pages, pool| {
            let base = known.iter().find(|case| case.name == base).expect("a known case");
            Case { name: name.into(), pages, pool, ..base.clone() }
        };
        vec![
            cut("tiny-2k", "tiny-2k", 1, 64),
            cut("smol-128", "smol-128", 8, 64),
            cut("qwen-128", "qwen-64", 4, 16),
            cut("qwen-p1-frag-1024", "p1-32", 32, 128),
        ]
    }

    /// Whether KV can be so.
    ///
    /// # Errors
    /// Which number cannot.
    pub fn check(&self) -> Result<(), CaseError> {
        let fail = |why: String| Err(CaseError(why));
        if self.buffers == 0 || self.buffers != 1 && !self.buffers.is_multiple_of(2) {
            return fail(format!("{} buffers: there are two for each layer, or 1", self.buffers));
        }
        let unit = u64::from(self.page_size) * if self.buffers == 1 { 32 } else { 16 };
        if self.item_bytes == 0 || !u64::from(self.item_bytes).is_multiple_of(unit) {
            return fail(format!("{} bytes an item: not a multiple of {unit}", self.item_bytes));
        }
        if self.pages == 0 || self.pages > self.pool {
            return fail(format!("{} pages: not 1 to {}, the pool", self.pages, self.pool));
        }
        let page = u64::from(self.buffers).checked_mul(self.item_bytes.into());
        let pool = page.and_then(|page| page.checked_mul(self.pool.into()));
        if pool.is_none_or(|pool| pool > POOL_BYTES_MAX) {
            return fail(format!("a pool of {} such pages: at most {POOL_BYTES_MAX} bytes", self.pool));
        }
        if self.pages.checked_mul(self.page_size).is_none_or(|tokens| tokens > CONTEXT_MAX) {
            return fail(format!("{} pages: more tokens than any context", self.pages));
        }
        Ok(())
    }

    /// Bytes handed over.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes()
    }

    /// Bytes of a pool.
    pub fn pool_bytes(&self) -> u64 {
        u64::from(self.pool) * self.page_bytes()
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.buffers) * u64::from(self.item_bytes)
    }

    /// Tokens handed over.
    pub fn tokens(&self) -> u32 {
        self.pages * self.page_size
    }

    /// The pool's layout. One KV head: where heads lie inside an item makes no difference to a copy of it.
    pub fn layout(&self, kind: LayoutKind) -> KvLayout {
        let (layers, halves) = if self.buffers == 1 { (1, 2) } else { (self.buffers / 2, 1) };
        let dtype = KvDtype::F16;
        let head_dim = self.item_bytes / halves / self.page_size / dtype.bytes() as u32;
        match kind {
            LayoutKind::PageMajor => KvLayout::page_major(self.page_size, layers, 1, head_dim, dtype),
            LayoutKind::LayerMajor if self.buffers > 1 => {
                KvLayout::layer_major(self.page_size, layers, 1, head_dim, dtype, self.pool)
            }
            // K and V side by side: one item is one block.
            LayoutKind::LayerMajor => KvLayout::page_major(self.page_size, 1, 1, head_dim, dtype),
        }
    }

    /// Where an item begins.
    pub fn item(&self, kind: LayoutKind, page: PageId, buffer: u32) -> u64 {
        let (page, buffer, item) = (u64::from(page.0), u64::from(buffer), u64::from(self.item_bytes));
        match kind {
            LayoutKind::PageMajor => page * self.page_bytes() + buffer * item,
            LayoutKind::LayerMajor => (buffer * u64::from(self.pool) + page) * item,
        }
    }

    /// The pages of a side in one of its [`LISTS`].
    pub fn list(&self, end: End, list: u32) -> Vec<PageId> {
        let seed = u64::from(list) << 1 | u64::from(end == End::Destination);
        match self.spread {
            Spread::Contiguous => {
                let first = mix(seed) % u64::from(self.pool - self.pages + 1);
                (0..self.pages).map(|page| PageId(first as u32 + page)).collect()
            }
            Spread::Fragmented => {
                let mut pages: Vec<PageId> = (0..self.pool).map(PageId).collect();
                for index in 0..self.pages as usize {
                    let rest = (pages.len() - index) as u64;
                    let other = mix(seed ^ mix(index as u64)) % rest;
                    pages.swap(index, index + other as usize);
                }
                pages.truncate(self.pages as usize);
                pages
            }
        }
    }

    /// The word at `word` words into a source's item.
    pub fn word(&self, page: PageId, buffer: u32, word: u32) -> u64 {
        mix(u64::from(page.0) << 40 | u64::from(buffer) << 24 | u64::from(word))
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::layout::KeyValue;
    use std::collections::HashSet;

    fn cases() -> Vec<Case> {
        Case::known().into_iter().chain(Case::small()).collect()
    }

    #[test]
    fn items_lie_where_the_layout_says() {
        for case in cases() {
            case.check().unwrap();
            for kind in [LayoutKind::LayerMajor, LayoutKind::PageMajor] {
                let layout = case.layout(kind);
                assert_eq!(layout.page_bytes(), case.page_bytes(), "{}", case.name);
                let last = PageId(case.pool - 1);
                for page in [PageId(0), last] {
                    for buffer in 0..case.buffers {
                        let which = if buffer % 2 == 0 { KeyValue::Key } else { KeyValue::Value };
                        let at = layout.offset(page, buffer / 2, which, 0, 0);
                        assert_eq!(case.item(kind, page, buffer), at, "{} {kind:?}", case.name);
                    }
                }
                let end = case.item(kind, last, case.buffers - 1) + u64::from(case.item_bytes);
                assert_eq!(end, case.pool_bytes(), "{}", case.name);
            }
        }
    }

    #[test]
    fn lists_hold_different_pages_of_the_pool() {
        for case in cases() {
            let mut lists = Vec::new();
            for list in 0..LISTS {
                for end in [End::Source, End::Destination] {
                    let pages = case.list(end, list);
                    let distinct: HashSet<PageId> = pages.iter().copied().collect();
                    assert_eq!(distinct.len(), case.pages as usize, "{}", case.name);
                    assert!(pages.iter().all(|page| page.0 < case.pool));
                    lists.push(pages);
                }
            }
            let count = lists.len();
            lists.sort_unstable();
            lists.dedup();
            assert!(lists.len() * 4 >= count * 3, "{}: {} of {count} lists", case.name, lists.len());
        }
    }

    #[test]
    fn what_makes_no_kv_is_refused() {
        let good = Case::known().remove(1);
        for bad in [
            Case { buffers: 3, ..good.clone() },
            Case { item_bytes: 100, ..good.clone() },
            Case { pages: 641, ..good.clone() },
            Case { pages: 0, ..good.clone() },
            Case { buffers: 0, ..good.clone() },
            Case { page_size: 0, ..good.clone() },
            Case { page_size: u32::MAX, ..good.clone() },
            Case { pool: u32::MAX, ..good.clone() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
