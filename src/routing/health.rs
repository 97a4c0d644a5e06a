//! The health of one worker. The router probes it at intervals. A refused connection makes it down
//! at once.
//!
//! A worker starts as down and is probed at once.
//! Not here: the probe itself and its deadline (`router::pool`).

use crate::config::HealthConfig;
use crate::stdx::failpoint::is_failpoint_active;
use std::time::Instant;

/// A change of health.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HealthChange {
    /// The worker is usable from now on.
    Up,
    /// The worker is not usable any more.
    Down,
}

/// The health of one worker.
#[derive(Clone, Debug)]
pub struct Health {
    terms: HealthConfig,
    up: bool,
    /// Failed probes since the last success.
    failures: u32,
    /// Successful probes since the last failure, or since it was down for another reason.
    successes: u32,
    /// Time at which the router stops to probe it, unless a probe succeeds before.
    awaited_until: Option<Instant>,
    /// Whether the router has stopped to probe it.
    given_up: bool,
    /// Whether a probe has ever succeeded.
    is_met: bool,
    /// Whether it has ever answered a query for its identity.
    tells: bool,
    /// Whether it left the last identity query unanswered.
    is_mute: bool,
    /// Time of the next probe. `None` while a probe is in progress.
    next_probe: Option<Instant>,
}

impl Health {
    /// A worker without history.
    pub fn new(terms: HealthConfig, now: Instant) -> Health {
        let awaited_until = terms.first_time.map(|time| now + time);
        Health {
            terms,
            up: false,
            failures: 0,
            successes: 0,
            awaited_until,
            given_up: false,
            is_met: false,
            tells: false,
            is_mute: false,
            next_probe: Some(now),
        }
    }

    /// Whether it is usable.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether so many probes in a row have failed that it is down.
    pub fn is_silent(&self) -> bool {
        self.failures >= self.terms.failures
    }

    /// Starts a probe if one is due. Returns whether it started. It ends with [`Health::probed`].
    pub fn begin_probe(&mut self, now: Instant) -> bool {
        self.next_probe.take_if(|due| *due <= now).is_some()
    }

    /// Makes the next probe due now, unless a probe is in progress.
    pub fn hasten(&mut self, now: Instant) {
        self.next_probe = self.next_probe.map(|due| due.min(now));
    }

    /// Stops to probe a worker that was not up in time. Returns whether this call did so.
    pub fn give_up(&mut self, now: Instant) -> bool {
        let was_given_up = self.given_up;
        let is_late = !self.is_met && self.awaited_until.is_some_and(|until| until <= now);
        self.given_up |= is_late && self.next_probe.take().is_some();
        is_late && !was_given_up && self.given_up
    }

    /// Keeps probing without a time limit, because the entry of a present worker is renewed.
    pub fn keep_looking(&mut self) {
        self.awaited_until = None;
    }

    /// Handles a new announcement of the worker. If the router had stopped to probe it, a probe is
    /// due now, as for a new worker. Returns whether it had.
    pub fn await_anew(&mut self, now: Instant) -> bool {
        let was_given_up = std::mem::take(&mut self.given_up);
        if was_given_up {
            self.awaited_until = self.terms.first_time.map(|time| now + time);
            self.next_probe = Some(now);
        }
        was_given_up
    }

    /// Records that it answered an identity query.
    pub fn record_identified(&mut self) {
        (self.tells, self.is_mute) = (true, false);
    }

    /// Records that it did not answer the identity query before a probe. That alone is no failure,
    /// because other engines can be slow to answer. If the probe also fails, both count as
    /// failures. A worker that has never answered such a query is exempt.
    pub fn unanswered(&mut self) {
        self.is_mute = self.tells;
    }

    /// Applies the result of a probe.
    pub fn probed(&mut self, is_well: bool, now: Instant) -> Option<HealthChange> {
        self.is_met |= is_well;
        let failed = 1 + u32::from(std::mem::take(&mut self.is_mute));
        (self.failures, self.successes) = match is_well {
            true => (0, self.successes.saturating_add(1)),
            false => (self.failures.saturating_add(failed), 0),
        };
        let stays = self.up && self.failures < self.terms.failures;
        let up = stays || self.successes >= self.terms.successes;
        // The worker can be gone, and clients wait for it.
        let is_doubtful = up && !is_well;
        let interval = if self.is_met { self.terms.interval } else { self.terms.first_interval };
        self.next_probe = Some(if is_doubtful { now } else { now + interval });
        if !up && is_failpoint_active("worker that is down is not probed") {
            self.next_probe = None;
        }
        self.turn(up)
    }

    /// Applies an answer to a probe: the worker takes no new requests, and its running requests
    /// continue.
    pub fn declined(&mut self, now: Instant) -> Option<HealthChange> {
        (self.failures, self.successes, self.is_met, self.is_mute) = (0, 0, true, false);
        self.next_probe = Some(now + self.terms.interval);
        self.turn(false)
    }

    /// Records that it refused a connection.
    pub fn refused(&mut self) -> Option<HealthChange> {
        self.successes = 0;
        self.turn(false)
    }

