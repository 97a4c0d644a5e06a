//! Proof of the cluster key, and the seals that bind later messages to it.
//!
//! `Proof = HMAC-SHA-256(key, "baton proof" · side · both Hellos, length-prefixed)`; the seal key
//! of a direction is the same HMAC with "baton seal". A seal is the first 16 bytes of an HMAC over
//! a counter and all length-prefixed parts. It reveals forged, repeated, lost, reordered and
//! reflected messages. The Hellos hold ids, incarnations and fresh nonces, so a proof is valid for
//! one connection only. A key's id, the first four bytes of `HMAC-SHA-256(key, "baton key id")`,
//! allows key rotation.
//! Invariants: comparisons take constant time; keys are never printed.
//! Not here: the order of messages (`link`).

use super::{Multipart, Parts};
use crate::limits;
use bytemuck::{Pod, Zeroable};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

type HmacSha256 = Hmac<Sha256>;
const SEAL_LEN: usize = 16;

/// One of the two ends of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Side {
    /// The end that dialled: the decode worker.
    Dialer = 1,
    /// The end that accepted: the prefill worker.
    Acceptor = 2,
}

impl Side {
    /// The other end.
    pub const fn other(self) -> Side {
        match self {
            Side::Dialer => Side::Acceptor,
            Side::Acceptor => Side::Dialer,
        }
    }
}

/// The secret that all workers of a cluster share.
#[derive(Clone)]
pub struct ClusterKey(HmacSha256);

/// A cluster key that is too short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyTooShort {
    /// Its bytes.
    pub len: usize,
}

impl fmt::Display for KeyTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let min = limits::CLUSTER_KEY_MIN;
        write!(f, "cluster key has {} bytes, at least {min} random bytes are needed", self.len)
    }
}

impl std::error::Error for KeyTooShort {}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(..)")
    }
}

impl ClusterKey {
    /// A key of at least [`CLUSTER_KEY_MIN`](limits::CLUSTER_KEY_MIN) bytes.
    pub fn new(bytes: &[u8]) -> Result<ClusterKey, KeyTooShort> {
        if bytes.len() < limits::CLUSTER_KEY_MIN {
            return Err(KeyTooShort { len: bytes.len() });
        }
        Ok(ClusterKey(keyed(bytes)))
    }

    /// The id of the key, which reveals nothing about it.
    pub fn id(&self) -> KeyId {
        let mut mac = self.0.clone();
        mac.update(b"baton key id");
        let tag = mac.finalize().into_bytes();
        KeyId(u32::from_le_bytes([tag[0], tag[1], tag[2], tag[3]]).max(1))
    }

    /// The proof of `side` that it knows the key; valid only for these two Hellos.
    pub fn proof(&self, side: Side, hellos: &Hellos<'_>) -> [u8; 32] {
        self.derive(b"baton proof", side, hellos).finalize().into_bytes().into()
    }

    /// Whether `tag` is the proof of `side`.
    pub fn accepts(&self, tag: &[u8; 32], side: Side, hellos: &Hellos<'_>) -> bool {
        self.derive(b"baton proof", side, hellos).verify_slice(tag).is_ok()
    }

    /// The seal of everything that `side` sends after its proof.
    pub fn seal(&self, side: Side, hellos: &Hellos<'_>) -> Seal {
        let key = self.derive(b"baton seal", side, hellos).finalize().into_bytes();
        Seal { mac: keyed(&key), counter: 0 }
    }

    fn derive(&self, label: &[u8], side: Side, hellos: &Hellos<'_>) -> HmacSha256 {
        let mut mac = self.0.clone();
        mac.update(label);
        mac.update(&[side as u8]);
        update_counted(&mut mac, hellos.dialer);
        update_counted(&mut mac, hellos.acceptor);
        mac
    }
}

/// Names a cluster key, for peers and logs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Pod, Zeroable)]
#[repr(transparent)]
pub struct KeyId(u32);

impl KeyId {
    /// Stands for a key that is not announced.
    pub const NONE: KeyId = KeyId(0);
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// The keys of a worker. It proves that it knows the first one, and accepts a proof of each of
/// them. An empty keyring proves nothing and requires no proof.
#[derive(Clone, Default, Debug)]
pub struct Keyring(Vec<(KeyId, ClusterKey)>);

impl Keyring {
    /// The ids of the keys as text.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|(id, _)| id.to_string()).collect()
    }

    /// A keyring of these keys. Keys beyond [`CLUSTER_KEYS_MAX`](limits::CLUSTER_KEYS_MAX) are
    /// dropped.
    pub fn new(keys: impl IntoIterator<Item = ClusterKey>) -> Keyring {
        Keyring(
            keys.into_iter().take(limits::CLUSTER_KEYS_MAX).map(|key| (key.id(), key)).collect(),
        )
    }

    /// The key that this worker proves.
    pub fn first(&self) -> Option<&ClusterKey> {
        self.0.first().map(|(_, key)| key)
    }

    /// The ids of all keys in order, as Hello carries them.
    pub fn ids(&self) -> [KeyId; limits::CLUSTER_KEYS_MAX] {
        let mut ids = [KeyId::NONE; limits::CLUSTER_KEYS_MAX];
        ids.iter_mut().zip(&self.0).for_each(|(id, (held, _))| *id = *held);
        ids
    }

