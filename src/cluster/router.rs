//! The router's decisions: which pair serves a request, and which workers are asked how they are.
//!
//! Owns: which workers there are, their loads and health. Invariants: a worker's load is the sum of its open
//! bookings; one that leaves is chosen and probed no more, and is known until its last booking is released;
//! its number never becomes another's.

use super::breaker::Breaker;
use super::flight::Avoid;
use super::health::{Change, Health};
use super::kinds::{Difference, Kind, KindDigest, Kinds};
use super::loads::{Load, WorkerNumber};
use super::policy;
use crate::config::resolved::{BreakerTerms, HealthTerms, Policies, Policy};
use crate::stdx::planted::is_planted;
use std::fmt;
use std::time::Instant;

/// What a worker does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl Role {
    /// The role of this name.
    pub fn named(name: &str) -> Option<Role> {
        [Role::Prefill, Role::Decode].into_iter().find(|role| role.to_string() == name)
    }

    /// That of the worker at the other end of a hand-off.
    pub fn other(self) -> Role {
        match self {
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        })
    }
}

/// Work that is charged to a worker until it is given back to [`Router::release`].
#[must_use = "it stays charged until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Booking {
    worker: WorkerNumber,
    weight: u32,
}

impl Booking {
    /// The worker.
    pub fn worker(&self) -> WorkerNumber {
        self.worker
    }
}

/// The workers that serve a request.
#[derive(PartialEq, Eq, Debug)]
pub struct Pair {
    /// Reads its prompt.
    pub prefill: Booking,
    /// Generates its answer.
    pub decode: Booking,
}

/// Why nobody is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWorker {
    /// No worker of this role can be used.
    Of {
        /// Which.
        role: Role,
        /// Whether one that cannot be reached now would do.
        may_come: bool,
    },
    /// No two that can be used fit each other.
    Fitting {
        /// Whether one that cannot be reached now would do.
        may_come: bool,
    },
}

impl NoWorker {
    /// Whether somebody may do who cannot be reached now.
    pub fn may_come(self) -> bool {
        match self {
            NoWorker::Of { may_come, .. } | NoWorker::Fitting { may_come } => may_come,
        }
    }
}

impl NoWorker {
    /// The same, where somebody else may come.
    fn or_may_come(self, other: bool) -> NoWorker {
        match self {
            NoWorker::Of { role, may_come } => NoWorker::Of { role, may_come: may_come || other },
            NoWorker::Fitting { may_come } => NoWorker::Fitting { may_come: may_come || other },
        }
    }
}

impl fmt::Display for NoWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoWorker::Of { role, .. } => write!(f, "no {role} worker can be reached"),
            NoWorker::Fitting { .. } => {
                f.write_str("no decode worker that can be reached fits a prefill worker that can be reached")
            }
        }
    }
}

impl std::error::Error for NoWorker {}

/// A worker that there is, or that still has bookings.
#[derive(Debug)]
struct Member {
    number: WorkerNumber,
    role: Role,
    /// What it tells of itself in an entry and when asked; who tells nothing may fit anybody.
    kind: Kind,
    /// The place of that among all that are told.
    class: usize,
    load: Load,
    health: Health,
    breaker: Breaker,
    /// Open, those of no weight counted.
    bookings: u32,
    /// Known for its bookings alone.
    is_leaving: bool,
    /// A decode worker that reads prompts, too, where no prefill worker is left.
    reads_alone: bool,
}

/// All that is decided without a socket.
#[derive(Debug)]
pub struct Router {
    policies: Policies,
    health: HealthTerms,
    breaker: BreakerTerms,
    /// By number.
    members: Vec<Member>,
    kinds: Kinds,
    /// The next worker's.
    next: usize,
    /// Chosen last, by role.
    last: [Option<WorkerNumber>; 2],
}

impl Router {
    /// Over no workers yet.
    pub fn new(policies: impl Into<Policies>) -> Router {
        Router {
            policies: policies.into(),
            health: HealthTerms::default(),
            breaker: BreakerTerms::default(),
            members: Vec::new(),
            kinds: Kinds::default(),
            next: 0,
            last: [None; 2],
        }
    }

    /// On other terms than the usual ones.
    pub fn on(self, health: HealthTerms, breaker: BreakerTerms) -> Router {
        Router { health, breaker, ..self }
    }

