//! One request behind a router: when its legs are sent, when it is tried again, and how it ends.
//!
//! ```text
//!             both legs' connections stand     decode's first bytes
//! Connecting ─────────────────────────▶ Sent ─────────────────────▶ Passing ──▶ landed
//!    ▲  │ a worker takes none             │ a leg fails               │ decode is lost
//!    │  ▼                                 ▼                           ▼
//!    └─ Pausing ◀─── may be tried again ──┴─── and what the client has is known
//!                                         └────────── else ───────────┴────▶ failed
//! ```
//! A try whose prefill leg comes first ([`Flight::in_turn`]) has two stages more, between Connecting and Sent:
//! ```text
//!             prefill's connection stands       it has answered           decode's connection stands
//! Connecting ───────────────────────────▶ Reading ──────────▶ Joining ─────────────────────────────▶ Sent
//!                                            │ it fails           │ decode takes none, and there is no other
//!                                            └────────────────────┴──▶ Pausing or failed
//! ```
//! Who fails there has failed alone: the other worker has not been asked. What prefill keeps is nobody's yet: it is as good
//! for another decode worker.
//!
//! Owns: that table ([`Flight::take`], and `take_in_turn` of these two); whom a try must do without. Invariants: nothing is sent before the connections
//! of the legs that leave stand, so that a worker that takes none costs no room anywhere (but for prefill's work in a
//! try in turn); each try has a room of its own; a flight ends once. Without I/O, clock and chance; the router and the simulator carry out the same [`Next`].
//! Not here: who is chosen (`router`), how many tries there are in all (`retries`).

use super::loads::WorkerNumber;
use super::retries::Retries;
use super::router::Role;
use crate::cause::Cause;
use crate::limits::{RETRY_TIME_MAX, ROUTER_LOST_PREFILL_TIME, ROUTER_PAIRS_MAX};
use crate::stdx::planted::is_planted;
use std::time::Instant;

/// Whom a request is not sent to again.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Avoid {
    /// Those that failed it: others are better, if there are any.
    pub failed: Vec<WorkerNumber>,
    /// Those that will not serve it, as they said.
    pub unwilling: Vec<WorkerNumber>,
}

impl Avoid {
    /// Whether the request has failed nowhere so far.
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty() && self.unwilling.is_empty()
    }
}

/// What happens to a flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// Connections were asked for; so many do not stand yet.
    Opened(u32),
    /// One of them stands.
    Connected,
    /// One of them was refused; nothing was sent over it.
    Refused(Role),
    /// Prefill, asked first, has read the prompt, and said where its KV is kept.
    Read,
    /// The client got something of decode's answer.
    Passes {
        /// Whether what it has is known, so that it can go on elsewhere.
        resumable: bool,
    },
    /// The client got what prefill sampled, and that is known; decode has said nothing yet.
    Told,
    /// A leg ended with an error that it told.
    Failed(Role, Cause),
    /// A leg's connection broke, or it took too long.
    Lost(Role, Cause),
    /// Decode's answer is whole.
    Landed,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Next {
    /// Nothing.
    On,
    /// The requests of the legs whose turn it is leave: both, or the only one that is connected.
    Send,
    /// A connection to decode is asked for; [`News::Opened`] follows.
    Join,
    /// Another decode worker is chosen for what prefill keeps, [`Flight::rejoin`], and a connection to it asked for; where
    /// there is none, [`News::Lost`] says so.
    Rejoin,
    /// Decode has until then to decide.
    Hurry(Instant),
    /// Decode has decided and may take its time again.
    Calm,
    /// What runs is cancelled; at that time, workers are chosen anew.
    Again(Instant),
    /// The answer is whole; what prefill still does is left alone.
    Land,
    /// What runs is cancelled, and the client is told why.
    Fail(Cause),
}

