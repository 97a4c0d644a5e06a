//! The phases that all blocks of a step use: packing rows, and products of packed rows.
//!
//! Thread: the engine's, with helper threads.

use super::element::{AddRow, Gated, Normed, Pack, Raw, Rows};
use super::layer_weights::Mlp;
use super::matrix_product::{Linear, Multiply};
use super::panel::{PANEL, PanelForms, Panels, blocks_per_panel};
use super::plan::BLOCK_TOKENS;
use super::simd::{Dispatch, LANES};
use crate::stdx::disjoint_parts::{Chunks, Grid};
use crate::stdx::team::Team;
use std::ops::Range;

/// The stride of rows: an odd number of cache lines. With an even number, rows would use few sets
/// of the cache.
pub fn stride(columns: usize) -> usize {
    (columns.div_ceil(LANES) | 1) * LANES
}

/// Resources that the phases of a step share.
pub struct StepTeam<'a> {
    /// The threads.
    pub team: &'a mut Team,
    /// The kernels.
    pub dispatch: Dispatch,
}

impl StepTeam<'_> {
    /// Packs `count` rows for the next products.
    pub fn pack<R: Rows>(
        &mut self,
        panels: &mut Panels,
        rows: R,
        count: usize,
        columns: usize,
        wanted: PanelForms,
    ) {
        let filled = |panel: usize| PANEL.min(count - panel * PANEL);
        self.pack_panels(panels, rows, (count, filled), columns, wanted);
    }

    /// Packs `count` rows, of which each panel has the first ones only: as many as the function
    /// says.
    pub fn pack_panels<R: Rows>(
        &mut self,
        panels: &mut Panels,
        rows: R,
        (count, filled): (usize, impl Fn(usize) -> usize + Sync),
        columns: usize,
        wanted: PanelForms,
    ) {
        let (integers, floats) = panels.parts(count, columns, wanted);
        let integers = wanted.integers.then(|| Chunks::new(integers, blocks_per_panel(columns)));
        let floats = wanted.floats.then(|| Chunks::new(floats, columns));
        let dispatch = self.dispatch;
        self.team.run((integers, floats), |panel, (integers, floats)| {
            let (integers, floats) = (integers.unwrap_or_default(), floats.unwrap_or_default());
            let (first, count) = (panel * PANEL, filled(panel));
            dispatch.run(Pack { rows, first, count, columns, integers, floats });
        });
    }

    /// Multiplies the last packed rows.
    pub fn multiply(
        &mut self,
        linear: &Linear,
        panels: &Panels,
        count: usize,
        (to, stride): (&mut [f32], usize),
        add: bool,
    ) {
        let groups = linear.groups();
        // Rows are distributed only if there are too few groups for all threads.
        let bands: [Range<usize>; BLOCK_TOKENS / 64] =
            std::array::from_fn(|i| (i * 64).min(count)..(i * 64 + 64).min(count));
        let whole = 0..count;
        let bands = match groups < 8 * self.team.threads() && count > 64 {
            true => &bands[..count.div_ceil(64)],
            false => std::slice::from_ref(&whole),
        };
        let per_task = (groups / self.tasks(count)).max(1);
        let grid = Grid::new(to, stride, bands, linear.outputs(), per_task * LANES);
        let (across, dispatch) = (grid.across(), self.dispatch);
        let input = panels.input(linear.columns());
        self.team.run(grid, |index, to| {
            let rows = bands[index / across].clone();
            let group = index % across * per_task;
            dispatch.run(Multiply { linear, input, rows, group, to, add });
        });
    }

    /// Adds rows to those of the residual stream, which have the same stride.
    pub fn add_rows(&mut self, normed: Normed<'_>, stream: &mut [f32]) {
        let (stride, columns, dispatch) = (normed.raw.stride, normed.columns, self.dispatch);
        self.team.run(Chunks::new(stream, stride), |row, to| {
            dispatch.run(AddRow { rows: normed, row, columns, to });
        });
    }

    /// Multiplies the last packed rows with the matrices of an MLP. `inside` is a buffer for gate
    /// and up, and its stride.
    pub fn multiply_mlp(
        &mut self,
        mlp: &Mlp,
        panels: &mut Panels,
        (inside, stride): (&mut [f32], usize),
        count: usize,
        to: (&mut [f32], usize),
        add: bool,
    ) {
        self.multiply(&mlp.gate_up, panels, count, (&mut *inside, stride), false);
        let columns = mlp.down.columns();
        let gated = Gated {
            raw: Raw { rows: inside, stride },
            up_at: columns.next_multiple_of(LANES),
            activation: mlp.activation,
        };
        self.pack(panels, gated, count, columns, mlp.down.wants());
        self.multiply(&mlp.down, panels, count, to, add);
    }

    /// Into how many tasks a product of `count` rows is cut. Few rows are memory-bound and need
    /// long tasks. Many rows are compute-bound; with more tasks, all threads end at about the same
    /// time.
    pub fn tasks(&self, count: usize) -> usize {
        self.team.threads() * if count <= 4 { 8 } else { 32 }
    }
}