    /// A worker joins; it is not usable before a probe of it has succeeded.
    pub fn join(&mut self, role: Role, now: Instant) -> WorkerNumber {
        let number = WorkerNumber(self.next);
        self.next += 1;
        let (load, health) = (Load::default(), Health::new(self.health, now));
        self.members.push(Member {
            number,
            role,
            kind: Kind::default(),
            class: 0,
            load,
            health,
            breaker: Breaker::new(self.breaker),
            bookings: 0,
            is_leaving: false,
            reads_alone: false,
        });
        self.sort();
        number
    }

    /// A worker has entered itself as this.
    pub fn entered(&mut self, worker: WorkerNumber, digest: KindDigest) {
        if let Some(place) = self.place(worker) {
            self.members[place].kind = Kind::entered(digest);
            self.sort();
        }
    }

    /// A worker has told what it is; what keeps it from the first of the other role that it does not fit.
    pub fn introduced(&mut self, worker: WorkerNumber, kind: Kind) -> Option<(WorkerNumber, Difference)> {
        let place = self.place(worker)?;
        let kind = kind.with_entry_of(&self.members[place].kind);
        if self.members[place].kind != kind {
            self.members[place].kind = kind;
            self.sort();
        }
        let one = &self.members[place];
        let others = self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        others.into_iter().find_map(|other| Some((other.number, one.kind.difference(&other.kind)?)))
    }

    /// What keeps a worker from each of the other role that is here, by the first of them. `None` where it fits one, or
    /// none is here.
    pub fn misfit(&self, worker: WorkerNumber) -> Option<(WorkerNumber, Difference)> {
        let one = self.member(worker)?;
        let mut others = self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        let first = others.next()?;
        let fits = |other: &Member| self.fit(one, other);
        if fits(first) || others.any(fits) {
            return None;
        }
        Some((first.number, one.kind.difference(&first.kind)?))
    }

    /// A worker has told whether it reads prompts where no prefill worker is left.
    pub fn set_reads_alone(&mut self, worker: WorkerNumber, reads_alone: bool) {
        if let Some(place) = self.place(worker) {
            self.members[place].reads_alone = reads_alone && self.members[place].role == Role::Decode;
        }
    }

    /// What workers tell is compared when it is told, and not when a pair is chosen.
    fn sort(&mut self) {
        let (kinds, classes) = Kinds::of(self.members.iter().map(|member| &member.kind));
        self.kinds = kinds;
        self.members.iter_mut().zip(classes).for_each(|(member, class)| member.class = class);
    }

    fn fit(&self, one: &Member, other: &Member) -> bool {
        self.kinds.fit(one.class, other.class)
    }

    /// A worker leaves: what is booked on it runs on.
    pub fn leave(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        (member.is_leaving, member.load.usable) = (true, false);
        if member.bookings == 0 {
            self.members.remove(place);
        }
    }

    /// Whether a worker is here, or has bookings left.
    pub fn knows(&self, worker: WorkerNumber) -> bool {
        self.place(worker).is_some()
    }

    /// Whether a worker is here and not about to leave.
    pub fn has(&self, worker: WorkerNumber) -> bool {
        self.member(worker).is_some_and(|member| !member.is_leaving)
    }

    /// Chooses a pair for `weight` sequences and books them on both.
    ///
    /// # Errors
    /// One of the roles has no usable worker, or none fits; nothing is booked then.
    pub fn choose(&mut self, weight: u32, avoid: &Avoid, now: Instant) -> Result<Pair, NoWorker> {
        // Who is missing altogether is named first.
        for role in [Role::Prefill, Role::Decode] {
            self.pick(role, avoid, now, |_| true)?;
        }
        // Once: as a rule each prefill worker fits the first of them.
        let decode = self.usable(Role::Decode).filter(|decode| !avoid.unwilling.contains(&decode.number));
        let decode: Vec<&Member> = decode.collect();
        let can_pair = |prefill: &Member| decode.iter().any(|decode| self.fit(prefill, decode));
        let unfit = |_| {
            let willing = |role| self.here(role).filter(|member| !avoid.unwilling.contains(&member.number));
            let fits = |one: &Member| willing(Role::Decode).any(|other| self.fit(one, other));
            NoWorker::Fitting { may_come: willing(Role::Prefill).any(fits) }
        };
        let prefill = self.pick(Role::Prefill, avoid, now, can_pair).map_err(unfit)?;
        let fits = |decode: &Member| self.fit(&self.members[prefill], decode);
        let decode = self.pick(Role::Decode, avoid, now, fits).map_err(unfit)?;
        Ok(Pair { prefill: self.book(prefill, weight), decode: self.book(decode, weight) })
    }