/// Where it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// So many connections do not stand, and nothing was sent;
    Connecting(u32),
    /// prefill alone was asked;
    Reading,
    /// it has answered, and decode's connection does not stand;
    Joining,
    /// it was sent, and the client has heard nothing of this try;
    Sent,
    /// the client gets the answer piece by piece;
    Passing,
    /// waits for the next try;
    Pausing,
    /// has ended.
    Over,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Flight {
    stage: Stage,
    /// Who serves this try: of which prefill and decode worker, where both roles take part.
    legs: [Option<WorkerNumber>; 2],
    avoid: Avoid,
    /// By role: who had to do with its last failure.
    accused: [Option<WorkerNumber>; 2],
    /// Times it was sent since the client last got something.
    tries: u32,
    /// Pairs of this try that took no connection.
    refusals: u32,
    /// Times it waited since then.
    waits: u32,
    /// Since a leg failed: when no further try is worth while, and why it failed.
    failing: Option<(Instant, Cause)>,
    /// Whether the client has some of the answer.
    begun: bool,
    resumable: bool,
    /// Whether the prefill leg broke, so that decode has little time left.
    prefill_lost: bool,
    /// Whether this try's prefill leg is sent first, and decode's when it has answered.
    in_turn: bool,
}

/// The clock and chance of a step, and the turns of all.
#[derive(Debug)]
pub struct Terms<'a> {
    /// The turn's time.
    pub now: Instant,
    /// A number drawn for this step.
    pub chance: u64,
    /// When the client waits no longer, if it has said.
    pub deadline: Option<Instant>,
    /// How many tries there are.
    pub retries: &'a mut Retries,
}

impl Default for Flight {
    fn default() -> Self {
        Self {
            stage: Stage::Pausing,
            legs: [None; 2],
            avoid: Avoid::default(),
            accused: [None; 2],
            tries: 0,
            refusals: 0,
            waits: 0,
            failing: None,
            begun: false,
            resumable: true,
            prefill_lost: false,
            in_turn: false,
        }
    }
}

impl Flight {
    /// One that does without these from the start.
    pub fn without(avoid: Avoid) -> Flight {
        Flight { avoid, ..Flight::default() }
    }

    /// Whom the next try must do without.
    pub fn avoid(&self) -> &Avoid {
        &self.avoid
    }

    /// Who may be to blame for its last failure.
    pub fn accused(&self) -> impl Iterator<Item = WorkerNumber> {
        self.accused.into_iter().flatten()
    }

    /// Whether this try was sent and has not come to anything.
    pub fn is_waiting(&self) -> bool {
        self.stage == Stage::Sent
    }

    /// Whether decode has little time left, since prefill was lost.
    pub fn has_lost_prefill(&self) -> bool {
        self.prefill_lost
    }

    /// Whether it is not its first try.
    pub fn is_retry(&self) -> bool {
        self.failing.is_some()
    }

    /// Who serves a leg of this try.
    pub fn worker(&self, role: Role) -> Option<WorkerNumber> {
        self.legs[role as usize]
    }

    /// These workers were chosen.
    pub fn choose(&mut self, prefill: Option<WorkerNumber>, decode: Option<WorkerNumber>) {
        self.legs = [prefill, decode];
        (self.prefill_lost, self.accused) = (false, [None; 2]);
        self.in_turn &= is_planted("turns outlive their try");
        self.stage = Stage::Connecting(0);
    }

    /// The pair that was just chosen is asked one after the other: prefill, and decode once that has answered.
    pub fn in_turn(&mut self) {
        self.in_turn = true;
    }

    /// This decode worker was chosen for what prefill keeps.
    pub fn rejoin(&mut self, decode: WorkerNumber) {
        self.legs[Role::Decode as usize] = Some(decode);
        self.accused = [None; 2];
    }

    /// Nobody can be chosen; `may_come` says whether that may change by itself.
    pub fn nobody(&mut self, may_come: bool, terms: &Terms<'_>) -> Next {
        match self.failing {
            Some((until, cause)) if may_come => self.wait(until, cause, terms),
            Some((_, cause)) => self.end(Next::Fail(cause)),
            None => self.end(Next::Fail(Cause::PeerLost)),
        }
    }

    /// All who can be chosen are foretold to be too late: it ends, before anybody has worked for it.
    pub fn late(&mut self) -> Next {
        self.end(Next::Fail(Cause::Overloaded))
    }

