//! Limits of requests and tokens for each API key: token buckets.
//!
//! A bucket holds the amount of one minute and fills evenly, so a key can use a minute's amount at
//! once. A request is charged at its start. Tokens that are computed use up the charge first. Then
//! they come from the bucket, which can go below zero. The end of the request returns the rest.
//!
//! Owns: the buckets, and the charge of each request that is not answered. Thread: `ctl`.
//! Invariants: a key that stays in its file keeps its state; a charge ends with the response of its
//! connection. Not here: the key of a request (`authorization`); the clock, `now` is an argument.

use crate::api::{ApiError, ErrorCode};
use crate::cause::Cause;
use crate::config::ServerConfig;
use crate::config::api_key::{ApiKey, REQUESTS_FLAG, RateLimits, TOKENS_FLAG};
use crate::net::ConnId;
use crate::obs::instruments::{Counter, Labels};
use crate::obs::registry::Registry;
use crate::stdx::hash_map::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Nanoseconds of a minute.
const MINUTE: u128 = 60_000_000_000;

/// Header fields of answers, with the names of OpenAI: the size of a bucket, and what it has.
pub(super) const REQUEST_FIELDS: [&str; 2] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"];
pub(super) const TOKEN_FIELDS: [&str; 2] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"];

/// A limit of an API key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyLimit {
    /// Requests per minute.
    Requests,
    /// Tokens per minute.
    Tokens,
}

/// Counters of requests that a limit has refused.
#[derive(Debug)]
pub struct KeyRefusals {
    requests: Arc<Counter>,
    tokens: Arc<Counter>,
}

impl KeyRefusals {
    /// Registers the counters.
    pub fn register(registry: &mut Registry) -> KeyRefusals {
        let mut counter = |limit| {
            let help = "Requests that a limit of their API key has refused.";
            let labels = Labels::none().and("limit", limit);
            registry.counter(&["baton_key_limit_refusals_total"], help, &labels)
        };
        KeyRefusals { requests: counter("requests"), tokens: counter("tokens") }
    }

    /// Counts a refused request.
    pub fn count(&self, limit: KeyLimit) {
        match limit {
            KeyLimit::Requests => self.requests.inc(),
            KeyLimit::Tokens => self.tokens.inc(),
        }
    }
}

/// An amount per minute.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    per_minute: u32,
    /// What the full bucket has more, at the time `at`. Unit: 1 / [`MINUTE`], so that each
    /// nanosecond fills in a whole number.
    missing: u128,
    at: Option<Instant>,
}

impl Bucket {
    fn full(per_minute: u32) -> Bucket {
        Bucket { per_minute, missing: 0, at: None }
    }

    fn fill(&mut self, now: Instant) {
        let before = self.at.replace(now).unwrap_or(now);
        let passed = now.saturating_duration_since(before).as_nanos();
        self.missing = self.missing.saturating_sub(passed * u128::from(self.per_minute));
    }

    fn take(&mut self, count: u64) {
        self.missing += u128::from(count) * MINUTE;
    }

    fn give(&mut self, count: u64) {
        self.missing = self.missing.saturating_sub(u128::from(count) * MINUTE);
    }

    /// What it has, rounded down.
    fn left(&self) -> u64 {
        (u128::from(self.per_minute) * MINUTE).saturating_sub(self.missing).div_euclid(MINUTE)
            as u64
    }

