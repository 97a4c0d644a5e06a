//! Proof that the sender of a membership change knows the cluster key. A proof is valid once.
//!
//! `proof = HMAC-SHA-256(key, "baton registry" · method · path · nonce · body)`, in hex. Each part
//! has its length before it.
//! The registry issues the nonce: `time · count · MAC`, of 8, 8 and 16 bytes. The registry stores
//! only used nonces, so requests for nonces cost it no memory.
//! A restarted registry refuses the nonces of its predecessor.
//! Pure: time and the secret of the nonces are arguments.

use crate::config::secret::Secret;
use crate::limits::{REGISTRY_NONCE_LIFE, REGISTRY_NONCES_USED_MAX};
use crate::stdx::hash_map::HashSet;
use crate::stdx::hex::{from_hex, to_hex};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::collections::VecDeque;
use std::fmt;
use std::time::Instant;

/// Header field with the proof.
pub const PROOF: &str = "x-baton-proof";
/// Header field with the nonce of the proof.
pub const NONCE: &str = "x-baton-nonce";

const NONCE_LEN: usize = 32;

/// The parts of a request that a proof covers, exactly as they are sent.
#[derive(Clone, Copy, Debug)]
pub struct SignedRequest<'a> {
    /// HTTP method, as on the wire.
    pub method: &'a str,
    /// Path without a query.
    pub path: &'a str,
    /// Body of the request.
    pub body: &'a [u8],
}

/// The proof, in hex, that the sender of `asked` knows `key`. It is valid for this nonce only.
pub fn prove(key: &Secret, asked: SignedRequest<'_>, nonce: &str) -> String {
    to_hex(&mac_of(key, asked, nonce).finalize().into_bytes())
}

/// Whether `proof`, in hex, is the proof of `key` for `asked` and this nonce.
pub fn proves(key: &Secret, asked: SignedRequest<'_>, nonce: &str, proof: &str) -> bool {
    from_hex(proof).is_some_and(|proof| mac_of(key, asked, nonce).verify_slice(&proof).is_ok())
}

fn mac_of(key: &Secret, asked: SignedRequest<'_>, nonce: &str) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key.bytes()).expect("HMAC takes keys of any length");
    mac.update(b"baton registry");
    for part in [asked.method.as_bytes(), asked.path.as_bytes(), nonce.as_bytes(), asked.body] {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Why a proof is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProofError {
    /// The proof or the nonce is missing.
    Missing,
    /// The nonce is from another registry, or it is too old.
    Stale,
    /// The nonce was used before.
    Used,
    /// The proof is not by this key for this request.
    Wrong,
    /// More nonces were used in their lifetime than the registry stores.
    TooMany,
}

impl fmt::Display for ProofError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProofError::Missing => {
                write!(f, "{NONCE} and {PROOF} must prove that the sender knows the cluster key")
            }
            ProofError::Stale => f.write_str("the nonce is too old or not from this registry"),
            ProofError::Used => f.write_str("the nonce was used before"),
            ProofError::Wrong => {
                f.write_str("the proof does not match this cluster key and this request")
            }
            ProofError::TooMany => {
                write!(f, "more than {REGISTRY_NONCES_USED_MAX} changes in the lifetime of a nonce")
            }
        }
    }
}

/// The nonces of one registry.
#[derive(Debug)]
pub struct Nonces {
    secret: [u8; 32],
    begun: Instant,
    count: u64,
    used: HashSet<u64>,
    /// Used nonces in the order of their use, with the time when each is forgotten.
    order: VecDeque<(Instant, u64)>,
}

impl Nonces {
    /// Creates the state without nonces. `secret` is random, and nothing else uses it.
    pub fn new(secret: [u8; 32], now: Instant) -> Nonces {
        Nonces { secret, begun: now, count: 0, used: HashSet::default(), order: VecDeque::new() }
    }

    /// The answer to `POST /challenge`, as JSON: `{"nonce", "life_ms"}`.
    pub fn invite(&mut self, now: Instant) -> serde_json::Value {
        let life_ms = REGISTRY_NONCE_LIFE.as_millis() as u64;
        serde_json::json!({ "nonce": self.draw(now), "life_ms": life_ms })
    }

    /// Issues a nonce, in hex.
    pub fn draw(&mut self, now: Instant) -> String {
        self.count += 1;
        let time = now.saturating_duration_since(self.begun).as_millis() as u64;
        let mut nonce = [0; NONCE_LEN];
        nonce[..8].copy_from_slice(&time.to_be_bytes());
        nonce[8..16].copy_from_slice(&self.count.to_be_bytes());
        let tag = self.tag(&nonce[..16]).finalize().into_bytes();
        nonce[16..].copy_from_slice(&tag[..16]);
        to_hex(&nonce)
    }

