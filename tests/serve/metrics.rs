//! `/metrics` as a scraper reads it.

use crate::server::{Server, endless};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Samples by name, then by labels as written.
#[derive(Debug)]
pub struct Metrics {
    samples: BTreeMap<String, BTreeMap<String, f64>>,
    types: BTreeMap<String, String>,
}

impl Metrics {
    pub fn parse(text: &str) -> Metrics {
        assert!(text.ends_with('\n'));
        let mut metrics = Metrics { samples: BTreeMap::new(), types: BTreeMap::new() };
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(metrics.types.insert(name.into(), kind.into()).is_none(), "{name} twice");
            } else if !line.starts_with("# HELP ") {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
                let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
                let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
                let value =
                    value.replace("+Inf", "inf").parse().unwrap_or_else(|_| panic!("{line}"));
                let before =
                    metrics.samples.entry(name.into()).or_default().insert(labels.into(), value);
                assert!(before.is_none(), "{series} twice");
            }
        }
        metrics
    }

    /// Sum of the series of `name` with labels that contain `with`.
    pub fn sum(&self, name: &str, with: &str) -> f64 {
        let series = self.samples.get(name).unwrap_or_else(|| panic!("no {name}"));
        series.iter().filter(|(labels, _)| labels.contains(with)).map(|(_, value)| value).sum()
    }

    pub fn pages(&self, state: &str) -> f64 {
        self.sum("baton_pages", &format!("state=\"{state}\""))
    }

    pub fn running(&self) -> f64 {
        self.sum("vllm:num_requests_running", "")
    }

    pub fn waiting(&self) -> f64 {
        self.sum("vllm:num_requests_waiting", "")
    }

    /// Whether every page is free or in the prefix cache.
    pub fn none_held(&self) -> bool {
        self.pages("free") + self.pages("cached") == self.sum("baton_pages", "")
    }

    /// Pages of each worker, over all states.
    pub fn pools(&self) -> BTreeMap<String, f64> {
        let mut pools = BTreeMap::new();
        for (labels, pages) in &self.samples["baton_pages"] {
            let worker = labels.split(",state=").next().unwrap();
            *pools.entry(worker.to_owned()).or_default() += pages;
        }
        pools
    }

    /// The buckets of a histogram never decrease, and the last one equals its count.
    fn check_histograms(&self) {
        for name in self.types.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name)
        {
            let mut last: BTreeMap<String, (f64, f64)> = BTreeMap::new();
            let mut buckets: Vec<(String, f64, f64)> = Vec::new();
            for (labels, &count) in &self.samples[&format!("{name}_bucket")] {
                let (rest, bound) = labels.rsplit_once("le=\"").unwrap();
                let bound = bound.trim_end_matches('"').replace("+Inf", "inf").parse().unwrap();
                buckets.push((rest.trim_end_matches(',').to_owned(), bound, count));
            }
            buckets.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
            for (labels, bound, count) in buckets {
                let before = last.insert(labels.clone(), (bound, count)).unwrap_or((0.0, 0.0));
                assert!(before.1 <= count, "{name}{{{labels}}} falls at {bound}");
            }
            for (labels, (bound, count)) in last {
                assert!(bound.is_infinite());
                assert_eq!(
                    self.samples[&format!("{name}_count")][&labels],
                    count,
                    "{name}{{{labels}}}"
                );
            }
        }
    }
}

