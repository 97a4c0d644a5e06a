//! The hub's list of the files of a repository at one commit.
//!
//! Invariants: the commit and each digest are hexadecimal, and each path stays below the directory
//! that it is joined to. So all three are safe as parts of a path. Not here: the request for it.

use crate::config::hub::is_safe_path;
use crate::limits::HUB_FILES_MAX;
use serde::Deserialize;
use std::fmt;

/// The hash that names the content of a file in the cache.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum HubDigest {
    /// Of a large file: SHA-256 of its bytes.
    Sha256(String),
    /// Of a file in git: SHA-1 of its length and its bytes.
    GitBlob(String),
}

impl HubDigest {
    /// The hash in hexadecimal digits.
    pub fn hex(&self) -> &str {
        match self {
            HubDigest::Sha256(hex) | HubDigest::GitBlob(hex) => hex,
        }
    }

    /// Its name for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            HubDigest::Sha256(_) => "SHA-256",
            HubDigest::GitBlob(_) => "SHA-1 of the git blob",
        }
    }
}

impl fmt::Display for HubDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hex())
    }
}

/// A file of a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubFile {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Hash of its content.
    pub digest: HubDigest,
}

/// The files of a repository.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubListing {
    /// The commit.
    pub commit: String,
    /// Its files, in the hub's order.
    pub files: Vec<HubFile>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
    size: Option<u64>,
}

impl HubListing {
    /// Reads the hub's answer.
    ///
    /// # Errors
    /// The answer is no list of files, exceeds a limit, or names a path that could leave the cache.
    pub fn parse(json: &[u8]) -> Result<HubListing, String> {
        let answer: Answer = serde_json::from_slice(json)
            .map_err(|error| format!("the answer is no list of a repository's files: {error}"))?;
        if !is_hex(&answer.sha, 40) {
            return Err(format!("the commit {:?} is no SHA-1", answer.sha));
        }
        if answer.siblings.len() > HUB_FILES_MAX {
            let found = answer.siblings.len();
            return Err(format!("the repository has {found} files; the limit is {HUB_FILES_MAX}"));
        }
        let files = answer.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
        Ok(HubListing { commit: answer.sha, files })
    }

    /// The file with this path.
    pub fn file(&self, path: &str) -> Option<&HubFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

fn file(sibling: Sibling) -> Result<HubFile, String> {
    let Sibling { rfilename: path, size, blob_id, lfs } = sibling;
    if !is_safe_path(&path) {
        return Err(format!("the path {path:?} of a file could leave the cache"));
    }
    let (size, digest) = match (lfs, blob_id) {
        (Some(large), _) => (large.size.or(size), HubDigest::Sha256(large.sha256)),
        (None, Some(blob)) => (size, HubDigest::GitBlob(blob)),
        (None, None) => return Err(format!("the list has no hash of {path:?}")),
    };
    let digits = if matches!(digest, HubDigest::Sha256(_)) { 64 } else { 40 };
    if !is_hex(digest.hex(), digits) {
        return Err(format!("the hash {:?} of {path:?} is no {}", digest.hex(), digest.kind()));
    }
    let size = size.ok_or_else(|| format!("the list has no size of {path:?}"))?;
    Ok(HubFile { path, size, digest })
}

/// Whether `text` has this number of lower-case hexadecimal digits.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(siblings: Value) -> Result<HubListing, String> {
        let answer = json!({"id": "a/b", "sha": "0".repeat(40), "siblings": siblings});
        HubListing::parse(answer.to_string().as_bytes())
    }

    #[test]
    fn files_in_git_and_large_files_are_read() {
        let (blob, sha256) = ("a".repeat(40), "b".repeat(64));
        let listing = parse(json!([
            {"rfilename": "config.json", "size": 7, "blobId": blob},
            {"rfilename": "x/y.gguf", "size": 9, "blobId": blob,
             "lfs": {"sha256": sha256, "size": 9, "pointerSize": 130}},
        ]));
        let listing = listing.unwrap();
        let digest = HubDigest::GitBlob(blob);
        let config = HubFile { path: "config.json".into(), size: 7, digest };
        assert_eq!(listing.files[0], config);
        assert_eq!(listing.file("x/y.gguf").unwrap().digest, HubDigest::Sha256(sha256));
        assert_eq!(listing.file("y.gguf"), None);
    }

    #[test]
    fn lists_that_cannot_be_trusted_are_refused() {
        let blob = "a".repeat(40);
        for (path, size, blob, why) in [
            ("../config.json", json!(1), blob.as_str(), "could leave the cache"),
            ("/etc/passwd", json!(1), &blob, "could leave the cache"),
            ("a/../../b", json!(1), &blob, "could leave the cache"),
            ("a\u{0}b", json!(1), &blob, "could leave the cache"),
            ("a", json!(1), "../../a", "is no SHA-1"),
            ("a", Value::Null, &blob, "no size"),
            ("a", json!(-1), &blob, "no list"),
        ] {
            let error = parse(json!([{"rfilename": path, "size": size, "blobId": blob}]));
            let error = error.unwrap_err();
            assert!(error.contains(why), "{path}: {error}");
        }
        let error = parse(json!([{"rfilename": "a", "size": 1}])).unwrap_err();
        assert!(error.contains("no hash"), "{error}");
        let many: Vec<Value> = (0..=HUB_FILES_MAX)
            .map(|at| json!({"rfilename": at.to_string(), "size": 1, "blobId": blob}))
            .collect();
        assert!(parse(many.into()).unwrap_err().contains("the limit is"));
        for text in ["", "[]", r#"{"sha": "main"}"#, r#"{"siblings": []}"#] {
            assert!(HubListing::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
