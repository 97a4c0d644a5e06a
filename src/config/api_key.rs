//! API keys with their limits.

use super::error::ConfigError;
use super::secret::{Secret, read_bearer_keys};
use crate::limits::KEY_PER_MINUTE_MAX;
use crate::sys::file_access::FileAccess;
use serde::Serialize;
use std::path::Path;

/// The flag of API keys.
const FLAG: &str = "--api-key-file";
/// The flag of the limit of requests.
pub const REQUESTS_FLAG: &str = "--key-requests-per-minute";
/// The flag of the limit of tokens.
pub const TOKENS_FLAG: &str = "--key-tokens-per-minute";

/// Limits per minute. `None`: no limit, or that of the flag.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct RateLimits {
    /// Requests for text.
    pub requests: Option<u32>,
    /// Tokens of prompts and answers.
    pub tokens: Option<u32>,
}

impl RateLimits {
    /// The flag of the first limit that is set.
    pub fn flag(&self) -> Option<&'static str> {
        let requests = self.requests.map(|_| REQUESTS_FLAG);
        requests.or(self.tokens.map(|_| TOKENS_FLAG))
    }
}

/// A line of the file of API keys: `KEY [requests-per-minute=N] [tokens-per-minute=N]`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ApiKey {
    /// The key.
    pub secret: Secret,
    /// Its own limits, in place of those of the flags.
    pub limits: RateLimits,
}

impl ApiKey {
    /// A key from a line of a file.
    ///
    /// # Errors
    /// The words after the key are no limits. The error does not quote them, because they can be
    /// parts of a key.
    fn read(line: &Secret) -> Result<ApiKey, &'static str> {
        let mut words = line.bytes().split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let secret = line.with_bytes(words.next().unwrap_or_default());
        let mut limits = RateLimits::default();
        for word in words {
            let text = std::str::from_utf8(word).unwrap_or_default();
            let (limit, value) = match text.split_once('=') {
                Some(("requests-per-minute", value)) => (&mut limits.requests, value),
                Some(("tokens-per-minute", value)) => (&mut limits.tokens, value),
                _ => return Err("only requests-per-minute=N or tokens-per-minute=N can follow"),
            };
            let value = value.parse().ok().filter(|value| (1..=KEY_PER_MINUTE_MAX).contains(value));
            *limit = Some(value.ok_or("a limit must be 1 to 1073741824")?);
        }
        Ok(ApiKey { secret, limits })
    }
}

/// Reads the API keys of a file.
///
/// # Errors
/// The file cannot be read, is too large, holds no key, or has an invalid limit.
pub fn read_api_keys(
    files: &FileAccess,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<Vec<ApiKey>, ConfigError> {
    let lines = read_bearer_keys(files, FLAG, path, warnings)?;
    let read = |(index, line): (usize, &Secret)| {
        ApiKey::read(line).map_err(|why| {
            let reason = format!("key {}: {why}", index + 1);
            ConfigError::File { flag: FLAG, path: path.into(), reason }
        })
    };
    lines.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_the_key_on_its_line() {
        let read = |line: &str| ApiKey::read(&Secret::of_bytes(line.as_bytes()));
        let both = read("sk-1 \ttokens-per-minute=40000 requests-per-minute=60").unwrap();
        assert_eq!(both.secret.bytes(), b"sk-1");
        assert_eq!(both.limits, RateLimits { requests: Some(60), tokens: Some(40_000) });
        assert_eq!(read("sk-1").unwrap().limits, RateLimits::default());
        for line in [
            "sk-1 sk-2",
            "sk-1 requests=1",
            "sk-1 requests-per-minute",
            "sk-1 requests-per-minute=",
            "sk-1 requests-per-minute=0",
            "sk-1 tokens-per-minute=1073741825",
            "sk-1 tokens-per-minute=-1",
        ] {
            let why = read(line).unwrap_err();
            assert!(why.contains("N can follow") || why.contains("1073741824"), "{line}: {why}");
        }
    }
}
