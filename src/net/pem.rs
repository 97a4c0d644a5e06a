//! PEM files.

use crate::limits::TLS_FILE_MAX;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Reads the bytes of a PEM file.
///
/// # Errors
/// The file cannot be read, or is longer than [`TLS_FILE_MAX`].
pub(super) fn read_pem(path: &Path) -> Result<Vec<u8>, String> {
    let wrong = |why: String| format!("{}: {why}", path.display());
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let mut bytes = Vec::new();
    file.take(TLS_FILE_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| wrong(error.to_string()))?;
    if bytes.len() > TLS_FILE_MAX {
        return Err(wrong(format!("has more than {TLS_FILE_MAX} bytes")));
    }
    Ok(bytes)
}
