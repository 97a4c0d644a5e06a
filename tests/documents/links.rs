//! Links between the documents.

use super::{ROOT, files, read};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

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

/// The path that a link on `page` leads to, with `..` resolved. Both are relative to one folder.
fn resolve(page: &str, link: &str) -> String {
    let file = link.split('#').next().unwrap_or_default();
    if file.is_empty() {
        return page.to_owned();
    }
    let mut path: Vec<&str> = page.split('/').collect();
    path.pop();
    for part in file.split('/') {
        match part {
            "." => {}
            ".." => drop(path.pop()),
            part => path.push(part),
        }
    }
    path.join("/")
}

/// Pages to which no chain of links leads from `start`. `pages` holds path and text of each page.
fn unreachable<'a>(start: &str, pages: &'a BTreeMap<String, String>) -> Vec<&'a str> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![start.to_owned()]);
    while let Some(page) = open.pop() {
        let Some(text) = pages.get(&page) else { continue };
        if reached.insert(page.clone()) {
            open.extend(links(text).iter().map(|link| resolve(&page, link)));
        }
    }
    pages.keys().map(String::as_str).filter(|&page| !reached.contains(page)).collect()
}

#[test]
fn each_page_is_reachable_from_the_first() {
    let pages: BTreeMap<String, String> = files("docs", ".md")
        .iter()
        .map(|path| {
            let name = path.strip_prefix(ROOT).expect("the files are below the root");
            (name.to_str().expect("names are text").to_owned(), read(path))
        })
        .collect();
    assert!(pages.len() > 15, "{:?}", pages.keys());
    assert_eq!(unreachable("docs/README.md", &pages), [""; 0], "no link leads to these pages");
}

#[test]
fn a_page_without_a_link_to_it_is_found() {
    let pages = [
        ("docs/README.md", "[a](guide/a.md#part)\n```\n[c](c.md)\n```"),
        ("docs/guide/a.md", "[b](../b.md), [outside](https://b.example/c.md), [self](#part)"),
        ("docs/b.md", "```\n[c](c.md)\n```\n"),
        ("docs/c.md", "[c](c.md)"),
    ];
    let pages = pages.map(|(path, text)| (path.to_owned(), text.to_owned()));
    assert_eq!(unreachable("docs/README.md", &pages.into()), ["docs/c.md"]);
}