    /// What follows from what happened.
    pub fn take(&mut self, news: News, terms: &mut Terms<'_>) -> Next {
        match (self.stage, news) {
            (Stage::Over | Stage::Pausing, _) => Next::On,
            (Stage::Connecting(_), News::Opened(0)) => self.send(),
            (Stage::Connecting(_), News::Opened(awaited)) => {
                self.stage = Stage::Connecting(awaited);
                Next::On
            }
            (Stage::Connecting(awaited), News::Connected) if awaited > 1 => {
                let stands = u32::from(!is_planted("connection is not counted"));
                self.stage = Stage::Connecting(awaited - stands);
                Next::On
            }
            (Stage::Connecting(_), News::Connected) => self.send(),
            (Stage::Connecting(_), News::Refused(role) | News::Lost(role, _) | News::Failed(role, _)) => {
                self.refused(role, terms)
            }
            (Stage::Reading | Stage::Joining, news) => self.take_in_turn(news, terms),
            (Stage::Sent | Stage::Passing, News::Passes { resumable }) => {
                self.stage = Stage::Passing;
                self.begun = true;
                self.resumable &= resumable;
                // From here on it is as good as new.
                (self.tries, self.waits, self.failing) = (1, 0, None);
                self.avoid = Avoid::default();
                match std::mem::take(&mut self.prefill_lost) {
                    true => Next::Calm,
                    false => Next::On,
                }
            }
            (Stage::Sent, News::Told) => {
                // The tries are not forgotten: a pair that hands nothing over may tell a token each time.
                self.begun = true;
                Next::On
            }
            (Stage::Sent | Stage::Passing, News::Landed) => self.end(Next::Land),
            // Decode goes on without prefill.
            (Stage::Passing, News::Failed(Role::Prefill, _) | News::Lost(Role::Prefill, _)) => Next::On,
            (Stage::Sent, News::Lost(Role::Prefill, _)) => {
                self.shun(Role::Prefill);
                self.prefill_lost = true;
                // Decode learns of it by itself, or has everything and answers.
                Next::Hurry(terms.now + ROUTER_LOST_PREFILL_TIME)
            }
            (Stage::Sent | Stage::Passing, News::Lost(Role::Decode, Cause::Deadline))
                if self.prefill_lost =>
            {
                self.failed(Role::Decode, Cause::PeerLost, terms)
            }
            (Stage::Sent | Stage::Passing, News::Lost(role, cause)) => {
                self.shun(role);
                self.again(cause, terms)
            }
            (Stage::Sent | Stage::Passing, News::Failed(role, cause)) => self.failed(role, cause, terms),
            (Stage::Connecting(_) | Stage::Sent | Stage::Passing, _) => Next::On,
        }
    }

    /// The two stages of a try in turn.
    fn take_in_turn(&mut self, news: News, terms: &mut Terms<'_>) -> Next {
        match (self.stage, news) {
            (Stage::Reading, News::Read) => {
                self.stage = Stage::Joining;
                Next::Join
            }
            (Stage::Joining, News::Opened(0) | News::Connected) => {
                self.stage = Stage::Sent;
                Next::Send
            }
            (Stage::Joining, News::Refused(Role::Decode)) if self.refusals < ROUTER_PAIRS_MAX => {
                self.shun(Role::Decode);
                self.refusals += 1;
                Next::Rejoin
            }
            // It was not asked yet, and is not to blame for that it is going.
            (Stage::Joining, News::Failed(Role::Decode, Cause::Draining))
                if self.refusals < ROUTER_PAIRS_MAX =>
            {
                self.avoid.unwilling.extend(self.worker(Role::Decode));
                self.refusals += 1;
                Next::Rejoin
            }
            // There is no other one, behind what was said of this one.
            (Stage::Joining, News::Lost(Role::Decode, cause)) if !self.avoid.is_empty() => {
                self.accused = [None; 2];
                self.again(cause, terms)
            }
            (_, News::Lost(role, cause) | News::Failed(role, cause)) => self.failed_alone(role, cause, terms),
            (_, News::Refused(role)) => self.failed_alone(role, Cause::PeerLost, terms),
            _ => Next::On,
        }
    }

    fn send(&mut self) -> Next {
        self.stage = if self.in_turn { Stage::Reading } else { Stage::Sent };
        self.tries += 1;
        self.refusals = 0;
        Next::Send
    }

    /// Nothing was sent to anybody, so another pair is as good.
    fn refused(&mut self, role: Role, terms: &mut Terms<'_>) -> Next {
        self.shun(role);
        self.refusals += 1;
        if self.refusals < ROUTER_PAIRS_MAX {
            self.stage = Stage::Pausing;
            return Next::Again(terms.now);
        }
        match self.failing {
            Some((until, cause)) => {
                self.refusals = 0;
                self.wait(until, cause, terms)
            }
            None => self.end(Next::Fail(Cause::PeerLost)),
        }
    }

