//! The properties that both workers of a hand-off must share. They decide which pairs are possible.
//! A worker's entry has one digest of them, which is known before the first query; its answer has
//! the parts.
//!
//! The router compares only properties that both workers report. Other engines report nothing and
//! check themselves. Not here: the queries (`router`), and the comparison of the workers, which
//! protects them (`transfer::manager`).

use crate::stdx::hex::to_hex;
use crate::wire::message::BitClass;
use serde_json::Value;
use std::fmt;

/// The fields that must be equal. Of `wire`, only the major version is compared; `kind` and
/// `class_digest` are the digests.
const EQUAL: [&str; 10] = [
    "wire",
    "config",
    "weights",
    "kernels",
    BitClass::FIELD,
    "tokenizer",
    "template",
    "kv",
    "kind",
    "class_digest",
];
const WIRE: usize = 0;
/// The field of cluster keys, which need not be equal.
const KEYS: &str = "cluster key";
/// Digests of the entry: by kernel family, and by bit class.
const KIND: usize = EQUAL.len() - 2;
const CLASS_DIGEST: usize = EQUAL.len() - 1;
/// Pairs of a field, and a field that replaces it if both workers report the second. Workers of
/// release 0.1.0 report the first alone.
const REPLACED: [(&str, &str); 2] = [("kernels", BitClass::FIELD), ("kind", "class_digest")];

/// Digest of the properties that must be equal in two workers: the model's fingerprint and the
/// shape of its KV. The layout of the KV (page size, strides) can differ and is not part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompatDigest {
    /// With the kernel family.
    pub by_family: [u8; 32],
    /// With the bit class in place of the kernel family; `None` from a worker of release 0.1.0.
    pub by_class: Option<[u8; 32]>,
}

/// The reported properties of one worker.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Compatibility {
    /// Whether it is a mixed worker, which never hands over.
    is_alone: bool,
    /// In the order of [`EQUAL`].
    values: [Option<String>; EQUAL.len()],
    /// Names of cluster keys. The worker proves the first. `None` if not reported.
    keys: Option<Vec<String>>,
}

/// Reason why two workers cannot be paired.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Difference {
    /// One of them is a mixed worker.
    Alone,
    /// They report different values.
    Field {
        /// The field that differs.
        field: &'static str,
        /// The value of the one worker.
        ours: String,
        /// The value of the other worker.
        theirs: String,
    },
}

impl Difference {
    /// Whether the workers differ only in their cluster keys, which change while they run.
    fn is_of_keys(&self) -> bool {
        matches!(self, Difference::Field { field: KEYS, .. })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Alone => f.write_str("one is a mixed worker, which never hands over"),
            Difference::Field { field, ours, theirs } => {
                write!(f, "{field} differs: {ours} and {theirs}")?;
                if *field == BitClass::FIELD { write!(f, "; {}", BitClass::REMEDY) } else { Ok(()) }
            }
        }
    }
}

impl Compatibility {
    /// The properties from the digest in a worker's entry.
    pub fn entered(digest: CompatDigest) -> Compatibility {
        let mut kind = Compatibility::default();
        kind.values[KIND] = Some(to_hex(&digest.by_family));
        kind.values[CLASS_DIGEST] = digest.by_class.map(|digest| to_hex(&digest));
        kind
    }

    /// The properties of a mixed worker, which fits no other.
    pub fn alone() -> Compatibility {
        Compatibility { is_alone: true, ..Compatibility::default() }
    }

    /// Whether these are the properties of a mixed worker.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Adds the digest of the worker's entry, if it has one.
    pub fn with_entry_of(mut self, other: &Compatibility) -> Compatibility {
        for digest in [KIND, CLASS_DIGEST] {
            self.values[digest].clone_from(&other.values[digest]);
        }
        self
    }

    /// The properties from the object `handoff` in a worker's answer. A field that is absent or not
    /// a string is not compared.
    pub fn from_report(handoff: &Value) -> Compatibility {
        let text = |field: &str| handoff.get(field)?.as_str().map(str::to_owned);
        let mut values = EQUAL.map(text);
        (values[KIND], values[CLASS_DIGEST]) = (None, None);
        if let Some(wire) = &mut values[WIRE] {
            wire.truncate(wire.find('.').unwrap_or(wire.len()));
        }
        let names =
            |list: &Vec<Value>| list.iter().map(|key| key.as_str().map(str::to_owned)).collect();
        let keys = handoff.get("cluster_keys").and_then(Value::as_array).and_then(names);
        Compatibility { is_alone: false, values, keys }
    }

