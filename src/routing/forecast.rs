//! Predicts the times of workers: a forward pass by a polynomial of tokens and contexts, a link by
//! its rate.
//!
//! Owns: the formulas. Pure; the simulator's workers use the same formulas. The coefficients are
//! fitted to measurements of a model on a machine. The form is from DistServe, OSDI'24, appendix A.

pub use crate::config::{Cost, Forecast};
use crate::limits::CONTEXT_MAX;
use std::time::Duration;

impl Cost {
    /// Milliseconds of a step that computes prompts. Each item has a prompt's new tokens and the
    /// tokens before them.
    pub fn prefill_ms(&self, prompts: impl Iterator<Item = (u32, u32)>) -> f64 {
        let [a, b, c, d] = self.prefill;
        let (mut ms, mut sum) = (a, 0.0);
        for (new, prefix) in prompts {
            let (new, prefix) = (f64::from(new), f64::from(prefix));
            ms += b * new + c * new * (prefix + new / 2.0);
            sum += new;
        }
        ms + d * sum * sum
    }

    /// Milliseconds of a step that generates a token for `batch` sequences of `context` tokens in
    /// total.
    pub fn decode_ms(&self, context: u64, batch: usize) -> f64 {
        self.step_ms(context as f64, batch as f64)
    }

    fn step_ms(&self, context: f64, batch: f64) -> f64 {
        let [a, b, c, d] = self.decode;
        a + b * context + c * batch + d * context * context
    }
}

impl Forecast {
    /// The time to compute `new` tokens after `prefix` tokens, chunk by chunk.
    pub fn reading(&self, new: u32, prefix: u32) -> Duration {
        millis(self.reading_ms(new, prefix))
    }

    /// The same in milliseconds.
    pub fn reading_ms(&self, new: u32, prefix: u32) -> f64 {
        // No worker accepts longer prompts, but a client can send them.
        let (new, prefix) = (new.min(CONTEXT_MAX), prefix.min(CONTEXT_MAX));
        let (whole, rest) = (new / self.chunk, new % self.chunk);
        let chunk = |index: u32, new: u32| {
            self.cost.prefill_ms([(new, prefix + index * self.chunk)].into_iter())
        };
        let ms = (0..whole).map(|index| chunk(index, self.chunk)).sum::<f64>()
            + if rest > 0 { chunk(whole, rest) } else { 0.0 };
        ms.max(0.0)
    }

    /// The time to transfer the last chunk of a prompt of `tokens`. Earlier chunks are transferred
    /// while later ones are computed.
    pub fn transfer(&self, tokens: u32) -> Duration {
        let bytes = f64::from(tokens.min(self.chunk)) * self.bytes_per_token as f64;
        millis(bytes / self.bytes_per_second * 1e3)
    }

    /// The time of a step of `sequences` sequences with prompts of `context` tokens in total,
    /// halfway through their answers.
    pub fn step(&self, context: u64, sequences: u32) -> Duration {
        millis(self.steps()(context as f64, f64::from(sequences)))
    }

    /// The same as a function of both in milliseconds, for repeated use.
    pub fn steps(&self) -> impl Fn(f64, f64) -> f64 + use<> {
        let (cost, answered) = (self.cost, f64::from(self.output / 2));
        move |context, sequences| cost.step_ms(context + sequences * answered, sequences).max(0.0)
    }
}

fn millis(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms.max(0.0) / 1e3).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::COST_DEFAULT as DEFAULT;

    #[test]
    fn a_step_costs_what_its_polynomial_says() {
        let cost = Cost { prefill: [10.0, 0.5, 0.01, 0.25], decode: [5.0, 0.1, 2.0, 0.001] };
        assert_eq!(cost.prefill_ms([(4, 0)].into_iter()), 10.0 + 2.0 + 0.04 * 2.0 + 4.0);
        assert_eq!(
            cost.prefill_ms([(4, 6), (2, 0)].into_iter()),
            10.0 + 3.0 + 0.04 * 8.0 + 0.02 + 9.0
        );
        assert_eq!(cost.decode_ms(100, 3), 5.0 + 10.0 + 6.0 + 10.0);
    }

    #[test]
    fn a_prompt_in_two_chunks_costs_its_start_once_more() {
        let whole = DEFAULT.prefill_ms([(8192, 0)].into_iter());
        let parts = DEFAULT.prefill_ms([(4096, 0)].into_iter())
            + DEFAULT.prefill_ms([(4096, 4096)].into_iter());
        assert!((parts - whole - DEFAULT.prefill[0]).abs() < 1e-9);
    }

    #[test]
    fn a_forecast_is_the_sum_of_its_chunks() {
        let forecast = Forecast { chunk: 100, ..Forecast::default() };
        let ms = |parts: &[(u32, u32)]| {
            millis(parts.iter().map(|&part| DEFAULT.prefill_ms([part].into_iter())).sum())
        };
        assert_eq!(forecast.reading(250, 50), ms(&[(100, 50), (100, 150), (50, 250)]));
        assert_eq!(forecast.reading(0, 50), Duration::ZERO);
        assert_eq!(
            forecast.transfer(5000),
            forecast.transfer(100),
            "the rest goes while more is computed"
        );
    }
}
