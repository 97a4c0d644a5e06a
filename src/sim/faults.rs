//! The faults of a seed: which happen, when, and how long their effects last.

use super::operator::PATIENCE;
use crate::ids::Role;
use crate::limits::KEPT_KV_LIFE;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use std::ops::Range;

/// The router knows all workers after this time.
pub const START: Nanos = 5 * SECOND;
/// After this time, a worker that has started again serves again.
const RETURNED: Nanos = 10 * SECOND;
/// After this time, a lost connection or session is replaced.
const RECONNECTED: Nanos = 4 * SECOND;
/// After this time, workers with lost entries have entered themselves again.
const REENTERED: Nanos = 10 * SECOND;
/// After this time, a worker that was drained has ended and serves again. If a client leaves as the
/// drain begins, its kept KV can hold the drain for its life.
const DRAINED: Nanos = RETURNED + KEPT_KV_LIFE.as_nanos() as Nanos;
/// After this time, an ordered role change has ended: the worker finishes its requests, and KV that
/// it keeps for decode.
pub const CHANGED: Nanos = PATIENCE.as_nanos() as Nanos + DRAINED;
/// Some role changes of gentle weather last so long, so that the router must use the new role.
const ROLE_TIME: Nanos = 25 * SECOND;
/// All prefill workers of some runs are dead for this time.
const OUTAGE: Nanos = 30 * SECOND;
/// Requests that meet a fault are sent at most this long before or after it.
pub const WINDOW: Nanos = 30 * MILLI;
/// Time until the next process after a death that was aimed.
const AIMED_DEATH: Nanos = 200 * MILLI;
/// How long a fault that was aimed silences a process: longer than any wait that is allowed.
pub const AIMED_SILENCE: Nanos = 60 * SECOND;
/// Most faults of etcd in a run.
const ETCD_FAULTS_MAX: u64 = 4;
/// Fewest faults of a run with faults.
const FAULTS_MIN: usize = 3;

/// Which faults happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weather {
    /// Drains and role changes, one at a time. Each role has another worker, so all requests must
    /// succeed.
    Gentle,
    /// Connections and sessions of a single pair of workers break for a short time. Requests that
    /// meet no such time must succeed.
    Flaky,
    /// Faults of one prefill worker and of one decode worker. A pair of others is always well, so
    /// all requests must succeed.
    Narrow,
    /// Faults of all processes and connections.
    Storm,
}

