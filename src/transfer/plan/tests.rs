//! Compares the planner with a simple, slow one.

use super::*;
use crate::kv::layout::{KeyValue, KvDtype};
use proptest::prelude::*;

const PAGES: u32 = 24;
/// Unused bytes between the regions of two ranks.
const GAP: u64 = 24;

/// Two workers of one model, and the part of a request's KV to move.
#[derive(Clone, Debug)]
struct Pair {
    from: KvLayout,
    to: KvLayout,
    from_pages: Vec<PageId>,
    to_pages: Vec<PageId>,
    tokens: Range<u32>,
    layers: Range<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
}

fn layout(layer_major: bool, page_size: u32, ranks: u32, shape: Shape) -> KvLayout {
    let Shape { layers, kv_heads, head_dim } = shape;
    let held = KvLayout::heads_per_rank(kv_heads, ranks).expect("even");
    let rank = if layer_major {
        KvLayout::layer_major(page_size, layers, held, head_dim, KvDtype::F16, PAGES)
    } else {
        KvLayout::page_major(page_size, layers, held, head_dim, KvDtype::F16)
    };
    rank.on_ranks(ranks, u64::from(PAGES) * rank.page_bytes() + GAP, kv_heads).expect("even")
}

fn region_bytes(layout: &KvLayout) -> usize {
    (u64::from(layout.ranks) * layout.rank_stride) as usize
}

fn shuffled(seed: u64) -> Vec<PageId> {
    let mut pages: Vec<PageId> = (0..PAGES).map(PageId).collect();
    let mut state = seed | 1;
    for i in (1..pages.len()).rev() {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pages.swap(i, (state >> 33) as usize % (i + 1));
    }
    pages
}

/// Numbers of ranks that divide `kv_heads` evenly.
fn ranks(kv_heads: u32) -> impl Strategy<Value = u32> {
    let even: Vec<u32> =
        (1..=8).filter(|&n| KvLayout::heads_per_rank(kv_heads, n).is_some()).collect();
    prop::sample::select(even)
}

prop_compose! {
    fn pairs()(shape in (1u32..4, 1u32..7, 1u32..4))(
        shape in Just(shape),
        kinds in any::<(bool, bool)>(),
        sizes in (0u32..4, prop_oneof![(0u32..4).prop_map(|power| 1 << power), Just(6u32)]),
        ranks in (ranks(shape.1), ranks(shape.1)),
        layers in (0..shape.0, 1..=shape.0),
        length in 1u32..PAGES,
        prefix_tiles in 0u32..3,
        seed in any::<u64>(),
        scattered in any::<bool>(),
    ) -> Pair {
        let shape = Shape { layers: shape.0, kv_heads: shape.1, head_dim: shape.2 };
        let from = layout(kinds.0, 1 << sizes.0, ranks.0, shape);
        let to = layout(kinds.1, sizes.1, ranks.1, shape);
        let pages = |salt: u64| if scattered {
            shuffled(seed ^ salt)
        } else {
            (0..PAGES).map(PageId).collect()
        };
        let tile = gcd(from.page_size, to.page_size);
        Pair {
            from,
            to,
            from_pages: pages(1),
            to_pages: pages(2),
            tokens: (prefix_tiles * tile).min(length / tile * tile)..length,
            layers: layers.0.min(layers.1)..layers.0.max(layers.1),
        }
    }
}

impl Pair {
    fn template(&self) -> Template {
        Template::of_layers(&self.from, &self.to, self.layers.clone()).expect("they hold the same")
    }

    fn source_page(&self) -> impl Fn(usize) -> PageId + Copy {
        |index| self.from_pages[index]
    }

    fn destination_page(&self) -> impl Fn(usize) -> PageId + Copy {
        |index| self.to_pages[index]
    }

