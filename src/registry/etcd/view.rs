//! A router's view of the entries in etcd. It reads all entries, page by page at one revision, and
//! then watches for later revisions. When the watch ends, it reads all entries again.
//!
//! ```text
//!              ┌──┐ more
//!              │  ▼
//!  waiting ──▶ reading ──▶ watching
//!     ▲           │ failed    │ ended, or overdue
//!     └───────────┴───────────┘
//! ```
//! Pure. Invariants: the view reports the changes of etcd in etcd's order. While etcd is
//! unreachable, nothing changes. An invalid entry is reported once, and the number of reports is
//! bounded. Pages shrink until they can be read.

use super::{PREFIX, PREFIX_END, SCHEME, decode, encode, read, refused};
use crate::config::secret::Secret;
use crate::limits::{ETCD_LINE_MAX, ETCD_ODD_MAX, ETCD_PAGE_MAX, REGISTRY_RETRY};
use crate::registry::call::{RegistryRequest, RegistryTask, Verb};
use crate::registry::entry::{Entry, WorkerAddress};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::hash_map::{HashMap, HashSet};
use serde::Deserialize;
use serde_json::json;
use std::collections::VecDeque;
use std::time::Instant;

/// A change of the entries.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EtcdChange {
    /// An entry was put or read.
    Entered(Entry),
    /// The entry of this incarnation is gone.
    Gone(WorkerAddress, [u8; 16]),
    /// The addresses of all entries, after a complete read.
    Whole(HashSet<WorkerAddress>),
    /// The value of this key is not a valid entry: key and reason.
    Odd(String, String),
    /// Too many keys are invalid to report each of them.
    Odder,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Waiting,
    Reading,
    Watching,
}

/// The view of one etcd.
#[derive(Debug)]
pub struct EtcdView {
    cluster_keys: Vec<Secret>,
    stage: Stage,
    due: Instant,
    /// The revision of the last read.
    revision: Option<i64>,
    /// The first key of the next page. `None` if no page is missing.
    from: Option<Vec<u8>>,
    /// Number of keys in a page.
    page: usize,
    known: HashMap<String, (WorkerAddress, [u8; 16])>,
    /// Keys that were reported as invalid.
    odd: HashSet<String>,
    /// The start of an incomplete line.
    line: Vec<u8>,
    changes: VecDeque<EtcdChange>,
}

#[derive(Deserialize)]
struct Header {
    revision: String,
}

#[derive(Deserialize)]
struct Pair {
    key: String,
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
struct Range {
    header: Header,
    #[serde(default)]
    kvs: Vec<Pair>,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct WatchLine {
    result: Option<Watched>,
}

#[derive(Deserialize)]
struct Watched {
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    /// Absent for a put.
    #[serde(default, rename = "type")]
    kind: String,
    kv: Pair,
}

impl EtcdView {
    /// Sets the cluster keys; an entry must prove one of them. The caller must then start a new
    /// read.
    pub fn set_keys(&mut self, cluster_keys: Vec<Secret>) {
        self.cluster_keys = cluster_keys;
        // An entry that is also invalid with the new keys is reported again.
        self.odd.clear();
    }

    /// Creates the view; its first read is due at once. If there are keys, entries must prove one
    /// of them.
    pub fn new(cluster_keys: Vec<Secret>, now: Instant) -> EtcdView {
        EtcdView {
            cluster_keys,
            stage: Stage::Waiting,
            due: now,
            revision: None,
            from: None,
            page: ETCD_PAGE_MAX,
            known: HashMap::default(),
            odd: HashSet::default(),
            line: Vec::new(),
            changes: VecDeque::new(),
        }
    }

    /// The next change.
    pub fn change(&mut self) -> Option<EtcdChange> {
        self.changes.pop_front()
    }

    fn take_page(&mut self, body: &[u8]) -> Result<(), String> {
        let range: Range = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        if self.from.is_none() {
            self.known.clear();
            self.revision =
                Some(range.header.revision.parse().map_err(|_| "its revision is not a number")?);
        }
        for pair in &range.kvs {
            self.put(pair)?;
        }
        if let Some(last) = range.kvs.last().filter(|_| range.more) {
            let mut next = decode(&last.key)?;
            next.push(0);
            self.from = Some(next);
            return Ok(());
        }
        (self.from, self.page) = (None, ETCD_PAGE_MAX);
        let addresses = self.known.values().map(|(address, _)| address.clone()).collect();
        self.changes.push_back(EtcdChange::Whole(addresses));
        Ok(())
    }

