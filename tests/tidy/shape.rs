//! The shape of files: width, headers, length of files and functions, names of files and types.

use super::source::Source;
use std::collections::BTreeMap;

/// Columns of a line.
const WIDTH: usize = 100;
/// Lines of a function, its signature included.
const FUNCTION_LINES: usize = 70;
/// Lines of a file above its tests.
const FILE_LINES: usize = 600;
/// Names of files that end in -ing and are nouns.
const NOUNS: &[&str] = &["ring", "string", "routing", "testing", "greeting", "landing"];
/// Names of files that end in -ed and name a thing: a mixed worker, the scheduler, a policy.
const THINGS: &[&str] = &["mixed", "sched", "least_loaded"];

/// Lines that are wider than [`WIDTH`]; rows of tables and lines with a URL apart.
pub fn wide_lines(source: &Source) -> Vec<usize> {
    let is_free = |line: &str| line.trim_start().starts_with('|') || line.contains("://");
    let lines = source.text.lines().enumerate();
    let wide = lines.filter(|(_, line)| line.chars().count() > WIDTH && !is_free(line));
    wide.map(|(index, _)| index + 1).collect()
}

/// Whether the file begins with a `//!` header.
pub fn has_header(source: &Source) -> bool {
    source.text.starts_with("//!")
}

/// Functions of production code that are too long: line, name, and lines above the limit.
pub fn long_functions(source: &Source) -> Vec<(usize, String, usize)> {
    let lines: Vec<&str> = source.production().lines().collect();
    let mut found = Vec::new();
    for (begin, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let mut depth = 0;
        for (end, line) in lines.iter().enumerate().skip(begin) {
            let (open, close) = (line.matches('{').count(), line.matches('}').count());
            depth += open;
            depth -= close.min(depth);
            let is_over = depth == 0 && (close > 0 || line.trim_end().ends_with(';'));
            if is_over {
                let excess = (end - begin + 1).saturating_sub(FUNCTION_LINES);
                if excess > 0 {
                    found.push((begin + 1, name.to_owned(), excess));
                }
                break;
            }
        }
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let words: Vec<&str> = line.trim_start().split(' ').collect();
    let at = words.iter().position(|&word| word == "fn")?;
    let is_definition = words[..at].iter().all(|word| {
        word.starts_with("pub") || ["const", "unsafe", "extern"].contains(word) || word.is_empty()
    });
    let name = words.get(at + 1)?.split(['(', '<']).next()?;
    is_definition.then_some(name)
}

/// Lines of production code above the limit.
pub fn excess_lines(source: &Source) -> usize {
    source.production().lines().count().saturating_sub(FILE_LINES)
}

/// Whether the file's name is no noun: it ends in -ing, or in `src` in -ed, and is in no list.
pub fn is_no_noun(source: &Source) -> bool {
    let (parts, is_source) = (source.path.split('/'), source.path.starts_with("src/"));
    let mut names = parts.map(|part| part.strip_suffix(".rs").unwrap_or(part));
    let is_gerund = |name: &str| {
        name.ends_with("ing") && !NOUNS.contains(&name.rsplit('_').next().unwrap_or(name))
    };
    names.any(|name| {
        is_gerund(name) || (is_source && name.ends_with("ed") && !THINGS.contains(&name))
    })
}

/// Public types that share a name: name and files.
pub fn shared_names(sources: &[Source]) -> BTreeMap<String, Vec<String>> {
    let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources {
        for line in source.production().lines() {
            let mut words = line.split(' ');
            let is_type = words.next() == Some("pub")
                && ["struct", "enum", "trait", "type", "union"]
                    .contains(&words.next().unwrap_or(""));
            let name = words.next().unwrap_or_default();
            let name = name.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap();
            if is_type {
                types.entry(name.to_owned()).or_default().push(source.path.clone());
            }
        }
    }
    types.retain(|_, files| files.len() > 1);
    types
}

/// Mistakes of failpoints that no test plants: file and mistake.
pub fn unplanted_mistakes(sources: &[Source]) -> Vec<(String, String)> {
    const FAILPOINT: &str = "is_failpoint_active(\"";
    let rust = || sources.iter().filter(|source| source.path.ends_with(".rs"));
    let count = |text: &str| -> usize { rust().map(|at| at.text.matches(text).count()).sum() };
    let mut unplanted = Vec::new();
    for source in rust().filter(|source| source.path.starts_with("src/")) {
        let mistakes = source.text.split(FAILPOINT).skip(1).filter_map(|rest| rest.split_once('"'));
        for (mistake, _) in mistakes {
            let failpoints = count(&format!("{FAILPOINT}{mistake}\""));
            if count(&format!("\"{mistake}\"")) == failpoints {
                unplanted.push((source.path.clone(), mistake.to_owned()));
            }
        }
    }
    unplanted
}

#[test]
fn a_failpoint_without_a_test_is_refused() {
    let failpoint = |mistake: &str| format!("if is_failpoint_active(\"{mistake}\") {{}}\n");
    let sources = [
        Source::of_rust("src/a.rs", &(failpoint("one") + &failpoint("two"))),
        Source::of_rust("tests/a.rs", "plant(\"two\");"),
    ];
    assert_eq!(unplanted_mistakes(&sources), [("src/a.rs".to_owned(), "one".to_owned())]);
}

#[test]
fn a_wide_line_is_refused() {
    let wide = "x".repeat(WIDTH + 1);
    let text = format!("short\n{wide}\n| {wide} |\nsee http://{wide}\n");
    assert_eq!(wide_lines(&Source::of_text("README.md", &text)), [2]);
}

#[test]
fn a_file_without_a_header_is_refused() {
    assert!(!has_header(&Source::of_rust("src/a.rs", "use std::fmt;\n")));
    assert!(has_header(&Source::of_rust("src/a.rs", "//! What it owns.\n")));
}

#[test]
fn long_functions_and_files_are_refused() {
    let body = "    x();\n".repeat(FUNCTION_LINES - 2);
    let text = format!("pub fn fits() {{\n{body}}}\n\npub(crate) fn long(\n) {{\n{body}}}\n");
    let source = Source::of_rust("src/a.rs", &text);
    assert_eq!(long_functions(&source), [(FUNCTION_LINES + 2, "long".to_owned(), 1)]);
    assert_eq!(excess_lines(&source), 0);
    let text = "fn f() {}\n".repeat(FILE_LINES + 1);
    assert_eq!(excess_lines(&Source::of_rust("src/a.rs", &text)), 1);
}

#[test]
fn a_file_named_by_a_verb_is_refused() {
    assert!(is_no_noun(&Source::of_rust("src/a/asking.rs", "")));
    assert!(is_no_noun(&Source::of_rust("src/joining/mod.rs", "")));
    assert!(is_no_noun(&Source::of_rust("src/a/kept_and_mapped.rs", "")));
    assert!(!is_no_noun(&Source::of_rust("src/sched/mixed.rs", "")));
    assert!(!is_no_noun(&Source::of_rust("src/routing/ring.rs", "")));
}

#[test]
fn two_public_types_of_one_name_are_refused() {
    let sources = [
        Source::of_rust("src/a.rs", "pub struct Place<T>(T);\nstruct Own;\n"),
        Source::of_rust("src/b.rs", "pub enum Place {}\n// pub struct Other;\nstruct Own;\n"),
    ];
    let shared = shared_names(&sources);
    assert_eq!(shared["Place"], ["src/a.rs", "src/b.rs"]);
    assert_eq!(shared.len(), 1);
}
