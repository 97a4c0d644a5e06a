//! One request under all that may happen to it.

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
    assert_eq!(
        rig.take(News::Lost(Role::Prefill, Cause::PeerLost)),
        Next::On,
        "decode has all of it"
    );
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
        assert_eq!(
            rig.take(News::Connected),
            Next::On,
            "what the other leg says is of no interest"
        );
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
        (1..10)
            .find(|_| matches!(rig.sent().take(News::Failed(Role::Decode, cause)), Next::Fail(_)))
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

/// It may be that nobody could have served it in so little time.
#[test]
fn who_is_asked_when_its_client_s_time_is_up_is_not_to_blame() {
    let late = News::Lost(Role::Decode, Cause::Deadline);
    for is_passing in [false, true] {
        let mut rig = Rig::new(1);
        rig.sent();
        if is_passing {
            let _ = rig.take(passes(true));
        }
        assert_eq!(rig.take(late), Next::Fail(Cause::Deadline));
        assert_eq!(rig.flight.accused().count(), 0);
    }
    let mut rig = Rig::new(1);
    rig.deadline = Some(rig.now);
    let _ = rig.sent().take(News::Lost(Role::Prefill, Cause::PeerLost));
    assert_eq!(rig.take(late), Next::Fail(Cause::Deadline), "though prefill was lost");
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
    let p = Role::Prefill;
    let nobody: &[WorkerNumber] = &[];
    for (news, failed, unwilling) in [
        (News::Lost(p, PeerLost), &[PREFILL][..], nobody),
        (News::Failed(p, Internal), &[PREFILL], nobody),
        (News::Failed(p, ClientGone), &[PREFILL], nobody),
        (News::Failed(p, PeerLost), &[PREFILL], nobody),
        (News::Failed(p, Overloaded), nobody, &[PREFILL]),
        (News::Failed(p, Draining), nobody, &[PREFILL]),
        (News::Failed(p, Incompatible), nobody, &[PREFILL]),
    ] {
        let mut rig = Rig::new(RETRIES_DEFAULT);
        reading(&mut rig);
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
    assert!(
        matches!(rig.take(News::Refused(Role::Decode)), Next::Again(_)),
        "there is an end to that"
    );
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
    assert_eq!(
        (rig.flight.avoid().failed.len(), rig.flight.accused().count()),
        (1, 0),
        "the same one"
    );
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
    assert!(matches!(
        rig.sent().take(News::Failed(Role::Decode, Cause::Overloaded)),
        Next::Again(_)
    ));
    assert_eq!(rig.nobody(false), Next::Fail(Cause::Overloaded), "all have said no");
}
