//! An agent of the library between Baton's own workers. It speaks the same protocol, and runs the
//! same managers: the decode worker generates from the KV that went through the agent's memory.

use crate::attacks::announced;
use crate::process::{PATIENCE, post};
use crate::stranger::registry;
use crate::{body, choices, dual, prefill, start, with_room};
use baton::agent::AgentConfig;
use baton::agent::requests::{AgentEventKind, AuxPayload};
use baton::agent::thread::AgentThread;
use baton::ids::{PageId, Role, Room};
use baton::kv::layout::{KvDtype, KvLayout};
use baton::kv::region::Region;
use baton::transfer::manager::rooms::Slot;
use baton::wire::auth::Keyring;
use baton::wire::message::{Announce, Transport};
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

const PAGES: u32 = 64;
/// Other pages than those of the workers, so that pieces of pages move.
const PAGE_SIZE: u32 = 8;

/// The settings of an agent over this memory that a worker accepts as its like.
fn config(like: &Announce, region: &Arc<Region>, transport: Transport) -> AgentConfig {
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    AgentConfig {
        fingerprint: like.fingerprint,
        bit_class: like.bit_class,
        transports: vec![transport],
        ..AgentConfig::new(region.clone(), layout(like), PAGES, [0; 32], host)
    }
}

fn layout(like: &Announce) -> KvLayout {
    let kv = &like.kv;
    KvLayout::page_major(PAGE_SIZE, kv.layers, kv.kv_heads, kv.head_dim, KvDtype::F32)
}

/// Waits for the end of a request, which must land. Returns the bytes of its source.
fn await_landing(agent: &AgentThread, slot: Slot) -> Option<AuxPayload> {
    let (client, begun, mut payload) = (agent.client(), Instant::now(), None);
    loop {
        assert!(begun.elapsed() < PATIENCE, "no end");
        let Some(event) = client.poll() else {
            client.event_fd().wait_readable(PATIENCE).unwrap();
            continue;
        };
        match event.kind {
            AgentEventKind::Met => {}
            AgentEventKind::Landed(bytes) => payload = bytes,
            AgentEventKind::Failed(cause) => panic!("the KV is not handed over: {cause:?}"),
            AgentEventKind::Ended => {
                client.release(slot).unwrap();
                return payload;
            }
        }
    }
}

fn hand_on(transport: Transport) {
    let name = transport.name();
    let (prefill, decode) =
        (prefill(&["--transfer", name]), start("decode", &["--transfer", name]));
    let like = announced(&decode, Keyring::default());
    let bytes = u64::from(PAGES) * layout(&like).page_bytes();
    let region = Arc::new(Region::new(c"kv", bytes as usize).unwrap());
    let request = body(5, 90, 8);
    let ids: Vec<u32> = serde_json::from_value(request["prompt"].clone()).unwrap();
    let pages: Vec<PageId> = (0..layout(&like).pages_for(90)).rev().map(PageId).collect();

    let to = AgentThread::start(Role::Decode, config(&like, &region, transport)).unwrap();
    let (address, first) = (prefill.address, with_room(request.clone(), &prefill, 11));
    let reader = thread::spawn(move || post(address, "/v1/completions", &first));
    let control = SocketAddr::new(prefill.address.ip(), prefill.control_port);
    let slot = to.client().wish(Room(11), control, &ids, PATIENCE).unwrap();
    to.client().lease(slot, 0, &pages).unwrap();
    let payload = await_landing(&to, slot).expect("the first token");
    let first_token = choices(&reader.join().unwrap())[0]["token_ids"][0].clone();

    let from = AgentThread::start(Role::Prefill, config(&like, &region, transport)).unwrap();
    let slot = from.client().offer(Room(12), &ids, PATIENCE).unwrap();
    from.client().lease(slot, 0, &pages).unwrap();
    from.client().compute(slot, 90).unwrap();
    from.client().send_last(slot, &payload).unwrap();
    let registry = registry(None, from.address().unwrap().port());
    let mut second = request.clone();
    second["bootstrap_host"] = json!("127.0.0.1");
    second["bootstrap_port"] = json!(registry.port());
    second["bootstrap_room"] = json!(12);
    let answer = choices(&post(decode.address, "/v1/completions", &second.to_string()));
    assert_eq!(await_landing(&from, slot), None);

    assert_eq!(answer[0]["token_ids"][0], first_token, "{name}");
    let (_, writer) = dual(prefill.address, decode.address, with_room(request, &prefill, 1));
    assert_eq!(answer[0]["token_ids"], choices(&writer)[0]["token_ids"], "{name}");
    assert_eq!(answer[0]["logprobs"], choices(&writer)[0]["logprobs"], "{name}");
}

#[test]
fn an_agent_hands_kv_on_from_a_prefill_worker_to_a_decode_worker_over_shm() {
    hand_on(Transport::Shm);
}

#[test]
fn an_agent_hands_kv_on_from_a_prefill_worker_to_a_decode_worker_over_tcp() {
    hand_on(Transport::Tcp);
}
