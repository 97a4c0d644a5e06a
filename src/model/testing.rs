//! Where tests find models.

use std::path::{Path, PathBuf};

/// A model of `tests/fixtures`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The real model, `None` (said aloud) where it has not been fetched. `BATON_REQUIRE_MODEL=1` makes
/// its absence a failure.
pub(crate) fn smollm2() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let path = cache?.join("baton/SmolLM2-135M-Instruct.Q4_1.gguf");
    if path.exists() {
        return Some(path);
    }
    let required = std::env::var("BATON_REQUIRE_MODEL").is_ok_and(|value| value == "1");
    assert!(!required, "{} is missing", path.display());
    eprintln!("SKIPPED: {} is missing; tools/quickstart fetches it", path.display());
    None
}
