//! What workers say of themselves that both ends of a hand-off must have in common: which pairs can be. In the entry that
//! a worker makes of itself that is one digest, known before anybody has asked it; when asked it tells its parts.
//!
//! Only what both tell counts: other engines tell nothing of it, and find out themselves. Not here: who asks them
//! (`front::router`), and the comparison by the workers, which is the one that protects them (`transfer::manager`).

use super::proof::to_hex;
use serde_json::Value;
use std::fmt;

/// The fields that must be equal. Of `wire` that is the major version; `kind` is the digest.
const EQUAL: [&str; 8] =
    ["wire", "config", "weights", "kernels", "tokenizer", "template", "kv", "kind"];
const WIRE: usize = 0;
const KIND: usize = EQUAL.len() - 1;

/// Over all of a worker that must be equal: the model's fingerprint and the shape of its KV. How KV lies (page size,
/// strides) may differ and is not in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KindDigest(pub [u8; 32]);

/// One worker's words.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Kind {
    /// Whether it hands nothing over, whatever else it tells: it does both.
    is_alone: bool,
    /// By the place in [`EQUAL`].
    values: [Option<String>; EQUAL.len()],
    /// Cluster keys by name, the one it proves first; `None` where it does not tell.
    keys: Option<Vec<String>>,
}

/// Why two workers are never paired.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Difference {
    /// One of them is a mixed worker.
    Alone,
    /// They differ in something that they tell.
    Field {
        /// What differs.
        field: &'static str,
        /// Of the one,
        ours: String,
        /// and of the other.
        theirs: String,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Alone => f.write_str("one is mixed, which hands nothing over"),
            Difference::Field { field, ours, theirs } => {
                write!(f, "{field} differs: {ours} and {theirs}")
            }
        }
    }
}

impl Kind {
    /// From a worker's entry.
    pub fn entered(digest: KindDigest) -> Kind {
        let mut kind = Kind::default();
        kind.values[KIND] = Some(to_hex(&digest.0));
        kind
    }

    /// Of a worker that does without a hand-off: it fits nobody.
    pub fn alone() -> Kind {
        Kind { is_alone: true, ..Kind::default() }
    }

    /// Whether it is of such a worker.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// With what its entry has said, if it has one.
    pub fn with_entry_of(mut self, other: &Kind) -> Kind {
        self.values[KIND].clone_from(&other.values[KIND]);
        self
    }

    /// From what a worker tells under `handoff`; what is not there or is something else is not told.
    pub fn told(handoff: &Value) -> Kind {
        let text = |field: &str| handoff.get(field)?.as_str().map(str::to_owned);
        let mut values = EQUAL.map(text);
        values[KIND] = None;
        if let Some(wire) = &mut values[WIRE] {
            wire.truncate(wire.find('.').unwrap_or(wire.len()));
        }
        let names =
            |list: &Vec<Value>| list.iter().map(|key| key.as_str().map(str::to_owned)).collect();
        let keys = handoff.get("cluster_keys").and_then(Value::as_array).and_then(names);
        Kind { is_alone: false, values, keys }
    }

    /// What keeps the two apart, if anything.
    pub fn difference(&self, other: &Kind) -> Option<Difference> {
        if self.is_alone || other.is_alone {
            return Some(Difference::Alone);
        }
        for (at, field) in EQUAL.into_iter().enumerate() {
            if let (Some(ours), Some(theirs)) = (&self.values[at], &other.values[at])
                && ours != theirs
            {
                return Some(Difference::Field {
                    field,
                    ours: ours.clone(),
                    theirs: theirs.clone(),
                });
            }
        }
        let (ours, theirs) = (self.keys.as_ref()?, other.keys.as_ref()?);
        let accepts = |all: &[String], proven: &[String]| match proven.first() {
            Some(first) => all.contains(first),
            None => all.is_empty(),
        };
        let is_shared = accepts(ours, theirs) && accepts(theirs, ours);
        let list = |keys: &[String]| if keys.is_empty() { "none".into() } else { keys.join(", ") };
        let (ours, theirs) = (list(ours), list(theirs));
        (!is_shared).then_some(Difference::Field { field: "cluster key", ours, theirs })
    }
}

/// The distinct ones of many, and which of them fit each other.
#[derive(Clone, Default, Debug)]
pub struct Kinds {
    /// Whether two fit, row by row.
    fit: Vec<bool>,
    count: usize,
    /// Whether any two do.
    all_fit: bool,
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
        let pairs =
            distinct.iter().flat_map(|one| distinct.iter().map(move |other| one.difference(other)));
        let fit: Vec<bool> = pairs.map(|difference| difference.is_none()).collect();
        let all_fit = fit.iter().all(|&fit| fit);
        (Kinds { fit, count: distinct.len(), all_fit }, classes)
    }

    /// Whether all can hand over to each other.
    pub fn all_fit(&self) -> bool {
        self.all_fit
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
        assert_eq!(
            differs(&kind("3.1", "a", &[])).as_deref(),
            Some("cluster key differs: k and none")
        );
        for silent in [json!(null), json!("3"), json!({"wire": 3, "cluster_keys": "k"}), json!([])]
        {
            assert_eq!(differs(&Kind::told(&silent)), None, "{silent}");
        }
    }

    #[test]
    fn an_entry_and_what_is_told_are_one_kind() {
        let entered = |digest: u8| Kind::entered(KindDigest([digest; 32]));
        assert!(entered(1).difference(&entered(1)).is_none());
        let field = |one: &Kind, other: &Kind| match one.difference(other) {
            Some(Difference::Field { field, .. }) => Some(field),
            _ => None,
        };
        assert_eq!(field(&entered(1), &entered(2)), Some("kind"));
        let told = kind("3.1", "a", &["k"]);
        assert!(entered(1).difference(&told).is_none(), "what the other does not tell");
        let both = told.clone().with_entry_of(&entered(1));
        assert_eq!(field(&both, &entered(2)), Some("kind"));
        assert_eq!(field(&both, &kind("3.1", "b", &["k"])), Some("weights"));
        assert_eq!(
            Kind::told(&json!({"kind": "forged"})),
            Kind::default(),
            "an entry alone has it"
        );
    }

    #[test]
    fn each_accepts_the_key_that_the_other_proves() {
        let fits = |one: &[&str], other: &[&str]| {
            kind("3", "a", one).difference(&kind("3", "a", other)).is_none()
        };
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
    fn who_hands_nothing_over_fits_nobody_whatever_its_entry_says() {
        let entered = Kind::entered(KindDigest([1; 32]));
        let told = kind("3.1", "a", &[]).with_entry_of(&entered);
        let alone = Kind::alone().with_entry_of(&entered);
        for other in [&told, &entered, &Kind::default()] {
            assert_eq!(alone.difference(other), Some(Difference::Alone));
            assert_eq!(other.difference(&alone), Some(Difference::Alone));
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
