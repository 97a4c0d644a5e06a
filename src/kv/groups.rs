//! Groups of layers that need the same tokens. A page has the layers of one group, so that pages of
//! window layers can go back before those of full layers. Recurrent state has pages of its own.
//!
//! Arithmetic only. All groups have equally many layers, so all pages are equal and one pool serves
//! them. The last group of a kind can have places without a layer.

use crate::kv::state_layout::StateLayout;
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

/// How many groups of each kind a model has, and how many pages of state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupCounts {
    /// Groups in which a token sees all tokens. They come first.
    pub full: u32,
    /// Groups with a window.
    pub windowed: u32,
    /// Tokens that a token sees in a window group, its own included; `None` without such groups.
    pub window: Option<u32>,
    /// Pages of a sequence's recurrent state, whatever its length.
    pub state_pages: u32,
}

impl GroupCounts {
    /// One group in which a token sees all tokens.
    pub const FULL: GroupCounts =
        GroupCounts { full: 1, windowed: 0, window: None, state_pages: 0 };

    /// One group with a window of `tokens` tokens.
    pub const fn windowed(tokens: u32) -> GroupCounts {
        GroupCounts { full: 0, windowed: 1, window: Some(tokens), state_pages: 0 }
    }

    /// Number of groups.
    pub const fn total(self) -> usize {
        debug_assert!(self.full + self.windowed + self.state_pages > 0, "a sequence has pages");
        debug_assert!((self.windowed > 0) == self.window.is_some(), "window groups have a window");
        (self.full + self.windowed) as usize
    }

    /// Whether there is one group and no state, so that pages are in order of the tokens.
    pub const fn is_single(self) -> bool {
        self.total() == 1 && self.state_pages == 0
    }

    /// Pages of a prompt of `tokens` tokens that cross to a destination. It has the first `prefix`
    /// tokens, whole pages. If there are several groups, it wants the last window of window groups.
    /// A single group crosses behind its prefix, which covers the pages that no token sees. State
    /// crosses as a whole.
    pub fn crossing_pages(self, tokens: u32, prefix: u32, page_size: u32) -> u64 {
        let (pages, first) = (tokens.div_ceil(page_size), prefix / page_size);
        if self.is_single() {
            return u64::from(pages - first);
        }
        let behind = KvWindow::new(self.window, page_size).pages_behind(tokens);
        u64::from(self.full) * u64::from(pages - first)
            + u64::from(self.windowed) * u64::from(pages - behind.max(first))
            + u64::from(self.state_pages)
    }

    /// Pages of a request, if each full group and each window group has this number.
    pub const fn pages(self, of_full: u32, of_windowed: u32) -> u32 {
        self.full * of_full + self.windowed * of_windowed + self.state_pages
    }

    /// Most tokens of a sequence that has all `pages` pages of a pool.
    pub fn sequence_tokens(self, pages: u32, page_size: u32) -> u64 {
        match (pages.checked_sub(self.state_pages), self.total() as u32) {
            (None, _) => 0,
            (Some(_), 0) => u64::MAX,
            (Some(left), groups) => u64::from(left / groups) * u64::from(page_size),
        }
    }

    /// Tokens that the sequences of a pool of `pages` pages hold together, without their state.
    /// Without groups, a sequence of `context` tokens takes its state pages only.
    pub fn pool_tokens(self, pages: u32, page_size: u32, context: u32) -> u64 {
        match self.total() as u32 {
            0 => u64::from(pages / self.state_pages) * u64::from(context),
            groups => u64::from(pages / groups) * u64::from(page_size),
        }
    }
}

/// The groups of a model's layers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvGroups {
    layers: u32,
    counts: GroupCounts,
    /// By layer; `None`: it has no keys and values.
    places: Vec<Option<LayerPlace>>,
    state: Option<StateLayout>,
}

impl KvGroups {
    /// One group of all `layers` layers, in which a token sees `window` tokens; `None`: all.
    pub fn single(layers: usize, window: Option<u32>) -> KvGroups {
        let place = |layer| Some(LayerPlace { group: 0, layer: layer as u32 });
        KvGroups {
            layers: layers as u32,
            counts: window.map_or(GroupCounts::FULL, GroupCounts::windowed),
            places: (0..layers).map(place).collect(),
            state: None,
        }
    }

