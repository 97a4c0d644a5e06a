//! etcd in memory, as a script of its HTTP/JSON gateway (`/v3/…`): keys, leases and watches.
//!
//! Owns: the store, and the members that serve it. Each member is a host, and its bytes travel like
//! those of all hosts. Invariant: a watch gets each change after its first revision, in order. Not
//! here: elections, and members with different states.

use crate::http::HttpLimits;
use crate::http::request::{Request, RequestDecoder};
use crate::http::response::{BodyStream, JSON, ResponseWriter};
use crate::net::{ConnId, Event, MemoryKernel, Reactor};
use crate::stdx::event_queue::{Nanos, SECOND};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// etcd's port for clients.
pub const PORT: u16 = 2379;
/// Connections of a member: more than the processes of the largest cluster have.
const CONNECTIONS_MAX: usize = 8192;

/// All members of one etcd.
#[derive(Default)]
pub struct SimEtcd {
    store: Store,
    /// `None` while the member is down.
    members: Vec<Option<Member>>,
}

/// A member: its connections, and their watches.
struct Member {
    kernel: MemoryKernel,
    reactor: Reactor,
    open: BTreeMap<ConnId, RequestDecoder>,
    watches: BTreeMap<ConnId, Watch>,
}

struct Watch {
    stream: BodyStream,
    range: KeyRange,
    /// The first revision that was not sent.
    next: u64,
}

/// What all members agree on.
struct Store {
    revision: u64,
    /// Revisions before this one are forgotten.
    compacted: u64,
    keys: BTreeMap<Vec<u8>, StoredKey>,
    leases: BTreeMap<u64, Lease>,
    /// In order of their revisions.
    changes: Vec<Change>,
    leases_granted: u64,
}

struct StoredKey {
    lease: u64,
    changed: u64,
}

struct Lease {
    seconds: u64,
    ends: Nanos,
}

struct Change {
    revision: u64,
    key: Vec<u8>,
    /// `None`: the key was deleted.
    value: Option<String>,
}

/// A key, or all keys before an end.
struct KeyRange {
    key: Vec<u8>,
    end: Option<Vec<u8>>,
}

impl KeyRange {
    fn contains(&self, key: &[u8]) -> bool {
        match &self.end {
            Some(end) => *self.key <= *key && *key < **end,
            None => *self.key == *key,
        }
    }

    fn of(body: &Value) -> Option<KeyRange> {
        let end = match body.get("range_end") {
            Some(end) => Some(decode(end)?),
            None => None,
        };
        Some(KeyRange { key: decode(&body["key"])?, end })
    }
}

impl SimEtcd {
    /// Starts a member, which may be a new one, with the bytes of this host.
    pub fn start(&mut self, member: usize, kernel: MemoryKernel) {
        let mut reactor = Reactor::in_memory(kernel.clone()).expect("memory cannot fail");
        let address = SocketAddr::new(kernel.host(), PORT);
        reactor.listen(&address.into(), CONNECTIONS_MAX).expect("a port is free");
        let (open, watches) = (BTreeMap::new(), BTreeMap::new());
        if member == self.members.len() {
            self.members.push(None);
        }
        self.members[member] = Some(Member { kernel, reactor, open, watches });
    }

    /// Ends the process of a member. Returns whether it ran.
    pub fn stop(&mut self, member: usize) -> bool {
        self.members[member].take().is_some()
    }

    /// Forgets all values that are no longer the last of their key. If `cancels`, it cancels all
    /// watches, as if they were behind.
    pub fn compact(&mut self, cancels: bool) {
        let Store { revision, compacted, keys, changes, .. } = &mut self.store;
        *compacted = *revision;
        changes.retain(|change| {
            keys.get(&change.key).is_some_and(|stored| stored.changed == change.revision)
        });
        for member in self.members.iter_mut().flatten().filter(|_| cancels) {
            for (conn, watch) in std::mem::take(&mut member.watches) {
                let mut out = Vec::new();
                write_line(watch.stream, &mut out, &self.store.cancelled());
                member.send(conn, &out);
            }
        }
    }

    /// Ends the first lease before its time.
    pub fn end_lease(&mut self) {
        if let Some(&id) = self.store.leases.keys().next() {
            self.store.end_leases(&BTreeSet::from([id]));
        }
    }

    /// Loses all keys and leases, as an etcd that starts with an empty folder.
    pub fn empty(&mut self) {
        self.store = Store { leases_granted: self.store.leases_granted, ..Store::default() };
    }

    /// Members with a watch that has changes to send.
    pub fn members_behind(&self) -> impl Iterator<Item = usize> {
        let is_behind = |member: &Option<Member>| {
            let mut watches = member.iter().flat_map(|member| member.watches.values());
            watches.any(|watch| watch.next <= self.store.revision)
        };
        let members = self.members.iter().enumerate();
        members.filter(move |(_, member)| is_behind(member)).map(|(number, _)| number)
    }

