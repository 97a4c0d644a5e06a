//! The faults of a cluster, drawn from the seed. Each seed has only some kinds of faults, so that
//! some seeds have only one kind. Not here: the injection of faults (`cluster`).

use super::process::Thread;
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use std::fmt;

/// The router's host number, which no process has.
pub const ROUTER: usize = usize::MAX;

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A control connection is reset.
    Cut,
    /// The connection of a leg is reset.
    CutCall,
    /// A process dies, and another one is started at its address.
    Crash {
        /// The process.
        host: usize,
        /// Its host dies with it, so no peer gets a reset.
        silent: bool,
        /// Time until it is started again.
        down: Nanos,
    },
    /// A process pauses.
    Pause {
        /// The process.
        host: usize,
        /// How long.
        time: Nanos,
    },
    /// One thread of a process stalls.
    Stall {
        /// The process.
        host: usize,
        /// The thread.
        thread: Thread,
        /// How long.
        time: Nanos,
    },
    /// Packets between two hosts are lost.
    Part {
        /// The sender, which can be [`ROUTER`].
        from: usize,
        /// The receiver, which can also be [`ROUTER`].
        to: usize,
        /// Whether the other direction also loses packets.
        both: bool,
        /// How long.
        time: Nanos,
    },
    /// Writes of NICs and bytes of streams from one host to another are held back.
    Hold {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
        /// How long.
        time: Nanos,
    },
    /// A NIC gives up an operation that waits for an answer.
    GiveUp,
    /// A TCP lane is reset.
    CutLane,
    /// A TCP lane hangs.
    HoldLane {
        /// How long.
        time: Nanos,
    },
    /// A model computes slowly.
    Slow {
        /// The process.
        host: usize,
        /// Factor of its times.
        factor: u64,
        /// How long.
        time: Nanos,
    },
    /// The clock of a process jumps forward.
    Jump {
        /// The process.
        host: usize,
        /// By how much.
        by: Nanos,
    },
    /// An engine hangs.
    Hang {
        /// The process.
        host: usize,
        /// How long.
        time: Nanos,
    },
    /// A process gets the order to drain. Another one starts after its end.
    Drain {
        /// The process.
        host: usize,
        /// Time from its end to that start.
        down: Nanos,
    },
    /// A worker gets the order to change its role.
    Turn {
        /// The process.
        host: usize,
        /// Time limit for the end of its requests.
        patience: Nanos,
        /// Duration of the rebuild of the worker.
        still: Nanos,
    },
    /// A request is aborted.
    Abort,
    /// A client disconnects.
    Leave,
}

impl Fault {
    /// Its duration; 0 for an instantaneous fault.
    pub fn time(self) -> Nanos {
        match self {
            Fault::Crash { down: time, .. }
            | Fault::Pause { time, .. }
            | Fault::Stall { time, .. }
            | Fault::Hang { time, .. }
            | Fault::Part { time, .. }
            | Fault::Hold { time, .. }
            | Fault::HoldLane { time }
            | Fault::Slow { time, .. } => time,
            Fault::Cut
            | Fault::CutCall
            | Fault::GiveUp
            | Fault::CutLane
            | Fault::Jump { .. }
            | Fault::Drain { .. }
            | Fault::Turn { .. }
            | Fault::Abort
            | Fault::Leave => 0,
        }
    }
}

