//! The one that is foretold to be soonest (prefill), or to slow its sequences least (decode), by what is booked, what it costs
//! others counted as well; nobody, where that is too late (Mooncake, FAST'25, algorithm 1; with what is booked at both legs, so that neither is seen late).
//!
//! Time to the first token is what is before it in line, what of the prompt is missing, the last chunk's way over the link
//! and a step of the batch that it joins; time per token that of a step with all that are booked there, since who is read
//! now generates then. A worker that does both reads in passes of its own between the steps.

use super::{Candidate, Leg, Question};
use std::cell::Cell;
use std::time::Duration;

/// Who stands behind a prompt where it is read, at a worker that generates beside: found by trying (docs/figures.md).
const BEHIND: f64 = 4.0;

const MS_PER_NANO: f64 = 1e-6;

/// What a choice comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Foretold {
    /// Until the first token, of this leg's share.
    pub ttft: Duration,
    /// Between two tokens; nothing for a prefill leg.
    pub tpot: Duration,
}

/// The usable worker of the least cost, in milliseconds: what is foretold to pass, and what the others there lose by it. Behind
/// a prompt others will stand in line, so that its own reading counts twice.
pub fn pick(question: &Question<'_>) -> Option<usize> {
    let known = Readings::of(question);
    match question.leg {
        Leg::Prefill => question
            .cheapest(|worker| queue_ms(question, worker) + 2.0 * known.ms(question, worker)),
        Leg::Decode => question.cheapest(step_ms(question)),
        Leg::Whole => question.cheapest(whole_ms(question, &known)),
    }
}

/// The one of these places of the least cost, to do both.
pub fn pick_whole(question: &Question<'_>, places: impl Iterator<Item = usize>) -> Option<usize> {
    question.cheapest_of(places, whole_ms(question, &Readings::of(question)))
}

/// The cost where sequences are generated beside: each of them waits for what is read.
fn whole_ms<'a>(
    question: &'a Question<'_>,
    known: &'a Readings,
) -> impl Fn(&Candidate) -> f64 + 'a {
    let (step, output) = (step_ms(question), f64::from(question.forecast.output.max(1)));
    move |worker| {
        let own = known.ms(question, worker);
        let unread = worker.to_read.saturating_add(question.missing(worker));
        let passes = f64::from(unread / question.forecast.chunk) + 1.0;
        let beside = BEHIND + f64::from(worker.sequences);
        queue_ms(question, worker) + own + step(worker) * (passes + output) + own * beside
    }
}

/// A step of what a worker has with the request.
fn step_ms(question: &Question<'_>) -> impl Fn(&Candidate) -> f64 + use<> {
    let Question { work, forecast, .. } = *question;
    let (context, sequences) = (work.context() as f64, f64::from(work.sequences.max(1)));
    let step = forecast.steps();
    move |worker| {
        step(f64::from(worker.stands_on) + context, f64::from(worker.sequences) + sequences)
    }
}

fn queue_ms(question: &Question<'_>, worker: &Candidate) -> f64 {
    question.queue(worker).cast_signed().max(0) as f64 * MS_PER_NANO
}

/// How long the prompt takes, by blocks of it that a worker has: most workers have as many as all have.
struct Readings {
    common: f64,
    more: [Cell<(u32, f64)>; 8],
}

impl Readings {
    fn of(question: &Question<'_>) -> Readings {
        let common = reading_ms(question, question.common);
        Readings { common, more: std::array::from_fn(|_| Cell::new((u32::MAX, 0.0))) }
    }

    fn ms(&self, question: &Question<'_>, worker: &Candidate) -> f64 {
        match worker.cached <= question.common {
            true => self.common,
            false => self.ms_of_more(question, worker.cached),
        }
    }

    #[cold]
    fn ms_of_more(&self, question: &Question<'_>, has: u32) -> f64 {
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

/// Milliseconds for what is missing where so many blocks are cached.
fn reading_ms(question: &Question<'_>, cached: u32) -> f64 {
    let missing = question.work.missing(cached);
    question.forecast.reading_ms(missing, question.work.tokens.saturating_sub(missing))
}

/// What the leg comes to at this worker.
pub fn foretell(question: &Question<'_>, worker: &Candidate) -> Foretold {
    let Question { work, forecast, .. } = *question;
    let sequences = work.sequences.max(1);
    let missing = question.missing(worker);
    let reading = || {
        let own = forecast.reading(missing, work.tokens.saturating_sub(missing));
        Duration::from_nanos(question.queue(worker)).saturating_add(own)
    };
    let context = u64::from(worker.stands_on) + work.context();
    let step = || forecast.step(context, worker.sequences.saturating_add(sequences));
    match question.leg {
        Leg::Prefill => Foretold { ttft: reading(), tpot: Duration::ZERO },
        Leg::Decode => {
            let step = step();
            Foretold { ttft: forecast.transfer(missing).saturating_add(step / 2), tpot: step }
        }
        Leg::Whole => {
            let (reading, step) = (reading(), step());
            // Each of its tokens waits for what is read meanwhile.
            let passes =
                (worker.to_read.saturating_add(missing) / forecast.chunk).saturating_add(1);
            let shared = reading / forecast.output.max(1);
            Foretold {
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
        let at = |unread: u32, cached| {
            let has_read = Duration::from_millis(unread.into()).as_nanos() as u64;
            Candidate { cached, to_read: unread, has_read, ..load(true, 1) }
        };
        let pick = |workers: &[_]| ask(workers, 0, |_| {}, pick);
        // 1000 tokens take 42 ms, 500 some 25.
        assert_eq!(pick(&[at(0, 0), at(30, 5)]), Some(1));
        assert_eq!(pick(&[at(0, 0), at(40, 5)]), Some(0));
        assert_eq!(pick(&[load(false, 0)]), None);
    }

    #[test]
    fn decode_is_where_a_step_is_shortest() {
        let at = |context, booked| Candidate { stands_on: context, ..load(true, booked) };
        let decode = |workers: &[_]| ask(workers, 0, |question| question.leg = Leg::Decode, pick);
        assert_eq!(decode(&[at(100_000, 5), at(90_000, 9)]), Some(1));
        assert_eq!(decode(&[at(90_000, 20), at(90_000, 9)]), Some(1));
    }

    #[test]
    fn who_does_both_pays_for_both() {
        let (idle, cached) = (load(true, 0), Candidate { cached: 10, ..load(true, 0) });
        let whole = |worker: &Candidate| {
            ask(&[], 0, |question| question.leg = Leg::Whole, |q| foretell(q, worker))
        };
        assert!(whole(&cached).ttft < whole(&idle).ttft && whole(&cached).tpot < whole(&idle).tpot);
        let prefill = ask(&[], 0, |_| {}, |question| foretell(question, &idle));
        assert!(prefill.ttft < whole(&idle).ttft && prefill.tpot == Duration::ZERO);
    }
}
