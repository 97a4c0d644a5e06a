//! A provider of verbs in this process, for tests and benches: production code posts to it unknowingly, since
//! it stands behind the same table of functions. Work requests are written as a NIC's driver writes them, in
//! entries of 64 bytes behind a doorbell, and carried out by copying when the fabric is stepped.
//!
//! It does what neither a NIC nor soft-RoCE does on demand: holds packets back, carries queue pairs out in any
//! order, fails a request with a given cause, loses completions, keeps who posts. Keys, bounds, permissions, receives and resets
//! are checked as the standard says. Who has a network and a clock of their own lets each request leave, land and be
//! answered by itself (`steps`). Not here: packets, loss on the wire, time.

mod queue;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod wire;

use super::abi::ListedDevice;
use super::completion::Fault;
use super::device::Device;
use super::endpoint::Route;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use wire::Wire;

pub use steps::Landed;

/// A fabric of its own, on which all devices opened from it meet.
pub struct Fabric(Arc<Shared>);

/// When posted work is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// When the fabric is stepped.
    Stepped = 0,
    /// When any completion queue is polled.
    Polled = 1,
    /// Likewise, but no byte is moved and nobody notified: for what posting and polling cost.
    Discarded = 2,
}

/// What a queue pair was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counts {
    /// Doorbells rung.
    pub doorbells: u64,
    /// Work requests posted.
    pub requests: u64,
}

pub(super) struct Shared {
    wire: Mutex<Wire>,
    pace: AtomicU8,
    /// Bytes of a region, of devices that are opened from now on.
    region_max: AtomicU64,
    /// Of devices that are opened from now on.
    place: AtomicU32,
    /// Who posts does not come back.
    stalls: AtomicBool,
    /// Somebody does not.
    has_stalled: AtomicBool,
}

impl Fabric {
    /// An empty one, that waits to be stepped.
    pub fn new() -> Fabric {
        let pace = AtomicU8::new(Pace::Stepped as u8);
        Fabric(Arc::new(Shared {
            wire: Mutex::default(),
            pace,
            region_max: AtomicU64::new(1 << 40),
            place: AtomicU32::new(0),
            stalls: AtomicBool::new(false),
            has_stalled: AtomicBool::new(false),
        }))
    }

    /// A device on it. Two of them are as two hosts, in one process.
    #[allow(unsafe_code)]
    pub fn device(&self) -> Arc<Device> {
        let listed = Arc::as_ptr(&self.0).cast_mut().cast::<ListedDevice>();
        let name = table::NAME.to_string_lossy().into_owned();
        // SAFETY: what this table's `open_device` asks for: our `Arc`'s pointer, while we hold it.
        let device = unsafe { Device::open_listed(&table::LIBRARY, listed, name) };
        Arc::new(device.expect("it opens always"))
    }

    /// The way that all its devices have.
    pub fn route(&self) -> Route {
        let info = self.device().info().expect("it answers always");
        let port = &info.ports[0];
        Route::new(port, &port.addresses[0])
    }

    /// Devices that are opened from now on take regions of at most so many bytes.
    pub fn limit_regions(&self, bytes: u64) {
        self.0.region_max.store(bytes, Ordering::Relaxed);
    }

    /// Sets when work is carried out.
    pub fn set_pace(&self, pace: Pace) {
        self.0.wire().discards = pace == Pace::Discarded;
        self.0.pace.store(pace as u8, Ordering::Relaxed);
    }

    /// Carries out all that can be, queue pair by queue pair. How much that was.
    pub fn step(&self) -> usize {
        self.0.wire().step_all()
    }

    /// Carries out one request of a queue pair: the test says in which order they go. False: it has none, or
    /// waits for a receive.
    pub fn step_pair(&self, number: u32) -> bool {
        self.0.wire().step(number)
    }

    /// From now on what leaves this queue pair is read from memory, but does not arrive.
    pub fn hold(&self, number: u32) {
        self.0.wire().held.insert(number);
    }

    /// What was held arrives with the next steps, unless the destination was reset. Also after the source's end.
    pub fn release(&self, number: u32) {
        self.0.wire().held.remove(&number);
    }

    /// From now on a thread that posts stays there until this is taken back; then what it came with is posted.
    pub fn stall(&self, stalls: bool) {
        self.0.stalls.store(stalls, Ordering::Release);
    }

    /// A thread has been kept.
    pub fn has_stalled(&self) -> bool {
        self.0.has_stalled.load(Ordering::Acquire)
    }

    /// The next request of this queue pair fails.
    pub fn fail_next(&self, number: u32, fault: Fault) {
        self.with(number, |pair| pair.next_status = Some(fault.status()));
    }

    /// The next completion of a work request of this queue pair never comes.
    pub fn lose_completion(&self, number: u32) {
        self.with(number, |pair| pair.completions_lost += 1);
    }

    /// What a queue pair was given so far.
    pub fn counts(&self, number: u32) -> Counts {
        let mut counts = Counts { doorbells: 0, requests: 0 };
        self.with(number, |pair| (counts.doorbells, counts.requests) = pair.queue.counts());
        counts
    }

    fn with(&self, number: u32, change: impl FnOnce(&mut wire::Pair)) {
        if let Some(pair) = self.0.wire().pairs.get_mut(&number) {
            change(pair);
        }
    }
}

impl Default for Fabric {
    fn default() -> Fabric {
        Fabric::new()
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").finish_non_exhaustive()
    }
}

impl Shared {
    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn keep(&self) {
        while self.stalls.load(Ordering::Acquire) {
            self.has_stalled.store(true, Ordering::Release);
            thread::sleep(Duration::from_micros(100));
        }
    }

    #[inline]
    fn polled(&self) {
        if self.pace.load(Ordering::Relaxed) != Pace::Stepped as u8 {
            self.wire().step_all();
        }
    }
}
