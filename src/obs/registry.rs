//! Counters, gauges and histograms over atomics, and the registry that lists them.
//!
//! Thread: recording from any, without lock or allocation. The registry is filled at start and then
//! shared (a router's follows its workers); a reader sees each number whole, but not all of one instant, save those of a [`GaugeGroup`].
//! Names and labels are given by the code: a name with two kinds or a metric registered twice is a
//! programmer's error and panics at start.

use super::exposition::{self, Sample};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// One more.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Takes over a count that is kept elsewhere; it never falls.
    pub fn raise_to(&self, count: u64) {
        self.0.fetch_max(count, Relaxed);
    }

    /// `count` more.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// The number.
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that is set.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets it.
    #[inline]
    pub fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }

    /// The number.
    pub fn value(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

/// Numbers that are set and read together, so that a reader can rely on what holds between them.
/// One thread sets. A sequence lock: odd while a set is under way.
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
    /// Sets them all. Only one thread may do so.
    pub fn set(&self, values: [u64; N]) {
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence + 1, Relaxed);
        fence(Release);
        for (cell, value) in self.values.iter().zip(values) {
            cell.store(value, Relaxed);
        }
        self.sequence.store(sequence + 2, Release);
    }

    /// All of them, of one set. Waits for a set that is under way.
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

/// How often values fell below each of a row of bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One per bound, and one for what is beyond the last.
    counts: Box<[AtomicU64]>,
    /// Bits of an f64.
    sum: AtomicU64,
}

impl Histogram {
    /// `bounds` ascend and are finite.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        assert!(bounds.is_sorted_by(|a, b| a < b) && bounds.iter().all(|bound| bound.is_finite()));
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram { bounds, counts, sum: AtomicU64::new(0) }
    }

    /// Records a value; one that is not a number is dropped, as it would spoil the sum for ever.
    #[inline]
    pub fn observe(&self, value: f64) {
        if value.is_nan() {
            return;
        }
        self.counts[self.bounds.partition_point(|&bound| bound < value)].fetch_add(1, Relaxed);
        // The closure never declines, so the update never fails.
        let _ = self
            .sum
            .fetch_update(Relaxed, Relaxed, |sum| Some((f64::from_bits(sum) + value).to_bits()));
    }

    /// Sum of all values.
    pub fn sum(&self) -> f64 {
        f64::from_bits(self.sum.load(Relaxed))
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Relaxed)).sum()
    }

    /// (bound, values at most that), ascending, the last without bound.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter()).scan(0, |total, (bound, count)| {
            *total += count.load(Relaxed);
            Some((bound, *total))
        })
    }
}

/// Labels of a metric, written out once.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Labels(pub(super) String);

impl Labels {
    /// No label.
    pub fn none() -> Labels {
        Labels::default()
    }

    /// These and one more. `value` may be anything: it is escaped.
    pub fn and(&self, name: &'static str, value: &str) -> Labels {
        let mut text = self.0.clone();
        exposition::push_label(&mut text, name, value);
        Labels(text)
    }
}

/// States that something has: those of a page.
pub const STATES: usize = 4;

#[derive(Debug)]
struct Family {
    name: &'static str,
    help: &'static str,
    members: Vec<(Labels, Sample)>,
}

/// All metrics of a process.
#[derive(Debug, Default)]
pub struct Registry {
    families: Vec<Family>,
}

impl Registry {
    /// Makes a counter and lists it under each of `names`.
    pub fn counter(
        &mut self,
        names: &[&'static str],
        help: &'static str,
        labels: &Labels,
    ) -> Arc<Counter> {
        let counter = Arc::new(Counter::default());
        self.list(names, help, labels, || Sample::Counter(counter.clone()));
        counter
    }

    /// Makes a gauge, likewise.
    pub fn gauge(
        &mut self,
        names: &[&'static str],
        help: &'static str,
        labels: &Labels,
    ) -> Arc<Gauge> {
        let gauge = Arc::new(Gauge::default());
        self.list(names, help, labels, || Sample::Gauge(gauge.clone()));
        gauge
    }

    /// Makes the gauges of the states of something, told apart by the label `state`, likewise.
    pub fn states(
        &mut self,
        names: &[&'static str],
        help: &'static str,
        labels: &Labels,
        states: &'static [&'static str; STATES],
    ) -> Arc<GaugeGroup<STATES>> {
        let group = Arc::new(GaugeGroup::default());
        self.list(names, help, labels, || Sample::States(group.clone(), states));
        group
    }

    /// Makes a histogram, likewise.
    pub fn histogram(
        &mut self,
        names: &[&'static str],
        help: &'static str,
        labels: &Labels,
        bounds: &'static [f64],
    ) -> Arc<Histogram> {
        let histogram = Arc::new(Histogram::new(bounds));
        self.list(names, help, labels, || Sample::Histogram(histogram.clone()));
        histogram
    }

    /// Takes the metrics with exactly these labels off the lists: what they were about is gone.
    pub fn unlist(&mut self, labels: &Labels) {
        for family in &mut self.families {
            family.members.retain(|(known, _)| known != labels);
        }
        self.families.retain(|family| !family.members.is_empty());
    }

    /// Appends all metrics in Prometheus' text format.
    pub fn expose(&self, out: &mut String) {
        for family in &self.families {
            exposition::push_family(out, family.name, family.help, &family.members);
        }
    }

    fn list(
        &mut self,
        names: &[&'static str],
        help: &'static str,
        labels: &Labels,
        sample: impl Fn() -> Sample,
    ) {
        for &name in names {
            let member = (labels.clone(), sample());
            match self.families.iter_mut().find(|family| family.name == name) {
                None => self.families.push(Family { name, help, members: vec![member] }),
                Some(family) => {
                    let (_, first) = &family.members[0];
                    assert_eq!(first.kind(), member.1.kind(), "{name} is of one kind");
                    let is_new = family.members.iter().all(|(known, _)| known != labels);
                    assert!(is_new, "{name}{{{}}} is registered once", labels.0);
                    family.members.push(member);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_is_unlisted_is_shown_no_more_and_may_come_back() {
        let mut registry = Registry::default();
        let [a, b] = ["a", "b"].map(|value| Labels::none().and("l", value));
        registry.gauge(&["g"], "G.", &a).set(1.0);
        registry.gauge(&["g"], "G.", &b).set(2.0);
        let exposed = |registry: &Registry| {
            let mut out = String::new();
            registry.expose(&mut out);
            out
        };
        registry.unlist(&a);
        let text = exposed(&registry);
        assert!(!text.contains("l=\"a\"") && text.contains("l=\"b\""), "{text}");
        registry.unlist(&b);
        assert_eq!(exposed(&registry), "");
        registry.gauge(&["g"], "G.", &a).set(3.0);
        assert!(exposed(&registry).contains("g{l=\"a\"} 3"));
    }

    #[test]
    #[should_panic = "of one kind"]
    fn a_name_has_one_kind() {
        let mut registry = Registry::default();
        registry.counter(&["a"], "A.", &Labels::none());
        registry.gauge(&["a"], "A.", &Labels::none().and("b", "c"));
    }

    #[test]
    #[should_panic = "registered once"]
    fn a_metric_is_registered_once() {
        let mut registry = Registry::default();
        registry.counter(&["a"], "A.", &Labels::none());
        registry.counter(&["a"], "A.", &Labels::none());
    }
}
