//! Which bytes go where: a [`Template`] is made once per session from two layouts; per request only
//! page indices change.
//!
//! Arithmetic only. A *tile* is the most tokens that lie in one page on both sides; a *fragment* is a
//! contiguous piece of a tile, the same on both sides. Fragments are neighbours merged inside a tile,
//! runs are fragments merged across tiles. Order: fragment by fragment, tile by tile within; both ends
//! of a stream that knows no addresses (tcp) walk the same order.

use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvLayout};
use std::ops::Range;

/// A contiguous piece of a tile, as offsets from the tile's first token in either page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fragment {
    source: u64,
    destination: u64,
    bytes: u64,
    /// Bytes of the tile's fragments before this one.
    before: u64,
}

/// A piece of one copy or write: offsets into the two regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Offset in the source's region.
    pub source: u64,
    /// Offset in the destination's region.
    pub destination: u64,
    /// Length.
    pub bytes: u64,
}

/// A contiguous stretch of a stream on one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset in the side's region.
    pub at: u64,
    /// Length.
    pub bytes: u64,
}

/// Two layouts that cannot be connected: the field and both values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayoutMismatch {
    /// Field of [`KvLayout`].
    pub field: &'static str,
    /// The source's.
    pub source: String,
    /// The destination's.
    pub destination: String,
}

/// The plan of a session.
#[derive(Clone, Debug)]
pub struct Template {
    tile: u32,
    fragments: Vec<Fragment>,
    source: Paging,
    destination: Paging,
}

/// How one side's pages are laid out along the tokens.
#[derive(Clone, Copy, Debug)]
struct Paging {
    /// Of a page.
    tiles: u32,
    tile_stride: u64,
    page_stride: u64,
}

impl Paging {
    fn of(layout: &KvLayout, tile: u32) -> Paging {
        Paging {
            tiles: layout.page_size / tile,
            tile_stride: u64::from(tile) * layout.token_stride,
            page_stride: layout.page_stride,
        }
    }

    /// Where a tile begins in the region.
    #[inline]
    fn address(&self, tile: u32, page: &impl Fn(usize) -> PageId) -> u64 {
        // A division takes as long as the rest of a run.
        if self.tiles == 1 {
            return u64::from(page(tile as usize).0) * self.page_stride;
        }
        let (index, within) = (tile / self.tiles, tile % self.tiles);
        u64::from(page(index as usize).0) * self.page_stride + u64::from(within) * self.tile_stride
    }
}

impl Template {
    /// The plan between two regions that hold the same layers and heads.
    pub fn new(source: &KvLayout, destination: &KvLayout) -> Result<Template, LayoutMismatch> {
        let compared = |layout: &KvLayout| {
            [
                ("layers", layout.layers.to_string()),
                ("kv_heads", layout.kv_heads.to_string()),
                ("head_dim", layout.head_dim.to_string()),
                ("kv_dtype", layout.dtype.name().to_string()),
            ]
        };
        for ((field, source), (_, destination)) in compared(source).into_iter().zip(compared(destination)) {
            if source != destination {
                return Err(LayoutMismatch { field, source, destination });
            }
        }
        let tile = gcd(source.page_size, destination.page_size);
        let (source_paging, destination_paging) = (Paging::of(source, tile), Paging::of(destination, tile));
        let fragments = fragments(source, destination, tile);
        Ok(Template { tile, fragments, source: source_paging, destination: destination_paging })
    }

    /// Bytes that `tokens` take on the way, whole tiles.
    pub fn bytes(&self, tokens: Range<u32>) -> u64 {
        let per_tile = self.fragments.last().map_or(0, |last| last.before + last.bytes);
        let tiles = self.tiles(&tokens);
        per_tile * u64::from(tiles.end - tiles.start)
    }

