//! The registry that lists all metrics of a process.
//!
//! Thread: `ctl`. Owns: the list of metrics. It is filled at start. The list of a router also
//! changes when workers join and leave. Invariants: all names and label names are literals. A name
//! with two kinds, or a metric registered twice, is a programming error and panics.

use super::exposition::{self, Sample};
use super::instruments::{Counter, Gauge, GaugeGroup, Histogram, Labels, STATES};
use std::sync::Arc;

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
    /// Makes a counter and registers it under each of `names`.
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

    /// Makes a gauge and registers it under each of `names`.
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

    /// Makes the gauges of several states, distinguished by the label `state`, and registers them.
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

    /// Makes a histogram and registers it under each of `names`.
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

    /// Removes the metrics with exactly these labels, because their subject is gone.
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
    fn an_unlisted_metric_is_hidden_and_may_come_back() {
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
