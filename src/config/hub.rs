//! The name of a model on a hub, and the settings for the hub: flags, and the environment variables
//! of the Python package `huggingface_hub`.
//!
//! Invariants: an owner, a repository and a file of a [`HubName`] are safe as parts of a path and
//! of a URL. Not here: requests to the hub and its cache (`hub`).

use super::error::ConfigError;
use super::secret::{Secret, read_hub_token};
use crate::limits::{HUB_NAME_MAX, HUB_PATH_MAX};
use crate::sys::file_access::FileAccess;
use serde::{Serialize, Serializer};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// The hub, if `HF_ENDPOINT` names no other one.
const ENDPOINT: &str = "https://huggingface.co";
/// In place of a value that can be a secret.
const HIDDEN: &str = "(not shown)";
/// The revision, if `--revision` names no other one.
pub const REVISION: &str = "main";

/// A model on a hub: `OWNER/REPOSITORY`, and perhaps a GGUF file of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubName {
    /// `OWNER/REPOSITORY`.
    pub repository: String,
    /// The GGUF file; `None`: the repository's safetensors, or its only GGUF file.
    pub part: Option<HubPart>,
}

/// What a name says about a GGUF file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum HubPart {
    /// The path of the file in the repository.
    File(String),
    /// A part of the file's name, such as `Q4_K_M`.
    Quant(String),
}

impl HubName {
    /// Reads `OWNER/REPOSITORY`, `OWNER/REPOSITORY:FILE.gguf` or `OWNER/REPOSITORY:QUANT`; `None`
    /// if `text` has another form.
    pub fn parse(text: &str) -> Option<HubName> {
        let (repository, part) = text
            .split_once(':')
            .map_or((text, None), |(repository, part)| (repository, Some(part)));
        let (owner, name) = repository.split_once('/')?;
        // The path of a file that does not exist must not go to the hub.
        let is_file = is_gguf(name) || name.ends_with(".safetensors");
        if !(is_name(owner) && is_name(name)) || is_file {
            return None;
        }
        let part = match part {
            None => None,
            Some(file) if is_gguf(file) => {
                Some(HubPart::File(Some(file).filter(|file| is_safe_path(file))?.to_owned()))
            }
            Some(quant) => Some(HubPart::Quant(Some(quant).filter(|it| is_name(it))?.to_owned())),
        };
        Some(HubName { repository: repository.to_owned(), part })
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.part {
            None => f.write_str(&self.repository),
            Some(HubPart::File(part) | HubPart::Quant(part)) => {
                write!(f, "{}:{part}", self.repository)
            }
        }
    }
}

impl Serialize for HubName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The hub's rule for names of owners and repositories.
fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=HUB_NAME_MAX).contains(&text.len())
        && text.bytes().all(is_allowed)
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("..")
}

/// Whether the name of a file ends in `.gguf`.
pub fn is_gguf(path: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, extension)| extension.eq_ignore_ascii_case("gguf"))
}

/// Whether a path of a repository stays below the directory that it is joined to.
pub fn is_safe_path(path: &str) -> bool {
    let is_plain = |part: &str| !matches!(part, "" | "." | "..");
    path.len() <= HUB_PATH_MAX && path.split('/').all(is_plain) && !path.contains(char::is_control)
}

/// Environment variables for a hub.
#[derive(Clone, Debug, Default)]
pub struct HubVariables {
    /// `HF_ENDPOINT`: URL of the hub.
    pub endpoint: Option<String>,
    /// `HF_HUB_CACHE`: directory of the cache.
    pub cache: Option<PathBuf>,
    /// `HF_HOME`: directory of the cache and the token.
    pub home: Option<PathBuf>,
    /// `HF_TOKEN`.
    pub token: Option<Secret>,
    /// `HF_TOKEN_PATH`: file of the token.
    pub token_path: Option<PathBuf>,
    /// `HF_HUB_OFFLINE`.
    pub offline: Option<String>,
    /// `XDG_CACHE_HOME`, or `.cache` in `HOME`.
    pub user_cache: Option<PathBuf>,
}

