//! The official `openai` client against the real binary and the real model (`tools/openai-client`).
//! If the virtual environment of `tools/venv` or the model is missing, the test is skipped with a
//! message. With `BATON_REQUIRE_VENV=1` or `BATON_REQUIRE_MODEL=1`, it fails.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether `path` is there; where `variable` asks for it, it must be.
fn found(path: &Path, variable: &str, remedy: &str) -> bool {
    let required = std::env::var(variable).is_ok_and(|value| value == "1");
    assert!(path.exists() || !required, "{variable}=1 and no {}: run {remedy}", path.display());
    if !path.exists() {
        eprintln!("SKIPPED: no {}; {remedy} fetches it", path.display());
    }
    path.exists()
}

#[test]
fn the_official_client_is_content() {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache =
        cache.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"));
    let cache = cache.join("baton");
    if !found(&cache.join("venv/bin/python"), "BATON_REQUIRE_VENV", "tools/venv")
        || !found(
            &cache.join("SmolLM2-135M-Instruct.Q4_1.gguf"),
            "BATON_REQUIRE_MODEL",
            "tools/quickstart",
        )
    {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/openai-client");
    let output = Command::new(script).arg(env!("CARGO_BIN_EXE_baton")).output().unwrap();
    let (told, wrong) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}\n{wrong}");
    let last = told.lines().last().unwrap();
    assert!(last.ends_with(" passed, 0 failed") && !last.starts_with('0'), "{told}");
}