    fn put(&mut self, pair: &Pair) -> Result<(), String> {
        let key = String::from_utf8_lossy(&decode(&pair.key)?).into_owned();
        match read(&key, &decode(&pair.value)?, &self.cluster_keys) {
            Ok(entry) => {
                self.odd.remove(&key);
                self.known.insert(key, (entry.address.clone(), entry.peer.incarnation));
                self.changes.push_back(EtcdChange::Entered(entry));
            }
            Err(why) => {
                // The key had another entry before; that entry is gone.
                let gone = self
                    .known
                    .remove(&key)
                    .map(|(address, incarnation)| EtcdChange::Gone(address, incarnation));
                self.changes.extend(gone);
                if self.odd.len() >= ETCD_ODD_MAX || !self.odd.insert(key.clone()) {
                    return Ok(());
                }
                self.changes.push_back(EtcdChange::Odd(key, why));
                if self.odd.len() == ETCD_ODD_MAX {
                    self.changes.push_back(EtcdChange::Odder);
                }
            }
        }
        Ok(())
    }

    fn take_line(&mut self, line: &[u8]) -> Result<(), String> {
        let line: WatchLine = serde_json::from_slice(line).map_err(|error| error.to_string())?;
        let watched = line.result.ok_or("its watch has failed")?;
        for Event { kind, kv } in &watched.events {
            if kind == "DELETE" {
                let key = String::from_utf8_lossy(&decode(&kv.key)?).into_owned();
                self.odd.remove(&key);
                let gone = self
                    .known
                    .remove(&key)
                    .map(|(address, incarnation)| EtcdChange::Gone(address, incarnation));
                self.changes.extend(gone);
            } else {
                self.put(kv)?;
            }
        }
        // etcd has already dropped the revision from which the watch starts. All entries are read
        // again.
        if watched.canceled { Err("its watch was cancelled".into()) } else { Ok(()) }
    }
}

impl RegistryTask for EtcdView {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn poll(&mut self, now: Instant) -> Option<RegistryRequest> {
        if self.stage != Stage::Waiting || now < self.due {
            return None;
        }
        let (key, range_end) = (encode(PREFIX), encode(PREFIX_END));
        let page = |body: serde_json::Value| {
            RegistryRequest::new(Verb::Post, "/v3/kv/range", body.to_string().into_bytes())
        };
        match (self.revision, &self.from) {
            (None, _) => {
                self.stage = Stage::Reading;
                Some(page(json!({ "key": key, "range_end": range_end, "limit": self.page })))
            }
            (Some(revision), Some(from)) => {
                self.stage = Stage::Reading;
                Some(page(json!({
                    "key": encode(from), "range_end": range_end, "limit": self.page,
                    "revision": revision.to_string(),
                })))
            }
            (Some(revision), None) => {
                (self.stage, self.revision) = (Stage::Watching, None);
                self.line.clear();
                let missed = is_failpoint_active("change after a read is missed");
                let body = json!({ "create_request": {
                    "key": key, "range_end": range_end,
                    "start_revision": (revision + 1 + i64::from(missed)).to_string(),
                }});
                let request =
                    RegistryRequest::new(Verb::Post, "/v3/watch", body.to_string().into_bytes());
                Some(RegistryRequest { is_stream: true, ..request })
            }
        }
    }

    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
        let taken = match (status, self.stage) {
            (200, Stage::Reading) => self.take_page(body),
            (200, _) => Err("it answered a watch with a complete answer".into()),
            _ => Err(refused(status, body)),
        };
        match taken {
            Ok(()) => (self.stage, self.due) = (Stage::Waiting, now),
            Err(_) => self.handle_failure(now),
        }
        taken
    }

