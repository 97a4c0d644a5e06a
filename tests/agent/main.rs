//! Agents: the transfer engine under another engine, with a thread of its own or driven by a test.

mod last_resort;

use baton::agent::client::{AgentClient, AgentError};
use baton::agent::requests::{AgentEventKind, AuxPayload};
use baton::agent::thread::AgentThread;
use baton::agent::{AgentConfig, DestinationAgent, SourceAgent};
use baton::cause::Cause;
use baton::ids::{PageId, Role, Room};
use baton::kv::layout::{KeyValue, KvDtype, KvLayout};
use baton::kv::region::Region;
use baton::link::handoff::{Source, prompt_of};
use baton::net::Reactor;
use baton::obs::log;
use baton::transfer::answer::TransferAnswer;
use baton::transfer::aux::{AUX_PAYLOAD_BYTES, AuxRecord};
use baton::transfer::manager::rooms::Slot;
use baton::transfer::target::Target;
use baton::wire::auth::{ClusterKey, Keyring};
use baton::wire::message::Transport;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGES: u32 = 32;
const LAYERS: u32 = 2;
/// One head of one word in each layer.
const SOURCE: KvLayout = KvLayout::layer_major(4, LAYERS, 1, 4, KvDtype::F16, PAGES);
const DESTINATION: KvLayout = KvLayout::page_major(8, LAYERS, 1, 4, KvDtype::F16);
const PATIENCE: Duration = Duration::from_secs(30);
const PAYLOAD: AuxPayload = [7; AUX_PAYLOAD_BYTES];

fn config(role: Role, transport: Transport, region: &Arc<Region>) -> AgentConfig {
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    AgentConfig {
        slots: 4,
        prompt_pages: 16,
        sessions: 4,
        transports: vec![transport],
        ..AgentConfig::new(region.clone(), layout_of(role), PAGES, [1; 32], host)
    }
}

fn layout_of(role: Role) -> KvLayout {
    if role == Role::Prefill { SOURCE } else { DESTINATION }
}

fn memory(role: Role) -> Arc<Region> {
    let bytes = u64::from(PAGES) * layout_of(role).page_bytes();
    Arc::new(Region::new(c"kv", bytes as usize).unwrap())
}

/// An agent, its memory, and the events that it has told.
struct Side {
    agent: AgentThread,
    region: Arc<Region>,
    layout: KvLayout,
    told: HashMap<Slot, Vec<AgentEventKind>>,
}

impl Side {
    fn new(role: Role, transport: Transport, keys: Keyring) -> Side {
        Side::with(role, transport, |config| AgentConfig { keys, ..config })
    }

    fn with(
        role: Role,
        transport: Transport,
        change: impl FnOnce(AgentConfig) -> AgentConfig,
    ) -> Side {
        let (layout, region) = (layout_of(role), memory(role));
        let config = change(config(role, transport, &region));
        let agent = AgentThread::start(role, config).unwrap();
        Side { agent, region, layout, told: HashMap::new() }
    }

    fn client(&self) -> &AgentClient {
        self.agent.client()
    }

    /// Takes the events that have come.
    fn look(&mut self) {
        while let Some(event) = self.agent.client().poll() {
            self.told.entry(event.slot).or_default().push(event.kind);
        }
    }

    /// Waits for the end of a request, and releases it. Returns its events.
    fn end(&mut self, slot: Slot) -> Vec<AgentEventKind> {
        let until = Instant::now() + PATIENCE;
        while self.told.get(&slot).and_then(|told| told.last()) != Some(&AgentEventKind::Ended) {
            assert!(Instant::now() < until, "no end of {slot:?}: {:?}", self.told.get(&slot));
            std::thread::sleep(Duration::from_millis(1));
            self.look();
        }
        self.client().release(slot).unwrap();
        self.told.remove(&slot).unwrap()
    }

    fn await_met(&mut self, slot: Slot) {
        let until = Instant::now() + PATIENCE;
        while !self.told.get(&slot).is_some_and(|told| told.contains(&AgentEventKind::Met)) {
            assert!(Instant::now() < until, "no other end of {slot:?}");
            std::thread::sleep(Duration::from_millis(1));
            self.look();
        }
    }