    /// The first difference between two workers, if any. Cluster keys come last.
    pub fn difference(&self, other: &Compatibility) -> Option<Difference> {
        if self.is_alone || other.is_alone {
            return Some(Difference::Alone);
        }
        let do_both_report = |field: &str| {
            let at = EQUAL.iter().position(|name| *name == field);
            at.is_some_and(|at| self.values[at].is_some() && other.values[at].is_some())
        };
        let is_replaced =
            |field: &str| REPLACED.iter().any(|&(old, new)| old == field && do_both_report(new));
        let compared = EQUAL.into_iter().enumerate().filter(|(_, field)| !is_replaced(field));
        for (at, field) in compared {
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
        (!is_shared).then_some(Difference::Field { field: KEYS, ours, theirs })
    }
}

/// Classes of workers with equal properties, and which classes fit each other.
#[derive(Clone, Default, Debug)]
pub struct CompatibilityMatrix {
    /// Whether two classes fit, row by row.
    fit: Vec<bool>,
    /// Whether two classes differ by their cluster keys alone.
    differ_by_keys: Vec<bool>,
    count: usize,
    /// Whether all classes fit each other.
    all_fit: bool,
}

impl CompatibilityMatrix {
    /// Classifies these workers. Returns the classes, and the class of each worker.
    pub fn of<'a>(
        all: impl Iterator<Item = &'a Compatibility>,
    ) -> (CompatibilityMatrix, Vec<usize>) {
        let mut distinct: Vec<&Compatibility> = Vec::new();
        let class = |kind: &'a Compatibility| {
            distinct.iter().position(|known| *known == kind).unwrap_or_else(|| {
                distinct.push(kind);
                distinct.len() - 1
            })
        };
        let classes = all.map(class).collect();
        let pairs =
            distinct.iter().flat_map(|one| distinct.iter().map(move |other| one.difference(other)));
        let is_of_keys = |difference: &Option<Difference>| {
            difference.as_ref().is_some_and(Difference::is_of_keys)
        };
        let (fit, differ_by_keys): (Vec<bool>, Vec<bool>) =
            pairs.map(|difference| (difference.is_none(), is_of_keys(&difference))).unzip();
        let all_fit = fit.iter().all(|&fit| fit);
        (CompatibilityMatrix { fit, differ_by_keys, count: distinct.len(), all_fit }, classes)
    }

    /// Whether all workers can hand over to each other.
    pub fn all_fit(&self) -> bool {
        self.all_fit
    }

    /// Whether two classes can hand over to each other, by their reports.
    pub fn fit(&self, one: usize, other: usize) -> bool {
        self.fit[one * self.count + other]
    }

    /// Whether two classes differ by their cluster keys alone.
    pub fn differ_by_keys(&self, one: usize, other: usize) -> bool {
        self.differ_by_keys[one * self.count + other]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn kind(wire: &str, weights: &str, keys: &[&str]) -> Compatibility {
        Compatibility::from_report(
            &json!({"wire": wire, "weights": weights, "cluster_keys": keys, "other": 1}),
        )
    }

    #[test]
    fn a_different_field_is_named_and_an_unreported_field_is_ignored() {
        let one = kind("3.1", "a", &["k"]);
        let differs =
            |other: &Compatibility| one.difference(other).map(|difference| difference.to_string());
        assert_eq!(differs(&kind("3.9", "a", &["k"])), None, "minor versions work together");
        assert_eq!(differs(&kind("4.0", "a", &["k"])).as_deref(), Some("wire differs: 3 and 4"));
        assert_eq!(differs(&kind("3.1", "b", &["k"])).as_deref(), Some("weights differs: a and b"));
        assert_eq!(
            differs(&kind("3.1", "a", &[])).as_deref(),
            Some("cluster key differs: k and none")
        );
        for silent in [json!(null), json!("3"), json!({"wire": 3, "cluster_keys": "k"}), json!([])]
        {
            assert_eq!(differs(&Compatibility::from_report(&silent)), None, "{silent}");
        }
    }

    #[test]
    fn an_entry_and_a_report_describe_one_kind() {
        let entered = |digest: u8| {
            Compatibility::entered(CompatDigest { by_family: [digest; 32], by_class: None })
        };
        assert!(entered(1).difference(&entered(1)).is_none());
        let field = |one: &Compatibility, other: &Compatibility| match one.difference(other) {
            Some(Difference::Field { field, .. }) => Some(field),
            _ => None,
        };
        assert_eq!(field(&entered(1), &entered(2)), Some("kind"));
        let reported = kind("3.1", "a", &["k"]);
        assert!(entered(1).difference(&reported).is_none(), "what the other does not report");
        let both = reported.clone().with_entry_of(&entered(1));
        assert_eq!(field(&both, &entered(2)), Some("kind"));
        assert_eq!(field(&both, &kind("3.1", "b", &["k"])), Some("weights"));
        assert_eq!(
            Compatibility::from_report(&json!({"kind": "forged"})),
            Compatibility::default(),
            "an entry alone has it"
        );
    }

    /// Two families of one class fit. A worker of release 0.1 reports its family alone.
    #[test]
    fn the_bit_class_decides_if_both_workers_report_it() {
        let reported = |kernels: &str, class: Option<&str>| {
            let mut report = json!({"wire": "3.3", "kernels": kernels});
            if let Some(class) = class {
                report["bit_class"] = class.into();
            }
            Compatibility::from_report(&report)
        };
        let (one, other) = (reported("a", Some("fma")), reported("b", Some("fma")));
        let differs = |other: &Compatibility| one.difference(other).map(|why| why.to_string());
        assert_eq!(differs(&other), None);
        assert_eq!(differs(&reported("a", None)), None);
        assert_eq!(differs(&reported("b", None)).as_deref(), Some("kernels differs: a and b"));
        assert_eq!(
            differs(&reported("c", Some("portable"))).as_deref(),
            Some("bit_class differs: fma and portable; give both workers the same --kernels")
        );
        let entered = |family: u8, class: Option<u8>| {
            let by_class = class.map(|class| [class; 32]);
            Compatibility::entered(CompatDigest { by_family: [family; 32], by_class })
        };
        let one = entered(1, Some(7));
        assert!(one.difference(&entered(2, Some(7))).is_none());
        assert!(one.difference(&entered(1, None)).is_none());
        assert!(one.difference(&entered(2, None)).is_some());
        assert!(one.difference(&entered(1, Some(8))).is_some());
        // A worker of release 0.1.0 fits one of two workers that fit each other.
        let all = [("a", None), ("a", Some("fma")), ("b", Some("fma"))];
        let all = all.map(|(kernels, class)| reported(kernels, class));
        let (kinds, classes) = CompatibilityMatrix::of(all.iter());
        let fit = |one: usize, other: usize| kinds.fit(classes[one], classes[other]);
        assert_eq!([fit(0, 1), fit(1, 2), fit(0, 2)], [true, true, false]);
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
    fn a_worker_without_hand_offs_fits_no_other_despite_its_entry() {
        let entered = Compatibility::entered(CompatDigest { by_family: [1; 32], by_class: None });
        let reported = kind("3.1", "a", &[]).with_entry_of(&entered);
        let alone = Compatibility::alone().with_entry_of(&entered);
        for other in [&reported, &entered, &Compatibility::default()] {
            assert_eq!(alone.difference(other), Some(Difference::Alone));
            assert_eq!(other.difference(&alone), Some(Difference::Alone));
        }
    }

    #[test]
    fn equal_ones_are_compared_once() {
        let (old, new) = (kind("3", "old", &[]), kind("3", "new", &[]));
        let (kinds, classes) =
            CompatibilityMatrix::of([&old, &new, &Compatibility::default(), &old].into_iter());
        assert_eq!(classes, [0, 1, 2, 0]);
        let fits = |one: usize| [0, 1, 2].map(|other| kinds.fit(one, other));
        assert_eq!([0, 1, 2].map(fits), [[true, false, true], [false, true, true], [true; 3]]);
    }
}