    /// Where `bytes` of the stream of `tokens` lie at the source.
    pub fn source_pieces<P: Fn(usize) -> PageId>(
        &self,
        tokens: Range<u32>,
        bytes: Range<u64>,
        page: P,
    ) -> Pieces<'_, P> {
        Pieces::new(self, &self.source, |fragment| fragment.source, tokens, bytes, page)
    }

    /// Where `bytes` of the stream of `tokens` lie at the destination.
    pub fn destination_pieces<P: Fn(usize) -> PageId>(
        &self,
        tokens: Range<u32>,
        bytes: Range<u64>,
        page: P,
    ) -> Pieces<'_, P> {
        Pieces::new(self, &self.destination, |fragment| fragment.destination, tokens, bytes, page)
    }

    /// What moves `bytes` of the stream of `tokens`, run by run.
    pub fn runs<S, D>(
        &self,
        tokens: Range<u32>,
        bytes: Range<u64>,
        source_page: S,
        destination_page: D,
    ) -> Runs<'_, S, D>
    where
        S: Fn(usize) -> PageId,
        D: Fn(usize) -> PageId,
    {
        let place = Place::find(self, &tokens, &bytes);
        let none = Run { source: 0, destination: 0, bytes: 0 };
        let mut runs = Runs { template: self, source_page, destination_page, place, ahead: none };
        runs.ahead = runs.step();
        runs
    }

    /// What moves all of `tokens`, run by run.
    pub fn all_runs<S, D>(&self, tokens: Range<u32>, source_page: S, destination_page: D) -> Runs<'_, S, D>
    where
        S: Fn(usize) -> PageId,
        D: Fn(usize) -> PageId,
    {
        self.runs(tokens.clone(), 0..self.bytes(tokens), source_page, destination_page)
    }

    fn tiles(&self, tokens: &Range<u32>) -> Range<u32> {
        tokens.start / self.tile..tokens.end.div_ceil(self.tile)
    }
}

/// Where in a stream a walk is. Made anew wherever a stream goes on: finding it is a search among the fragments,
/// nothing is kept.
#[derive(Clone, Debug)]
struct Place {
    tiles: Range<u32>,
    fragment: usize,
    tile: u32,
    within: u64,
    left: u64,
}

impl Place {
    fn find(template: &Template, tokens: &Range<u32>, bytes: &Range<u64>) -> Place {
        let tiles = template.tiles(tokens);
        let count = u64::from(tiles.end - tiles.start);
        let begun = |fragment: &Fragment| fragment.before * count <= bytes.start;
        let fragment = template.fragments.partition_point(begun) - 1;
        let Fragment { before, bytes: length, .. } = template.fragments[fragment];
        let inside = bytes.start - before * count;
        Place {
            tile: tiles.start + (inside / length) as u32,
            tiles,
            fragment,
            within: inside % length,
            left: bytes.end.min(template.bytes(tokens.clone())).saturating_sub(bytes.start),
        }
    }

    /// The fragment it is in, and what of it the walk takes; none where the walk is over.
    #[inline]
    fn stretch<'a>(&self, template: &'a Template) -> Option<(&'a Fragment, u64)> {
        if self.left == 0 {
            return None;
        }
        let fragment = &template.fragments[self.fragment];
        Some((fragment, (fragment.bytes - self.within).min(self.left)))
    }

    /// Goes on by what [`Place::stretch`] gave.
    #[inline]
    fn advance(&mut self, fragment: &Fragment, bytes: u64) {
        self.left -= bytes;
        self.within += bytes;
        if self.within == fragment.bytes {
            self.within = 0;
            self.tile += 1;
        }
        if self.tile == self.tiles.end {
            self.tile = self.tiles.start;
            self.fragment += 1;
        }
    }
}

/// Walks a part of a stream on one side, neighbours merged.
#[derive(Debug)]
pub struct Pieces<'a, P> {
    template: &'a Template,
    paging: &'a Paging,
    offset: fn(&Fragment) -> u64,
    page: P,
    place: Place,
    /// Looked at, and no neighbour of the one before.
    ahead: Option<Piece>,
}