    fn pages(&self, from: u32, tokens: u32) -> Vec<PageId> {
        // Not in order, so that runs are split.
        (from..from + self.layout.pages_for(tokens)).rev().map(PageId).collect()
    }

    /// The words of these tokens, and their values for this room.
    fn words(&self, room: Room, tokens: Range<u32>, pages: &[PageId]) -> Vec<(usize, u64)> {
        let mut words = Vec::new();
        for token in tokens {
            let (page, within) = (token / self.layout.page_size, token % self.layout.page_size);
            for layer in 0..LAYERS {
                for (number, which) in [KeyValue::Key, KeyValue::Value].into_iter().enumerate() {
                    let at = self.layout.offset(pages[page as usize], layer, which, 0, within);
                    let place = u64::from(token) << 8 | u64::from(layer) << 4 | number as u64;
                    words.push((at as usize, room.0 << 32 | place));
                }
            }
        }
        words
    }

    fn compute(&self, room: Room, tokens: Range<u32>, pages: &[PageId]) {
        for (at, value) in self.words(room, tokens, pages) {
            self.region.word(at).store(value, Ordering::Relaxed);
        }
    }

    fn wrong(&self, room: Room, tokens: Range<u32>, pages: &[PageId]) -> usize {
        let words = self.words(room, tokens, pages);
        let is_wrong =
            |&&(at, value): &&(usize, u64)| self.region.word(at).load(Ordering::Relaxed) != value;
        words.iter().filter(is_wrong).count()
    }
}

fn pair(transport: Transport) -> (Side, Side, SocketAddr) {
    let key = || Keyring::default();
    let source = Side::new(Role::Prefill, transport, key());
    let destination = Side::new(Role::Decode, transport, key());
    let address = source.agent.address().unwrap();
    (source, destination, address)
}

/// A call that waits for a slot: a released one is free when the agent has taken the release.
fn with_slot(call: impl Fn() -> Result<Slot, AgentError>) -> Slot {
    let until = Instant::now() + PATIENCE;
    loop {
        match call() {
            Err(AgentError::Full) => assert!(Instant::now() < until, "no slot becomes free"),
            other => return other.unwrap(),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ids(tokens: u32) -> Vec<u32> {
    (0..tokens).collect()
}

/// Hands a prompt over in chunks, and checks events and bytes.
fn hand_over(
    (source, destination, address): &mut (Side, Side, SocketAddr),
    room: Room,
    (tokens, chunk, prefix): (u32, u32, u32),
    is_offer_first: bool,
) {
    let ids = ids(tokens);
    let offer = |source: &Side| with_slot(|| source.client().offer(room, &ids, PATIENCE));
    let early = is_offer_first.then(|| offer(source));
    let to = with_slot(|| destination.client().wish(room, *address, &ids, PATIENCE));
    let places = destination.pages(3, tokens);
    destination.client().lease(to, prefix, &places).unwrap();
    let from = early.unwrap_or_else(|| offer(source));
    let pages = source.pages(0, tokens);
    let (mut computed, mut leased) = (0, 0);
    while computed < tokens {
        let next = tokens.min(computed + chunk);
        // An engine that computes in chunks allocates pages for each of them.
        let wanted = source.layout.pages_for(next) as usize;
        if wanted > leased {
            source.client().lease(from, 0, &pages[leased..wanted]).unwrap();
            leased = wanted;
        }
        source.compute(room, computed..next, &pages);
        source.client().compute(from, next).unwrap();
        computed = next;
    }
    source.client().send_last(from, &PAYLOAD).unwrap();
    let landed = AgentEventKind::Landed(Some(PAYLOAD));
    let [met, ended] = [AgentEventKind::Met, AgentEventKind::Ended];
    assert_eq!(destination.end(to), [met.clone(), landed, ended.clone()]);
    assert_eq!(destination.wrong(room, prefix..tokens, &places), 0, "{room:?}");
    assert_eq!(source.end(from), [met, AgentEventKind::Landed(None), ended]);
}

#[test]
fn kv_is_handed_over_in_any_order_and_chunks() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let mut pair = pair(transport);
        let mut room = 1;
        for is_offer_first in [true, false] {
            for shape in [(1, 1, 0), (7, 3, 0), (40, 40, 0), (61, 4, 0), (33, 9, 8), (20, 5, 16)] {
                hand_over(&mut pair, Room(room), shape, is_offer_first);
                room += 1;
            }
        }
    }
}

/// Each end of the hand-off can end it, before and after both have met.
#[test]
fn a_cancelled_request_fails_at_both_ends_and_ends_once() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let mut pair = pair(transport);
        let mut room = 100;
        for by_source in [true, false] {
            for after_meeting in [true, false] {
                let (source, destination, address) = &mut pair;
                let (room_now, ids) = (Room(room), ids(30));
                room += 1;
                let from = source.client().offer(room_now, &ids, PATIENCE).unwrap();
                let to = destination.client().wish(room_now, *address, &ids, PATIENCE).unwrap();
                source.client().lease(from, 0, &source.pages(0, 30)).unwrap();
                destination.client().lease(to, 0, &destination.pages(0, 30)).unwrap();
                if after_meeting {
                    source.await_met(from);
                    source.client().compute(from, 10).unwrap();
                }
                match by_source {
                    true => source.client().cancel(from).unwrap(),
                    false => destination.client().cancel(to).unwrap(),
                }
                if !by_source && !after_meeting {
                    // A source that has not met its destination learns nothing from it.
                    source.client().cancel(from).unwrap();
                }
                for (side, slot) in [(source, from), (destination, to)] {
                    let mut told = side.end(slot);
                    told.retain(|kind| *kind != AgentEventKind::Met);
                    let is_well = matches!(
                        told.as_slice(),
                        [AgentEventKind::Failed(_), AgentEventKind::Ended]
                    );
                    assert!(is_well, "{told:?}");
                }
                hand_over(&mut pair, Room(room), (30, 7, 0), true);
                room += 1;
            }
        }
    }
}