impl HubVariables {
    /// The variables of this process. An empty variable counts as not set.
    pub fn of_this_process() -> HubVariables {
        let value = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name: &str| value(name).map(|value| value.to_string_lossy().into_owned());
        let home = value("HOME").map(PathBuf::from);
        let path = |name: &str| Some(expand_home(value(name)?, home.as_ref()));
        let token = text("HF_TOKEN").map(|token| token.trim().to_owned());
        HubVariables {
            endpoint: text("HF_ENDPOINT"),
            cache: path("HF_HUB_CACHE"),
            home: path("HF_HOME"),
            token: token
                .filter(|token| !token.is_empty())
                .map(|token| Secret::of_variable(token.as_bytes(), "HF_TOKEN")),
            token_path: path("HF_TOKEN_PATH"),
            offline: text("HF_HUB_OFFLINE"),
            user_cache: path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache"))),
        }
    }
}

/// The path with the home directory in place of a leading `~/`.
fn expand_home(path: OsString, home: Option<&PathBuf>) -> PathBuf {
    let path = PathBuf::from(path);
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

/// A model on a hub, and the access to the hub.
#[derive(Clone, Debug, Serialize)]
pub struct HubConfig {
    /// The model.
    pub name: HubName,
    /// Branch, tag or commit.
    pub revision: String,
    /// URL of the hub, without a slash at its end.
    pub endpoint: String,
    /// Directory of the cache.
    pub cache: PathBuf,
    /// The token for the hub, and for no other host.
    pub token: Option<Secret>,
    /// Whether only the cache is used.
    pub offline: bool,
}

impl HubConfig {
    /// Resolves the settings for a model.
    ///
    /// # Errors
    /// A variable or the revision cannot be used, or no variable names a directory for the cache.
    pub fn new(
        name: HubName,
        revision: String,
        variables: &HubVariables,
        files: &FileAccess,
        warnings: &mut Vec<String>,
    ) -> Result<HubConfig, ConfigError> {
        let refused = |flag, value: &str, limit: &str| {
            Err(ConfigError::Value { flag, value: value.into(), limit: limit.into() })
        };
        if !is_safe_path(&revision) {
            return refused("--revision", &revision, "must be a branch, a tag or a commit");
        }
        let endpoint = variables.endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
        let has_scheme = endpoint.starts_with("https://") || endpoint.starts_with("http://");
        // Messages show the endpoint, so it must not contain a password.
        if !has_scheme || endpoint.contains(['@', '?', '#']) {
            let limit = "must be http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]";
            let shown = if endpoint.contains('@') { HIDDEN } else { endpoint };
            return refused("HF_ENDPOINT", shown, limit);
        }
        let home = variables.home.clone();
        let home = home.or_else(|| Some(variables.user_cache.as_ref()?.join("huggingface")));
        let cache = variables.cache.clone().or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.ok_or_else(|| ConfigError::Missing {
            flag: "HF_HUB_CACHE",
            why: format!("{name} is a model of a hub, and HOME names no place for its files"),
        })?;
        let token_path = variables.token_path.clone();
        let token_path = token_path.or_else(|| Some(home.as_ref()?.join("token")));
        let token = match (&variables.token, token_path) {
            (Some(token), _) => Some(token.clone()),
            (None, Some(path)) => read_hub_token(files, &path, warnings)?,
            (None, None) => None,
        };
        if token.as_ref().is_some_and(|token| !token.bytes().iter().all(u8::is_ascii_graphic)) {
            return refused("HF_TOKEN", HIDDEN, "must be one word of printable ASCII characters");
        }
        let offline = variables.offline.as_deref().unwrap_or_default().to_ascii_uppercase();
        let offline = ["1", "TRUE", "YES", "ON"].contains(&offline.as_str());
        Ok(HubConfig { name, revision, endpoint: endpoint.to_owned(), cache, token, offline })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::file_access::MemoryFiles;
    use std::path::Path;

    #[test]
    fn names_of_a_hub_are_told_from_paths() {
        for (text, repository, part) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
            ("a/b:Q4_K_M", "a/b", Some(HubPart::Quant("Q4_K_M".into()))),
            ("a/b:x/y.Q8_0.GGUF", "a/b", Some(HubPart::File("x/y.Q8_0.GGUF".into()))),
        ] {
            let name = HubName::parse(text).unwrap();
            assert_eq!((name.repository.as_str(), &name.part), (repository, &part));
            assert_eq!(name.to_string(), text);
        }
        let long = format!("a/{}", "b".repeat(HUB_NAME_MAX + 1));
        for text in [
            "",
            "a",
            "a/",
            "/a",
            "/a/b",
            "./a",
            "../a",
            "a/..",
            "a/b/",
            "a/b/c",
            "a/b.",
            "-a/b",
            "a/b c",
            "a/b:",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a/b:c/d",
            "a/b:c:d",
            "a/é",
            &long,
        ] {
            assert_eq!(HubName::parse(text), None, "{text}");
        }
    }

    #[test]
    fn paths_that_leave_their_directory_are_not_safe() {
        for path in ["a", "a.b", "a/b", "..a", "a..b/c"] {
            assert!(is_safe_path(path), "{path}");
        }
        for path in ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0", "a\n"] {
            assert!(!is_safe_path(path), "{path:?}");
        }
    }

    fn config(variables: &HubVariables, files: &MemoryFiles) -> Result<HubConfig, String> {
        let name = HubName::parse("a/b").unwrap();
        let access = FileAccess::Memory(files.clone());
        HubConfig::new(name, REVISION.into(), variables, &access, &mut Vec::new())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn variables_have_the_meaning_and_the_order_of_the_python_package() {
        let files = MemoryFiles::default();
        files.write("/c/huggingface/token", b" of-cache\n");
        files.write("/h/token", b"of-home\n");
        files.write("/t", b"of-path\n");
        let token = |config: &HubConfig| {
            config.token.as_ref().map(|token| String::from_utf8(token.bytes().to_vec()).unwrap())
        };
        let mut variables = HubVariables { user_cache: Some("/c".into()), ..Default::default() };
        let default = config(&variables, &files).unwrap();
        assert_eq!(default.cache, Path::new("/c/huggingface/hub"));
        assert_eq!((token(&default).as_deref(), default.offline), (Some("of-cache"), false));
        assert_eq!(default.endpoint, ENDPOINT);
        variables.home = Some("/h".into());
        variables.endpoint = Some("http://mirror:8080/hub/".into());
        let home = config(&variables, &files).unwrap();
        assert_eq!((home.cache.to_str(), token(&home)), (Some("/h/hub"), Some("of-home".into())));
        assert_eq!(home.endpoint, "http://mirror:8080/hub");
        variables.cache = Some("/x".into());
        variables.token_path = Some("/t".into());
        let paths = config(&variables, &files).unwrap();
        assert_eq!((paths.cache.to_str(), token(&paths)), (Some("/x"), Some("of-path".into())));
        variables.token = Some(Secret::of_bytes(b"own"));
        assert_eq!(token(&config(&variables, &files).unwrap()).as_deref(), Some("own"));
        for (value, expected) in [("1", true), ("on", true), ("Yes", true), ("0", false)] {
            variables.offline = Some(value.into());
            assert_eq!(config(&variables, &files).unwrap().offline, expected, "{value}");
        }
    }

    #[test]
    fn unusable_variables_are_refused_and_no_secret_is_shown() {
        let files = MemoryFiles::default();
        let base = HubVariables { user_cache: Some("/c".into()), ..Default::default() };
        let error = |variables: HubVariables| config(&variables, &files).unwrap_err();
        assert!(error(HubVariables::default()).contains("HF_HUB_CACHE"));
        for endpoint in ["mirror", "ftp://mirror", "https://user:secret@mirror"] {
            let said = error(HubVariables { endpoint: Some(endpoint.into()), ..base.clone() });
            assert!(said.contains("HF_ENDPOINT") && !said.contains("secret"), "{said}");
        }
        let token = Some(Secret::of_bytes(b"secret\nx-header: 1"));
        let said = error(HubVariables { token, ..base.clone() });
        assert!(said.contains("HF_TOKEN") && !said.contains("secret"), "{said}");
        let config = HubConfig {
            token: Some(Secret::of_variable(b"secret", "HF_TOKEN")),
            ..config(&base, &files).unwrap()
        };
        let shown = serde_json::to_string(&config).unwrap() + &format!("{config:?}");
        assert!(shown.contains("6 bytes from HF_TOKEN") && !shown.contains("\"secret"), "{shown}");
    }
}
