//! Rules of the house, held by counting: layers, cycles, shape and words of every file.
//!
//! What breaks a rule today stands in `exceptions.txt`: rule, file, count, and a reason where it is
//! to stay. A count that is exceeded fails; one that is too high fails, too, so that the list only
//! shrinks. `BATON_TIDY_WRITE=1` writes the list anew.

mod imports;
mod prose;
mod shape;
mod source;

use imports::{Imports, Layers};
use source::Source;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The simulator's own copies of the router and the edge: their prose is left alone.
const LEFT_ALONE: &[&str] = &["src/sim/edge", "src/sim/router"];

/// What broke a rule: rule, file, and where in it.
type Broken = (&'static str, String, String);

#[test]
fn the_house_is_tidy() {
    let sources = read_sources();
    let broken = look(&sources);
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tidy/exceptions.txt");
    let known = std::fs::read_to_string(&list).unwrap_or_default();
    let mut counts: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
    for (rule, file, place) in &broken {
        counts.entry((rule.to_string(), file.clone())).or_default().push(place);
    }
    if std::env::var_os("BATON_TIDY_WRITE").is_some() {
        std::fs::write(&list, rewritten(&known, &counts)).expect("the list can be written");
        return;
    }
    let mut complaints = Vec::new();
    let mut allowed = exceptions(&known);
    for (key, places) in &counts {
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
    assert!(complaints.is_empty(), "\n{}\n(exceptions: {})", complaints.join("\n"), list.display());
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
        let is_tool = path.starts_with("tools/") && !path.contains('.') && !path.contains("/src/");
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
    let is_left_alone = LEFT_ALONE.iter().any(|left| path.starts_with(left));
    if path.ends_with(".rs") && !is_left_alone && shape::is_verb(source) {
        add("noun", "a verb".into());
    }
    if is_left_alone || !(is_source || is_document || path.starts_with("tools/")) {
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

/// The list with today's counts and yesterday's reasons.
fn rewritten(known: &str, counts: &BTreeMap<(String, String), Vec<&str>>) -> String {
    let reasons = exceptions(known);
    let mut list = String::from("# rule file count reason\n");
    for (key, places) in counts {
        let reason = reasons.get(key).map_or("", |(_, reason)| reason);
        let line = format!("{} {} {} {reason}", key.0, key.1, places.len());
        list.push_str(line.trim_end());
        list.push('\n');
    }
    list
}

#[test]
fn reasons_stay_when_counts_are_written_anew() {
    let known = "# rule file count reason\nwidth a.rs 3 a table in a comment\n";
    let counts = BTreeMap::from([(("width".to_owned(), "a.rs".to_owned()), vec!["1"])]);
    assert_eq!(
        rewritten(known, &counts),
        "# rule file count reason\nwidth a.rs 1 a table in a comment\n"
    );
}
