//! Chooses the worker with the least cost: predicted time (prefill) or step (decode). The
//! prediction uses the reservations, and includes the delay of other requests. The source is
//! Mooncake, FAST'25, algorithm 1, extended by the reservations of both legs.
//!
//! Time to first token: the queue, the missing part of the prompt, the transfer of the last chunk,
//! and a decode step. Time per token: a step with all sequences that are reserved there, because
//! waiting sequences will generate, too. A worker that does both computes prompts in passes between
//! the steps.

use super::{Candidate, PolicyInput, Purpose};
use std::cell::Cell;
use std::time::Duration;

/// Assumed number of requests that wait behind a prompt at a worker that also generates. The value
/// comes from an experiment (docs/internals/figures.md).
const BEHIND: f64 = 4.0;

const MS_PER_NANO: f64 = 1e-6;

/// The predicted times of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prediction {
    /// Time to the first token: the share of this leg.
    pub ttft: Duration,
    /// Time between two tokens. Zero for a prefill leg.
    pub tpot: Duration,
}

/// Picks the usable worker with the least cost in milliseconds: the predicted time of this request,
/// plus the delay of other requests. A prefill leg counts its own computation twice, because other
/// requests will wait behind this prompt.
pub fn pick(question: &PolicyInput<'_>) -> Option<usize> {
    let known = Readings::of(question);
    match question.leg {
        Purpose::Prefill => question
            .cheapest(|worker| queue_ms(question, worker) + 2.0 * known.ms(question, worker)),
        Purpose::Decode => question.cheapest(step_ms(question)),
        Purpose::Whole => question.cheapest(whole_ms(question, &known)),
    }
}

/// The index with the least cost among these, for a worker that does both.
pub fn pick_whole(
    question: &PolicyInput<'_>,
    places: impl Iterator<Item = usize>,
) -> Option<usize> {
    question.cheapest_of(places, whole_ms(question, &Readings::of(question)))
}

/// The cost at a worker that also generates: each of its sequences waits for the prompt.
fn whole_ms<'a>(
    question: &'a PolicyInput<'_>,
    known: &'a Readings,
) -> impl Fn(&Candidate) -> f64 + 'a {
    let (step, output) = (step_ms(question), f64::from(question.forecast.output.max(1)));
    move |worker| {
        let own = known.ms(question, worker);
        let uncomputed = worker.total_uncomputed.saturating_add(question.missing(worker));
        let passes = f64::from(uncomputed / question.forecast.chunk) + 1.0;
        let beside = BEHIND + f64::from(worker.sequences);
        queue_ms(question, worker) + own + step(worker) * (passes + output) + own * beside
    }
}

/// The cost of a decode step with the request added.
fn step_ms(question: &PolicyInput<'_>) -> impl Fn(&Candidate) -> f64 + use<> {
    let PolicyInput { demand: work, forecast, .. } = *question;
    let (context, sequences) = (work.context() as f64, f64::from(work.sequences.max(1)));
    let step = forecast.steps();
    move |worker| {
        step(f64::from(worker.total_context) + context, f64::from(worker.sequences) + sequences)
    }
}

fn queue_ms(question: &PolicyInput<'_>, worker: &Candidate) -> f64 {
    question.queue(worker).cast_signed().max(0) as f64 * MS_PER_NANO
}

/// Times to compute the prompt, by cached blocks. Most workers have only the common blocks.
struct Readings {
    common: f64,
    more: [Cell<(u32, f64)>; 8],
}

impl Readings {
    fn of(question: &PolicyInput<'_>) -> Readings {
        let common = reading_ms(question, question.common);
        Readings { common, more: std::array::from_fn(|_| Cell::new((u32::MAX, 0.0))) }
    }

    fn ms(&self, question: &PolicyInput<'_>, worker: &Candidate) -> f64 {
        match worker.cached <= question.common {
            true => self.common,
            false => self.ms_of_more(question, worker.cached),
        }
    }

