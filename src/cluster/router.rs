//! The router's decisions: which pair serves a request, and which workers are asked how they are.
//!
//! Owns: which workers there are, their loads and health. Invariants: a worker's load is the sum of its open
//! bookings, beside what it reports that others gave it; one that leaves is chosen and probed no more, and is known until its last booking is released;
//! its number never becomes another's. Not here: choices (`router/choosing.rs`), the rows they go through
//! (`router/table.rs`).

mod booking;
mod choosing;
mod hearing;
mod table;

use super::breaker::Breaker;
use super::flight::Avoid;
use super::forecast::Forecast;
use super::health::Health;
use super::kinds::{Difference, Kind, KindDigest, Kinds};
use super::loads::{Booked, Load, WorkerNumber};
use super::prefixes::Prefixes;
use crate::config::resolved::{BreakerTerms, CacheTerms, HealthTerms, Policies};
use crate::limits::ROUTER_PREFIX_BLOCKS_MAX;
pub use booking::{Booking, NoWorker, Pair, Role};
use choosing::Scratch;
use std::time::{Duration, Instant};
use table::{Seat, Table};

/// A worker that there is, or that still has bookings.
#[derive(Debug)]
struct Member {
    number: WorkerNumber,
    role: Role,
    /// What it tells of itself in an entry and when asked; who tells nothing may fit anybody.
    kind: Kind,
    health: Health,
    breaker: Breaker,
    /// Open, those of no weight counted.
    bookings: u32,
    /// What was booked on it when it was asked for a report.
    asked: Option<Booked>,
    /// Known for its bookings alone.
    is_leaving: bool,
}

/// All that is decided without a socket.
#[derive(Debug)]
pub struct Router {
    policies: Policies,
    health: HealthTerms,
    breaker: BreakerTerms,
    /// By number.
    members: Vec<Member>,
    /// The same by role: what choices ask.
    tables: [Table; 2],
    kinds: Kinds,
    /// The next worker's.
    next: usize,
    /// Chosen last, by role.
    last: [Option<WorkerNumber>; 2],
    /// Who has the KV of which prompts, by role.
    prefixes: [Prefixes; 2],
    forecast: Forecast,
    cache: CacheTerms,
    /// Of all chance, and how often it was asked.
    seed: u64,
    drawn: u64,
    /// Kept for the next choice.
    scratch: Scratch,
}

impl Router {
    /// Over no workers yet.
    pub fn new(policies: impl Into<Policies>) -> Router {
        Router {
            policies: policies.into(),
            health: HealthTerms::default(),
            breaker: BreakerTerms::default(),
            members: Vec::new(),
            tables: Default::default(),
            kinds: Kinds::default(),
            next: 0,
            last: [None; 2],
            prefixes: [(); 2]
                .map(|()| Prefixes::new(ROUTER_PREFIX_BLOCKS_MAX, ROUTER_PREFIX_BLOCKS_MAX)),
            forecast: Forecast::default(),
            cache: CacheTerms::default(),
            seed: 0,
            drawn: 0,
            scratch: Scratch::default(),
        }
    }

    /// With this to foretell by.
    pub fn foretelling(self, forecast: Forecast) -> Router {
        Router { forecast, ..self }
    }

    /// With this to say when a prompt's place in caches counts.
    pub fn weighing(self, cache: CacheTerms) -> Router {
        Router { cache, ..self }
    }

    /// With chance that follows from `seed`.
    pub fn seeded(self, seed: u64) -> Router {
        Router { seed, ..self }
    }

    /// Over workers whose caches hold so many blocks of prompts.
    pub fn over_caches(self, blocks: usize) -> Router {
        let mut prefixes = [(); 2].map(|()| Prefixes::new(ROUTER_PREFIX_BLOCKS_MAX, blocks));
        for member in self.members.iter().filter(|member| !member.is_leaving) {
            prefixes[member.role as usize].join(member.number);
        }
        Router { prefixes, ..self }
    }

    /// Whether a choice asks what prompts begin with.
    pub fn reads_prompts(&self) -> bool {
        self.policies.prefill.reads_prompts() || self.policies.decode.reads_prompts()
    }

    /// On other terms than the usual ones.
    pub fn on(self, health: HealthTerms, breaker: BreakerTerms) -> Router {
        Router { health, breaker, ..self }
    }

