//! Tests the arithmetic of each family against plain code, lane by lane.

use super::block::*;
use super::panel::{PANEL, PanelForms, Panels};
use super::simd::{Dispatch, Kernel, LANES, Lanes, Simd, available_kernels};
use crate::model::tensor::TensorType;
use proptest::prelude::*;

/// All families of this CPU, including AVX-512 without VNNI.
fn dispatches() -> Vec<Dispatch> {
    let all = available_kernels().iter().filter_map(|family| Dispatch::new(*family));
    #[cfg(target_arch = "x86_64")]
    let all = all.flat_map(|dispatch| [dispatch, dispatch.without_vnni()]);
    all.collect()
}

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 33
    }
}

/// The dot products of 16 rows with one activation block.
struct Dots<'a, L> {
    levels: &'a L,
    x: &'a [i16; BLOCK],
}

impl<L: Levels> Kernel for Dots<'_, L> {
    type Output = Lanes;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Lanes {
        let words: [i32; BLOCK / 2] = bytemuck::cast(*self.x);
        let sum: i32 = self.x.iter().map(|x| *x as i32).sum();
        let mut dot = s.splat_int(-L::OFFSET * sum);
        for q in 0..4 {
            let at = [2 * q, 2 * q + 1, 8 + 2 * q, 8 + 2 * q + 1];
            for (weights, at) in self.levels.quads(s, q).into_iter().zip(at) {
                dot = s.dot(dot, weights, words[at]);
            }
        }
        let mut lanes = [0.0; LANES];
        s.store(s.float(dot), &mut lanes);
        lanes
    }
}

fn check_dots<L: Levels>(below: u64, extreme: bool) {
    let mut random = random(below);
    for round in 0..50 {
        let mut draw = |n: u64| if extreme && round % 2 == 0 { n - 1 } else { random() % n };
        let rows: [RowLevels; LANES] =
            std::array::from_fn(|_| std::array::from_fn(|_| draw(below) as u8));
        let x: [i16; BLOCK] = std::array::from_fn(|i| match round % 5 {
            0 => i16::MAX,
            1 => -i16::MAX,
            2 => [i16::MAX, -i16::MAX][i % 2],
            _ => draw(1 << 16) as i16,
        });
        let levels = L::pack(&rows);
        for dispatch in dispatches() {
            let found = dispatch.run(Dots { levels: &levels, x: &x });
            for (lane, found) in found.into_iter().enumerate() {
                let expected: i32 = (0..BLOCK).map(|k| levels.get(lane, k) * x[k] as i32).sum();
                assert_eq!(found, expected as f32, "{dispatch:?} round {round} lane {lane}");
            }
        }
    }
}

#[test]
fn integer_products_are_exact_in_every_family() {
    for extreme in [false, true] {
        check_dots::<Nibbles<0>>(16, extreme);
        check_dots::<Nibbles<8>>(16, extreme);
        check_dots::<Bytes<0>>(32, extreme);
        check_dots::<Bytes<16>>(32, extreme);
        check_dots::<Bytes<32>>(64, extreme);
        check_dots::<SignedBytes>(256, extreme);
        check_dots::<SignedBytes>(129, extreme);
    }
}

/// Applies a function of vectors to one vector.
struct Map<'a, F>(&'a Lanes, F);

trait Function {
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F;
}

impl<F: Function> Kernel for Map<'_, F> {
    type Output = Lanes;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Lanes {
        let mut lanes = [0.0; LANES];
        s.store(self.1.apply(s, s.load(self.0)), &mut lanes);
        lanes
    }
}

struct Exp2;
impl Function for Exp2 {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        s.exp2(x)
    }
}

struct ThroughHalf;
impl Function for ThroughHalf {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        s.half(&s.to_half(x))
    }
}

struct ThroughBf16;
impl Function for ThroughBf16 {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        s.bf16(&s.to_bf16(x))
    }
}

struct ThroughShorts;
impl Function for ThroughShorts {
    #[inline(always)]
    fn apply<S: Simd>(&self, s: S, x: S::F) -> S::F {
        let shorts = s.shorts(s.round(x));
        s.load(&shorts.map(|x| x as f32))
    }
}