    /// The time until it has this amount.
    fn wait(&self, count: u64) -> Duration {
        let size = u128::from(self.per_minute) * MINUTE;
        let lacks = (self.missing + u128::from(count) * MINUTE).saturating_sub(size);
        let nanoseconds = lacks.div_ceil(u128::from(self.per_minute));
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Its size and what it has, as header fields.
    fn fields(&self, [limit, left]: [&'static str; 2]) -> [(&'static str, String); 2] {
        [(limit, self.per_minute.to_string()), (left, self.left().to_string())]
    }
}

/// The buckets of one key. `None`: no limit.
#[derive(Debug)]
struct KeyState {
    key: Vec<u8>,
    /// Names the key also after a reload.
    number: u64,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

/// The tokens of a request that is not answered.
#[derive(Clone, Copy, Debug)]
struct Charge {
    /// The number of its key.
    key: u64,
    /// Tokens that were taken from the bucket and are not computed.
    rest: u64,
    /// Tokens that were computed.
    used: u64,
}

/// The limits of all API keys.
#[derive(Default, Debug)]
pub struct KeyLimits {
    /// The values of the flags. Without its flag, a limit is off for all keys.
    flags: RateLimits,
    /// In the order of the file; empty without flags.
    keys: Vec<KeyState>,
    /// By the connection of the request.
    charges: HashMap<ConnId, Charge>,
    next_number: u64,
}

impl KeyLimits {
    /// The limits of these settings, with full buckets.
    pub fn of(server: &ServerConfig) -> KeyLimits {
        let mut limits = KeyLimits { flags: server.key_limits, ..KeyLimits::default() };
        limits.set_keys(&server.api_keys);
        limits
    }

    /// Limits these keys from now on. A key that was there before keeps its state.
    pub fn set_keys(&mut self, keys: &[ApiKey]) {
        if !self.is_on() {
            return;
        }
        let former = std::mem::take(&mut self.keys).into_iter();
        let mut former: HashMap<Vec<u8>, KeyState> =
            former.map(|state| (state.key.clone(), state)).collect();
        let flags = self.flags;
        for ApiKey { secret, limits } in keys {
            let mut state = former.remove(secret.bytes()).unwrap_or_else(|| {
                self.next_number += 1;
                let key = secret.bytes().to_vec();
                KeyState { key, number: self.next_number, requests: None, tokens: None }
            });
            for (bucket, flag, own) in [
                (&mut state.requests, flags.requests, limits.requests),
                (&mut state.tokens, flags.tokens, limits.tokens),
            ] {
                let Some(flag) = flag else { continue };
                let per_minute = own.unwrap_or(flag);
                bucket.get_or_insert(Bucket::full(per_minute)).per_minute = per_minute;
            }
            self.keys.push(state);
        }
    }

    /// Whether any limit is on.
    pub fn is_on(&self) -> bool {
        self.flags.flag().is_some()
    }

    /// Charges a request with this many tokens to the key with this index.
    ///
    /// # Errors
    /// The limit that refuses the request, and the answer.
    pub fn admit(
        &mut self,
        conn: ConnId,
        key: usize,
        tokens: u64,
        now: Instant,
    ) -> Result<(), (KeyLimit, ApiError)> {
        let Some(state) = self.keys.get_mut(key) else { return Ok(()) };
        for bucket in [&mut state.requests, &mut state.tokens].into_iter().flatten() {
            bucket.fill(now);
        }
        if let Some(bucket) = state.requests.filter(|bucket| !bucket.wait(1).is_zero()) {
            return Err((KeyLimit::Requests, too_many_requests(&bucket)));
        }
        if let Some(bucket) = state.tokens.filter(|bucket| !bucket.wait(tokens).is_zero()) {
            return Err((KeyLimit::Tokens, too_many_tokens(&bucket, tokens)));
        }
        if let Some(bucket) = &mut state.requests {
            bucket.take(1);
        }
        if let Some(bucket) = &mut state.tokens {
            bucket.take(tokens);
            let charge = Charge { key: state.number, rest: tokens, used: 0 };
            let before = self.charges.insert(conn, charge);
            debug_assert!(before.is_none(), "a connection has one request at a time");
        }
        Ok(())
    }

    /// Header fields with the limits of the key with this index.
    pub fn fields(&self, key: usize) -> impl Iterator<Item = (&'static str, String)> {
        let state = self.keys.get(key);
        let requests = state.and_then(|state| Some(state.requests?.fields(REQUEST_FIELDS)));
        let tokens = state.and_then(|state| Some(state.tokens?.fields(TOKEN_FIELDS)));
        requests.into_iter().chain(tokens).flatten()
    }

