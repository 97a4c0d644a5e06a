//! The experts of a layer: each token's choice, the products of the chosen experts, and their sum.
//!
//! Rows of one expert lie next to each other and begin with a panel of their own, so that one phase
//! multiplies the rows of all experts.
//! Owns: [`ExpertScratch`].
//! Invariants: a token's choice depends on its own logits, and its sum goes through its experts in
//! ascending order. So its bits do not depend on other tokens. Only chosen experts are read.
//! Not here: the products of the expert router and of the shared expert (`step`).

use super::element::{Gated, Normed, Raw, times_sigmoid};
use super::layer_weights::{Layer, Mlp};
use super::matrix_product::{Linear, Multiply};
use super::panel::{PANEL, PanelForms, Panels};
use super::simd::{Kernel, LANES, Lanes, Simd};
use super::step_team::{StepTeam, stride};
use crate::model::config::ExpertConfig;
use crate::stdx::disjoint_parts::{Chunks, Grid};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// An expert of one token.
#[derive(Clone, Copy, Default)]
struct ChosenExpert {
    expert: u32,
    /// Its row among the rows of all experts.
    row: u32,
    weight: f32,
}

/// What layers with experts write for one block of tokens.
pub struct ExpertScratch {
    /// Experts of a layer.
    count: usize,
    /// Experts of a token.
    used: usize,
    /// See [`ExpertConfig::normalised`].
    normalised: bool,
    /// `[token][experts, gate of the shared expert]`, both padded to sixteen: of the expert router.
    scores: Vec<f32>,
    /// `[token][used]`, each token's experts in ascending order.
    chosen: Vec<ChosenExpert>,
    rows: ExpertRows,
    /// The inputs of the next product.
    panels: Panels,
    /// The forms that the first products of the experts read.
    first_wants: PanelForms,
    /// The forms that the second products read. Rows can be too short for a form of the first.
    second_wants: PanelForms,
    /// `[row][gate, up]`
    gate_up: Vec<f32>,
    /// `[row][hidden]`: outputs of the experts.
    outputs: Vec<f32>,
    /// `[token][hidden]`: outputs of the shared expert; empty without one.
    shared: Vec<f32>,
    widths: ExpertWidths,
}

/// The stride of each buffer's rows.
#[derive(Clone, Copy)]
struct ExpertWidths {
    scores: usize,
    gate_up: usize,
    hidden: usize,
}

impl ExpertScratch {
    /// Allocates for blocks of at most `block` tokens.
    pub fn new(
        hidden: usize,
        config: &ExpertConfig,
        layers: &[Layer],
        block: usize,
    ) -> ExpertScratch {
        let (count, used, inside) = (config.count, config.used, config.intermediate);
        let rows = ExpertRows::new(count, used, block);
        let widths = ExpertWidths {
            scores: stride(count.next_multiple_of(LANES) + LANES),
            gate_up: stride(2 * inside.next_multiple_of(LANES)),
            hidden: stride(hidden),
        };
        let wanted = |linear: fn(&Mlp) -> &Linear| {
            let experts = layers.iter().flat_map(Layer::experts);
            experts.fold(PanelForms::default(), |wanted, one| wanted.or(linear(one).wants()))
        };
        let (first_wants, second_wants) = (wanted(|one| &one.gate_up), wanted(|one| &one.down));
        let shared = if config.shared_intermediate.is_some() { block * widths.hidden } else { 0 };
        ExpertScratch {
            count,
            used,
            normalised: config.normalised,
            scores: vec![0.0; block * widths.scores],
            chosen: vec![ChosenExpert::default(); block * used],
            panels: Panels::new(
                rows.tokens.len(),
                hidden.max(inside),
                first_wants.or(second_wants),
            ),
            first_wants,
            second_wants,
            gate_up: vec![0.0; rows.tokens.len() * widths.gate_up],
            outputs: vec![0.0; rows.tokens.len() * widths.hidden],
            rows,
            shared: vec![0.0; shared],
            widths,
        }
    }

    /// Bytes held.
    pub fn memory(&self) -> usize {
        let floats = [&self.scores, &self.gate_up, &self.outputs, &self.shared];
        floats.iter().map(|v| size_of_val(&***v)).sum::<usize>()
            + size_of_val(&*self.chosen)
            + self.rows.memory()
            + self.panels.memory()
    }

