//! Secrets from files and environment variables. Nothing here prints a secret.

use crate::config::error::ConfigError;
use crate::limits::{API_KEYS_FILE_MAX, CLUSTER_KEY_MAX, CLUSTER_KEY_MIN, HUB_TOKEN_MAX};
use crate::sys::file_access::FileAccess;
use serde::{Serialize, Serializer};
use std::fmt;
use std::path::{Path, PathBuf};

/// Secret bytes. Logs and `--print-config` show the source, never the bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    source: PathBuf,
}

impl Secret {
    /// A secret that is not from a file.
    pub fn of_bytes(bytes: &[u8]) -> Secret {
        Secret { bytes: bytes.to_vec(), source: PathBuf::new() }
    }

    /// A secret from this environment variable.
    pub fn of_variable(bytes: &[u8], variable: &str) -> Secret {
        Secret { bytes: bytes.to_vec(), source: variable.into() }
    }

    /// Other bytes from the same source.
    pub(super) fn with_bytes(&self, bytes: &[u8]) -> Secret {
        Secret { bytes: bytes.to_vec(), source: self.source.clone() }
    }

    /// The secret bytes. Compare them in constant time.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The file or the environment variable it came from.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Whether `shown` equals the secret. The time depends on the lengths alone.
    pub fn matches(&self, shown: &[u8]) -> bool {
        let differences = self.bytes.iter().zip(shown).fold(0, |sum, (a, b)| sum | (a ^ b));
        std::hint::black_box(differences) == 0 && self.bytes.len() == shown.len()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes from {})", self.bytes.len(), self.source.display())
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!(
            "{} bytes from {}",
            self.bytes.len(),
            self.source.display()
        ))
    }
}

/// Reads a cluster key: all bytes of the file, including a final newline.
///
/// # Errors
/// The file cannot be read, or its size is out of range.
pub fn read_cluster_key(
    files: &FileAccess,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<Secret, ConfigError> {
    const FLAG: &str = "--cluster-key-file";
    let bytes = read(files, (FLAG, path), CLUSTER_KEY_MAX, warnings)?;
    if bytes.len() < CLUSTER_KEY_MIN {
        let reason = format!(
            "holds {} bytes; a cluster key needs at least {CLUSTER_KEY_MIN} random bytes",
            bytes.len()
        );
        return Err(ConfigError::File { flag: FLAG, path: path.into(), reason });
    }
    Ok(Secret { bytes, source: path.into() })
}

/// Reads the lines of the file of API keys or admin keys that `flag` names, one key on each. Empty
/// lines and lines that start with `#` are skipped.
///
/// # Errors
/// The file cannot be read, is too large, or holds no key.
pub fn read_bearer_keys(
    files: &FileAccess,
    flag: &'static str,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<Vec<Secret>, ConfigError> {
    let bytes = read(files, (flag, path), API_KEYS_FILE_MAX, warnings)?;
    let keys: Vec<Secret> = bytes
        .split(|&byte| byte == b'\n')
        .map(|line| line.trim_ascii())
        .filter(|line| !line.is_empty() && !line.starts_with(b"#"))
        .map(|line| Secret { bytes: line.to_vec(), source: path.into() })
        .collect();
    if keys.is_empty() {
        let reason = "holds no key; write one key on each line".into();
        return Err(ConfigError::File { flag, path: path.into(), reason });
    }
    Ok(keys)
}

/// Reads the token for a model hub, without the white space around it; `None` if there is no file
/// or no token in it.
///
/// # Errors
/// The file cannot be read, or is too large.
pub fn read_hub_token(
    files: &FileAccess,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<Option<Secret>, ConfigError> {
    if files.stamp(path).is_none() {
        return Ok(None);
    }
    let bytes = read(files, ("HF_TOKEN_PATH", path), HUB_TOKEN_MAX, warnings)?;
    let token = bytes.trim_ascii();
    Ok((!token.is_empty()).then(|| Secret { bytes: token.to_vec(), source: path.into() }))
}

/// Reads a secret file. If other users can read the file, that is only a warning. The mode of a
/// secret that is mounted into a container cannot always be chosen.
fn read(
    files: &FileAccess,
    (flag, path): (&'static str, &Path),
    bytes_max: usize,
    warnings: &mut Vec<String>,
) -> Result<Vec<u8>, ConfigError> {
    let refused = |reason: String| ConfigError::File { flag, path: path.into(), reason };
    let content = files.read(path, bytes_max as u64 + 1);
    let content = content.map_err(|error| refused(error.to_string()))?;
    if content.is_exposed {
        warnings.push(format!(
            "{flag} {}: other users of this host can read it; run chmod 600 on it",
            path.display()
        ));
    }
    if content.bytes.len() > bytes_max {
        return Err(refused(format!("holds more than {bytes_max} bytes")));
    }
    Ok(content.bytes)
}