    /// Whether the tokens of this connection's request are counted.
    pub fn is_charged(&self, conn: ConnId) -> bool {
        self.charges.contains_key(&conn)
    }

    /// Sets the number of tokens that this connection's request has used so far.
    pub fn set_used(&mut self, conn: ConnId, tokens: u64, now: Instant) {
        let Some(charge) = self.charges.get_mut(&conn) else { return };
        let taken = charge.rest + charge.used;
        (charge.used, charge.rest) = (tokens, taken.saturating_sub(tokens));
        let (number, more) = (charge.key, tokens.saturating_sub(taken));
        if more > 0
            && let Some(bucket) = self.bucket(number)
        {
            bucket.fill(now);
            bucket.take(more);
        }
    }

    /// Counts the whole charge as used, because the true number is unknown.
    pub fn use_whole_charge(&mut self, conn: ConnId) {
        if let Some(charge) = self.charges.get_mut(&conn) {
            charge.used += std::mem::take(&mut charge.rest);
        }
    }

    /// Sees the status of a whole answer. An error costs nothing, unless the client has ended the
    /// request: then, what was computed stays counted.
    pub fn settle(&mut self, conn: ConnId, status: u16, now: Instant) {
        let is_ended = [Cause::Aborted, Cause::Deadline].map(Cause::http_status).contains(&status);
        if status >= 400 && !is_ended {
            self.set_used(conn, 0, now);
        }
    }

    /// Ends the charge of this connection's request, if it has one.
    pub fn end(&mut self, conn: ConnId) {
        if let Some(charge) = self.charges.remove(&conn)
            && let Some(bucket) = self.bucket(charge.key)
        {
            bucket.give(charge.rest);
        }
    }

    /// The connections of all charges.
    pub fn charged(&self) -> impl Iterator<Item = ConnId> {
        self.charges.keys().copied()
    }

    fn bucket(&mut self, number: u64) -> Option<&mut Bucket> {
        self.keys.iter_mut().find(|state| state.number == number)?.tokens.as_mut()
    }
}

#[cfg(test)]
impl KeyLimits {
    /// One key with these tokens per minute.
    pub(super) fn of_one_key(tokens: u32) -> KeyLimits {
        let flags = RateLimits { requests: None, tokens: Some(tokens) };
        let mut limits = KeyLimits { flags, ..KeyLimits::default() };
        let secret = crate::config::secret::Secret::of_bytes(b"key");
        limits.set_keys(&[ApiKey { secret, limits: RateLimits::default() }]);
        limits
    }
}

fn too_many_requests(bucket: &Bucket) -> ApiError {
    let most = bucket.per_minute;
    let limit = format!("this API key has a limit of {most} requests per minute ({REQUESTS_FLAG})");
    refusal(limit, bucket.wait(1))
}

fn too_many_tokens(bucket: &Bucket, tokens: u64) -> ApiError {
    let (most, left) = (bucket.per_minute, bucket.left());
    let limit = format!("this API key has a limit of {most} tokens per minute ({TOKENS_FLAG})");
    let needs = format!("the request needs up to {tokens} tokens for its prompt and its answer");
    if tokens > u64::from(most) {
        let why = format!("{limit}, and {needs}; shorten the prompt, or ask for fewer tokens");
        return ApiError::new(400, ErrorCode::RateLimitExceeded, why);
    }
    refusal(format!("{limit}, of which {left} are left; {needs}"), bucket.wait(tokens))
}

/// A refusal of a request that fits after this time.
fn refusal(limit: String, wait: Duration) -> ApiError {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
    let message = format!("{limit}; try again in {seconds} s");
    let error = ApiError::new(429, ErrorCode::RateLimitExceeded, message);
    ApiError { retry_after: Some(seconds), ..error }
}

#[cfg(test)]
#[path = "key_limits_tests.rs"]
mod tests;
