//! Counters, gauges and histograms over atomics, and the labels that they carry.
//!
//! Thread: any. Recording takes no lock and allocates nothing. Invariant: a reader sees each number
//! whole. Different numbers can be of different moments, except those of a [`GaugeGroup`].

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Raises the counter to a count that other code keeps. The counter never falls.
    pub fn raise_to(&self, count: u64) {
        self.0.fetch_max(count, Relaxed);
    }

    /// Adds `count`.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// The current count.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that can be set to any value.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the value.
    #[inline]
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    /// The current value.
    pub fn value(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

/// Numbers that are set and read together, so that a reader can rely on relations between them.
/// Only one thread sets them. This is a sequence lock: the sequence is odd during a set.
#[derive(Debug)]
pub struct GaugeGroup<const N: usize> {
    sequence: AtomicU64,
    values: [AtomicU64; N],
}

impl<const N: usize> Default for GaugeGroup<N> {
    fn default() -> Self {
        GaugeGroup { sequence: AtomicU64::new(0), values: [const { AtomicU64::new(0) }; N] }
    }
}

impl<const N: usize> GaugeGroup<N> {
    /// Sets all values. Only one thread may call this.
    pub fn set(&self, values: [u64; N]) {
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence + 1, Relaxed);
        fence(Release);
        for (cell, value) in self.values.iter().zip(values) {
            cell.store(value, Relaxed);
        }
        self.sequence.store(sequence + 2, Release);
    }

    /// All values, from one set. Waits while a set is in progress.
    pub fn values(&self) -> [u64; N] {
        loop {
            let before = self.sequence.load(Acquire);
            let values = std::array::from_fn(|index| self.values[index].load(Relaxed));
            fence(Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                return values;
            }
            std::thread::yield_now();
        }
    }
}

/// Counts of values per bucket.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One per bound, and one for values above the last bound.
    counts: Box<[AtomicU64]>,
    /// The bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    /// Makes an empty histogram. `bounds` must ascend and be finite.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        assert!(bounds.is_sorted_by(|a, b| a < b) && bounds.iter().all(|bound| bound.is_finite()));
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Records a value. NaN is dropped because every later sum would be NaN.
    #[inline]
    pub fn observe(&self, value: f64) {
        if value.is_nan() {
            return;
        }
        self.counts[self.bounds.partition_point(|&bound| bound < value)].fetch_add(1, Relaxed);
        // The closure always returns `Some`, so the update cannot fail.
        let _ = self
            .sum
            .fetch_update(Relaxed, Relaxed, |sum| Some((f64::from_bits(sum) + value).to_bits()));
    }

    /// Sum of all values.
    pub fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Relaxed))
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// Pairs of (bound, number of values up to it), ascending; the last bound is infinite.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter()).scan(0, |total, (bound, count)| {
            *total += count.load(Relaxed);
            Some((bound, *total))
        })
    }
}

/// Labels of a metric, formatted once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels(pub(super) String);

impl Labels {
    /// No label.
    pub fn none() -> Labels {
        Labels::default()
    }

    /// These labels and one more. `value` can be any text: it is escaped.
    pub fn and(&self, name: &'static str, value: &str) -> Labels {
        let mut text = self.0.clone();
        push_label(&mut text, name, value);
        Labels(text)
    }
}

/// Number of values in a group of states. A page has this many states.
pub const STATES: usize = 4;

/// Appends `name="value"`, after a comma if it is not the first label.
pub(super) fn push_label(labels: &mut String, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    labels.push_str(name);
    labels.push_str("=\"");
    for c in value.chars() {
        match c {
            '\\' => labels.push_str("\\\\"),
            '"' => labels.push_str("\\\""),
            '\n' => labels.push_str("\\n"),
            c => labels.push(c),
        }
    }
    labels.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::obs::registry::Registry;

    #[test]
    fn a_value_on_a_bound_is_within_it() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 7.0, f64::NAN] {
            histogram.observe(value);
        }
        let cumulative: Vec<_> = histogram.cumulative().collect();
        assert_eq!(cumulative, [(1.0, 2), (2.0, 4), (f64::INFINITY, 5)]);
        assert_eq!((histogram.count(), histogram.sum()), (5, 12.0));
    }

    #[test]
    fn threads_lose_nothing() {
        let mut registry = Registry::default();
        let counter = registry.counter(&["c"], "C.", &Labels::none());
        let histogram = registry.histogram(&["h"], "H.", &Labels::none(), &[0.5]);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        counter.inc();
                        histogram.observe(1.0);
                    }
                });
            }
        });
        assert_eq!((counter.value(), histogram.count(), histogram.sum()), (4000, 4000, 4000.0));
    }

    #[test]
    fn a_group_is_read_as_it_was_set() {
        let group = GaugeGroup::<2>::default();
        let done = std::sync::atomic::AtomicBool::new(false);
        group.set([0, 100_000]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for free in 0..100_000 {
                    group.set([free, 100_000 - free]);
                }
                done.store(true, Release);
            });
            while !done.load(Acquire) {
                let [free, used] = group.values();
                assert_eq!(free + used, 100_000);
            }
        });
    }
}
