//! Prometheus' text format, version 0.0.4: how metric families are written.

use super::instruments::push_label;
use crate::obs::instruments::{Counter, Gauge, GaugeGroup, Histogram, Labels, STATES};
use std::fmt::{Display, Write};
use std::sync::Arc;

/// The value of `Content-Type`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metric of one set of labels.
#[derive(Debug)]
pub(super) enum Sample {
    Counter(Arc<Counter>),
    Gauge(Arc<Gauge>),
    States(Arc<GaugeGroup<STATES>>, &'static [&'static str; STATES]),
    Histogram(Arc<Histogram>),
}

impl Sample {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Sample::Counter(_) => "counter",
            Sample::Gauge(_) | Sample::States(..) => "gauge",
            Sample::Histogram(_) => "histogram",
        }
    }
}

/// Appends one family: HELP, TYPE, samples.
pub(super) fn push_family(out: &mut String, name: &str, help: &str, members: &[(Labels, Sample)]) {
    let kind = members.first().map_or("untyped", |(_, sample)| sample.kind());
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for (Labels(labels), sample) in members {
        match sample {
            Sample::Counter(counter) => push_sample(out, name, "", labels, counter.value()),
            Sample::Gauge(gauge) => push_sample(out, name, "", labels, gauge.value()),
            Sample::States(group, states) => {
                for (state, value) in states.iter().zip(group.values()) {
                    let mut labels = labels.clone();
                    push_label(&mut labels, "state", state);
                    push_sample(out, name, "", &labels, value);
                }
            }
            Sample::Histogram(histogram) => push_histogram(out, name, labels, histogram),
        }
    }
}

/// The count is that of the last bucket, so that the two agree even while values arrive.
fn push_histogram(out: &mut String, name: &str, labels: &str, histogram: &Histogram) {
    let mut count = 0;
    for (bound, cumulative) in histogram.cumulative() {
        let mut labels = labels.to_owned();
        let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
        push_label(&mut labels, "le", &bound);
        push_sample(out, name, "_bucket", &labels, cumulative);
        count = cumulative;
    }
    push_sample(out, name, "_sum", labels, histogram.sum());
    push_sample(out, name, "_count", labels, count);
}

