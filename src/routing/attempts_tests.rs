//! Tests of one request, with every event that it can get.

use super::*;
use crate::config::RetryConfig;
use crate::limits::RETRIES_DEFAULT;
use std::time::Duration;

const PREFILL: WorkerNumber = WorkerNumber(0);
const DECODE: WorkerNumber = WorkerNumber(1);

/// A request with its router.
struct Rig {
    attempts: Attempts,
    retries: RetryBudget,
    now: Instant,
    deadline: Option<Instant>,
}

impl Rig {
    fn new(most: u32) -> Rig {
        let now = Instant::now();
        Rig {
            attempts: Attempts::default(),
            retries: RetryBudget::new(RetryConfig::of(most), now),
            now,
            deadline: None,
        }
    }

    fn terms(&mut self) -> (&mut Attempts, AttemptContext<'_>) {
        (
            &mut self.attempts,
            AttemptContext {
                now: self.now,
                chance: 0,
                deadline: self.deadline,
                retries: &mut self.retries,
            },
        )
    }

    fn take(&mut self, news: AttemptEvent) -> AttemptAction {
        let (attempts, mut terms) = self.terms();
        attempts.apply_event(news, &mut terms)
    }

    fn nobody(&mut self, may_come: bool) -> AttemptAction {
        let (attempts, terms) = self.terms();
        attempts.handle_no_worker(may_come, &terms)
    }

    /// Workers are chosen, and the request is sent.
    fn sent(&mut self) -> &mut Rig {
        self.attempts.set_workers(Some(PREFILL), Some(DECODE));
        assert_eq!(self.take(AttemptEvent::Opened(2)), AttemptAction::Wait);
        assert_eq!(self.take(AttemptEvent::Connected), AttemptAction::Wait);
        assert_eq!(self.take(AttemptEvent::Connected), AttemptAction::Send);
        self
    }
}

fn passes(resumable: bool) -> AttemptEvent {
    AttemptEvent::Passes { resumable }
}

#[test]
fn a_request_is_sent_when_all_connections_stand_and_lands() {
    let mut rig = Rig::new(RETRIES_DEFAULT);
    assert!(rig.sent().attempts.is_waiting());
    assert_eq!(rig.take(passes(true)), AttemptAction::Wait);
    assert_eq!(
        rig.take(AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost)),
        AttemptAction::Wait,
        "decode has all of it"
    );
    assert_eq!(rig.take(AttemptEvent::Finished), AttemptAction::Finish);
    assert_eq!(rig.take(AttemptEvent::Finished), AttemptAction::Wait, "it ends once");
}

#[test]
fn a_refused_connection_leads_to_another_pair_and_costs_no_try() {
    let mut rig = Rig::new(0);
    for _ in 1..ROUTER_PAIRS_MAX {
        rig.attempts.set_workers(Some(PREFILL), Some(DECODE));
        assert_eq!(rig.take(AttemptEvent::Opened(1)), AttemptAction::Wait);
        assert_eq!(rig.take(AttemptEvent::Refused(Leg::Decode)), AttemptAction::Retry(rig.now));
        assert_eq!(
            rig.take(AttemptEvent::Connected),
            AttemptAction::Wait,
            "what the other leg says is of no interest"
        );
    }
    assert_eq!(rig.attempts.avoid().failed, [DECODE; ROUTER_PAIRS_MAX as usize - 1]);
    rig.attempts.set_workers(Some(PREFILL), Some(DECODE));
    assert_eq!(rig.take(AttemptEvent::Refused(Leg::Prefill)), AttemptAction::Fail(Cause::PeerLost));
}