    /// Answers requests, ends leases and sends changes. Returns the time of the next turn, or
    /// `None` if the member is down.
    pub fn turn(&mut self, member: usize, now: Nanos, base: Instant) -> Option<Nanos> {
        let SimEtcd { store, members } = self;
        let member = members[member].as_mut()?;
        member.kernel.set_now(base + Duration::from_nanos(now));
        member.reactor.wait(None).expect("memory cannot fail");
        let ended = store.leases.iter().filter(|(_, lease)| lease.ends <= now).map(|(&id, _)| id);
        store.end_leases(&ended.collect());
        while let Some(event) = member.reactor.next_event() {
            match event {
                Event::Accepted { conn, .. } => {
                    member.open.insert(conn, RequestDecoder::new(HttpLimits::default()));
                }
                Event::Received(conn) => member.read(conn, store, now),
                Event::Eof(conn) | Event::Closed { conn, .. } => member.end(conn),
                _ => {}
            }
        }
        member.send_changes(store);
        let until = member.reactor.prepare(None).map(|until| (until - base).as_nanos() as Nanos);
        let ends = store.leases.values().map(|lease| lease.ends);
        Some(ends.chain(until).min().unwrap_or(now + SECOND))
    }
}

impl Member {
    fn read(&mut self, conn: ConnId, store: &mut Store, now: Nanos) {
        let bytes = self.reactor.received(conn).to_vec();
        self.reactor.consume(conn, bytes.len());
        let mut rest = &bytes[..];
        while let Some(decoder) = self.open.get_mut(&conn) {
            match decoder.read(rest) {
                Ok((used, Some(request))) => {
                    rest = &rest[used..];
                    self.answer(conn, &request, store, now);
                }
                Ok((_, None)) => return,
                Err(_) => self.end(conn),
            }
        }
    }

    fn answer(&mut self, conn: ConnId, request: &Request, store: &mut Store, now: Nanos) {
        let (mut out, path) = (Vec::new(), request.head.path());
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        let exchange = request.head.exchange();
        if path == "/v3/watch" {
            let create = &body["create_request"];
            let next = create["start_revision"].as_str().and_then(|text| text.parse().ok());
            let range = KeyRange::of(create);
            if let (Some(range), Some(next)) = (range, next) {
                let stream = ResponseWriter::new(&mut out, exchange, 200).stream(JSON);
                let begun = json!({ "header": store.header(), "created": true });
                write_line(stream, &mut out, &begun);
                if next < store.compacted {
                    write_line(stream, &mut out, &store.cancelled());
                } else {
                    self.watches.insert(conn, Watch { stream, range, next });
                }
                return self.send(conn, &out);
            }
        }
        let (status, answer) = match store.answer(path, &body, now) {
            Ok(answer) => (200, answer),
            Err((status, code, message)) => {
                (status, json!({ "error": message, "code": code, "message": message }))
            }
        };
        ResponseWriter::new(&mut out, exchange, status).body(JSON, answer.to_string().as_bytes());
        self.send(conn, &out);
    }

    fn send_changes(&mut self, store: &Store) {
        let mut due = Vec::new();
        for (&conn, watch) in self.watches.iter_mut().filter(|(_, at)| at.next <= store.revision) {
            let changes = store.changes.iter().filter(|change| {
                change.revision >= watch.next && watch.range.contains(&change.key)
            });
            let events: Vec<Value> = changes.map(Change::event).collect();
            watch.next = store.revision + 1;
            if !events.is_empty() {
                let mut out = Vec::new();
                let changed = json!({ "header": store.header(), "events": events });
                write_line(watch.stream, &mut out, &changed);
                due.push((conn, out));
            }
        }
        due.into_iter().for_each(|(conn, out)| self.send(conn, &out));
    }

    fn send(&mut self, conn: ConnId, bytes: &[u8]) {
        if self.reactor.send(conn, bytes).is_err() {
            self.end(conn);
        }
    }

    fn end(&mut self, conn: ConnId) {
        self.reactor.close(conn);
        self.open.remove(&conn);
        self.watches.remove(&conn);
    }
}

/// An answer in a stream of answers.
fn write_line(stream: BodyStream, out: &mut Vec<u8>, result: &Value) {
    stream.write(out, format!("{}\n", json!({ "result": result })).as_bytes());
}