    /// Accepts a proof of one of `keys` for `asked` and one of these nonces, once.
    ///
    /// # Errors
    /// Why the proof is refused. A nonce that was not used can still be used.
    pub fn verify_request(
        &mut self,
        keys: &[Secret],
        asked: SignedRequest<'_>,
        nonce: Option<&str>,
        proof: Option<&str>,
        now: Instant,
    ) -> Result<(), ProofError> {
        while self.order.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, count)) = self.order.pop_front() {
                self.used.remove(&count);
            }
        }
        let (Some(nonce), Some(proof)) = (nonce, proof) else { return Err(ProofError::Missing) };
        let bytes: [u8; NONCE_LEN] =
            from_hex(nonce).and_then(|bytes| bytes.try_into().ok()).ok_or(ProofError::Stale)?;
        self.tag(&bytes[..16])
            .verify_truncated_left(&bytes[16..])
            .map_err(|_| ProofError::Stale)?;
        let number =
            |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (time, count) = (number(0), number(8));
        let age = now.saturating_duration_since(self.begun).as_millis().saturating_sub(time.into());
        if age >= REGISTRY_NONCE_LIFE.as_millis() {
            return Err(ProofError::Stale);
        }
        if !keys.iter().any(|key| proves(key, asked, nonce, proof)) {
            return Err(ProofError::Wrong);
        }
        if self.used.contains(&count) {
            return Err(ProofError::Used);
        }
        if self.used.len() >= REGISTRY_NONCES_USED_MAX {
            return Err(ProofError::TooMany);
        }
        self.used.insert(count);
        self.order.push_back((now + REGISTRY_NONCE_LIFE, count));
        Ok(())
    }

    fn tag(&self, bytes: &[u8]) -> Hmac<Sha256> {
        let mac =
            Hmac::<Sha256>::new_from_slice(&self.secret).expect("HMAC takes keys of any length");
        mac.chain_update(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: SignedRequest<'_> =
        SignedRequest { method: "PUT", path: "/registry", body: b"{}" };

    fn nonces() -> (Nonces, Secret, Instant) {
        let now = Instant::now();
        (Nonces::new([1; 32], now), Secret::of_bytes(&[7; 32]), now)
    }

    #[test]
    fn a_proof_is_good_once_for_one_key_and_one_request() {
        let (mut nonces, key, now) = nonces();
        let nonce = nonces.draw(now);
        let proof = prove(&key, ASKED, &nonce);
        let mut take = |key: &Secret, asked, nonce: &str, proof: &str| {
            nonces.verify_request(std::slice::from_ref(key), asked, Some(nonce), Some(proof), now)
        };
        for asked in [
            SignedRequest { method: "DELETE", ..ASKED },
            SignedRequest { path: "/workers", ..ASKED },
            SignedRequest { body: b"{} ", ..ASKED },
            SignedRequest { path: "/registr", body: b"y{}", ..ASKED },
        ] {
            assert_eq!(take(&key, asked, &nonce, &proof), Err(ProofError::Wrong), "{asked:?}");
        }
        assert_eq!(
            take(&Secret::of_bytes(&[8; 32]), ASKED, &nonce, &proof),
            Err(ProofError::Wrong)
        );
        assert_eq!(take(&key, ASKED, &nonce, &proof), Ok(()));
        assert_eq!(take(&key, ASKED, &nonce, &proof), Err(ProofError::Used), "replayed");
        let upper = nonce.to_uppercase();
        assert_eq!(take(&key, ASKED, &upper, &proof), Err(ProofError::Wrong), "written otherwise");
        assert_eq!(take(&key, ASKED, &upper, &prove(&key, ASKED, &upper)), Err(ProofError::Used));
    }

    #[test]
    fn a_nonce_is_this_registrys_and_grows_old() {
        let (mut nonces, key, now) = nonces();
        let nonce = nonces.draw(now);
        let proof = prove(&key, ASKED, &nonce);
        let mut other = Nonces::new([2; 32], now);
        assert_eq!(
            other.verify_request(
                std::slice::from_ref(&key),
                ASKED,
                Some(&nonce),
                Some(&proof),
                now
            ),
            Err(ProofError::Stale)
        );
        let forged = nonce.replacen('0', "1", 1);
        let proof_of_forged = prove(&key, ASKED, &forged);
        assert_eq!(
            nonces.verify_request(
                std::slice::from_ref(&key),
                ASKED,
                Some(&forged),
                Some(&proof_of_forged),
                now
            ),
            Err(ProofError::Stale)
        );
        let late = now + REGISTRY_NONCE_LIFE;
        assert_eq!(
            nonces.verify_request(
                std::slice::from_ref(&key),
                ASKED,
                Some(&nonce),
                Some(&proof),
                late
            ),
            Err(ProofError::Stale)
        );
        for (nonce, proof) in
            [(None, Some(proof.as_str())), (Some(nonce.as_str()), None), (None, None)]
        {
            assert_eq!(
                nonces.verify_request(std::slice::from_ref(&key), ASKED, nonce, proof, now),
                Err(ProofError::Missing)
            );
        }
        assert_eq!(
            nonces.verify_request(std::slice::from_ref(&key), ASKED, Some("é"), Some(&proof), now),
            Err(ProofError::Stale)
        );
    }

    /// A replay after its nonce was forgotten is refused, because the nonce is too old.
    #[test]
    fn a_used_nonce_is_remembered_for_as_long_as_it_would_be_taken() {
        let (mut nonces, key, now) = nonces();
        let nonce = nonces.draw(now);
        let proof = prove(&key, ASKED, &nonce);
        let mut at = |time| {
            nonces.verify_request(
                std::slice::from_ref(&key),
                ASKED,
                Some(&nonce),
                Some(&proof),
                time,
            )
        };
        let half = REGISTRY_NONCE_LIFE / 2;
        assert_eq!(at(now + half), Ok(()));
        assert_eq!(at(now + REGISTRY_NONCE_LIFE - half / 4), Err(ProofError::Used));
        assert_eq!(at(now + REGISTRY_NONCE_LIFE), Err(ProofError::Stale));
        assert_eq!(at(now + 2 * REGISTRY_NONCE_LIFE), Err(ProofError::Stale));
        assert!(nonces.used.is_empty() && nonces.order.is_empty());
    }
}
