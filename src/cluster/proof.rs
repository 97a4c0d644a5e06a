//! Proof that who changes the membership of a cluster knows its key, good once.
//!
//! `proof = HMAC-SHA-256(key, "baton registry" · method · path · nonce · body)`, each part with its length before
//! it, in hex. The nonce is the registry's: `time · count · MAC`, 8, 8 and 16 bytes, so that a registry remembers
//! only nonces that were used, and whoever asks for nonces without the key costs nothing. A restarted registry
//! takes none of its predecessor's. Pure: time and the nonces' own secret are arguments.

use crate::config::secret::Secret;
use crate::limits::{REGISTRY_NONCE_LIFE, REGISTRY_NONCES_USED_MAX};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::time::Instant;

/// Header field of the proof.
pub const PROOF: &str = "x-baton-proof";
/// Header field of the nonce that it is over.
pub const NONCE: &str = "x-baton-nonce";

const NONCE_LEN: usize = 32;

/// What is asked of a registry, exactly as it is sent.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// As on the wire.
    pub method: &'a str,
    /// Without a query.
    pub path: &'a str,
    /// Identity, incarnation, URL and the rest.
    pub body: &'a [u8],
}

/// What shows that the sender of `asked` knows `key`, over this nonce alone.
pub fn prove(key: &Secret, asked: Asked<'_>, nonce: &str) -> String {
    to_hex(&mac_of(key, asked, nonce).finalize().into_bytes())
}

/// Whether `proof`, in hex, is that of `key` over `asked` and this nonce.
pub fn proves(key: &Secret, asked: Asked<'_>, nonce: &str, proof: &str) -> bool {
    from_hex(proof).is_some_and(|proof| mac_of(key, asked, nonce).verify_slice(&proof).is_ok())
}

