//! The wire between two guests. It carries Ethernet frames, and loses, delays and reorders RoCE
//! frames by a rule.
//!
//! A guest sets the rule by a datagram to [`RULES`]. The datagram is a frame like the others, so
//! the rule applies to everything that the guest sends afterwards. A cut link
//! also reads it.
//!
//! Thread: two for each direction. One applies the rule to each frame; the other sends the frame,
//! with a delay if the rule says so.

use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// UDP port of datagrams that are rules; they go no further.
pub const RULES: u16 = 4790;
/// UDP port of RoCE v2.
const ROCE: u16 = 4791;
const FRAME_MAX: usize = 64 << 10;
/// How soon a thread sees that it is over.
const TICK: Duration = Duration::from_millis(100);

/// What becomes of frames, in both directions.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Rule {
    /// The name under which packets are counted.
    pub name: String,
    /// Delay of each frame in microseconds.
    pub delay: u64,
    /// Lost RoCE packets of each thousand.
    pub lost: u64,
    /// Late RoCE packets of each thousand.
    pub late: u64,
    /// Delay of a late packet in microseconds; others overtake it.
    pub lateness: u64,
    /// Number of RoCE packets after which all others are lost.
    pub cut_after: Option<u64>,
    /// Whether the cut also loses all other frames.
    pub cut_is_whole: bool,
}

/// Packets of RoCE under one rule.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    pub sent: u64,
    pub lost: u64,
    pub late: u64,
    /// Lost because the link was cut.
    pub cut: u64,
}

/// The wire; there is none when it is dropped.
pub struct Relay {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// One after the other; the last holds.
    rules: Mutex<Vec<(Rule, Counts)>>,
    is_over: AtomicBool,
}

impl Relay {
    /// Starts the wire between the guests with these sockets as `--net`.
    pub fn start(ends: [&Path; 2], seed: u64) -> Relay {
        let shared =
            Arc::new(Shared { rules: Mutex::new(vec![Default::default()]), ..Shared::default() });
        let mut threads = Vec::new();
        for (way, (from, to)) in [(ends[0], ends[1]), (ends[1], ends[0])].into_iter().enumerate() {
            let socket = UnixDatagram::bind(from).expect("a socket");
            socket.set_read_timeout(Some(TICK)).expect("a socket");
            let (frames, judged) = mpsc::channel();
            let judge = Judge {
                shared: shared.clone(),
                random: Random(seed << 1 | way as u64),
                frames,
                number: 0,
                begun: Instant::now(),
            };
            threads.push(thread::spawn(move || judge.run(&socket)));
            let guest = PathBuf::from(format!("{}.guest", to.display()));
            threads.push(thread::spawn(move || carry(&judged, &guest)));
        }
        Relay { shared, threads }
    }

    /// What was counted under all rules of this name.
    pub fn counts(&self, name: &str) -> Counts {
        let rules = self.shared.rules.lock().unwrap();
        let named = rules.iter().filter(|(rule, _)| rule.name == name);
        named.fold(Counts::default(), |sum, (_, counts)| Counts {
            sent: sum.sent + counts.sent,
            lost: sum.lost + counts.lost,
            late: sum.late + counts.late,
            cut: sum.cut + counts.cut,
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// One way: decides what becomes of each frame.
struct Judge {
    shared: Arc<Shared>,
    random: Random,
    frames: Sender<Reverse<Frame>>,
    number: u64,
    begun: Instant,
}

impl Judge {
    fn run(mut self, socket: &UnixDatagram) {
        let mut buffer = vec![0; FRAME_MAX];
        while !self.shared.is_over.load(Ordering::Relaxed) {
            match socket.recv(&mut buffer) {
                Ok(length) => self.judge(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("the wire: {error}"),
            }
        }
    }

    fn judge(&mut self, bytes: &[u8]) {
        let datagram = udp(bytes);
        let mut rules = self.shared.rules.lock().unwrap();
        if let Some((RULES, said)) = datagram {
            let rule = serde_json::from_slice(said).expect("a rule");
            eprintln!(
                "relay: {:?} {rule:?}, after {:?}",
                self.begun.elapsed(),
                rules.last().map(|(_, counts)| counts)
            );
            rules.push((rule, Counts::default()));
            return;
        }
        let (rule, counts) = rules.last_mut().expect("there is always one");
        let mut delay = rule.delay;
        let is_roce = datagram.is_some_and(|(port, _)| port == ROCE);
        let is_cut = rule.cut_after.is_some_and(|after| counts.sent >= after);
        if is_roce {
            counts.sent += 1;
            if is_cut {
                counts.cut += 1;
                return;
            }
            if self.random.of_thousand(rule.lost) {
                counts.lost += 1;
                return;
            }
            if self.random.of_thousand(rule.late) {
                counts.late += 1;
                delay += rule.lateness;
            }
        } else if is_cut && rule.cut_is_whole {
            return;
        }
        let due = Instant::now() + Duration::from_micros(delay);
        self.number += 1;
        // The other thread ends with this one.
        let _ =
            self.frames.send(Reverse(Frame { due, number: self.number, bytes: bytes.to_vec() }));
    }
}

/// One way: sends each frame when it is due.
fn carry(judged: &Receiver<Reverse<Frame>>, guest: &Path) {
    let socket = UnixDatagram::unbound().expect("a socket");
    // A guest that takes nothing for so long loses a frame, as by any wire.
    socket.set_write_timeout(Some(Duration::from_secs(1))).expect("a socket");
    let mut frames = BinaryHeap::new();
    loop {
        let now = Instant::now();
        let next =
            frames.peek().map(|Reverse(Frame { due, .. })| due.saturating_duration_since(now));
        let next = match next {
            Some(Duration::ZERO) => judged.try_recv().map_err(|_| RecvTimeoutError::Timeout),
            Some(wait) => judged.recv_timeout(wait),
            None => judged.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(frame) => frames.push(frame),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let Some(Reverse(frame)) = frames.pop() else { continue };
                // Before its start and after its end a guest hears nothing.
                let _ = socket.send_to(&frame.bytes, guest);
            }
        }
    }
}

/// In the order of when they are due.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Frame {
    due: Instant,
    /// Of two that are due at once the first to come goes first.
    number: u64,
    bytes: Vec<u8>,
}

/// Port and content of a frame that is UDP over IPv4.
fn udp(frame: &[u8]) -> Option<(u16, &[u8])> {
    const ETHERNET: usize = 14;
    let ip = frame.get(ETHERNET..)?;
    let is_udp = frame[12..14] == [8, 0] && ip.get(9) == Some(&17);
    let header = usize::from(ip.first()? & 15) * 4;
    let udp = ip.get(header..).filter(|_| is_udp)?;
    let port = u16::from_be_bytes([*udp.get(2)?, *udp.get(3)?]);
    let length = usize::from(u16::from_be_bytes([*udp.get(4)?, *udp.get(5)?]));
    Some((port, udp.get(8..length)?))
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn of_thousand(&mut self, count: u64) -> bool {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % 1000 < count
    }
}