    #[cold]
    fn ms_of_more(&self, question: &PolicyInput<'_>, has: u32) -> f64 {
        let known = &self.more[has as usize % self.more.len()];
        let (cached, ms) = known.get();
        if cached == has {
            return ms;
        }
        let ms = reading_ms(question, has);
        known.set((has, ms));
        ms
    }
}

/// Milliseconds to compute the rest of the prompt after this many cached blocks.
fn reading_ms(question: &PolicyInput<'_>, cached: u32) -> f64 {
    let missing = question.demand.missing(cached);
    question.forecast.reading_ms(missing, question.demand.tokens.saturating_sub(missing))
}

/// The prediction of the leg at this worker.
pub fn predict(question: &PolicyInput<'_>, worker: &Candidate) -> Prediction {
    let PolicyInput { demand: work, forecast, .. } = *question;
    let sequences = work.sequences.max(1);
    let missing = question.missing(worker);
    let reading = || {
        let own = forecast.reading(missing, work.tokens.saturating_sub(missing));
        Duration::from_nanos(question.queue(worker)).saturating_add(own)
    };
    let context = u64::from(worker.total_context) + work.context();
    let step = || forecast.step(context, worker.sequences.saturating_add(sequences));
    match question.leg {
        Purpose::Prefill => Prediction { ttft: reading(), tpot: Duration::ZERO },
        Purpose::Decode => {
            let step = step();
            Prediction { ttft: forecast.transfer(missing).saturating_add(step / 2), tpot: step }
        }
        Purpose::Whole => {
            let (reading, step) = (reading(), step());
            // Each of its tokens waits for the prompts that the worker computes in that time.
            let passes = (worker.total_uncomputed.saturating_add(missing) / forecast.chunk)
                .saturating_add(1);
            let shared = reading / forecast.output.max(1);
            Prediction {
                ttft: reading.saturating_add(step.saturating_mul(passes)),
                tpot: step.saturating_add(shared),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::asked::{ask, load};
    use super::*;

    #[test]
    fn a_match_is_worth_twice_the_time_that_it_saves() {
        let at = |uncomputed: u32, cached| {
            let prefill_done_ns = Duration::from_millis(uncomputed.into()).as_nanos() as u64;
            Candidate { cached, total_uncomputed: uncomputed, prefill_done_ns, ..load(true, 1) }
        };
        let pick = |workers: &[_]| ask(workers, 0, |_| {}, pick);
        // 1000 tokens take 42 ms, 500 tokens 25 ms.
        assert_eq!(pick(&[at(0, 0), at(30, 5)]), Some(1));
        assert_eq!(pick(&[at(0, 0), at(40, 5)]), Some(0));
        assert_eq!(pick(&[load(false, 0)]), None);
    }

    #[test]
    fn decode_goes_to_the_worker_with_the_shortest_step() {
        let at = |context, reserved| Candidate { total_context: context, ..load(true, reserved) };
        let decode =
            |workers: &[_]| ask(workers, 0, |question| question.leg = Purpose::Decode, pick);
        assert_eq!(decode(&[at(100_000, 5), at(90_000, 9)]), Some(1));
        assert_eq!(decode(&[at(90_000, 20), at(90_000, 9)]), Some(1));
    }

    #[test]
    fn the_forecast_for_a_whole_request_includes_both_phases() {
        let (idle, cached) = (load(true, 0), Candidate { cached: 10, ..load(true, 0) });
        let whole = |worker: &Candidate| {
            ask(&[], 0, |question| question.leg = Purpose::Whole, |q| predict(q, worker))
        };
        assert!(whole(&cached).ttft < whole(&idle).ttft && whole(&cached).tpot < whole(&idle).tpot);
        let prefill = ask(&[], 0, |_| {}, |question| predict(question, &idle));
        assert!(prefill.ttft < whole(&idle).ttft && prefill.tpot == Duration::ZERO);
    }
}