    /// Chooses who serves `weight` sequences: a pair, or, where no pair is left, or none but one whose prefill worker has
    /// failed the request, a decode worker that reads prompts itself. A prefill worker that is there and says no is no
    /// reason to load decode with its work.
    ///
    /// # Errors
    /// As [`Router::choose`].
    pub fn choose_serving(
        &mut self,
        weight: u32,
        avoid: &Avoid,
        now: Instant,
    ) -> Result<(Option<Booking>, Booking), NoWorker> {
        let pair = self.choose(weight, avoid, now);
        let is_wanted = match &pair {
            Ok(pair) => avoid.failed.contains(&pair.prefill.worker),
            Err(_) => !self.has_pair() && !is_planted("nobody reads alone"),
        };
        let alone = is_wanted.then(|| self.pick(Role::Decode, avoid, now, |decode| decode.reads_alone));
        match (pair, alone) {
            (pair, Some(Ok(place))) => {
                if let Ok(Pair { prefill, decode }) = pair {
                    self.release(prefill);
                    self.release(decode);
                }
                Ok((None, self.book(place, weight)))
            }
            (Ok(Pair { prefill, decode }), _) => Ok((Some(prefill), decode)),
            (Err(none), _) => {
                let reads = |decode: &Member| decode.reads_alone && !avoid.unwilling.contains(&decode.number);
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
        let place = self.pick(role, avoid, now, |_| true)?;
        Ok(self.book(place, weight))
    }

    /// A booking of no weight, for what is asked of this very worker.
    pub fn visit(&mut self, worker: WorkerNumber) -> Booking {
        if let Some(place) = self.place(worker) {
            self.members[place].bookings += 1;
        }
        Booking { worker, weight: 0 }
    }

    /// A usable worker, whatever its role: of prefill workers, where there are any, the one that is here longest; one
    /// that has failed the request only where there is no other.
    ///
    /// # Errors
    /// None is usable.
    pub fn first(&self, avoid: &Avoid) -> Result<WorkerNumber, NoWorker> {
        let usable = self.members.iter().filter(|member| member.load.usable);
        let first =
            usable.min_by_key(|member| (avoid.failed.contains(&member.number), member.role, member.number));
        first.map(|member| member.number).ok_or(NoWorker::Of { role: Role::Prefill, may_come: true })
    }

    /// Ends a booking.
    pub fn release(&mut self, booking: Booking) {
        let Some(place) = self.place(booking.worker) else { return };
        let member = &mut self.members[place];
        member.load.booked -= booking.weight;
        member.bookings -= 1;
        if member.is_leaving && member.bookings == 0 {
            self.members.remove(place);
        }
    }

    /// The next worker that is to be probed now; what comes of it is told by [`Router::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> Option<WorkerNumber> {
        // Clients wait for some of those that leave.
        let mut asked = self.members.iter_mut().filter(|member| !member.is_leaving || member.load.booked > 0);
        asked.find_map(|member| member.health.begin_probe(now).then_some(member.number))
    }

    /// A worker's next probe is due now: there is reason to think that it has changed.
    pub fn hasten_probe(&mut self, worker: WorkerNumber, now: Instant) {
        if let Some(place) = self.place(worker) {
            self.members[place].health.hasten(now);
        }
    }

    /// A probe has ended.
    pub fn probed(&mut self, worker: WorkerNumber, is_well: bool, now: Instant) -> Option<Change> {
        self.turn(worker, |health| health.probed(is_well, now))
    }

    /// A probe has ended: the worker is there, and takes nothing new.
    pub fn declined(&mut self, worker: WorkerNumber, now: Instant) -> Option<Change> {
        self.turn(worker, |health| health.declined(now))
    }

    /// Whether a worker has failed as many probes in a row as make it down.
    pub fn is_silent(&self, worker: WorkerNumber) -> bool {
        !is_planted("silent worker is waited for")
            && self.member(worker).is_some_and(|member| member.health.is_silent())
    }

    /// A worker did not take a connection.
    pub fn refused(&mut self, worker: WorkerNumber) -> Option<Change> {
        self.turn(worker, Health::refused)
    }

    /// The next worker that is given up now: it was never well for as long as it may take.
    pub fn give_up(&mut self, now: Instant) -> Option<WorkerNumber> {
        let late =
            self.members.iter_mut().find_map(|member| member.health.give_up(now).then_some(member.number));
        late.filter(|&worker| self.has(worker))
    }

    /// A request failed at this worker, or because of it.
    pub fn accuse(&mut self, worker: WorkerNumber, now: Instant) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if let Some(until) = member.breaker.failed(now) {
            member.load.suspect = Some(until);
        }
    }

