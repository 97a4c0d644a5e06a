//! The role balancer under waves of load: it follows long waves and ignores short ones.

use super::*;

const TERMS: BalanceConfig = BalanceConfig {
    queue: Duration::from_millis(1000),
    fill: 0.9,
    window: Duration::from_secs(10),
    dwell: Duration::from_secs(60),
    min_prefill: 1,
    min_decode: 1,
};
const ROOM: DecodeCapacity = DecodeCapacity { sequences: 10, tokens: 10_000 };
const SECOND: Duration = Duration::from_secs(1);

fn prefill(worker: usize, queue_ms: u64) -> WorkerSnapshot {
    WorkerSnapshot {
        worker: WorkerNumber(worker),
        role: Leg::Prefill,
        usable: true,
        leaves: false,
        can_change_role: true,
        sequences: 0,
        queue: Duration::from_millis(queue_ms),
        uncomputed: 0,
        context: 0,
        capacity: None,
    }
}

fn decode(worker: usize, sequences: u32) -> WorkerSnapshot {
    WorkerSnapshot { role: Leg::Decode, sequences, capacity: Some(ROOM), ..prefill(worker, 0) }
}

/// The worker that changes its role under this unchanged load, and when.
fn turned(
    balance: &mut RoleBalancer,
    rows: &[WorkerSnapshot],
    seconds: u32,
    begin: Instant,
) -> Vec<(u32, usize, Leg)> {
    let look = |second: u32| {
        let turn = balance.poll_order(rows, begin + second * SECOND)?;
        Some((second, turn.worker.0, turn.to))
    };
    (0..seconds).filter_map(look).collect()
}

#[test]
fn a_side_that_stays_pressed_gets_the_idlest_worker_of_one_that_can_spare_it() {
    let begin = Instant::now();
    let rows = [prefill(0, 3000), decode(1, 2), decode(2, 1), decode(3, 1)];
    let mut balance = RoleBalancer::new(TERMS);
    assert_eq!(
        turned(&mut balance, &rows, 70, begin),
        [(10, 2, Leg::Prefill)],
        "after a window, then it rests"
    );
    assert_eq!(turned(&mut balance, &rows, 12, begin + 70 * SECOND), [(10, 2, Leg::Prefill)]);
    let mut balance = RoleBalancer::new(TERMS);
    let rows = [prefill(0, 10), prefill(1, 0), decode(2, 10)];
    assert_eq!(turned(&mut balance, &rows, 20, begin), [(10, 1, Leg::Decode)]);
}

#[test]
fn no_worker_leaves_a_role_that_needs_it_or_has_its_minimum() {
    let begin = Instant::now();
    let none = |rows: &[WorkerSnapshot]| {
        turned(&mut RoleBalancer::new(TERMS), rows, 100, begin).is_empty()
    };
    let full = [decode(1, 5), decode(2, 5), decode(3, 5)];
    assert!(none(&[&[prefill(0, 9000)], &full[..]].concat()), "three half full are two too full");
    assert!(none(&[prefill(0, 9000), decode(1, 0)]), "the last decode worker");
    assert!(none(&[prefill(0, 0), decode(1, 10)]), "the last prefill worker");
    assert!(none(&[prefill(0, 999), decode(1, 0), decode(2, 0)]), "it is not pressed");
    let fixed = |row: WorkerSnapshot| WorkerSnapshot { can_change_role: false, ..row };
    assert!(none(&[prefill(0, 9000), fixed(decode(1, 0)), fixed(decode(2, 0))]));
    let down = WorkerSnapshot { usable: false, ..decode(1, 0) };
    assert!(none(&[prefill(0, 9000), down, decode(2, 0)]));
    let silent = |row: WorkerSnapshot| WorkerSnapshot { capacity: None, ..row };
    assert!(
        none(&[prefill(0, 9000), silent(decode(1, 0)), silent(decode(2, 0))]),
        "nothing is known of them"
    );
    let mut balance = RoleBalancer::new(BalanceConfig { min_decode: 3, ..TERMS });
    let rows = [prefill(0, 9000), decode(1, 0), decode(2, 0), decode(3, 0)];
    assert_eq!(turned(&mut balance, &rows, 100, begin), []);
}

