//! Compares the pool, and its choice of runs, with a model of two lists. With a prefix cache:
//! `fuzz/targets/prefix.rs`.

use super::*;
use crate::kv::lease::MoverRight;
use crate::kv::page_key::Salt;
use crate::limits::SEEN_KEYS;
use crate::stdx::failpoint::panic_of;
use crate::stdx::rng::Rng;
use proptest::prelude::*;

fn allocate(pool: &mut PagePool, n: u32) -> Vec<PageId> {
    let mut pages = Vec::new();
    assert!(pool.allocate(n, &mut pages));
    pages
}

fn ids(range: std::ops::Range<u32>) -> Vec<PageId> {
    range.map(PageId).collect()
}

#[test]
fn the_smallest_run_that_fits_is_taken() {
    let mut pool = PagePool::new(200);
    let all = allocate(&mut pool, 200);
    pool.release(&all[10..40]);
    pool.release(&all[60..70]);
    pool.release(&all[100..180]);
    assert_eq!(allocate(&mut pool, 8), ids(60..68));
    assert_eq!(allocate(&mut pool, 20), ids(10..30));
    assert_eq!(allocate(&mut pool, 70), ids(100..170));
    pool.invariants();
}

#[test]
fn without_a_run_that_fits_the_longest_are_taken() {
    let mut pool = PagePool::new(100);
    let all = allocate(&mut pool, 100);
    (0..20).for_each(|i| pool.release(&all[i * 2..i * 2 + 1]));
    pool.release(&all[50..66]);
    pool.release(&all[70..86]);
    let pages = allocate(&mut pool, 33);
    assert_eq!(pages[..32], [ids(50..66), ids(70..86)].concat());
    pool.invariants();
}

#[test]
fn a_list_that_grows_continues_its_run() {
    let mut pool = PagePool::new(64);
    let mut pages = allocate(&mut pool, 3);
    for _ in 0..5 {
        assert!(pool.allocate(1, &mut pages));
    }
    assert_eq!(pages, ids(0..8));
}

#[test]
fn too_many_pages_are_refused_whole() {
    let mut pool = PagePool::new(4);
    let held = allocate(&mut pool, 2);
    let mut pages = Vec::new();
    assert!(!pool.allocate(3, &mut pages));
    assert_eq!((pages.len(), held.len(), pool.counts().free), (0, 2, 2));
}

#[test]
fn a_leased_page_outlives_its_user() {
    let mut pool = PagePool::new(2);
    let pages = allocate(&mut pool, 2);
    let lease = pool.lease(SlotId(0), Generation(1), &pages);
    pool.release(&pages);
    assert_eq!(pool.counts(), PageCounts { leased: 2, ..PageCounts::default() });
    assert!(!pool.allocate(1, &mut Vec::new()));
    pool.end_lease(lease.end(&MoverRight::for_mover_thread()), &pages);
    assert_eq!(pool.counts().free, 2);
}

#[test]
fn invariants_find_a_page_that_is_free_while_it_is_leased() {
    let lease_and_release = || {
        let mut pool = PagePool::new(2);
        let pages = allocate(&mut pool, 1);
        let lease = pool.lease(SlotId(0), Generation(1), &pages);
        pool.release(&pages);
        pool.invariants();
        pool.end_lease(lease.end(&MoverRight::for_mover_thread()), &pages);
        pool.invariants();
    };
    lease_and_release();
    let message = panic_of("page is free while leased", lease_and_release);
    assert!(message.contains("page 0 and the map of free pages disagree"), "{message}");
}

#[test]
fn invariants_find_a_held_page_in_the_order_of_idle_pages() {
    let reuse = || {
        let sequence = Sequence { salt: Salt::default(), prompt: &[1, 2, 3, 4], output: &[] };
        let mut pool = PagePool::with_cache(3, 2);
        let mut pages = allocate(&mut pool, 2);
        let mut keys = Vec::with_capacity(2);
        pool.extend_keys(&sequence, 4, &mut keys);
        pool.keep(&keys, 0, &mut pages);
        pool.release(&pages);
        pool.invariants();
        let mut reused = Vec::new();
        pool.reuse(&keys, 0, &mut reused);
        assert_eq!(reused, pages);
        pool.invariants();
    };
    reuse();
    let message = panic_of("held page stays in the order of idle pages", reuse);
    assert!(message.contains("is in the order of idle pages"), "{message}");
}

#[derive(Clone, Debug)]
enum Act {
    Allocate(u32),
    Release(usize),
    Lease(usize),
    End(usize),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (1u32..30).prop_map(Act::Allocate),
        any::<usize>().prop_map(Act::Release),
        any::<usize>().prop_map(Act::Lease),
        any::<usize>().prop_map(Act::End),
    ]
}

