//! A provider of verbs in this process, for tests and benches. Production code posts to it through
//! the same table of functions. Work requests are written as a NIC's driver writes them: in 64-byte
//! entries behind a doorbell. A step of the fabric executes them by copying.
//!
//! It injects faults that a NIC or soft-RoCE cannot offer: delayed packets, any order of queue
//! pairs, chosen failures, lost completions, stalled posts, broken devices. It checks keys, bounds,
//! permissions, receives and resets as the standard requires. A simulator with its own network and
//! clock moves each request step by step (`steps`).
//! Not here: packets, loss on the wire, time.

mod queue;
mod steps;
mod table;
#[cfg(test)]
mod tests;
mod wire;

use super::abi::ListedDevice;
use super::completion::CompletionError;
use super::device::Device;
use super::endpoint::Route;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, thread};
use wire::Wire;

pub use steps::Landed;

/// A separate fabric that connects all devices opened from it.
pub struct Fabric(Arc<Shared>);

/// When posted work is executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepMode {
    /// When the fabric is stepped.
    Stepped = 0,
    /// When any completion queue is polled.
    Polled = 1,
    /// When any queue is polled, but no byte is moved and no peer notified: for the cost of posting
    /// and polling alone.
    Discarded = 2,
}

/// A fault of all devices at a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeviceFault {
    /// Queue pairs are neither destroyed nor reset.
    KeepsPairs = 1,
    /// A poll reports more completions than there is room for.
    Overreports = 2,
}

/// Counts of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueuePairCounts {
    /// Doorbells rung.
    pub doorbells: u64,
    /// Work requests posted.
    pub requests: u64,
}

pub(super) struct Shared {
    wire: Mutex<Wire>,
    pace: AtomicU8,
    /// Maximum bytes of a region, for devices opened from now on.
    region_max: AtomicU64,
    /// The place of devices opened from now on.
    place: AtomicU32,
    /// The place of devices with a fault, and the fault; 0: no fault.
    fault: AtomicU64,
    /// Posting threads block.
    stalls: AtomicBool,
    /// A thread is blocked.
    has_stalled: AtomicBool,
}

impl Fabric {
    /// An empty fabric that waits for steps.
    pub fn new() -> Fabric {
        let pace = AtomicU8::new(StepMode::Stepped as u8);
        Fabric(Arc::new(Shared {
            wire: Mutex::default(),
            pace,
            region_max: AtomicU64::new(1 << 40),
            place: AtomicU32::new(0),
            fault: AtomicU64::new(0),
            stalls: AtomicBool::new(false),
            has_stalled: AtomicBool::new(false),
        }))
    }

    /// A device on the fabric. Two devices act as two hosts in one process.
    #[allow(unsafe_code)]
    pub fn device(&self) -> Arc<Device> {
        let listed = Arc::as_ptr(&self.0).cast_mut().cast::<ListedDevice>();
        let name = table::NAME.to_string_lossy().into_owned();
        // SAFETY: this table's `open_device` expects the pointer of an `Arc` that is still held.
        let device = unsafe { Device::open_listed(&table::LIBRARY, listed, name) };
        Arc::new(device.expect("it always opens"))
    }

    /// The route of all its devices.
    pub fn route(&self) -> Route {
        let info = self.device().info().expect("it always answers");
        let port = &info.ports[0];
        Route::new(port, &port.addresses[0])
    }

    /// Limits regions to this many bytes on devices opened from now on.
    pub fn limit_regions(&self, bytes: u64) {
        self.0.region_max.store(bytes, Ordering::Relaxed);
    }

    /// Sets when work is executed.
    pub fn set_pace(&self, pace: StepMode) {
        self.0.wire().discards = pace == StepMode::Discarded;
        self.0.pace.store(pace as u8, Ordering::Relaxed);
    }

    /// Executes all possible requests, queue pair by queue pair. Returns their number.
    pub fn step(&self) -> usize {
        self.0.wire().step_all()
    }

    /// Executes one request of a queue pair, so that a test can choose the order. Returns false if
    /// it has none, or waits for a receive.
    pub fn step_pair(&self, number: u32) -> bool {
        self.0.wire().step(number)
    }

    /// From now on, requests of this queue pair are read from memory but do not arrive.
    pub fn hold(&self, number: u32) {
        self.0.wire().held.insert(number);
    }

    /// Held requests arrive with the next steps, unless the destination was reset. They arrive even
    /// if their source has ended.
    pub fn release(&self, number: u32) {
        self.0.wire().held.remove(&number);
    }

    /// From now on the devices at this place, and no others, have a fault.
    pub fn break_devices(&self, place: u32, fault: DeviceFault) {
        self.0.fault.store(fault_at(place, fault), Ordering::Release);
    }

    /// From now on a posting thread blocks until this is reset. Then its request is posted.
    pub fn stall(&self, stalls: bool) {
        self.0.stalls.store(stalls, Ordering::Release);
    }

    /// Whether a thread has blocked.
    pub fn has_stalled(&self) -> bool {
        self.0.has_stalled.load(Ordering::Acquire)
    }

    /// Makes the next request of this queue pair fail.
    pub fn fail_next(&self, number: u32, fault: CompletionError) {
        self.with(number, |pair| pair.next_status = Some(fault.status()));
    }

    /// Drops the next completion of a work request of this queue pair.
    pub fn lose_completion(&self, number: u32) {
        self.with(number, |pair| pair.completions_lost += 1);
    }

    /// The counts of a queue pair so far.
    pub fn counts(&self, number: u32) -> QueuePairCounts {
        let mut counts = QueuePairCounts { doorbells: 0, requests: 0 };
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

fn fault_at(place: u32, fault: DeviceFault) -> u64 {
    u64::from(place) << 8 | fault as u64
}

impl Shared {
    fn has_fault(&self, place: u32, fault: DeviceFault) -> bool {
        self.fault.load(Ordering::Acquire) == fault_at(place, fault)
    }

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
        if self.pace.load(Ordering::Relaxed) != StepMode::Stepped as u8 {
            self.wire().step_all();
        }
    }
}
