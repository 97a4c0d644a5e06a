//! Metrics and their rows in `docs/operate/monitor.md`.

use super::{production, read, rows};
use std::collections::BTreeSet;

const PAGE: &str = "docs/operate/monitor.md";
/// How names of metrics begin.
const PREFIXES: &[&str] = &["sglang:", "vllm:", "baton_", "smg_"];
/// Methods of the registry that make a metric from a list of names.
const METHODS: &[&str] = &[".counter(", ".gauge(", ".states(", ".histogram("];
/// What a histogram appends to its name.
const SERIES: &[&str] = &["_bucket", "_count", "_sum"];

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
    text.starts_with(|c: char| c.is_ascii_lowercase()) && text.chars().all(is_part)
}

fn has_prefix(text: &str) -> bool {
    PREFIXES.iter().any(|prefix| text.len() > prefix.len() && text.starts_with(prefix))
}

/// Names that a source registers: all in the list of a call, whatever their prefix, and each
/// literal with a prefix in a file that has such a call.
fn registered(source: &str) -> BTreeSet<&str> {
    let calls = METHODS.iter().flat_map(|method| source.split(method).skip(1));
    let lists: Vec<&str> = calls
        .filter_map(|call| call.trim_start().strip_prefix("&[")?.split_once(']'))
        .map(|(list, _)| list)
        .collect();
    if lists.is_empty() {
        return BTreeSet::new();
    }
    let listed = lists.iter().flat_map(|list| list.split('"').skip(1).step_by(2));
    let literals = source.split('"').filter(|text| has_prefix(text) && is_name(text));
    listed.chain(literals).collect()
}

/// How the page differs from the names that are registered.
fn differences(page: &str, names: &BTreeSet<&str>) -> Vec<String> {
    let is_metric = |cells: &[&str]| ["counter", "gauge", "histogram"].contains(&cells[1]);
    let rows = rows(page);
    let listed: BTreeSet<&str> = rows
        .iter()
        .filter(|(name, cells)| has_prefix(name) || is_metric(cells))
        .map(|(name, _)| *name)
        .collect();
    let mut found = Vec::new();
    found.extend(names.difference(&listed).map(|name| format!("`{name}` has no row")));
    found.extend(listed.difference(names).map(|name| format!("the row `{name}` has no metric")));
    // Alert rules and queries.
    let words = page.split(|c: char| !(c.is_ascii_alphanumeric() || "_:".contains(c)));
    for word in words.filter(|word| has_prefix(word) && is_name(word) && !word.ends_with('_')) {
        let series = SERIES.iter().find_map(|end| word.strip_suffix(end));
        if !names.contains(word) && series.is_none_or(|name| !names.contains(name)) {
            found.push(format!("the page names `{word}`, which is no metric"));
        }
    }
    found
}

#[test]
fn each_metric_has_a_row_and_each_row_its_metric() {
    let sources = production();
    let names: BTreeSet<&str> = sources.iter().flat_map(|source| registered(source)).collect();
    assert!(names.len() > 40, "metrics are found in the sources: {names:?}");
    let found = differences(&read(PAGE), &names);
    assert!(found.is_empty(), "{PAGE}:\n{}", found.join("\n"));
}

#[test]
fn a_missing_row_a_dead_row_and_a_dead_rule_are_found() {
    let source = "r.counter(&[\"http2_total\"], \"H.\", l);\n\
        let more = ([\"vllm:p99_ms\"], \"P.\");\nr.gauge(&more.0, more.1, l);";
    let names = registered(source);
    assert_eq!(names, BTreeSet::from(["http2_total", "vllm:p99_ms"]));
    assert_eq!(registered("const FIELD: &str = \"baton_resume\";"), BTreeSet::new());
    let http2 = "| `http2_total` | counter | – | M |\n";
    let p99 = "| `vllm:p99_ms` | histogram | – | M |\nrate(vllm:p99_ms_bucket[5m])\n";
    let differ = |page: String| differences(&page, &names);
    assert_eq!(differ(format!("{http2}{p99}")), [""; 0]);
    assert_eq!(differ(http2.into()), ["`vllm:p99_ms` has no row"]);
    assert_eq!(differ(p99.into()), ["`http2_total` has no row"]);
    assert_eq!(
        differ(format!("{http2}{p99}| `gone_total` | counter | – | M |\n")),
        ["the row `gone_total` has no metric"]
    );
    assert_eq!(
        differ(format!("{http2}{p99}expr: smg_gone == 0\n")),
        ["the page names `smg_gone`, which is no metric"]
    );
}