proptest! {
    /// Compares the pool with a model of two lists: held page lists and leased page lists.
    #[test]
    fn behaves_like_two_lists(total in 1u32..150, acts in prop::collection::vec(act(), 1..120)) {
        let right = MoverRight::for_mover_thread();
        let mut pool = PagePool::new(total);
        let mut held: Vec<Vec<PageId>> = Vec::new();
        let mut leased: Vec<(Lease, Vec<PageId>)> = Vec::new();
        for act in acts {
            match act {
                Act::Allocate(n) => {
                    let free = pool.counts().free;
                    let mut pages = Vec::new();
                    prop_assert_eq!(pool.allocate(n, &mut pages), n <= free);
                    for page in &pages {
                        prop_assert!(held.iter().all(|other| !other.contains(page)));
                        prop_assert!(leased.iter().all(|(_, other)| !other.contains(page)));
                    }
                    held.push(pages);
                }
                Act::Release(at) if !held.is_empty() => {
                    pool.release(&held.swap_remove(at % held.len()));
                }
                Act::Lease(at) if !held.is_empty() => {
                    let pages = held[at % held.len()].clone();
                    leased.push((pool.lease(SlotId(0), Generation(1), &pages), pages));
                }
                Act::End(at) if !leased.is_empty() => {
                    let (lease, pages) = leased.swap_remove(at % leased.len());
                    pool.end_lease(lease.end(&right), &pages);
                }
                _ => {}
            }
            pool.invariants();
            let in_use: usize = held.iter().map(Vec::len).sum();
            let mut only_leased: Vec<_> = leased.iter().flat_map(|(_, pages)| pages).collect();
            only_leased.retain(|page| held.iter().all(|other| !other.contains(page)));
            only_leased.sort();
            only_leased.dedup();
            let counts = pool.counts();
            prop_assert_eq!(counts.in_use as usize, in_use);
            prop_assert_eq!(counts.leased as usize, only_leased.len());
            prop_assert_eq!(counts.total(), total);
        }
    }
}

/// Cached pages of a sequence, by group.
struct CachedGroups {
    counts: GroupCounts,
    pool: PagePool,
    keys: Vec<PageKey>,
    is_cached: Vec<Vec<bool>>,
}

impl CachedGroups {
    const PAGES: u32 = 24;

    /// Caches a random part of the pages of each group.
    fn random(rng: &mut Rng, page_size: u32) -> CachedGroups {
        let (full, windowed) = rng.pick(&[(0, 1), (1, 0), (1, 1), (2, 1), (1, 3)]);
        let counts =
            GroupCounts { full, windowed, window: (windowed > 0).then_some(1), state_pages: 0 };
        let pages = CachedGroups::PAGES;
        let mut pool = PagePool::with_cache(pages * counts.total() as u32, page_size);
        let ids: Vec<u32> = (0..pages * page_size).collect();
        let sequence = Sequence { salt: Salt(0), prompt: &ids, output: &[] };
        let mut keys = Vec::with_capacity(pages as usize);
        pool.extend_keys(&sequence, pages * page_size, &mut keys);
        let gaps = rng.range_u64(2, 30);
        let mut is_cached = Vec::new();
        for group in 0..counts.total() {
            let mut own = allocate(&mut pool, pages);
            let kept: Vec<bool> = own.iter().map(|_| !rng.one_in(gaps)).collect();
            for index in (0..own.len()).filter(|&index| kept[index]) {
                pool.keep(&keys[index..][..1], group, &mut own[index..][..1]);
            }
            is_cached.push(kept);
        }
        CachedGroups { counts, pool, keys, is_cached }
    }

    /// Whether window groups have the pages from `window_from` on, and full groups all pages, up to
    /// the `end`-th one.
    fn has(&self, window_from: u32, end: u32) -> bool {
        let full = self.counts.full as usize;
        let first = |group: usize| if group < full { 0 } else { window_from as usize };
        let has = |(group, cached): (usize, &Vec<bool>)| {
            (first(group)..end as usize).all(|page| cached[page])
        };
        self.is_cached.iter().enumerate().all(has)
    }
}

#[test]
fn the_longest_part_with_a_cached_window_is_found() {
    let mut rng = Rng::new(7);
    for _ in 0..1000 {
        let page_size = rng.range_u32(1, 4);
        let cached = CachedGroups::random(&mut rng, page_size);
        let (pages, counts) = (CachedGroups::PAGES, cached.counts);

        let window = KvWindow::new(Some(rng.range_u32(1, 20)), page_size);
        let stay_from = if rng.one_in(2) { u32::MAX } else { rng.range_u32(0, pages) };
        let window = window.staying_from(stay_from);
        let behind = |end: u32| window.pages_behind(end * page_size);
        let expected = (1..=pages).rev().find(|&end| cached.has(behind(end), end)).unwrap_or(0);
        let found = cached.pool.reusable(&cached.keys, counts, Reach::Back(window));
        assert_eq!((found.end, found.window_from), (expected, behind(expected)), "{window:?}");
        assert_eq!(found.pages, counts.pages(expected, expected - behind(expected)));

        let first = rng.range_u32(0, pages + 3);
        let least = if counts.full == 0 { first } else { 0 };
        let expected = (least + 1..=pages).rev().find(|&end| cached.has(first.min(end), end));
        let found = cached.pool.reusable(&cached.keys, counts, Reach::From(first));
        assert_eq!(found.end, expected.unwrap_or(least), "from {first}, {counts:?}");
        assert_eq!(found.pages, counts.pages(found.end, found.end.saturating_sub(first)));
        assert_eq!(found.idle, 0, "the pages have a user");
    }
}

