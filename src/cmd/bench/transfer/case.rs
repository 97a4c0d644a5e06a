//! The cases of a bench: number of pages and buffers, and the page lists of both sides.
//!
//! Invariants: pure arithmetic; both processes derive page lists and bytes only from the case.

use super::bytes::{ELEMENTS_MAX, PAGES_MAX, WORDS_MAX};
use crate::ids::PageId;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::limits::{CONTEXT_MAX, RANKS_MAX};
use crate::stdx::rng::mix;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of page lists. Runs use them in turn, so no run finds the pages of the previous run in
/// the CPU caches.
pub const LISTS: u32 = 4;

/// The side of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransferEnd {
    /// Prefill.
    Source,
    /// Decode.
    Destination,
}

impl TransferEnd {
    /// The flag for the ranks of this side.
    const fn flag(self) -> &'static str {
        match self {
            TransferEnd::Source => "--src-tp",
            TransferEnd::Destination => "--dst-tp",
        }
    }
}

/// The order of a request's pages in the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Spread {
    /// Contiguous pages.
    Contiguous,
    /// In random order.
    Fragmented,
}

/// The layout of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayoutKind {
    /// One block for each page and buffer, as in other engines.
    LayerMajor,
    /// One block for each page, as in Baton.
    PageMajor,
}

/// The layouts of source and destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Layouts {
    /// The source's layout.
    pub source: LayoutKind,
    /// The destination's layout.
    pub destination: LayoutKind,
}

impl Layouts {
    /// All combinations; those with two equal layouts first.
    pub const ALL: [Layouts; 4] = {
        use LayoutKind::{LayerMajor, PageMajor};
        [
            Layouts { source: LayerMajor, destination: LayerMajor },
            Layouts { source: PageMajor, destination: PageMajor },
            Layouts { source: LayerMajor, destination: PageMajor },
            Layouts { source: PageMajor, destination: LayerMajor },
        ]
    };

    /// The name in flags and reports.
    pub const fn name(self) -> &'static str {
        match (self.source, self.destination) {
            (LayoutKind::LayerMajor, LayoutKind::LayerMajor) => "layer-major",
            (LayoutKind::PageMajor, LayoutKind::PageMajor) => "page-major",
            (LayoutKind::LayerMajor, LayoutKind::PageMajor) => "layer-to-page",
            (LayoutKind::PageMajor, LayoutKind::LayerMajor) => "page-to-layer",
        }
    }

    /// The layout of one side.
    pub const fn of(self, end: TransferEnd) -> LayoutKind {
        match end {
            TransferEnd::Source => self.source,
            TransferEnd::Destination => self.destination,
        }
    }
}

/// A shape of KV and of a request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Case {
    /// The name in flags and reports.
    pub name: String,
    /// Pages of a request.
    pub pages: u32,
    /// Number of buffers: one for K and one for V of each layer, or 1 for both of one layer.
    pub buffers: u32,
    /// Bytes of a page in one buffer, for all heads.
    pub item_bytes: u32,
    /// KV heads of the model.
    pub kv_heads: u32,
    /// Tokens in each page.
    pub page_size: u32,
    /// Pages of the pool.
    pub pool: u32,
    /// Order of the request's pages.
    pub spread: Spread,
}

/// A value that does not give a valid KV shape.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaseError {
    /// The flag that sets this value, in this process or in the process that connects.
    pub flag: &'static str,
    /// The value, and the other values that it conflicts with.
    pub value: String,
    /// The allowed values.
    pub limit: String,
}

impl CaseError {
    /// The error for this flag and value.
    pub fn new(flag: &'static str, value: impl ToString, limit: impl Into<String>) -> CaseError {
        CaseError { flag, value: value.to_string(), limit: limit.into() }
    }

    /// Checks that the value is 1 to `most`.
    ///
    /// # Errors
    /// The value is out of range.
    pub fn unless_within(flag: &'static str, value: u32, most: usize) -> Result<(), CaseError> {
        if (1..=most as u64).contains(&value.into()) {
            return Ok(());
        }
        Err(CaseError::new(flag, value, format!("must be 1 to {most}")))
    }
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.flag, self.value, self.limit)
    }
}

const KIB: u32 = 1024;
/// Maximum bytes of a pool; a bench has up to four of them.
const POOL_BYTES_MAX: u64 = 16 << 30;

