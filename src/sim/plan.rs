//! What a seed decides before anything happens: how large workers are, how fast, and what they are asked.

use super::agenda::{MICRO, MILLI, Nanos, SECOND};
use super::dice::Dice;
use super::faults::Faults;
use super::machines::Machines;
use super::model::VOCAB;
use crate::cluster::router::Role;
use crate::config::flags::{SimFlow, SimTransfer};
use crate::config::resolved::{DecodeAllocation, Flow, Policy};
use crate::limits::{KEPT_KV_LIFE, RESERVED_TOKENS, RETRIES_DEFAULT};
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
    /// Requests, those that try at the end whether all is well again not counted.
    pub requests: u32,
    /// Whether things go wrong.
    pub faults: bool,
    /// How KV moves: by shm, rdma or tcp, or as the seed has it.
    pub transfer: SimTransfer,
    /// In which order the workers of a pair are asked, or as the seed has it.
    pub flow: SimFlow,
}

/// One worker.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Bounds of its engine's turns.
    pub config: SchedConfig,
    /// Pages of its pool.
    pub pages: u32,
    /// Pages of its host tier.
    pub tier_pages: u32,
    /// When decode workers take pages for what it reads.
    pub decode_allocation: DecodeAllocation,
    /// Requests it can hold.
    pub slots: usize,
    /// Room in its engine's ring of commands.
    pub commands: usize,
    /// Turns without work that its mover takes before it parks.
    pub spins: u32,
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
    /// Where workers are.
    pub machines: Machines,
    /// By decode worker of the start: it reads prompts where no prefill worker is left.
    pub reads_alone: Vec<bool>,
    /// How pairs are chosen.
    pub policy: Policy,
    /// In which order the two are asked.
    pub flow: Flow,
    /// Between two requests, at most.
    pub gap: Nanos,
    /// How long a message takes, at least and as a rule at most.
    pub delay: (Nanos, Nanos),
    /// How late a thread is, as a rule at most.
    pub lateness: Nanos,
    /// How long a request may take,
    pub patience: Nanos,
    /// and some of them.
    pub haste: Nanos,
    /// How often it is tried again.
    pub retries: u32,
    /// What is done to it.
    pub faults: Option<Faults>,
}

impl Plan {
    /// Of a seed.
    pub fn new(seed: u64, scale: Scale) -> Plan {
        let mut dice = Dice::new(seed).fork("plan");
        let prefix_cache = !dice.one_in(4);
        let mut scarce = Dice::new(seed).fork("retraction");
        let shared = SchedConfig {
            max_running: dice.number(2, 8) as usize,
            // Those who find no slot are enough.
            max_queued: usize::MAX,
            max_prefill_tokens: 256,
            chunked_prefill_size: dice.number(8, 160),
            chunk_ms: dice.pick(&[0, 0, 1, 20]),
            page_size: dice.pick(&[2, 4, 8, 16]),
            context: PROMPT_MAX + ANSWER_MAX,
            vocab: VOCAB,
            reserve: scarce.pick(&[0, 4, RESERVED_TOKENS]),
            prefix_cache,
        };
        // Workers of two page sizes hand over to each other, too.
        let other = if dice.one_in(3) { dice.pick(&[2, 4, 8, 16]) } else { shared.page_size };
        let is_late = Dice::new(seed).fork("allocation").one_in(3);
        let decode_allocation =
            if is_late { DecodeAllocation::Late } else { DecodeAllocation::Early };
        let mut faulty = Dice::new(seed).fork("faults");
        let delay = dice.pick(&[20 * MICRO, 100 * MICRO, 2 * MILLI]);
        let gap = dice.pick(&[100 * MICRO, MILLI, 5 * MILLI]);
        // Where things go wrong for seconds, requests come for seconds.
        let gap = if scale.faults { gap * faulty.pick(&[1, 20, 100]) } else { gap };
        let (prefill, decode) = (scale.prefill as usize, scale.decode as usize);
        let mut dice_of_nics = Dice::new(seed).fork("machines");
        let mut streams = Dice::new(seed).fork("streams");
        let machines =
            Machines::draw([&mut dice_of_nics, &mut streams], prefill + decode, scale.transfer);
        let faults = scale.faults.then(|| {
            let span = gap * u64::from(scale.requests) / 2;
            let mut faults = Faults::draw(&mut faulty, prefill, decode, span);
            if machines.nics.is_some() {
                faults.draw_of_nics(&mut dice_of_nics, prefill, decode, span);
            }
            if machines.streams.is_some() {
                faults.draw_of_streams(&mut streams, prefill, decode, span);
            }
            faults
        });
        let mut lone = Dice::new(seed).fork("alone");
        let most = lone.pick(&[0, 1, 2]);
        let reads_alone: Vec<bool> = (0..decode).map(|_| lone.within(1, 2) <= most).collect();
        let faults = faults.map(|faults| {
            let span = gap * u64::from(scale.requests) / 2;
            further(faults, seed, (&mut lone, reads_alone.contains(&true)), [prefill, decode], span)
        });
        let mut order = Dice::new(seed).fork("flow");
        let drawn = order.pick(&[Flow::Dual, Flow::Dual, Flow::PrefillFirst, Flow::DecodeFirst]);
        Plan {
            seed,
            scale,
            machines,
            reads_alone,
            prefill: Size {
                decode_allocation,
                ..size(shared, scale, &mut [&mut dice, &mut faulty, &mut scarce])
            },
            decode: size(
                SchedConfig { page_size: other, ..shared },
                scale,
                &mut [&mut dice, &mut faulty, &mut scarce],
            ),
            policy: dice.pick(&[Policy::LeastLoaded, Policy::RoundRobin]),
            flow: scale.flow.pinned().unwrap_or(drawn),
            gap,
            delay: (delay / 4, delay),
            lateness: dice.pick(&[10 * MICRO, 100 * MICRO, MILLI]),
            patience: if scale.faults { 40 * SECOND } else { 300 * SECOND },
            haste: if scale.faults {
                faulty.pick(&[500 * MILLI, 5 * SECOND, 40 * SECOND])
            } else {
                300 * SECOND
            },
            // What a retry makes good would else be seen by nobody.
            retries: faulty.pick(&[0, RETRIES_DEFAULT]),
            faults,
        }
    }