/// A destination that has all KV already leases nothing. Its source need not wait for a deadline.
#[test]
fn a_destination_that_needs_nothing_ends_the_offer() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let (mut source, mut destination, address) = pair(transport);
        let from = source.client().offer(Room(6), &ids(20), PATIENCE).unwrap();
        source.client().lease(from, 0, &source.pages(0, 20)).unwrap();
        let to = destination.client().wish(Room(6), address, &ids(20), PATIENCE).unwrap();
        destination.await_met(to);
        destination.client().cancel(to).unwrap();
        for (side, slot) in [(&mut destination, to), (&mut source, from)] {
            let told = side.end(slot);
            assert!(told.contains(&AgentEventKind::Failed(Cause::Aborted)), "{told:?}");
        }
    }
}

#[test]
fn two_prompts_in_one_room_are_a_mismatch() {
    let (mut source, mut destination, address) = pair(Transport::Shm);
    let room = Room(9);
    let from = source.client().offer(room, &ids(20), PATIENCE).unwrap();
    let to = destination.client().wish(room, address, &[5; 20], PATIENCE).unwrap();
    destination.client().lease(to, 0, &destination.pages(0, 20)).unwrap();
    for (side, slot) in [(&mut source, from), (&mut destination, to)] {
        let told = side.end(slot);
        assert!(told.contains(&AgentEventKind::Failed(Cause::Mismatch)), "{told:?}");
    }
}

#[test]
fn a_source_that_ends_fails_the_requests_of_its_destinations() {
    let (source, mut destination, address) = pair(Transport::Tcp);
    let to = destination.client().wish(Room(4), address, &ids(20), PATIENCE).unwrap();
    destination.client().lease(to, 0, &destination.pages(0, 20)).unwrap();
    destination.await_met(to);
    drop(source);
    let told = destination.end(to);
    assert!(matches!(told[1], AgentEventKind::Failed(Cause::PeerLost)), "{told:?}");
}

#[test]
fn a_request_has_a_deadline() {
    let (mut source, ..) = pair(Transport::Shm);
    let endless = source.client().offer(Room(2), &ids(5), Duration::MAX).unwrap();
    source.client().cancel(endless).unwrap();
    source.end(endless);
    let slot = source.client().offer(Room(1), &ids(5), Duration::from_millis(20)).unwrap();
    let told = source.end(slot);
    assert_eq!(told, [AgentEventKind::Failed(Cause::Deadline), AgentEventKind::Ended]);
}

