//! The page of claims: each claim names a test, and each of these tests exists.

use super::{ROOT, files, read};
use std::collections::BTreeSet;
use std::path::Path;

const PAGE: &str = "docs/internals/claims.md";

/// Names of all tests, as the page writes them: `binary::modules::function`, with `lib` for the
/// crate's own; `fuzz::target`; and `tools/name`.
fn names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files("tests", ".rs") {
        let modules = modules(&file, "tests");
        names.extend(functions(&read(&file)).map(|function| format!("{modules}::{function}")));
    }
    for file in files("src", ".rs") {
        let modules = modules(&file, "src");
        let text = read(&file);
        // A file of tests is a module of its own, or `tests` of the file that it belongs to.
        let tests = modules.strip_suffix("_tests").unwrap_or(&modules);
        for function in functions(&text) {
            names.insert(format!("lib::{modules}::{function}"));
            names.insert(format!("lib::{tests}::tests::{function}"));
        }
    }
    for file in files("fuzz/targets", ".rs") {
        names.insert(format!("fuzz::{}", file.file_stem().unwrap().to_string_lossy()));
    }
    for entry in std::fs::read_dir(Path::new(ROOT).join("tools")).unwrap() {
        names.insert(format!("tools/{}", entry.unwrap().file_name().to_string_lossy()));
    }
    names
}

/// The path of a file's module below the folder: `a/b/mod.rs` and `a/b/main.rs` are `a::b`.
fn modules(file: &Path, folder: &str) -> String {
    let below = file.strip_prefix(Path::new(ROOT).join(folder)).unwrap().with_extension("");
    let names: Vec<String> = below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
    let (last, before) = names.split_last().unwrap();
    match last.as_str() {
        "mod" | "main" if !before.is_empty() => before.join("::"),
        _ => names.join("::"),
    }
}

/// Functions behind `#[test]` and other attributes.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[test]\n").skip(1).filter_map(|after| {
        let line = after.lines().find(|line| line.trim_start().starts_with("fn "))?;
        line.trim_start().strip_prefix("fn ")?.split(['(', '<']).next()
    })
}

/// What is wrong with the page's rows, and the claims without a test.
fn faults(page: &str, names: &BTreeSet<String>) -> (Vec<String>, Vec<String>) {
    let (mut faults, mut untested) = (Vec::new(), Vec::new());
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [claim, _, tests] = cells[..] else {
            faults.push(format!("this row does not have three cells: {line}"));
            continue;
        };
        if claim == "claim" {
            continue;
        }
        let tests: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if tests.is_empty() {
            untested.push(claim.to_owned());
        }
        let unknown = tests.into_iter().filter(|test| !names.contains(*test));
        faults.extend(unknown.map(|test| format!("no such test: {test}")));
    }
    (faults, untested)
}

#[test]
fn each_claim_has_a_test_and_these_tests_exist() {
    let page = read(PAGE);
    assert!(page.lines().filter(|line| line.starts_with("| ")).count() > 50, "a page of claims");
    let (faults, untested) = faults(&page, &names());
    assert!(faults.is_empty(), "{PAGE}:\n{}", faults.join("\n"));
    assert!(untested.is_empty(), "{PAGE}, without a test:\n{}", untested.join("\n"));
}

#[test]
fn a_claim_without_a_test_and_a_dead_name_are_found() {
    let names = names();
    let found = |row: &str| faults(row, &names);
    let own = "documents::claims::a_claim_without_a_test_and_a_dead_name_are_found";
    let good = found(&format!("| It works. | [x](x.md) | `{own}`, `tools/test` |"));
    assert_eq!(good, (vec![], vec![]));
    assert_eq!(found("| It works. | [x](x.md) | `lib::kv::pool::tests::nothing` |").0.len(), 1);
    assert_eq!(found("| It works. | [x](x.md) | none |").1, ["It works."]);
    assert_eq!(found("| It works. | [x](x.md) |").0.len(), 1);
    assert!(names.contains("lib::wire::message::tests::a_longer_body_is_cut"));
    assert!(names.contains("fuzz::message"), "a target");
}