    fn turn(&mut self, up: bool) -> Option<HealthChange> {
        let was = std::mem::replace(&mut self.up, up);
        (was != up).then_some(if up { HealthChange::Up } else { HealthChange::Down })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ROUTER_PROBE_INTERVAL;
    use std::time::Duration;

    #[test]
    fn one_success_is_up_and_two_failures_in_a_row_are_down() {
        let now = Instant::now();
        let mut health = Health::new(HealthConfig::default(), now);
        assert!(!health.is_up());
        let mut seen = Vec::new();
        for is_well in [false, true, true, false, true, false, false, false, true] {
            seen.push((health.probed(is_well, now), health.is_up()));
        }
        let (up, down) = (Some(HealthChange::Up), Some(HealthChange::Down));
        assert_eq!(
            seen,
            [
                (None, false),
                (up, true),
                (None, true),
                (None, true),
                (None, true),
                (None, true),
                (down, false),
                (None, false),
                (up, true)
            ]
        );
    }

    #[test]
    fn the_first_probe_is_due_at_once_and_the_next_an_interval_after_the_last_ended() {
        let now = Instant::now();
        let mut health = Health::new(HealthConfig::default(), now);
        assert!(health.begin_probe(now));
        assert!(!health.begin_probe(now + 10 * ROUTER_PROBE_INTERVAL), "one at a time");
        health.probed(true, now);
        assert!(!health.begin_probe(now + ROUTER_PROBE_INTERVAL / 2));
        assert!(health.begin_probe(now + ROUTER_PROBE_INTERVAL));
        health.hasten(now);
        assert!(!health.begin_probe(now + ROUTER_PROBE_INTERVAL), "still one at a time");
        health.probed(true, now);
        health.hasten(now);
        assert!(health.begin_probe(now), "sooner, where there is reason");
        health.probed(false, now);
        assert!(health.begin_probe(now), "one failure is doubtful, and is asked again at once");
        health.probed(false, now);
        assert!(!health.begin_probe(now), "two are not");
    }

    #[test]
    fn one_that_takes_nothing_new_is_not_silent() {
        let now = Instant::now();
        let mut health = Health::new(HealthConfig::default(), now);
        health.probed(true, now);
        assert_eq!([(); 3].map(|()| health.declined(now)), [Some(HealthChange::Down), None, None]);
        health.probed(false, now);
        assert!(!health.is_silent(), "one lost probe tells nothing");
        health.probed(false, now);
        assert!(health.is_silent() && !health.is_up());
    }

    #[test]
    fn a_question_that_is_not_answered_counts_with_the_probe_behind_it() {
        let now = Instant::now();
        let mut health = Health::new(HealthConfig::default(), now);
        let asked = |health: &mut Health, is_well| {
            health.unanswered();
            health.probed(is_well, now);
            (health.is_up(), health.is_silent())
        };
        health.probed(true, now);
        assert_eq!(asked(&mut health, false), (true, false), "it may never tell");
        health.record_identified();
        assert_eq!(
            [(); 3].map(|()| asked(&mut health, true)),
            [(true, false); 3],
            "it is slow to tell"
        );
        assert_eq!(asked(&mut health, false), (false, true));
        health.probed(true, now);
        health.unanswered();
        health.declined(now);
        health.probed(false, now);
        assert!(!health.is_silent(), "it has answered since");
    }

    #[test]
    fn a_refused_connection_is_down_at_once_until_a_probe_succeeds() {
        let now = Instant::now();
        let mut health = Health::new(HealthConfig::default(), now);
        health.probed(true, now);
        assert_eq!(health.refused(), Some(HealthChange::Down));
        assert_eq!(health.refused(), None);
        assert_eq!(health.probed(true, now), Some(HealthChange::Up));
    }

    #[test]
    fn thresholds_and_intervals_are_those_asked_for() {
        let seconds = Duration::from_secs;
        let terms = HealthConfig {
            interval: seconds(10),
            failures: 3,
            successes: 2,
            first_interval: seconds(2),
            ..HealthConfig::default()
        };
        let now = Instant::now();
        let mut health = Health::new(terms, now);
        health.probed(false, now);
        assert!(!health.begin_probe(now + seconds(1)) && health.begin_probe(now + seconds(2)));
        assert_eq!(
            [true, false, true, true].map(|is_well| health.probed(is_well, now)),
            [None, None, None, Some(HealthChange::Up)]
        );
        assert!(!health.begin_probe(now + seconds(9)) && health.begin_probe(now + seconds(10)));
        assert_eq!(
            [(); 3].map(|()| health.probed(false, now)),
            [None, None, Some(HealthChange::Down)]
        );
        assert_eq!([(); 2].map(|()| health.probed(true, now)), [None, Some(HealthChange::Up)]);
        assert_eq!(health.refused(), Some(HealthChange::Down));
        assert_eq!(
            [(); 2].map(|()| health.probed(true, now)),
            [None, Some(HealthChange::Up)],
            "counted anew"
        );
    }

    #[test]
    fn one_that_never_comes_is_given_up_and_one_that_goes_is_not() {
        let terms =
            HealthConfig { first_time: Some(Duration::from_secs(5)), ..HealthConfig::default() };
        let now = Instant::now();
        let late = now + Duration::from_secs(5);
        let (mut never, mut once) = (Health::new(terms, now), Health::new(terms, now));
        assert!(
            !never.give_up(now) && never.begin_probe(now) && !never.give_up(late),
            "one is under way"
        );
        never.probed(false, now);
        assert!(
            never.give_up(late)
                && !never.give_up(late)
                && !never.begin_probe(late + ROUTER_PROBE_INTERVAL)
        );
        assert!(never.await_anew(late) && !never.await_anew(late) && never.begin_probe(late));
        never.probed(false, late);
        assert!(
            !never.give_up(late) && never.give_up(late + Duration::from_secs(5)),
            "as long as at first"
        );
        once.probed(true, now);
        once.probed(false, now);
        once.probed(false, now);
        assert!(!once.is_up() && !once.give_up(late) && once.begin_probe(late));
        let mut patient = Health::new(HealthConfig::default(), now);
        assert!(!patient.give_up(late));
    }
}
