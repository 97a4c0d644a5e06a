//! Chooses the workers of a request by policy and reserves the work on them.
//!
//! Invariants: a worker that failed the request comes last, and one that refused it is never
//! chosen. A choice costs one pass over the rows of a role and the policy's own work. Usually all
//! workers suit equally, and the choice uses the rows directly; otherwise it makes a copy.

use super::table::{LoadTable, WorkerRow};
use super::{LoadBalancer, Member, NoWorker, Reservation, ReservedPair};
use crate::config::Policy;
use crate::ids::Leg;
use crate::routing::attempts::AvoidList;
use crate::routing::demand::Demand;
use crate::routing::load::{WorkerLoad, WorkerNumber};
use crate::routing::policy::slo::{self, Prediction, predict};
use crate::routing::policy::{self, Candidate, PolicyInput, PolicyNeeds, Purpose, conditional};
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::rng::mix;
use std::time::{Duration, Instant};

/// Buffers that choices reuse, so that they do not allocate.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// A copy of the rows of a role.
    workers: Vec<Candidate>,
    /// For each row, the objection to it. `None` if it cannot be used.
    standing: Vec<Option<Against>>,
    /// The classes of the decode workers that can be used.
    classes: Vec<usize>,
}

/// An objection to a worker; the smallest is first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Against {
    Nothing,
    /// Another request failed there recently.
    Suspect,
    /// This request failed there.
    Failed,
}

/// The set of workers that suit a leg.
enum Suits<'a> {
    /// All workers.
    All,
    /// Workers that serve requests alone.
    Readers,
    /// Workers that fit one of these classes.
    Fitting(&'a [usize]),
}

/// The chosen worker, with a prediction if the policy makes one.
#[derive(Clone, Copy, Debug)]
struct Picked {
    worker: WorkerNumber,
    class: usize,
    /// Prompt tokens that it must compute, and the predicted time.
    missing: u32,
    reading: Duration,
    predicted: Prediction,
}