    /// A request went well there.
    pub fn acquit(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        if member.breaker.answered() {
            member.load.suspect = None;
        }
    }

    /// Whether there is a usable pair, or a usable worker that does without.
    pub fn is_ready(&self) -> bool {
        self.has_pair() || self.usable(Role::Decode).any(|decode| decode.reads_alone)
    }

    fn has_pair(&self) -> bool {
        let mut prefill = self.usable(Role::Prefill);
        prefill.any(|prefill| self.usable(Role::Decode).any(|decode| self.fit(prefill, decode)))
    }

    /// The workers that are here, by number.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerNumber, Role, Load)> {
        let here = self.members.iter().filter(|member| !member.is_leaving);
        here.map(|member| (member.number, member.role, member.load))
    }

    /// A worker's load, while it is known.
    pub fn load(&self, worker: WorkerNumber) -> Option<Load> {
        self.member(worker).map(|member| member.load)
    }

    /// What a worker does, while it is known.
    pub fn role(&self, worker: WorkerNumber) -> Option<Role> {
        self.member(worker).map(|member| member.role)
    }

    fn place(&self, worker: WorkerNumber) -> Option<usize> {
        self.members.binary_search_by_key(&worker, |member| member.number).ok()
    }

    fn member(&self, worker: WorkerNumber) -> Option<&Member> {
        self.place(worker).map(|place| &self.members[place])
    }

    fn here(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.role == role && !member.is_leaving)
    }

    fn usable(&self, role: Role) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(move |member| member.role == role && member.load.usable)
    }

    /// The place among all members of the one that the policy names, of those of a role that suit: one at which nothing
    /// fails, rather than one where another request just did, rather than one where this one did; and never one that
    /// will not serve it.
    fn pick(
        &self,
        role: Role,
        avoid: &Avoid,
        now: Instant,
        suits: impl Fn(&Member) -> bool,
    ) -> Result<usize, NoWorker> {
        let here = |(_, member): &(usize, &Member)| member.role == role && !member.is_leaving;
        let places: Vec<usize> =
            self.members.iter().enumerate().filter(here).map(|(place, _)| place).collect();
        // The first turn is the first worker's; behind one that has left it is its neighbour's.
        let last = self.last[role as usize];
        let passed = places.iter().filter(|&&place| Some(self.members[place].number) <= last).count();
        let last = passed.checked_sub(1).unwrap_or(places.len().saturating_sub(1));
        let is_unwilling = |member: &Member| avoid.unwilling.contains(&member.number);
        let has_failed = |member: &Member| avoid.failed.contains(&member.number);
        let is_suspect = |member: &Member| member.load.suspect.is_some_and(|until| now < until);
        let among = |shunned: &dyn Fn(&Member) -> bool| {
            let load = |&place: &usize| {
                let member = &self.members[place];
                let usable = member.load.usable && suits(member) && !is_unwilling(member) && !shunned(member);
                Load { usable, ..member.load }
            };
            policy::pick(self.policy(role), &places.iter().map(load).collect::<Vec<_>>(), last)
        };
        let may_come =
            || !places.iter().all(|&place| is_unwilling(&self.members[place])) || places.is_empty();
        among(&|member| has_failed(member) || is_suspect(member))
            .or_else(|| among(&has_failed))
            .or_else(|| among(&|_| false))
            .map(|picked| places[picked])
            .ok_or_else(|| NoWorker::Of { role, may_come: may_come() })
    }

    fn policy(&self, role: Role) -> Policy {
        match role {
            Role::Prefill => self.policies.prefill,
            Role::Decode => self.policies.decode,
        }
    }

    fn book(&mut self, place: usize, weight: u32) -> Booking {
        let member = &mut self.members[place];
        self.last[member.role as usize] = Some(member.number);
        member.load.booked += weight;
        member.bookings += 1;
        Booking { worker: member.number, weight }
    }

    fn turn(
        &mut self,
        worker: WorkerNumber,
        step: impl FnOnce(&mut Health) -> Option<Change>,
    ) -> Option<Change> {
        let place = self.place(worker)?;
        let member = &mut self.members[place];
        let change = step(&mut member.health);
        if member.is_leaving {
            return None;
        }
        member.load.usable = member.health.is_up();
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ROUTER_SUSPECT_TIME;

    fn router(policy: impl Into<Policies>, prefill: usize, decode: usize) -> Router {
        let mut router = Router::new(policy);
        for (role, count) in [(Role::Prefill, prefill), (Role::Decode, decode)] {
            for _ in 0..count {
                join(&mut router, role);
            }
        }
        router
    }

    /// A worker that is up.
    fn join(router: &mut Router, role: Role) -> WorkerNumber {
        let now = Instant::now();
        let worker = router.join(role, now);
        assert_eq!(router.probed(worker, true, now), Some(Change::Up));
        worker
    }

    fn numbers(pair: &Pair) -> (usize, usize) {
        (pair.prefill.worker().0, pair.decode.worker().0)
    }

    fn booked(router: &Router) -> Vec<u32> {
        router.workers().map(|(_, _, load)| load.booked).collect()
    }

    #[test]
    fn decode_reads_alone_where_no_pair_is_left_or_its_prefill_worker_has_failed() {
        let now = Instant::now();
        let mut router = router(Policy::RoundRobin, 1, 2);
        let [prefill, first, second] = [0, 1, 2].map(WorkerNumber);
        router.set_reads_alone(second, true);
        router.set_reads_alone(prefill, true);
        let serving = |router: &mut Router, avoid: &Avoid| {
            let (prefill, decode) = router.choose_serving(3, avoid, now)?;
            let chosen = (prefill.as_ref().map(Booking::worker), decode.worker());
            prefill.into_iter().chain([decode]).for_each(|booking| router.release(booking));
            Ok::<_, NoWorker>(chosen)
        };
        let none = Avoid::default();
        assert_eq!(serving(&mut router, &none), Ok((Some(prefill), first)));
        let failed = Avoid { failed: vec![prefill], ..Avoid::default() };
        assert_eq!(serving(&mut router, &failed), Ok((None, second)));
        // It is there and said no, which is its client's answer.
        let unwilling = Avoid { unwilling: vec![prefill], ..Avoid::default() };
        let no = NoWorker::Of { role: Role::Prefill, may_come: false };
        assert_eq!(serving(&mut router, &unwilling), Err(no));
        assert!(router.is_ready());
        assert_eq!(router.refused(prefill), Some(Change::Down));
        assert_eq!(serving(&mut router, &unwilling), Ok((None, second)));
        assert!(router.is_ready());
        assert_eq!(router.refused(second), Some(Change::Down));
        assert!(!router.is_ready());
        assert_eq!(
            serving(&mut router, &unwilling).map_err(NoWorker::may_come),
            Err(true),
            "it may come back"
        );
        assert_eq!(booked(&router), [0, 0, 0]);
    }

    #[test]
    fn legs_are_chosen_apart_and_numbered_together() {
        let mut router = router(Policy::RoundRobin, 2, 3);
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(0, 2), (1, 3), (0, 4), (1, 2)]);
        assert_eq!(
            (router.role(WorkerNumber(1)), router.role(WorkerNumber(2))),
            (Some(Role::Prefill), Some(Role::Decode))
        );
    }

    #[test]
    fn a_burst_spreads_by_what_is_booked_and_a_release_makes_room() {
        let mut router = router(Policy::LeastLoaded, 1, 2);
        let heavy = router.choose(5, &Avoid::default(), Instant::now()).unwrap();
        let light: Vec<Pair> =
            (0..3).map(|_| router.choose(1, &Avoid::default(), Instant::now()).unwrap()).collect();
        assert!(light.iter().all(|pair| numbers(pair) == (0, 2)));
        router.release(heavy.decode);
        assert_eq!(numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()), (0, 1));
        router.release(heavy.prefill);
        for pair in light {
            router.release(pair.prefill);
            router.release(pair.decode);
        }
        assert_eq!(booked(&router), [1, 1, 0]);
    }

    #[test]
    fn nothing_is_booked_without_a_pair() {
        let mut router = router(Policy::LeastLoaded, 1, 1);
        assert!(router.is_ready());
        assert_eq!(router.refused(WorkerNumber(1)), Some(Change::Down));
        assert!(!router.is_ready());
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Of { role: Role::Decode, may_come: true })
        );
        assert_eq!(booked(&router), [0, 0]);
        assert_eq!(router.first(&Avoid::default()), Ok(WorkerNumber(0)));
        router.refused(WorkerNumber(0));
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Of { role: Role::Prefill, may_come: true })
        );
        assert_eq!(
            router.first(&Avoid::default()),
            Err(NoWorker::Of { role: Role::Prefill, may_come: true })
        );
    }

    #[test]
    fn every_worker_is_probed_once_and_unusable_until_then() {
        let now = Instant::now();
        let mut router = Router::new(Policy::RoundRobin);
        assert!(!router.is_ready() && router.begin_probe(now).is_none());
        router.join(Role::Prefill, now);
        router.join(Role::Decode, now);
        assert!(!router.is_ready());
        let mut probed =
            || std::iter::from_fn(|| router.begin_probe(now)).map(|worker| worker.0).collect::<Vec<_>>();
        assert_eq!(probed(), [0, 1]);
        assert_eq!(probed(), [0_usize; 0]);
    }

    #[test]
    fn who_leaves_is_not_chosen_again_and_is_known_to_its_last_booking() {
        let (mut router, now) = (router(Policy::RoundRobin, 1, 2), Instant::now());
        let running = router.choose(2, &Avoid::default(), Instant::now()).unwrap();
        assert_eq!(numbers(&running), (0, 1));
        router.leave(WorkerNumber(1));
        assert!(router.knows(WorkerNumber(1)) && !router.has(WorkerNumber(1)));
        assert_eq!(router.load(WorkerNumber(1)), Some(Load { usable: false, booked: 2, suspect: None }));
        for _ in 0..3 {
            assert_eq!(numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()), (0, 2));
        }
        assert_eq!(router.probed(WorkerNumber(1), true, now), None, "it does not come up again");
        assert_eq!(
            router.choose_one(Role::Decode, 0, &Avoid::default(), Instant::now()).unwrap().worker(),
            WorkerNumber(2)
        );
        router.release(running.decode);
        assert!(!router.knows(WorkerNumber(1)));
        let visit = router.visit(WorkerNumber(0));
        router.leave(WorkerNumber(2));
        router.leave(WorkerNumber(0));
        router.release(visit);
        assert!(router.knows(WorkerNumber(0)), "sequences are booked on it");
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Of { role: Role::Prefill, may_come: true })
        );
    }

    #[test]
    fn a_number_never_becomes_anothers_and_turns_go_on_where_one_is_missing() {
        let mut router = router(Policy::RoundRobin, 1, 3);
        let chosen =
            |router: &mut Router| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()).1;
        assert_eq!((chosen(&mut router), chosen(&mut router)), (1, 2));
        router.leave(WorkerNumber(2));
        assert_eq!(join(&mut router, Role::Decode), WorkerNumber(4));
        assert_eq!(std::array::from_fn(|_| chosen(&mut router)), [3, 4, 1, 3]);
        for number in 1..=4 {
            router.leave(WorkerNumber(number));
        }
        assert_eq!(join(&mut router, Role::Decode), WorkerNumber(5));
        assert_eq!(chosen(&mut router), 5);
    }

    #[test]
    fn each_role_has_a_policy_of_its_own() {
        let mut router = router(Policies { prefill: Policy::RoundRobin, decode: Policy::LeastLoaded }, 2, 2);
        // What the first of each role has does not end.
        let first = router.choose(1, &Avoid::default(), Instant::now()).unwrap();
        let chosen: Vec<_> = (0..3)
            .map(|_| {
                let pair = router.choose(1, &Avoid::default(), Instant::now()).unwrap();
                let chosen = numbers(&pair);
                router.release(pair.prefill);
                router.release(pair.decode);
                chosen
            })
            .collect();
        assert_eq!((numbers(&first), &chosen[..]), ((0, 2), &[(1, 3), (0, 3), (1, 3)][..]));
    }

    #[test]
    fn misfits_are_never_paired_and_who_says_nothing_may_fit() {
        let mut router = router(Policy::RoundRobin, 2, 2);
        let (a, b) = (KindDigest([1; 32]), KindDigest([2; 32]));
        router.entered(WorkerNumber(0), a);
        router.entered(WorkerNumber(2), a);
        router.entered(WorkerNumber(3), b);
        for _ in 0..4 {
            let (prefill, decode) = numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap());
            assert!((prefill, decode) != (0, 3));
        }
        router.entered(WorkerNumber(1), b);
        let mut pairs: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        pairs.sort_unstable();
        assert_eq!(pairs, [(0, 2), (0, 2), (1, 3), (1, 3)]);
        router.refused(WorkerNumber(2));
        assert_eq!(
            numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()),
            (1, 3),
            "the other has nobody left"
        );
        router.refused(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Fitting { may_come: true })
        );
        assert!(!router.is_ready());
    }

    #[test]
    fn who_failed_a_request_is_asked_last_and_who_refused_it_never() {
        let mut router = router(Policy::RoundRobin, 1, 3);
        let mut avoid =
            Avoid { failed: vec![WorkerNumber(0), WorkerNumber(1)], unwilling: vec![WorkerNumber(2)] };
        for _ in 0..3 {
            assert_eq!(
                numbers(&router.choose(1, &avoid, Instant::now()).unwrap()),
                (0, 3),
                "there is one prefill worker"
            );
        }
        avoid.unwilling.push(WorkerNumber(3));
        assert_eq!(numbers(&router.choose(1, &avoid, Instant::now()).unwrap()), (0, 1));
        router.refused(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &avoid, Instant::now()),
            Err(NoWorker::Of { role: Role::Decode, may_come: true })
        );
        avoid.unwilling.push(WorkerNumber(1));
        assert_eq!(
            router.choose(1, &avoid, Instant::now()),
            Err(NoWorker::Of { role: Role::Decode, may_come: false })
        );
    }

    #[test]
    fn who_fails_at_once_does_not_draw_all_requests() {
        let mut router = router(Policy::LeastLoaded, 1, 2);
        let now = Instant::now();
        let chosen = |router: &mut Router, now| {
            let pair = router.choose(1, &Avoid::default(), now).unwrap();
            let decode = pair.decode.worker();
            router.release(pair.prefill);
            if decode == WorkerNumber(1) {
                // It fails.
                router.release(pair.decode);
                router.accuse(decode, now);
            }
            decode.0
        };
        let first: Vec<usize> = (0..6).map(|_| chosen(&mut router, now)).collect();
        assert_eq!(first, [1, 2, 2, 2, 2, 2]);
        let later = now + ROUTER_SUSPECT_TIME;
        assert_eq!((chosen(&mut router, later), chosen(&mut router, later)), (1, 2), "tried once more");
        router.acquit(WorkerNumber(1));
        assert_eq!(chosen(&mut router, later), 1);
    }

    /// A change that rolls through: two of the old kind, then one of each, then the new alone.
    #[test]
    fn those_that_do_not_fit_are_never_paired() {
        let kind = |weights: &str| Kind::told(&serde_json::json!({ "weights": weights }));
        let mut router = router(Policy::RoundRobin, 2, 2);
        let [old, new, other_new, other_old] = [0, 1, 2, 3].map(WorkerNumber);
        for worker in [old, new, other_new, other_old] {
            assert_eq!(router.introduced(worker, kind("old")), None);
        }
        assert_eq!(router.introduced(new, kind("new")).map(|(worker, _)| worker), Some(other_new));
        let misfit =
            |router: &Router, worker| router.misfit(worker).map(|(other, why)| (other, why.to_string()));
        let why = "weights differs: new and old".to_owned();
        assert_eq!(misfit(&router, new), Some((other_new, why)), "it fits nobody");
        assert_eq!(misfit(&router, old), None);
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(0, 2), (0, 3), (0, 2), (0, 3)], "none for the new one yet");
        router.introduced(other_new, kind("new"));
        assert_eq!([new, other_new, old].map(|worker| router.misfit(worker)), [None, None, None]);
        let chosen: Vec<_> =
            (0..4).map(|_| numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap())).collect();
        assert_eq!(chosen, [(1, 2), (0, 3), (1, 2), (0, 3)]);
        router.refused(other_old);
        assert!(router.is_ready());
        assert_eq!(numbers(&router.choose(1, &Avoid::default(), Instant::now()).unwrap()), (1, 2));
        router.refused(new);
        assert!(!router.is_ready());
        assert_eq!(
            router.choose(1, &Avoid::default(), Instant::now()),
            Err(NoWorker::Fitting { may_come: true })
        );
    }
}
