//! Checks that the documents agree with the code. Links must resolve and lead to every page. The
//! page of the command line must be generated from the flags. Each error code, metric and log event
//! must have a row, and each row one of these. CI must require all that tests can require.

mod claims;
mod cli;
mod codes;
mod events;
mod fields;
mod links;
mod metrics;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// All files below `folder` that end so.
fn files(folder: &str, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(ROOT).join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(ROOT).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Production code of `src`: each file above its inline tests, without files of tests.
fn production() -> Vec<String> {
    let sources = files("src", ".rs").into_iter();
    let sources = sources.filter(|file| !file.to_string_lossy().ends_with("tests.rs"));
    sources.map(|file| above_tests(&read(file)).to_owned()).collect()
}

/// The text above the first `#[cfg(test)]` module that stands in the file.
fn above_tests(text: &str) -> &str {
    let mut marks = text.match_indices("#[cfg(test)]\n").map(|(at, mark)| (at, at + mark.len()));
    let is_inline = |line: &str| line.contains("mod ") && line.ends_with('{');
    let end = marks.find(|&(_, end)| text[end..].lines().next().is_some_and(is_inline));
    end.map_or(text, |(at, _)| &text[..at])
}

/// Rows of the page's tables whose first cell is code: that code, and all cells.
fn rows(page: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    for line in page.lines() {
        let Some(row) = line.strip_prefix("| `").and_then(|row| row.strip_suffix('|')) else {
            continue;
        };
        if let Some((name, _)) = row.split_once("` |") {
            found.push((name, line.trim_matches('|').split('|').map(str::trim).collect()));
        }
    }
    found
}

/// The section of a page under this heading, up to the next heading of its level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = page.find(&format!("{heading}\n")).map(|at| at + heading.len());
    let rest = &page[begin.unwrap_or_else(|| panic!("no section {heading}"))..];
    let level = &heading[..=heading.find(' ').expect("a heading has a space")];
    rest.find(&format!("\n{level}")).map_or(rest, |end| &rest[..end])
}

/// What only `tools/test --long` requires, because it is large.
const ONLY_LONG: [&str; 1] = ["BATON_REQUIRE_GEMMA"];

#[test]
fn ci_or_the_long_run_requires_whatever_a_test_can_require() {
    let variables = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
        let required = words.filter(|word| word.starts_with("BATON_REQUIRE_") && word.len() > 14);
        required.map(str::to_owned).collect()
    };
    let mut read_by_code = BTreeSet::new();
    for folder in ["tests", "tools", "src", "fuzz"] {
        for file in files(folder, "").iter().filter(|file| !file.ends_with("documents/main.rs")) {
            // Recordings and build folders hold bytes that are no text.
            let Ok(text) = std::fs::read_to_string(file) else { continue };
            if !file.to_string_lossy().contains("/target/") {
                read_by_code.extend(variables(&text));
            }
        }
    }
    assert!(read_by_code.len() >= 7, "{read_by_code:?}");
    let mut set = variables(&read(".ci/run"));
    for variable in ONLY_LONG {
        assert!(set.insert(variable.into()), "CI sets {variable}, too");
        assert!(variables(&read("tools/test")).contains(variable), "{variable}");
    }
    assert_eq!(set, read_by_code);
    let page = read("docs/internals/testing.md");
    let listed: BTreeSet<String> =
        rows(&page).iter().flat_map(|(name, _)| variables(name)).collect();
    assert_eq!(listed, read_by_code, "rows of docs/internals/testing.md");
}
