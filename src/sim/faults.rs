//! What is done to a cluster, by seed: each seed has some kinds of faults, so that now and then one kind meets
//! only itself. Not here: how each is carried out (`cluster`).

use super::agenda::{MILLI, Nanos, SECOND};
use super::dice::Dice;
use super::process::Thread;
use std::fmt;

/// The router's host, beside those of processes.
pub const ROUTER: usize = usize::MAX;

/// Something that goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A control connection is reset.
    Cut,
    /// A leg's connection is.
    CutCall,
    /// A process dies, and another one is started at its address.
    Crash {
        /// Whose.
        host: usize,
        /// With its host: nobody is told.
        silent: bool,
        /// Until it is started again.
        down: Nanos,
    },
    /// A process stands still.
    Pause {
        /// Whose.
        host: usize,
        /// For so long.
        time: Nanos,
    },
    /// One thread of a process stands still.
    Stall {
        /// Whose.
        host: usize,
        /// Which.
        thread: Thread,
        /// For so long.
        time: Nanos,
    },
    /// Packets between two hosts are lost.
    Part {
        /// From here, which may be [`ROUTER`],
        from: usize,
        /// to there, which may be it as well,
        to: usize,
        /// and back.
        both: bool,
        /// For so long.
        time: Nanos,
    },
    /// What NICs write and streams carry from one host to another is held back.
    Hold {
        /// From here,
        from: usize,
        /// to there,
        to: usize,
        /// for so long.
        time: Nanos,
    },
    /// A NIC gives up what it waits for.
    GiveUp,
    /// A lane of tcp is reset.
    CutLane,
    /// One hangs.
    HoldLane {
        /// For so long.
        time: Nanos,
    },
    /// A model computes slowly.
    Slow {
        /// Whose.
        host: usize,
        /// How many times slower.
        factor: u64,
        /// For so long.
        time: Nanos,
    },
    /// A process finds that its clock is later than it was.
    Jump {
        /// Whose.
        host: usize,
        /// By so much.
        by: Nanos,
    },
    /// An engine hangs.
    Hang {
        /// Whose.
        host: usize,
        /// For so long.
        time: Nanos,
    },
    /// A process is told to drain; another one is started when it has ended.
    Drain {
        /// Whose.
        host: usize,
        /// So long after.
        down: Nanos,
    },
    /// A worker is told to have the other role.
    Turn {
        /// Whose.
        host: usize,
        /// How long what it has may take to end.
        patience: Nanos,
        /// How long it is put together anew.
        still: Nanos,
    },
    /// Somebody has a request end.
    Abort,
    /// A client goes away.
    Leave,
}

impl Fault {
    /// How long it lasts; 0 for what happens at once.
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
                let told = if silent { ", and nobody is told" } else { "" };
                write!(f, "{} dies, for {} s{told}", Name(host), seconds(down))
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
            Fault::GiveUp => f.write_str("a NIC gives up what it waits for, if one does"),
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
                    "{} is told to drain, and is there again {} s after",
                    Name(host),
                    seconds(down)
                )
            }
            Fault::Turn { host, patience, still } => {
                let (patience, still) = (seconds(patience), seconds(still));
                let host = Name(host);
                write!(
                    f,
                    "{host} is told to have the other role within {patience} s, and is still for {still} s"
                )
            }
            Fault::Abort => f.write_str("somebody has a request end, if one runs"),
            Fault::Leave => f.write_str("a client leaves, if one is there"),
        }
    }
}

/// Faults of a run, and what else is not as it should be.
#[derive(Clone, Debug)]
pub struct Faults {
    /// By time.
    pub list: Vec<(Nanos, Fault)>,
    /// One in so many legs is sent twice; 0: none.
    pub twice: u64,
    /// How many times later than others each thread of each process is, all the time.
    pub lags: Vec<[u64; 3]>,
}

impl Faults {
    /// Of a cluster with `prefill` and `decode` workers to which requests come for `span`.
    pub fn draw(dice: &mut Dice, prefill: usize, decode: usize, span: Nanos) -> Faults {
        let kinds: Vec<u64> = (0..dice.within(1, 4)).map(|_| dice.within(0, 12)).collect();
        let hosts = prefill + decode;
        let mut list: Vec<(Nanos, Fault)> = (0..dice.within(1, 12))
            .map(|_| {
                let at = dice.within(0, span);
                let host = dice.draw() as usize % hosts;
                let fault = match dice.pick(&kinds) {
                    0 => Fault::Cut,
                    1 => Fault::Crash {
                        host,
                        silent: dice.one_in(3),
                        down: dice.pick(&[
                            MILLI,
                            300 * MILLI,
                            1500 * MILLI,
                            3 * SECOND,
                            12 * SECOND,
                        ]),
                    },
                    2 => Fault::Pause {
                        host,
                        time: dice.pick(&[
                            50 * MILLI,
                            600 * MILLI,
                            1900 * MILLI,
                            2500 * MILLI,
                            6 * SECOND,
                        ]),
                    },
                    kind @ (3 | 7) => {
                        let pair = [
                            dice.draw() as usize % prefill,
                            prefill + dice.draw() as usize % decode,
                        ];
                        let (one, other) =
                            if kind == 3 { pair.into() } else { (ROUTER, dice.pick(&pair)) };
                        let (from, to) = if dice.one_in(2) { (one, other) } else { (other, one) };
                        let time =
                            dice.pick(&[100 * MILLI, SECOND, 1900 * MILLI, 3 * SECOND, 8 * SECOND]);
                        Fault::Part { from, to, both: dice.one_in(2), time }
                    }
                    4 => {
                        let time = dice.pick(&[200 * MILLI, 2 * SECOND]);
                        Fault::Slow { host, factor: dice.pick(&[10, 100, 1000]), time }
                    }
                    5 => {
                        Fault::Jump { host, by: dice.pick(&[400 * MILLI, 3 * SECOND, 20 * SECOND]) }
                    }
                    6 => Fault::Stall {
                        host,
                        thread: dice.pick(&Thread::ALL),
                        time: dice.pick(&[5 * MILLI, 100 * MILLI, 1500 * MILLI]),
                    },
                    8 => Fault::CutCall,
                    9 => Fault::Hang {
                        host,
                        time: dice.pick(&[9 * SECOND, 20 * SECOND, 40 * SECOND]),
                    },
                    10 => Fault::Drain { host, down: dice.pick(&[MILLI, SECOND, 6 * SECOND]) },
                    11 => Fault::Abort,
                    _ => Fault::Leave,
                };
                (at, fault)
            })
            .collect();
        if dice.one_in(2) {
            list.extend((0..dice.within(5, 40)).map(|_| (dice.within(0, span), Fault::Leave)));
        }
        list.sort_unstable_by_key(|&(at, _)| at);
        let twice = if dice.one_in(3) { dice.within(2, 20) } else { 0 };
        let lags =
            (0..hosts).map(|_| [(); 3].map(|()| dice.pick(&[1, 1, 1, 1, 30, 300]))).collect();
        Faults { list, twice, lags }
    }