fn push_sample(out: &mut String, name: &str, suffix: &str, labels: &str, value: impl Display) {
    let braced = if labels.is_empty() { "" } else { &format!("{{{labels}}}") };
    let _ = writeln!(out, "{name}{suffix}{braced} {value}");
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::registry::Registry;
    use super::*;
    use std::collections::{BTreeMap, HashMap, HashSet};

    /// Samples by name and labels.
    pub(crate) type Samples = HashMap<(String, BTreeMap<String, String>), f64>;

    /// Reads an exposition as strictly as its format is specified, and checks the relations between
    /// lines.
    pub(crate) fn read(text: &str) -> Samples {
        assert!(text.ends_with('\n'));
        let (mut samples, mut kinds) = (Samples::new(), HashMap::new());
        let mut helped = HashSet::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').expect("a help text");
                assert!(helped.insert(name) && !help.is_empty(), "{line}");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a type");
                assert!(kinds.insert(name, kind).is_none() && helped.contains(name), "{line}");
            } else {
                let (name, labels, value) = read_sample(line);
                let family = ["_bucket", "_sum", "_count"]
                    .iter()
                    .filter_map(|suffix| name.strip_suffix(suffix))
                    .find(|family| kinds.get(family) == Some(&"histogram"))
                    .unwrap_or(&name);
                assert!(kinds.contains_key(family), "{line}: no type");
                assert!(samples.insert((name, labels), value).is_none(), "{line}: twice");
            }
        }
        for (family, _) in kinds.iter().filter(|(_, kind)| **kind == "histogram") {
            check_histograms(&samples, family);
        }
        samples
    }

    fn read_sample(line: &str) -> (String, BTreeMap<String, String>, f64) {
        let end = line.find(['{', ' ']).expect("a value");
        let (name, mut rest) = line.split_at(end);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        assert!(
            name.chars().all(is_name) && !name.starts_with(|c: char| c.is_ascii_digit()),
            "{line}"
        );
        let mut labels = BTreeMap::new();
        if let Some(inner) = rest.strip_prefix('{') {
            rest = inner;
            loop {
                let (key, after) = rest.split_once("=\"").expect("a quoted label");
                let mut value = String::new();
                let mut chars = after.char_indices();
                let end = loop {
                    match chars.next().expect("an end of the label") {
                        (at, '"') => break at + 1,
                        (_, '\\') => value.push(match chars.next() {
                            Some((_, 'n')) => '\n',
                            Some((_, c @ ('\\' | '"'))) => c,
                            other => panic!("{line}: escape {other:?}"),
                        }),
                        (_, c) => value.push(c),
                    }
                };
                assert!(labels.insert(key.to_owned(), value).is_none(), "{line}: label twice");
                rest = &after[end..];
                match rest.strip_prefix(',') {
                    Some(more) => rest = more,
                    None => break,
                }
            }
            rest = rest.strip_prefix('}').expect("a closing brace");
        }
        let value = rest.strip_prefix(' ').expect("one space").parse().expect("a number");
        (name.to_owned(), labels, value)
    }

    fn check_histograms(samples: &Samples, family: &str) {
        for ((_, labels), count) in
            samples.iter().filter(|((name, _), _)| *name == format!("{family}_count"))
        {
            let mut buckets: Vec<(f64, f64)> = samples
                .iter()
                .filter(|((name, _), _)| *name == format!("{family}_bucket"))
                .filter_map(|((_, found), value)| {
                    let mut found = found.clone();
                    let bound = found.remove("le").expect("a bound").parse().expect("a number");
                    (found == *labels).then_some((bound, *value))
                })
                .collect();
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{family}: {buckets:?}");
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, *count)), "{family}");
            assert!(samples.contains_key(&(format!("{family}_sum"), labels.clone())), "{family}");
        }
    }

    /// What a registry exposes, read again.
    pub(crate) fn exposed(registry: &Registry) -> Samples {
        let mut text = String::new();
        registry.expose(&mut text);
        read(&text)
    }

    /// The sum of all samples of a name with these labels.
    pub(crate) fn sum(samples: &Samples, name: &str, labels: &[(&str, &str)]) -> f64 {
        let carries = |found: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| found.get(*key).is_some_and(|found| found == value))
        };
        let hits: Vec<f64> = samples
            .iter()
            .filter(|((n, l), _)| n == name && carries(l))
            .map(|(_, &value)| value)
            .collect();
        assert!(!hits.is_empty(), "no {name} {labels:?}");
        hits.iter().sum()
    }

    #[test]
    fn a_family_as_prometheus_writes_it() {
        let mut registry = Registry::default();
        let labels = Labels::none().and("model_name", "a\\b\"c\nd").and("role", "prefill");
        registry.counter(&["x:n_total", "y:n_total"], "Things.", &labels).add(3);
        registry.gauge(&["x:g"], "A part.", &Labels::none()).set(0.25);
        let histogram =
            registry.histogram(&["x:h"], "Times.", &Labels::none().and("s", "q"), &[0.001, 1.0]);
        histogram.observe(0.5);
        histogram.observe(8.0);
        let mut text = String::new();
        registry.expose(&mut text);
        assert_eq!(
            text,
            r#"# HELP x:n_total Things.
# TYPE x:n_total counter
x:n_total{model_name="a\\b\"c\nd",role="prefill"} 3
# HELP y:n_total Things.
# TYPE y:n_total counter
y:n_total{model_name="a\\b\"c\nd",role="prefill"} 3
# HELP x:g A part.
# TYPE x:g gauge
x:g 0.25
# HELP x:h Times.
# TYPE x:h histogram
x:h_bucket{s="q",le="0.001"} 0
x:h_bucket{s="q",le="1"} 1
x:h_bucket{s="q",le="+Inf"} 2
x:h_sum{s="q"} 8.5
x:h_count{s="q"} 2
"#
        );
        let samples = read(&text);
        let key = ("model_name".to_owned(), "a\\b\"c\nd".to_owned());
        assert!(
            samples
                .keys()
                .any(|(_, labels)| labels.get_key_value("model_name") == Some((&key.0, &key.1)))
        );
    }
}