    /// A worker joins; it is not usable before a probe of it has succeeded.
    pub fn join(&mut self, role: Role, now: Instant) -> WorkerNumber {
        let number = WorkerNumber(self.next);
        self.next += 1;
        self.prefixes[role as usize].join(number);
        self.tables[role as usize].join(number, now);
        self.members.push(Member {
            number,
            role,
            kind: Kind::default(),
            health: Health::new(self.health, now),
            breaker: Breaker::new(self.breaker),
            bookings: 0,
            asked: None,
            is_leaving: false,
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

    /// A worker has told what it is; what keeps it from the first of the other role that it does not fit. That mixed ones hand
    /// nothing over is as it should be.
    pub fn introduced(
        &mut self,
        worker: WorkerNumber,
        kind: Kind,
    ) -> Option<(WorkerNumber, Difference)> {
        let place = self.place(worker)?;
        self.members[place].health.told();
        let kind = kind.with_entry_of(&self.members[place].kind);
        if self.members[place].kind != kind {
            self.members[place].kind = kind;
            self.sort();
        }
        let one = &self.members[place];
        let others =
            self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        let difference = |other: &Member| match one.kind.difference(&other.kind)? {
            Difference::Alone => None,
            difference => Some((other.number, difference)),
        };
        others.into_iter().find_map(difference)
    }

    /// What keeps a worker from each of the other role that is here, by the first of them, a mixed one last. `None` where it
    /// fits one, or none is here.
    pub fn misfit(&self, worker: WorkerNumber) -> Option<(WorkerNumber, Difference)> {
        let one = self.member(worker)?;
        let others =
            || self.members.iter().filter(|member| member.role != one.role && !member.is_leaving);
        if others().any(|other| self.fit(self.class(one), self.class(other))) {
            return None;
        }
        let first = others().min_by_key(|other| other.kind.is_alone())?;
        Some((first.number, one.kind.difference(&first.kind)?))
    }

    /// Whether nobody of the other role is here, whom it cannot do without.
    pub fn is_lonely(&self, worker: WorkerNumber) -> bool {
        let reads_alone = |one: &Member| one.role == Role::Decode && self.seat(one).reads_alone;
        let is_only = |one: &Member| self.here(one.role.other()).next().is_none();
        self.member(worker).is_some_and(|one| is_only(one) && !reads_alone(one))
    }

    /// A worker has told whether it reads prompts where no prefill worker is left.
    pub fn set_reads_alone(&mut self, worker: WorkerNumber, reads_alone: bool) {
        self.tables[Role::Decode as usize].set_reads_alone(worker, reads_alone);
    }

    /// What workers tell is compared when it is told, and not when a pair is chosen.
    fn sort(&mut self) {
        let (kinds, classes) = Kinds::of(self.members.iter().map(|member| &member.kind));
        self.kinds = kinds;
        for (member, class) in self.members.iter().zip(classes) {
            self.tables[member.role as usize].set_class(member.number, class);
        }
    }

    fn seat(&self, member: &Member) -> &Seat {
        let table = &self.tables[member.role as usize];
        &table.seats()[table.place(member.number).expect("a member has a row")]
    }

    fn class(&self, member: &Member) -> usize {
        self.seat(member).class
    }

    fn fit(&self, one: usize, other: usize) -> bool {
        self.kinds.fit(one, other)
    }

    /// A worker leaves: what is booked on it runs on.
    pub fn leave(&mut self, worker: WorkerNumber) {
        let Some(place) = self.place(worker) else { return };
        let member = &mut self.members[place];
        member.is_leaving = true;
        let role = member.role as usize;
        self.tables[role].change(worker, |load| load.usable = false);
        self.prefixes[role].forget(worker);
        self.tables[role].set_held(worker, 0);
        self.remove_if_over(place);
    }

    /// Who leaves and has nothing booked any more is no longer known.
    fn remove_if_over(&mut self, place: usize) {
        let Member { number, role, bookings, is_leaving, .. } = self.members[place];
        if is_leaving && bookings == 0 {
            self.members.remove(place);
            self.tables[role as usize].remove(number);
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

    /// A booking of no weight, for what is asked of this very worker.
    pub fn visit(&mut self, worker: WorkerNumber) -> Booking {
        if let Some(place) = self.place(worker) {
            self.members[place].bookings += 1;
        }
        Booking { worker, weight: 0, unread: 0, reading: Duration::ZERO, context: 0 }
    }

    /// A usable worker, whatever its role: of prefill workers, where there are any, the one that is here longest; one
    /// that has failed the request only where there is no other, and none that will not serve it.
    ///
    /// # Errors
    /// None is usable, or would serve it.
    pub fn first(&self, avoid: &Avoid) -> Result<WorkerNumber, NoWorker> {
        let usable = [Role::Prefill, Role::Decode]
            .into_iter()
            .flat_map(|role| self.usable(role).map(move |seat| (role, seat.number)))
            .filter(|(_, number)| !avoid.unwilling.contains(number));
        let first =
            usable.min_by_key(|&(role, number)| (avoid.failed.contains(&number), role, number));
        first.map(|(_, number)| number).ok_or_else(|| {
            let mut here = [Role::Prefill, Role::Decode]
                .into_iter()
                .flat_map(|role| self.here(role))
                .peekable();
            let is_unwilling = |member: &Member| avoid.unwilling.contains(&member.number);
            let may_come = here.peek().is_none() || !here.all(is_unwilling);
            NoWorker::Of { role: Role::Prefill, may_come }
        })
    }

    /// All workers have been told to forget what they have read.
    pub fn forget_prompts(&mut self) {
        for member in &self.members {
            self.prefixes[member.role as usize].empty(member.number);
            self.tables[member.role as usize].set_held(member.number, 0);
        }
    }

    /// A worker has read what it was to: it generates.
    pub fn has_read(&mut self, booking: &mut Booking, now: Instant) {
        let (unread, reading) =
            (std::mem::take(&mut booking.unread), std::mem::take(&mut booking.reading));
        if unread > 0 {
            self.change(booking.worker, |load| load.has_read(unread, reading, now));
        }
    }

    /// Ends a booking.
    pub fn release(&mut self, booking: Booking, now: Instant) {
        let Some(place) = self.place(booking.worker) else { return };
        self.change(booking.worker, |load| {
            load.booked -= booking.weight;
            load.context -= booking.context;
            if booking.unread > 0 {
                load.has_read(booking.unread, booking.reading, now);
            }
        });
        self.members[place].bookings -= 1;
        self.remove_if_over(place);
    }

    /// Whether there is a usable pair, or a usable worker that does without.
    pub fn is_ready(&self) -> bool {
        self.has_pair() || self.usable(Role::Decode).any(|decode| decode.reads_alone)
    }

    /// The same while this worker is away.
    pub fn is_ready_without(&self, worker: WorkerNumber) -> bool {
        let others = |role| self.usable(role).filter(move |seat| seat.number != worker);
        let fits = |prefill: &Seat| {
            others(Role::Decode).any(|decode| self.fit(prefill.class, decode.class))
        };
        others(Role::Prefill).any(fits) || others(Role::Decode).any(|decode| decode.reads_alone)
    }

    fn has_pair(&self) -> bool {
        let mut prefill = self.usable(Role::Prefill);
        prefill.any(|prefill| {
            self.usable(Role::Decode).any(|decode| self.fit(prefill.class, decode.class))
        })
    }

    /// The workers that are here, by number.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerNumber, Role, Load)> {
        let here = self.members.iter().filter(|member| !member.is_leaving);
        here.map(|member| (member.number, member.role, self.load_of(member)))
    }

    /// A worker's load, while it is known.
    pub fn load(&self, worker: WorkerNumber) -> Option<Load> {
        self.member(worker).map(|member| self.load_of(member))
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

    fn usable(&self, role: Role) -> impl Iterator<Item = &Seat> {
        self.tables[role as usize].usable()
    }

    fn load_of(&self, member: &Member) -> Load {
        *self.tables[member.role as usize].load(member.number).expect("a member has a row")
    }

    /// A number is in one table.
    fn change(&mut self, worker: WorkerNumber, change: impl Fn(&mut Load)) {
        self.tables.iter_mut().find_map(|table| table.change(worker, &change));
    }
}

#[cfg(test)]
mod tests;
