//! The verbs leaf on a real RDMA device, between two processes: bytes, notices, faults.
//!
//! Ignored tests need a device. The other tests run this same program in guests with soft-RoCE
//! (`tools/rdma-guest`), with the ignored tests. If the packages of the guests are missing, these
//! tests are skipped with a message, or fail if `BATON_REQUIRE_RDMA` is set. On a machine with a
//! NIC: `cargo test --test rdma -- --ignored --test-threads 1`.

mod between;
mod far;
#[path = "../cluster/fleet.rs"]
mod fleet;
mod guests;
mod peer;
#[path = "../cluster/process.rs"]
#[allow(dead_code)]
mod process;
mod relay;
mod rig;
mod workers;

use baton::stdx::seal::{SealingAllocator, seal_thread, violations};
use baton::sys::verbs::{CompletionError, CompletionKind, LocalPiece, Marks, RemoteAddress};
use peer::Peer;
use rig::{Node, pattern};
use std::env;
use std::path::Path;
use std::process::Command;

#[global_allocator]
static ALLOCATOR: SealingAllocator = SealingAllocator;

/// Work requests of one doorbell.
const CHAIN: usize = 33;
const BLOCK: usize = 6 << 10;

/// A KV hand-off in small: blocks from here and there to here and there, and one notice behind them
/// all.
#[test]
#[ignore = "needs an RDMA device"]
fn scattered_blocks_land_before_their_notice() {
    const BLOCKS: usize = 256;
    let mut peer = Peer::start();
    let mut node = Node::source();
    peer.connect(&mut node);
    let mut chain = node.chain(CHAIN, 1);
    for round in 0..3 {
        node.fill(|at| pattern(round, at));
        peer.fill(0xee);
        // Odd factors reach each place once.
        let places =
            |factor: usize| (0..BLOCKS).map(move |i| (i * factor + 7 * round) % 1024 * BLOCK);
        for (id, (from, to)) in places(401).zip(places(613)).enumerate() {
            let piece = LocalPiece { registration: 0, offset: from, len: BLOCK as u32 };
            chain.write(id as u64, &[piece], peer.at(to), Marks::default());
            if id + 1 == BLOCKS {
                let header = LocalPiece { registration: 0, offset: 0, len: 32 };
                let (inline, immediate) =
                    (node.pair.capacity().inline >= 32, Some(0xba70_0000 + round as u32));
                let marks = Marks { signalled: true, inline, immediate };
                chain.write(BLOCKS as u64, &[header], peer.at(1024 * BLOCK), marks);
            }
            if chain.len() >= CHAIN - 1 {
                node.pair.post(&mut chain).expect("there is room");
                chain.clear();
            }
        }
        assert!(chain.is_empty(), "whole chains");
        let completion = node.await_sent();
        assert_eq!(
            (completion.id, completion.outcome),
            (BLOCKS as u64, Ok(CompletionKind::Written))
        );
        assert_eq!(peer.await_notice(), Ok(0xba70_0000 + round as u32));

        let mut expected = vec![0xee; rig::REGION_BYTES];
        for (from, to) in places(401).zip(places(613)) {
            (0..BLOCK).for_each(|i| expected[to + i] = pattern(round, from + i));
        }
        (0..32).for_each(|i| expected[1024 * BLOCK + i] = pattern(round, i));
        assert!(peer.memory() == expected, "round {round}: not byte for byte");
        assert!(node.none_sent(), "one completion, of the one that was signalled");
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn several_pieces_become_one_run() {
    const PIECES: usize = 8;
    let mut peer = Peer::start();
    let mut node = Node::source();
    peer.connect(&mut node);
    node.fill(|at| pattern(1, at));
    peer.fill(0);
    let mut chain = node.chain(CHAIN, PIECES);
    let from = |i: usize| (i * 997 % 2048) * 1024;
    for run in 0..CHAIN {
        let pieces: Vec<LocalPiece> = (0..PIECES)
            .map(|i| LocalPiece { registration: 0, offset: from(run * PIECES + i), len: 1000 })
            .collect();
        let marks = Marks { immediate: (run + 1 == CHAIN).then_some(7), ..Marks::default() };
        chain.write(run as u64, &pieces, peer.at(run * PIECES * 1000), marks);
    }
    chain.signal_last(0);
    node.pair.post(&mut chain).expect("there is room");
    assert_eq!(node.await_sent().outcome, Ok(CompletionKind::Written));
    assert_eq!(peer.await_notice(), Ok(7));
    let mut expected = vec![0; rig::REGION_BYTES];
    for i in 0..CHAIN * PIECES {
        (0..1000).for_each(|byte| expected[i * 1000 + byte] = pattern(1, from(i) + byte));
    }
    assert!(peer.memory() == expected, "not byte for byte");
}

#[test]
#[ignore = "needs an RDMA device"]
fn inline_bytes_are_those_of_the_time_of_posting() {
    let mut peer = Peer::start();
    let mut node = Node::source();
    peer.connect(&mut node);
    peer.fill(0);
    let mut chain = node.chain(1, 1);
    for value in 1..=20 {
        node.fill(|_| value);
        let piece = LocalPiece { registration: 0, offset: 0, len: 64 };
        let marks = Marks { inline: true, immediate: Some(value.into()), signalled: value == 20 };
        chain.clear();
        chain.write(value.into(), &[piece], peer.at(64 * usize::from(value)), marks);
        node.pair.post(&mut chain).expect("there is room");
        node.fill(|_| 0xff);
    }
    assert_eq!(node.await_sent().id, 20);
    for value in 1..=20 {
        assert_eq!(peer.await_notice(), Ok(value));
    }
    let memory = peer.memory();
    for value in 0..=20 {
        assert_eq!(memory[64 * value..64 * (value + 1)], [value as u8; 64]);
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn faults_have_their_causes_and_a_reset_pair_serves_again() {
    let mut peer = Peer::start();
    let mut node = Node::source();
    node.fill(|at| pattern(2, at));
    let piece = LocalPiece { registration: 0, offset: 0, len: 4096 };
    let mut chain = node.chain(4, 1);
    peer.connect(&mut node);
    let good = peer.at(0);
    let wrong = [
        ("key", RemoteAddress { key: good.key ^ 0x5a00, ..good }),
        ("bounds", peer.at(rig::REGION_BYTES - 4095)),
        ("below", RemoteAddress { address: good.address - 1, ..good }),
    ];
    for (what, remote) in wrong {
        peer.fill(0x11);
        chain.clear();
        chain.write(0, &[piece], remote, Marks::default());
        chain.write(1, &[piece], peer.at(0), Marks { signalled: true, ..Marks::default() });
        node.pair.post(&mut chain).expect("there is room");
        // The one that fails completes though it was not signalled; what is behind it is flushed.
        let completion = node.await_sent();
        assert_eq!(
            (completion.id, completion.outcome),
            (0, Err(CompletionError::RemoteAccess)),
            "{what}"
        );
        let completion = node.await_sent();
        assert_eq!(
            (completion.id, completion.outcome),
            (1, Err(CompletionError::Flushed)),
            "{what}"
        );
        assert_eq!(peer.await_notice(), Err("flushed".into()), "{what}");
        assert!(peer.memory().iter().all(|&byte| byte == 0x11), "{what}: something has landed");

        peer.connect(&mut node);
        chain.clear();
        chain.write(
            2,
            &[piece],
            peer.at(0),
            Marks { immediate: Some(3), signalled: true, inline: false },
        );
        node.pair.post(&mut chain).expect("there is room");
        assert_eq!(node.await_sent().outcome, Ok(CompletionKind::Written), "after {what}");
        assert_eq!(peer.await_notice(), Ok(3), "after {what}");
        let landed = &peer.memory()[..4096];
        assert!(
            landed.iter().enumerate().all(|(at, &byte)| byte == pattern(2, at)),
            "after {what}"
        );
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn a_pair_that_is_ended_flushes_and_a_dead_peer_is_noticed() {
    let mut peer = Peer::start();
    let mut node = Node::source();
    peer.connect(&mut node);
    let piece = LocalPiece { registration: 0, offset: 0, len: 4096 };
    let mut chain = node.chain(1, 1);
    chain.write(5, &[piece], peer.at(0), Marks { signalled: true, ..Marks::default() });
    node.pair.fail().expect("any state can be left so");
    node.pair.post(&mut chain).expect("taken, to be flushed");
    let completion = node.await_sent();
    assert_eq!((completion.id, completion.outcome), (5, Err(CompletionError::Flushed)));

    peer.connect(&mut node);
    peer.kill();
    node.pair.post(&mut chain).expect("there is room");
    assert_eq!(node.await_sent().outcome, Err(CompletionError::NoAnswer));
}

#[test]
#[ignore = "needs an RDMA device"]
fn nothing_is_allocated_from_filling_to_completion() {
    let mut peer = Peer::start();
    let mut node = Node::source();
    peer.connect(&mut node);
    let mut chain = node.chain(CHAIN, 2);
    let places: Vec<RemoteAddress> = (0..CHAIN).map(|i| peer.at(i * 8192)).collect();
    let before = violations();
    for round in 0..4 {
        let seal = seal_thread();
        chain.clear();
        for (i, &to) in places.iter().enumerate() {
            let piece = |offset| LocalPiece { registration: 0, offset, len: 512 };
            let pieces = [piece(i * 4096), piece(i * 2048)];
            chain.write(i as u64, &pieces, to, Marks::default());
        }
        chain.signal_last(0);
        node.pair.post(&mut chain).expect("there is room");
        node.pair.post_receive(round).expect("there is room");
        let completion = node.await_sent();
        drop(seal);
        assert_eq!(completion.outcome, Ok(CompletionKind::Written));
    }
    assert_eq!(violations(), before);
    let seal = seal_thread();
    let allocated = vec![1u8];
    drop(seal);
    assert_eq!(violations(), before + 1, "the allocator does not watch");
    drop(allocated);
}

/// Production's hand-off, from the control link to the mover, in two processes; each row's first is
/// compared byte for byte.
#[test]
#[ignore = "needs an RDMA device"]
fn kv_is_handed_over_between_two_processes() {
    let arguments = [
        "bench",
        "transfer",
        "--case",
        "small",
        "--transport",
        "rdma",
        "--duration",
        "0",
        "--json",
    ];
    for threads in ["fused", "split"] {
        let mut bench = Command::new(env!("CARGO_BIN_EXE_baton"));
        let output = bench.args(arguments).args(["--data-threads", threads]).output();
        let output = output.expect("the binary was built");
        let (said, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}{errors}");
        let verified = said.lines().filter(|row| row.contains("\"verified\":true"));
        let told = verified.filter(|row| row.contains(&format!("\"data_threads\":\"{threads}\"")));
        assert_eq!(told.count(), 8, "{said}");
    }
}

#[test]
#[ignore = "needs an RDMA device"]
fn doctor_lists_the_device() {
    let node = Node::source();
    let output = Command::new(env!("CARGO_BIN_EXE_baton"))
        .arg("doctor")
        .output()
        .expect("the binary was built");
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find(|line| line.contains(node.device.name()));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    eprintln!("{line}");
    assert!(line.contains(" up, ") && line.contains("GID"), "{line}");
}

/// The other process of a test; alone it does nothing.
#[test]
#[ignore = "the other process of the other tests"]
fn peer_process() {
    if let Some(path) = env::var_os(peer::SOCKET) {
        peer::serve(Path::new(&path));
    }
}