#[test]
fn stages_sum_to_the_time_to_first_token() {
    for layout in [&["--mixed"][..], &[]] {
        let server = Server::start(layout);
        let prompt: Vec<u32> = (3..203).collect();
        for _ in 0..5 {
            let body =
                json!({"prompt": [prompt, [7, 8]], "max_tokens": 6, "n": 2, "ignore_eos": true});
            server.post("/v1/completions", &body).ok();
        }
        server.wait_until_idle();
        let metrics = server.metrics();
        metrics.check_histograms();
        let ttft = "sglang:time_to_first_token_seconds";
        assert_eq!(metrics.sum(&format!("{ttft}_count"), ""), 20.0);
        let total = metrics.sum(&format!("{ttft}_sum"), "");
        let mut stages = 0.0;
        for stage in ["queue", "bootstrap", "prefill", "handover", "join", "first_step"] {
            let label = format!("stage=\"{stage}\"");
            assert_eq!(metrics.sum("baton_stage_seconds_count", &label), 20.0, "{stage}");
            stages += metrics.sum("baton_stage_seconds_sum", &label);
        }
        assert!(total > 0.0 && (stages - total).abs() < 1e-6, "{stages} and {total}");
        assert_eq!(
            metrics.sum("vllm:request_success_total", "engine_type=\"prefill\""),
            [0.0, 20.0][usize::from(layout.is_empty())]
        );
        assert_eq!(metrics.sum("sglang:prompt_tokens_total", ""), 5.0 * 2.0 * 202.0);
        assert_eq!(metrics.sum("baton_kv_transfer_bytes_total", "") > 0.0, layout.is_empty());
        assert_eq!(metrics.sum("baton_request_failures_total", ""), 0.0);
    }
}

/// The worker ends the generation itself, which is no failure.
#[test]
fn a_stop_string_is_a_normal_end_with_its_latencies() {
    for (layout, legs) in
        [(&["--mixed"][..], 2.0), (&[], 4.0), (&["--first-token", "prefill"], 4.0)]
    {
        let server = Server::start(layout);
        let every_letter: Vec<String> = ('a'..='z').map(String::from).collect();
        let body = json!({"prompt": "The Seine", "max_tokens": 40, "n": 2, "ignore_eos": true,
            "stop": every_letter, "temperature": 0});
        let answer = server.post("/v1/completions", &body).ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let [ended, failed] = ["vllm:request_success_total", "baton_request_failures_total"];
        server.wait_until("all legs counted", |metrics| {
            metrics.sum(ended, "") + metrics.sum(failed, "") == legs
        });
        let metrics = server.metrics();
        assert!(metrics.sum(ended, "finished_reason=\"stop\"") >= 2.0, "{layout:?}");
        assert_eq!(metrics.sum(failed, ""), 0.0, "{layout:?}");
        for histogram in ["vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds"] {
            assert_eq!(
                metrics.sum(&format!("{histogram}_count"), ""),
                2.0,
                "{histogram} {layout:?}"
            );
        }
    }
}

#[test]
fn labels_name_model_and_worker_and_are_bounded() {
    let server = Server::start(&["--prefill-workers", "2", "--served-model-name", "a \"model\""]);
    server.check_works_as("a \"model\"");
    let metrics = server.metrics();
    let known: BTreeSet<&str> = [
        "model_name",
        "engine_type",
        "worker",
        "state",
        "stage",
        "cause",
        "le",
        "finished_reason",
        "transport",
        "why",
    ]
    .into();
    for (name, series) in &metrics.samples {
        // All workers of a process share their masks and the limits of keys.
        let is_of_process = name.starts_with("baton_grammar_") || name.starts_with("baton_key_");
        let is_shared = |labels: &&String| labels.is_empty() || is_of_process;
        for labels in series.keys().filter(|labels| !is_shared(labels)) {
            assert!(
                labels.starts_with(r#"model_name="a \"model\"",engine_type="#),
                "{name}{{{labels}}}"
            );
            let names = labels.split("\",").map(|label| label.split('=').next().unwrap());
            assert!(names.clone().all(|name| known.contains(name)), "{name}{{{labels}}}");
        }
    }
    assert_eq!(metrics.pools().len(), 3);
}

/// The sum over the states of a worker's pages is constant, at every scrape.
#[test]
fn pages_add_up_at_every_moment() {
    let server = Server::start_long(&[]);
    let expected = server.metrics().pools();
    assert_eq!(expected.len(), 2);
    assert!(expected.values().all(|&pages| pages == expected.values().next().copied().unwrap()));
    let mut used = 0.0f64;
    for round in 0..30 {
        let mut client = server.connect();
        client.post("/v1/completions", &endless());
        for _ in 0..5 + round % 5 {
            let metrics = server.metrics();
            assert_eq!(metrics.pools(), expected);
            used = used.max(metrics.pages("in_use") + metrics.pages("leased"));
        }
    }
    assert!(used > 0.0, "no running request was seen");
    server.wait_until_idle();
    assert_eq!(server.metrics().pools(), expected);
}
