//! Selects the kernel family. Only this module calls functions that are compiled for particular CPU
//! features. Each family's entry function is in a separate file, so that the compiler can compile
//! several at once.
#![allow(unsafe_code)]

use super::Kernel;
use super::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::{avx2::run_avx2, avx512::run_avx512, avx512_vnni::run_avx512_vnni};
use crate::config::KernelFamily;

/// The families that this CPU can run, the fastest last.
pub fn available_kernels() -> &'static [KernelFamily] {
    const ALL: [KernelFamily; 3] =
        [KernelFamily::Portable, KernelFamily::Avx2, KernelFamily::Avx512];
    let count = ALL.iter().take_while(|family| Dispatch::new(**family).is_some()).count();
    &ALL[..count]
}

/// The fastest family that this CPU can run.
pub fn fastest_kernels() -> KernelFamily {
    available_kernels().last().copied().unwrap_or(KernelFamily::Portable)
}

/// A family that runs on this CPU.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch(Entry);

#[derive(Clone, Copy, Debug)]
enum Entry {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl Dispatch {
    /// Returns `None` if the CPU lacks the family.
    pub fn new(family: KernelFamily) -> Option<Dispatch> {
        match family {
            KernelFamily::Portable => Some(Dispatch(Entry::Portable)),
            #[cfg(target_arch = "x86_64")]
            KernelFamily::Avx2 => has_avx2().then_some(Dispatch(Entry::Avx2)),
            #[cfg(target_arch = "x86_64")]
            KernelFamily::Avx512 if has_avx512() => match is_x86_feature_detected!("avx512vnni") {
                true => Some(Dispatch(Entry::Avx512Vnni)),
                false => Some(Dispatch(Entry::Avx512)),
            },
            _ => None,
        }
    }

    /// The family.
    pub fn family(self) -> KernelFamily {
        match self.0 {
            Entry::Portable => KernelFamily::Portable,
            #[cfg(target_arch = "x86_64")]
            Entry::Avx2 => KernelFamily::Avx2,
            #[cfg(target_arch = "x86_64")]
            Entry::Avx512 | Entry::Avx512Vnni => KernelFamily::Avx512,
        }
    }

    /// Runs a kernel with the family's instructions.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Entry::Portable => kernel.run(Portable),
            // SAFETY: `new` found the features that these functions are compiled for.
            #[cfg(target_arch = "x86_64")]
            Entry::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Entry::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Entry::Avx512Vnni => unsafe { run_avx512_vnni(kernel) },
        }
    }

    /// AVX-512 without VNNI, for the test that compares both forms.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub fn without_vnni(self) -> Dispatch {
        match self.0 {
            Entry::Avx512Vnni => Dispatch(Entry::Avx512),
            _ => self,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}
