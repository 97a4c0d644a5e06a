//! Groups of layers that need the same tokens. A page has the layers of one group, so that pages of
//! window layers can go back before those of full layers.
//!
//! Arithmetic only. All groups have equally many layers, so all pages are equal and one pool serves
//! them. The last group of a kind can have places without a layer.

use crate::kv::window::KvWindow;

/// Most groups of a model. Each request has a list of pages for each group.
const GROUPS_MAX: usize = 16;
/// A pool can have one place without a layer for so many layers: an eighth of its memory.
const LAYERS_PER_EMPTY_PLACE: usize = 7;

/// The place of a layer's keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerPlace {
    /// The group that the layer's pages belong to.
    pub group: usize,
    /// The index of the layer on such a page.
    pub layer: u32,
}

/// How many groups of each kind a model has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupCounts {
    /// Groups in which a token sees all tokens. They come first.
    pub full: u32,
    /// Groups with a window.
    pub windowed: u32,
    /// Tokens that a token sees in a window group, its own included; `None` without such groups.
    pub window: Option<u32>,
}

impl GroupCounts {
    /// One group in which a token sees all tokens.
    pub const FULL: GroupCounts = GroupCounts { full: 1, windowed: 0, window: None };

    /// One group with a window of `tokens` tokens.
    pub const fn windowed(tokens: u32) -> GroupCounts {
        GroupCounts { full: 0, windowed: 1, window: Some(tokens) }
    }

    /// Number of groups.
    pub const fn total(self) -> usize {
        debug_assert!(self.full + self.windowed > 0, "a model has layers");
        debug_assert!((self.windowed > 0) == self.window.is_some(), "window groups have a window");
        (self.full + self.windowed) as usize
    }

    /// Pages of a prompt of `tokens` tokens that cross to a destination. It has the first `prefix`
    /// tokens, whole pages. If there are groups of both kinds, it wants the last window of window
    /// groups. A single group crosses behind its prefix, which covers the pages that no token sees.
    pub fn crossing_pages(self, tokens: u32, prefix: u32, page_size: u32) -> u64 {
        let (pages, first) = (tokens.div_ceil(page_size), prefix / page_size);
        if self.total() == 1 {
            return u64::from(pages - first);
        }
        let behind = KvWindow::new(self.window, page_size).pages_behind(tokens);
        u64::from(self.full) * u64::from(pages - first)
            + u64::from(self.windowed) * u64::from(pages - behind.max(first))
    }

    /// Pages of all groups, if each full group and each window group has this number.
    pub const fn pages(self, of_full: u32, of_windowed: u32) -> u32 {
        self.full * of_full + self.windowed * of_windowed
    }

    /// Tokens that a pool of `pages` pages holds, if each group has the same number of pages.
    pub const fn pool_tokens(self, pages: u32, page_size: u32) -> u64 {
        (pages as usize / self.total()) as u64 * page_size as u64
    }
}

/// The groups of a model's layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvGroups {
    layers: u32,
    counts: GroupCounts,
    /// By layer.
    places: Vec<LayerPlace>,
}

impl KvGroups {
    /// One group of all `layers` layers, in which a token sees `window` tokens; `None`: all.
    pub fn single(layers: usize, window: Option<u32>) -> KvGroups {
        let place = |layer| LayerPlace { group: 0, layer: layer as u32 };
        KvGroups {
            layers: layers as u32,
            counts: window.map_or(GroupCounts::FULL, GroupCounts::windowed),
            places: (0..layers).map(place).collect(),
        }
    }

    /// The groups of layers with these windows, in order of the layers. A model has at most one
    /// width of windows. Groups are as large as the empty places permit. If there would be too many
    /// groups, all layers are in one, and a token sees all tokens there.
    pub fn of(windows: &[Option<u32>]) -> KvGroups {
        let window = windows.iter().copied().flatten().max();
        debug_assert!(windows.iter().flatten().all(|&one| Some(one) == window), "one width");
        let windowed = windows.iter().flatten().count();
        let full = windows.len() - windowed;
        if windowed == 0 || full == 0 {
            return KvGroups::single(windows.len(), window);
        }
        let groups = |size: usize| [full.div_ceil(size), windowed.div_ceil(size)];
        let fits = |size: &usize| {
            let empty = groups(*size).iter().sum::<usize>() * size - windows.len();
            empty * LAYERS_PER_EMPTY_PLACE <= windows.len()
        };
        let size = (1..=full.min(windowed)).rev().find(fits).expect("groups of one layer fit");
        let [full_groups, window_groups] = groups(size);
        if full_groups + window_groups > GROUPS_MAX {
            return KvGroups::single(windows.len(), None);
        }
        let mut next = [0, full_groups * size];
        let place = |window: &Option<u32>| {
            let at = &mut next[usize::from(window.is_some())];
            *at += 1;
            LayerPlace { group: (*at - 1) / size, layer: ((*at - 1) % size) as u32 }
        };
        KvGroups {
            layers: size as u32,
            counts: GroupCounts {
                full: full_groups as u32,
                windowed: window_groups as u32,
                window,
            },
            places: windows.iter().map(place).collect(),
        }
    }