#[test]
fn one_change_at_a_time() {
    let begin = Instant::now();
    let leaving = WorkerSnapshot { usable: false, leaves: true, ..decode(4, 0) };
    let rows = [prefill(0, 9000), decode(1, 0), decode(2, 0), decode(3, 0)];
    let mut balance = RoleBalancer::new(TERMS);
    assert_eq!(turned(&mut balance, &[&rows[..], &[leaving]].concat(), 30, begin), []);
    assert_eq!(turned(&mut balance, &rows, 20, begin + 30 * SECOND).len(), 1, "it has left");
}

#[test]
fn sequences_that_wait_for_prefill_do_not_count_as_decode_load() {
    let begin = Instant::now();
    // All sequences reserved on decode wait for prefill.
    let waiting = WorkerSnapshot { sequences: 20, ..prefill(0, 9000) };
    let rows = [waiting, decode(1, 10), decode(2, 10)];
    assert_eq!(turned(&mut RoleBalancer::new(TERMS), &rows, 20, begin), [(10, 1, Leg::Prefill)]);
    let long = |worker| WorkerSnapshot { context: 9_500, ..decode(worker, 1) };
    let rows = [prefill(0, 0), prefill(1, 0), long(2), long(3)];
    assert_eq!(
        turned(&mut RoleBalancer::new(TERMS), &rows, 20, begin),
        [(10, 0, Leg::Decode)],
        "few, and long"
    );
}

/// Four workers under recorded waves. Each second has a load: seconds of work for one prefill
/// worker, and the number of sequences that generate. The number of workers of each role gives the
/// pressure.
struct Wave {
    prefill: usize,
    decode: usize,
    /// Seconds of prompts that wait.
    queue: f64,
    changes: Vec<(u32, Leg)>,
}

impl Wave {
    fn run(mut self, seconds: u32, load: impl Fn(u32) -> (f64, u32)) -> Wave {
        let (mut balance, begin) = (RoleBalancer::new(TERMS), Instant::now());
        for second in 0..seconds {
            let (reading, sequences) = load(second);
            self.queue = (self.queue + reading - self.prefill as f64).max(0.0);
            let each = (self.queue * 1000.0 / self.prefill as f64) as u64;
            let rows: Vec<WorkerSnapshot> = (0..self.prefill)
                .map(|worker| prefill(worker, each))
                .chain(
                    (0..self.decode)
                        .map(|worker| decode(9 + worker, sequences / self.decode as u32)),
                )
                .collect();
            match balance.poll_order(&rows, begin + second * SECOND).map(|turn| turn.to) {
                Some(Leg::Prefill) => {
                    (self.prefill, self.decode) = (self.prefill + 1, self.decode - 1)
                }
                Some(Leg::Decode) => {
                    (self.prefill, self.decode) = (self.prefill - 1, self.decode + 1)
                }
                None => continue,
            }
            self.changes.push((second, if self.prefill > 1 { Leg::Prefill } else { Leg::Decode }));
            assert!(self.prefill >= 1 && self.decode >= 1);
        }
        self
    }
}

#[test]
fn waves_that_last_are_followed_there_and_back_and_short_ones_are_not() {
    let cluster = || Wave { prefill: 1, decode: 3, queue: 0.0, changes: Vec::new() };
    // Ten minutes of prompts, ten of answers.
    let slow =
        cluster().run(2400, |second| if second / 600 % 2 == 0 { (1.6, 6) } else { (0.3, 27) });
    let roles: Vec<Leg> = slow.changes.iter().map(|&(_, role)| role).collect();
    assert_eq!(roles, [Leg::Prefill, Leg::Decode, Leg::Prefill, Leg::Decode], "{:?}", slow.changes);
    for (change, wave) in slow.changes.iter().zip(0..) {
        assert!((wave * 600..wave * 600 + 60).contains(&change.0), "{:?}", slow.changes);
    }
    // Five seconds each: no wave lasts a window.
    let quick =
        cluster().run(2400, |second| if second / 5 % 2 == 0 { (1.6, 6) } else { (0.3, 27) });
    assert_eq!(quick.changes, []);
    // A load that just fits, with noise.
    let noise =
        |second: u32| f64::from(second.wrapping_mul(2_654_435_761) >> 16 & 0xff) / 255.0 - 0.5;
    let level = cluster()
        .run(3600, |second| (0.9 + noise(second), (20.0 + 10.0 * noise(second + 7)) as u32));
    assert!(level.changes.len() <= 1, "{:?}", level.changes);
    // More load of both kinds than capacity: no worker can be spared.
    let flood = cluster().run(600, |_| (2.0, 60));
    assert_eq!(flood.changes, []);
}
