//! Style rules that a program can check: layers, cycles, shape and words of every file.
//!
//! `exceptions.txt` lists the accepted violations: rule, file, count, and the reason. A count that
//! is too low fails the test. A count that is too high also fails it, so that the list only
//! shrinks. `BATON_TIDY_WRITE=1` lowers the counts.

mod imports;
mod prose;
mod shape;
mod source;

use imports::{Imports, Layers};
use source::Source;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Places by rule and file.
type Counts<'a> = BTreeMap<(String, String), Vec<&'a str>>;

/// What broke a rule: rule, file, and where in it.
type Broken = (&'static str, String, String);

#[test]
fn the_house_is_tidy() {
    let sources = read_sources();
    let broken = look(&sources);
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tidy/exceptions.txt");
    let known = std::fs::read_to_string(&list).unwrap_or_default();
    let mut counts = Counts::new();
    for (rule, file, place) in &broken {
        counts.entry((rule.to_string(), file.clone())).or_default().push(place);
    }
    if std::env::var_os("BATON_TIDY_WRITE").is_some() {
        std::fs::write(&list, lowered(&known, &counts)).expect("the list can be written");
        return;
    }
    let complaints = complaints(&known, &counts);
    assert!(complaints.is_empty(), "\n{}\n(exceptions: {})", complaints.join("\n"), list.display());
}

/// What the top level of the repository may hold, beside names that begin with a dot.
const TOP_LEVEL: [&str; 12] = [
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "benches",
    "build.rs",
    "docs",
    "fuzz",
    "rustfmt.toml",
    "src",
    "tests",
    "tools",
];

#[test]
fn the_top_level_has_no_stray_files() {
    let mut git = std::process::Command::new("git");
    let listed = git.args(["-C", env!("CARGO_MANIFEST_DIR"), "ls-files"]).output();
    let Some(listed) = listed.ok().filter(|listed| listed.status.success()) else {
        return eprintln!("SKIPPED: this is no checkout of git");
    };
    let listed = listed.stdout;
    let listed = String::from_utf8(listed).expect("names are UTF-8");
    let tops: std::collections::BTreeSet<&str> =
        listed.lines().filter_map(|path| path.split('/').next()).collect();
    let is_known = |name: &&str| name.starts_with('.') || TOP_LEVEL.contains(name);
    let stray: Vec<&str> = tops.into_iter().filter(|name| !is_known(name)).collect();
    assert!(stray.is_empty(), "{stray:?} do not belong to the top level");
}

/// What is wrong beside the list of exceptions.
fn complaints(known: &str, counts: &Counts<'_>) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut allowed = exceptions(known);
    for ((rule, file), (_, reason)) in &allowed {
        if reason.is_empty() {
            complaints.push(format!("{rule}: {file}: the exception has no reason"));
        }
    }
    for (key, places) in counts {
        let (rule, file) = key;
        let most = allowed.remove(key).map_or(0, |(count, _)| count);
        if places.len() > most {
            complaints.push(format!(
                "{rule}: {file}: {} (allowed: {most}): {}",
                places.len(),
                listed(places)
            ));
        } else if places.len() < most {
            complaints.push(format!("{rule}: {file}: only {} left: lower its count", places.len()));
        }
    }
    for (rule, file) in allowed.keys() {
        complaints.push(format!("{rule}: {file}: none left: take it off the list"));
    }
    complaints
}

/// Places, each once.
fn listed(places: &[&str]) -> String {
    let mut places = places.to_vec();
    places.dedup();
    places.join(", ")
}

/// All files that a rule is about, as git has them.
fn read_sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .expect("git lists the files");
    let listed = String::from_utf8(listed.stdout).expect("names are text");
    let mut sources = Vec::new();
    for path in listed.lines() {
        let is_rust = path.ends_with(".rs");
        let is_script = !path.contains('.') || path.ends_with(".py") || path.ends_with(".sh");
        let is_tool = path.starts_with("tools/") && is_script && !path.contains("/src/");
        let is_text = path.ends_with(".md") || is_tool && !path.ends_with("mutations");
        let Ok(text) = std::fs::read_to_string(root.join(path)) else { continue };
        if is_rust {
            sources.push(Source::of_rust(path, &text));
        } else if is_text {
            sources.push(Source::of_text(path, &text));
        }
    }
    assert!(sources.len() > 400, "git names the files of this repository");
    sources
}

