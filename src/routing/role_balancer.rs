//! Decides when a worker changes its role, by the pressure on prefill and on decode workers.
//!
//! ```text
//!             one role is pressed, the other can spare a worker, for a window
//!  watching ───────────────────────────────────────────────────────────────────▶ resting
//!     ▲                       the dwell time has passed                             │
//!     └─────────────────────────────────────────────────────────────────────────────┘
//! ```
//! The pressure of a role is 1 if its workers are at their target. For prefill, it is the predicted
//! mean time to compute the waiting prompts. For decode, it is the larger of two shares: running
//! sequences, and prompt tokens in the pools. Prompts that prefill still computes do not count for
//! decode.
//! A role is *pressed* if its pressure is 1 or more. The other role *can spare* a worker if its
//! pressure without that worker stays below [`SPARE`]. Between the two thresholds nothing changes,
//! so that a change does not cause its reverse.
//! Pure. Not here: the request to the worker (`router::role_admin`).

pub use crate::config::BalanceConfig;
use crate::ids::Leg;
use crate::routing::load::WorkerNumber;
use std::time::{Duration, Instant};

/// Largest pressure of a role after it has given a worker away.
pub const SPARE: f64 = 0.6;

/// The present state of one worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WorkerSnapshot {
    /// Its number.
    pub worker: WorkerNumber,
    /// Its role.
    pub role: Leg,
    /// Whether it takes requests.
    pub usable: bool,
    /// Whether it is leaving, or was ordered to change its role.
    pub leaves: bool,
    /// Whether its role can change.
    pub can_change_role: bool,
    /// Its sequences, including those with a prompt that another worker still computes.
    pub sequences: u32,
    /// Prefill worker: the time that it needs for its prompts.
    pub queue: Duration,
    /// Prefill worker: prompt tokens that it still has to compute.
    pub uncomputed: u64,
    /// Decode worker: prompt tokens of its sequences.
    pub context: u64,
    /// Decode worker: its capacity.
    pub capacity: Option<DecodeCapacity>,
}

/// The capacity of a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeCapacity {
    /// Sequences stepped at once.
    pub sequences: u32,
    /// Tokens of KV.
    pub tokens: u64,
}

/// An order that a worker takes the other role.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RoleChangeOrder {
    /// Its number.
    pub worker: WorkerNumber,
    /// Its new role.
    pub to: Leg,
    /// The pressure of prefill and decode workers, for the log.
    pub pressure: [f64; 2],
}

/// Watches the pressure of a cluster.
#[derive(Debug)]
pub struct RoleBalancer {
    terms: BalanceConfig,
    /// The role that is short of workers, and the time since which it is so without a break.
    short: Option<(Leg, Instant)>,
    /// Nothing changes before this time.
    rests: Option<Instant>,
}

impl RoleBalancer {
    /// A balancer without history.
    pub fn new(terms: BalanceConfig) -> RoleBalancer {
        RoleBalancer { terms, short: None, rests: None }
    }

    /// The worker that must change its role now, if any. The caller polls about once a second.
    pub fn poll_order(&mut self, rows: &[WorkerSnapshot], now: Instant) -> Option<RoleChangeOrder> {
        let pressure = [Leg::Prefill, Leg::Decode].map(|role| self.pressure(rows, role, 0));
        // While a worker is leaving, the other workers appear more loaded than they are.
        let moves =
            rows.iter().any(|row| row.leaves) || self.rests.is_some_and(|rests| now < rests);
        let short = if moves { None } else { self.short(rows, pressure) };
        let Some(role) = short else {
            self.short = None;
            return None;
        };
        let since = match self.short {
            Some((before, since)) if before == role => since,
            _ => now,
        };
        self.short = Some((role, since));
        if now.saturating_duration_since(since) < self.terms.window {
            return None;
        }
        let worker = candidate(rows, role.other())?;
        (self.short, self.rests) = (None, Some(now + self.terms.dwell));
        Some(RoleChangeOrder {
            worker,
            to: role,
            pressure: pressure.map(|pressure| pressure.unwrap_or_default()),
        })
    }

    /// The role that is pressed while the other can spare a worker.
    fn short(&self, rows: &[WorkerSnapshot], pressure: [Option<f64>; 2]) -> Option<Leg> {
        [Leg::Prefill, Leg::Decode].into_iter().find(|&role| {
            let least = match role.other() {
                Leg::Prefill => self.terms.min_prefill,
                Leg::Decode => self.terms.min_decode,
            };
            let others = rows.iter().filter(|row| row.role == role.other() && row.usable).count();
            let spared = self.pressure(rows, role.other(), 1);
            pressure[role as usize].is_some_and(|pressure| pressure >= 1.0)
                && others > least as usize
                && candidate(rows, role.other()).is_some()
                && spared.is_some_and(|spared| spared < SPARE)
        })
    }

    /// The pressure of a role with `less` fewer workers. `None` if no worker would be left, or if
    /// the workers do not report their capacity.
    fn pressure(&self, rows: &[WorkerSnapshot], role: Leg, less: usize) -> Option<f64> {
        let of = |role| rows.iter().filter(move |row| row.role == role && row.usable);
        let count = of(role).count();
        let left = count.checked_sub(less).filter(|&left| left > 0)?;
        let share = left as f64 / count as f64;
        match role {
            Leg::Prefill => {
                let queue: Duration = of(role).map(|row| row.queue).sum();
                Some(queue.as_secs_f64() / left as f64 / self.terms.queue.as_secs_f64())
            }
            Leg::Decode => {
                let rooms = of(role).map(|row| row.capacity);
                let (mut sequences, mut tokens) = (0.0, 0.0);
                for room in rooms {
                    let room = room?;
                    (sequences, tokens) =
                        (sequences + f64::from(room.sequences), tokens + room.tokens as f64);
                }
                // Sequences that prefill still computes are already reserved on decode workers, but
                // have not arrived there.
                let sum =
                    |role, figure: fn(&WorkerSnapshot) -> u64| of(role).map(figure).sum::<u64>();
                let here = |all: fn(&WorkerSnapshot) -> u64, read: fn(&WorkerSnapshot) -> u64| {
                    sum(Leg::Decode, all).saturating_sub(sum(Leg::Prefill, read)) as f64
                };
                let generating = here(|row| row.sequences.into(), |row| row.sequences.into());
                let held = here(|row| row.context, |row| row.uncomputed);
                let used = (generating / sequences.max(1.0)).max(held / tokens.max(1.0));
                Some(used / share / self.terms.fill)
            }
        }
    }
}

/// The worker that is cheapest to change: the worker with the fewest sequences, of those that can
/// change. Among equal workers, the one that joined first.
fn candidate(rows: &[WorkerSnapshot], role: Leg) -> Option<WorkerNumber> {
    let able = rows.iter().filter(|row| row.role == role && row.usable && row.can_change_role);
    able.min_by_key(|row| (row.sequences, row.queue, row.worker)).map(|row| row.worker)
}

#[cfg(test)]
#[path = "role_balancer_tests.rs"]
mod tests;
