//! The hand-off of one request over each transport beside a bare copy of the same bytes,
//! interleaved in one run; and the plan alone: `cargo bench --bench handoff`.
//!
//! One thread steps both movers in turn, as in `baton serve`, and also both ends of the bare
//! stream. Figures are medians; ratios are medians over repeats. The layout is SmolLM2's: 30
//! layers, 3 KV heads of dimension 64, f16.

#[path = "../tests/transports/rig.rs"]
#[allow(dead_code)]
mod rig;
#[path = "../tests/transports/way.rs"]
#[allow(dead_code)]
mod way;

use baton::ids::PageId;
use baton::kv::layout::{KvDtype, KvLayout};
use baton::transfer::plan::Template;
use baton::transfer::status::State;
use rig::{Handoff, POOL, Rig};
use std::hint::black_box;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use way::Kind;

const REPEATS: usize = 15;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() {
    let (ours, theirs) = (layout(16), rig::layer_major_of(layout(16)));
    println!("plan of {POOL} tokens, one chunk");
    for (name, from, to) in [
        ("page-major to page-major", ours, ours),
        ("page size 16 to 4", ours, layout(4)),
        ("layer-major to page-major", theirs, ours),
    ] {
        plan(name, &from, &to);
    }
    for tokens in [48, POOL] {
        for (name, kind) in [
            ("shm", Kind::Shm),
            ("tcp, 1 lane", Kind::Wide(1)),
            ("tcp, 4 lanes", Kind::Wide(4)),
            ("fake", Kind::Fake),
        ] {
            handoff(name, kind, tokens);
        }
    }
}

fn layout(page_size: u32) -> KvLayout {
    KvLayout::page_major(page_size, 30, 3, 64, KvDtype::F16)
}

fn plan(name: &str, from: &KvLayout, to: &KvLayout) {
    let template = Template::new(from, to).expect("layouts that fit");
    let (mut runs, mut bytes) = (0, 0);
    // Every second page, so that runs do not merge across pages.
    let page = |index: usize| PageId(index as u32 * 2);
    let times = (0..101).map(|_| {
        (runs, bytes) = (0, 0);
        let begun = Instant::now();
        for run in template.all_runs(0..POOL, page, page) {
            runs += 1;
            bytes += black_box(run).bytes;
        }
        micros(begun.elapsed())
    });
    let time = median(times.collect());
    let mib = bytes as f64 / f64::from(1 << 20);
    println!(
        "  {name:<26} {time:8.2} us, {runs} runs, {mib:.1} MiB, {:.1} ns a run",
        time * 1e3 / runs as f64
    );
}

fn handoff(name: &str, kind: Kind, tokens: u32) {
    let mut rig = Rig::with_layouts(kind, layout(16), layout(16));
    rig.watches = false;
    let bytes = u64::from(tokens.div_ceil(16)) * layout(16).page_bytes();
    let mut bare = Bare::new(kind, bytes as usize);
    let mut runs = Vec::new();
    for room in 0..REPEATS as u64 + 1 {
        let session = baton::transfer::target::SessionId(0);
        let handoff = rig.begin(session, room, tokens);
        while rig.turn() {}
        let ours = one(&mut rig, &handoff);
        rig.until("both leases are back", |rig| {
            rig.states(&handoff) == [State::Success; 2] && rig.holds_no_lease(&handoff)
        });
        rig.release(&handoff);
        runs.push([bare.run(), ours]);
    }
    // The first run touches the pages.
    runs.remove(0);
    let column = |at: usize| median(runs.iter().map(|run| run[at]).collect());
    let mib = bytes as f64 / f64::from(1 << 20);
    let ours = column(1);
    if matches!(kind, Kind::Fake) {
        println!("{name:<13} {tokens:4} tokens, no bytes: {ours:7.0} us");
        return;
    }
    let ratio = median(runs.iter().map(|run| run[1] / run[0]).collect());
    println!(
        "{name:<13} {tokens:4} tokens, {mib:4.1} MiB: {ours:7.0} us, {:4.1} GB/s; \
         bare {:7.0} us; {ratio:.2} x",
        bytes as f64 / ours / 1e3,
        column(0)
    );
}

/// Time from the last chunk's end to the destination's Success, in microseconds.
fn one(rig: &mut Rig, handoff: &Handoff) -> f64 {
    let begun = Instant::now();
    rig.chunk(handoff, 0..handoff.tokens);
    while rig.states(handoff)[1] != State::Success {
        rig.source_mover.step();
        rig.destination_mover.step();
        assert!(begun.elapsed() < PATIENCE, "no end");
    }
    micros(begun.elapsed())
}

/// The baseline of a transport: a copy of the same bytes without a hand-off.
enum Bare {
    Copy { from: Vec<u8>, to: Vec<u8> },
    Stream { lanes: Vec<(TcpStream, TcpStream)>, from: Vec<u8>, to: Vec<u8> },
}

impl Bare {
    fn new(kind: Kind, bytes: usize) -> Bare {
        let (from, to) = (vec![1; bytes], vec![0; bytes]);
        match kind {
            Kind::Wide(lanes) => {
                let lanes: Vec<_> = (0..lanes).map(|_| way::wide_pair()).collect();
                for stream in lanes.iter().flat_map(|(near, far)| [near, far]) {
                    stream.set_nonblocking(true).expect("a socket");
                }
                Bare::Stream { lanes, from, to }
            }
            _ => Bare::Copy { from, to },
        }
    }

    fn run(&mut self) -> f64 {
        let begun = Instant::now();
        match self {
            Bare::Copy { from, to } => to.copy_from_slice(black_box(from)),
            Bare::Stream { lanes, from, to } => {
                let share = from.len().div_ceil(lanes.len());
                let mut ways: Vec<_> = lanes
                    .iter_mut()
                    .zip(from.chunks(share).zip(to.chunks_mut(share)))
                    .map(|((near, far), (from, to))| (near, far, from, to))
                    .collect();
                while ways.iter().any(|(.., to)| !to.is_empty()) {
                    for (near, far, from, to) in &mut ways {
                        let sent = some(near.write(from));
                        *from = &from[sent..];
                        let read = if to.is_empty() { 0 } else { some(far.read(to)) };
                        *to = &mut std::mem::take(to)[read..];
                    }
                    assert!(begun.elapsed() < PATIENCE, "no end");
                }
            }
        }
        micros(begun.elapsed())
    }
}

fn some(moved: std::io::Result<usize>) -> usize {
    match moved {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        moved => moved.expect("an open stream"),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn micros(duration: Duration) -> f64 {
    duration.as_nanos() as f64 / 1e3
}
