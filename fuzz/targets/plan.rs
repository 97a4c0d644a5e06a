//! The planner, for layouts, page lists and parts of any shape. It moves the same bytes as a naive
//! planner, whole or in parts, and both ends of a stream agree on them.

use baton::ids::PageId;
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::transfer::plan::{Run, Template};

const PAGES: u32 = 8;

struct Bytes<'a>(std::slice::Iter<'a, u8>);

impl Bytes<'_> {
    fn below(&mut self, limit: u32) -> u32 {
        u32::from(self.0.next().copied().unwrap_or(0)) % limit
    }

    fn layout(&mut self, shape: (u32, u32, u32)) -> KvLayout {
        let (page_size, (layers, heads, dim)) = (1 << self.below(3), shape);
        let even: Vec<u32> =
            (1..=4).filter(|&ranks| KvLayout::heads_per_rank(heads, ranks).is_some()).collect();
        let ranks = even[self.below(even.len() as u32) as usize];
        let held = KvLayout::heads_per_rank(heads, ranks).expect("even");
        let rank = match self.below(3) {
            0 => KvLayout::page_major(page_size, layers, held, dim, KvDtype::F16),
            1 => KvLayout::layer_major(page_size, layers, held, dim, KvDtype::F16, PAGES),
            // One side can use pages of tokens while the other uses slots for the same data.
            _ => KvLayout::state_slots(layers, held, 2 * dim, KvDtype::F16).expect("halves"),
        };
        rank.on_ranks(ranks, u64::from(PAGES) * rank.page_bytes(), heads).expect("even")
    }

    /// All pages, each once, in random order.
    fn pages(&mut self) -> Vec<PageId> {
        let mut pages: Vec<PageId> = (0..PAGES).map(PageId).collect();
        for last in (1..pages.len()).rev() {
            pages.swap(last, self.below(last as u32 + 1) as usize);
        }
        pages
    }
}

pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data.iter());
    let shape = (1 + bytes.below(2), 1 + bytes.below(4), 1 + bytes.below(2));
    let (from, to) = (bytes.layout(shape), bytes.layout(shape));
    let layers = {
        let end = bytes.below(shape.0 + 1);
        bytes.below(end + 1)..end
    };
    let template = Template::of_layers(&from, &to, layers.clone()).expect("they hold the same");
    let tile = from.page_size.min(to.page_size);
    let room = PAGES * tile;
    let tokens = {
        let end = 1 + bytes.below(room);
        bytes.below(end) / tile * tile..end
    };
    let parts = u64::from(1 + bytes.below(255));
    let (from_pages, to_pages) = (bytes.pages(), bytes.pages());
    let (source, destination) = (|index: usize| from_pages[index], |index: usize| to_pages[index]);
    let whole: Vec<Run> = template.all_runs(tokens.clone(), source, destination).collect();
    let total = template.bytes(tokens.clone());
    assert_eq!(whole.iter().map(|run| run.bytes).sum::<u64>(), total);
    let flat = |runs: &[Run]| -> Vec<(u64, u64)> {
        runs.iter()
            .flat_map(|run| (0..run.bytes).map(|at| (run.source + at, run.destination + at)))
            .collect()
    };
    let mut pieces = Vec::new();
    let (mut sent, mut landed) = (Vec::new(), Vec::new());
    for start in (0..total).step_by(parts as usize) {
        let part = start..(start + parts).min(total);
        pieces.extend(template.runs(tokens.clone(), part.clone(), source, destination));
        for piece in template.source_pieces(tokens.clone(), part.clone(), source) {
            sent.extend(piece.at..piece.at + piece.bytes);
        }
        for piece in template.destination_pieces(tokens.clone(), part, destination) {
            landed.extend(piece.at..piece.at + piece.bytes);
        }
    }
    let moved = flat(&whole);
    assert_eq!(flat(&pieces), moved);
    assert!(sent.into_iter().zip(landed).eq(moved.iter().copied()));
    let mut moved = moved;
    moved.sort_unstable();
    let mut obvious = Vec::new();
    for token in tokens.start..tokens.end.next_multiple_of(tile) {
        for layer in layers.clone() {
            for which in [KeyValue::Key, KeyValue::Value] {
                for (rank, head) in
                    (0..to.ranks).flat_map(|rank| to.heads_of(rank).map(move |head| (rank, head)))
                {
                    let holds = |rank: &u32| from.heads_of(*rank).contains(&head);
                    let sender = (0..from.ranks).find(holds).expect("a rank holds it");
                    let at = |layout: &KvLayout, rank: u32, pages: &[PageId]| {
                        let page = pages[(token / layout.page_size) as usize];
                        let own = head - layout.heads_of(rank).start;
                        let inside =
                            layout.offset(page, layer, which, own, token % layout.page_size);
                        u64::from(rank) * layout.rank_stride + inside
                    };
                    let (a, b) = (at(&from, sender, &from_pages), at(&to, rank, &to_pages));
                    obvious.extend((0..u64::from(shape.2) * 2).map(|byte| (a + byte, b + byte)));
                }
            }
        }
    }
    obvious.sort_unstable();
    assert_eq!(moved, obvious);
}