impl<'a, P: Fn(usize) -> PageId> Pieces<'a, P> {
    fn new(
        template: &'a Template,
        paging: &'a Paging,
        offset: fn(&Fragment) -> u64,
        tokens: Range<u32>,
        bytes: Range<u64>,
        page: P,
    ) -> Pieces<'a, P> {
        let place = Place::find(template, &tokens, &bytes);
        Pieces { template, paging, offset, page, place, ahead: None }
    }

    fn step(&mut self) -> Option<Piece> {
        let (fragment, bytes) = self.place.stretch(self.template)?;
        let at =
            self.paging.address(self.place.tile, &self.page) + (self.offset)(fragment) + self.place.within;
        self.place.advance(fragment, bytes);
        Some(Piece { at, bytes })
    }
}

impl<P: Fn(usize) -> PageId> Iterator for Pieces<'_, P> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let mut piece = self.ahead.take().or_else(|| self.step())?;
        while let Some(next) = self.step() {
            if next.at != piece.at + piece.bytes {
                self.ahead = Some(next);
                break;
            }
            piece.bytes += next.bytes;
        }
        Some(piece)
    }
}

/// Walks a part of a stream on both sides at once, merged wherever both sides are neighbours.
#[derive(Debug)]
pub struct Runs<'a, S, D> {
    template: &'a Template,
    source_page: S,
    destination_page: D,
    place: Place,
    /// Looked at, and no neighbour of the one before; of no bytes where nothing is.
    ahead: Run,
}

impl<S: Fn(usize) -> PageId, D: Fn(usize) -> PageId> Runs<'_, S, D> {
    /// What lies at the place, of no bytes at the end.
    // Numbers in registers: through memory, written in eights and read in sixteens, they cost as much as all else.
    #[inline(always)]
    fn step(&mut self) -> Run {
        let Template { source, destination, .. } = self.template;
        let Some((fragment, bytes)) = self.place.stretch(self.template) else {
            return Run { source: 0, destination: 0, bytes: 0 };
        };
        let (tile, within) = (self.place.tile, self.place.within);
        let run = Run {
            source: source.address(tile, &self.source_page) + fragment.source + within,
            destination: destination.address(tile, &self.destination_page) + fragment.destination + within,
            bytes,
        };
        self.place.advance(fragment, bytes);
        run
    }
}

impl<S: Fn(usize) -> PageId, D: Fn(usize) -> PageId> Iterator for Runs<'_, S, D> {
    type Item = Run;

    #[inline(always)]
    fn next(&mut self) -> Option<Run> {
        let Run { source, destination, mut bytes } = self.ahead;
        if bytes == 0 {
            return None;
        }
        loop {
            let next = self.step();
            let is_neighbour = next.source == source + bytes && next.destination == destination + bytes;
            if next.bytes == 0 || !is_neighbour {
                self.ahead = next;
                return Some(Run { source, destination, bytes });
            }
            bytes += next.bytes;
        }
    }
}