/// All that breaks a rule.
fn look(sources: &[Source]) -> Vec<Broken> {
    let mut broken: Vec<Broken> = Vec::new();
    let page = sources.iter().find(|source| source.path.ends_with("internals/architecture.md"));
    let layers = Layers::of(&page.expect("the architecture page is there").text);
    let imports = Imports::of(sources);
    for (module, other) in imports.upward(&layers) {
        broken.push(("layer", module, other));
    }
    for cycle in imports.cycles() {
        for member in &cycle {
            broken.push(("cycle", cycle[0].clone(), member.clone()));
        }
    }
    for (name, files) in shape::shared_names(sources) {
        broken.push(("name", name, files.join(" ")));
    }
    for (file, mistake) in shape::unplanted_mistakes(sources) {
        broken.push(("failpoint", file, mistake));
    }
    for source in sources {
        look_at(source, &mut broken);
    }
    broken
}

fn look_at(source: &Source, broken: &mut Vec<Broken>) {
    let path = source.path.as_str();
    let mut add = |rule, place: String| broken.push((rule, path.to_owned(), place));
    let (is_source, is_document) = (path.starts_with("src/"), path.ends_with(".md"));
    shape::wide_lines(source).iter().for_each(|line| add("width", line.to_string()));
    for (line, name, excess) in shape::long_functions(source) {
        (0..excess).for_each(|_| add("function", format!("{name} in {line}")));
    }
    (0..shape::excess_lines(source)).for_each(|_| add("file", "a line too many".into()));
    if is_source && !shape::has_header(source) {
        add("header", "none".into());
    }
    if path.ends_with(".rs") && shape::is_no_noun(source) {
        add("noun", "no noun".into());
    }
    if !(is_source || is_document || path.starts_with("tools/")) {
        return;
    }
    prose::people(source).iter().for_each(|line| add("who", line.to_string()));
    prose::banned(source).iter().for_each(|line| add("banned", line.to_string()));
    if is_document {
        prose::long_sentences(source)
            .iter()
            .for_each(|(line, words)| add("sentence", format!("{line} ({words} …)")));
    }
}

/// Rule and file of each exception, with its count and its reason.
fn exceptions(list: &str) -> BTreeMap<(String, String), (usize, String)> {
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entries = lines.map(|line| {
        let mut words = line.splitn(4, ' ');
        let mut next = || words.next().unwrap_or_default().to_owned();
        let (rule, file, count, reason) = (next(), next(), next(), next());
        let count = count.parse().unwrap_or_else(|_| panic!("exceptions.txt: no count: {line}"));
        ((rule, file), (count, reason))
    });
    entries.collect()
}

/// The list with lower counts. A count never grows, and an entry is never added.
fn lowered(known: &str, counts: &Counts<'_>) -> String {
    let mut list = String::from("# rule file count reason\n");
    for (key, (most, reason)) in exceptions(known) {
        let count = counts.get(&key).map_or(0, Vec::len).min(most);
        if count > 0 {
            let line = format!("{} {} {count} {reason}", key.0, key.1);
            list.push_str(line.trim_end());
            list.push('\n');
        }
    }
    list
}

#[test]
fn counts_of_exceptions_only_fall() {
    let known = "# rule file count reason\nwidth a.rs 3 a table in a comment\nwidth b.rs 1\n";
    let of_a = |places| Counts::from([(("width".to_owned(), "a.rs".to_owned()), places)]);
    let list = "# rule file count reason\nwidth a.rs 1 a table in a comment\n";
    assert_eq!(lowered(known, &of_a(vec!["1"])), list);
    assert!(lowered(list, &of_a(vec!["1", "2"])).contains("a.rs 1 "), "it does not grow");
    assert!(complaints(list, &of_a(vec!["1"])).is_empty());
    for (known, places, why) in [
        (list, vec!["1", "2"], "2 (allowed: 1)"),
        ("", vec!["1"], "1 (allowed: 0)"),
        (known, vec!["1"], "only 1 left"),
        (known, vec!["1"], "b.rs: the exception has no reason"),
        (known, vec!["1"], "b.rs: none left"),
    ] {
        let found = complaints(known, &of_a(places)).join("\n");
        assert!(found.contains(why), "{why}: {found}");
    }
}