#[test]
fn a_worker_that_is_to_blame_is_not_asked_again() {
    use Cause::{ClientGone, Corrupt, Draining, Incompatible, Internal, Overloaded, PeerLost};
    let (p, d) = (Leg::Prefill, Leg::Decode);
    let nobody: &[WorkerNumber] = &[];
    for (news, failed, unwilling) in [
        (AttemptEvent::Lost(d, PeerLost), &[DECODE][..], nobody),
        (AttemptEvent::Failed(d, PeerLost), &[PREFILL, DECODE], nobody),
        (AttemptEvent::Failed(p, PeerLost), &[DECODE, PREFILL], nobody),
        (AttemptEvent::Failed(d, Corrupt), &[PREFILL, DECODE], nobody),
        (AttemptEvent::Failed(d, Internal), &[DECODE], nobody),
        (AttemptEvent::Failed(p, ClientGone), &[DECODE], nobody),
        (AttemptEvent::Failed(p, Overloaded), nobody, &[PREFILL]),
        (AttemptEvent::Failed(d, Draining), nobody, &[DECODE]),
        (AttemptEvent::Failed(d, Incompatible), nobody, &[PREFILL]),
    ] {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        assert!(matches!(rig.sent().take(news), AttemptAction::Retry(_)), "{news:?}");
        let AvoidList { failed: shunned, unwilling: never, draining } = rig.attempts.avoid();
        assert_eq!((&shunned[..], &never[..]), (failed, unwilling), "{news:?}");
        let drains = matches!(news, AttemptEvent::Failed(_, Draining));
        assert_eq!(&draining[..], if drains { unwilling } else { nobody }, "{news:?}");
        assert_eq!(rig.attempts.accused().count(), failed.len());
    }
}

#[test]
fn tries_have_an_end_and_some_causes_only_one() {
    let tries = |cause, most| {
        let mut rig = Rig::new(most);
        (1..10).find(|_| {
            matches!(
                rig.sent().take(AttemptEvent::Failed(Leg::Decode, cause)),
                AttemptAction::Fail(_)
            )
        })
    };
    assert_eq!(tries(Cause::PeerLost, RETRIES_DEFAULT), Some(RETRIES_DEFAULT + 1));
    assert_eq!(tries(Cause::PeerLost, 0), Some(1));
    assert_eq!(tries(Cause::Internal, RETRIES_DEFAULT), Some(2));
    for cause in [Cause::Refused, Cause::Deadline, Cause::Mismatch, Cause::Aborted] {
        assert_eq!(tries(cause, RETRIES_DEFAULT), Some(1), "{cause}");
    }
}

#[test]
fn a_resumable_stream_continues_elsewhere_and_its_attempts_count_anew() {
    let lost = AttemptEvent::Lost(Leg::Decode, Cause::PeerLost);
    let mut rig = Rig::new(1);
    for _ in 0..5 {
        assert_eq!(rig.sent().take(passes(true)), AttemptAction::Wait);
        assert!(matches!(rig.take(lost), AttemptAction::Retry(at) if at > rig.now));
        assert!(rig.attempts.is_retry());
    }
    assert_eq!(
        rig.sent().take(lost),
        AttemptAction::Fail(Cause::PeerLost),
        "nothing has passed since"
    );
    let mut rig = Rig::new(1);
    assert_eq!(rig.sent().take(passes(false)), AttemptAction::Wait);
    assert_eq!(rig.take(lost), AttemptAction::Fail(Cause::PeerLost));
}

#[test]
fn decode_has_a_while_to_decide_once_prefill_is_lost() {
    let lost = AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost);
    let mut rig = Rig::new(1);
    assert_eq!(
        rig.sent().take(lost),
        AttemptAction::ShortenDeadline(rig.now + ROUTER_LOST_PREFILL_TIME)
    );
    assert_eq!(rig.take(passes(true)), AttemptAction::RestoreDeadline, "it had everything");
    assert_eq!(
        rig.take(AttemptEvent::Lost(Leg::Decode, Cause::Deadline)),
        AttemptAction::Fail(Cause::Deadline)
    );
    let mut rig = Rig::new(1);
    assert_eq!(
        rig.sent().take(lost),
        AttemptAction::ShortenDeadline(rig.now + ROUTER_LOST_PREFILL_TIME)
    );
    assert!(matches!(
        rig.take(AttemptEvent::Lost(Leg::Decode, Cause::Deadline)),
        AttemptAction::Retry(_)
    ));
    assert!(rig.attempts.avoid().failed.contains(&PREFILL));
}

