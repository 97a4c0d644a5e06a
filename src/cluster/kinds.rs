//! What workers say of themselves that both ends of a hand-off must have in common: which pairs can be.
//!
//! Only what both tell counts: other engines tell nothing of it, and find out themselves. Not here: who asks them
//! (`front::router`), and the comparison by the workers, which is the one that protects them (`transfer::manager`).

use serde_json::Value;
use std::fmt;

/// The fields that must be equal. Of `wire` that is the major version.
const EQUAL: [&str; 7] = ["wire", "config", "weights", "kernels", "tokenizer", "template", "kv"];

/// One worker's words.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Kind {
    /// By the place in [`EQUAL`].
    values: [Option<String>; EQUAL.len()],
    /// Cluster keys by name, the one it proves first; `None` where it does not tell.
    keys: Option<Vec<String>>,
}

/// Why two workers are never paired.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// What differs.
    pub field: &'static str,
    /// Of the one,
    pub ours: String,
    /// and of the other.
    pub theirs: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} differs: {} and {}", self.field, self.ours, self.theirs)
    }
}

impl Kind {
    /// From what a worker tells under `handoff`; what is not there or is something else is not told.
    pub fn told(handoff: &Value) -> Kind {
        let text = |field: &str| handoff.get(field)?.as_str().map(str::to_owned);
        let mut values = EQUAL.map(text);
        if let Some(wire) = &mut values[0] {
            wire.truncate(wire.find('.').unwrap_or(wire.len()));
        }
        let names = |list: &Vec<Value>| list.iter().map(|key| key.as_str().map(str::to_owned)).collect();
        let keys = handoff.get("cluster_keys").and_then(Value::as_array).and_then(names);
        Kind { values, keys }
    }

    /// What keeps the two apart, if anything.
    pub fn difference(&self, other: &Kind) -> Option<Difference> {
        for (at, field) in EQUAL.into_iter().enumerate() {
            if let (Some(ours), Some(theirs)) = (&self.values[at], &other.values[at])
                && ours != theirs
            {
                return Some(Difference { field, ours: ours.clone(), theirs: theirs.clone() });
            }
        }
        let (ours, theirs) = (self.keys.as_ref()?, other.keys.as_ref()?);
        let accepts = |all: &[String], proven: &[String]| match proven.first() {
            Some(first) => all.contains(first),
            None => all.is_empty(),
        };
        let is_shared = accepts(ours, theirs) && accepts(theirs, ours);
        let list = |keys: &[String]| if keys.is_empty() { "none".into() } else { keys.join(", ") };
        (!is_shared).then(|| Difference { field: "cluster key", ours: list(ours), theirs: list(theirs) })
    }
}

/// The distinct ones of many, and which of them fit each other.
#[derive(Clone, Default, Debug)]
pub struct Kinds {
    /// Whether two fit, row by row.
    fit: Vec<bool>,
    count: usize,
}

impl Kinds {
    /// Of these, and which each of them is.
    pub fn of<'a>(all: impl Iterator<Item = &'a Kind>) -> (Kinds, Vec<usize>) {
        let mut distinct: Vec<&Kind> = Vec::new();
        let mut class = |kind: &'a Kind| {
            distinct.iter().position(|known| *known == kind).unwrap_or_else(|| {
                distinct.push(kind);
                distinct.len() - 1
            })
        };
        let classes = all.map(&mut class).collect();
        let pairs = distinct.iter().flat_map(|one| distinct.iter().map(move |other| one.difference(other)));
        let fit = pairs.map(|difference| difference.is_none()).collect();
        (Kinds { fit, count: distinct.len() }, classes)
    }

    /// Whether two of them can hand over to each other, as far as they tell.
    pub fn fit(&self, one: usize, other: usize) -> bool {
        self.fit[one * self.count + other]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn kind(wire: &str, weights: &str, keys: &[&str]) -> Kind {
        Kind::told(&json!({"wire": wire, "weights": weights, "cluster_keys": keys, "other": 1}))
    }

    #[test]
    fn what_differs_is_named_and_what_is_not_told_is_left() {
        let one = kind("3.1", "a", &["k"]);
        let differs = |other: &Kind| one.difference(other).map(|difference| difference.to_string());
        assert_eq!(differs(&kind("3.9", "a", &["k"])), None, "minor versions work together");
        assert_eq!(differs(&kind("4.0", "a", &["k"])).as_deref(), Some("wire differs: 3 and 4"));
        assert_eq!(differs(&kind("3.1", "b", &["k"])).as_deref(), Some("weights differs: a and b"));
        assert_eq!(differs(&kind("3.1", "a", &[])).as_deref(), Some("cluster key differs: k and none"));
        for silent in [json!(null), json!("3"), json!({"wire": 3, "cluster_keys": "k"}), json!([])] {
            assert_eq!(differs(&Kind::told(&silent)), None, "{silent}");
        }
    }

    #[test]
    fn each_accepts_the_key_that_the_other_proves() {
        let fits =
            |one: &[&str], other: &[&str]| kind("3", "a", one).difference(&kind("3", "a", other)).is_none();
        for (one, other, fit) in [
            (&["a"][..], &["a"][..], true),
            (&["a"], &["a", "b"], true),
            (&["a", "b"], &["b", "a"], true),
            (&["a"], &["b", "a"], false),
            (&["a"], &["b"], false),
            (&[], &[], true),
        ] {
            assert_eq!((fits(one, other), fits(other, one)), (fit, fit), "{one:?} {other:?}");
        }
    }

    #[test]
    fn equal_ones_are_compared_once() {
        let (old, new) = (kind("3", "old", &[]), kind("3", "new", &[]));
        let (kinds, classes) = Kinds::of([&old, &new, &Kind::default(), &old].into_iter());
        assert_eq!(classes, [0, 1, 2, 0]);
        let fits = |one: usize| [0, 1, 2].map(|other| kinds.fit(one, other));
        assert_eq!([0, 1, 2].map(fits), [[true, false, true], [false, true, true], [true; 3]]);
    }
}
