//! A worker's entry in a registry, as JSON.
//!
//! ```json
//! {"id": "32 hex digits", "incarnation": "32 hex digits", "role": "prefill",
//!  "url": "http://10.0.0.1:30000", "bootstrap_port": 8998, "kind": "64 hex digits",
//!  "class_digest": "64 hex digits"}
//! ```
//! Parsing checks every field, so an [`Entry`] is always valid. Unknown fields are ignored, because
//! later versions can add fields.

use crate::config::values::WorkerUrl;
use crate::ids::{Leg, Peer};
use crate::routing::compatibility::CompatDigest;
use crate::stdx::hex::{from_hex, to_hex};
use serde::{Deserialize, Serialize};

/// A role at a URL.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WorkerAddress {
    /// The worker's role.
    pub role: Leg,
    /// The worker's URL.
    pub url: WorkerUrl,
}

/// An entry of a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The worker's ID and incarnation. The incarnation is new at each start and each
    /// role change.
    pub peer: Peer,
    /// The worker's role and URL.
    pub address: WorkerAddress,
    /// Port of a prefill worker's bootstrap registry.
    pub bootstrap_port: Option<u16>,
    /// Digest of the values that must be equal in two workers of a pair.
    pub kind: CompatDigest,
}

#[derive(Serialize, Deserialize)]
#[serde(
    expecting = "an object of id, incarnation, role, url, kind, optionally class_digest, and, \
                 for a prefill worker, bootstrap_port"
)]
struct Text {
    id: String,
    incarnation: String,
    role: String,
    url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bootstrap_port: Option<u16>,
    kind: String,
    /// A worker of release 0.1.0 has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class_digest: Option<String>,
}

impl Entry {
    /// Reads an entry.
    ///
    /// # Errors
    /// The first invalid field, as a text for the sender.
    pub fn parse(json: &[u8]) -> Result<Entry, String> {
        let text: Text = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let role = Leg::named(&text.role).ok_or("`role` must be prefill or decode")?;
        let has_scheme = text.url.starts_with("http://") || text.url.starts_with("https://");
        let url = Some(&text.url)
            .filter(|_| has_scheme)
            .ok_or("`url` must begin with http:// or https://")?;
        let url = url.parse().map_err(|why| format!("`url`: {why}"))?;
        if (role == Leg::Prefill) != text.bootstrap_port.is_some_and(|port| port > 0) {
            return Err(
                "`bootstrap_port` must be given for a prefill worker, and for no other worker"
                    .into(),
            );
        }
        Ok(Entry {
            peer: Peer {
                id: digits(&text.id, "id")?,
                incarnation: digits(&text.incarnation, "incarnation")?,
            },
            address: WorkerAddress { role, url },
            bootstrap_port: text.bootstrap_port,
            kind: CompatDigest {
                by_family: digits(&text.kind, "kind")?,
                by_class: match text.class_digest {
                    Some(digest) => Some(digits(&digest, "class_digest")?),
                    None => None,
                },
            },
        })
    }

    /// The entry in the form that [`Entry::parse`] reads.
    pub fn to_json(&self) -> Vec<u8> {
        let text = Text {
            id: to_hex(&self.peer.id),
            incarnation: to_hex(&self.peer.incarnation),
            role: self.address.role.to_string(),
            url: self.address.url.to_string(),
            bootstrap_port: self.bootstrap_port,
            kind: to_hex(&self.kind.by_family),
            class_digest: self.kind.by_class.map(|digest| to_hex(&digest)),
        };
        serde_json::to_vec(&text).expect("plain structs are JSON")
    }
}

fn digits<const N: usize>(text: &str, field: &str) -> Result<[u8; N], String> {
    let bytes = from_hex(text).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| format!("`{field}` must be {} hex digits", 2 * N))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_written_and_an_invalid_one_is_refused() {
        let peer = Peer { id: [1; 16], incarnation: [0xab; 16] };
        let url: WorkerUrl = "http://[fd00::1]:7".parse().unwrap();
        for (role, bootstrap_port) in [(Leg::Prefill, Some(8998)), (Leg::Decode, None)] {
            let address = WorkerAddress { role, url: url.clone() };
            let kind = CompatDigest { by_family: [9; 32], by_class: Some([8; 32]) };
            let entry = Entry { peer, address, bootstrap_port, kind };
            let json = entry.to_json();
            assert_eq!(Entry::parse(&json), Ok(entry));
            let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
            let port = if role == Leg::Prefill { "bootstrap_port" } else { "" };
            for field in ["id", "incarnation", "role", "url", "kind", "class_digest", port] {
                for odd in
                    [serde_json::json!("x"), serde_json::json!(7_000_000), serde_json::json!({})]
                {
                    let mut json = json.clone();
                    let Some(value) = json.get_mut(field) else { continue };
                    *value = odd;
                    let read = Entry::parse(json.to_string().as_bytes());
                    assert!(read.is_err(), "{json}");
                }
            }
            let mut other = json.clone();
            other.as_object_mut().unwrap().remove("class_digest");
            let older = Entry::parse(other.to_string().as_bytes()).unwrap();
            assert_eq!(older.kind, CompatDigest { by_family: [9; 32], by_class: None });
            other["role"] = if role == Leg::Prefill { "decode" } else { "prefill" }.into();
            assert!(
                Entry::parse(other.to_string().as_bytes()).unwrap_err().contains("bootstrap_port")
            );
            let mut later = json;
            later["something"] = true.into();
            assert!(Entry::parse(later.to_string().as_bytes()).is_ok());
        }
    }
}
