//! Activations in the form that matrix products read: panels of sixteen rows, block after block.
//!
//! For quantised weights, 32 columns of a row become 16-bit integers with one scale, so that dot
//! products are exact. With 8 bits, the error in logprobs would be larger than that of most
//! quantised weights. For plain weights the activations stay floats.

use super::block::BLOCK;
use super::simd::{LANES, Lanes, Simd};

/// Rows of a panel.
pub const PANEL: usize = 16;

/// 16 rows × 32 columns of activations as i16.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Quantised {
    /// Per row, two columns per word.
    pub words: [[i32; BLOCK / 2]; PANEL],
    /// Per row: scale.
    pub scale: [f32; PANEL],
    /// Per row: scale · sum of all integers.
    pub total: [f32; PANEL],
    /// Per half of the columns and per row: sum of integers.
    pub sums: [[i32; PANEL]; 2],
}

/// The largest magnitude. 32 products with 8-bit weights stay far below 2³¹.
const LARGEST: f32 = i16::MAX as f32;

const EMPTY: Quantised = Quantised {
    words: [[0; BLOCK / 2]; PANEL],
    scale: [0.0; PANEL],
    total: [0.0; PANEL],
    sums: [[0; PANEL]; 2],
};

/// The forms in which consumers need some activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PanelForms {
    /// Integers, for quantised weights.
    pub integers: bool,
    /// Floats, for plain weights.
    pub floats: bool,
}

impl PanelForms {
    /// The forms of both.
    pub fn or(self, other: PanelForms) -> PanelForms {
        PanelForms {
            integers: self.integers || other.integers,
            floats: self.floats || other.floats,
        }
    }
}

/// Panels for a bounded number of rows and columns.
pub struct Panels {
    integers: Vec<Quantised>,
    floats: Vec<Lanes>,
}

/// Panels filled for `columns` columns.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    integers: &'a [Quantised],
    floats: &'a [Lanes],
    columns: usize,
}

impl Panels {
    /// Room for `rows` rows of `columns` columns in the wanted forms.
    pub fn new(rows: usize, columns: usize, wanted: PanelForms) -> Panels {
        let panels = rows.div_ceil(PANEL);
        Panels {
            integers: vec![
                EMPTY;
                if wanted.integers { panels * columns.div_ceil(BLOCK) } else { 0 }
            ],
            floats: vec![[0.0; PANEL]; if wanted.floats { panels * columns } else { 0 }],
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        size_of_val(&*self.integers) + size_of_val(&*self.floats)
    }

    /// Blocks and float columns for `rows` × `columns`. Pieces of [`blocks_per_panel`] blocks, or
    /// of `columns` float columns, are one panel each. An unwanted form is empty.
    pub fn parts(
        &mut self,
        rows: usize,
        columns: usize,
        wanted: PanelForms,
    ) -> (&mut [Quantised], &mut [Lanes]) {
        let panels = rows.div_ceil(PANEL);
        let integers = if wanted.integers { panels * blocks_per_panel(columns) } else { 0 };
        let floats = if wanted.floats { panels * columns } else { 0 };
        (&mut self.integers[..integers], &mut self.floats[..floats])
    }

    /// The last packed activations, with `columns` columns.
    pub fn input(&self, columns: usize) -> Input<'_> {
        Input { integers: &self.integers, floats: &self.floats, columns }
    }
}

/// Number of blocks of one panel.
pub fn blocks_per_panel(columns: usize) -> usize {
    columns.div_ceil(BLOCK)
}

impl<'a> Input<'a> {
    /// One panel as integers.
    #[inline(always)]
    pub fn integers(&self, panel: usize) -> &'a [Quantised] {
        let blocks = blocks_per_panel(self.columns);
        &self.integers[panel * blocks..][..blocks]
    }

    /// One panel as floats.
    #[inline(always)]
    pub fn floats(&self, panel: usize) -> &'a [Lanes] {
        &self.floats[panel * self.columns..][..self.columns]
    }
}

/// A row to pack, sixteen columns at a time. Columns after the last one read as zero.
pub trait RowSource {
    /// Columns `16 · chunk..` of the row.
    fn chunk<S: Simd>(&self, s: S, chunk: usize) -> S::F;
}

/// Packs one row as row `lane` of a panel; either slice may be empty.
#[inline(always)]
pub fn pack_row<S: Simd>(
    s: S,
    source: &impl RowSource,
    lane: usize,
    columns: usize,
    integers: &mut [Quantised],
    floats: &mut [Lanes],
) {
    for (index, block) in integers.iter_mut().enumerate() {
        quantise(s, [source.chunk(s, 2 * index), source.chunk(s, 2 * index + 1)], lane, block);
    }
    if floats.is_empty() {
        return;
    }
    for chunk in 0..columns.div_ceil(LANES) {
        let mut lanes = [0.0; LANES];
        s.store(source.chunk(s, chunk), &mut lanes);
        for (column, value) in floats[chunk * LANES..].iter_mut().zip(lanes) {
            column[lane] = value;
        }
    }
}

#[inline(always)]
fn quantise<S: Simd>(s: S, values: [S::F; 2], lane: usize, block: &mut Quantised) {
    let minus = s.splat(-1.0);
    let [a, b] = values;
    let magnitude = s.max(s.max(a, s.mul(a, minus)), s.max(b, s.mul(b, minus)));
    let largest = s.largest(magnitude);
    // A block of almost zero becomes zero: its inverse would be infinite.
    let largest = if largest > 1e-30 { largest } else { 0.0 };
    let inverse = s.splat(if largest > 0.0 { LARGEST / largest } else { 0.0 });
    let a = s.shorts(s.round(s.mul(a, inverse)));
    let b = s.shorts(s.round(s.mul(b, inverse)));
    let scale = largest * (1.0 / LARGEST);
    let sums = [sum(&a), sum(&b)];
    block.words[lane] = bytemuck::cast([a, b]);
    block.scale[lane] = scale;
    block.total[lane] = scale * (sums[0] + sums[1]) as f32;
    block.sums[0][lane] = sums[0];
    block.sums[1][lane] = sums[1];
}

#[inline(always)]
fn sum(integers: &[i16; LANES]) -> i32 {
    integers.iter().map(|x| *x as i32).sum()
}