impl Case {
    /// The fixed cases, so that figures can be compared.
    pub fn known() -> Vec<Case> {
        use Spread::{Contiguous, Fragmented};
        let case =
            |name: &str, pages, buffers, (item_bytes, kv_heads), page_size, pool, spread| Case {
                name: name.into(),
                pages,
                buffers,
                item_bytes,
                kv_heads,
                page_size,
                pool,
                spread,
            };
        vec![
            case("tiny-2k", 1, 1, (2 * KIB, 1), 1, 64, Fragmented),
            case("smol-128", 8, 60, (6 * KIB, 3), 16, 640, Fragmented),
            case("smol-1024", 64, 60, (6 * KIB, 3), 16, 640, Fragmented),
            case("smol-8192", 512, 60, (6 * KIB, 3), 16, 640, Fragmented),
            case("qwen-128", 8, 56, (32 * KIB, 8), 16, 160, Fragmented),
            case("qwen-1024", 64, 56, (32 * KIB, 8), 16, 256, Fragmented),
            case("qwen-8192", 512, 56, (32 * KIB, 8), 16, 640, Fragmented),
            case("qwen-p1-contig-1024", 1024, 56, (2 * KIB, 8), 1, 4096, Contiguous),
            case("qwen-p1-frag-1024", 1024, 56, (2 * KIB, 8), 1, 4096, Fragmented),
            // Twelve layers with KV, as Qwen3-Next. State is on pages of the pool: 22 of them have
            // 8 MiB, and 171 have 64 MiB.
            case("next-state8-1024", 64 + 22, 24, (16 * KIB, 2), 16, 344, Fragmented),
            case("next-state64-1024", 64 + 171, 24, (16 * KIB, 2), 16, 940, Fragmented),
        ]
    }

    /// Smaller cases, for emulated machines.
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

    /// Checks that the shape is possible.
    ///
    /// # Errors
    /// The first value that is impossible.
    pub fn check(&self) -> Result<(), CaseError> {
        let Case { pages, buffers, item_bytes, kv_heads, page_size, pool, .. } = *self;
        let fail = |flag, value: String, limit: String| Err(CaseError::new(flag, value, limit));
        if buffers == 0 || buffers != 1 && !buffers.is_multiple_of(2) {
            return fail(
                "--layers",
                format!("of {buffers} buffers"),
                "must be two for each layer, or one for one layer".into(),
            );
        }
        let layers = buffers.div_ceil(2);
        let heads = u64::from(page_size) * u64::from(kv_heads);
        let elements = heads.saturating_mul(2 * u64::from(layers));
        // With more elements, the values of words would repeat.
        if heads == 0 || elements > ELEMENTS_MAX {
            let value = format!("{kv_heads} with --layers {layers} and {page_size} tokens a page");
            return fail(
                "--kv-heads",
                value,
                format!("a page has 1 to {ELEMENTS_MAX} keys and values of a head"),
            );
        }
        // The check compares whole words of a token's head.
        let unit = 8 * heads * u64::from(self.halves());
        let (item, most) = (u64::from(item_bytes), WORDS_MAX * unit);
        let value = format!("{item_bytes} with --kv-heads {kv_heads}");
        if item == 0 || !item.is_multiple_of(unit) {
            return fail("--item-bytes", value, format!("must be a multiple of {unit}"));
        }
        if item > most {
            return fail("--item-bytes", value, format!("at most {most}"));
        }
        if u64::from(pool) > PAGES_MAX || !(1..=pool).contains(&pages) {
            let limit =
                format!("must be 1 to the {pool} of its pool, which has at most {PAGES_MAX}");
            return fail("--pages", pages.to_string(), limit);
        }
        if self.pool_bytes() > POOL_BYTES_MAX {
            let value = format!("{pages} with --layers {layers} and --item-bytes {item_bytes}");
            let bytes = self.pool_bytes();
            return fail(
                "--pages",
                value,
                format!("its pool has {bytes} bytes, at most {POOL_BYTES_MAX}"),
            );
        }
        if pages.checked_mul(page_size).is_none_or(|tokens| tokens > CONTEXT_MAX) {
            return fail("--pages", pages.to_string(), format!("at most {CONTEXT_MAX} tokens"));
        }
        Ok(())
    }

