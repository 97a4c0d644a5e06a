//! The plan: source and destination offsets of all bytes. A session makes a [`Template`] once from
//! two layouts. For each request only the page indices change.
//!
//! Arithmetic only. The layouts may differ in page size, strides and number of tensor-parallel
//! ranks. Each destination rank gets its heads from the lowest source rank that holds them. A
//! *tile* is the most tokens that lie in one page on both sides. A *fragment* is a piece of a tile
//! that is contiguous on both sides. A run merges adjacent fragments across tiles. A `tcp` stream
//! carries no addresses, so both ends walk in the same order (`fragment`).
//! [`Template::of_layers`] plans some of the layers. A held prefix is left out of the token range.
//! A state slot is a page of one token ([`KvLayout::state_slots`]).

mod fragment;
#[cfg(test)]
mod tests;
mod walk;

pub use walk::{Pieces, Runs};

use crate::ids::PageId;
use crate::kv::layout::KvLayout;
use crate::limits::PLAN_PIECES_MAX;
use fragment::{Fragment, Order};
use std::ops::Range;

/// One copy or write: offsets into the two regions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Offset in the source's region.
    pub source: u64,
    /// Offset in the destination's region.
    pub destination: u64,
    /// Length.
    pub bytes: u64,
}

/// A contiguous part of a stream on one side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset in the side's region.
    pub at: u64,
    /// Length.
    pub bytes: u64,
}

/// Two layouts that cannot be combined: the field and both values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayoutMismatch {
    /// Field of [`KvLayout`].
    pub field: &'static str,
    /// The source's value.
    pub source: String,
    /// The destination's value.
    pub destination: String,
}

/// The plan of a session.
#[derive(Clone, Debug)]
pub struct Template {
    tile: u32,
    fragments: Vec<Fragment>,
    order: Order,
    source: Paging,
    destination: Paging,
}

/// Position of one side's tokens in its pages.
#[derive(Clone, Copy, Debug)]
struct Paging {
    /// Tiles of a page.
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

    /// Offset of a tile's first byte in the region.
    #[inline]
    fn address(&self, tile: u32, page: &impl Fn(usize) -> PageId) -> u64 {
        // A division would take as long as the rest of the work for a run.
        if self.tiles == 1 {
            return u64::from(page(tile as usize).0) * self.page_stride;
        }
        let (index, within) = (tile / self.tiles, tile % self.tiles);
        u64::from(page(index as usize).0) * self.page_stride + u64::from(within) * self.tile_stride
    }
}

impl Template {
    /// The plan between two workers' regions, which hold the same layers and heads of a model.
    pub fn new(source: &KvLayout, destination: &KvLayout) -> Result<Template, LayoutMismatch> {
        Template::of_layers(source, destination, 0..source.layers)
    }

    /// The same for these layers only.
    ///
    /// # Panics
    /// If `layers` leaves the layers of the source.
    pub fn of_layers(
        source: &KvLayout,
        destination: &KvLayout,
        layers: Range<u32>,
    ) -> Result<Template, LayoutMismatch> {
        let compared = |layout: &KvLayout| {
            [
                ("layers", layout.layers.to_string()),
                ("kv_heads", layout.model_kv_heads.to_string()),
                ("head_dim", layout.head_dim.to_string()),
                ("kv_dtype", layout.dtype.name().to_string()),
            ]
        };
        for ((field, source), (_, destination)) in
            compared(source).into_iter().zip(compared(destination))
        {
            if source != destination {
                return Err(LayoutMismatch { field, source, destination });
            }
        }
        assert!(layers.start <= layers.end && layers.end <= source.layers, "no such layers");
        let tile = gcd(source.page_size, destination.page_size);
        let heads = u64::from(destination.ranks) * u64::from(destination.kv_heads);
        let pieces =
            heads.saturating_mul(2 * u64::from(layers.end - layers.start) * u64::from(tile));
        if pieces > PLAN_PIECES_MAX {
            return Err(LayoutMismatch {
                field: "pieces of a plan",
                source: format!("at most {PLAN_PIECES_MAX}"),
                destination: pieces.to_string(),
            });
        }
        let fragments = fragment::of_tile(source, destination, layers, tile);
        Ok(Template {
            tile,
            order: Order::of(&fragments),
            fragments,
            source: Paging::of(source, tile),
            destination: Paging::of(destination, tile),
        })
    }

    /// Bytes of `tokens` on the stream, rounded to whole tiles.
    pub fn bytes(&self, tokens: Range<u32>) -> u64 {
        let tiles = self.tiles(&tokens);
        self.tile_bytes() * u64::from(tiles.end - tiles.start)
    }

    /// Positions at the source of `bytes` of the stream of `tokens`.
    pub fn source_pieces<P: Fn(usize) -> PageId>(
        &self,
        tokens: Range<u32>,
        bytes: Range<u64>,
        page: P,
    ) -> Pieces<'_, P> {
        Pieces::new(self, &self.source, |fragment| fragment.source, tokens, bytes, page)
    }

    /// Positions at the destination of `bytes` of the stream of `tokens`.
    pub fn destination_pieces<P: Fn(usize) -> PageId>(
        &self,
        tokens: Range<u32>,
        bytes: Range<u64>,
        page: P,
    ) -> Pieces<'_, P> {
        Pieces::new(self, &self.destination, |fragment| fragment.destination, tokens, bytes, page)
    }

    /// The runs that move `bytes` of the stream of `tokens`.
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
        Runs::new(self, tokens, bytes, source_page, destination_page)
    }

    /// The runs that move all of `tokens`.
    pub fn all_runs<S, D>(
        &self,
        tokens: Range<u32>,
        source_page: S,
        destination_page: D,
    ) -> Runs<'_, S, D>
    where
        S: Fn(usize) -> PageId,
        D: Fn(usize) -> PageId,
    {
        self.runs(tokens.clone(), 0..self.bytes(tokens), source_page, destination_page)
    }

    fn tiles(&self, tokens: &Range<u32>) -> Range<u32> {
        tokens.start / self.tile..tokens.end.div_ceil(self.tile)
    }

    fn tile_bytes(&self) -> u64 {
        self.fragments.last().map_or(0, |last| last.before + last.bytes)
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
