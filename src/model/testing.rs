//! Models and directories for tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The path of a model in `tests/fixtures`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The real model. If it has not been fetched, prints a message and returns `None`, or fails if
/// `BATON_REQUIRE_MODEL=1` is set.
pub(crate) fn smollm2() -> Option<PathBuf> {
    fetched("SmolLM2-135M-Instruct.Q4_1.gguf", "tools/quickstart", "BATON_REQUIRE_MODEL")
}

/// Gemma 3, or `None`, or fails if `BATON_REQUIRE_GEMMA=1` is set.
pub(crate) fn gemma3() -> Option<PathBuf> {
    fetched("gemma-3-270m.Q4_K_M.gguf", "tools/gemma3", "BATON_REQUIRE_GEMMA")
}

/// The test suite of JSON Schema, or `None`, or fails if `BATON_REQUIRE_VENV=1` is set.
pub(crate) fn schema_suite() -> Option<PathBuf> {
    fetched("json-schema-suite-4.26.0", "tools/schema-suite", "BATON_REQUIRE_VENV")
}

/// A file or folder of the cache.
fn fetched(name: &str, tool: &str, variable: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    let path = cache?.join("baton").join(name);
    if path.exists() {
        return Some(path);
    }
    let is_required = std::env::var(variable).is_ok_and(|value| value == "1");
    assert!(!is_required, "{} is missing", path.display());
    eprintln!("SKIPPED: {} is missing; {tool} fetches it", path.display());
    None
}

/// A separate directory for one test, removed when dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("baton-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    /// A directory with the files of a fixture.
    pub(crate) fn copy_of(name: &str) -> Scratch {
        let scratch = Scratch::new();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), scratch.0.join(entry.file_name())).unwrap();
        }
        scratch
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