    /// Checks that a worker can have this number of tensor-parallel ranks.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check_ranks(&self, end: TransferEnd, ranks: u32) -> Result<(), CaseError> {
        CaseError::unless_within(end.flag(), ranks, RANKS_MAX)?;
        let (heads, name) = (self.kv_heads, &self.name);
        if KvLayout::heads_per_rank(heads, ranks).is_none() {
            let limit =
                format!("must divide the {heads} KV heads of {name}, or be a multiple of them");
            return Err(CaseError::new(end.flag(), ranks, limit));
        }
        let bytes = self.pool_bytes().saturating_mul(ranks.div_ceil(heads).into());
        if bytes > POOL_BYTES_MAX {
            let limit = format!("all pools of {name} have {bytes} bytes, at most {POOL_BYTES_MAX}");
            return Err(CaseError::new(end.flag(), ranks, limit));
        }
        Ok(())
    }

    /// Bytes of a transfer.
    pub fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes()
    }

    /// Bytes of a pool.
    pub fn pool_bytes(&self) -> u64 {
        self.page_bytes().saturating_mul(self.pool.into())
    }

    fn page_bytes(&self) -> u64 {
        u64::from(self.buffers) * u64::from(self.item_bytes)
    }

    /// Tokens of a transfer.
    pub fn tokens(&self) -> u32 {
        self.pages * self.page_size
    }

    /// Parts of an item: 2 if one buffer holds K and V side by side, else 1.
    fn halves(&self) -> u32 {
        if self.buffers == 1 { 2 } else { 1 }
    }

    /// The layout of a worker with this number of tensor-parallel ranks, one pool each; `None` if
    /// the ranks cannot divide the heads evenly.
    pub fn layout(&self, kind: LayoutKind, ranks: u32) -> Option<KvLayout> {
        let held = KvLayout::heads_per_rank(self.kv_heads, ranks)?;
        let (layers, dtype) = (self.buffers.div_ceil(2), KvDtype::F16);
        let head_dim =
            self.item_bytes / self.halves() / self.page_size / self.kv_heads / dtype.bytes() as u32;
        let rank = match kind {
            LayoutKind::LayerMajor if self.buffers > 1 => {
                KvLayout::layer_major(self.page_size, layers, held, head_dim, dtype, self.pool)
            }
            // K and V side by side: each item is one block.
            _ => KvLayout::page_major(self.page_size, layers, held, head_dim, dtype),
        };
        let stride = (u64::from(self.pool) * rank.page_bytes()).next_multiple_of(4096);
        rank.on_ranks(ranks, stride, self.kv_heads)
    }

    /// The same case with this multiple of pages, for several replicas of a rank.
    pub fn times(&self, replicas: u32) -> Case {
        let (pages, pool) =
            (self.pages.saturating_mul(replicas), self.pool.saturating_mul(replicas));
        Case { pages, pool, ..self.clone() }
    }

    /// The pages of a side in one of the [`LISTS`].
    pub fn list(&self, end: TransferEnd, list: u32) -> Vec<PageId> {
        let seed = u64::from(list) << 1 | u64::from(end == TransferEnd::Destination);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn cases() -> Vec<Case> {
        Case::known().into_iter().chain(Case::small()).collect()
    }

    #[test]
    fn ranks_hold_as_much_as_the_case_says() {
        for case in cases() {
            case.check().unwrap();
            for ranks in 1..=16 {
                for kind in [LayoutKind::LayerMajor, LayoutKind::PageMajor] {
                    let Some(layout) = case.layout(kind, ranks) else { continue };
                    let held = u64::from(ranks) * layout.page_bytes();
                    let replicas = u64::from(ranks.div_ceil(case.kv_heads));
                    assert_eq!(held, replicas * case.page_bytes(), "{} {ranks}", case.name);
                }
            }
        }
        let smol = &cases()[1];
        for ranks in [3, 6] {
            assert!(smol.layout(LayoutKind::PageMajor, ranks).is_some());
            assert_eq!(smol.check_ranks(TransferEnd::Source, ranks), Ok(()));
        }
        assert_eq!(smol.layout(LayoutKind::PageMajor, 2), None);
        let error = smol.check_ranks(TransferEnd::Destination, 2).unwrap_err();
        let said = "--dst-tp 2: must divide the 3 KV heads of smol-128, or be a multiple of them";
        assert_eq!(error.to_string(), said);
    }

    #[test]
    fn lists_hold_different_pages_of_the_pool() {
        for case in cases() {
            let mut lists = Vec::new();
            for list in 0..LISTS {
                for end in [TransferEnd::Source, TransferEnd::Destination] {
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
            assert!(
                lists.len() * 4 >= count * 3,
                "{}: {} of {count} lists",
                case.name,
                lists.len()
            );
        }
    }

    #[test]
    fn a_case_with_an_impossible_kv_layout_is_refused() {
        let good = Case::known().remove(1);
        for bad in [
            Case { buffers: 3, ..good.clone() },
            Case { item_bytes: 100, ..good.clone() },
            Case { pages: 641, ..good.clone() },
            Case { pages: 0, ..good.clone() },
            Case { buffers: 0, ..good.clone() },
            Case { page_size: 0, ..good.clone() },
            Case { kv_heads: 0, ..good.clone() },
            Case { kv_heads: 5, ..good.clone() },
            Case { page_size: u32::MAX, ..good.clone() },
            Case { pool: u32::MAX, ..good.clone() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        let least =
            Case { pool: 64, buffers: 2, page_size: 1, kv_heads: 1, item_bytes: 8, ..good.clone() };
        for (most, more) in [
            (
                Case { pool: 1 << 20, ..least.clone() },
                Case { pool: (1 << 20) + 1, ..least.clone() },
            ),
            (
                Case { kv_heads: 1 << 21, item_bytes: 8 << 21, ..least.clone() },
                Case { kv_heads: 1 << 22, item_bytes: 8 << 22, ..least.clone() },
            ),
            (
                Case { item_bytes: 8 << 20, ..least.clone() },
                Case { item_bytes: 8 << 23, ..least.clone() },
            ),
        ] {
            assert_eq!(most.check(), Ok(()));
            assert!(more.check().is_err(), "{more:?}");
        }
    }
}