/// Perhaps no worker could have served it in such a short time.
#[test]
fn a_worker_is_not_to_blame_if_the_deadline_of_the_client_expires() {
    let late = AttemptEvent::Lost(Leg::Decode, Cause::Deadline);
    for is_passing in [false, true] {
        let mut rig = Rig::new(1);
        rig.sent();
        if is_passing {
            let _ = rig.take(passes(true));
        }
        assert_eq!(rig.take(late), AttemptAction::Fail(Cause::Deadline));
        assert_eq!(rig.attempts.accused().count(), 0);
    }
    let mut rig = Rig::new(1);
    rig.deadline = Some(rig.now);
    let _ = rig.sent().take(AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost));
    assert_eq!(rig.take(late), AttemptAction::Fail(Cause::Deadline), "though prefill was lost");
}

/// Workers are chosen for a prefill-first attempt, and prefill is sent.
fn reading(rig: &mut Rig) {
    rig.attempts.set_workers(Some(PREFILL), Some(DECODE));
    rig.attempts.in_turn();
    assert_eq!(rig.take(AttemptEvent::Opened(0)), AttemptAction::Send);
    assert!(!rig.attempts.is_waiting(), "decode has not been asked");
}

#[test]
fn decode_s_turn_comes_when_prefill_has_answered() {
    for stands in [true, false] {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert_eq!(rig.take(AttemptEvent::PrefillDone), AttemptAction::StartDecode);
        match stands {
            true => assert_eq!(rig.take(AttemptEvent::Opened(0)), AttemptAction::Send),
            false => {
                assert_eq!(rig.take(AttemptEvent::Opened(1)), AttemptAction::Wait);
                assert_eq!(rig.take(AttemptEvent::Connected), AttemptAction::Send);
            }
        }
        assert!(rig.attempts.is_waiting());
        assert_eq!(rig.take(passes(true)), AttemptAction::Wait);
        assert_eq!(rig.take(AttemptEvent::Finished), AttemptAction::Finish);
    }
    // The next attempt of a request can have another flow.
    let mut rig = Rig::new(RETRIES_DEFAULT);
    reading(&mut rig);
    assert!(matches!(
        rig.take(AttemptEvent::Lost(Leg::Prefill, Cause::PeerLost)),
        AttemptAction::Retry(_)
    ));
    rig.attempts.set_workers(None, Some(DECODE));
    assert_eq!(rig.take(AttemptEvent::Opened(0)), AttemptAction::Send);
    assert!(rig.attempts.is_waiting());
}

#[test]
fn a_prefill_worker_that_fails_before_decode_is_asked_is_alone_to_blame() {
    use Cause::{ClientGone, Draining, Incompatible, Internal, Overloaded, PeerLost};
    let p = Leg::Prefill;
    let nobody: &[WorkerNumber] = &[];
    for (news, failed, unwilling) in [
        (AttemptEvent::Lost(p, PeerLost), &[PREFILL][..], nobody),
        (AttemptEvent::Failed(p, Internal), &[PREFILL], nobody),
        (AttemptEvent::Failed(p, ClientGone), &[PREFILL], nobody),
        (AttemptEvent::Failed(p, PeerLost), &[PREFILL], nobody),
        (AttemptEvent::Failed(p, Overloaded), nobody, &[PREFILL]),
        (AttemptEvent::Failed(p, Draining), nobody, &[PREFILL]),
        (AttemptEvent::Failed(p, Incompatible), nobody, &[PREFILL]),
    ] {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert!(matches!(rig.take(news), AttemptAction::Retry(_)), "{news:?}");
        let AvoidList { failed: shunned, unwilling: never, draining } = rig.attempts.avoid();
        assert_eq!((&shunned[..], &never[..]), (failed, unwilling), "{news:?}");
        let drains = matches!(news, AttemptEvent::Failed(_, Draining));
        assert_eq!(&draining[..], if drains { unwilling } else { nobody }, "{news:?}");
    }
    for cause in [Cause::Refused, Cause::Deadline, Cause::Aborted] {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
        assert_eq!(rig.take(AttemptEvent::Failed(p, cause)), AttemptAction::Fail(cause));
    }
}