proptest! {
    #[test]
    fn vector_functions_agree_with_scalar_ones(
        x in proptest::array::uniform16(-100.0f32..100.0),
        scale in -30i32..10,
    ) {
        for dispatch in dispatches() {
            for (found, x) in dispatch.run(Map(&x, Exp2)).into_iter().zip(x) {
                let expected = (x as f64).exp2();
                let error = (found as f64 - expected).abs();
                prop_assert!(error <= expected * 3e-7, "{dispatch:?} 2^{x}: {found}");
            }
            let small = x.map(|x| x * (scale as f32).exp2());
            for (found, x) in dispatch.run(Map(&small, ThroughHalf)).into_iter().zip(small) {
                prop_assert_eq!(found, half::f16::from_f32(x).to_f32());
            }
            for (found, x) in dispatch.run(Map(&small, ThroughBf16)).into_iter().zip(small) {
                prop_assert_eq!(found, half::bf16::from_f32(x).to_f32());
            }
            for (found, x) in dispatch.run(Map(&x, ThroughShorts)).into_iter().zip(x) {
                prop_assert_eq!(found, x.round_ties_even());
            }
        }
    }
}

#[test]
fn powers_of_nothing_and_of_next_to_nothing_are_exact() {
    for dispatch in dispatches() {
        assert_eq!(dispatch.run(Map(&[-1e30; LANES], Exp2)), [0.0; LANES]);
        assert_eq!(dispatch.run(Map(&[0.0; LANES], Exp2)), [1.0; LANES]);
        assert_eq!(dispatch.run(Map(&[126.0; LANES], Exp2)), [126f32.exp2(); LANES]);
    }
}

/// `exp2` at its limit, and for numbers that are none: all families have the same bits.
#[test]
fn powers_near_the_smallest_normal_number_are_equal_in_all_families() {
    let limit = -126.0f32;
    let inputs = [
        -125.5,
        limit.next_up(),
        limit,
        limit.next_down(),
        -126.5,
        -130.0,
        -149.0,
        -150.0,
        -1e30,
        f32::NEG_INFINITY,
        f32::NAN,
        -0.5,
        0.5,
        -0.0,
        126.5,
        127.0,
    ];
    let bits = |dispatch: Dispatch| dispatch.run(Map(&inputs, Exp2)).map(f32::to_bits);
    let of_fma =
        dispatches().into_iter().filter(|kernels| kernels.family().bit_class() != "portable");
    let all: Vec<_> = of_fma.map(|dispatch| (dispatch, bits(dispatch))).collect();
    for (dispatch, found) in &all {
        assert_eq!(found, &all[0].1, "{dispatch:?} and {:?}", all[0].0);
        assert!(found[2..11].iter().all(|&bits| bits == 0), "{dispatch:?}: {found:x?}");
    }
}

struct Transpose<'a>(&'a [Lanes; LANES]);

impl Kernel for Transpose<'_> {
    type Output = [Lanes; LANES];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [Lanes; LANES] {
        let mut to = [[0.0; LANES]; LANES];
        s.transpose(self.0, &mut to);
        to
    }
}

#[test]
fn a_transposition_moves_every_element() {
    let from: [Lanes; LANES] =
        std::array::from_fn(|i| std::array::from_fn(|j| (16 * i + j) as f32));
    for dispatch in dispatches() {
        let to = dispatch.run(Transpose(&from));
        for (i, row) in from.iter().enumerate() {
            for (j, x) in row.iter().enumerate() {
                assert_eq!(to[j][i], *x, "{dispatch:?}");
            }
        }
    }
}

#[test]
fn packed_blocks_hold_what_the_rows_held() {
    let mut random = random(9);
    for dtype in [TensorType::Q4_1, TensorType::Q5_1, TensorType::Q8_0] {
        let (_, size) = dtype.block();
        let rows: [Vec<u8>; LANES] =
            std::array::from_fn(|_| (0..size).map(|_| random() as u8 & 0x3f).collect());
        let blocks = rows.each_ref().map(|row| super::quantized_block::row_block(dtype, row, 0));
        let levels = blocks.each_ref().map(|b| b.levels);
        let nibbles = Nibbles::<0>::pack(&levels.map(|row| row.map(|level| level & 15)));
        let bytes = SignedBytes::pack(&levels);
        for (lane, block) in blocks.iter().enumerate() {
            for column in 0..BLOCK {
                assert_eq!(nibbles.get(lane, column), (block.levels[column] & 15) as i32);
                assert_eq!(bytes.get(lane, column), block.levels[column] as i8 as i32);
            }
        }
    }
}

#[test]
fn panels_hold_no_form_that_is_not_wanted() {
    let wanted = PanelForms { integers: true, floats: false };
    let mut panels = Panels::new(2 * PANEL, 64, wanted);
    assert!(panels.memory() > 0);
    let (integers, floats) = panels.parts(PANEL + 1, 64, wanted);
    assert_eq!((integers.len(), floats.len()), (4, 0));
}
