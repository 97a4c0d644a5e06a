//! Secrets read from files. Nothing here ever prints one.

use super::error::ConfigError;
use crate::limits::{API_KEYS_FILE_MAX, CLUSTER_KEY_MAX, CLUSTER_KEY_MIN};
use serde::{Serialize, Serializer};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Bytes that are shown to nobody; what is shown is the file they came from.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    source: PathBuf,
}

impl Secret {
    /// Not from a file.
    pub fn of_bytes(bytes: &[u8]) -> Secret {
        Secret { bytes: bytes.to_vec(), source: PathBuf::new() }
    }

    /// The secret itself. Compare it in constant time.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The file it came from.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Whether `shown` is the secret, in time that depends on lengths alone.
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

/// The cluster key: the file's exact bytes, a final newline included.
pub fn read_cluster_key(path: &Path, warnings: &mut Vec<String>) -> Result<Secret, ConfigError> {
    const FLAG: &str = "--cluster-key-file";
    let bytes = read(FLAG, path, CLUSTER_KEY_MAX, warnings)?;
    if bytes.len() < CLUSTER_KEY_MIN {
        let reason = format!(
            "holds {} bytes; a cluster key has at least {CLUSTER_KEY_MIN} random bytes",
            bytes.len()
        );
        return Err(ConfigError::File { flag: FLAG, path: path.into(), reason });
    }
    Ok(Secret { bytes, source: path.into() })
}

/// API keys, one a line; empty lines and lines that begin with `#` are left out.
pub fn read_api_keys(path: &Path, warnings: &mut Vec<String>) -> Result<Vec<Secret>, ConfigError> {
    const FLAG: &str = "--api-key-file";
    let bytes = read(FLAG, path, API_KEYS_FILE_MAX, warnings)?;
    let keys: Vec<Secret> = bytes
        .split(|&byte| byte == b'\n')
        .map(|line| line.trim_ascii())
        .filter(|line| !line.is_empty() && !line.starts_with(b"#"))
        .map(|line| Secret { bytes: line.to_vec(), source: path.into() })
        .collect();
    if keys.is_empty() {
        let reason = "holds no key; it has one key a line".into();
        return Err(ConfigError::File { flag: FLAG, path: path.into(), reason });
    }
    Ok(keys)
}

/// A file that others may read is a warning and no error: where secrets are mounted into a container,
/// its owner cannot always choose the mode.
fn read(
    flag: &'static str,
    path: &Path,
    bytes_max: usize,
    warnings: &mut Vec<String>,
) -> Result<Vec<u8>, ConfigError> {
    let refused = |reason: String| ConfigError::File { flag, path: path.into(), reason };
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    let metadata = file.metadata().map_err(|error| refused(error.to_string()))?;
    if metadata.is_file() && metadata.permissions().mode() & 0o007 != 0 {
        warnings.push(format!(
            "{flag} {}: others on this host may read it; chmod 600 it",
            path.display()
        ));
    }
    let mut bytes = Vec::new();
    let limit = bytes_max as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(|error| refused(error.to_string()))?;
    if bytes.len() > bytes_max {
        return Err(refused(format!("holds more than {bytes_max} bytes")));
    }
    Ok(bytes)
}