    /// How many groups of each kind there are.
    pub fn counts(&self) -> GroupCounts {
        self.counts
    }

    /// Layers of a page.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The place of a layer.
    pub fn place(&self, layer: usize) -> LayerPlace {
        self.places[layer]
    }

    /// The places of all layers, in order of the layers.
    pub fn places(&self) -> &[LayerPlace] {
        &self.places
    }

    /// The layer with this place; `None`: the place is empty.
    pub fn layer_at(&self, place: LayerPlace) -> Option<usize> {
        self.places.iter().position(|&other| other == place)
    }

    /// How many layers the model has.
    pub fn model_layers(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers of which each `period`-th one is full, as in Gemma 3.
    fn periodic(layers: usize, period: usize) -> Vec<Option<u32>> {
        (1..=layers).map(|layer| (!layer.is_multiple_of(period)).then_some(512)).collect()
    }

    #[test]
    fn each_layer_has_a_place_of_its_own_in_a_group_with_its_window() {
        for (layers, period) in
            [(1, 6), (5, 6), (6, 6), (18, 6), (26, 6), (34, 6), (48, 6), (62, 6), (7, 2)]
        {
            let windows = periodic(layers, period);
            let groups = KvGroups::of(&windows);
            let places: Vec<_> = (0..layers).map(|layer| groups.place(layer)).collect();
            for (layer, place) in places.iter().enumerate() {
                assert!(place.layer < groups.layers() && place.group < groups.counts.total());
                let is_windowed = place.group >= groups.counts.full as usize;
                assert_eq!(groups.counts.window.filter(|_| is_windowed), windows[layer]);
                assert!(!places[..layer].contains(place), "two layers at {place:?}");
            }
            let empty = groups.counts.total() * groups.layers() as usize - layers;
            assert!(empty * LAYERS_PER_EMPTY_PLACE <= layers, "{empty} of {layers}");
        }
    }

    #[test]
    fn groups_are_as_large_as_the_layers_of_gemma_permit() {
        let shape = |layers| {
            let groups = KvGroups::of(&periodic(layers, 6));
            (groups.layers(), groups.counts.total())
        };
        // Gemma 3 with 270M, 1B, 4B, 12B and 27B weights.
        assert_eq!([18, 26, 34, 48, 62].map(shape), [(3, 6), (4, 7), (5, 7), (8, 6), (10, 7)]);
    }

    #[test]
    fn the_last_window_of_window_groups_crosses() {
        let counts = GroupCounts { full: 1, windowed: 6, window: Some(512) };
        assert_eq!(counts.crossing_pages(512, 0, 16), 32 + 6 * 32);
        assert_eq!(counts.crossing_pages(1600, 0, 16), 100 + 6 * 32);
        // The prefix is in the last window, too.
        assert_eq!(counts.crossing_pages(1600, 1584, 16), 1 + 6);
        assert_eq!(counts.crossing_pages(1600, 1024, 16), 36 + 6 * 32);
        let single = GroupCounts::windowed(512);
        assert_eq!(single.crossing_pages(1600, 1024, 16), 36);
        // A peer can name any numbers.
        assert_eq!(counts.crossing_pages(u32::MAX, 0, 1), (1 << 32) - 1 + 6 * 512);
        assert_eq!((counts.pool_tokens(100, 16), single.pool_tokens(100, 16)), (224, 1600));
    }

    #[test]
    fn too_many_groups_become_one_without_a_window() {
        let mut windows = vec![Some(9); 40];
        windows[0] = None;
        assert_eq!(KvGroups::of(&windows), KvGroups::single(40, None));
        assert_eq!(KvGroups::of(&[Some(9); 4]), KvGroups::single(4, Some(9)));
        assert_eq!(KvGroups::of(&[None; 4]), KvGroups::single(4, None));
    }
}
