//! The times of one choice: turns the time stamps of its legs into stages of `/metrics` and
//! `timings` of an answer.
//!
//! Thread: `ctl`. Arithmetic only; the engine and `ctl` set the stamps.

use crate::api::render::Timings;
use crate::sched::request::Stamps;
use crate::stdx::failpoint::is_failpoint_active;
use crate::wire::message::Transport;
use crate::worker::metrics::Stages;
use std::time::{Duration, Instant};

/// Time stamps of one choice.
#[derive(Clone, Copy, Default, Debug)]
pub struct ChoiceTimes {
    /// Stamps of a prefill leg in this process.
    pub prefill: Option<Stamps>,
    /// Stamps of the leg that generates the answer.
    pub decode: Option<Stamps>,
    /// Time at which the answer was complete.
    pub ended: Option<Instant>,
    /// Tokens of the answer that other workers generated before a failover.
    pub resumed: u32,
}

/// Times that a prefill worker of another process reports about itself.
#[derive(Clone, Copy, Debug)]
struct RemotePrefillTimes {
    queue: Duration,
    prefill: Duration,
}

impl ChoiceTimes {
    /// The reported times, if another process computed the prompt.
    fn elsewhere(&self) -> Option<RemotePrefillTimes> {
        let reported = self.decode.filter(|_| self.prefill.is_none())?.prefill_us;
        let micros = |us: u32| Duration::from_micros(us.into());
        reported.map(|(queue, prefill)| RemotePrefillTimes {
            queue: micros(queue),
            prefill: micros(prefill),
        })
    }

    /// The stages of the time to first token, without gaps; `None` before the first token.
    pub fn stages(&self) -> Option<Stages> {
        let decode = self.decode?;
        let reader = self.prefill.unwrap_or(decode);
        let mut last = reader.arrived;
        // A missing stamp, or one before its predecessor, gives a stage of length zero.
        let mut stage = |stamp: Option<Instant>| {
            let at = stamp.unwrap_or(last).max(last);
            let time = at - last;
            last = at;
            time
        };
        let elsewhere = self.elsewhere();
        let handed = self.prefill.is_some() || elsewhere.is_some();
        let bootstrap = if handed { stage(reader.bootstrapped) } else { Duration::ZERO };
        let queue = stage(reader.admitted);
        // If another process sends the KV, that worker reports the time of prefill. The rest of the
        // wait is the hand-off.
        let prefill = match (elsewhere, reader.admitted.zip(reader.filled)) {
            (Some(RemotePrefillTimes { prefill, .. }), Some((from, to))) => {
                stage(Some((from + prefill).min(to)))
            }
            (Some(_), None) => Duration::ZERO,
            (None, _) => stage(reader.filled),
        };
        let mut handover = stage(decode.filled);
        if is_failpoint_active("time of the hand-off is not counted") {
            handover = Duration::ZERO;
        }
        let join = stage(decode.joined);
        let first_step = stage(Some(decode.first_token?));
        Some(Stages { queue, bootstrap, prefill, handover, join, first_step })
    }

    /// Prompt tokens that came from the prefix cache.
    pub fn cached(&self) -> u32 {
        self.decode.or(self.prefill).map_or(0, |at| at.cached)
    }

    /// Whether another worker, in this process or another, computed the prompt.
    pub fn were_handed_over(&self) -> bool {
        self.prefill.is_some()
            || self.elsewhere().is_some_and(|reported| !reported.prefill.is_zero())
    }

    /// The `timings` of an answer. The tokens given to prefill and the generated tokens include
    /// those of earlier workers. `carried` has bytes and transport of a hand-off. The times are
    /// only of the workers that finished the answer.
    pub fn timings(
        &self,
        (given, generated): (u32, u32),
        carried: Option<(u64, Transport)>,
    ) -> Timings {
        let reader = self.prefill.or(self.decode);
        let decode = self.decode;
        let handed = self.prefill.is_some();
        let prefill_tokens = given.saturating_sub(self.cached());
        let resumed_tokens = Some(self.resumed).filter(|&tokens| tokens > 0);
        // The worker that computed the prompt sampled the first token.
        let decode_tokens = generated.saturating_sub(self.resumed + 1);
        let decode_ms = ms(decode.and_then(|at| at.first_token), self.ended).unwrap_or(0.0);
        let join_ms = ms(decode.and_then(|at| at.filled), decode.and_then(|at| at.joined));
        if let Some(RemotePrefillTimes { queue, prefill }) = self.elsewhere() {
            return Timings {
                queue_ms: millis(queue),
                prefill_tokens,
                prefill_ms: millis(prefill),
                kv_wait_ms: ms(decode.and_then(|at| at.admitted), decode.and_then(|at| at.filled)),
                handover_bytes: carried.map(|(bytes, _)| bytes),
                transport: carried.map(|(_, transport)| transport.name()),
                join_ms,
                decode_tokens,
                decode_ms,
                resumed_tokens,
                ..Timings::default()
            };
        }
        let own = Timings {
            queue_ms: ms(reader.map(|at| at.arrived), reader.and_then(|at| at.admitted))
                .unwrap_or(0.0),
            prefill_tokens,
            prefill_ms: ms(reader.and_then(|at| at.admitted), reader.and_then(|at| at.filled))
                .unwrap_or(0.0),
            decode_tokens,
            decode_ms,
            resumed_tokens,
            ..Timings::default()
        };
        if !handed {
            return own;
        }
        Timings {
            bootstrap_ms: ms(reader.map(|at| at.arrived), reader.and_then(|at| at.bootstrapped)),
            queue_ms: ms(reader.and_then(|at| at.bootstrapped), reader.and_then(|at| at.admitted))
                .unwrap_or(0.0),
            handover_bytes: carried.map(|(bytes, _)| bytes),
            handover_ms: ms(reader.and_then(|at| at.filled), decode.and_then(|at| at.filled)),
            transport: carried.map(|(_, transport)| transport.name()),
            join_ms,
            ..own
        }
    }
}

fn ms(from: Option<Instant>, to: Option<Instant>) -> Option<f64> {
    from.zip(to).map(|(from, to)| millis(to.saturating_duration_since(from)))
}

/// Milliseconds, rounded to the microsecond. Clocks are not more precise than that.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