#[test]
fn a_peer_without_the_key_gets_nothing() {
    let key = || Keyring::new(ClusterKey::new(&[7; 32]));
    let source = Side::new(Role::Prefill, Transport::Shm, key());
    let address = source.agent.address().unwrap();
    let ask = |side: &Side| side.client().wish(Room(4), address, &ids(20), PATIENCE).unwrap();
    let mut friend = Side::new(Role::Decode, Transport::Shm, key());
    let slot = ask(&friend);
    friend.await_met(slot);
    let mut stranger = Side::new(Role::Decode, Transport::Shm, Keyring::default());
    let slot = ask(&stranger);
    let told = stranger.end(slot);
    let failed = AgentEventKind::Failed(Cause::Incompatible);
    assert_eq!(told, [failed, AgentEventKind::Ended]);
}

#[test]
fn a_wrong_call_is_an_error_and_has_no_effect() {
    let mut pair = pair(Transport::Shm);
    let (source, destination, address) = &mut pair;
    let (at_source, room) = (source.client(), Room(1));
    assert_eq!(at_source.wish(room, *address, &ids(4), PATIENCE), Err(AgentError::Role));
    assert_eq!(destination.client().offer(room, &ids(4), PATIENCE), Err(AgentError::Role));
    assert_eq!(at_source.offer(room, &[], PATIENCE), Err(AgentError::Tokens));
    assert_eq!(at_source.offer(room, &ids(16 * 4 + 1), PATIENCE), Err(AgentError::Tokens));
    let slot = at_source.offer(room, &ids(9), PATIENCE).unwrap();
    let pages = source.pages(0, 9);
    let stranger = Slot { id: slot.id, generation: baton::ids::Generation(77) };
    assert_eq!(at_source.lease(stranger, 0, &pages), Err(AgentError::Slot));
    assert_eq!(at_source.lease(slot, 4, &pages), Err(AgentError::Tokens));
    assert_eq!(at_source.lease(slot, 0, &[]), Err(AgentError::Pages));
    assert_eq!(at_source.lease(slot, 0, &[PageId(PAGES); 3]), Err(AgentError::Pages));
    assert_eq!(at_source.compute(slot, 1), Err(AgentError::Pages));
    at_source.lease(slot, 0, &pages[..2]).unwrap();
    assert_eq!(at_source.lease(slot, 0, &pages[..2]), Err(AgentError::Pages));
    assert_eq!(at_source.compute(slot, 9), Err(AgentError::Pages));
    assert_eq!(at_source.compute(slot, 10), Err(AgentError::Tokens));
    at_source.compute(slot, 5).unwrap();
    assert_eq!(at_source.compute(slot, 4), Err(AgentError::Tokens));
    at_source.lease(slot, 0, &pages[2..]).unwrap();
    let to = destination.client().wish(room, *address, &ids(9), PATIENCE).unwrap();
    let places = destination.pages(0, 9);
    assert_eq!(destination.client().lease(to, 0, &places[1..]), Err(AgentError::Pages));
    assert_eq!(destination.client().lease(to, 4, &places), Err(AgentError::Tokens));
    destination.client().lease(to, 0, &places).unwrap();
    assert_eq!(destination.client().lease(to, 0, &places), Err(AgentError::Repeated));
    destination.client().cancel(to).unwrap();
    destination.end(to);
    assert_eq!(at_source.release(slot), Err(AgentError::Open));
    at_source.cancel(slot).unwrap();
    assert_eq!(at_source.cancel(slot), Err(AgentError::Repeated));
    assert!(source.end(slot).contains(&AgentEventKind::Failed(Cause::Aborted)));
    assert_eq!(source.client().release(slot), Err(AgentError::Slot));
    assert_eq!(source.client().status(slot), Err(AgentError::Slot));
    let offer = |source: &Side, room| source.client().offer(Room(room), &ids(2), PATIENCE);
    let all: Vec<_> = (0..4).map(|room| with_slot(|| offer(source, room))).collect();
    assert_eq!(offer(source, 5), Err(AgentError::Full));
    for slot in all {
        source.client().cancel(slot).unwrap();
        source.end(slot);
    }
    hand_over(&mut pair, Room(50), (30, 7, 0), true);
}

