//! The prefix cache, compared with a naive one, which is a list of pages. Requests arrive, grow,
//! share pages, are leased and leave. Both caches find, keep and evict the same pages, and a found
//! page holds the right KV.

use baton::ids::{Generation, PageId, SlotId};
use baton::kv::groups::GroupCounts;
use baton::kv::lease::{Lease, MoverRight};
use baton::kv::page_key::{PageKey, Salt, Sequence};
use baton::kv::pool::{PageCounts, PagePool, Reusable};
use baton::kv::window::Reach;

const PAGES: u32 = 24;
const PAGE_SIZE: usize = 2;
const REQUESTS_MAX: usize = 12;

/// The input that determines a page's KV: the tenant, then all ids up to the end of the page.
type Text = Vec<u32>;

#[derive(Clone, Default)]
struct Page {
    users: u32,
    leases: u32,
    /// The text for which the cache finds it.
    text: Option<Text>,
    /// The text of the KV in it.
    written: Text,
    /// When its last holder released it.
    left: u64,
}

impl Page {
    fn is_held(&self) -> bool {
        self.users + self.leases > 0
    }
}

struct Request {
    tenant: u32,
    prompt: Vec<u32>,
    output: Vec<u32>,
    pages: Vec<PageId>,
    keys: Vec<PageKey>,
    kept: usize,
    leases: Vec<(Lease, Vec<PageId>)>,
    /// A transfer writes it: nothing is computed or kept before the transfer ends.
    is_written: bool,
}

impl Request {
    fn sequence(&self) -> Sequence<'_> {
        Sequence { salt: Salt(self.tenant.into()), prompt: &self.prompt, output: &self.output }
    }

    /// The keys of the full pages of its first `tokens` tokens.
    fn keys(&mut self, pool: &PagePool, tokens: usize) -> Vec<PageKey> {
        let mut keys = std::mem::take(&mut self.keys);
        pool.extend_keys(&self.sequence(), tokens as u32, &mut keys);
        self.keys = keys;
        self.keys[..tokens / PAGE_SIZE].to_vec()
    }

    fn text(&self, page: usize) -> Text {
        let ids = self.prompt.iter().chain(&self.output).take((page + 1) * PAGE_SIZE);
        [self.tenant].into_iter().chain(ids.copied()).collect()
    }

    fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }
}

struct List {
    pages: Vec<Page>,
    clock: u64,
}

impl List {
    fn find(&self, text: &Text) -> Option<usize> {
        self.pages.iter().position(|page| page.text.as_ref() == Some(text))
    }

    fn counts(&self) -> PageCounts {
        let mut counts = PageCounts::default();
        for page in &self.pages {
            match page {
                Page { users: 0, leases: 0, text: None, .. } => counts.free += 1,
                Page { users: 0, leases: 0, .. } => counts.cached += 1,
                Page { users: 0, .. } => counts.leased += 1,
                _ => counts.in_use += 1,
            }
        }
        counts
    }

    fn found(&self, request: &Request, tokens: usize) -> Vec<usize> {
        (0..tokens / PAGE_SIZE).map_while(|index| self.find(&request.text(index))).collect()
    }

    fn make_free(&mut self, n: u32) {
        while self.counts().free < n {
            let idle = self.pages.iter_mut().filter(|page| !page.is_held() && page.text.is_some());
            idle.min_by_key(|page| page.left).expect("enough are cached").text = None;
        }
    }

    /// Releases the last page first.
    fn drop_holders(&mut self, pages: &[PageId], change: impl Fn(&mut Page)) {
        for id in pages.iter().rev() {
            self.clock += 1;
            let page = &mut self.pages[id.index()];
            change(page);
            page.left = self.clock;
        }
    }

    fn keep(&mut self, request: &mut Request, full: usize) {
        for index in request.kept..full {
            let (text, own) = (request.text(index), request.pages[index].index());
            self.pages[own].written = text.clone();
            match self.find(&text) {
                None => self.pages[own].text = Some(text),
                Some(_) if self.pages[own].leases > 0 => {}
                Some(twin) => {
                    self.pages[twin].users += 1;
                    self.pages[own].users -= 1;
                    request.pages[index] = PageId(twin as u32);
                }
            }
        }
        request.kept = request.kept.max(full);
    }
}

