//! When a worker is to change its role: by how hard either side is pressed, looked at again and again.
//!
//! ```text
//!             one side is pressed, the other can spare a worker, for a whole window
//!  watching ────────────────────────────────────────────────────────────────────────▶ resting, for a dwell time
//!     ▲                                                                                   │
//!     └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//! The pressure of a side is 1 where its workers have as much as they should have at most. Of prefill workers that is time:
//! how long they still read what they were given, by the forecast, on average. Of decode workers it is room: sequences of
//! those that they may step at once, and prompt tokens of those that their pools hold, whichever is the greater share; what
//! is still being read is not with them yet. A side is *pressed* from 1 on; the other *can spare* a worker where without it
//! its pressure would stay below [`SPARE`]. Between the two nothing happens, so that a change does not call for the change
//! back. Pure. Not here: who asks the worker (`front::router`).

use super::loads::WorkerNumber;
use super::router::Role;
pub use crate::config::resolved::BalanceTerms;
use std::time::{Duration, Instant};

/// Pressure under which a side must stay without the worker that it gives.
pub const SPARE: f64 = 0.6;

/// One worker, as it is now.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Row {
    /// Which.
    pub worker: WorkerNumber,
    /// What it does.
    pub role: Role,
    /// Whether it takes requests.
    pub usable: bool,
    /// Whether it is about to take none, or was told to change.
    pub leaves: bool,
    /// Whether its role can change.
    pub can_turn: bool,
    /// Sequences that it has, those included whose prompts are still being read elsewhere.
    pub sequences: u32,
    /// Of a prefill worker: how long it still reads.
    pub queue: Duration,
    /// Of a prefill worker: prompt tokens that it is still to read.
    pub unread: u64,
    /// Of a decode worker: prompt tokens of its sequences.
    pub context: u64,
    /// Of a decode worker: the same as they may be at most.
    pub room: Option<Room>,
}

/// What a decode worker has room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Sequences stepped at once.
    pub sequences: u32,
    /// Tokens of KV.
    pub tokens: u64,
}

/// A worker that is to have the other role.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turn {
    /// Which.
    pub worker: WorkerNumber,
    /// What it is to be.
    pub to: Role,
    /// The pressure of prefill and decode workers, for the log.
    pub pressure: [f64; 2],
}

/// Watches a cluster's pressure.
#[derive(Debug)]
pub struct Balance {
    terms: BalanceTerms,
    /// Who is short, and since when without a break.
    short: Option<(Role, Instant)>,
    /// Nothing changes before that.
    rests: Option<Instant>,
}

impl Balance {
    /// Nothing was seen yet.
    pub fn new(terms: BalanceTerms) -> Balance {
        Balance { terms, short: None, rests: None }
    }

    /// The worker that is to change now, if any. To be asked every second or so.
    pub fn look(&mut self, rows: &[Row], now: Instant) -> Option<Turn> {
        let pressure = [Role::Prefill, Role::Decode].map(|role| self.pressure(rows, role, 0));
        // While one leaves, what is left looks harder pressed than it is.
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
        Some(Turn {
            worker,
            to: role,
            pressure: pressure.map(|pressure| pressure.unwrap_or_default()),
        })
    }

    /// The side that is pressed while the other can spare a worker.
    fn short(&self, rows: &[Row], pressure: [Option<f64>; 2]) -> Option<Role> {
        [Role::Prefill, Role::Decode].into_iter().find(|&role| {
            let least = match role.other() {
                Role::Prefill => self.terms.min_prefill,
                Role::Decode => self.terms.min_decode,
            };
            let others = rows.iter().filter(|row| row.role == role.other() && row.usable).count();
            let spared = self.pressure(rows, role.other(), 1);
            pressure[role as usize].is_some_and(|pressure| pressure >= 1.0)
                && others > least as usize
                && candidate(rows, role.other()).is_some()
                && spared.is_some_and(|spared| spared < SPARE)
        })
    }

    /// How hard a side is pressed with so many workers less; `None`: there are no such workers, or they do not tell what they
    /// have room for.
    fn pressure(&self, rows: &[Row], role: Role, less: usize) -> Option<f64> {
        let of = |role| rows.iter().filter(move |row| row.role == role && row.usable);
        let count = of(role).count();
        let left = count.checked_sub(less).filter(|&left| left > 0)?;
        let share = left as f64 / count as f64;
        match role {
            Role::Prefill => {
                let queue: Duration = of(role).map(|row| row.queue).sum();
                Some(queue.as_secs_f64() / left as f64 / self.terms.queue.as_secs_f64())
            }
            Role::Decode => {
                let rooms = of(role).map(|row| row.room);
                let (mut sequences, mut tokens) = (0.0, 0.0);
                for room in rooms {
                    let room = room?;
                    (sequences, tokens) =
                        (sequences + f64::from(room.sequences), tokens + room.tokens as f64);
                }
                // What prefill workers have is booked here, too, and has not come.
                let sum = |role, figure: fn(&Row) -> u64| of(role).map(figure).sum::<u64>();
                let here = |all: fn(&Row) -> u64, read: fn(&Row) -> u64| {
                    sum(Role::Decode, all).saturating_sub(sum(Role::Prefill, read)) as f64
                };
                let generating = here(|row| row.sequences.into(), |row| row.sequences.into());
                let held = here(|row| row.context, |row| row.unread);
                let used = (generating / sequences.max(1.0)).max(held / tokens.max(1.0));
                Some(used / share / self.terms.fill)
            }
        }
    }
}

/// Who gives the least up: the worker of a role that can change and has least to finish, the longest there of those.
fn candidate(rows: &[Row], role: Role) -> Option<WorkerNumber> {
    let able = rows.iter().filter(|row| row.role == role && row.usable && row.can_turn);
    able.min_by_key(|row| (row.sequences, row.queue, row.worker)).map(|row| row.worker)
}

#[cfg(test)]
#[path = "roles_tests.rs"]
mod tests;
