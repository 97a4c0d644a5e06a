//! How fast something goes, as the past tells.

use std::time::Duration;

/// Amounts per second of past pieces of work, the recent ones counting most.
#[derive(Debug)]
pub struct Pace {
    /// A piece of so much or more leaves [`MEMORY`] of the weight of the earlier ones; a smaller one, most of which is
    /// the step's own cost, leaves more.
    whole: f64,
    amount: f64,
    seconds: f64,
}

const MEMORY: f64 = 0.75;

impl Pace {
    /// Nothing is measured yet.
    pub const fn new(whole: f64) -> Pace {
        Pace { whole, amount: 0.0, seconds: 0.0 }
    }

    /// So much took so long.
    pub fn measure(&mut self, amount: f64, took: Duration) {
        if took.is_zero() {
            return;
        }
        let weight = (amount / self.whole).min(1.0);
        let memory = MEMORY.powf(weight);
        self.amount = self.amount * memory + weight * amount;
        self.seconds = self.seconds * memory + weight * took.as_secs_f64();
    }

    /// How much fits into `time`; none before something was measured.
    pub fn amount_in(&self, time: Duration) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.amount / self.seconds * time.as_secs_f64())
    }

    /// How long so much takes; none before something was measured.
    pub fn estimate(&self, amount: f64) -> Option<Duration> {
        (self.amount > 0.0)
            .then(|| Duration::try_from_secs_f64(self.seconds / self.amount * amount).ok())
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_follows_the_machine() {
        let ms = Duration::from_millis;
        let mut pace = Pace::new(64.0);
        assert_eq!((pace.amount_in(ms(50)), pace.estimate(1.0)), (None, None));
        pace.measure(100.0, Duration::ZERO);
        assert_eq!(pace.amount_in(ms(50)), None);
        pace.measure(100.0, ms(100));
        assert_eq!(pace.amount_in(ms(50)).map(f64::round), Some(50.0));
        assert_eq!(pace.estimate(500.0), Some(ms(500)));
        (0..40).for_each(|_| pace.measure(100.0, ms(50)));
        assert!((95.0..=100.0).contains(&pace.amount_in(ms(50)).unwrap()));
    }
}