pub fn run(data: &[u8]) {
    let mut bytes = data.iter().map(|&byte| u32::from(byte));
    let right = MoverRight::for_mover_thread();
    let mut pool = PagePool::with_cache(PAGES, PAGE_SIZE as u32);
    let mut list = List { pages: vec![Page::default(); PAGES as usize], clock: 0 };
    let mut requests: Vec<Request> = Vec::new();
    while let (Some(act), Some(which)) = (bytes.next(), bytes.next()) {
        match act % 8 {
            0 | 1 if requests.len() < REQUESTS_MAX => {
                let Some(ids) = bytes.next() else { return };
                let prompt = (0..1 + which as usize % 12).map(|bit| ids >> (bit % 8) & 1).collect();
                let mut new = Request {
                    tenant: act / 8 % 2,
                    prompt,
                    output: Vec::new(),
                    pages: Vec::with_capacity(PAGES as usize),
                    keys: Vec::with_capacity(PAGES as usize),
                    kept: 0,
                    leases: Vec::new(),
                    is_written: false,
                };
                if admit(&mut pool, &mut list, &mut new) {
                    requests.push(new);
                }
            }
            2 | 3 if !requests.is_empty() => {
                let at = which as usize % requests.len();
                let request = &mut requests[at];
                if request.is_written {
                    end(&mut pool, &mut list, request, &right);
                    request.is_written = false;
                }
                grow(&mut pool, &mut list, request, act / 8);
            }
            4 if !requests.is_empty() => {
                let at = which as usize % requests.len();
                let request = &mut requests[at];
                // A source's lease covers all pages. A destination's covers the pages that are not
                // shared until it ends.
                let is_written = act / 8 % 2 == 1;
                if is_written && !request.leases.is_empty() || request.is_written {
                    continue;
                }
                request.is_written = is_written;
                let pages = request.pages[if is_written { request.kept } else { 0 }..].to_vec();
                let lease = match is_written {
                    true => pool.lease_to_write(SlotId(0), Generation(1), &pages),
                    false => pool.lease(SlotId(0), Generation(1), &pages),
                };
                pages.iter().for_each(|page| list.pages[page.index()].leases += 1);
                request.leases.push((lease, pages));
            }
            5 | 6 if !requests.is_empty() => {
                let mut request = requests.swap_remove(which as usize % requests.len());
                if act % 8 == 5 {
                    end(&mut pool, &mut list, &mut request, &right);
                }
                pool.release(&request.pages);
                list.drop_holders(&request.pages, |page| page.users -= 1);
                check(&pool, &list);
                end(&mut pool, &mut list, &mut request, &right);
            }
            7 if which % 8 == 0 => {
                let cached = list.counts().cached;
                assert_eq!(pool.flush(), cached);
                list.pages.iter_mut().for_each(|page| page.text = None);
            }
            _ => {}
        }
        check(&pool, &list);
    }
}

fn admit(pool: &mut PagePool, list: &mut List, new: &mut Request) -> bool {
    let tokens = new.len() - 1;
    let found = list.found(new, tokens);
    let keys = new.keys(pool, tokens);
    let idle = found.iter().filter(|&&page| !list.pages[page].is_held()).count();
    let reusable = Reusable {
        end: found.len() as u32,
        window_from: 0,
        pages: found.len() as u32,
        idle: idle as u32,
        held_windowed: 0,
        idle_state: 0,
    };
    assert_eq!(pool.reusable(&keys, GroupCounts::FULL, Reach::From(0)), reusable);
    let mut pages = std::mem::take(&mut new.pages);
    pool.reuse(&keys, 0, &mut pages);
    assert_eq!(pages.iter().map(|page| page.index()).collect::<Vec<_>>(), found);
    for (index, &page) in found.iter().enumerate() {
        assert_eq!(
            list.pages[page].written,
            new.text(index),
            "a page is found for a text that it does not hold"
        );
        list.pages[page].users += 1;
    }
    new.kept = found.len();
    let missing = (new.len().div_ceil(PAGE_SIZE) - new.kept) as u32;
    let fits = missing <= list.counts().free + list.counts().cached;
    assert_eq!(pool.allocate(missing, &mut pages), fits);
    new.pages = pages;
    if !fits {
        pool.release(&new.pages);
        list.drop_holders(&new.pages, |page| page.users -= 1);
        return false;
    }
    list.make_free(missing);
    for page in &new.pages[found.len()..] {
        let page = &mut list.pages[page.index()];
        assert!(!page.is_held() && page.text.is_none(), "a page that is not free was given out");
        page.users = 1;
    }
    true
}

/// Computes more of a request: of its prompt, or one id after it.
fn grow(pool: &mut PagePool, list: &mut List, request: &mut Request, by: u32) {
    let mut tokens = (request.kept * PAGE_SIZE + by as usize).min(request.len());
    if by % 4 == 3
        && request.len().div_ceil(PAGE_SIZE) == request.pages.len()
        && request.leases.is_empty()
    {
        let missing = (request.len() + 1).div_ceil(PAGE_SIZE) - request.pages.len();
        let mut pages = std::mem::take(&mut request.pages);
        let grown = pool.allocate(missing as u32, &mut pages);
        request.pages = pages;
        if !grown {
            return;
        }
        if missing > 0 {
            list.make_free(missing as u32);
            list.pages[request.pages[request.pages.len() - 1].index()].users = 1;
        }
        request.output.push(by / 4 % 2);
        tokens = request.len();
    }
    let (keys, kept, mut pages) = (request.keys(pool, tokens), request.kept, request.pages.clone());
    if keys.len() > kept {
        pool.keep(&keys[kept..], 0, &mut pages[kept..keys.len()]);
    }
    list.keep(request, keys.len());
    assert_eq!(pages, request.pages);
}

fn end(pool: &mut PagePool, list: &mut List, request: &mut Request, right: &MoverRight) {
    for (lease, pages) in request.leases.drain(..) {
        pool.end_lease(lease.end(right), &pages);
        list.drop_holders(&pages, |page| page.leases -= 1);
    }
}

fn check(pool: &PagePool, list: &List) {
    pool.invariants();
    assert_eq!(pool.counts(), list.counts());
}
