//! Measured throughput of some work.

use std::time::Duration;

/// A moving average of work per second. Recent work counts most.
#[derive(Debug)]
pub struct Throughput {
    /// A measurement of this amount or more reduces the weight of earlier work to [`MEMORY`]. A
    /// smaller one reduces it less, because fixed costs dominate its time.
    whole: f64,
    amount: f64,
    seconds: f64,
}

const MEMORY: f64 = 0.75;

impl Throughput {
    /// A throughput without a measurement.
    pub const fn new(whole: f64) -> Throughput {
        Throughput { whole, amount: 0.0, seconds: 0.0 }
    }

    /// Records that `amount` took the time `took`.
    pub fn measure(&mut self, amount: f64, took: Duration) {
        if took.is_zero() {
            return;
        }
        let weight = (amount / self.whole).min(1.0);
        let memory = MEMORY.powf(weight);
        self.amount = self.amount * memory + weight * amount;
        self.seconds = self.seconds * memory + weight * took.as_secs_f64();
    }

    /// The amount that fits into `time`; `None` before the first measurement.
    pub fn amount_in(&self, time: Duration) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.amount / self.seconds * time.as_secs_f64())
    }

    /// The time for `amount`; `None` before the first measurement.
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
        let mut pace = Throughput::new(64.0);
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
