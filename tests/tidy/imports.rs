//! Imports between files: layers and cycles.

use super::source::Source;
use std::collections::{BTreeMap, BTreeSet};

/// Modules of this crate that a file's production code names, by file.
pub struct Imports(BTreeMap<String, BTreeSet<String>>);

impl Imports {
    /// Reads the imports of all files of `src`.
    pub fn of(sources: &[Source]) -> Imports {
        let modules: BTreeSet<String> = sources.iter().filter_map(Source::module).collect();
        let mut imports = BTreeMap::new();
        for source in sources {
            let Some(module) = source.module().filter(|module| !module.is_empty()) else {
                continue;
            };
            let paths = paths_in(source.production()).into_iter();
            let found = paths.filter_map(|path| resolve(&module, &path, &modules));
            imports.insert(module.clone(), found.filter(|other| *other != module).collect());
        }
        Imports(imports)
    }

    /// Imports that do not point down the table: importing file, imported file.
    pub fn upward(&self, layers: &Layers) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for (module, others) in &self.0 {
            for other in others {
                let (here, there) = (top(module), top(other));
                if here != there && layers.row(here) >= layers.row(there) {
                    found.push((module.clone(), other.clone()));
                }
            }
        }
        found
    }

    /// Files that import each other, over any number of others. A folder's `mod.rs` and the files
    /// below it are one unit: between them no cycle counts.
    pub fn cycles(&self) -> Vec<Vec<String>> {
        let mut cycles = BTreeSet::new();
        for module in self.0.keys() {
            let reached = self.reached_from(module);
            if reached.contains(module) {
                let back = |other: &&String| self.reached_from(other).contains(module);
                cycles.insert(reached.iter().filter(back).cloned().collect());
            }
        }
        cycles.into_iter().collect()
    }

    fn reached_from(&self, module: &str) -> BTreeSet<String> {
        let mut reached = BTreeSet::new();
        let mut next = vec![module.to_owned()];
        while let Some(from) = next.pop() {
            for other in self.0.get(&from).into_iter().flatten() {
                let is_folder = is_below(&from, other) || is_below(other, &from);
                if !is_folder && reached.insert(other.clone()) {
                    next.push(other.clone());
                }
            }
        }
        reached
    }
}

/// The table of layers, highest first.
pub struct Layers(Vec<Vec<String>>);

impl Layers {
    /// Reads the rows between the two marks of the architecture page: module names in backticks in
    /// the first column.
    pub fn of(page: &str) -> Layers {
        let begin = page.find("<!-- layers -->").expect("the page has a table of layers");
        let end = page.find("<!-- /layers -->").expect("the table ends");
        let rows = page[begin..end].lines().filter_map(|line| line.strip_prefix("| `"));
        let names = |row: &str| -> Vec<String> {
            let column = row.split('|').next().unwrap_or_default();
            let names = column.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
        };
        Layers(rows.map(names).collect())
    }

    /// The row of a module, from the top.
    ///
    /// # Panics
    /// The module is in no row.
    fn row(&self, module: &str) -> usize {
        let row = self.0.iter().position(|row| row.iter().any(|name| name == module));
        row.unwrap_or_else(|| panic!("`{module}` is in no row of the layers"))
    }
}

/// Whether `other` lies in the folder of `module`.
fn is_below(other: &str, module: &str) -> bool {
    other.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
}

fn top(module: &str) -> &str {
    module.split("::").next().unwrap_or(module)
}

/// Paths that begin with `crate` or `super`, those of `use` trees written out.
fn paths_in(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find("crate::").into_iter().chain(rest.find("super::")).min() {
        let is_begin = rest[..at]
            .chars()
            .next_back()
            .is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == ':' || c == '$'));
        rest = &rest[at..];
        let len = tree_len(rest);
        if is_begin {
            expand("", &rest[..len], &mut paths);
        }
        rest = &rest[len.max(5)..];
    }
    paths
}

/// The length of the path, with its braces, that `text` begins with.
fn tree_len(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' if depth > 0 || text[..at].ends_with("::") => depth += 1,
            '}' if depth > 0 => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ if depth > 0 || c.is_alphanumeric() || c == '_' || c == ':' => {}
            _ => return at,
        }
    }
    text.len()
}

fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        return paths.push(format!("{prefix}{}", path.trim()));
    };
    let prefix = format!("{prefix}{}", tree[..open].trim());
    let inside = &tree[open + 1..tree.rfind('}').unwrap_or(tree.len())];
    let (mut depth, mut begin) = (0, 0);
    for (at, c) in inside.char_indices().chain([(inside.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inside[begin..at].trim().is_empty() {
                    expand(&prefix, inside[begin..at].trim(), paths);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// The module that a path of `module` leads into.
fn resolve(module: &str, path: &str, modules: &BTreeSet<String>) -> Option<String> {
    let mut parts: Vec<&str> = path.split("::").collect();
    let mut whole: Vec<&str> = Vec::new();
    if parts[0] == "crate" {
        parts.remove(0);
    } else {
        whole = module.split("::").collect();
        while parts.first() == Some(&"super") {
            parts.remove(0);
            whole.pop();
        }
    }
    whole.extend(parts);
    while !whole.is_empty() && !modules.contains(&whole.join("::")) {
        whole.pop();
    }
    (!whole.is_empty()).then(|| whole.join("::"))
}

#[test]
fn an_import_that_points_upwards_is_refused() {
    let layers =
        Layers::of("<!-- layers -->\n| `high` | x |\n| `low`, `near` | y |\n<!-- /layers -->");
    let sources = [
        Source::of_rust("src/low/a.rs", "use crate::{high::b::B, low::c};\n"),
        Source::of_rust("src/low/c.rs", "fn f() { crate::near::g() }\n"),
        Source::of_rust("src/high/b.rs", "use crate::low::a::A;\n"),
        Source::of_rust(
            "src/near.rs",
            "//! use crate::high::b;\n#[cfg(test)]\nmod tests {\n    use crate::high::b;\n}\n",
        ),
    ];
    let upward = Imports::of(&sources).upward(&layers);
    let found: Vec<(&str, &str)> = upward.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(found, [("low::a", "high::b"), ("low::c", "near")]);
}

#[test]
fn files_that_import_each_other_are_refused() {
    let sources = [
        Source::of_rust("src/a/mod.rs", "use b::B;\n"),
        Source::of_rust("src/a/b.rs", "use super::A;\nuse super::c::C;\n"),
        Source::of_rust("src/a/c.rs", "use super::d::D;\n"),
        Source::of_rust("src/a/d.rs", "fn f() -> crate::a::b::B {}\n"),
    ];
    assert_eq!(Imports::of(&sources).cycles(), [["a::b", "a::c", "a::d"].map(str::to_owned)]);
}
