//! The plan of a seed: size and speed of the workers, their faults and their requests.

use super::faults::FaultPlan;
use super::machines::Machines;
use super::model::VOCAB;
use crate::cli::flags::{SimFlow, SimTransfer};
use crate::config::{Flow, Policy};
use crate::ids::{DecodeAllocation, Leg};
use crate::limits::{KEPT_KV_LIFE, RESERVED_TOKENS, RETRIES_DEFAULT};
use crate::sched::config::SchedConfig;
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;

/// Longest prompt, in tokens.
pub const PROMPT_MAX: u32 = 127;
/// Longest answer, in tokens.
pub const ANSWER_MAX: u32 = 31;

/// The size of a run, from the flags or from the replay command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scale {
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
    /// Requests, without the trial requests at the end.
    pub requests: u32,
    /// Whether faults are injected.
    pub faults: bool,
    /// Transport of KV: shm, rdma or tcp, or chosen by the seed.
    pub transfer: SimTransfer,
    /// The order in which the workers of a pair get a request, or chosen by the seed.
    pub flow: SimFlow,
}

/// The size of one worker.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Limits of its engine's turns.
    pub config: SchedConfig,
    /// Pages of its pool.
    pub pages: u32,
    /// Pages of its host tier.
    pub tier_pages: u32,
    /// Time at which decode workers allocate pages for a prompt of this worker.
    pub decode_allocation: DecodeAllocation,
    /// Requests that it can hold.
    pub slots: usize,
    /// Capacity of its engine's command ring.
    pub commands: usize,
    /// Idle turns that its mover takes before it parks.
    pub spins: u32,
    /// The model's time for one token.
    pub token: Nanos,
}

/// All values that a seed determines before the run. Values during the run are drawn from forks of
/// the same generator.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The size of the run.
    pub scale: Scale,
    /// Each prefill worker.
    pub prefill: Size,
    /// Each decode worker.
    pub decode: Size,
    /// The machines of the workers.
    pub machines: Machines,
    /// By decode worker at the start: whether it computes prompts if no prefill worker is left.
    pub local_prefill: Vec<bool>,
    /// The policy that chooses pairs.
    pub policy: Policy,
    /// The order in which the two workers get a request.
    pub flow: Flow,
    /// Longest time between two requests.
    pub gap: Nanos,
    /// Delay of a message: the minimum and the usual maximum.
    pub delay: (Nanos, Nanos),
    /// Delay of a thread: the usual maximum.
    pub lateness: Nanos,
    /// Time limit of a request,
    pub patience: Nanos,
    /// and the shorter limit of some requests.
    pub haste: Nanos,
    /// Maximum number of retries of a request.
    pub retries: u32,
    /// The injected faults.
    pub faults: Option<FaultPlan>,
}

impl Plan {
    /// The plan of a seed.
    pub fn new(seed: u64, scale: Scale) -> Plan {
        let mut dice = Rng::new(seed).fork("plan");
        let prefix_cache = !dice.one_in(4);
        let mut scarce = Rng::new(seed).fork("retraction");
        let shared = draw_sched(&mut dice, &mut scarce, prefix_cache);
        // Workers with different page sizes also hand over to each other.
        let other = if dice.one_in(3) { dice.pick(&[2, 4, 8, 16]) } else { shared.page_size };
        let is_late = Rng::new(seed).fork("allocation").one_in(3);
        let decode_allocation =
            if is_late { DecodeAllocation::Late } else { DecodeAllocation::Early };
        let mut faulty = Rng::new(seed).fork("faults");
        let delay = dice.pick(&[20 * MICRO, 100 * MICRO, 2 * MILLI]);
        let gap = dice.pick(&[100 * MICRO, MILLI, 5 * MILLI]);
        // Faults last for seconds, so requests must arrive for seconds.
        let gap = if scale.faults { gap * faulty.pick(&[1, 20, 100]) } else { gap };
        let (prefill, decode) = (scale.prefill as usize, scale.decode as usize);
        let mut dice_of_nics = Rng::new(seed).fork("machines");
        let mut streams = Rng::new(seed).fork("streams");
        let machines =
            Machines::draw([&mut dice_of_nics, &mut streams], prefill + decode, scale.transfer);
        let span = gap * u64::from(scale.requests) / 2;
        let faults = scale.faults.then(|| {
            let mut faults = FaultPlan::draw(&mut faulty, prefill, decode, span);
            if machines.nics.is_some() {
                faults.draw_of_nics(&mut dice_of_nics, prefill, decode, span);
            }
            if machines.streams.is_some() {
                faults.draw_of_streams(&mut streams, prefill, decode, span);
            }
            faults
        });
        let mut lone = Rng::new(seed).fork("alone");
        let most = lone.pick(&[0, 1, 2]);
        let local_prefill: Vec<bool> = (0..decode).map(|_| lone.range_u64(1, 2) <= most).collect();
        let faults = faults.map(|faults| {
            let lone = (&mut lone, local_prefill.contains(&true));
            further(faults, seed, lone, [prefill, decode], span)
        });
        let mut order = Rng::new(seed).fork("flow");
        let drawn = order.pick(&[Flow::Dual, Flow::Dual, Flow::PrefillFirst, Flow::DecodeFirst]);
        Plan {
            seed,
            scale,
            machines,
            local_prefill,
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
            // Some seeds have no retries, because a retry can hide a failure.
            retries: faulty.pick(&[0, RETRIES_DEFAULT]),
            faults,
        }
    }

