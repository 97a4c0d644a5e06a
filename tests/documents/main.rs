//! Checks that the documents agree with the code. Links must resolve, and the page of the command
//! line must be generated from the flags. Each error code and each metric must have its row. CI
//! must require everything that tests can require.

mod cli;

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

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_');
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Targets of links outside code: `](target)`.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        if is_code {
            continue;
        }
        for part in line.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push(target.to_owned());
            }
        }
    }
    found
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let mut pages = files("docs", ".md");
    pages.push(Path::new(ROOT).join("README.md"));
    let mut broken = Vec::new();
    for page in &pages {
        let text = read(page);
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name(file) };
            let is_there = target.exists();
            let has_heading = heading.is_empty()
                || is_there
                    && read(&target)
                        .lines()
                        .filter_map(|line| line.strip_prefix('#'))
                        .any(|line| anchor(line.trim_start_matches('#')) == heading);
            if !is_there || !has_heading {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

/// String literals of production code that match, with the file's text before the first test.
fn literals(is_one: impl Fn(&str, &str) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for file in files("src", ".rs") {
        let text = read(&file);
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let parts: Vec<&str> = text.split('"').collect();
        for pair in parts.windows(2) {
            if is_one(pair[0], pair[1]) {
                found.insert(pair[1].to_owned());
            }
        }
    }
    found
}

#[test]
fn each_error_code_and_cause_has_a_line_that_says_what_to_do() {
    let page = read("docs/operate/troubleshoot.md");
    // A code is the string behind the status of an `ApiError`.
    let mut codes = literals(|before, text| {
        let before = before.trim_end();
        let call = before.rfind("ApiError::new(").map(|at| &before[at + "ApiError::new(".len()..]);
        let status = call.map(|call| call.trim().trim_end_matches(','));
        status.is_some_and(|status| status.parse::<u16>().is_ok()) && !text.contains(' ')
    });
    assert!(codes.len() > 10, "codes are found in the sources: {codes:?}");
    codes.extend(baton::cause::Cause::ALL.iter().map(|cause| cause.name().to_owned()));
    let missing: Vec<&String> =
        codes.iter().filter(|code| !page.contains(&format!("| `{code}` |"))).collect();
    assert!(missing.is_empty(), "without a row in docs/operate/troubleshoot.md: {missing:?}");
}

#[test]
fn each_metric_has_a_row() {
    let page = read("docs/operate/monitor.md");
    let names = literals(|_, text| {
        let is_name = |text: &str| text.chars().all(|c| c.is_ascii_lowercase() || "_:".contains(c));
        let prefixes = ["sglang:", "vllm:", "baton_", "smg_"];
        prefixes.iter().any(|prefix| text.starts_with(prefix)) && is_name(text)
    });
    let names: Vec<&String> = names.iter().filter(|name| is_registered(name)).collect();
    assert!(names.len() > 40, "metrics are found in the sources: {names:?}");
    let missing: Vec<&&String> =
        names.iter().filter(|name| !page.contains(&format!("| `{name}` |"))).collect();
    assert!(missing.is_empty(), "without a row in docs/operate/monitor.md: {missing:?}");
}

/// Whether a name is one of the registry's, and not a field or header of Baton's.
fn is_registered(name: &str) -> bool {
    ["src/worker/metrics.rs", "src/router/metrics.rs"]
        .iter()
        .any(|file| read(file).contains(&format!("\"{name}\"")))
}

#[test]
fn ci_requires_whatever_a_test_can_require() {
    let variables = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
        let required = words.filter(|word| word.starts_with("BATON_REQUIRE_") && word.len() > 14);
        required.map(str::to_owned).collect()
    };
    let mut read_by_code = BTreeSet::new();
    for folder in ["tests", "tools"] {
        for file in files(folder, "").iter().filter(|file| !file.ends_with("documents/main.rs")) {
            // Recordings and build folders hold bytes that are no text.
            let Ok(text) = std::fs::read_to_string(file) else { continue };
            if !file.to_string_lossy().contains("/target/") {
                read_by_code.extend(variables(&text));
            }
        }
    }
    assert!(read_by_code.len() >= 6, "{read_by_code:?}");
    assert_eq!(variables(&read(".ci/run")), read_by_code);
}
