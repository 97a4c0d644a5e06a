//! Walks along the stream of a [`Template`], over runs or over the pieces of one side. A walk keeps
//! no state for the next one and does not allocate.

use super::fragment::{Fragment, Order};
use super::{Paging, Piece, Run, Template};
use crate::ids::PageId;
use std::ops::Range;

/// A position in a stream. A walk that begins in the middle of a stream searches the fragment of
/// its first byte.
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
        let left = bytes.end.min(template.bytes(tokens.clone())).saturating_sub(bytes.start);
        let Template { fragments, order, .. } = template;
        let last_begun = |begun: &dyn Fn(&Fragment) -> bool| {
            let fragment = fragments.partition_point(begun).saturating_sub(1);
            (fragment, fragments.get(fragment).map_or((0, 1), |found| (found.before, found.bytes)))
        };
        let (fragment, tile, within) = match order {
            Order::FragmentByFragment => {
                let (fragment, (before, length)) =
                    last_begun(&|fragment| fragment.before * count <= bytes.start);
                let inside = bytes.start - before * count;
                (fragment, inside / length, inside % length)
            }
            Order::TileByTile => {
                let tile_bytes = template.tile_bytes();
                let inside = bytes.start % tile_bytes;
                let (fragment, (before, _)) = last_begun(&|fragment| fragment.before <= inside);
                (fragment, bytes.start / tile_bytes, inside - before)
            }
        };
        Place { tile: tiles.start + tile as u32, tiles, fragment, within, left }
    }

    /// The current fragment and the bytes of it that the walk takes; None at the end of the walk.
    #[inline]
    fn stretch<'a>(&self, template: &'a Template) -> Option<(&'a Fragment, u64)> {
        if self.left == 0 {
            return None;
        }
        let fragment = &template.fragments[self.fragment];
        Some((fragment, (fragment.bytes - self.within).min(self.left)))
    }

    /// Advances by the result of [`Place::stretch`].
    #[inline]
    fn advance(&mut self, template: &Template, fragment: &Fragment, bytes: u64) {
        self.left -= bytes;
        self.within += bytes;
        if self.within != fragment.bytes {
            return;
        }
        self.within = 0;
        match template.order {
            Order::FragmentByFragment => {
                self.tile += 1;
                if self.tile == self.tiles.end {
                    self.tile = self.tiles.start;
                    self.fragment += 1;
                }
            }
            Order::TileByTile => {
                self.fragment += 1;
                if self.fragment == template.fragments.len() {
                    self.fragment = 0;
                    self.tile += 1;
                }
            }
        }
    }
}

/// Walks a part of a stream on one side; adjacent pieces are merged.
#[derive(Debug)]
pub struct Pieces<'a, P> {
    template: &'a Template,
    paging: &'a Paging,
    offset: fn(&Fragment) -> u64,
    page: P,
    place: Place,
    /// The next piece, which is not adjacent to the one before.
    ahead: Option<Piece>,
}

impl<'a, P: Fn(usize) -> PageId> Pieces<'a, P> {
    pub(super) fn new(
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
        let at = self.paging.address(self.place.tile, &self.page)
            + (self.offset)(fragment)
            + self.place.within;
        self.place.advance(self.template, fragment, bytes);
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

/// Walks a part of a stream on both sides at once; pieces adjacent on both sides are merged.
#[derive(Debug)]
pub struct Runs<'a, S, D> {
    template: &'a Template,
    source_page: S,
    destination_page: D,
    place: Place,
    /// The next run, which is not adjacent to the one before; zero bytes at the end.
    ahead: Run,
}

impl<'a, S: Fn(usize) -> PageId, D: Fn(usize) -> PageId> Runs<'a, S, D> {
    pub(super) fn new(
        template: &'a Template,
        tokens: Range<u32>,
        bytes: Range<u64>,
        source_page: S,
        destination_page: D,
    ) -> Runs<'a, S, D> {
        let place = Place::find(template, &tokens, &bytes);
        let none = Run { source: 0, destination: 0, bytes: 0 };
        let mut runs = Runs { template, source_page, destination_page, place, ahead: none };
        runs.ahead = runs.step();
        runs
    }

    /// The run at the current place; zero bytes at the end.
    // Inlined to keep the numbers in registers. In memory they would be written in 8-byte and read
    // in 16-byte units, which takes as long as the rest of the walk.
    #[inline(always)]
    fn step(&mut self) -> Run {
        let Template { source, destination, .. } = self.template;
        let Some((fragment, bytes)) = self.place.stretch(self.template) else {
            return Run { source: 0, destination: 0, bytes: 0 };
        };
        let (tile, within) = (self.place.tile, self.place.within);
        let run = Run {
            source: source.address(tile, &self.source_page) + fragment.source + within,
            destination: destination.address(tile, &self.destination_page)
                + fragment.destination
                + within,
            bytes,
        };
        self.place.advance(self.template, fragment, bytes);
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
            let is_neighbour =
                next.source == source + bytes && next.destination == destination + bytes;
            if next.bytes == 0 || !is_neighbour {
                self.ahead = next;
                return Some(Run { source, destination, bytes });
            }
            bytes += next.bytes;
        }
    }
}