    /// Where the outputs of the expert router belong, and their stride.
    pub fn scores(&mut self) -> (&mut [f32], usize) {
        (&mut self.scores, self.widths.scores)
    }

    /// Where the outputs of the shared expert belong, and their stride.
    pub fn shared(&mut self) -> (&mut [f32], usize) {
        (&mut self.shared, self.widths.hidden)
    }

    /// Chooses the experts of `tokens` tokens by the outputs of the expert router, and runs them.
    pub fn run(
        &mut self,
        crew: &mut StepTeam<'_>,
        experts: &[Mlp],
        normed: Normed<'_>,
        tokens: usize,
    ) {
        self.choose(crew, tokens);
        self.rows.group(&mut self.chosen[..tokens * self.used], self.used);
        let ExpertScratch { rows, panels, gate_up, outputs, widths, .. } = self;
        let (inside, count) = (experts[0].down.columns(), rows.filled.len() * PANEL);
        let filled = |panel: usize| rows.filled[panel];
        let normed = Normed { picked: &rows.tokens, ..normed };
        crew.pack_panels(panels, normed, (count, filled), normed.columns, self.first_wants);
        let first = |expert: usize| &experts[expert].gate_up;
        rows.multiply(crew, first, panels, (&mut gate_up[..], widths.gate_up));
        let raw = Raw { rows: gate_up, stride: widths.gate_up };
        let activation = experts[0].activation;
        let gated = Gated { raw, up_at: inside.next_multiple_of(LANES), activation };
        crew.pack_panels(panels, gated, (count, filled), inside, self.second_wants);
        let second = |expert: usize| &experts[expert].down;
        rows.multiply(crew, second, panels, (&mut outputs[..], widths.hidden));
    }

    fn choose(&mut self, crew: &mut StepTeam<'_>, tokens: usize) {
        let (stride, used) = (self.widths.scores, self.used);
        let scores = Chunks::new(&mut self.scores[..tokens * stride], stride);
        let chosen = Chunks::new(&mut self.chosen[..tokens * used], used);
        let (count, normalised, dispatch) = (self.count, self.normalised, crew.dispatch);
        crew.team.run((scores, chosen), |_, (scores, chosen)| {
            dispatch.run(Choose { scores, chosen, count, normalised });
        });
    }

    /// Adds the outputs of the last run to the tokens' rows of the residual stream.
    pub fn add_to(&self, crew: &mut StepTeam<'_>, stream: &mut [f32]) {
        let (stride, dispatch) = (self.widths.hidden, crew.dispatch);
        crew.team.run(Chunks::new(stream, stride), |token, stream| {
            let chosen = &self.chosen[token * self.used..][..self.used];
            let shared = self.shared.get(token * stride..(token + 1) * stride).unwrap_or(&[]);
            let gate_at = self.count.next_multiple_of(LANES);
            let gate = self.scores[token * self.widths.scores + gate_at];
            dispatch.run(Sum { chosen, outputs: &self.outputs, shared, gate, stream });
        });
    }
}

/// Which row of the experts' buffers belongs to which token and expert.
struct ExpertRows {
    /// The token of each row.
    tokens: Vec<u32>,
    /// Chosen experts in ascending order, and the rows of each.
    experts: Vec<u32>,
    bands: Vec<Range<usize>>,
    /// Rows of each panel.
    filled: Vec<usize>,
    /// While rows are assigned: the next row of each expert.
    next: Vec<u32>,
}

impl ExpertRows {
    /// Room for blocks of `block` tokens.
    fn new(count: usize, used: usize, block: usize) -> ExpertRows {
        let chosen = block * used;
        // Each expert's last panel can be almost empty, and no expert has a token twice.
        let rows = (chosen + (PANEL - 1) * count.min(chosen)).next_multiple_of(PANEL);
        let rows = rows.min(count * block.next_multiple_of(PANEL));
        ExpertRows {
            tokens: vec![0; rows],
            experts: Vec::with_capacity(count),
            bands: Vec::with_capacity(count),
            filled: Vec::with_capacity(rows / PANEL),
            next: vec![0; count],
        }
    }