    /// Of a try in turn the one worker that was asked has failed it, or the second one takes no connection.
    fn failed_alone(&mut self, role: Role, cause: Cause, terms: &mut Terms<'_>) -> Next {
        // Its client is here, whatever the worker saw.
        let cause = if cause == Cause::ClientGone { Cause::PeerLost } else { cause };
        match cause {
            Cause::Overloaded | Cause::Draining | Cause::Incompatible => {
                self.avoid.unwilling.extend(self.worker(role));
            }
            cause if cause.may_be_retried() => self.shun(role),
            _ => {}
        }
        self.again(cause, terms)
    }

    /// A leg has said why it failed, which says whom to do without.
    fn failed(&mut self, role: Role, cause: Cause, terms: &mut Terms<'_>) -> Next {
        let other = role.other();
        match cause {
            Cause::Overloaded | Cause::Draining => self.avoid.unwilling.extend(self.worker(role)),
            Cause::Incompatible => self.avoid.unwilling.extend(self.worker(other)),
            Cause::ClientGone if !is_planted("lost leg is its client's end") => {
                // Whose client is here: the other leg's connection was lost.
                self.shun(other);
                return self.again(Cause::PeerLost, terms);
            }
            Cause::Internal => self.shun(role),
            cause if cause.may_be_retried() => {
                // The other one was lost to it, which of them so ever has lost the network.
                self.shun(other);
                self.shun(role);
            }
            _ => {}
        }
        self.again(cause, terms)
    }

    fn shun(&mut self, role: Role) {
        let worker = self.worker(role);
        self.avoid.failed.extend(worker);
        self.accused[role as usize] = worker;
    }

    fn again(&mut self, cause: Cause, terms: &mut Terms<'_>) -> Next {
        let most = match cause {
            // Most likely it is the request's own doing, and would be again.
            Cause::Internal => terms.retries.most().min(1),
            _ => terms.retries.most(),
        };
        let lost = self.begun && !self.resumable;
        if !cause.may_be_retried() || lost || self.tries > most {
            return self.end(Next::Fail(cause));
        }
        let until = self.failing.map_or(terms.now + RETRY_TIME_MAX, |(until, _)| until);
        let until = terms.deadline.map_or(until, |deadline| until.min(deadline));
        match terms.retries.grant(self.waits, terms.now, until, terms.chance) {
            Some(at) => self.pause(at, until, cause),
            None => self.end(Next::Fail(cause)),
        }
    }

    /// Looks again later for somebody; nothing was sent since the last time.
    fn wait(&mut self, until: Instant, cause: Cause, terms: &Terms<'_>) -> Next {
        match terms.now + terms.retries.delay(self.waits, terms.chance) {
            at if at <= until => self.pause(at, until, cause),
            _ => self.end(Next::Fail(cause)),
        }
    }

    fn pause(&mut self, at: Instant, until: Instant, cause: Cause) -> Next {
        self.waits += 1;
        self.failing = Some((until, cause));
        self.stage = Stage::Pausing;
        Next::Again(at)
    }

