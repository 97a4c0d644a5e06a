//! Where the time of one choice went: its legs' stamps, as the stages of `/metrics` and as the `timings` of an
//! answer.
//!
//! Thread: `ctl`. Arithmetic on stamps; the clock is read by those who set them.

use crate::front::openai::render::Timings;
use crate::obs::metrics::Stages;
use crate::sched::request::Stamps;
use crate::wire::message::Transport;
use std::time::{Duration, Instant};

/// What is known of one choice's stages.
#[derive(Clone, Copy, Default, Debug)]
pub struct ChoiceTimes {
    /// Of a prefill leg in this process.
    pub prefill: Option<Stamps>,
    /// Of the leg whose tokens are the answer.
    pub decode: Option<Stamps>,
    /// When the answer was whole.
    pub ended: Option<Instant>,
    /// Tokens of the answer that other workers had generated before this one went on.
    pub resumed: u32,
}

/// The share of a prefill worker of another process, in its own words.
#[derive(Clone, Copy, Debug)]
struct Elsewhere {
    queue: Duration,
    prefill: Duration,
}

impl ChoiceTimes {
    /// What was done elsewhere for a choice whose prompt was not read in this process.
    fn elsewhere(&self) -> Option<Elsewhere> {
        let told = self.decode.filter(|_| self.prefill.is_none())?.prefill_us;
        let micros = |us: u32| Duration::from_micros(us.into());
        told.map(|(queue, prefill)| Elsewhere { queue: micros(queue), prefill: micros(prefill) })
    }

    /// The stages of the time to first token, without gap; none before the first token.
    pub fn stages(&self) -> Option<Stages> {
        let decode = self.decode?;
        let reader = self.prefill.unwrap_or(decode);
        let mut last = reader.arrived;
        // A stamp that was not set, or came before the one before it, is a stage of no time.
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
        // Of the wait for KV from elsewhere, prefill is what that worker says; the rest is the hand-over.
        let prefill = match (elsewhere, reader.admitted.zip(reader.filled)) {
            (Some(Elsewhere { prefill, .. }), Some((from, to))) => {
                stage(Some((from + prefill).min(to)))
            }
            (Some(_), None) => Duration::ZERO,
            (None, _) => stage(reader.filled),
        };
        let handover = stage(decode.filled);
        let join = stage(decode.joined);
        let first_step = stage(Some(decode.first_token?));
        Some(Stages { queue, bootstrap, prefill, handover, join, first_step })
    }

    /// Tokens that prefill had, and did not compute.
    pub fn cached(&self) -> u32 {
        self.decode.or(self.prefill).map_or(0, |at| at.cached)
    }

    /// Whether another worker, here or elsewhere, read the prompt.
    pub fn were_handed_over(&self) -> bool {
        self.prefill.is_some() || self.elsewhere().is_some_and(|told| !told.prefill.is_zero())
    }

    /// What the answer says of them: tokens that prefill was given and generated ones, those of earlier workers among both,
    /// and for a hand-off the bytes and the transport. All that is told is of these workers: what time others took for
    /// tokens of theirs went with them.
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
        // The first one is sampled where the prompt was read.
        let decode_tokens = generated.saturating_sub(self.resumed + 1);
        let decode_ms = ms(decode.and_then(|at| at.first_token), self.ended).unwrap_or(0.0);
        let join_ms = ms(decode.and_then(|at| at.filled), decode.and_then(|at| at.joined));
        if let Some(Elsewhere { queue, prefill }) = self.elsewhere() {
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

/// To the microsecond: what is below nobody's clocks agree on.
fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