    /// Whether workers have places for all requests.
    pub fn is_ample(&self) -> bool {
        let places = |size: &Size| {
            size.slots > self.scale.requests as usize && size.commands > 4 * size.slots
        };
        places(&self.prefill) && places(&self.decode)
    }

    /// What a worker is when its process is started.
    pub fn role(&self, worker: usize) -> Role {
        if worker < self.scale.prefill as usize { Role::Prefill } else { Role::Decode }
    }

    /// How large a worker of this role is.
    pub fn size(&self, role: Role) -> Size {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
        }
    }

    /// Whether a worker, as a decode worker, reads prompts where no prefill worker is left.
    pub fn reads_alone(&self, worker: usize) -> bool {
        let decode = worker.checked_sub(self.scale.prefill as usize);
        decode.is_some_and(|decode| self.reads_alone[decode])
    }

    /// Whether workers change their roles.
    pub fn turns(&self) -> bool {
        self.faults.as_ref().is_some_and(Faults::have_turns)
    }

    /// How long KV may take up room for nobody: kept for a decode worker that was never asked for it.
    pub fn unclaimed(&self) -> Nanos {
        match self.flow {
            // Whoever should be told that it need not keep it may not be reached, or not know where it is; it may have to be
            // computed before.
            Flow::PrefillFirst if !self.is_calm() => KEPT_KV_LIFE.as_nanos() as Nanos + 5 * SECOND,
            Flow::Dual | Flow::PrefillFirst | Flow::DecodeFirst => 0,
        }
    }

    /// Whether nothing is done to the cluster that could make a request fail.
    pub fn is_calm(&self) -> bool {
        self.faults.is_none()
    }
}

/// Draws what else goes wrong, each kind by dice of its own.
fn further(
    mut faults: Faults,
    seed: u64,
    (lone, reads_alone): (&mut Dice, bool),
    [prefill, decode]: [usize; 2],
    span: Nanos,
) -> Faults {
    if reads_alone && lone.one_in(2) {
        faults.take_prefill_away(lone, prefill, span);
    }
    let mut leaving = Dice::new(seed).fork("leaving");
    if leaving.one_in(2) {
        faults.slow_the_leaving(&mut leaving);
    }
    let mut turning = Dice::new(seed).fork("turning");
    if turning.one_in(3) {
        faults.draw_turns(&mut turning, prefill, decode, span);
    }
    faults
}

fn size(config: SchedConfig, scale: Scale, [dice, faulty, scarce]: &mut [&mut Dice; 3]) -> Size {
    let longest = (PROMPT_MAX + ANSWER_MAX).div_ceil(config.page_size) + 1;
    // From hardly one long request to more than can be used.
    let pages = longest * dice.number(2, 12) / 2;
    let most = scale.requests as usize + 1;
    // Where some may be refused, also few places and a ring that is full now and then.
    let slots = if scale.faults { faulty.pick(&[3, 8, most]) } else { most };
    let commands = if scale.faults { faulty.pick(&[2, 8, slots * 4 + 64]) } else { slots * 4 + 64 };
    let tier_pages = longest * scarce.pick(&[0, 1, 8]);
    Size {
        config,
        pages,
        tier_pages,
        decode_allocation: DecodeAllocation::Early,
        slots,
        commands,
        spins: dice.pick(&[1, 3]),
        token: dice.within(MICRO, 20 * MICRO),
    }
}
