//! The buckets of keys, with a clock of the test.

use super::*;
use crate::config::secret::Secret;

const SECOND: Duration = Duration::from_secs(1);

fn key(text: &str, requests: Option<u32>, tokens: Option<u32>) -> ApiKey {
    let secret = Secret::of_bytes(text.as_bytes());
    ApiKey { secret, limits: RateLimits { requests, tokens } }
}

fn limits(requests: Option<u32>, tokens: Option<u32>, keys: &[ApiKey]) -> KeyLimits {
    let flags = RateLimits { requests, tokens };
    let mut limits = KeyLimits { flags, ..KeyLimits::default() };
    limits.set_keys(keys);
    limits
}

fn two_keys() -> [ApiKey; 2] {
    [key("a", None, None), key("b", None, None)]
}

fn conn(number: u32) -> ConnId {
    ConnId::outside(number)
}

/// Status, limit and `Retry-After` of a refusal.
fn refused(verdict: Result<(), (KeyLimit, ApiError)>) -> (u16, KeyLimit, Option<u32>) {
    let (limit, error) = verdict.unwrap_err();
    assert_eq!(error.code, ErrorCode::RateLimitExceeded);
    (error.status, limit, error.retry_after)
}

#[test]
fn a_key_has_the_requests_of_a_minute_at_once_and_others_are_not_affected() {
    let (mut limits, begun) = (limits(Some(7), None, &two_keys()), Instant::now());
    for number in 0..7 {
        limits.admit(conn(number), 0, 1 << 40, begun).unwrap();
    }
    // 60 s / 7 is not a whole number of nanoseconds.
    assert_eq!(refused(limits.admit(conn(9), 0, 1, begun)), (429, KeyLimit::Requests, Some(9)));
    limits.admit(conn(10), 1, 1, begun).unwrap();
    let almost = begun + MINUTE_OF_SEVEN - Duration::from_nanos(1);
    assert_eq!(refused(limits.admit(conn(9), 0, 1, almost)), (429, KeyLimit::Requests, Some(1)));
    limits.admit(conn(9), 0, 1, begun + MINUTE_OF_SEVEN).unwrap();
    // However often the time is taken, nothing is lost.
    let mut now = begun + MINUTE_OF_SEVEN;
    while now < begun + 17 * SECOND {
        assert_eq!(refused(limits.admit(conn(9), 0, 1, now)).1, KeyLimit::Requests);
        now += Duration::from_nanos(100_000_007);
    }
    limits.admit(conn(11), 0, 1, begun + 2 * MINUTE_OF_SEVEN).unwrap();
    assert!(limits.charges.is_empty(), "tokens are not limited");
}

/// The seventh part of a minute, rounded up.
const MINUTE_OF_SEVEN: Duration = Duration::from_nanos(8_571_428_572);

#[test]
fn the_rest_of_a_charge_comes_back_and_the_wait_that_is_told_is_enough() {
    let (mut limits, begun) = (limits(None, Some(600), &two_keys()), Instant::now());
    limits.admit(conn(1), 0, 400, begun).unwrap();
    // 200 are left, and 10 come each second.
    let verdict = limits.admit(conn(2), 0, 305, begun);
    assert_eq!(refused(verdict), (429, KeyLimit::Tokens, Some(11)));
    let early = begun + Duration::from_millis(10_499);
    assert_eq!(refused(limits.admit(conn(2), 0, 305, early)).2, Some(1));
    limits.admit(conn(2), 0, 305, begun + 11 * SECOND).unwrap();
    limits.set_used(conn(2), 300, begun + 12 * SECOND);
    limits.end(conn(2));
    limits.end(conn(2));
    limits.set_used(conn(1), 60, begun + 12 * SECOND);
    limits.end(conn(1));
    let left = |limits: &mut KeyLimits, now| {
        let bucket = limits.keys[0].tokens.as_mut().unwrap();
        bucket.fill(now);
        bucket.left()
    };
    assert_eq!(left(&mut limits, begun + 12 * SECOND), 360);
    assert_eq!(left(&mut limits, begun + 1000 * SECOND), 600, "a bucket is never fuller");
    assert!(limits.charges.is_empty());
}

