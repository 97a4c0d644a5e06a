//! The kernel families of the forward pass on CPU, and which of them give equal bits.
//!
//! Not here: which family this CPU can run (`model/forward/cpu/simd`).

use clap::ValueEnum;
use serde::Serialize;
use std::fmt;

/// A kernel family. It gives equal bits on every CPU; its hash is part of a model's fingerprint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum KernelFamily {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ; with VNNI if present.
    Avx512,
}

impl KernelFamily {
    /// The name used in flags, answers and messages.
    pub const fn name(self) -> &'static str {
        match self {
            KernelFamily::Portable => "portable",
            KernelFamily::Avx2 => "avx2",
            KernelFamily::Avx512 => "avx512",
        }
    }

    /// The bit class. Families of one class give equal bits, so that their workers form pairs.
    /// Sums have one order in all families. `portable` rounds a product before it adds it, and the
    /// families with FMA do not. A new family is a class of its own until a test has shown that its
    /// bits are equal to those of another family (`families_of_a_bit_class_have_equal_bits`).
    pub const fn bit_class(self) -> &'static str {
        match self {
            KernelFamily::Portable => "portable",
            KernelFamily::Avx2 | KernelFamily::Avx512 => "x86-fma",
        }
    }
}

impl fmt::Display for KernelFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::message::BitClass;

    #[test]
    fn each_family_has_one_name_and_a_class_that_can_be_sent() {
        for family in KernelFamily::value_variants() {
            let flag = family.to_possible_value().unwrap();
            assert_eq!(flag.get_name(), family.name());
            assert_eq!(serde_json::to_value(family).unwrap(), family.name());
            assert_eq!(BitClass::named(family.bit_class()).to_string(), family.bit_class());
        }
    }
}