/// The bytes of two prompts must not mix.
#[test]
fn a_page_that_is_written_is_in_one_lease() {
    let (_source, mut destination, address) = pair(Transport::Shm);
    let wish = |destination: &Side, room| {
        destination.client().wish(Room(room), address, &ids(20), PATIENCE).unwrap()
    };
    let (one, two) = (wish(&destination, 1), wish(&destination, 2));
    destination.client().lease(one, 0, &destination.pages(0, 20)).unwrap();
    destination.client().lease(two, 0, &destination.pages(2, 20)).unwrap();
    let told = destination.end(two);
    assert!(told.contains(&AgentEventKind::Failed(Cause::Refused)), "{told:?}");
    // Pages of a prefix are read only, so requests share them.
    let three = wish(&destination, 3);
    let mut shared = destination.pages(0, 20);
    shared[2] = PageId(9);
    destination.client().lease(three, 16, &shared).unwrap();
    let repeated = [PageId(20), PageId(21), PageId(20)];
    let four = wish(&destination, 4);
    destination.client().lease(four, 0, &repeated).unwrap();
    assert!(destination.end(four).contains(&AgentEventKind::Failed(Cause::Refused)));
    for slot in [one, three] {
        destination.client().cancel(slot).unwrap();
        let told = destination.end(slot);
        assert!(told.contains(&AgentEventKind::Failed(Cause::Aborted)), "{told:?}");
    }
}

#[test]
fn after_the_end_of_an_agent_each_order_is_an_error() {
    let (source, ..) = pair(Transport::Shm);
    let slot = source.client().offer(Room(1), &ids(5), PATIENCE).unwrap();
    let client = source.agent.client().clone();
    drop(source);
    assert!(client.is_dead());
    assert_eq!(client.offer(Room(2), &ids(5), PATIENCE), Err(AgentError::Dead));
    assert_eq!(client.cancel(slot), Err(AgentError::Dead));
}

/// An engine that looks after its agent only when the descriptor is readable must learn of the end.
#[test]
fn the_descriptor_stays_readable_after_the_end_of_an_agent() {
    let (source, ..) = pair(Transport::Tcp);
    let slot = source.client().offer(Room(1), &ids(4), PATIENCE).unwrap();
    source.client().cancel(slot).unwrap();
    let client = source.agent.client().clone();
    assert!(client.event_fd().wait_readable(PATIENCE).unwrap());
    let until = Instant::now() + PATIENCE;
    while client.status(slot).unwrap().cause.is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(source.agent);
    let mut told = 0;
    while client.poll().is_some() {
        told += 1;
    }
    assert!(told > 0, "the events were unread at the end");
    for _ in 0..2 {
        assert!(client.event_fd().wait_readable(Duration::ZERO).unwrap());
        assert!(client.poll().is_none() && client.is_dead());
    }
}

/// A thread still leases pages while another one ends the request and begins the next.
#[test]
fn a_late_call_does_not_change_the_next_request_of_its_slot() {
    let (source, ..) = pair(Transport::Tcp);
    let client = source.agent.client().clone();
    let (ids, wanted) = (ids(16), source.pages(0, 16));
    let end = |slot: Slot| {
        client.cancel(slot).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < until, "no end");
            match client.poll() {
                Some(event) if event.kind == AgentEventKind::Ended => break,
                Some(_) => {}
                None => _ = client.event_fd().wait_readable(Duration::from_millis(1)).unwrap(),
            }
        }
        // A call that still runs keeps the slot.
        while client.release(slot) == Err(AgentError::Open) {
            assert!(Instant::now() < until, "no release");
        }
    };
    let (late, slots) = std::sync::mpsc::channel::<Slot>();
    let caller = client.clone();
    let leasing = std::thread::spawn(move || {
        for slot in slots {
            while caller.lease(slot, 0, &[PageId(9)]) != Err(AgentError::Slot) {}
        }
    });
    for round in 0..500 {
        let slot = with_slot(|| client.offer(Room(round), &ids, PATIENCE));
        late.send(slot).unwrap();
        end(slot);
        let next = with_slot(|| client.offer(Room(round), &ids, PATIENCE));
        client.lease(next, 0, &wanted).unwrap();
        assert_eq!(client.compute(next, 16), Ok(()), "round {round}");
        end(next);
    }
    drop(late);
    leasing.join().unwrap();
}