#[test]
fn kept_kv_goes_to_another_decode_worker_if_one_takes_no_connection() {
    let mut rig = Rig::new(RETRIES_DEFAULT);
    reading(&mut rig);
    assert_eq!(rig.take(AttemptEvent::PrefillDone), AttemptAction::StartDecode);
    for number in 0..ROUTER_PAIRS_MAX {
        assert_eq!(rig.take(AttemptEvent::Opened(1)), AttemptAction::Wait);
        assert_eq!(rig.take(AttemptEvent::Refused(Leg::Decode)), AttemptAction::ReplaceDecode);
        assert!(rig.attempts.accused().count() == 1, "it is to blame");
        rig.attempts.rejoin(WorkerNumber(50 + number as usize));
    }
    assert_eq!(rig.attempts.avoid().failed.len(), ROUTER_PAIRS_MAX as usize);
    assert_eq!(rig.attempts.worker(Leg::Prefill), Some(PREFILL), "it has read the prompt");
    assert!(
        matches!(rig.take(AttemptEvent::Refused(Leg::Decode)), AttemptAction::Retry(_)),
        "there is an end to that"
    );
}

#[test]
fn a_decode_worker_that_drains_is_gone_round_and_accused_of_nothing() {
    let mut rig = Rig::new(RETRIES_DEFAULT);
    reading(&mut rig);
    assert_eq!(rig.take(AttemptEvent::PrefillDone), AttemptAction::StartDecode);
    let drains = AttemptEvent::Failed(Leg::Decode, Cause::Draining);
    assert_eq!(rig.take(drains), AttemptAction::ReplaceDecode, "what is kept is for another one");
    assert_eq!(
        (rig.attempts.avoid().unwilling.as_slice(), rig.attempts.accused().count()),
        (&[DECODE][..], 0)
    );
    // There is no other decode worker.
    assert!(matches!(
        rig.take(AttemptEvent::Lost(Leg::Decode, Cause::PeerLost)),
        AttemptAction::Retry(_)
    ));
    assert_eq!((rig.attempts.avoid().failed.len(), rig.attempts.accused().count()), (0, 0));
}

#[test]
fn a_decode_worker_that_takes_no_connection_is_accused_of_it_once() {
    let mut rig = Rig::new(RETRIES_DEFAULT);
    reading(&mut rig);
    assert_eq!(rig.take(AttemptEvent::PrefillDone), AttemptAction::StartDecode);
    assert_eq!(rig.take(AttemptEvent::Refused(Leg::Decode)), AttemptAction::ReplaceDecode);
    assert_eq!(
        (&rig.attempts.avoid().failed[..], rig.attempts.accused().count()),
        (&[DECODE][..], 1)
    );
    assert!(matches!(
        rig.take(AttemptEvent::Lost(Leg::Decode, Cause::PeerLost)),
        AttemptAction::Retry(_)
    ));
    assert_eq!(
        (rig.attempts.avoid().failed.len(), rig.attempts.accused().count()),
        (1, 0),
        "the same one"
    );
}

#[test]
fn a_request_that_was_sent_waits_for_a_worker_that_may_come() {
    let mut rig = Rig::new(1);
    assert_eq!(
        rig.nobody(true),
        AttemptAction::Fail(Cause::PeerLost),
        "a new request fails at once"
    );
    let mut rig = Rig::new(1);
    assert!(matches!(
        rig.sent().take(AttemptEvent::Lost(Leg::Decode, Cause::PeerLost)),
        AttemptAction::Retry(_)
    ));
    let begun = rig.now;
    while let AttemptAction::Retry(at) = rig.nobody(true) {
        rig.now = at.max(rig.now + Duration::from_millis(100));
    }
    assert!(rig.now > begun + RETRY_TIME_MAX / 2 && rig.now < begun + RETRY_TIME_MAX * 2);
    let mut rig = Rig::new(1);
    rig.deadline = Some(rig.now + RETRY_TIME_MAX / 10);
    assert!(matches!(
        rig.sent().take(AttemptEvent::Lost(Leg::Decode, Cause::PeerLost)),
        AttemptAction::Retry(_)
    ));
    while let AttemptAction::Retry(at) = rig.nobody(true) {
        rig.now = at;
    }
    assert!(Some(rig.now) <= rig.deadline, "no longer than its client");
    let mut rig = Rig::new(1);
    assert!(matches!(
        rig.sent().take(AttemptEvent::Failed(Leg::Decode, Cause::Overloaded)),
        AttemptAction::Retry(_)
    ));
    assert_eq!(rig.nobody(false), AttemptAction::Fail(Cause::Overloaded), "all have said no");
}