/// Status of HTTP, code of gRPC, and text.
type Refusal = (u16, u32, &'static str);

const COMPACTED: Refusal = (400, 11, "etcdserver: mvcc: required revision has been compacted");
const LEASE_NOT_FOUND: Refusal = (404, 5, "etcdserver: requested lease not found");

impl Default for Store {
    fn default() -> Store {
        let (keys, leases) = (BTreeMap::new(), BTreeMap::new());
        Store { revision: 1, compacted: 0, keys, leases, changes: Vec::new(), leases_granted: 0 }
    }
}

impl Store {
    fn header(&self) -> Value {
        json!({ "cluster_id": "1", "revision": self.revision.to_string() })
    }

    /// The last answer of a watch that is behind the last compaction.
    fn cancelled(&self) -> Value {
        let compacted = self.compacted.to_string();
        json!({ "header": self.header(), "canceled": true, "compact_revision": compacted })
    }

    fn answer(&mut self, path: &str, body: &Value, now: Nanos) -> Result<Value, Refusal> {
        let malformed = (400, 3, "malformed request");
        let of_body = |field: &str| body[field].as_str().and_then(|id| id.parse::<u64>().ok());
        match path {
            "/v3/lease/grant" => {
                let seconds = body["TTL"].as_u64().ok_or(malformed)?;
                self.leases_granted += 1;
                let id = self.leases_granted;
                self.leases.insert(id, Lease { seconds, ends: now + seconds * SECOND });
                Ok(json!({
                    "header": self.header(), "ID": id.to_string(), "TTL": seconds.to_string(),
                }))
            }
            "/v3/lease/keepalive" => {
                let (id, header) = (of_body("ID").ok_or(malformed)?, self.header());
                let kept = self.leases.get_mut(&id).map(|lease| {
                    lease.ends = now + lease.seconds * SECOND;
                    lease.seconds.to_string()
                });
                let mut result = json!({ "header": header, "ID": id.to_string() });
                // A lease that is not there has no TTL.
                if let Some(seconds) = kept {
                    result["TTL"] = seconds.into();
                }
                Ok(json!({ "result": result }))
            }
            "/v3/lease/revoke" => {
                let id = of_body("ID").filter(|id| self.leases.contains_key(id));
                self.end_leases(&BTreeSet::from([id.ok_or(LEASE_NOT_FOUND)?]));
                Ok(json!({ "header": self.header() }))
            }
            "/v3/kv/put" => {
                let (key, lease) = (decode(&body["key"]), of_body("lease"));
                let value = body["value"].as_str().ok_or(malformed)?.to_owned();
                let lease = lease.filter(|id| self.leases.contains_key(id));
                let lease = lease.ok_or(LEASE_NOT_FOUND)?;
                let key = key.ok_or(malformed)?;
                self.revision += 1;
                let changed = self.revision;
                self.keys.insert(key.clone(), StoredKey { lease, changed });
                self.changes.push(Change { revision: changed, key, value: Some(value) });
                Ok(json!({ "header": self.header() }))
            }
            "/v3/kv/range" => {
                let range = KeyRange::of(body).ok_or(malformed)?;
                let revision = of_body("revision").unwrap_or(self.revision);
                if revision < self.compacted {
                    return Err(COMPACTED);
                }
                let found = self.read(&range, revision);
                let mut answer = json!({ "header": self.header() });
                // A count of 0 is left out.
                if !found.is_empty() {
                    answer["count"] = found.len().to_string().into();
                }
                let limit = body["limit"].as_u64().map_or(found.len(), |limit| limit as usize);
                if body["count_only"] != true && !found.is_empty() {
                    answer["kvs"] = found.iter().take(limit).map(|change| change.pair()).collect();
                    // False is left out.
                    if found.len() > limit {
                        answer["more"] = true.into();
                    }
                }
                Ok(answer)
            }
            _ => Err((404, 5, "Not Found")),
        }
    }

    /// The pairs of this range at a revision, in order of their keys.
    fn read(&self, range: &KeyRange, revision: u64) -> Vec<&Change> {
        let mut found = BTreeMap::new();
        for change in self.changes.iter().filter(|change| change.revision <= revision) {
            if range.contains(&change.key) {
                found.insert(&change.key, change);
            }
        }
        found.into_values().filter(|change| change.value.is_some()).collect()
    }

    /// Ends these leases. Each takes its keys with it.
    fn end_leases(&mut self, ids: &BTreeSet<u64>) {
        for id in ids {
            self.leases.remove(id);
            let keys = self.keys.iter().filter(|(_, stored)| stored.lease == *id);
            let keys: Vec<Vec<u8>> = keys.map(|(key, _)| key.clone()).collect();
            if !keys.is_empty() {
                self.revision += 1;
            }
            for key in keys {
                self.keys.remove(&key);
                self.changes.push(Change { revision: self.revision, key, value: None });
            }
        }
    }
}

impl Change {
    /// The key with its value.
    fn pair(&self) -> Value {
        let (key, revision) = (BASE64_STANDARD.encode(&self.key), self.revision.to_string());
        match &self.value {
            Some(value) => json!({ "key": key, "value": value, "mod_revision": revision }),
            None => json!({ "key": key, "mod_revision": revision }),
        }
    }

    /// The event of a watch. A put has no type.
    fn event(&self) -> Value {
        match self.value {
            Some(_) => json!({ "kv": self.pair() }),
            None => json!({ "type": "DELETE", "kv": self.pair() }),
        }
    }
}

fn decode(text: &Value) -> Option<Vec<u8>> {
    BASE64_STANDARD.decode(text.as_str()?).ok()
}