fn mac_of(key: &Secret, asked: Asked<'_>, nonce: &str) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key.bytes()).expect("HMAC takes keys of any length");
    mac.update(b"baton registry");
    for part in [asked.method.as_bytes(), asked.path.as_bytes(), nonce.as_bytes(), asked.body] {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// Why a proof is not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unproven {
    /// There is no proof, or no nonce.
    Missing,
    /// The nonce is not this registry's, or too old.
    Stale,
    /// It was used.
    Used,
    /// The proof is not of this key over this request.
    Wrong,
    /// More were used of late than are remembered.
    TooMany,
}

impl fmt::Display for Unproven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unproven::Missing => {
                write!(f, "{NONCE} and {PROOF} must show that the sender knows the cluster key")
            }
            Unproven::Stale => f.write_str("the nonce is not of this registry, or too old"),
            Unproven::Used => f.write_str("the nonce was used before"),
            Unproven::Wrong => {
                f.write_str("the proof is not of this cluster key over this request")
            }
            Unproven::TooMany => {
                write!(f, "more than {REGISTRY_NONCES_USED_MAX} changes within the life of a nonce")
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
    /// Of those, in the order of their use, with when they are forgotten.
    order: VecDeque<(Instant, u64)>,
}

impl Nonces {
    /// None yet. `secret` is random and nobody else's.
    pub fn new(secret: [u8; 32], now: Instant) -> Nonces {
        Nonces { secret, begun: now, count: 0, used: HashSet::new(), order: VecDeque::new() }
    }

    /// The answer to who asks for one (`POST /challenge`), as JSON: `{"nonce", "life_ms"}`.
    pub fn invite(&mut self, now: Instant) -> serde_json::Value {
        serde_json::json!({ "nonce": self.draw(now), "life_ms": REGISTRY_NONCE_LIFE.as_millis() as u64 })
    }

    /// One more, in hex.
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

    /// Takes a proof of one of `keys` over `asked` and one of these nonces, once.
    ///
    /// # Errors
    /// It is none; the nonce can still be used then.
    pub fn take(
        &mut self,
        keys: &[Secret],
        asked: Asked<'_>,
        nonce: Option<&str>,
        proof: Option<&str>,
        now: Instant,
    ) -> Result<(), Unproven> {
        while self.order.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, count)) = self.order.pop_front() {
                self.used.remove(&count);
            }
        }
        let (Some(nonce), Some(proof)) = (nonce, proof) else { return Err(Unproven::Missing) };
        let bytes: [u8; NONCE_LEN] =
            from_hex(nonce).and_then(|bytes| bytes.try_into().ok()).ok_or(Unproven::Stale)?;
        self.tag(&bytes[..16]).verify_truncated_left(&bytes[16..]).map_err(|_| Unproven::Stale)?;
        let number =
            |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (time, count) = (number(0), number(8));
        let age = now.saturating_duration_since(self.begun).as_millis().saturating_sub(time.into());
        if age >= REGISTRY_NONCE_LIFE.as_millis() {
            return Err(Unproven::Stale);
        }
        if !keys.iter().any(|key| proves(key, asked, nonce, proof)) {
            return Err(Unproven::Wrong);
        }
        if self.used.contains(&count) {
            return Err(Unproven::Used);
        }
        if self.used.len() >= REGISTRY_NONCES_USED_MAX {
            return Err(Unproven::TooMany);
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

/// Two digits a byte.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of such digits.
pub fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'_> = Asked { method: "PUT", path: "/registry", body: b"{}" };

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
            nonces.take(std::slice::from_ref(key), asked, Some(nonce), Some(proof), now)
        };
        for asked in [
            Asked { method: "DELETE", ..ASKED },
            Asked { path: "/workers", ..ASKED },
            Asked { body: b"{} ", ..ASKED },
            Asked { path: "/registr", body: b"y{}", ..ASKED },
        ] {
            assert_eq!(take(&key, asked, &nonce, &proof), Err(Unproven::Wrong), "{asked:?}");
        }
        assert_eq!(take(&Secret::of_bytes(&[8; 32]), ASKED, &nonce, &proof), Err(Unproven::Wrong));
        assert_eq!(take(&key, ASKED, &nonce, &proof), Ok(()));
        assert_eq!(take(&key, ASKED, &nonce, &proof), Err(Unproven::Used), "replayed");
        let upper = nonce.to_uppercase();
        assert_eq!(take(&key, ASKED, &upper, &proof), Err(Unproven::Wrong), "written otherwise");
        assert_eq!(take(&key, ASKED, &upper, &prove(&key, ASKED, &upper)), Err(Unproven::Used));
    }

    #[test]
    fn a_nonce_is_this_registrys_and_grows_old() {
        let (mut nonces, key, now) = nonces();
        let nonce = nonces.draw(now);
        let proof = prove(&key, ASKED, &nonce);
        let mut other = Nonces::new([2; 32], now);
        assert_eq!(
            other.take(std::slice::from_ref(&key), ASKED, Some(&nonce), Some(&proof), now),
            Err(Unproven::Stale)
        );
        let forged = nonce.replacen('0', "1", 1);
        let proof_of_forged = prove(&key, ASKED, &forged);
        assert_eq!(
            nonces.take(
                std::slice::from_ref(&key),
                ASKED,
                Some(&forged),
                Some(&proof_of_forged),
                now
            ),
            Err(Unproven::Stale)
        );
        let late = now + REGISTRY_NONCE_LIFE;
        assert_eq!(
            nonces.take(std::slice::from_ref(&key), ASKED, Some(&nonce), Some(&proof), late),
            Err(Unproven::Stale)
        );
        for (nonce, proof) in
            [(None, Some(proof.as_str())), (Some(nonce.as_str()), None), (None, None)]
        {
            assert_eq!(
                nonces.take(std::slice::from_ref(&key), ASKED, nonce, proof, now),
                Err(Unproven::Missing)
            );
        }
        assert_eq!(
            nonces.take(std::slice::from_ref(&key), ASKED, Some("é"), Some(&proof), now),
            Err(Unproven::Stale)
        );
    }

    /// A replay that comes when its nonce is forgotten is refused for the nonce's age.
    #[test]
    fn a_used_nonce_is_remembered_for_as_long_as_it_would_be_taken() {
        let (mut nonces, key, now) = nonces();
        let nonce = nonces.draw(now);
        let proof = prove(&key, ASKED, &nonce);
        let mut at =
            |time| nonces.take(std::slice::from_ref(&key), ASKED, Some(&nonce), Some(&proof), time);
        let half = REGISTRY_NONCE_LIFE / 2;
        assert_eq!(at(now + half), Ok(()));
        assert_eq!(at(now + REGISTRY_NONCE_LIFE - half / 4), Err(Unproven::Used));
        assert_eq!(at(now + REGISTRY_NONCE_LIFE), Err(Unproven::Stale));
        assert_eq!(at(now + 2 * REGISTRY_NONCE_LIFE), Err(Unproven::Stale));
        assert!(nonces.used.is_empty() && nonces.order.is_empty());
    }
}
