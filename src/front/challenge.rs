//! Proof of a cluster key over HTTP, for those who write into a registry: over a nonce that the registry has just
//! given out, the path and the body, so that what was written once cannot be written again by who overheard it.
//!
//! ```text
//!  POST /challenge ──▶ nonce;  PUT /route, x-baton-nonce: nonce, x-baton-proof: HMAC(key, nonce, path, body) ──▶
//! ```
//! Invariants: a nonce is good once and for a short time; how many are open is bounded, the oldest goes first. No
//! clock and no randomness of its own.

use crate::config::secret::Secret;
use crate::limits::{CHALLENGE_LIFE, CHALLENGES_MAX};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::collections::VecDeque;
use std::time::Instant;

/// Header field of a nonce.
pub const NONCE: &str = "x-baton-nonce";
/// Header field of a proof, in hex.
pub const PROOF: &str = "x-baton-proof";

/// What a proof is of.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// As it was given out.
    pub nonce: &'a str,
    /// Of the request.
    pub path: &'a str,
    /// Likewise.
    pub body: &'a [u8],
}

impl Written<'_> {
    /// The proof of `key`, in hex.
    pub fn proof(&self, key: &[u8]) -> String {
        self.mac(key).finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether `shown` is the proof of one of these keys; compared in constant time.
    pub fn is_proven(&self, keys: &[Secret], shown: &str) -> bool {
        let Some(shown) = from_hex(shown) else { return false };
        keys.iter().any(|key| self.mac(key.bytes()).verify_slice(&shown).is_ok())
    }

    fn mac(&self, key: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
        mac.update(b"baton registry");
        for part in [self.nonce.as_bytes(), self.path.as_bytes(), self.body] {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// Nonces that were given out and not used yet.
#[derive(Debug, Default)]
pub struct Challenges {
    open: VecDeque<(String, Instant)>,
}

impl Challenges {
    /// Gives out a nonce made of these bytes, which nobody can guess.
    pub fn give(&mut self, random: [u8; 16], now: Instant) -> String {
        if self.open.len() >= CHALLENGES_MAX {
            self.open.pop_front();
        }
        let nonce: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        self.open.push_back((nonce.clone(), now + CHALLENGE_LIFE));
        nonce
    }

    /// Takes a nonce back; whether it was good.
    pub fn take(&mut self, nonce: &str, now: Instant) -> bool {
        let at = self.open.iter().position(|(open, _)| open == nonce);
        at.and_then(|at| self.open.remove(at)).is_some_and(|(_, until)| until > now)
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nonce_is_good_once_and_for_a_while() {
        let (mut challenges, now) = (Challenges::default(), Instant::now());
        let nonce = challenges.give([1; 16], now);
        assert!(!challenges.take("01", now));
        assert!(challenges.take(&nonce, now) && !challenges.take(&nonce, now));
        let late = challenges.give([2; 16], now);
        assert!(!challenges.take(&late, now + CHALLENGE_LIFE));
        let first = challenges.give([3; 16], now);
        (0..CHALLENGES_MAX).for_each(|number| drop(challenges.give((number as u128).to_le_bytes(), now)));
        assert!(challenges.open.len() == CHALLENGES_MAX && !challenges.take(&first, now));
    }

    #[test]
    fn a_proof_is_of_one_key_nonce_path_and_body() {
        let good = Written { nonce: "ab", path: "/route", body: b"{}" };
        let proof = good.proof(b"key");
        for other in [
            Written { nonce: "ac", ..good },
            Written { path: "/register_dp_rank", ..good },
            Written { body: b"{ }", ..good },
            Written { nonce: "a", path: "b/route", ..good },
        ] {
            assert_ne!(other.proof(b"key"), proof);
        }
        assert_ne!(good.proof(b"other"), proof);
        assert!(!good.is_proven(&[], &proof) && from_hex("0").is_none() && from_hex("zz").is_none());
    }
}