    /// The simple, slow planner: head by head, for each rank that holds it.
    fn copy_by_head(&self, source: &[u8], destination: &mut [u8]) {
        let tile = gcd(self.from.page_size, self.to.page_size);
        let bytes = (u64::from(self.from.head_dim) * self.from.dtype.bytes()) as usize;
        // Whole tiles move.
        for token in self.tokens.start..self.tokens.end.next_multiple_of(tile) {
            for layer in self.layers.clone() {
                for which in [KeyValue::Key, KeyValue::Value] {
                    for to_rank in 0..self.to.ranks {
                        for head in self.to.heads_of(to_rank) {
                            let holds = |rank: &u32| self.from.heads_of(*rank).contains(&head);
                            let from_rank =
                                (0..self.from.ranks).find(holds).expect("a rank holds it");
                            let at = |layout: &KvLayout, rank: u32, pages: &[PageId]| {
                                let page = pages[(token / layout.page_size) as usize];
                                let own = head - layout.heads_of(rank).start;
                                let inside = layout.offset(
                                    page,
                                    layer,
                                    which,
                                    own,
                                    token % layout.page_size,
                                );
                                (u64::from(rank) * layout.rank_stride + inside) as usize
                            };
                            let a = at(&self.from, from_rank, &self.from_pages);
                            let b = at(&self.to, to_rank, &self.to_pages);
                            destination[b..b + bytes].copy_from_slice(&source[a..a + bytes]);
                        }
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn moves_exactly_the_bytes_of_the_obvious_planner(pair in pairs()) {
        let template = pair.template();
        let source: Vec<u8> =
            (0..region_bytes(&pair.from)).map(|i| (i * 31 + i / 251) as u8).collect();
        let (mut moved, mut expected) =
            (vec![0u8; region_bytes(&pair.to)], vec![0u8; region_bytes(&pair.to)]);
        let mut total = 0;
        let runs =
            template.all_runs(pair.tokens.clone(), pair.source_page(), pair.destination_page());
        let mut before: Option<Run> = None;
        for run in runs {
            let (a, b, n) = (run.source as usize, run.destination as usize, run.bytes as usize);
            moved[b..b + n].copy_from_slice(&source[a..a + n]);
            total += run.bytes;
            let touches = |last: Run| (last.source + last.bytes, last.destination + last.bytes)
                == (run.source, run.destination);
            prop_assert!(
                !before.is_some_and(touches),
                "two runs that are one: {:?}, {:?}",
                before,
                run
            );
            before = Some(run);
        }
        pair.copy_by_head(&source, &mut expected);
        prop_assert_eq!(total, template.bytes(pair.tokens.clone()));
        prop_assert_eq!(moved, expected);
    }

    #[test]
    fn both_sides_of_a_stream_walk_the_runs_in_any_parts(pair in pairs(), part in 1u64..500) {
        let (template, tokens) = (pair.template(), pair.tokens.clone());
        let (source_page, destination_page) = (pair.source_page(), pair.destination_page());
        let (mut source, mut destination) = (Vec::new(), Vec::new());
        for run in template.all_runs(tokens.clone(), source_page, destination_page) {
            source.extend(run.source..run.source + run.bytes);
            destination.extend(run.destination..run.destination + run.bytes);
        }
        let (mut sent, mut landed) = (Vec::new(), Vec::new());
        let (mut read, mut written) = (Vec::new(), Vec::new());
        let total = template.bytes(tokens.clone());
        for start in (0..total).step_by(part as usize) {
            let bytes = start..(start + part).min(total);
            let pieces = template.source_pieces(tokens.clone(), bytes.clone(), source_page);
            sent.extend(pieces.flat_map(|piece| piece.at..piece.at + piece.bytes));
            let pieces =
                template.destination_pieces(tokens.clone(), bytes.clone(), destination_page);
            landed.extend(pieces.flat_map(|piece| piece.at..piece.at + piece.bytes));
            for run in template.runs(tokens.clone(), bytes, source_page, destination_page) {
                read.extend(run.source..run.source + run.bytes);
                written.extend(run.destination..run.destination + run.bytes);
            }
        }
        prop_assert_eq!(&sent, &source);
        prop_assert_eq!(&landed, &destination);
        prop_assert_eq!(read, source);
        prop_assert_eq!(written, destination);
    }

    #[test]
    fn layers_in_groups_are_all_layers(pair in pairs(), cut in 0u32..4) {
        let cut = cut.min(pair.from.layers);
        let flat = |template: &Template| -> Vec<(u64, u64)> {
            let runs =
                template.all_runs(pair.tokens.clone(), pair.source_page(), pair.destination_page());
            runs.flat_map(|run| {
                (0..run.bytes).map(move |at| (run.source + at, run.destination + at))
            })
            .collect()
        };
        let of = |layers| flat(&Template::of_layers(&pair.from, &pair.to, layers).unwrap());
        let (mut groups, mut all) = (of(0..cut), of(0..pair.from.layers));
        groups.extend(of(cut..pair.from.layers));
        groups.sort_unstable();
        all.sort_unstable();
        prop_assert_eq!(groups, all);
    }
}

/// State of a model on one side, in the engine's layout: slot by slot, or one tensor of all slots
/// per layer.
#[derive(Clone, Copy, Debug)]
struct StatePool {
    by_layer: bool,
    ranks: u32,
    shape: StateShape,
}

#[derive(Clone, Copy, Debug)]
struct StateShape {
    layers: u32,
    heads: u32,
    /// Elements of a head in a layer.
    elements: u32,
    dtype: KvDtype,
}

impl StatePool {
    fn held(&self) -> u32 {
        KvLayout::heads_per_rank(self.shape.heads, self.ranks).expect("even")
    }

    fn head_bytes(&self) -> u64 {
        u64::from(self.shape.elements) * self.shape.dtype.bytes()
    }

    fn rank_bytes(&self) -> u64 {
        u64::from(PAGES * self.shape.layers * self.held()) * self.head_bytes()
    }

    fn layout(&self) -> KvLayout {
        let StateShape { layers, elements, dtype, heads } = self.shape;
        let by_slot = KvLayout::state_slots(layers, self.held(), elements, dtype).expect("halves");
        let page_stride = u64::from(self.held()) * self.head_bytes();
        let layer_stride = u64::from(PAGES) * page_stride;
        let rank =
            if self.by_layer { KvLayout { page_stride, layer_stride, ..by_slot } } else { by_slot };
        rank.on_ranks(self.ranks, self.rank_bytes() + GAP, heads).expect("even")
    }

    /// Offset of a model's head on a rank, counted without the layout; None if it is not there.
    fn at(&self, rank: u32, slot: PageId, layer: u32, head: u32) -> Option<usize> {
        let (heads, held) = (self.shape.heads, self.held());
        // With more ranks than heads, neighbouring ranks hold the same head.
        let first = if self.ranks <= heads { rank * held } else { rank / (self.ranks / heads) };
        let own = head.checked_sub(first).filter(|&own| own < held)?;
        let record =
            if self.by_layer { layer * PAGES + slot.0 } else { slot.0 * self.shape.layers + layer };
        let inside = u64::from(record * held + own) * self.head_bytes();
        Some((u64::from(rank) * (self.rank_bytes() + GAP) + inside) as usize)
    }
}

prop_compose! {
    fn state_pools()(shape in (1u32..4, 1u32..7, 1u32..5, any::<bool>()))(
        shape in Just(shape),
        by_layer in any::<(bool, bool)>(),
        ranks in (ranks(shape.1), ranks(shape.1)),
    ) -> (StatePool, StatePool) {
        let dtype = if shape.3 { KvDtype::F32 } else { KvDtype::Bf16 };
        let shape = StateShape { layers: shape.0, heads: shape.1, elements: 2 * shape.2, dtype };
        let pool = |by_layer, ranks| StatePool { by_layer, ranks, shape };
        (pool(by_layer.0, ranks.0), pool(by_layer.1, ranks.1))
    }
}

proptest! {
    /// One slot is one page index. Between any numbers of ranks each head goes to all ranks that
    /// hold it, and nothing else moves.
    #[test]
    fn a_state_slot_is_a_page(
        (from, to) in state_pools(),
        slots in (0..PAGES, 0..PAGES),
        layers in (0u32..4, 0u32..4),
    ) {
        let layers = layers.0.min(layers.1).min(from.shape.layers)
            ..layers.0.max(layers.1).min(from.shape.layers);
        let (source_slot, slot) = (PageId(slots.0), PageId(slots.1));
        let template =
            Template::of_layers(&from.layout(), &to.layout(), layers.clone()).expect("alike");
        let source: Vec<u8> =
            (0..region_bytes(&from.layout())).map(|i| (i * 31 + i / 251) as u8 | 1).collect();
        let mut moved = vec![0u8; region_bytes(&to.layout())];
        let mut expected = moved.clone();
        for run in template.all_runs(0..1, |_| source_slot, |_| slot) {
            let (a, b, n) = (run.source as usize, run.destination as usize, run.bytes as usize);
            moved[b..b + n].copy_from_slice(&source[a..a + n]);
        }
        let n = from.head_bytes() as usize;
        for (layer, head) in
            layers.flat_map(|layer| (0..from.shape.heads).map(move |head| (layer, head)))
        {
            let held = |rank| from.at(rank, source_slot, layer, head);
            let a = (0..from.ranks).find_map(held).expect("a rank holds it");
            for b in (0..to.ranks).filter_map(|rank| to.at(rank, slot, layer, head)) {
                expected[b..b + n].copy_from_slice(&source[a..a + n]);
            }
        }
        prop_assert_eq!(moved, expected);
    }
}

#[test]
fn a_whole_state_slot_is_one_run() {
    let slots = KvLayout::state_slots(24, 16, 64 * 128, KvDtype::F32).unwrap();
    let template = Template::new(&slots, &slots).unwrap();
    let runs: Vec<Run> = template.all_runs(0..1, |_| PageId(3), |_| PageId(5)).collect();
    let bytes = 24 * 16 * 64 * 128 * 4;
    assert_eq!(runs, [Run { source: 3 * bytes, destination: 5 * bytes, bytes }]);
    assert_eq!((slots.page_bytes(), slots.page_stride), (bytes, bytes));
    assert_eq!(KvLayout::state_slots(24, 16, 3, KvDtype::F32), None);
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

/// Runs of a request of four pages, which are not adjacent.
fn runs_of(source: &KvLayout, destination: &KvLayout) -> Vec<Run> {
    let template = Template::new(source, destination).unwrap();
    let (from, to) = ([7, 2, 5, 0].map(PageId), [1, 6, 3, 8].map(PageId));
    template.all_runs(0..4 * source.page_size, |i| from[i], |i| to[i]).collect()
}

#[test]
fn runs_into_one_stretch_of_the_destination_are_adjacent() {
    let shape = Shape { layers: 5, kv_heads: 4, head_dim: 8 };
    let stretches = |runs: &[Run]| {
        let apart = |pair: &&[Run]| pair[0].destination + pair[0].bytes != pair[1].destination;
        runs.windows(2).filter(apart).count() + 1
    };
    // From layers to pages: a page is gathered from the blocks of its layers.
    let (theirs, ours) = (layout(true, 1, 1, shape), layout(false, 1, 1, shape));
    let runs = runs_of(&theirs, &ours);
    assert_eq!((runs.len(), stretches(&runs)), (4 * 5 * 2, 4));
    // In the other direction there is nothing to gather.
    let runs = runs_of(&ours, &theirs);
    assert_eq!((runs.len(), stretches(&runs)), (4 * 5 * 2, 4 * 5 * 2));
    // Heads of two ranks become those of one rank.
    let (two, one) = (layout(false, 1, 2, shape), layout(false, 1, 1, shape));
    let runs = runs_of(&two, &one);
    assert_eq!((runs.len(), stretches(&runs)), (4 * 5 * 2 * 2, 4));
}

#[test]
fn tokens_of_heads_that_lie_alike_are_one_run() {
    let shape = Shape { layers: 2, kv_heads: 8, head_dim: 64 };
    let theirs = layout(true, 16, 1, shape);
    let item = 16 * 8 * 64 * 2;
    let runs = runs_of(&theirs, &theirs);
    assert_eq!(runs.len(), 4 * 4);
    assert!(runs.iter().all(|run| run.bytes == item));
    // With as many ranks on both sides, each rank gives the same result.
    let theirs = layout(true, 16, 4, shape);
    let runs = runs_of(&theirs, &theirs);
    assert_eq!(runs.len(), 4 * 4 * 4);
    assert!(runs.iter().all(|run| run.bytes == item / 4));
}

#[test]
fn of_replicas_the_lowest_sends_and_each_receives() {
    // One latent, held by all four source ranks and both destination ranks.
    let shape = Shape { layers: 1, kv_heads: 1, head_dim: 8 };
    let (from, to) = (layout(false, 1, 4, shape), layout(false, 1, 2, shape));
    let runs = runs_of(&from, &to);
    assert_eq!(runs.len(), 4 * 2);
    assert!(runs.iter().all(|run| run.source < from.rank_stride));
    assert_eq!(runs.iter().filter(|run| run.destination >= to.rank_stride).count(), 4);
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

#[test]
fn a_plan_of_too_many_pieces_is_refused() {
    let shape = Shape { layers: 128, kv_heads: 8, head_dim: 1 };
    let (ours, theirs) = (layout(false, 256, 1, shape), layout(true, 256, 64, shape));
    assert!(Template::new(&ours, &layout(true, 256, 8, shape)).is_ok());
    let error = Template::new(&ours, &theirs).unwrap_err();
    assert_eq!((error.field, error.destination.as_str()), ("pieces of a plan", "4194304"));
}