/// A host by its number, or the router's.
struct Name(usize);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ROUTER => f.write_str("the router"),
            host => write!(f, "process {host}"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: Nanos| time as f64 / SECOND as f64;
        match *self {
            Fault::Cut => f.write_str("a connection between two processes breaks, if one stands"),
            Fault::CutCall => f.write_str("a connection of the router breaks, if one stands"),
            Fault::Crash { host, silent, down } => {
                let silence = if silent { ", and its peers get no reset" } else { "" };
                write!(f, "{} dies, for {} s{silence}", Name(host), seconds(down))
            }
            Fault::Pause { host, time } => {
                write!(f, "{} stands still for {} s", Name(host), seconds(time))
            }
            Fault::Stall { host, thread, time } => {
                let thread = format!("{thread:?}").to_lowercase();
                write!(f, "thread {thread} of {} stands still for {} s", Name(host), seconds(time))
            }
            Fault::Part { from, to, both, time } => {
                let back = if both { " and back" } else { "" };
                let (from, to, time) = (Name(from), Name(to), seconds(time));
                write!(f, "nothing comes from {from} to {to}{back} for {time} s")
            }
            Fault::Hold { from, to, time } => {
                let (from, to, time) = (Name(from), Name(to), seconds(time));
                write!(f, "what {from} writes to {to} is held back for {time} s")
            }
            Fault::GiveUp => f.write_str("a NIC gives up an operation, if one waits"),
            Fault::CutLane => f.write_str("a lane breaks, if one stands"),
            Fault::HoldLane { time } => {
                write!(f, "a lane hangs for {} s, if one stands", seconds(time))
            }
            Fault::Slow { host, factor, time } => {
                write!(
                    f,
                    "the model of {} is {factor} times slower for {} s",
                    Name(host),
                    seconds(time)
                )
            }
            Fault::Jump { host, by } => {
                write!(f, "the clock of {} jumps by {} s", Name(host), seconds(by))
            }
            Fault::Hang { host, time } => {
                write!(f, "the engine of {} hangs for {} s", Name(host), seconds(time))
            }
            Fault::Drain { host, down } => {
                write!(
                    f,
                    "{} drains, and is started again {} s after its end",
                    Name(host),
                    seconds(down)
                )
            }
            Fault::Turn { host, patience, still } => {
                let (patience, still) = (seconds(patience), seconds(still));
                let host = Name(host);
                write!(
                    f,
                    "{host} changes its role, with {patience} s to end its requests \
                     and {still} s to restart"
                )
            }
            Fault::Abort => f.write_str("a request is aborted, if one runs"),
            Fault::Leave => f.write_str("a client leaves, if one is there"),
        }
    }
}

/// The faults of a run, and its other disturbances.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    /// The faults in order of time.
    pub list: Vec<(Nanos, Fault)>,
    /// One leg in `twice` is sent twice; 0: none.
    pub twice: u64,
    /// By process and thread: a factor of its wake-up latency, during the whole run.
    pub lags: Vec<[u64; 3]>,
}

impl FaultPlan {
    /// Draws the faults of a cluster with these workers. Requests arrive during `span`.
    pub fn draw(dice: &mut Rng, prefill: usize, decode: usize, span: Nanos) -> FaultPlan {
        let kinds: Vec<u64> = (0..dice.range_u64(1, 4)).map(|_| dice.range_u64(0, 12)).collect();
        let hosts = prefill + decode;
        let mut list: Vec<(Nanos, Fault)> = (0..dice.range_u64(1, 12))
            .map(|_| {
                let at = dice.range_u64(0, span);
                let host = dice.next_u64() as usize % hosts;
                let kind = dice.pick(&kinds);
                (at, draw_fault(dice, kind, host, [prefill, decode]))
            })
            .collect();
        if dice.one_in(2) {
            list.extend(
                (0..dice.range_u64(5, 40)).map(|_| (dice.range_u64(0, span), Fault::Leave)),
            );
        }
        list.sort_unstable_by_key(|&(at, _)| at);
        let twice = if dice.one_in(3) { dice.range_u64(2, 20) } else { 0 };
        let lags =
            (0..hosts).map(|_| [(); 3].map(|()| dice.pick(&[1, 1, 1, 1, 30, 300]))).collect();
        FaultPlan { list, twice, lags }
    }