impl Weather {
    /// The weather of a seed. In some weather, each role needs another worker.
    pub fn draw(mut dice: Rng, workers: [Option<usize>; 2]) -> Weather {
        match workers.iter().flatten().any(|&count| count < 2) {
            true => dice.pick(&[Weather::Flaky, Weather::Storm]),
            false => dice.pick(&[Weather::Gentle, Weather::Flaky, Weather::Narrow, Weather::Storm]),
        }
    }
}

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A random connection is reset.
    Reset,
    /// The NIC breaks a queue pair that waits for an answer.
    NicError,
    /// Writes of NICs to a host land only after this time.
    Hold {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// The process of a host gets SIGTERM, ends after its requests, and starts again after
    /// this time.
    Drain {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
    /// The process of a host takes no turn for this time, as after SIGSTOP.
    Stall {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// The engine of a worker takes no step for this time. Its other threads work.
    Hang {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// Nothing passes between a host and all others for this time. The kernels send the data again
    /// after the cut.
    Cut {
        /// The host.
        host: usize,
        /// The time.
        pause: Nanos,
    },
    /// Nothing passes between a prefill and a decode host for this time.
    Part {
        /// The hosts.
        hosts: (usize, usize),
        /// The time.
        pause: Nanos,
    },
    /// All connections between a prefill and a decode host are reset, and new ones are refused for
    /// this time.
    Break {
        /// The hosts.
        hosts: (usize, usize),
        /// The time.
        pause: Nanos,
    },
    /// The name server fails all look-ups, or does not answer, for this time.
    Names {
        /// Whether it does not answer.
        is_silent: bool,
        /// The time.
        pause: Nanos,
    },
    /// etcd forgets its old changes.
    Compact {
        /// Whether all watches are behind, so that it cancels them.
        cancels: bool,
    },
    /// A lease of etcd ends before its time.
    EndLease,
    /// All members of etcd start again, without any key.
    EmptyEtcd,
    /// The operator orders this role for a worker, and its first role again after this time.
    Role {
        /// The host.
        host: usize,
        /// The role.
        role: Role,
        /// Time until the order of the first role.
        pause: Nanos,
    },
    /// The process of a host dies. A new one starts after this time.
    Death {
        /// The host.
        host: usize,
        /// Time until the new process.
        pause: Nanos,
    },
}

impl Fault {
    /// Whether it meets this host.
    pub fn meets(self, other: usize) -> bool {
        match self {
            Fault::Reset | Fault::NicError | Fault::EndLease | Fault::EmptyEtcd => true,
            Fault::Names { .. } => true,
            Fault::Compact { .. } => false,
            Fault::Part { hosts: (one, two), .. } | Fault::Break { hosts: (one, two), .. } => {
                one == other || two == other
            }
            Fault::Hold { host, .. }
            | Fault::Drain { host, .. }
            | Fault::Stall { host, .. }
            | Fault::Cut { host, .. }
            | Fault::Hang { host, .. }
            | Fault::Role { host, .. }
            | Fault::Death { host, .. } => host == other,
        }
    }

    /// Time from the fault until its effects are over.
    pub fn effect(self) -> Nanos {
        match self {
            Fault::Reset | Fault::NicError => RECONNECTED,
            Fault::Compact { .. } => 0,
            Fault::EndLease | Fault::EmptyEtcd => REENTERED,
            Fault::Role { pause, .. } => pause + CHANGED + RETURNED,
            Fault::Drain { pause, .. } => pause + DRAINED + RETURNED,
            Fault::Hold { pause, .. } | Fault::Part { pause, .. } | Fault::Break { pause, .. } => {
                pause + RECONNECTED
            }
            Fault::Death { pause, .. }
            | Fault::Names { pause, .. }
            | Fault::Stall { pause, .. }
            | Fault::Hang { pause, .. }
            | Fault::Cut { pause, .. } => pause + RETURNED,
        }
    }
}

/// The hosts that faults can meet: host 0 is the router, then come prefill and decode workers.
#[derive(Debug)]
pub struct FaultScope<'a> {
    /// Number of prefill workers.
    pub prefill: usize,
    /// Number of workers.
    pub workers: usize,
    /// The hosts of the members of etcd.
    pub etcd: Range<usize>,
    /// Whether a host has a NIC.
    pub has_nics: bool,
    /// Whether hosts are named.
    pub has_names: bool,
    /// Only these hosts have faults, except in gentle weather.
    pub victims: &'a [usize],
}

impl FaultScope<'_> {
    fn victims_of(&self, role: Role) -> Vec<usize> {
        let hosts = match role {
            Role::Prefill => 1..=self.prefill,
            _ => self.prefill + 1..=self.workers,
        };
        self.victims.iter().copied().filter(|victim| hosts.contains(victim)).collect()
    }

    /// A fault of narrow weather or a storm.
    fn draw(&self, chaos: &mut Rng, weather: Weather, changes_roles: bool) -> Fault {
        let is_storm = weather == Weather::Storm;
        let any = chaos.pick(self.victims);
        let worker = chaos.pick(self.victims).max(1);
        let pause = chaos.range_u64(10 * MILLI, 3 * SECOND);
        let silence_max = chaos.pick(&[SECOND, 10 * SECOND, 40 * SECOND]);
        let silence = chaos.range_u64(MILLI, silence_max);
        let role = chaos.pick(&Role::ALL);
        match chaos.range_u64(0, if self.has_nics { 10 } else { 8 }) {
            0 | 1 => Fault::Death { host: any, pause },
            2 => Fault::Drain { host: any, pause },
            3 if changes_roles => Fault::Role { host: worker, role, pause },
            4 => Fault::Stall { host: any, pause: silence },
            5 => Fault::Cut { host: any, pause: silence },
            6 | 7 if is_storm => Fault::Reset,
            8 => Fault::Part { hosts: self.draw_pair(chaos), pause: silence },
            9 if is_storm => Fault::NicError,
            // No probe sees a NIC that is slow, so in narrow weather it is slow for a short time.
            10 => Fault::Hold { host: worker, pause: if is_storm { silence } else { pause } },
            _ => Fault::Drain { host: worker, pause },
        }
    }

    /// A fault of flaky weather.
    fn draw_of_sessions(&self, chaos: &mut Rng) -> Fault {
        let pause = chaos.range_u64(10 * MILLI, SECOND);
        match chaos.range_u64(0, if self.has_nics { 6 } else { 3 }) {
            0 | 1 => Fault::Reset,
            2 => Fault::Break { hosts: self.draw_pair(chaos), pause },
            3 => Fault::Part { hosts: self.draw_pair(chaos), pause },
            4 => Fault::Hold { host: chaos.pick(&self.victims_of(Role::Decode)), pause },
            _ => Fault::NicError,
        }
    }

    /// A fault of etcd. Only in a storm can it cost a worker its entry.
    fn draw_of_etcd(&self, dice: &mut Rng, weather: Weather) -> Fault {
        let host = dice.range_u64(self.etcd.start as u64, self.etcd.end as u64 - 1) as usize;
        // Entries outlive the first member if there is another one.
        let is_spare = host == self.etcd.start && self.etcd.len() > 1;
        let longest = if is_spare { 40 * SECOND } else { 8 * SECOND };
        let pause = dice.range_u64(10 * MILLI, longest);
        match dice.range_u64(0, if weather == Weather::Storm { 4 } else { 2 }) {
            0 => Fault::Compact { cancels: dice.one_in(2) },
            1 => Fault::Death { host, pause },
            2 => Fault::Cut { host, pause },
            3 => Fault::EndLease,
            _ => Fault::EmptyEtcd,
        }
    }

    fn draw_pair(&self, chaos: &mut Rng) -> (usize, usize) {
        let [source, destination] = [Role::Prefill, Role::Decode].map(|role| self.victims_of(role));
        (chaos.pick(&source), chaos.pick(&destination))
    }
}

/// Faults that meet a host at the same time, while KV is in transfer to it.
pub fn draw_aimed(dice: &mut Rng, host: usize) -> Vec<Fault> {
    let pause = AIMED_SILENCE;
    match dice.range_u64(0, 3) {
        0 => vec![Fault::Death { host, pause: AIMED_DEATH }],
        1 => vec![Fault::Stall { host, pause }],
        2 => vec![Fault::Hang { host, pause }],
        // A worker that hangs must give its role change up.
        _ => vec![
            Fault::Hang { host, pause },
            Fault::Role { host, role: Role::Prefill, pause: ROLE_TIME },
        ],
    }
}

/// The faults until `end`.
pub fn draw_faults(
    mut chaos: Rng,
    end: Nanos,
    scope: &FaultScope<'_>,
    weather: Weather,
) -> Vec<(Nanos, Fault)> {
    let (mut at, mut faults) = (START, Vec::new());
    let lull = chaos.pick(&[50 * MILLI, 500 * MILLI, 3 * SECOND]);
    let changes_roles = chaos.one_in(2);
    while at < end || faults.len() < FAULTS_MIN {
        at += match weather {
            Weather::Gentle => chaos.range_u64(ROLE_TIME + CHANGED, 2 * (ROLE_TIME + CHANGED)),
            Weather::Flaky => chaos.range_u64(SECOND, 3 * RECONNECTED),
            Weather::Narrow | Weather::Storm => chaos.range_u64(MILLI, lull),
        };
        let fault = match weather {
            Weather::Gentle => {
                let host = chaos.range_u64(1, scope.workers as u64) as usize;
                let pause = chaos.range_u64(10 * MILLI, 3 * SECOND);
                match changes_roles && !chaos.one_in(3) {
                    true => {
                        let (role, pause) =
                            (chaos.pick(&Role::ALL), chaos.pick(&[pause, ROLE_TIME]));
                        Fault::Role { host, role, pause }
                    }
                    false => Fault::Drain { host, pause },
                }
            }
            Weather::Flaky => scope.draw_of_sessions(&mut chaos),
            Weather::Narrow | Weather::Storm => scope.draw(&mut chaos, weather, changes_roles),
        };
        faults.push((at, fault));
    }
    // A worker that dies in its second role starts again in its first one.
    let mut deaths = chaos.fork("deaths in a second role");
    if matches!(weather, Weather::Narrow | Weather::Storm) && changes_roles && deaths.one_in(2) {
        let host = deaths.pick(scope.victims).max(1);
        let role = if host <= scope.prefill { Role::Decode } else { Role::Prefill };
        let begun = deaths.range_u64(START, at);
        let death = begun + deaths.range_u64(SECOND, ROLE_TIME);
        faults.push((begun, Fault::Role { host, role, pause: ROLE_TIME }));
        faults.push((death, Fault::Death { host, pause: AIMED_DEATH }));
    }
    let mut of_etcd = chaos.fork("etcd");
    let count = if scope.etcd.is_empty() { 0 } else { of_etcd.range_u64(0, ETCD_FAULTS_MAX) };
    for _ in 0..count {
        let begun = of_etcd.range_u64(START, at);
        faults.push((begun, scope.draw_of_etcd(&mut of_etcd, weather)));
    }
    let mut of_names = chaos.fork("names");
    if scope.has_names && of_names.one_in(2) {
        let longest = if weather == Weather::Storm { AIMED_SILENCE / 2 } else { SECOND };
        let (begun, is_silent) = (of_names.range_u64(START, at), of_names.one_in(2));
        let pause = of_names.range_u64(10 * MILLI, longest);
        faults.push((begun, Fault::Names { is_silent, pause }));
    }
    // Decode workers compute prompts while all prefill workers are dead.
    let sources = scope.victims_of(Role::Prefill);
    if weather == Weather::Narrow && sources.len() == scope.prefill && chaos.one_in(2) {
        let deaths = sources.into_iter().map(|host| {
            (at + chaos.range_u64(0, 2 * WINDOW), Fault::Death { host, pause: OUTAGE })
        });
        faults.extend(deaths);
    }
    faults
}
