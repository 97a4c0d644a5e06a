//! What a seed decides before anything happens: how large workers are, how fast, and what they are asked.

use super::agenda::{MICRO, MILLI, Nanos, SECOND};
use super::dice::Dice;
use super::model::VOCAB;
use crate::config::resolved::Policy;
use crate::sched::config::SchedConfig;

/// Longest prompt, in tokens.
pub const PROMPT_MAX: u32 = 127;
/// Longest answer, in tokens.
pub const ANSWER_MAX: u32 = 31;

/// What is simulated, by the seed or by whoever replays it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scale {
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
    /// Requests, probes of the end not counted.
    pub requests: u32,
}

/// One worker.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bounds of its engine's turns.
    pub config: SchedConfig,
    /// Pages of its pool.
    pub pages: u32,
    /// Requests it can hold.
    pub slots: usize,
    /// Room in its engine's ring of commands.
    pub commands: usize,
    /// How long the model takes for a token.
    pub token: Nanos,
}

/// Everything that a seed decides at once; what it decides on the way is drawn from forks of the same dice.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// How much of it.
    pub scale: Scale,
    /// Each prefill worker.
    pub prefill: Size,
    /// Each decode worker.
    pub decode: Size,
    /// How pairs are chosen.
    pub policy: Policy,
    /// Between two requests, at most.
    pub gap: Nanos,
    /// How long a message takes, at least and as a rule at most.
    pub delay: (Nanos, Nanos),
    /// How late a thread is, as a rule at most.
    pub lateness: Nanos,
    /// How long a request may take.
    pub patience: Nanos,
}

impl Plan {
    /// Of a seed.
    pub fn new(seed: u64, scale: Scale) -> Plan {
        let mut dice = Dice::new(seed).fork("plan");
        let prefix_cache = !dice.one_in(4);
        let shared = SchedConfig {
            max_running: dice.number(2, 8) as usize,
            max_prefill_tokens: 256,
            chunked_prefill_size: dice.number(8, 160),
            chunk_ms: dice.pick(&[0, 0, 1, 20]),
            page_size: dice.pick(&[2, 4, 8, 16]),
            context: PROMPT_MAX + ANSWER_MAX,
            vocab: VOCAB,
            prefix_cache,
        };
        // Workers of two page sizes hand over to each other, too.
        let other = if dice.one_in(3) { dice.pick(&[2, 4, 8, 16]) } else { shared.page_size };
        let prefill = size(shared, scale, &mut dice);
        let decode = size(SchedConfig { page_size: other, ..shared }, scale, &mut dice);
        let delay = dice.pick(&[20 * MICRO, 100 * MICRO, 2 * MILLI]);
        Plan {
            seed,
            scale,
            prefill,
            decode,
            policy: dice.pick(&[Policy::LeastLoaded, Policy::RoundRobin]),
            gap: dice.pick(&[100 * MICRO, MILLI, 5 * MILLI]),
            delay: (delay / 4, delay),
            lateness: dice.pick(&[10 * MICRO, 100 * MICRO, MILLI]),
            patience: 300 * SECOND,
        }
    }

    /// Whether nothing is done to the cluster that could make a request fail.
    pub fn is_calm(&self) -> bool {
        true
    }
}

fn size(config: SchedConfig, scale: Scale, dice: &mut Dice) -> Size {
    let longest = (PROMPT_MAX + ANSWER_MAX).div_ceil(config.page_size) + 1;
    // From hardly one long request to more than can be used.
    let pages = longest * dice.number(2, 12) / 2;
    let slots = scale.requests as usize + 1;
    Size { config, pages, slots, commands: slots * 4 + 64, token: dice.within(MICRO, 20 * MICRO) }
}
