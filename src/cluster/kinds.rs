//! What workers say of themselves that both ends of a hand-off must have in common: which pairs can be.
//!
//! Only what both tell counts: other engines tell nothing of it, and find out themselves. Not here: who asks them
//! (`front::router`), and the comparison by the workers, which is the one that protects them (`transfer::manager`).

use super::loads::WorkerNumber;
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

/// The words of all workers, compared when they are told and not when a pair is chosen.
#[derive(Clone, Debug)]
pub struct Kinds {
    of: Vec<Kind>,
    /// By worker: which of the distinct ones it is.
    index: Vec<usize>,
    /// Whether two distinct ones fit, row by row.
    fit: Vec<bool>,
    /// How many are distinct.
    count: usize,
}

impl Kinds {
    /// Of so many workers, none of which has told anything.
    pub fn new(workers: usize) -> Kinds {
        Kinds { of: vec![Kind::default(); workers], index: vec![0; workers], fit: vec![true], count: 1 }
    }

    /// Takes in what a worker tells of itself.
    pub fn set(&mut self, worker: WorkerNumber, kind: Kind) {
        if self.of[worker.0] == kind {
            return;
        }
        self.of[worker.0] = kind;
        let mut distinct: Vec<&Kind> = Vec::new();
        for (kind, index) in self.of.iter().zip(&mut self.index) {
            *index = distinct.iter().position(|known| *known == kind).unwrap_or_else(|| {
                distinct.push(kind);
                distinct.len() - 1
            });
        }
        let pairs = distinct.iter().flat_map(|one| distinct.iter().map(move |other| one.difference(other)));
        self.fit = pairs.map(|difference| difference.is_none()).collect();
        self.count = distinct.len();
    }

    /// Whether all fit all.
    pub fn all_fit(&self) -> bool {
        self.fit.iter().all(|&fit| fit)
    }

    /// Whether the two can hand over to each other, as far as they tell.
    pub fn fit(&self, one: WorkerNumber, other: WorkerNumber) -> bool {
        self.fit[self.index[one.0] * self.count + self.index[other.0]]
    }

    /// What keeps the two apart, if anything.
    pub fn difference(&self, one: WorkerNumber, other: WorkerNumber) -> Option<Difference> {
        self.of[one.0].difference(&self.of[other.0])
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
    fn words_can_change() {
        let mut kinds = Kinds::new(3);
        let [a, b, c] = [0, 1, 2].map(WorkerNumber);
        assert!(kinds.all_fit());
        kinds.set(a, kind("3", "old", &[]));
        kinds.set(b, kind("3", "old", &[]));
        assert!(kinds.all_fit() && kinds.fit(a, b) && kinds.fit(a, c));
        kinds.set(c, kind("3", "new", &[]));
        assert!(!kinds.all_fit() && kinds.fit(a, b) && !kinds.fit(a, c) && !kinds.fit(c, b));
        assert_eq!(kinds.difference(a, c).map(|difference| difference.field), Some("weights"));
        kinds.set(b, kind("3", "new", &[]));
        assert!(kinds.fit(b, c) && !kinds.fit(a, b));
    }
}