    fn memory(&self) -> usize {
        size_of_val(&*self.tokens)
            + size_of_val(&*self.next)
            + self.experts.capacity() * size_of::<u32>()
            + self.bands.capacity() * size_of::<Range<usize>>()
            + self.filled.capacity() * size_of::<usize>()
    }

    /// Assigns a row to each chosen expert of each token.
    fn group(&mut self, chosen: &mut [ChosenExpert], used: usize) {
        self.experts.clear();
        self.bands.clear();
        self.filled.clear();
        self.next.fill(0);
        chosen.iter().for_each(|one| self.next[one.expert as usize] += 1);
        for (expert, next) in self.next.iter_mut().enumerate() {
            let (first, count) = (self.filled.len() * PANEL, *next as usize);
            *next = first as u32;
            if count > 0 {
                self.experts.push(expert as u32);
                self.bands.push(first..first + count);
                let panels = (0..count).step_by(PANEL);
                self.filled.extend(panels.map(|row| PANEL.min(count - row)));
            }
        }
        for (index, one) in chosen.iter_mut().enumerate() {
            let next = &mut self.next[one.expert as usize];
            one.row = *next;
            self.tokens[*next as usize] = (index / used) as u32;
            *next += 1;
        }
    }

    /// Multiplies the packed rows of each expert with its matrices, which `of` names.
    fn multiply<'a>(
        &self,
        crew: &mut StepTeam<'_>,
        of: impl Fn(usize) -> &'a Linear + Sync,
        panels: &Panels,
        (to, stride): (&mut [f32], usize),
    ) {
        let linear = of(0);
        let (groups, bands) = (linear.groups(), self.bands.len());
        let tasks = crew.tasks(self.filled.iter().copied().max().unwrap_or(0));
        let per_task = (groups * bands / tasks).clamp(1, groups);
        let grid = Grid::new(to, stride, &self.bands, linear.outputs(), per_task * LANES);
        let (across, dispatch) = (grid.across(), crew.dispatch);
        let input = panels.input(linear.columns());
        crew.team.run(grid, |index, to| {
            let band = index / across;
            let (linear, rows) = (of(self.experts[band] as usize), self.bands[band].clone());
            let group = index % across * per_task;
            dispatch.run(Multiply { linear, input, rows, group, to, add: false });
        });
    }
}

/// One task: the experts of a token, and their weights.
struct Choose<'a> {
    /// Logits of the experts.
    scores: &'a mut [f32],
    chosen: &'a mut [ChosenExpert],
    count: usize,
    normalised: bool,
}

impl Kernel for Choose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Choose { scores, chosen, count, normalised } = self;
        take_largest(&scores[..count], chosen);
        let largest = scores[chosen[0].expert as usize];
        let scores = &mut scores[..count.next_multiple_of(LANES)];
        // Lanes after the last expert add nothing to the sum.
        scores[count..].fill(f32::NEG_INFINITY);
        let mut sum = s.splat(0.0);
        for lanes in scores.chunks_exact_mut(LANES) {
            let lanes: &mut Lanes = lanes.first_chunk_mut().expect("sixteen");
            let logit = s.add(s.load(lanes), s.splat(-largest));
            let power = s.exp2(s.mul(logit, s.splat(LOG2_E)));
            s.store(power, lanes);
            sum = s.add(sum, power);
        }
        chosen.sort_unstable_by_key(|one| one.expert);
        let total = match normalised {
            true => chosen.iter().fold(0.0, |sum, one| sum + scores[one.expert as usize]),
            false => s.sum(sum),
        };
        chosen.iter_mut().for_each(|one| one.weight = scores[one.expert as usize] / total);
    }
}

/// Finds the largest logits, in descending order. Of equal ones, the first counts as larger.
#[inline(always)]
fn take_largest(logits: &[f32], chosen: &mut [ChosenExpert]) {
    let mut found = 0;
    for (expert, &logit) in logits.iter().enumerate() {
        let is_larger = |one: &ChosenExpert| logit > logits[one.expert as usize];
        let smaller = chosen[..found].iter().rev().take_while(|one| is_larger(one)).count();
        let place = found - smaller;
        if place < chosen.len() {
            found = (found + 1).min(chosen.len());
            chosen[place..found].rotate_right(1);
            chosen[place].expert = expert as u32;
        }
    }
}