    /// Whether workers have slots for all requests.
    pub fn is_ample(&self) -> bool {
        let places = |size: &Size| {
            size.slots > self.scale.requests as usize && size.commands > 4 * size.slots
        };
        places(&self.prefill) && places(&self.decode)
    }

    /// The role of a worker when its process is started.
    pub fn role(&self, worker: usize) -> Leg {
        if worker < self.scale.prefill as usize { Leg::Prefill } else { Leg::Decode }
    }

    /// The size of a worker of this role.
    pub fn size(&self, role: Leg) -> Size {
        match role {
            Leg::Prefill => self.prefill,
            Leg::Decode => self.decode,
        }
    }

    /// Whether a worker in the decode role computes prompts if no prefill worker is left.
    pub fn local_prefill(&self, worker: usize) -> bool {
        let decode = worker.checked_sub(self.scale.prefill as usize);
        decode.is_some_and(|decode| self.local_prefill[decode])
    }

    /// Whether workers change their roles.
    pub fn turns(&self) -> bool {
        self.faults.as_ref().is_some_and(FaultPlan::have_turns)
    }

    /// Longest time for which unclaimed KV can hold a slot: it is kept for a decode worker that
    /// never asks for it.
    pub fn unclaimed(&self) -> Nanos {
        match self.flow {
            // The router can be unable to reach the worker to release the kept KV, or not know the
            // worker. The KV can also have to be computed first.
            Flow::PrefillFirst if !self.is_calm() => KEPT_KV_LIFE.as_nanos() as Nanos + 5 * SECOND,
            Flow::Dual | Flow::PrefillFirst | Flow::DecodeFirst => 0,
        }
    }

    /// Whether the plan has no fault that can make a request fail.
    pub fn is_calm(&self) -> bool {
        self.faults.is_none()
    }
}

/// Draws the settings that all schedulers share.
fn draw_sched(dice: &mut Rng, scarce: &mut Rng, prefix_cache: bool) -> SchedConfig {
    SchedConfig {
        max_running: dice.range_u32(2, 8) as usize,
        // The limit on slots is enough.
        max_queued: usize::MAX,
        max_prefill_tokens: 256,
        chunked_prefill_size: dice.range_u32(8, 160),
        chunk_ms: dice.pick(&[0, 0, 1, 20]),
        page_size: dice.pick(&[2, 4, 8, 16]),
        context: PROMPT_MAX + ANSWER_MAX,
        vocab: VOCAB,
        reserve: scarce.pick(&[0, 4, RESERVED_TOKENS]),
        prefix_cache,
    }
}

/// Draws the other faults. Each kind has its own fork of the generator.
fn further(
    mut faults: FaultPlan,
    seed: u64,
    (lone, local_prefill): (&mut Rng, bool),
    [prefill, decode]: [usize; 2],
    span: Nanos,
) -> FaultPlan {
    if local_prefill && lone.one_in(2) {
        faults.take_prefill_away(lone, prefill, span);
    }
    let mut leaving = Rng::new(seed).fork("leaving");
    if leaving.one_in(2) {
        faults.slow_the_leaving(&mut leaving);
    }
    let mut turning = Rng::new(seed).fork("turning");
    if turning.one_in(3) {
        faults.draw_turns(&mut turning, prefill, decode, span);
    }
    faults
}

fn size(config: SchedConfig, scale: Scale, [dice, faulty, scarce]: &mut [&mut Rng; 3]) -> Size {
    let longest = (PROMPT_MAX + ANSWER_MAX).div_ceil(config.page_size) + 1;
    // The range is from hardly enough for one long request to more than can be used.
    let pages = longest * dice.range_u32(2, 12) / 2;
    let most = scale.requests as usize + 1;
    // If requests can be refused, there can be few slots, and a command ring that is sometimes
    // full.
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
        token: dice.range_u64(MICRO, 20 * MICRO),
    }
}