#[test]
fn a_source_has_one_session_under_both_notations_of_its_address() {
    let (source, mut destination, address) = pair(Transport::Tcp);
    let SocketAddr::V4(v4) = address else { panic!("a test on 127.0.0.1") };
    let mapped = SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port());
    let wish = |room, address| destination.client().wish(Room(room), address, &ids(4), PATIENCE);
    let [first, second] = [wish(1, address).unwrap(), wish(2, mapped).unwrap()];
    destination.await_met(first);
    destination.await_met(second);
    assert_eq!(destination.client().status(first).unwrap().cause, None);
    drop(source);
}

/// An agent that the test drives, of each role.
fn driven_source() -> SourceAgent {
    let config = config(Role::Prefill, Transport::Tcp, &memory(Role::Prefill));
    SourceAgent::source(config, Reactor::new().unwrap()).unwrap()
}

fn driven_destination() -> DestinationAgent {
    let config = config(Role::Decode, Transport::Tcp, &memory(Role::Decode));
    DestinationAgent::destination(config, Reactor::new().unwrap()).unwrap()
}

/// Both ends enter a request, and the destination leases pages. After its lease, the destination
/// has one turn.
fn meet(
    source: &mut SourceAgent,
    destination: &mut DestinationAgent,
    room: Room,
) -> (Slot, Target) {
    let (prompt, until) = (prompt_of(&[1; 8]), Instant::now() + PATIENCE);
    let from = source.enter(room, prompt, None, until).unwrap();
    let address = Source::Remote(source.address().unwrap());
    let slot = destination.enter(room, prompt, Some(&address), until).unwrap();
    let session = loop {
        source.turn(false, |_| Ok(())).unwrap();
        destination.turn(false, |_| Ok(())).unwrap();
        if let Some(TransferAnswer::SessionReady { session, .. }) = destination.poll_answer() {
            break session;
        }
        assert!(Instant::now() < until, "no session");
    };
    destination.expect(slot, (session, room), 0..8, &[PageId(3)]);
    destination.turn(false, |_| Ok(())).unwrap();
    loop {
        source.turn(true, |_| Ok(())).unwrap();
        if let Some(TransferAnswer::Granted { target, .. }) = source.poll_answer() {
            return (from, target);
        }
        assert!(Instant::now() < until, "the pages have not left");
    }
}

/// The owner's thread can wait after one turn, so the turn must not leave a message behind.
#[test]
fn the_pages_of_a_destination_leave_with_its_next_turn() {
    meet(&mut driven_source(), &mut driven_destination(), Room(1));
}

/// One destination stands still and confirms nothing. The end of the source leaves time to say Bye
/// to the other one.
#[test]
fn a_source_that_ends_says_bye_although_a_destination_stands_still() {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let (logged, this_thread) = (lines.clone(), std::thread::current().id());
    log::set_sink(Some(Box::new(move |_, line| {
        // Other tests of this process log, too.
        if std::thread::current().id() == this_thread {
            logged.lock().unwrap().push(line.to_owned());
        }
    })));
    let mut source = driven_source();
    let (mut still, mut live) = (driven_destination(), driven_destination());
    let (slot, target) = meet(&mut source, &mut still, Room(1));
    meet(&mut source, &mut live, Room(2));
    source.begin(slot, target, &[PageId(0), PageId(1)]);
    source.chunk(slot, 0..8, Some(AuxRecord::new(Room(1), PAYLOAD)));
    let until = Instant::now() + PATIENCE;
    while source.poll_end().is_none() {
        source.turn(true, |_| Ok(())).unwrap();
        assert!(Instant::now() < until, "no end");
    }
    source.leave(slot, None);
    assert!(source.check_idle().is_err(), "the destination has confirmed it");
    // Less than the silence that ends a link: no destination has a turn meanwhile.
    source.close(Instant::now() + Duration::from_millis(800)).unwrap();
    let said = |words| lines.lock().unwrap().iter().any(|line: &String| line.contains(words));
    while !said("control link closed after Bye") {
        live.turn(true, |_| Ok(())).unwrap();
        assert!(!said("link is down") && Instant::now() < until, "{:?}", lines.lock().unwrap());
    }
    log::set_sink(None);
}