    /// The key that made `tag`, the proof of `side`, if it is in the keyring.
    pub fn prover(&self, tag: &[u8; 32], side: Side, hellos: &Hellos<'_>) -> Option<&ClusterKey> {
        self.0.iter().map(|(_, key)| key).find(|key| key.accepts(tag, side, hellos))
    }
}

impl From<Option<ClusterKey>> for Keyring {
    fn from(key: Option<ClusterKey>) -> Keyring {
        Keyring::new(key)
    }
}

/// The exact bytes of both Hello messages.
#[derive(Clone, Copy, Debug)]
pub struct Hellos<'a> {
    /// The dialer's.
    pub dialer: &'a [u8],
    /// The acceptor's.
    pub acceptor: &'a [u8],
}

/// The seal of one direction of a connection. The sender's copy closes messages, and the receiver's
/// copy opens them.
#[derive(Clone)]
pub struct Seal {
    mac: HmacSha256,
    counter: u64,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seal({})", self.counter)
    }
}

impl Seal {
    /// Appends the seal as one more part.
    pub fn close(&mut self, message: &mut Multipart) {
        let tag = self.next(message.parts()).finalize().into_bytes();
        message.push(&tag[..SEAL_LEN]);
    }

    /// The parts before the last one, if the last one is their seal. After a failure no later
    /// message opens.
    pub fn open<'a>(&mut self, parts: Parts<'a>) -> Option<Parts<'a>> {
        let (parts, tag) = parts.split_last()?;
        let mac = self.next(parts);
        (tag.len() == SEAL_LEN && mac.verify_truncated_left(tag).is_ok()).then_some(parts)
    }

    fn next(&mut self, parts: Parts<'_>) -> HmacSha256 {
        let mut mac = self.mac.clone();
        mac.update(&self.counter.to_le_bytes());
        self.counter += 1;
        parts.iter().for_each(|part| update_counted(&mut mac, part));
        mac
    }
}

fn keyed(key: &[u8]) -> HmacSha256 {
    HmacSha256::new_from_slice(key).expect("HMAC takes keys of any length")
}

fn update_counted(mac: &mut HmacSha256, bytes: &[u8]) {
    mac.update(&(bytes.len() as u64).to_le_bytes());
    mac.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLOS: Hellos<'_> = Hellos { dialer: b"one", acceptor: b"two" };

    fn key() -> ClusterKey {
        ClusterKey::new(&[7; 32]).unwrap()
    }

    fn message(parts: &[&[u8]]) -> Multipart {
        let mut message = Multipart::new();
        parts.iter().for_each(|part| message.push(part));
        message
    }

    #[test]
    fn a_short_key_is_refused_and_no_key_prints() {
        let error = ClusterKey::new(&[7; 31]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cluster key has 31 bytes, at least 32 random bytes are needed"
        );
        assert_eq!(format!("{:?}", key()), "ClusterKey(..)");
    }

    #[test]
    fn a_proof_is_good_for_one_key_one_side_and_one_pair_of_hellos() {
        let tag = key().proof(Side::Dialer, &HELLOS);
        assert!(key().accepts(&tag, Side::Dialer, &HELLOS));
        assert!(!key().accepts(&tag, Side::Acceptor, &HELLOS));
        assert!(!ClusterKey::new(&[8; 32]).unwrap().accepts(&tag, Side::Dialer, &HELLOS));
        let swapped = Hellos { dialer: b"two", acceptor: b"one" };
        let shifted = Hellos { dialer: b"onet", acceptor: b"wo" };
        assert!(!key().accepts(&tag, Side::Dialer, &swapped));
        assert!(!key().accepts(&tag, Side::Dialer, &shifted));
    }

    #[test]
    fn a_sealed_message_opens_once_in_order_and_only_unchanged() {
        let seal = || key().seal(Side::Dialer, &HELLOS);
        let (mut first, mut second) = (message(&[b"a", b"b"]), message(&[b"a", b"b"]));
        let mut sender = seal();
        sender.close(&mut first);
        sender.close(&mut second);

        let mut receiver = seal();
        assert_eq!(receiver.open(first.parts()), Some(message(&[b"a", b"b"]).parts()));
        assert_eq!(receiver.clone().open(first.parts()), None, "repeated");
        assert!(receiver.open(second.parts()).is_some());
        assert_eq!(seal().open(second.parts()), None, "one left out");
        assert_eq!(key().seal(Side::Acceptor, &HELLOS).open(first.parts()), None, "sent back");

        let tag = first.parts().get(2).unwrap().to_vec();
        assert_eq!(seal().open(message(&[b"ab", b"", &tag]).parts()), None, "part boundary moved");
        assert_eq!(seal().open(message(&[b"a", b"c", &tag]).parts()), None, "changed");
        assert_eq!(seal().open(message(&[b"a", b"b", &tag[..15]]).parts()), None, "short");
        assert_eq!(seal().open(message(&[b"a", b"b", b""]).parts()), None, "empty");
        assert_eq!(seal().open(message(&[]).parts()), None, "no part");
    }
}