#[test]
fn the_oldest_checkpoint_makes_room_for_a_new_one() {
    let counts = GroupCounts { state_pages: 2, ..GroupCounts::FULL };
    let mut pool = PagePool::with_cache(40, 2).with_checkpoints(5);
    let ids: Vec<u32> = (0..20).collect();
    let sequence = Sequence { salt: Salt(0), prompt: &ids, output: &[] };
    let mut keys = Vec::with_capacity(10);
    pool.extend_keys(&sequence, 20, &mut keys);
    let mut kv = allocate(&mut pool, 10);
    pool.keep(&keys, 0, &mut kv);
    let all = Reach::Back(KvWindow::new(None, 2));
    let found = |pool: &PagePool| pool.reusable(&keys, counts, all);
    assert_eq!(found(&pool).end, 0, "KV without state is of no use");

    let leave_checkpoint = |pool: &mut PagePool, page: usize| {
        let mut pages = allocate(pool, 2);
        pool.keep_checkpoint(keys[page], &mut pages);
        pages
    };
    // The second one is in use.
    let second = leave_checkpoint(&mut pool, 3);
    for page in [1, 5] {
        let pages = leave_checkpoint(&mut pool, page);
        pool.release(&pages);
    }
    pool.invariants();
    let Reusable { end, idle_state, .. } = found(&pool);
    assert_eq!((end, idle_state), (6, 2));
    let first = pool.reusable(&keys[..3], counts, all);
    assert_eq!(first.end, 0, "the room is for two checkpoints");
    let held = pool.reusable(&keys[..5], counts, all);
    assert_eq!((held.end, held.idle_state), (4, 0));

    // A second request left the same checkpoint: its pages become those of the cache.
    let twin = leave_checkpoint(&mut pool, 3);
    assert_eq!(twin, second);
    let mut reused = Vec::with_capacity(2);
    pool.reuse_checkpoint(keys[5], 2, &mut reused);
    // All are in use, so this one is not kept.
    let fourth = leave_checkpoint(&mut pool, 7);
    assert_eq!(found(&pool).end, 6);
    for pages in [second, twin, reused, fourth, kv] {
        pool.release(&pages);
    }
    pool.invariants();
    assert_eq!(pool.flush(), 10 + 5);
    assert_eq!(found(&pool).end, 0);
    pool.invariants();
}

#[test]
fn prompts_show_where_they_part() {
    let mut pool = PagePool::with_cache(4, 1).with_checkpoints(1);
    let keys = |pool: &PagePool, ids: &[u32]| {
        let mut keys = Vec::with_capacity(ids.len());
        let sequence = Sequence { salt: Salt(0), prompt: ids, output: &[] };
        pool.extend_keys(&sequence, ids.len() as u32, &mut keys);
        keys
    };
    let (one, other) = (keys(&pool, &[1, 2, 3, 4]), keys(&pool, &[1, 2, 5, 6]));
    assert_eq!(pool.note_prompt(&one), 0);
    assert_eq!(pool.note_prompt(&other), 2);
    assert_eq!(pool.note_prompt(&one), 4);
    // The oldest keys make room.
    let many: Vec<u32> = (7..7 + SEEN_KEYS - 2).collect();
    let many = keys(&pool, &many);
    assert_eq!(pool.note_prompt(&many), 0);
    assert_eq!(pool.note_prompt(&one), 0);
    assert_eq!(pool.note_prompt(&many[..1]), 0, "it made room for the first prompt's keys");
}

#[test]
fn prefixes_and_checkpoints_are_evicted_in_one_order() {
    let mut pool = PagePool::with_cache(4, 1).with_checkpoints(2);
    let sequence = Sequence { salt: Salt(0), prompt: &[1, 2], output: &[] };
    let mut keys = Vec::with_capacity(2);
    pool.extend_keys(&sequence, 2, &mut keys);
    for &key in &keys {
        let (mut kv, mut state) = (allocate(&mut pool, 1), allocate(&mut pool, 1));
        pool.keep(&[key], 0, &mut kv);
        pool.keep_checkpoint(key, &mut state);
        pool.release(&kv);
        pool.release(&state);
    }
    // The first checkpoint is used once more.
    let mut again = Vec::with_capacity(1);
    pool.reuse_checkpoint(keys[0], 1, &mut again);
    pool.release(&again);
    let mut gone = Vec::new();
    for _ in 0..4 {
        allocate(&mut pool, 1);
        let cache = pool.cache.as_ref().unwrap();
        let found = |part: usize| {
            let key = keys[part / 2];
            if part.is_multiple_of(2) { cache.find(key, 0) } else { cache.find_state(key, 0) }
        };
        gone.extend((0..4).find(|part| found(*part).is_none() && !gone.contains(part)));
        pool.invariants();
    }
    assert_eq!(gone, [0, 2, 3, 1], "by the time of their last use");
}