/// One task: adds the outputs of a token's experts to its row of the stream.
struct Sum<'a> {
    chosen: &'a [ChosenExpert],
    /// Outputs of all experts, with the stride of the stream.
    outputs: &'a [f32],
    /// The output of the shared expert; empty without one.
    shared: &'a [f32],
    /// The logit of its gate.
    gate: f32,
    stream: &'a mut [f32],
}

impl Kernel for Sum<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Sum { chosen, outputs, shared, gate, stream } = self;
        let stride = stream.len();
        let gate = times_sigmoid(s, s.splat(1.0), s.splat(gate));
        for (index, stream) in stream.chunks_exact_mut(LANES).enumerate() {
            let at = index * LANES;
            let mut sum = s.splat(0.0);
            for one in chosen {
                let output = lanes(&outputs[one.row as usize * stride + at..]);
                sum = s.fma(s.load(output), s.splat(one.weight), sum);
            }
            if !shared.is_empty() {
                sum = s.fma(s.load(lanes(&shared[at..])), gate, sum);
            }
            let stream: &mut Lanes = stream.first_chunk_mut().expect("sixteen");
            s.store(s.add(s.load(stream), sum), stream);
        }
    }
}

#[inline(always)]
fn lanes(from: &[f32]) -> &Lanes {
    from.first_chunk().expect("rows are padded to sixteen")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn largest(logits: &[f32], used: usize) -> Vec<u32> {
        let mut chosen = vec![ChosenExpert::default(); used];
        take_largest(logits, &mut chosen);
        chosen.iter().map(|one| one.expert).collect()
    }

    #[test]
    fn of_equal_logits_the_first_is_chosen() {
        assert_eq!(largest(&[1.0; 5], 3), [0, 1, 2]);
        assert_eq!(largest(&[0.0, 2.0, 1.0, 2.0, 2.0], 2), [1, 3]);
        assert_eq!(largest(&[0.0, -0.0, 0.0], 2), [0, 1]);
        assert_eq!(largest(&[3.0, 1.0], 2), [0, 1]);
        // Each is another expert, also without an order.
        assert_eq!(largest(&[f32::NAN; 4], 2), [0, 1]);
    }

    proptest! {
        #[test]
        fn the_largest_logits_are_chosen(
            logits in proptest::collection::vec(-3i8..3, 1..40),
            used in 1usize..8,
        ) {
            let used = used.min(logits.len());
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut sorted: Vec<u32> = (0..logits.len() as u32).collect();
            sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            prop_assert_eq!(largest(&logits, used), &sorted[..used]);
        }

        #[test]
        fn rows_of_an_expert_are_next_to_each_other(
            (count, used, tokens, more) in (1usize..20, 1usize..4, 1usize..40, 0usize..5),
            seed in any::<u32>(),
        ) {
            let used = used.min(count);
            let mut rows = ExpertRows::new(count, used, tokens + more);
            // Neighbours of a random expert, so that some experts have all tokens and some none.
            let expert = |token: usize, rank: usize| {
                (seed as usize / (1 + token % 3) + rank) % count
            };
            let mut chosen = Vec::new();
            for token in 0..tokens {
                chosen.extend((0..used).map(|rank| {
                    let expert = expert(token, rank) as u32;
                    ChosenExpert { expert, ..ChosenExpert::default() }
                }));
            }
            for _ in 0..2 {
                rows.group(&mut chosen, used);
                prop_assert!(rows.filled.len() * PANEL <= rows.tokens.len());
                prop_assert_eq!(rows.filled.iter().sum::<usize>(), tokens * used);
                prop_assert!(rows.experts.is_sorted());
                for (index, one) in chosen.iter().enumerate() {
                    let band = rows.experts.binary_search(&one.expert).unwrap();
                    prop_assert!(rows.bands[band].contains(&(one.row as usize)));
                    prop_assert!(rows.bands[band].start.is_multiple_of(PANEL));
                    prop_assert_eq!(rows.tokens[one.row as usize] as usize, index / used);
                }
            }
        }
    }
}
