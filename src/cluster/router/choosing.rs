//! Which workers serve a request: who may, as the policy has it, and what is booked on them.
//!
//! Invariants: who suits comes before who fails, and whoever says no is never asked; a choice costs one pass over the
//! rows of a role and what the policy takes. Where everybody suits alike, which is the rule, the rows are asked as they
//! are; else in a copy of which some are not usable.

use super::table::{Seat, Table};
use super::{Booking, Member, NoWorker, Pair, Role, Router};
use crate::cluster::flight::Avoid;
use crate::cluster::loads::{Load, WorkerNumber};
use crate::cluster::policy::slo::{self, Foretold, foretell};
use crate::cluster::policy::{self, Candidate, Leg, Question, conditional};
use crate::cluster::work::{Work, mix};
use crate::config::resolved::Policy;
use crate::stdx::planted::is_planted;
use std::time::{Duration, Instant};

/// What a choice goes through, kept so that the next one need not ask for memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Rows of a role.
    workers: Vec<Candidate>,
    /// Whether those are usable for the request, and how much is against them.
    standing: Vec<Option<Against>>,
    /// By class, whether a decode worker of it can be had.
    classes: Vec<usize>,
}

/// Least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Against {
    Nothing,
    /// Another request just failed there.
    Suspect,
    /// This one did.
    Failed,
}

/// Whom a leg may go to.
enum Suits<'a> {
    /// Anybody.
    All,
    /// Who reads prompts alone.
    Readers,
    /// Who fits one of these classes.
    Fitting(&'a [usize]),
}

/// Who is chosen, and what it comes to where that is foretold.
#[derive(Clone, Copy, Debug)]
struct Picked {
    worker: WorkerNumber,
    class: usize,
    /// Tokens it would have to read, and how long that takes.
    missing: u32,
    reading: Duration,
    foretold: Foretold,
}

impl Router {
    /// Chooses a pair and books the work on both.
    ///
    /// # Errors
    /// One of the roles has no usable worker, or none fits, or all are foretold to be too late; nothing is booked then.
    pub fn choose(&mut self, work: &Work, avoid: &Avoid, now: Instant) -> Result<Pair, NoWorker> {
        let (prefill, decode) = self.find(work, avoid, now)?;
        self.check_pair(&prefill, &decode, avoid)?;
        Ok(self.book_pair(prefill, decode, work, now))
    }