    /// The same groups, beside recurrent state.
    pub fn with_state(mut self, state: StateLayout) -> KvGroups {
        (self.counts.state_pages, self.state) = (state.pages(), Some(state));
        self
    }

    /// The same groups, in a model that has other layers, without keys and values, among these.
    pub fn among(mut self, has_kv: &[bool]) -> KvGroups {
        let mut places = self.places.into_iter();
        let place = |&has_kv: &bool| if has_kv { places.next().flatten() } else { None };
        self.places = has_kv.iter().map(place).collect();
        self
    }

    /// No group: none of the `layers` layers has keys and values, and all have state.
    pub fn of_state(layers: usize, state: StateLayout) -> KvGroups {
        let state_pages = state.pages();
        KvGroups {
            layers: state.shape().layers,
            counts: GroupCounts { full: 0, windowed: 0, window: None, state_pages },
            places: vec![None; layers],
            state: Some(state),
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
            Some(LayerPlace { group: (*at - 1) / size, layer: ((*at - 1) % size) as u32 })
        };
        KvGroups {
            layers: size as u32,
            counts: GroupCounts {
                full: full_groups as u32,
                windowed: window_groups as u32,
                window,
                state_pages: 0,
            },
            places: windows.iter().map(place).collect(),
            state: None,
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

    /// The place of a layer; `None`: it has no keys and values.
    pub fn place(&self, layer: usize) -> Option<LayerPlace> {
        self.places[layer]
    }

    /// The places of all layers with keys and values, in order of the layers.
    pub fn places(&self) -> impl Iterator<Item = LayerPlace> {
        self.places.iter().copied().flatten()
    }

    /// The division of recurrent state, if the model has any.
    pub fn state(&self) -> Option<&StateLayout> {
        self.state.as_ref()
    }

    /// The layer with this place; `None`: the place is empty.
    pub fn layer_at(&self, place: LayerPlace) -> Option<usize> {
        self.places.iter().position(|&other| other == Some(place))
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
            let places: Vec<_> = (0..layers).map(|layer| groups.place(layer).unwrap()).collect();
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
    fn layers_without_keys_and_values_have_no_place() {
        let groups = KvGroups::of(&[None; 2]).among(&[false, true, false, true]);
        let places: Vec<_> = (0..4).map(|layer| groups.place(layer)).collect();
        let at = |layer| Some(LayerPlace { group: 0, layer });
        assert_eq!(places, [None, at(0), None, at(1)]);
        assert_eq!((groups.model_layers(), groups.layers()), (4, 2));
        assert_eq!(groups.layer_at(LayerPlace { group: 0, layer: 1 }), Some(3));
    }

    #[test]
    fn the_last_window_of_window_groups_crosses() {
        let counts = GroupCounts { full: 1, windowed: 6, window: Some(512), state_pages: 0 };
        assert_eq!(counts.crossing_pages(512, 0, 16), 32 + 6 * 32);
        assert_eq!(counts.crossing_pages(1600, 0, 16), 100 + 6 * 32);
        // The prefix is in the last window, too.
        assert_eq!(counts.crossing_pages(1600, 1584, 16), 1 + 6);
        assert_eq!(counts.crossing_pages(1600, 1024, 16), 36 + 6 * 32);
        let single = GroupCounts::windowed(512);
        assert_eq!(single.crossing_pages(1600, 1024, 16), 36);
        // A peer can name any numbers.
        assert_eq!(counts.crossing_pages(u32::MAX, 0, 1), (1 << 32) - 1 + 6 * 512);
        let tokens = |counts: GroupCounts| counts.pool_tokens(100, 16, 1000);
        assert_eq!((tokens(counts), tokens(single)), (224, 1600));
        let hybrid = GroupCounts { state_pages: 3, ..GroupCounts::FULL };
        assert_eq!(hybrid.crossing_pages(1600, 1024, 16), 36 + 3);
        let recurrent = GroupCounts { full: 0, ..hybrid };
        assert_eq!((recurrent.crossing_pages(1600, 0, 1), tokens(recurrent)), (3, 33_000));
        let longest = |counts: GroupCounts, pages| counts.sequence_tokens(pages, 16);
        assert_eq!((longest(hybrid, 10), longest(hybrid, 2)), (7 * 16, 0));
        assert_eq!((longest(recurrent, 3), longest(recurrent, 2)), (u64::MAX, 0));
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