    /// And of its NICs.
    pub fn draw_of_nics(&mut self, dice: &mut Dice, prefill: usize, decode: usize, span: Nanos) {
        let most = dice.pick(&[0, 2, 8]);
        self.list.extend((0..dice.within(0, most)).map(|_| {
            let (from, to) =
                (dice.draw() as usize % prefill, prefill + dice.draw() as usize % decode);
            let time = dice.pick(&[20 * MILLI, 200 * MILLI, 900 * MILLI, 3 * SECOND]);
            let fault = if dice.one_in(4) { Fault::GiveUp } else { Fault::Hold { from, to, time } };
            (dice.within(0, span), fault)
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// And of its streams.
    pub fn draw_of_streams(&mut self, dice: &mut Dice, prefill: usize, decode: usize, span: Nanos) {
        let most = dice.pick(&[0, 2, 8]);
        self.list.extend((0..dice.within(0, most)).map(|_| {
            let (from, to) =
                (dice.draw() as usize % prefill, prefill + dice.draw() as usize % decode);
            let time = dice.pick(&[20 * MILLI, 200 * MILLI, 900 * MILLI, 3 * SECOND]);
            let faults = [
                Fault::CutLane,
                Fault::CutLane,
                Fault::HoldLane { time },
                Fault::Hold { from, to, time },
            ];
            (dice.within(0, span), dice.pick(&faults))
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Workers change their roles. The first of either stays what it is, so that neither is left to nobody when those that
    /// have changed die. In some clusters nothing else happens.
    pub fn draw_turns(&mut self, dice: &mut Dice, prefill: usize, decode: usize, span: Nanos) {
        if dice.one_in(3) {
            (self.list, self.twice) = (Vec::new(), 0);
            self.lags.fill([1; 3]);
        }
        let hosts: Vec<usize> = (1..prefill).chain(prefill + 1..prefill + decode).collect();
        let turns = if hosts.is_empty() { 0 } else { dice.within(1, 6) };
        self.list.extend((0..turns).map(|_| {
            let host = dice.pick(&hosts);
            let patience = dice.pick(&[20 * MILLI, 2 * SECOND, 30 * SECOND]);
            let still = dice.pick(&[MILLI, 50 * MILLI, 800 * MILLI]);
            (dice.within(0, span), Fault::Turn { host, patience, still })
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// Whether workers change their roles.
    pub fn have_turns(&self) -> bool {
        self.list.iter().any(|(_, fault)| matches!(fault, Fault::Turn { .. }))
    }

    /// Who drains has long requests to finish: longer than it waits for those who keep a connection.
    pub fn slow_the_leaving(&mut self, dice: &mut Dice) {
        let drains = self.list.iter().filter_map(|&(at, fault)| match fault {
            Fault::Drain { host, .. } => Some((at, host)),
            _ => None,
        });
        let slow = drains.map(|(at, host)| {
            let before = dice.within(0, 200 * MILLI);
            (at.saturating_sub(before), Fault::Slow { host, factor: 1000, time: 9 * SECOND })
        });
        let slow: Vec<_> = slow.collect();
        self.list.extend(slow);
        self.list.sort_by_key(|&(at, _)| at);
    }

    /// All prefill workers die, or drain, at about the same time.
    pub fn take_prefill_away(&mut self, dice: &mut Dice, prefill: usize, span: Nanos) {
        let (at, drains) = (dice.within(0, span), dice.one_in(2));
        let down = dice.pick(&[300 * MILLI, 3 * SECOND, 12 * SECOND]);
        self.list.extend((0..prefill).map(|host| {
            let fault = match drains {
                true => Fault::Drain { host, down },
                false => Fault::Crash { host, silent: dice.one_in(4), down },
            };
            (at + dice.within(0, 20 * MILLI), fault)
        }));
        self.list.sort_by_key(|&(at, _)| at);
    }
}