    fn end(&mut self, next: Next) -> Next {
        self.stage = Stage::Over;
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::resolved::RetryTerms;
    use crate::limits::RETRIES_DEFAULT;
    use std::time::Duration;

    const PREFILL: WorkerNumber = WorkerNumber(0);
    const DECODE: WorkerNumber = WorkerNumber(1);

    /// A flight under the hands of a router.
    struct Rig {
        flight: Flight,
        retries: Retries,
        now: Instant,
        deadline: Option<Instant>,
    }

    impl Rig {
        fn new(most: u32) -> Rig {
            let now = Instant::now();
            Rig {
                flight: Flight::default(),
                retries: Retries::new(RetryTerms::of(most), now),
                now,
                deadline: None,
            }
        }

        fn terms(&mut self) -> (&mut Flight, Terms<'_>) {
            (
                &mut self.flight,
                Terms { now: self.now, chance: 0, deadline: self.deadline, retries: &mut self.retries },
            )
        }

        fn take(&mut self, news: News) -> Next {
            let (flight, mut terms) = self.terms();
            flight.take(news, &mut terms)
        }

        fn nobody(&mut self, may_come: bool) -> Next {
            let (flight, terms) = self.terms();
            flight.nobody(may_come, &terms)
        }

        /// Chosen and sent.
        fn sent(&mut self) -> &mut Rig {
            self.flight.choose(Some(PREFILL), Some(DECODE));
            assert_eq!(self.take(News::Opened(2)), Next::On);
            assert_eq!(self.take(News::Connected), Next::On);
            assert_eq!(self.take(News::Connected), Next::Send);
            self
        }
    }

    fn passes(resumable: bool) -> News {
        News::Passes { resumable }
    }

    #[test]
    fn a_request_is_sent_when_all_connections_stand_and_lands() {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        assert!(rig.sent().flight.is_waiting());
        assert_eq!(rig.take(passes(true)), Next::On);
        assert_eq!(rig.take(News::Lost(Role::Prefill, Cause::PeerLost)), Next::On, "decode has all of it");
        assert_eq!(rig.take(News::Landed), Next::Land);
        assert_eq!(rig.take(News::Landed), Next::On, "it ends once");
    }

    #[test]
    fn a_refused_connection_leads_to_another_pair_and_costs_no_try() {
        let mut rig = Rig::new(0);
        for _ in 1..ROUTER_PAIRS_MAX {
            rig.flight.choose(Some(PREFILL), Some(DECODE));
            assert_eq!(rig.take(News::Opened(1)), Next::On);
            assert_eq!(rig.take(News::Refused(Role::Decode)), Next::Again(rig.now));
            assert_eq!(rig.take(News::Connected), Next::On, "what the other leg says is of no interest");
        }
        assert_eq!(rig.flight.avoid().failed, [DECODE; ROUTER_PAIRS_MAX as usize - 1]);
        rig.flight.choose(Some(PREFILL), Some(DECODE));
        assert_eq!(rig.take(News::Refused(Role::Prefill)), Next::Fail(Cause::PeerLost));
    }

    #[test]
    fn who_is_to_blame_is_not_asked_again() {
        use Cause::{ClientGone, Corrupt, Draining, Incompatible, Internal, Overloaded, PeerLost};
        let (p, d) = (Role::Prefill, Role::Decode);
        let nobody: &[WorkerNumber] = &[];
        for (news, failed, unwilling) in [
            (News::Lost(d, PeerLost), &[DECODE][..], nobody),
            (News::Failed(d, PeerLost), &[PREFILL, DECODE], nobody),
            (News::Failed(p, PeerLost), &[DECODE, PREFILL], nobody),
            (News::Failed(d, Corrupt), &[PREFILL, DECODE], nobody),
            (News::Failed(d, Internal), &[DECODE], nobody),
            (News::Failed(p, ClientGone), &[DECODE], nobody),
            (News::Failed(p, Overloaded), nobody, &[PREFILL]),
            (News::Failed(d, Draining), nobody, &[DECODE]),
            (News::Failed(d, Incompatible), nobody, &[PREFILL]),
        ] {
            let mut rig = Rig::new(RETRIES_DEFAULT);
            assert!(matches!(rig.sent().take(news), Next::Again(_)), "{news:?}");
            let Avoid { failed: shunned, unwilling: never } = rig.flight.avoid();
            assert_eq!((&shunned[..], &never[..]), (failed, unwilling), "{news:?}");
            assert_eq!(rig.flight.accused().count(), failed.len());
        }
    }

    #[test]
    fn tries_have_an_end_and_some_causes_only_one() {
        let tries = |cause, most| {
            let mut rig = Rig::new(most);
            (1..10).find(|_| matches!(rig.sent().take(News::Failed(Role::Decode, cause)), Next::Fail(_)))
        };
        assert_eq!(tries(Cause::PeerLost, RETRIES_DEFAULT), Some(RETRIES_DEFAULT + 1));
        assert_eq!(tries(Cause::PeerLost, 0), Some(1));
        assert_eq!(tries(Cause::Internal, RETRIES_DEFAULT), Some(2));
        for cause in [Cause::Refused, Cause::Deadline, Cause::Mismatch, Cause::Aborted] {
            assert_eq!(tries(cause, RETRIES_DEFAULT), Some(1), "{cause}");
        }
    }

    #[test]
    fn a_stream_goes_on_elsewhere_if_what_its_client_has_is_known_and_is_then_as_good_as_new() {
        let lost = News::Lost(Role::Decode, Cause::PeerLost);
        let mut rig = Rig::new(1);
        for _ in 0..5 {
            assert_eq!(rig.sent().take(passes(true)), Next::On);
            assert!(matches!(rig.take(lost), Next::Again(at) if at > rig.now));
            assert!(rig.flight.is_retry());
        }
        assert_eq!(rig.sent().take(lost), Next::Fail(Cause::PeerLost), "nothing has passed since");
        let mut rig = Rig::new(1);
        assert_eq!(rig.sent().take(passes(false)), Next::On);
        assert_eq!(rig.take(lost), Next::Fail(Cause::PeerLost));
    }

    #[test]
    fn decode_has_a_while_to_decide_once_prefill_is_lost() {
        let lost = News::Lost(Role::Prefill, Cause::PeerLost);
        let mut rig = Rig::new(1);
        assert_eq!(rig.sent().take(lost), Next::Hurry(rig.now + ROUTER_LOST_PREFILL_TIME));
        assert_eq!(rig.take(passes(true)), Next::Calm, "it had everything");
        assert_eq!(rig.take(News::Lost(Role::Decode, Cause::Deadline)), Next::Fail(Cause::Deadline));
        let mut rig = Rig::new(1);
        assert_eq!(rig.sent().take(lost), Next::Hurry(rig.now + ROUTER_LOST_PREFILL_TIME));
        assert!(matches!(rig.take(News::Lost(Role::Decode, Cause::Deadline)), Next::Again(_)));
        assert!(rig.flight.avoid().failed.contains(&PREFILL));
    }

    /// Chosen, to be asked one after the other, and prefill asked.
    fn reading(rig: &mut Rig) {
        rig.flight.choose(Some(PREFILL), Some(DECODE));
        rig.flight.in_turn();
        assert_eq!(rig.take(News::Opened(0)), Next::Send);
        assert!(!rig.flight.is_waiting(), "decode has not been asked");
    }

    #[test]
    fn decode_s_turn_comes_when_prefill_has_answered() {
        for stands in [true, false] {
            let mut rig = Rig::new(RETRIES_DEFAULT);
            reading(&mut rig);
            assert_eq!(rig.take(News::Read), Next::Join);
            match stands {
                true => assert_eq!(rig.take(News::Opened(0)), Next::Send),
                false => {
                    assert_eq!(rig.take(News::Opened(1)), Next::On);
                    assert_eq!(rig.take(News::Connected), Next::Send);
                }
            }
            assert!(rig.flight.is_waiting());
            assert_eq!(rig.take(passes(true)), Next::On);
            assert_eq!(rig.take(News::Landed), Next::Land);
        }
        // The next try of a request may be served in another way.
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert!(matches!(rig.take(News::Lost(Role::Prefill, Cause::PeerLost)), Next::Again(_)));
        rig.flight.choose(None, Some(DECODE));
        assert_eq!(rig.take(News::Opened(0)), Next::Send);
        assert!(rig.flight.is_waiting());
    }

    #[test]
    fn who_fails_alone_is_alone_to_blame() {
        use Cause::{ClientGone, Draining, Incompatible, Internal, Overloaded, PeerLost};
        let (p, d) = (Role::Prefill, Role::Decode);
        let nobody: &[WorkerNumber] = &[];
        // Before prefill has answered, and behind it.
        for (read, news, failed, unwilling) in [
            (false, News::Lost(p, PeerLost), &[PREFILL][..], nobody),
            (false, News::Failed(p, Internal), &[PREFILL], nobody),
            (false, News::Failed(p, ClientGone), &[PREFILL], nobody),
            (false, News::Failed(p, PeerLost), &[PREFILL], nobody),
            (false, News::Failed(p, Overloaded), nobody, &[PREFILL]),
            (false, News::Failed(p, Draining), nobody, &[PREFILL]),
            (false, News::Failed(p, Incompatible), nobody, &[PREFILL]),
            (true, News::Lost(d, PeerLost), &[DECODE], nobody),
        ] {
            let mut rig = Rig::new(RETRIES_DEFAULT);
            reading(&mut rig);
            if read {
                assert_eq!(rig.take(News::Read), Next::Join);
                assert_eq!(rig.take(News::Opened(1)), Next::On);
            }
            assert!(matches!(rig.take(news), Next::Again(_)), "{news:?}");
            let Avoid { failed: shunned, unwilling: never } = rig.flight.avoid();
            assert_eq!((&shunned[..], &never[..]), (failed, unwilling), "{news:?}");
        }
        for cause in [Cause::Refused, Cause::Deadline, Cause::Aborted] {
            let mut rig = Rig::new(RETRIES_DEFAULT);
            reading(&mut rig);
            assert_eq!(rig.take(News::Failed(p, cause)), Next::Fail(cause));
        }
    }

    #[test]
    fn what_prefill_keeps_is_for_another_decode_worker_where_one_takes_no_connection() {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert_eq!(rig.take(News::Read), Next::Join);
        for number in 0..ROUTER_PAIRS_MAX {
            assert_eq!(rig.take(News::Opened(1)), Next::On);
            assert_eq!(rig.take(News::Refused(Role::Decode)), Next::Rejoin);
            assert!(rig.flight.accused().count() == 1, "it is to blame");
            rig.flight.rejoin(WorkerNumber(50 + number as usize));
        }
        assert_eq!(rig.flight.avoid().failed.len(), ROUTER_PAIRS_MAX as usize);
        assert_eq!(rig.flight.worker(Role::Prefill), Some(PREFILL), "it has read the prompt");
        assert!(matches!(rig.take(News::Refused(Role::Decode)), Next::Again(_)), "there is an end to that");
    }

    #[test]
    fn a_decode_worker_that_drains_is_gone_round_and_accused_of_nothing() {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert_eq!(rig.take(News::Read), Next::Join);
        let drains = News::Failed(Role::Decode, Cause::Draining);
        assert_eq!(rig.take(drains), Next::Rejoin, "what is kept is for another one");
        assert_eq!(
            (rig.flight.avoid().unwilling.as_slice(), rig.flight.accused().count()),
            (&[DECODE][..], 0)
        );
        // There is no other.
        assert!(matches!(rig.take(News::Lost(Role::Decode, Cause::PeerLost)), Next::Again(_)));
        assert_eq!((rig.flight.avoid().failed.len(), rig.flight.accused().count()), (0, 0));
    }

    #[test]
    fn a_decode_worker_that_takes_no_connection_is_accused_of_it_once() {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert_eq!(rig.take(News::Read), Next::Join);
        assert_eq!(rig.take(News::Refused(Role::Decode)), Next::Rejoin);
        assert_eq!((&rig.flight.avoid().failed[..], rig.flight.accused().count()), (&[DECODE][..], 1));
        assert!(matches!(rig.take(News::Lost(Role::Decode, Cause::PeerLost)), Next::Again(_)));
        assert_eq!((rig.flight.avoid().failed.len(), rig.flight.accused().count()), (1, 0), "the same one");
    }

    #[test]
    fn somebody_who_may_come_is_waited_for_by_requests_that_were_sent() {
        let mut rig = Rig::new(1);
        assert_eq!(rig.nobody(true), Next::Fail(Cause::PeerLost), "a new request is told at once");
        let mut rig = Rig::new(1);
        assert!(matches!(rig.sent().take(News::Lost(Role::Decode, Cause::PeerLost)), Next::Again(_)));
        let begun = rig.now;
        while let Next::Again(at) = rig.nobody(true) {
            rig.now = at.max(rig.now + Duration::from_millis(100));
        }
        assert!(rig.now > begun + RETRY_TIME_MAX / 2 && rig.now < begun + RETRY_TIME_MAX * 2);
        let mut rig = Rig::new(1);
        rig.deadline = Some(rig.now + RETRY_TIME_MAX / 10);
        assert!(matches!(rig.sent().take(News::Lost(Role::Decode, Cause::PeerLost)), Next::Again(_)));
        while let Next::Again(at) = rig.nobody(true) {
            rig.now = at;
        }
        assert!(Some(rig.now) <= rig.deadline, "no longer than its client");
        let mut rig = Rig::new(1);
        assert!(matches!(rig.sent().take(News::Failed(Role::Decode, Cause::Overloaded)), Next::Again(_)));
        assert_eq!(rig.nobody(false), Next::Fail(Cause::Overloaded), "all have said no");
    }
}