impl LoadBalancer {
    /// Chooses the workers of a request and reserves the work on them: a pair, or a decode worker
    /// that serves it alone.
    ///
    /// A decode worker serves alone if no pair is left, or if the chosen prefill worker has failed
    /// the request. The refusal of a prefill worker is no reason. With the policy `conditional`, a
    /// decode worker also serves alone if it lacks only a short rest of the prompt.
    ///
    /// # Errors
    /// A role has no usable worker, no two workers fit, or the chosen pair is predicted to be too
    /// late. Nothing is reserved then.
    pub fn choose_serving(
        &mut self,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<(Option<Reservation>, Reservation), NoWorker> {
        let found = self.find(work, avoid, now);
        let is_wanted = match &found {
            Ok((prefill, _)) => avoid.failed.contains(&prefill.worker),
            Err(_) => {
                !self.has_pair(&avoid.draining) && !is_failpoint_active("no worker reads alone")
            }
        };
        let alone = match &found {
            Ok((prefill, decode)) if !is_wanted => {
                self.choose_alone(prefill, decode, work, avoid, now)
            }
            _ => None,
        };
        let alone = alone.or_else(|| {
            is_wanted
                .then(|| self.pick(Purpose::Whole, work, avoid, now, &Suits::Readers).ok())
                .flatten()
        });
        match (found, alone) {
            (_, Some(alone)) => {
                self.check(self.policies.decode, alone.predicted, Duration::ZERO, avoid)?;
                Ok((None, self.reserve(alone, Purpose::Whole, work, now)))
            }
            (Ok((prefill, decode)), None) => {
                self.check_pair(&prefill, &decode, avoid)?;
                let ReservedPair { prefill, decode } =
                    self.reserve_pair(prefill, decode, work, now);
                Ok((Some(prefill), decode))
            }
            (Err(none), None) => {
                let reads = |decode: &Member| {
                    self.worker_row(decode).local_prefill
                        && !avoid.unwilling.contains(&decode.number)
                };
                Err(none.or_may_come(is_wanted && self.here(Leg::Decode).any(reads)))
            }
        }
    }

    /// Chooses a worker of one role.
    ///
    /// # Errors
    /// No worker of the role is usable.
    pub fn choose_one(
        &mut self,
        role: Leg,
        weight: u32,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<Reservation, NoWorker> {
        let work = Demand::of(weight);
        let leg = leg_of(role);
        let picked = self.pick(leg, &work, avoid, now, &Suits::All)?;
        Ok(self.reserve(picked, leg, &work, now))
    }

    /// Chooses a decode worker for KV that this prefill worker keeps, and reserves the work on it.
    /// Workers that failed the request are not chosen.
    ///
    /// # Errors
    /// No usable worker fits.
    pub fn choose_behind(
        &mut self,
        prefill: WorkerNumber,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<Reservation, NoWorker> {
        let class = self.member(prefill).map(|member| self.class(member));
        let suits = class.as_slice();
        let decode = self.pick(Purpose::Decode, work, avoid, now, &Suits::Fitting(suits))?;
        match avoid.failed.contains(&decode.worker) {
            true => Err(self.nobody(Leg::Decode, avoid)),
            false => Ok(self.reserve(decode, Purpose::Decode, work, now)),
        }
    }

    /// Picks a pair.
    fn find(
        &mut self,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<(Picked, Picked), NoWorker> {
        // A role without any worker is reported first.
        for role in [Leg::Prefill, Leg::Decode] {
            self.is_there(role, avoid)?;
        }
        let found = match self.kinds.all_fit() {
            true => {
                self.pick(Purpose::Prefill, work, avoid, now, &Suits::All).and_then(|prefill| {
                    Ok((prefill, self.pick(Purpose::Decode, work, avoid, now, &Suits::All)?))
                })
            }
            false => self.find_fitting(work, avoid, now),
        };
        if let Ok((prefill, decode)) = &found {
            debug_assert!(self.fit(prefill.class, decode.class), "the workers of a pair fit");
        }
        found.map_err(|_| {
            let willing =
                |role| self.here(role).filter(|member| !avoid.unwilling.contains(&member.number));
            let fits = |one: &Member| {
                let mut decode = willing(Leg::Decode);
                decode.any(|other| self.fit(self.class(one), self.class(other)))
            };
            NoWorker::Fitting { may_come: willing(Leg::Prefill).any(fits) }
        })
    }

    /// Picks a pair if not all workers fit each other.
    fn find_fitting(
        &mut self,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Result<(Picked, Picked), NoWorker> {
        let mut classes = std::mem::take(&mut self.scratch.classes);
        classes.clear();
        for decode in
            self.usable(Leg::Decode).filter(|decode| !avoid.unwilling.contains(&decode.number))
        {
            if !classes.contains(&decode.class) {
                classes.push(decode.class);
            }
        }
        let found = self
            .pick(Purpose::Prefill, work, avoid, now, &Suits::Fitting(&classes))
            .and_then(|prefill| {
                let class = &[prefill.class];
                Ok((prefill, self.pick(Purpose::Decode, work, avoid, now, &Suits::Fitting(class))?))
            });
        self.scratch.classes = classes;
        found
    }

    /// Fails if no worker of a role is usable.
    fn is_there(&self, role: Leg, avoid: &AvoidList) -> Result<(), NoWorker> {
        match self.usable(role).any(|seat| !avoid.unwilling.contains(&seat.number)) {
            true => Ok(()),
            false => Err(self.nobody(role, avoid)),
        }
    }

    fn nobody(&self, role: Leg, avoid: &AvoidList) -> NoWorker {
        let mut here = self.here(role).peekable();
        let may_come =
            here.peek().is_none() || !here.all(|member| avoid.unwilling.contains(&member.number));
        NoWorker::Of { role, may_come }
    }

    /// The policy's choice among the suitable workers of a role. Workers without an objection come
    /// first, then suspect workers, then workers that failed the request. A worker that refused the
    /// request is never chosen.
    fn pick(
        &mut self,
        leg: Purpose,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
        suits: &Suits<'_>,
    ) -> Result<Picked, NoWorker> {
        let role = role_of(leg);
        let policy = self.policy(role);
        self.drawn += 1;
        let chance = mix(self.seed ^ mix(self.drawn));
        let (table, prefixes) = (&mut self.tables[role as usize], &self.prefixes[role as usize]);
        let needs = PolicyNeeds::of(policy);
        let is_compared = needs.compares_caches(leg);
        let common = match is_compared {
            true => prefixes.matches(&work.blocks, |worker, blocks| table.mark(worker, blocks)),
            false => 0,
        };
        // The first choice starts at the first worker. If the last chosen worker has left, its
        // neighbour counts as the last choice.
        let last = table.place_up_to(self.last[role as usize]);
        let time = table.time(now);
        let (workers, forecast, cache) = (table.candidates(), &self.forecast, self.cache);
        let question = PolicyInput {
            leg,
            demand: work,
            workers,
            common,
            last,
            chance,
            now: time,
            forecast,
            cache,
        };
        let all_suit = match suits {
            Suits::All => true,
            Suits::Readers => table.all_prefill_locally(),
            Suits::Fitting(_) => false,
        };
        let row = match all_suit && avoid.is_empty() && table.is_trusted(now) {
            true => policy::pick(policy, &question),
            false => self.scratch.pick(policy, question, table, avoid, now, |seat| match suits {
                Suits::All => true,
                Suits::Readers => seat.local_prefill,
                Suits::Fitting(classes) => {
                    classes.iter().any(|&class| self.kinds.fit(class, seat.class))
                }
            }),
        };
        let picked = row.map(|row| {
            let (seat, mut worker) = (table.workers()[row], table.candidates()[row]);
            debug_assert!(worker.usable, "a chosen worker is usable");
            debug_assert!(
                !avoid.unwilling.contains(&seat.number),
                "a worker that refused the request is not chosen"
            );
            if !is_compared && needs.records_prompts(leg) {
                worker.cached = prefixes.depth(seat.number, &work.blocks);
            }
            picked(policy, &question, &seat, &worker)
        });
        table.unmark();
        picked.ok_or_else(|| self.nobody(role, avoid))
    }

    /// Picks a decode worker that serves the request alone, if that is better than the pair.
    fn choose_alone(
        &mut self,
        prefill: &Picked,
        decode: &Picked,
        work: &Demand,
        avoid: &AvoidList,
        now: Instant,
    ) -> Option<Picked> {
        if self.policies.decode != Policy::Conditional {
            return None;
        }
        let pair = Prediction {
            ttft: prefill.predicted.ttft.saturating_add(decode.predicted.ttft),
            tpot: decode.predicted.tpot,
        };
        let (table, prefixes) =
            (&mut self.tables[Leg::Decode as usize], &self.prefixes[Leg::Decode as usize]);
        // Only workers that have most of the prompt, because the short rest bounds the delay of
        // their other sequences.
        let common = prefixes.matches(&work.blocks, |worker, blocks| {
            if conditional::is_short(work, blocks) {
                table.mark(worker, blocks);
            }
        });
        let (members, loads, workers) = (table.workers(), table.loads(), table.candidates());
        let (leg, forecast, cache, time) =
            (Purpose::Whole, &self.forecast, self.cache, table.time(now));
        let question = PolicyInput {
            leg,
            demand: work,
            workers,
            common,
            last: 0,
            chance: 0,
            now: time,
            forecast,
            cache,
        };
        let may = |&row: &usize| {
            let local_prefill = |seat: &WorkerRow| seat.local_prefill;
            against(&members[row], &loads[row], avoid, now, &local_prefill)
                == Some(Against::Nothing)
        };
        let row = match conditional::is_short(work, common) {
            true => slo::pick_whole(&question, (0..workers.len()).filter(may)),
            false => slo::pick_whole(&question, table.marked().iter().copied().filter(may)),
        };
        let alone = row
            .filter(|&row| conditional::is_alone(&question, &workers[row], pair))
            .map(|row| picked(Policy::Conditional, &question, &members[row], &workers[row]));
        table.unmark();
        alone
    }

    fn check_pair(
        &self,
        prefill: &Picked,
        decode: &Picked,
        avoid: &AvoidList,
    ) -> Result<(), NoWorker> {
        self.check(self.policies.prefill, prefill.predicted, Duration::ZERO, avoid)?;
        self.check(self.policies.decode, decode.predicted, prefill.predicted.ttft, avoid)
    }

    /// Checks the prediction against the limits, if the policy predicts. The time `before` has
    /// already passed. A request that failed at another worker was admitted before, so it is not
    /// refused as too late.
    fn check(
        &self,
        policy: Policy,
        predicted: Prediction,
        before: Duration,
        avoid: &AvoidList,
    ) -> Result<(), NoWorker> {
        if !PolicyNeeds::of(policy).forecast || !avoid.is_empty() {
            return Ok(());
        }
        let check = |until, predicted: Duration, flag, limit: Option<Duration>| match limit {
            Some(limit) if predicted > limit => {
                Err(NoWorker::Late { until, predicted, allowed: (flag, limit) })
            }
            _ => Ok(()),
        };
        let ttft = before.saturating_add(predicted.ttft);
        check("to the first token", ttft, "--slo-ttft-ms", self.forecast.ttft)?;
        check("a token", predicted.tpot, "--slo-tpot-ms", self.forecast.tpot)
    }

    fn policy(&self, role: Leg) -> Policy {
        match role {
            Leg::Prefill => self.policies.prefill,
            Leg::Decode => self.policies.decode,
        }
    }

    fn reserve_pair(
        &mut self,
        prefill: Picked,
        decode: Picked,
        work: &Demand,
        now: Instant,
    ) -> ReservedPair {
        let prefill = self.reserve(prefill, Purpose::Prefill, work, now);
        ReservedPair { prefill, decode: self.reserve(decode, Purpose::Decode, work, now) }
    }

    fn reserve(
        &mut self,
        picked: Picked,
        leg: Purpose,
        work: &Demand,
        now: Instant,
    ) -> Reservation {
        let role = role_of(leg);
        let is_kept = PolicyNeeds::of(self.policy(role)).records_prompts(leg);
        let Picked { worker, missing, reading, .. } = picked;
        self.last[role as usize] = Some(worker);
        let place = self.place(worker).expect("a picked worker is present");
        debug_assert!(!self.members[place].is_leaving, "a worker that leaves gets no new work");
        self.members[place].reservations += 1;
        let (uncomputed, reading) = match leg {
            Purpose::Decode => (0, Duration::ZERO),
            Purpose::Prefill | Purpose::Whole => (missing, reading),
        };
        let context = match leg {
            Purpose::Prefill => 0,
            Purpose::Decode | Purpose::Whole => work.context(),
        };
        let table = &mut self.tables[role as usize];
        table.change(worker, |load| {
            load.reserved += work.sequences;
            load.context += context;
            if uncomputed > 0 {
                load.add_prefill(uncomputed, reading, now);
            }
        });
        if is_kept {
            let held = self.prefixes[role as usize].send(worker, &work.blocks);
            table.set_held(worker, held);
        }
        Reservation { worker, weight: work.sequences, uncomputed, reading, context }
    }
}

impl Scratch {
    /// The policy's choice among the suitable rows. Rows without an objection come first, then
    /// suspect workers, then workers that failed the request. A worker that refused the request is
    /// never chosen.
    fn pick(
        &mut self,
        policy: Policy,
        question: PolicyInput<'_>,
        table: &LoadTable,
        avoid: &AvoidList,
        now: Instant,
        suits: impl Fn(&WorkerRow) -> bool,
    ) -> Option<usize> {
        let Scratch { workers, standing, .. } = self;
        workers.clear();
        workers.extend_from_slice(question.workers);
        standing.clear();
        let rows = table.workers().iter().zip(table.loads());
        standing.extend(rows.map(|(seat, load)| against(seat, load, avoid, now, &suits)));
        debug_assert_eq!(standing.len(), workers.len(), "each row has a standing");
        [Against::Nothing, Against::Suspect, Against::Failed].into_iter().find_map(|worst| {
            for (worker, standing) in workers.iter_mut().zip(&*standing) {
                worker.usable = standing.is_some_and(|against| against <= worst);
            }
            policy::pick(policy, &PolicyInput { workers, ..question })
        })
    }
}

/// The objection to a worker. `None` if it cannot be used.
fn against(
    seat: &WorkerRow,
    load: &WorkerLoad,
    avoid: &AvoidList,
    now: Instant,
    suits: &impl Fn(&WorkerRow) -> bool,
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

fn picked(
    policy: Policy,
    question: &PolicyInput<'_>,
    seat: &WorkerRow,
    worker: &Candidate,
) -> Picked {
    let missing = question.missing(worker);
    let predicted = match PolicyNeeds::of(policy).forecast {
        true => predict(question, worker),
        false => Prediction::default(),
    };
    let reading =
        question.forecast.reading(missing, question.demand.tokens.saturating_sub(missing));
    Picked { worker: seat.number, class: seat.class, missing, reading, predicted }
}

fn role_of(leg: Purpose) -> Leg {
    match leg {
        Purpose::Prefill => Leg::Prefill,
        Purpose::Decode | Purpose::Whole => Leg::Decode,
    }
}

fn leg_of(role: Leg) -> Purpose {
    match role {
        Leg::Prefill => Purpose::Prefill,
        Leg::Decode => Purpose::Decode,
    }
}
