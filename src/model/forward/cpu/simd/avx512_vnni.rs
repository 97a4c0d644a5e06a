//! The entry function of AVX-512 with VNNI. Its vectors are those of [`super::avx512`].
#![allow(unsafe_code)]

use super::Kernel;
use super::avx512::Avx512;

/// Runs a kernel with these instructions.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub fn run_avx512_vnni<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: these are the features of this function.
    kernel.run(unsafe { Avx512::<true>::assume() })
}