    fn handle_piece(&mut self, bytes: &[u8], _: Instant) -> Result<(), String> {
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len() > ETCD_LINE_MAX {
                return Err("a line of its watch is too long".into());
            }
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.take_line(&line)?;
            }
        }
        Ok(())
    }

    fn handle_failure(&mut self, now: Instant) {
        if self.stage == Stage::Reading {
            // The answer can have been too long. A page of one value always fits, because etcd
            // limits the size of a value.
            self.page = (self.page / 2).max(1);
        }
        (self.stage, self.due) = (Stage::Waiting, now + REGISTRY_RETRY);
        (self.revision, self.from) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::etcd::tests::entry;
    use crate::registry::etcd::{key_of, write};

    fn pair(entry: &Entry) -> String {
        format!(r#"{{"key":"{}","value":"{}"}}"#, encode(key_of(entry)), encode(write(entry, None)))
    }

    fn changes(view: &mut EtcdView) -> Vec<EtcdChange> {
        std::iter::from_fn(|| view.change()).collect()
    }

    #[test]
    fn a_range_is_read_whole_and_then_watched_in_pieces_of_any_size() {
        let (mut view, now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
        let (a, b) = (entry(1, 1), entry(2, 1));
        assert_eq!(view.poll(now).unwrap().path, "/v3/kv/range");
        let odd =
            format!(r#"{{"key":"{}","value":"{}"}}"#, encode("/baton/workers/x"), encode("?"));
        let whole = format!(r#"{{"header":{{"revision":"41"}},"kvs":[{},{odd}]}}"#, pair(&a));
        view.handle_answer(200, whole.as_bytes(), now).unwrap();
        let found = changes(&mut view);
        assert_eq!(found[0], EtcdChange::Entered(a.clone()));
        assert!(
            matches!(&found[1], EtcdChange::Odd(key, _) if key == "/baton/workers/x"),
            "{found:?}"
        );
        assert_eq!(found[2], EtcdChange::Whole(HashSet::from_iter([a.address.clone()])));
        let watch = view.poll(now).unwrap();
        let body = String::from_utf8(watch.body).unwrap();
        assert!(watch.is_stream && body.contains(r#""start_revision":"42""#), "{body}");
        let lines = format!(
            "{{\"result\":{{\"created\":true}}}}\n{{\"result\":{{\"events\":[\
             {{\"kv\":{}}},{{\"type\":\"DELETE\",\"kv\":{}}}]}}}}\n",
            pair(&b),
            pair(&a)
        );
        for byte in lines.as_bytes() {
            view.handle_piece(&[*byte], now).unwrap();
        }
        let gone = EtcdChange::Gone(a.address, a.peer.incarnation);
        assert_eq!(changes(&mut view), [EtcdChange::Entered(b), gone]);
        assert_eq!(view.poll(now), None);
    }

    fn body_of(view: &mut EtcdView, now: Instant) -> serde_json::Value {
        serde_json::from_slice(&view.poll(now).unwrap().body).unwrap()
    }

    #[test]
    fn a_long_range_is_read_in_pages_of_one_revision_that_shrink_if_too_long() {
        let (mut view, mut now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
        let (a, b) = (entry(1, 1), entry(2, 1));
        assert_eq!(body_of(&mut view, now)["limit"], ETCD_PAGE_MAX);
        view.handle_failure(now);
        now += REGISTRY_RETRY;
        assert_eq!(body_of(&mut view, now)["limit"], ETCD_PAGE_MAX / 2);
        let page = |revision: u32, entry: &Entry, more: bool| {
            format!(
                r#"{{"header":{{"revision":"{revision}"}},"kvs":[{}],"more":{more}}}"#,
                pair(entry)
            )
        };
        view.handle_answer(200, page(41, &a, true).as_bytes(), now).unwrap();
        assert_eq!(changes(&mut view), [EtcdChange::Entered(a.clone())], "it is not whole yet");
        let next = body_of(&mut view, now);
        assert_eq!(
            (&next["revision"], &next["key"]),
            (&json!("41"), &json!(encode(key_of(&a) + "\0")))
        );
        // Entries that were put during the read have a later revision. The watch finds them.
        view.handle_answer(200, page(44, &b, false).as_bytes(), now).unwrap();
        let whole = EtcdChange::Whole(HashSet::from_iter([a.address.clone(), b.address.clone()]));
        assert_eq!(changes(&mut view), [EtcdChange::Entered(b), whole]);
        assert_eq!(body_of(&mut view, now)["create_request"]["start_revision"], "42");
        view.handle_failure(now);
        now += REGISTRY_RETRY;
        assert_eq!(
            body_of(&mut view, now)["limit"],
            ETCD_PAGE_MAX,
            "one that could be read is forgotten"
        );
        for _ in 0..20 {
            view.handle_failure(now);
            now += REGISTRY_RETRY;
            assert!(body_of(&mut view, now)["limit"].as_u64() >= Some(1));
        }
    }

    #[test]
    fn an_odd_entry_is_reported_once_and_the_reports_are_bounded() {
        let (mut view, now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
        let odd = |number: usize| {
            format!(
                r#"{{"key":"{}","value":"{}"}}"#,
                encode(format!("/baton/workers/x{number}")),
                encode("?")
            )
        };
        let read = |view: &mut EtcdView, count: usize| {
            view.poll(now + REGISTRY_RETRY).unwrap();
            let all: Vec<_> = (0..count).map(odd).collect();
            let whole = format!(r#"{{"header":{{"revision":"1"}},"kvs":[{}]}}"#, all.join(","));
            view.handle_answer(200, whole.as_bytes(), now).unwrap();
            view.poll(now).unwrap();
            view.handle_failure(now);
            changes(view).len() - 1
        };
        assert_eq!([read(&mut view, 2), read(&mut view, 2), read(&mut view, 3)], [2, 0, 1]);
        assert_eq!(
            read(&mut view, 10 * ETCD_ODD_MAX),
            ETCD_ODD_MAX - 3 + 1,
            "and that there are more"
        );
        assert_eq!((read(&mut view, 20 * ETCD_ODD_MAX), view.odd.len()), (0, ETCD_ODD_MAX));
    }

    #[test]
    fn an_entry_that_becomes_something_else_is_gone() {
        let (mut view, now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
        let a = entry(1, 1);
        view.poll(now).unwrap();
        view.handle_answer(
            200,
            format!(r#"{{"header":{{"revision":"1"}},"kvs":[{}]}}"#, pair(&a)).as_bytes(),
            now,
        )
        .unwrap();
        view.poll(now).unwrap();
        changes(&mut view);
        let odd = format!(r#"{{"key":"{}","value":"{}"}}"#, encode(key_of(&a)), encode("?"));
        let line = format!("{{\"result\":{{\"events\":[{{\"kv\":{odd}}}]}}}}\n");
        view.handle_piece(line.as_bytes(), now).unwrap();
        let found = changes(&mut view);
        assert_eq!(found[0], EtcdChange::Gone(a.address.clone(), a.peer.incarnation));
        assert!(matches!(&found[1], EtcdChange::Odd(key, _) if *key == key_of(&a)), "{found:?}");
    }

    #[test]
    fn an_entry_with_a_former_key_is_reported_when_it_is_read_again() {
        let [one, other] = [[7; 32], [8; 32]].map(|bytes| Secret::of_bytes(&bytes));
        let (mut view, mut now) =
            (EtcdView::new(vec![one.clone()], Instant::now()), Instant::now());
        let (a, b) = (entry(1, 1), entry(2, 1));
        let pair = |entry: &Entry, key: &Secret| {
            format!(
                r#"{{"key":"{}","value":"{}"}}"#,
                encode(key_of(entry)),
                encode(write(entry, Some(key)))
            )
        };
        let whole = format!(
            r#"{{"header":{{"revision":"1"}},"kvs":[{},{}]}}"#,
            pair(&a, &one),
            pair(&b, &other)
        );
        let mut read = |view: &mut EtcdView| {
            view.poll(now).unwrap();
            view.handle_answer(200, whole.as_bytes(), now).unwrap();
            view.handle_failure(now);
            now += REGISTRY_RETRY;
            changes(view)
        };
        assert_eq!(read(&mut view)[0], EtcdChange::Entered(a.clone()));
        view.set_keys(vec![other]);
        let found = read(&mut view);
        assert!(matches!(&found[0], EtcdChange::Odd(key, _) if *key == key_of(&a)), "{found:?}");
        assert_eq!(
            found[1..],
            [EtcdChange::Entered(b.clone()), EtcdChange::Whole(HashSet::from_iter([b.address]))]
        );
    }

    #[test]
    fn a_watch_that_ends_is_begun_with_the_whole() {
        for end in ["{\"result\":{\"canceled\":true}}\n", "{\"error\":{}}\n", "x\n"] {
            let (mut view, now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
            view.poll(now).unwrap();
            view.handle_answer(200, br#"{"header":{"revision":"1"}}"#, now).unwrap();
            view.poll(now).unwrap();
            assert!(view.handle_piece(end.as_bytes(), now).is_err(), "{end}");
            view.handle_failure(now);
            assert_eq!(view.poll(now), None);
            assert_eq!(view.poll(now + REGISTRY_RETRY).unwrap().path, "/v3/kv/range");
        }
        let (mut view, now) = (EtcdView::new(Vec::new(), Instant::now()), Instant::now());
        assert!(
            view.handle_piece(&vec![b' '; ETCD_LINE_MAX + 1], now)
                .unwrap_err()
                .contains("too long")
        );
    }
}
