//! The plan of a seed: the agents, the attempts, what their engines do wrong, and the faults.

use super::memory::{EngineMemory, SimPrompt};
use crate::cli::flags::SimTransfer;
use crate::ids::{Role, Room};
use crate::kv::layout::KvLayout;
use crate::link::handoff::room_of;
use crate::sim::RunScale;
use crate::sim::faults::Fault;
use crate::stdx::event_queue::{MICRO, MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use crate::wire::message::Transport;

/// Most agents of a role, unless the command line says another number.
const AGENTS_MAX: u64 = 3;
/// Tokens of the longest prompt.
pub const PROMPT_MAX: u32 = 40;
/// The deadline of a request that is not meant to meet it.
pub const PATIENCE: Nanos = 20 * SECOND;
/// Most faults of a run.
const FAULTS_MAX: u64 = 8;
/// Longest pause of a fault.
pub const PAUSE_MAX: Nanos = 4 * SECOND;
/// The attempts of a run begin within so much time for each.
const SPACING: Nanos = 30 * MILLI;

/// An agent and its engine.
#[derive(Clone, Debug)]
pub struct AgentSite {
    /// Its role.
    pub role: Role,
    /// Processes of one machine can share memory.
    pub machine: u8,
    /// Where its KV lies.
    pub layout: KvLayout,
    /// Pages of its pool.
    pub pages: u32,
    /// Requests at a time.
    pub slots: usize,
    /// Its transports, in order of preference.
    pub transports: Vec<Transport>,
    /// Lanes of a session.
    pub lanes: u16,
    /// The longest usual time between two looks of its engine.
    pub lateness: Nanos,
}

impl AgentSite {
    /// Whether the host has a NIC.
    pub fn has_nic(&self) -> bool {
        self.transports.contains(&Transport::Rdma)
    }
}

/// What the engine of one end does with an attempt.
#[derive(Clone, Copy, Debug)]
pub struct EndPlan {
    /// When it begins; `None`: never.
    pub at: Option<Nanos>,
    /// The deadline of its request.
    pub within: Nanos,
    /// It cancels so long after it has begun.
    pub cancels_after: Option<Nanos>,
    /// It releases the slot only at the end of the run.
    pub forgets_release: bool,
}

/// How a destination leases its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeasePlan {
    /// As it should.
    Well,
    /// Never.
    Never,
    /// One page twice.
    Twice,
    /// The pages of another request that is open.
    OfAnother,
}

/// A hand-over, as a router would order it.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Its room.
    pub room: Room,
    /// The prompt.
    pub prompt: SimPrompt,
    /// Hosts of source and destination.
    pub hosts: [usize; 2],
    /// What source and destination do.
    pub ends: [EndPlan; 2],
    /// Tokens that the source computes at a time.
    pub chunk: u32,
    /// Time of a chunk.
    pub step: Nanos,
    /// Tokens of which the destination has the KV.
    pub prefix: u32,
    /// How the destination leases.
    pub lease: LeasePlan,
    /// The destination asks for another prompt than the source has.
    pub is_mismatch: bool,
}

impl Attempt {
    /// Whether nothing in the plan keeps it from landing.
    pub fn must_land(&self) -> bool {
        let is_well = |end: &EndPlan| {
            end.at.is_some() && end.within == PATIENCE && end.cancels_after.is_none()
        };
        self.ends.iter().all(is_well) && self.lease == LeasePlan::Well && !self.is_mismatch
    }
}

/// What happens in a run.
#[derive(Debug)]
pub struct LibraryPlan {
    /// The sources, then the destinations.
    pub sites: Vec<AgentSite>,
    /// The number of sources.
    pub sources: usize,
    /// The attempts.
    pub attempts: Vec<Attempt>,
    /// The faults, and their times.
    pub faults: Vec<(Nanos, Fault)>,
    /// No attempt begins later, and no fault lasts longer.
    pub end: Nanos,
    /// Whether a host has so few slots that requests can wait for each other.
    pub is_tight: bool,
}

impl LibraryPlan {
    /// The plan of a seed.
    pub fn new(dice: &Rng, scale: RunScale) -> LibraryPlan {
        let mut shape = dice.fork("shape");
        let [sources, destinations] =
            scale.workers.map(|count| count.unwrap_or(shape.range_u64(1, AGENTS_MAX) as usize));
        let is_tight = shape.one_in(4);
        let (sites, nics) = draw_sites(&mut shape, scale, [sources, destinations], is_tight);
        let mut each = dice.fork("attempts");
        let last = SPACING * scale.requests as u64;
        let draw = |_| draw_attempt(&mut each, sources, &sites, (scale.faults, last));
        let attempts: Vec<_> = (0..scale.requests).map(draw).collect();
        let faults = match scale.faults {
            true => draw_faults(&mut dice.fork("faults"), sites.len(), nics, last),
            false => Vec::new(),
        };
        LibraryPlan { sites, sources, attempts, faults, end: last + SECOND + PAUSE_MAX, is_tight }
    }