    /// Adds the faults of its NICs.
    pub fn draw_of_nics(&mut self, dice: &mut Rng, prefill: usize, decode: usize, span: Nanos) {
        let most = dice.pick(&[0, 2, 8]);
        self.list.extend((0..dice.range_u64(0, most)).map(|_| {
            let (from, to) =
                (dice.next_u64() as usize % prefill, prefill + dice.next_u64() as usize % decode);
            let time = dice.pick(&[20 * MILLI, 200 * MILLI, 900 * MILLI, 3 * SECOND]);
            let fault = if dice.one_in(4) { Fault::GiveUp } else { Fault::Hold { from, to, time } };
            (dice.range_u64(0, span), fault)
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Adds the faults of its streams.
    pub fn draw_of_streams(&mut self, dice: &mut Rng, prefill: usize, decode: usize, span: Nanos) {
        let most = dice.pick(&[0, 2, 8]);
        self.list.extend((0..dice.range_u64(0, most)).map(|_| {
            let (from, to) =
                (dice.next_u64() as usize % prefill, prefill + dice.next_u64() as usize % decode);
            let time = dice.pick(&[20 * MILLI, 200 * MILLI, 900 * MILLI, 3 * SECOND]);
            let faults = [
                Fault::CutLane,
                Fault::CutLane,
                Fault::HoldLane { time },
                Fault::Hold { from, to, time },
            ];
            (dice.range_u64(0, span), dice.pick(&faults))
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Adds role changes. The first worker of each role keeps its role, so that no role is without
    /// workers if the others die. In some clusters, role changes are the only faults.
    pub fn draw_turns(&mut self, dice: &mut Rng, prefill: usize, decode: usize, span: Nanos) {
        if dice.one_in(3) {
            (self.list, self.twice) = (Vec::new(), 0);
            self.lags.fill([1; 3]);
        }
        let hosts: Vec<usize> = (1..prefill).chain(prefill + 1..prefill + decode).collect();
        let turns = if hosts.is_empty() { 0 } else { dice.range_u64(1, 6) };
        self.list.extend((0..turns).map(|_| {
            let host = dice.pick(&hosts);
            let patience = dice.pick(&[20 * MILLI, 2 * SECOND, 30 * SECOND]);
            let still = dice.pick(&[MILLI, 50 * MILLI, 800 * MILLI]);
            (dice.range_u64(0, span), Fault::Turn { host, patience, still })
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Whether workers change their roles.
    pub fn have_turns(&self) -> bool {
        self.list.iter().any(|(_, fault)| matches!(fault, Fault::Turn { .. }))
    }

    /// Slows the workers that drain, so that they have long requests to finish. These requests take
    /// longer than the time for which a drain waits for open connections.
    pub fn slow_the_leaving(&mut self, dice: &mut Rng) {
        let drains = self.list.iter().filter_map(|&(at, fault)| match fault {
            Fault::Drain { host, .. } => Some((at, host)),
            _ => None,
        });
        let slow = drains.map(|(at, host)| {
            let before = dice.range_u64(0, 200 * MILLI);
            (at.saturating_sub(before), Fault::Slow { host, factor: 1000, time: 9 * SECOND })
        });
        let slow: Vec<_> = slow.collect();
        self.list.extend(slow);
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Lets all prefill workers die, or drain, at about the same time.
    pub fn take_prefill_away(&mut self, dice: &mut Rng, prefill: usize, span: Nanos) {
        let (at, drains) = (dice.range_u64(0, span), dice.one_in(2));
        let down = dice.pick(&[300 * MILLI, 3 * SECOND, 12 * SECOND]);
        self.list.extend((0..prefill).map(|host| {
            let fault = match drains {
                true => Fault::Drain { host, down },
                false => Fault::Crash { host, silent: dice.one_in(4), down },
            };
            (at + dice.range_u64(0, 20 * MILLI), fault)
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }
}

/// Draws a fault of this kind at `host`. There are `prefill` and `decode` workers.
fn draw_fault(dice: &mut Rng, kind: u64, host: usize, [prefill, decode]: [usize; 2]) -> Fault {
    match kind {
        0 => Fault::Cut,
        1 => Fault::Crash {
            host,
            silent: dice.one_in(3),
            down: dice.pick(&[MILLI, 300 * MILLI, 1500 * MILLI, 3 * SECOND, 12 * SECOND]),
        },
        2 => Fault::Pause {
            host,
            time: dice.pick(&[50 * MILLI, 600 * MILLI, 1900 * MILLI, 2500 * MILLI, 6 * SECOND]),
        },
        kind @ (3 | 7) => {
            let pair =
                [dice.next_u64() as usize % prefill, prefill + dice.next_u64() as usize % decode];
            let (one, other) = if kind == 3 { pair.into() } else { (ROUTER, dice.pick(&pair)) };
            let (from, to) = if dice.one_in(2) { (one, other) } else { (other, one) };
            let time = dice.pick(&[100 * MILLI, SECOND, 1900 * MILLI, 3 * SECOND, 8 * SECOND]);
            Fault::Part { from, to, both: dice.one_in(2), time }
        }
        4 => {
            let time = dice.pick(&[200 * MILLI, 2 * SECOND]);
            Fault::Slow { host, factor: dice.pick(&[10, 100, 1000]), time }
        }
        5 => Fault::Jump { host, by: dice.pick(&[400 * MILLI, 3 * SECOND, 20 * SECOND]) },
        6 => Fault::Stall {
            host,
            thread: dice.pick(&Thread::ALL),
            time: dice.pick(&[5 * MILLI, 100 * MILLI, 1500 * MILLI]),
        },
        8 => Fault::CutCall,
        9 => Fault::Hang { host, time: dice.pick(&[9 * SECOND, 20 * SECOND, 40 * SECOND]) },
        10 => Fault::Drain { host, down: dice.pick(&[MILLI, SECOND, 6 * SECOND]) },
        11 => Fault::Abort,
        _ => Fault::Leave,
    }
}