    /// Chooses who serves the work: a pair, or, where no pair is left, or none but one whose prefill worker has
    /// failed the request, a decode worker that reads prompts itself. A prefill worker that is there and says no is no
    /// reason to load decode with its work; that little is to be read is one, if the policy says so.
    ///
    /// # Errors
    /// As [`Router::choose`].
    pub fn choose_serving(
        &mut self,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<(Option<Booking>, Booking), NoWorker> {
        let found = self.find(work, avoid, now);
        let is_wanted = match &found {
            Ok((prefill, _)) => avoid.failed.contains(&prefill.worker),
            Err(_) => !self.has_pair() && !is_planted("nobody reads alone"),
        };
        let alone = match &found {
            Ok((prefill, decode)) if !is_wanted => self.stays(prefill, decode, work, avoid, now),
            _ => None,
        };
        let alone = alone.or_else(|| {
            is_wanted
                .then(|| self.pick(Leg::Whole, work, avoid, now, &Suits::Readers).ok())
                .flatten()
        });
        match (found, alone) {
            (_, Some(alone)) => {
                self.check(self.policies.decode, alone.foretold, Duration::ZERO, avoid)?;
                Ok((None, self.book(alone, Leg::Whole, work, now)))
            }
            (Ok((prefill, decode)), None) => {
                self.check_pair(&prefill, &decode, avoid)?;
                let Pair { prefill, decode } = self.book_pair(prefill, decode, work, now);
                Ok((Some(prefill), decode))
            }
            (Err(none), None) => {
                let reads = |decode: &Member| {
                    self.seat(decode).reads_alone && !avoid.unwilling.contains(&decode.number)
                };
                Err(none.or_may_come(is_wanted && self.here(Role::Decode).any(reads)))
            }
        }
    }

    /// Chooses a worker of one role.
    ///
    /// # Errors
    /// None is usable.
    pub fn choose_one(
        &mut self,
        role: Role,
        weight: u32,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<Booking, NoWorker> {
        let work = Work::of(weight);
        let leg = leg_of(role);
        let picked = self.pick(leg, &work, avoid, now, &Suits::All)?;
        Ok(self.book(picked, leg, &work, now))
    }

    /// Chooses a decode worker for KV that this prefill worker keeps, and books the work on it: one that has not failed the
    /// request.
    ///
    /// # Errors
    /// There is none that can be used and fits.
    pub fn choose_behind(
        &mut self,
        prefill: WorkerNumber,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<Booking, NoWorker> {
        let class = self.member(prefill).map(|member| self.class(member));
        let suits = class.as_slice();
        let decode = self.pick(Leg::Decode, work, avoid, now, &Suits::Fitting(suits))?;
        match avoid.failed.contains(&decode.worker) {
            true => Err(self.nobody(Role::Decode, avoid)),
            false => Ok(self.book(decode, Leg::Decode, work, now)),
        }
    }

    /// A pair.
    fn find(
        &mut self,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<(Picked, Picked), NoWorker> {
        // Who is missing altogether is named first.
        for role in [Role::Prefill, Role::Decode] {
            self.is_there(role, avoid)?;
        }
        let found = match self.kinds.all_fit() {
            true => self.pick(Leg::Prefill, work, avoid, now, &Suits::All).and_then(|prefill| {
                Ok((prefill, self.pick(Leg::Decode, work, avoid, now, &Suits::All)?))
            }),
            false => self.find_fitting(work, avoid, now),
        };
        found.map_err(|_| {
            let willing =
                |role| self.here(role).filter(|member| !avoid.unwilling.contains(&member.number));
            let fits = |one: &Member| {
                let mut decode = willing(Role::Decode);
                decode.any(|other| self.fit(self.class(one), self.class(other)))
            };
            NoWorker::Fitting { may_come: willing(Role::Prefill).any(fits) }
        })
    }

    /// A pair, where some do not fit each other.
    fn find_fitting(
        &mut self,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<(Picked, Picked), NoWorker> {
        let mut classes = std::mem::take(&mut self.scratch.classes);
        classes.clear();
        for decode in
            self.usable(Role::Decode).filter(|decode| !avoid.unwilling.contains(&decode.number))
        {
            if !classes.contains(&decode.class) {
                classes.push(decode.class);
            }
        }
        let found = self.pick(Leg::Prefill, work, avoid, now, &Suits::Fitting(&classes)).and_then(
            |prefill| {
                let class = &[prefill.class];
                Ok((prefill, self.pick(Leg::Decode, work, avoid, now, &Suits::Fitting(class))?))
            },
        );
        self.scratch.classes = classes;
        found
    }

    /// Whether anybody of a role can be used.
    fn is_there(&self, role: Role, avoid: &Avoid) -> Result<(), NoWorker> {
        match self.usable(role).any(|seat| !avoid.unwilling.contains(&seat.number)) {
            true => Ok(()),
            false => Err(self.nobody(role, avoid)),
        }
    }

    fn nobody(&self, role: Role, avoid: &Avoid) -> NoWorker {
        let mut here = self.here(role).peekable();
        let may_come =
            here.peek().is_none() || !here.all(|member| avoid.unwilling.contains(&member.number));
        NoWorker::Of { role, may_come }
    }

    /// The one that the policy names, of those of a role that suit: one at which nothing fails, rather than one where
    /// another request just did, rather than one where this one did; and never one that will not serve it.
    fn pick(
        &mut self,
        leg: Leg,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
        suits: &Suits<'_>,
    ) -> Result<Picked, NoWorker> {
        let role = role_of(leg);
        let policy = self.policy(role);
        self.drawn += 1;
        let chance = mix(self.seed ^ mix(self.drawn));
        let (table, prefixes) = (&mut self.tables[role as usize], &self.prefixes[role as usize]);
        let is_compared = policy::compares_caches(policy, leg);
        let common = match is_compared {
            true => prefixes.matches(&work.blocks, |worker, blocks| table.mark(worker, blocks)),
            false => 0,
        };
        // The first turn is the first worker's; behind one that has left it is its neighbour's.
        let last = table.place_up_to(self.last[role as usize]);
        let time = table.time(now);
        let (workers, forecast, cache) = (table.rows(), &self.forecast, self.cache);
        let question =
            Question { leg, work, workers, common, last, chance, now: time, forecast, cache };
        let all_suit = match suits {
            Suits::All => true,
            Suits::Readers => table.all_read_alone(),
            Suits::Fitting(_) => false,
        };
        let row = match all_suit && avoid.is_empty() && table.is_trusted(now) {
            true => policy::pick(policy, &question),
            false => self.scratch.pick(policy, question, table, avoid, now, |seat| match suits {
                Suits::All => true,
                Suits::Readers => seat.reads_alone,
                Suits::Fitting(classes) => {
                    classes.iter().any(|&class| self.kinds.fit(class, seat.class))
                }
            }),
        };
        let picked = row.map(|row| {
            let (seat, mut worker) = (table.seats()[row], table.rows()[row]);
            if !is_compared && policy::keeps_in_mind(policy, leg) {
                worker.cached = prefixes.depth(seat.number, &work.blocks);
            }
            picked(policy, &question, &seat, &worker)
        });
        table.unmark();
        picked.ok_or_else(|| self.nobody(role, avoid))
    }

    /// The decode worker of a pair, where it is better off alone.
    fn stays(
        &mut self,
        prefill: &Picked,
        decode: &Picked,
        work: &Work,
        avoid: &Avoid,
        now: Instant,
    ) -> Option<Picked> {
        if self.policies.decode != Policy::Conditional {
            return None;
        }
        let pair = Foretold {
            ttft: prefill.foretold.ttft.saturating_add(decode.foretold.ttft),
            tpot: decode.foretold.tpot,
        };
        let (table, prefixes) =
            (&mut self.tables[Role::Decode as usize], &self.prefixes[Role::Decode as usize]);
        // Of those that have most of the prompt: what they lack is all that this may cost the others there.
        let common = prefixes.matches(&work.blocks, |worker, blocks| {
            if conditional::is_short(work, blocks) {
                table.mark(worker, blocks);
            }
        });
        let (seats, loads, workers) = (table.seats(), table.loads(), table.rows());
        let (leg, forecast, cache, time) =
            (Leg::Whole, &self.forecast, self.cache, table.time(now));
        let question =
            Question { leg, work, workers, common, last: 0, chance: 0, now: time, forecast, cache };
        let may = |&row: &usize| {
            let reads_alone = |seat: &Seat| seat.reads_alone;
            against(&seats[row], &loads[row], avoid, now, &reads_alone) == Some(Against::Nothing)
        };
        let row = match conditional::is_short(work, common) {
            true => slo::pick_whole(&question, (0..workers.len()).filter(may)),
            false => slo::pick_whole(&question, table.marked().iter().copied().filter(may)),
        };
        let alone = row
            .filter(|&row| conditional::is_alone(&question, &workers[row], pair))
            .map(|row| picked(Policy::Conditional, &question, &seats[row], &workers[row]));
        table.unmark();
        alone
    }

    fn check_pair(&self, prefill: &Picked, decode: &Picked, avoid: &Avoid) -> Result<(), NoWorker> {
        self.check(self.policies.prefill, prefill.foretold, Duration::ZERO, avoid)?;
        self.check(self.policies.decode, decode.foretold, prefill.foretold.ttft, avoid)
    }

    /// Whether what is foretold is allowed, where the policy asks. `before` is spent by then. Who was let in once, and
    /// failed elsewhere, is not turned away for being late.
    fn check(
        &self,
        policy: Policy,
        foretold: Foretold,
        before: Duration,
        avoid: &Avoid,
    ) -> Result<(), NoWorker> {
        if !policy.forecasts() || !avoid.is_empty() {
            return Ok(());
        }
        let check = |until, foretold: Duration, flag, limit: Option<Duration>| match limit {
            Some(limit) if foretold > limit => {
                Err(NoWorker::Late { until, foretold, allowed: (flag, limit) })
            }
            _ => Ok(()),
        };
        let ttft = before.saturating_add(foretold.ttft);
        check("to the first token", ttft, "--slo-ttft-ms", self.forecast.ttft)?;
        check("a token", foretold.tpot, "--slo-tpot-ms", self.forecast.tpot)
    }

    fn policy(&self, role: Role) -> Policy {
        match role {
            Role::Prefill => self.policies.prefill,
            Role::Decode => self.policies.decode,
        }
    }

    fn book_pair(&mut self, prefill: Picked, decode: Picked, work: &Work, now: Instant) -> Pair {
        let prefill = self.book(prefill, Leg::Prefill, work, now);
        Pair { prefill, decode: self.book(decode, Leg::Decode, work, now) }
    }

    fn book(&mut self, picked: Picked, leg: Leg, work: &Work, now: Instant) -> Booking {
        let role = role_of(leg);
        let is_kept = policy::keeps_in_mind(self.policy(role), leg);
        let Picked { worker, missing, reading, .. } = picked;
        self.last[role as usize] = Some(worker);
        let place = self.place(worker).expect("who is picked is here");
        self.members[place].bookings += 1;
        let (unread, reading) = match leg {
            Leg::Decode => (0, Duration::ZERO),
            Leg::Prefill | Leg::Whole => (missing, reading),
        };
        let context = match leg {
            Leg::Prefill => 0,
            Leg::Decode | Leg::Whole => work.context(),
        };
        let table = &mut self.tables[role as usize];
        table.change(worker, |load| {
            load.booked += work.sequences;
            load.context += context;
            if unread > 0 {
                load.reads(unread, reading, now);
            }
        });
        if is_kept {
            let held = self.prefixes[role as usize].send(worker, &work.blocks);
            table.set_held(worker, held);
        }
        Booking { worker, weight: work.sequences, unread, reading, context }
    }
}

impl Scratch {
    /// The row that the policy names, of those that suit: one at which nothing fails, rather than one where another
    /// request just did, rather than one where this one did; and never one that will not serve it.
    fn pick(
        &mut self,
        policy: Policy,
        question: Question<'_>,
        table: &Table,
        avoid: &Avoid,
        now: Instant,
        suits: impl Fn(&Seat) -> bool,
    ) -> Option<usize> {
        let Scratch { workers, standing, .. } = self;
        workers.clear();
        workers.extend_from_slice(question.workers);
        standing.clear();
        let rows = table.seats().iter().zip(table.loads());
        standing.extend(rows.map(|(seat, load)| against(seat, load, avoid, now, &suits)));
        [Against::Nothing, Against::Suspect, Against::Failed].into_iter().find_map(|worst| {
            for (worker, standing) in workers.iter_mut().zip(&*standing) {
                worker.usable = standing.is_some_and(|against| against <= worst);
            }
            policy::pick(policy, &Question { workers, ..question })
        })
    }
}

/// What is against a worker; `None` where it cannot be had.
fn against(
    seat: &Seat,
    load: &Load,
    avoid: &Avoid,
    now: Instant,
    suits: &impl Fn(&Seat) -> bool,
) -> Option<Against> {
    if !load.usable || avoid.unwilling.contains(&seat.number) || !suits(seat) {
        return None;
    }
    Some(if avoid.failed.contains(&seat.number) {
        Against::Failed
    } else if load.suspect.is_some_and(|until| now < until) {
        Against::Suspect
    } else {
        Against::Nothing
    })
}

fn picked(policy: Policy, question: &Question<'_>, seat: &Seat, worker: &Candidate) -> Picked {
    let missing = question.missing(worker);
    let foretold =
        if policy.forecasts() { foretell(question, worker) } else { Foretold::default() };
    let reading = question.forecast.reading(missing, question.work.tokens.saturating_sub(missing));
    Picked { worker: seat.number, class: seat.class, missing, reading, foretold }
}

fn role_of(leg: Leg) -> Role {
    match leg {
        Leg::Prefill => Role::Prefill,
        Leg::Decode | Leg::Whole => Role::Decode,
    }
}

fn leg_of(role: Role) -> Leg {
    match role {
        Role::Prefill => Leg::Prefill,
        Role::Decode => Leg::Decode,
    }
}