/// The pieces of one tile, neighbours merged.
fn fragments(source: &KvLayout, destination: &KvLayout, tile: u32) -> Vec<Fragment> {
    let token_bytes = u64::from(source.head_dim) * source.dtype.bytes();
    let mut fragments: Vec<Fragment> = Vec::new();
    for layer in 0..source.layers {
        for which in [KeyValue::Key, KeyValue::Value] {
            for head in 0..source.kv_heads {
                for token in 0..tile {
                    let next = Fragment {
                        source: source.offset(PageId(0), layer, which, head, token),
                        destination: destination.offset(PageId(0), layer, which, head, token),
                        bytes: token_bytes,
                        before: fragments.last().map_or(0, |last| last.before + last.bytes),
                    };
                    match fragments.last_mut() {
                        Some(last)
                            if last.source + last.bytes == next.source
                                && last.destination + last.bytes == next.destination =>
                        {
                            last.bytes += next.bytes;
                        }
                        _ => fragments.push(next),
                    }
                }
            }
        }
    }
    fragments
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::layout::KvDtype;
    use proptest::prelude::*;

    const PAGES: u32 = 24;

    /// Every layer, K and V, in a block of its own over all pages, as other engines keep it.
    fn layer_major(page_size: u32, layers: u32, kv_heads: u32, head_dim: u32) -> KvLayout {
        KvLayout::layer_major(page_size, layers, kv_heads, head_dim, KvDtype::F16, PAGES)
    }

    fn layout(kind: bool, page_size: u32, shape: (u32, u32, u32)) -> KvLayout {
        let (layers, heads, dim) = shape;
        if kind {
            layer_major(page_size, layers, heads, dim)
        } else {
            KvLayout::page_major(page_size, layers, heads, dim, KvDtype::F16)
        }
    }

    fn region_bytes(layout: &KvLayout) -> usize {
        (u64::from(PAGES) * layout.page_bytes()) as usize
    }

    /// The slow, obvious planner: element by element.
    fn copy_by_element(
        (from, source, source_pages): (&KvLayout, &[u8], &[PageId]),
        (to, destination, destination_pages): (&KvLayout, &mut [u8], &[PageId]),
        tokens: Range<u32>,
    ) {
        let bytes = (u64::from(from.head_dim) * from.dtype.bytes()) as usize;
        for token in tokens {
            for layer in 0..from.layers {
                for which in [KeyValue::Key, KeyValue::Value] {
                    for head in 0..from.kv_heads {
                        let at = |layout: &KvLayout, pages: &[PageId]| {
                            let page = pages[(token / layout.page_size) as usize];
                            layout.offset(page, layer, which, head, token % layout.page_size) as usize
                        };
                        let (a, b) = (at(from, source_pages), at(to, destination_pages));
                        destination[b..b + bytes].copy_from_slice(&source[a..a + bytes]);
                    }
                }
            }
        }
    }

    fn shuffled(seed: u64, count: usize) -> Vec<PageId> {
        let mut pages: Vec<PageId> = (0..PAGES).map(PageId).collect();
        let mut state = seed | 1;
        for i in (1..pages.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            pages.swap(i, (state >> 33) as usize % (i + 1));
        }
        pages.truncate(count);
        pages
    }

    proptest! {
        #[test]
        fn moves_exactly_the_bytes_of_the_obvious_planner(
            kinds in (any::<bool>(), any::<bool>()),
            sizes in (0u32..4, 0u32..4),
            shape in (1u32..4, 1u32..4, 1u32..5),
            length in 1u32..40,
            first_tile in 0u32..3,
            seed in any::<u64>(),
            scattered in any::<bool>(),
        ) {
            let from = layout(kinds.0, 1 << sizes.0, shape);
            let to = layout(kinds.1, 1 << sizes.1, shape);
            let needed = |layout: &KvLayout| layout.pages_for(length) as usize;
            prop_assume!(needed(&from) <= PAGES as usize && needed(&to) <= PAGES as usize);
            let pages = |layout: &KvLayout, salt: u64| if scattered {
                shuffled(seed ^ salt, needed(layout))
            } else {
                (0..needed(layout) as u32).map(PageId).collect()
            };
            let (from_pages, to_pages) = (pages(&from, 1), pages(&to, 2));
            let template = Template::new(&from, &to).unwrap();
            let tile = template.tile;
            let start = (first_tile * tile).min(length / tile * tile);
            let source: Vec<u8> = (0..region_bytes(&from)).map(|i| (i * 31 + i / 251) as u8).collect();
            let (mut moved, mut expected) = (vec![0u8; region_bytes(&to)], vec![0u8; region_bytes(&to)]);
            let mut total = 0;
            for run in template.all_runs(start..length, |i| from_pages[i], |i| to_pages[i]) {
                let (a, b, n) = (run.source as usize, run.destination as usize, run.bytes as usize);
                moved[b..b + n].copy_from_slice(&source[a..a + n]);
                total += run.bytes;
            }
            // Whole tiles move, so the obvious planner rounds up as well.
            let end = length.div_ceil(tile) * tile;
            copy_by_element((&from, &source, &from_pages), (&to, &mut expected, &to_pages), start..end);
            prop_assert_eq!(total, template.bytes(start..length));
            prop_assert_eq!(moved, expected);
        }

        #[test]
        fn both_sides_of_a_stream_walk_the_runs_in_any_parts(
            kinds in (any::<bool>(), any::<bool>()),
            sizes in (0u32..4, 0u32..4),
            shape in (1u32..4, 1u32..4, 1u32..5),
            length in 1u32..40,
            seed in any::<u64>(),
            part in 1u64..500,
        ) {
            let from = layout(kinds.0, 1 << sizes.0, shape);
            let to = layout(kinds.1, 1 << sizes.1, shape);
            let needed = |layout: &KvLayout| layout.pages_for(length) as usize;
            prop_assume!(needed(&from) <= PAGES as usize && needed(&to) <= PAGES as usize);
            let (from_pages, to_pages) = (shuffled(seed, needed(&from)), shuffled(!seed, needed(&to)));
            let template = Template::new(&from, &to).unwrap();
            let (mut source, mut destination) = (Vec::new(), Vec::new());
            for run in template.all_runs(0..length, |i| from_pages[i], |i| to_pages[i]) {
                source.extend(run.source..run.source + run.bytes);
                destination.extend(run.destination..run.destination + run.bytes);
            }
            let (mut sent, mut landed) = (Vec::new(), Vec::new());
            let total = template.bytes(0..length);
            for start in (0..total).step_by(part as usize) {
                let bytes = start..(start + part).min(total);
                let pieces = template.source_pieces(0..length, bytes.clone(), |i| from_pages[i]);
                sent.extend(pieces.flat_map(|piece| piece.at..piece.at + piece.bytes));
                let pieces = template.destination_pieces(0..length, bytes, |i| to_pages[i]);
                landed.extend(pieces.flat_map(|piece| piece.at..piece.at + piece.bytes));
            }
            prop_assert_eq!(&sent, &source);
            prop_assert_eq!(&landed, &destination);
            let (mut sent, mut landed) = (Vec::new(), Vec::new());
            for start in (0..total).step_by(part as usize) {
                let bytes = start..(start + part).min(total);
                for run in template.runs(0..length, bytes, |i| from_pages[i], |i| to_pages[i]) {
                    sent.extend(run.source..run.source + run.bytes);
                    landed.extend(run.destination..run.destination + run.bytes);
                }
            }
            prop_assert_eq!(sent, source);
            prop_assert_eq!(landed, destination);
        }
    }

    #[test]
    fn neighbouring_pages_are_one_run() {
        let ours = KvLayout::page_major(16, 30, 3, 64, KvDtype::F16);
        let template = Template::new(&ours, &ours).unwrap();
        let mut runs = Vec::new();
        let source = [4, 5, 6, 9].map(PageId);
        let destination = [1, 2, 3, 4].map(PageId);
        runs.extend(template.all_runs(0..60, |i| source[i], |i| destination[i]));
        let page = ours.page_bytes();
        assert_eq!(
            runs,
            [
                Run { source: 4 * page, destination: page, bytes: 3 * page },
                Run { source: 9 * page, destination: 4 * page, bytes: page },
            ]
        );
    }

    #[test]
    fn a_difference_names_its_field() {
        let ours = KvLayout::page_major(16, 30, 3, 64, KvDtype::F16);
        let theirs = KvLayout::page_major(16, 30, 9, 64, KvDtype::F16);
        let error = Template::new(&ours, &theirs).unwrap_err();
        let different = |field, source: &str, destination: &str| LayoutMismatch {
            field,
            source: source.into(),
            destination: destination.into(),
        };
        assert_eq!(error, different("kv_heads", "3", "9"));
        let theirs = KvLayout::page_major(16, 30, 3, 64, KvDtype::F32);
        let error = Template::new(&ours, &theirs).unwrap_err();
        assert_eq!(error, different("kv_dtype", "f16", "f32"));
    }
}