    /// One more attempt for each pair, which must land.
    pub fn last_attempts(&self, dice: &mut Rng, at: Nanos) -> Vec<Attempt> {
        let destinations = self.sites.len() - self.sources;
        let pairs = (0..self.sources * destinations)
            .map(|pair| [pair / destinations, self.sources + pair % destinations]);
        let end =
            EndPlan { at: Some(at), within: PATIENCE, cancels_after: None, forgets_release: false };
        let attempt = |hosts| Attempt {
            room: room_of(dice.next_u64()),
            prompt: SimPrompt { tokens: PROMPT_MAX, seed: dice.next_u64() },
            hosts,
            ends: [end; 2],
            chunk: PROMPT_MAX,
            step: MILLI,
            prefix: 0,
            lease: LeasePlan::Well,
            is_mismatch: false,
        };
        pairs.map(attempt).collect()
    }
}

/// The sites of all agents, and whether they have NICs.
fn draw_sites(
    shape: &mut Rng,
    scale: RunScale,
    [sources, destinations]: [usize; 2],
    is_tight: bool,
) -> (Vec<AgentSite>, bool) {
    let all = [Transport::Shm, Transport::Rdma, Transport::Tcp];
    let first = shape.range_u64(0, 2) as usize;
    let transports = match scale.transfer {
        SimTransfer::Auto => vec![all[first], Transport::Tcp],
        SimTransfer::Shm => vec![Transport::Shm],
        SimTransfer::Rdma => vec![Transport::Rdma],
        SimTransfer::Tcp => vec![Transport::Tcp],
    };
    let has_nics = transports[0] == Transport::Rdma;
    let machines = if transports == [Transport::Shm] { 1 } else { 2 };
    let lateness = shape.pick(&[100 * MICRO, MILLI, 20 * MILLI]);
    let slots = if is_tight { 3 } else { 24 };
    let site = |host: usize| {
        let role = if host < sources { Role::Prefill } else { Role::Decode };
        let page_size = shape.pick(&[2, 4, 8]);
        let pages = PROMPT_MAX.div_ceil(page_size) * slots as u32;
        let layout =
            EngineMemory::layout_of(page_size, if shape.one_in(2) { Some(pages) } else { None });
        AgentSite {
            role,
            machine: shape.range_u64(1, machines) as u8,
            layout,
            pages,
            slots,
            transports: transports.clone(),
            lanes: shape.pick(&[1, 2, 3]),
            lateness,
        }
    };
    ((0..sources + destinations).map(site).collect(), has_nics)
}

fn draw_attempt(
    dice: &mut Rng,
    sources: usize,
    sites: &[AgentSite],
    (has_faults, last): (bool, Nanos),
) -> Attempt {
    let source = dice.range_u64(0, sources as u64 - 1) as usize;
    let destination = dice.range_u64(sources as u64, sites.len() as u64 - 1) as usize;
    let at = dice.range_u64(0, last);
    let tokens = dice.range_u32(1, PROMPT_MAX);
    let mut end = || EndPlan {
        at: (!dice.one_in(20)).then(|| at + dice.range_u64(0, 20 * MILLI)),
        within: match dice.one_in(12) {
            true => dice.range_u64(MILLI, 2 * SECOND),
            false => PATIENCE,
        },
        cancels_after: dice.one_in(6).then(|| dice.range_u64(0, 40 * MILLI)),
        forgets_release: dice.one_in(10),
    };
    let mut ends = [end(), end()];
    // An end that never comes, or lets the other wait, does not do so without end.
    let is_alone = ends.iter().any(|end| end.at.is_none() || end.within < PATIENCE);
    let lease = match dice.range_u64(0, 19) {
        0 => LeasePlan::Never,
        1 => LeasePlan::Twice,
        2 | 3 => LeasePlan::OfAnother,
        _ => LeasePlan::Well,
    };
    if is_alone || lease == LeasePlan::Never || has_faults {
        for end in ends.iter_mut().filter(|end| end.within == PATIENCE) {
            end.within = dice.range_u64(SECOND, 4 * SECOND);
        }
    }
    let page = sites[destination].layout.page_size;
    let kept = dice.pick(&[0, 0, 0, 1, 2]) * page;
    Attempt {
        room: room_of(dice.next_u64()),
        prompt: SimPrompt { tokens, seed: dice.next_u64() },
        hosts: [source, destination],
        ends,
        chunk: dice.range_u32(1, PROMPT_MAX),
        step: dice.range_u64(0, 2 * MILLI),
        prefix: if kept < tokens { kept } else { 0 },
        lease,
        is_mismatch: dice.one_in(25),
    }
}

fn draw_faults(dice: &mut Rng, hosts: usize, has_nics: bool, last: Nanos) -> Vec<(Nanos, Fault)> {
    let count = dice.range_u64(1, FAULTS_MAX);
    let mut faults = Vec::new();
    for _ in 0..count {
        let (host, pause) =
            (dice.range_u64(0, hosts as u64 - 1) as usize, dice.range_u64(MILLI, PAUSE_MAX));
        let other = (host + dice.range_u64(1, hosts as u64 - 1) as usize) % hosts;
        let fault = match dice.range_u64(0, 8) {
            0 | 1 => Fault::Reset,
            2 if has_nics => Fault::NicError,
            3 if has_nics => Fault::Hold { host, pause },
            4 => Fault::Stall { host, pause },
            5 => Fault::Cut { host, pause },
            6 => Fault::Break { hosts: (host, other), pause },
            7 => Fault::Drain { host, pause },
            _ => Fault::Death { host, pause },
        };
        faults.push((dice.range_u64(0, last), fault));
    }
    faults
}
