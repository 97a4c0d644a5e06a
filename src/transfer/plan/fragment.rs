//! The fragments of one tile and their order in a stream. A fragment is contiguous on both sides.
//! They are computed once per session.

use crate::ids::PageId;
use crate::kv::layout::{KeyValue, KvLayout};
use std::ops::Range;

/// A contiguous piece of a tile, as offsets from the tile's first token in either page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fragment {
    pub source: u64,
    pub destination: u64,
    pub bytes: u64,
    /// Bytes of the tile's fragments before this one.
    pub before: u64,
}

/// Order in which a stream visits fragments and tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// All tiles of a fragment, then the next fragment: adjacent tiles become one run.
    FragmentByFragment,
    /// All fragments of a tile, then the next tile: fragments that are adjacent only at the
    /// destination are gathered into one write.
    TileByTile,
}

impl Order {
    pub(super) fn of(fragments: &[Fragment]) -> Order {
        let touches =
            |pair: &[Fragment]| pair[0].destination + pair[0].bytes == pair[1].destination;
        if fragments.windows(2).any(touches) {
            Order::TileByTile
        } else {
            Order::FragmentByFragment
        }
    }
}

/// The fragments of a tile of `tile` tokens, in the order of the destination's memory.
pub(super) fn of_tile(
    source: &KvLayout,
    destination: &KvLayout,
    layers: Range<u32>,
    tile: u32,
) -> Vec<Fragment> {
    let mut pieces = Vec::new();
    for rank in 0..destination.ranks {
        for head in destination.heads_of(rank) {
            let holder = source.holder(head);
            for layer in layers.clone() {
                for which in [KeyValue::Key, KeyValue::Value] {
                    for token in 0..tile {
                        let at = |layout: &KvLayout, rank: u32| {
                            let own = head - layout.heads_of(rank).start;
                            u64::from(rank) * layout.rank_stride
                                + layout.offset(PageId(0), layer, which, own, token)
                        };
                        pieces.push((at(destination, rank), at(source, holder)));
                    }
                }
            }
        }
    }
    // In this order, pieces that are adjacent on both sides follow each other, for all strides.
    pieces.sort_unstable();
    let bytes = u64::from(source.head_dim) * source.dtype.bytes();
    let mut fragments: Vec<Fragment> = Vec::new();
    for (destination, source) in pieces {
        match fragments.last_mut() {
            Some(last)
                if last.source + last.bytes == source
                    && last.destination + last.bytes == destination =>
            {
                last.bytes += bytes;
            }
            last => {
                let before = last.map_or(0, |last| last.before + last.bytes);
                fragments.push(Fragment { source, destination, bytes, before });
            }
        }
    }
    fragments
}