#[test]
fn tokens_beyond_the_charge_are_taken_as_they_come() {
    let (mut limits, begun) = (limits(None, Some(60), &two_keys()), Instant::now());
    limits.admit(conn(1), 0, 10, begun).unwrap();
    limits.set_used(conn(1), 8, begun);
    limits.set_used(conn(1), 100, begun);
    assert_eq!(refused(limits.admit(conn(2), 0, 1, begun)), (429, KeyLimit::Tokens, Some(41)));
    // An error as the whole answer costs nothing, except that of an abort.
    limits.settle(conn(1), 499, begun);
    assert_eq!(refused(limits.admit(conn(2), 0, 1, begun)).2, Some(41));
    limits.settle(conn(1), 502, begun);
    limits.end(conn(1));
    limits.admit(conn(2), 0, 60, begun).unwrap();
    limits.use_whole_charge(conn(2));
    limits.end(conn(2));
    assert_eq!(refused(limits.admit(conn(3), 0, 60, begun)).2, Some(60));
    limits.admit(conn(3), 0, 0, begun).unwrap();
}

#[test]
fn a_request_that_never_fits_is_told_so_and_takes_nothing() {
    let (mut limits, begun) = (limits(Some(1), Some(60), &two_keys()), Instant::now());
    let verdict = limits.admit(conn(1), 0, 61, begun);
    let (limit, error) = verdict.unwrap_err();
    assert_eq!((limit, error.status, error.retry_after), (KeyLimit::Tokens, 400, None));
    assert!(error.message.contains("limit of 60 tokens per minute"), "{}", error.message);
    assert!(error.message.contains("up to 61 tokens"), "{}", error.message);
    limits.admit(conn(1), 0, 60, begun).unwrap();
    let fields: Vec<_> = limits.fields(0).map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(
        fields,
        [
            "x-ratelimit-limit-requests=1",
            "x-ratelimit-remaining-requests=0",
            "x-ratelimit-limit-tokens=60",
            "x-ratelimit-remaining-tokens=0"
        ]
    );
}

#[test]
fn a_reload_keeps_the_state_of_keys_that_stay() {
    let (mut limits, begun) = (limits(Some(2), Some(100), &two_keys()), Instant::now());
    limits.admit(conn(1), 1, 90, begun).unwrap();
    limits.admit(conn(2), 0, 90, begun).unwrap();
    limits.set_keys(&[key("c", None, None), key("b", None, Some(200))]);
    // 90 of now 200 are charged, and 50 are used in the end.
    limits.set_used(conn(1), 50, begun);
    limits.end(conn(1));
    limits.end(conn(2));
    assert_eq!(refused(limits.admit(conn(3), 1, 151, begun)).1, KeyLimit::Tokens);
    limits.admit(conn(3), 1, 150, begun).unwrap();
    assert_eq!(refused(limits.admit(conn(4), 1, 0, begun)).1, KeyLimit::Requests);
    limits.admit(conn(5), 0, 100, begun).unwrap();
    // A key that comes back is new, and a charge of its former time does not count.
    limits.set_keys(&two_keys());
    limits.admit(conn(6), 0, 100, begun).unwrap();
    limits.end(conn(5));
    assert_eq!(refused(limits.admit(conn(7), 0, 1, begun)).1, KeyLimit::Tokens);
}

#[test]
fn a_line_of_the_file_has_a_limit_only_with_the_flag() {
    let keys = [key("a", Some(1), Some(1)), key("b", None, None)];
    let (mut off, begun) = (limits(None, None, &keys), Instant::now());
    assert!(!off.is_on() && off.fields(0).next().is_none());
    (0..9).for_each(|number| off.admit(conn(number), 0, 9, begun).unwrap());
    let mut limits = limits(Some(3), None, &keys);
    limits.admit(conn(1), 0, 9, begun).unwrap();
    assert_eq!(refused(limits.admit(conn(2), 0, 9, begun)).1, KeyLimit::Requests);
    (3..6).for_each(|number| limits.admit(conn(number), 1, 9, begun).unwrap());
    assert_eq!(refused(limits.admit(conn(6), 1, 9, begun)).1, KeyLimit::Requests);
}
