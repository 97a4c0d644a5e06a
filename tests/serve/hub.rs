//! Models by the name of a hub: fetch, cache, resume, checks and refusals, with the real binary.

use crate::client::PATIENCE;
use crate::scripted_hub::{COMMIT, ScriptedHub, Seen, Step};
use crate::server::{MODEL, Server, baton, fixture};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const NAME: &str = "owner/tiny";
/// The first of three files with weights, of 148,000 bytes.
const WEIGHTS: &str = "model-00001-of-00003.safetensors";
const TOKEN: &str = "hf_secretsecretsecret";

/// A home of the hub's cache, deleted at the end of the test.
struct Home(PathBuf);

impl Home {
    fn new() -> Home {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("baton-hub-home-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Home(path)
    }

    fn folder(&self) -> PathBuf {
        self.0.join("hub/models--owner--tiny")
    }

    fn snapshot(&self) -> PathBuf {
        self.folder().join("snapshots").join(COMMIT)
    }

    /// A server's command for this name, with the hub at this address.
    fn command(&self, name: &str, hub: &str, flags: &[&str]) -> Command {
        let mut command = baton(&["serve", name, "--port", "0", "--kv-memory", "16MiB"]);
        command.args(["--threads", "1"]).args(flags);
        for variable in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"] {
            command.env_remove(variable);
        }
        for variable in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "SSL_CERT_FILE"] {
            command.env_remove(variable).env_remove(variable.to_lowercase());
        }
        command.env("HF_HOME", &self.0).env("HF_ENDPOINT", hub);
        command
    }

    fn serve(&self, hub: &ScriptedHub) -> Server {
        Server::of_command(self.command(NAME, &hub.url, &[]))
    }

    /// Status and standard error of a start that fails.
    fn fail(&self, hub: &ScriptedHub) -> (Option<i32>, String) {
        fail(self.command(NAME, &hub.url, &[]))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn fail(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = child.try_wait().unwrap();
    child.kill().unwrap();
    let text = reader.join().unwrap();
    let status = status.unwrap_or_else(|| panic!("the start does not fail: {text}"));
    assert!(!text.contains("panicked") && !text.contains(TOKEN), "{text}");
    (status.code(), text)
}

fn tiny() -> ScriptedHub {
    ScriptedHub::of_directory(&fixture(MODEL))
}

fn tokens(server: &Server) -> Value {
    let body = json!({"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "logprobs": 1});
    server.post("/v1/completions", &body).ok()["choices"][0].take()
}

/// Requests for content by file: offsets, and the sum of bytes.
fn fetched(seen: &[Seen]) -> BTreeMap<String, (Vec<usize>, usize)> {
    let mut files: BTreeMap<String, (Vec<usize>, usize)> = BTreeMap::new();
    for one in seen.iter().filter(|one| one.sent > 0) {
        let path = one.target.split('?').next().unwrap();
        let name = path.trim_start_matches("/store/").rsplit('/').next().unwrap().to_owned();
        let (offsets, sum) = files.entry(name).or_default();
        offsets.push(one.from);
        *sum += one.sent;
    }
    files
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_model_by_name_answers_as_its_path_does_and_is_fetched_once() {
    let (hub, home) = (tiny(), Home::new());
    let expected = tokens(&Server::start(&["--threads", "1"]));
    let server = home.serve(&hub);
    assert_eq!(tokens(&server), expected);
    assert_eq!(server.get("/v1/models").ok()["data"][0]["id"], NAME);
    server.check_works_as(NAME);
    assert_eq!(server.said("hub fetched").len(), names(&fixture(MODEL)).len());
    let seen = hub.take_seen();
    let target = "/api/models/owner/tiny/revision/main?blobs=true";
    assert_eq!(seen[0].target, target);
    let got: BTreeSet<String> = fetched(&seen).into_keys().collect();
    assert_eq!(got, names(&fixture(MODEL)), "what the loader reads, and nothing else");
    assert_eq!(names(&home.snapshot()), got);
    assert_eq!(fs::read_to_string(home.folder().join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(home.snapshot().join(WEIGHTS)).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(hub.hash(WEIGHTS)));
    drop(server);
    // The second start asks for the listing alone.
    assert_eq!(tokens(&home.serve(&hub)), expected);
    let seen = hub.take_seen();
    assert!(seen.len() == 1 && seen[0].target == target, "{seen:?}");
    // Without the hub: by the offline mode, or because nothing answers.
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nowhere = format!("http://{nowhere}");
    let warning = "hub is unreachable, the copy in the cache is used";
    let mut offline = home.command(NAME, &hub.url, &[]);
    offline.env("HF_HUB_OFFLINE", "1");
    let servers = [offline, home.command(NAME, &nowhere, &[])].map(Server::of_command);
    for (server, warnings) in servers.iter().zip([0, 1]) {
        assert_eq!(tokens(server), expected);
        assert_eq!(server.said(warning).len(), warnings);
    }
    hub.refuse_listing(Some((503, "")));
    assert_eq!(home.serve(&hub).said(warning).len(), 1);
}

#[test]
fn a_break_is_resumed_and_no_byte_is_fetched_twice() {
    let (hub, home) = (tiny(), Home::new());
    hub.script(WEIGHTS, &[Step::Break(50_000), Step::Status(503), Step::Break(1000)]);
    let server = home.serve(&hub);
    server.check_works();
    let (offsets, sum) = fetched(&hub.take_seen()).remove(WEIGHTS).unwrap();
    assert_eq!((offsets, sum), (vec![0, 50_000, 51_000], hub.size(WEIGHTS)));
    assert_eq!(server.said("fetch failed, next try follows").len(), 3);
}

#[test]
fn a_killed_process_leaves_a_part_that_the_next_one_continues() {
    let (hub, home) = (tiny(), Home::new());
    hub.script(WEIGHTS, &[Step::Stall(50_000)]);
    let mut first = home.command(NAME, &hub.url, &[]).spawn().unwrap();
    let part = home.folder().join("blobs").join(hub.hash(WEIGHTS) + ".incomplete");
    let begun = Instant::now();
    while fs::metadata(&part).map_or(0, |part| part.len()) < 50_000 {
        assert!(begun.elapsed() < PATIENCE, "the part never grows");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(!home.folder().join("refs/main").exists(), "the snapshot is not complete");
    home.serve(&hub).check_works();
    let (offsets, _) = fetched(&hub.take_seen()).remove(WEIGHTS).unwrap();
    assert_eq!(offsets.last(), Some(&50_000));
    assert!(!part.exists());
}

#[test]
fn a_host_that_ignores_the_range_sends_the_whole_file_again() {
    let (hub, home) = (tiny(), Home::new());
    hub.script(WEIGHTS, &[Step::Break(50_000), Step::Whole]);
    home.serve(&hub).check_works();
    let (_, sum) = fetched(&hub.take_seen()).remove(WEIGHTS).unwrap();
    assert_eq!(sum, 50_000 + hub.size(WEIGHTS));
}

#[test]
fn a_hub_that_breaks_each_time_is_given_up_with_the_reason() {
    let (hub, home) = (tiny(), Home::new());
    hub.script(WEIGHTS, &[const { Step::Close }; 5]);
    let (status, text) = home.fail(&hub);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains(WEIGHTS) && text.contains("(5 tries in a row failed)"), "{text}");
    let tries = hub.take_seen().iter().filter(|seen| seen.is_store).count();
    assert_eq!(tries, 5);
}

/// A new commit that cannot be fetched does not keep the copy of the last one from its work.
#[test]
fn the_copy_of_the_last_commit_serves_while_the_next_one_cannot_be_fetched() {
    let (hub, home) = (tiny(), Home::new());
    drop(home.serve(&hub));
    let last = "f".repeat(40);
    let snapshot = home.folder().join("snapshots").join(&last);
    fs::rename(home.snapshot(), &snapshot).unwrap();
    fs::write(home.folder().join("refs/main"), &last).unwrap();
    let (weights, blob) = (snapshot.join(WEIGHTS), fs::canonicalize(snapshot.join(WEIGHTS)));
    fs::remove_file(&weights).unwrap();
    fs::rename(blob.unwrap(), &weights).unwrap();
    hub.script(WEIGHTS, &[const { Step::Close }; 5]);
    let server = home.serve(&hub);
    server.check_works();
    let lines = server.said("hub is unreachable, the copy in the cache is used");
    assert!(lines.len() == 1 && lines[0].contains(&last), "{lines:?}");
    assert_eq!(fs::read_to_string(home.folder().join("refs/main")).unwrap(), last);
}

#[test]
fn a_refusal_says_what_to_do() {
    let (hub, home) = (tiny(), Home::new());
    let absent = "there is no repository owner/tiny with the revision main, or";
    for (status, reason, token, advice) in [
        (401, "GatedRepo", false, "accept them on its page, and set HF_TOKEN"),
        (403, "GatedRepo", true, "accept the terms on the model's page"),
        // A hub does not say whether there is such a repository.
        (401, "RepoNotFound", false, absent),
        (401, "", false, "for a private model or one with terms set HF_TOKEN"),
        (401, "", true, "the token is wrong or gives no access"),
        (404, "RepoNotFound", false, absent),
        (404, "RevisionNotFound", true, absent),
    ] {
        hub.refuse_listing(Some((status, reason)));
        let mut command = home.command(NAME, &hub.url, &[]);
        if token {
            command.env("HF_TOKEN", TOKEN);
        }
        let (code, text) = fail(command);
        assert_eq!(code, Some(2), "{text}");
        let both = text.contains("MODEL owner/tiny: there is no such path, and the hub")
            && text.contains(&format!("answers with status {status}"));
        assert!(both && text.contains(advice), "{text}");
    }
    hub.refuse_listing(None);
    let (code, text) = fail(home.command("owner/other", &hub.url, &[]));
    assert!(code == Some(2) && text.contains("no repository owner/other"), "{text}");
    hub.script("config.json", &[Step::Status(404)]);
    let (code, text) = home.fail(&hub);
    assert!(code == Some(2) && text.contains("the file is not there"), "{text}");
}

#[test]
fn bytes_with_a_wrong_hash_or_size_are_deleted() {
    for (file, step, what) in [
        (WEIGHTS, Step::Corrupt, "the SHA-256 is"),
        ("config.json", Step::Corrupt, "the SHA-1 of the git blob is"),
        (WEIGHTS, Step::Short, "the size is"),
    ] {
        let (hub, home) = (tiny(), Home::new());
        hub.script(file, &[step]);
        let (status, text) = home.fail(&hub);
        assert!(status == Some(1) && text.contains(&format!("{file}: {what}")), "{text}");
        let blobs = names(&home.folder().join("blobs"));
        let hash = hub.hash(file);
        assert!(!blobs.iter().any(|name| name.starts_with(&hash)), "{blobs:?}");
        assert!(!home.snapshot().join(file).exists());
        home.serve(&hub).check_works();
    }
}

#[test]
fn a_full_disk_is_named_with_the_missing_bytes() {
    let (hub, home) = (tiny(), Home::new());
    let blobs = home.folder().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(hub.hash(WEIGHTS) + ".incomplete");
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let (status, text) = home.fail(&hub);
    let missing = format!("the disk is full, and {} bytes", hub.size(WEIGHTS));
    assert!(status == Some(1) && text.contains(&missing), "{text}");
    assert!(text.contains("HF_HUB_CACHE"), "{text}");
}

#[test]
fn processes_that_start_at_once_fetch_each_file_once() {
    let (hub, home) = (tiny(), Home::new());
    let delay = Step::Delay(Duration::from_millis(400));
    for name in names(&fixture(MODEL)) {
        hub.script(&name, std::slice::from_ref(&delay));
    }
    let servers: Vec<Server> = std::thread::scope(|scope| {
        let start = || scope.spawn(|| home.serve(&hub));
        let starts: Vec<_> = (0..3).map(|_| start()).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    for (name, (offsets, _)) in fetched(&hub.take_seen()) {
        assert_eq!(offsets, [0], "{name}");
    }
    let waits: usize =
        servers.iter().map(|server| server.said("another process fetches the file").len()).sum();
    assert!(waits > 0, "they did start at once");
    servers.iter().for_each(Server::check_works);
}

#[test]
fn the_token_goes_to_the_hub_and_to_no_host_of_a_redirect() {
    let (hub, home) = (tiny(), Home::new());
    fs::write(home.0.join("token"), format!("{TOKEN}\n")).unwrap();
    let server = home.serve(&hub);
    let seen = hub.take_seen();
    assert!(seen.iter().any(|seen| seen.is_store));
    for one in seen {
        let expected = (!one.is_store).then(|| format!("Bearer {TOKEN}"));
        assert_eq!(one.authorization, expected, "{}", one.target);
    }
    assert_eq!(server.said(TOKEN), [""; 0]);
}

#[test]
fn a_path_that_leaves_the_cache_is_refused() {
    for path in ["../../escaped", "/tmp/escaped", "a/../../../../escaped"] {
        let (hub, home) = (tiny(), Home::new());
        let blob = "a".repeat(40);
        hub.list(json!({"rfilename": path, "size": 1, "blobId": blob}));
        let (status, text) = home.fail(&hub);
        assert!(status == Some(1) && text.contains("could leave the cache"), "{text}");
        assert_eq!(names(&home.0), BTreeSet::new(), "nothing is written");
    }
}

#[test]
fn a_gguf_file_is_chosen_by_its_quantisation() {
    let read = |name: &str| fs::read(fixture(name)).unwrap();
    let files = ["llama.Q8_0.gguf", "llama.Q4_K.gguf", "llama.F32.gguf"];
    let hub = ScriptedHub::start(files.map(|name| (name.into(), read(name))).into());
    let home = Home::new();
    let expected = tokens(&Server::start_model(&fixture(files[0]), &["--threads", "1"]));
    for part in ["q8_0", "llama.Q8_0.gguf"] {
        let name = format!("{NAME}:{part}");
        let server = Server::of_command(home.command(&name, &hub.url, &[]));
        assert_eq!(tokens(&server), expected);
        assert_eq!(server.get("/v1/models").ok()["data"][0]["id"], name);
    }
    let fetched = fetched(&hub.take_seen());
    assert_eq!(fetched.keys().collect::<Vec<_>>(), [files[0]]);
    for name in [NAME.to_owned(), format!("{NAME}:Q5_0")] {
        let (status, text) = fail(home.command(&name, &hub.url, &[]));
        let all = files.iter().all(|file| text.contains(file));
        assert!(status == Some(2) && all, "{text}");
    }
    let mut offline = home.command(&format!("{NAME}:Q4_K"), &hub.url, &[]);
    offline.env("HF_HUB_OFFLINE", "1");
    let (status, text) = fail(offline);
    assert!(status == Some(2) && text.contains("HF_HUB_OFFLINE is set"), "{text}");
}

#[test]
fn offline_mode_names_what_the_cache_does_not_have() {
    let (hub, home) = (tiny(), Home::new());
    let offline = || {
        let mut command = home.command(NAME, &hub.url, &[]);
        command.env("HF_HUB_OFFLINE", "TRUE");
        fail(command)
    };
    let (status, text) = offline();
    assert!(status == Some(2) && text.contains("owner/tiny at the revision main"), "{text}");
    drop(home.serve(&hub));
    fs::remove_file(home.snapshot().join(WEIGHTS)).unwrap();
    hub.take_seen();
    let (_, text) = offline();
    assert!(text.contains(&format!("{WEIGHTS} of owner/tiny at the revision main")), "{text}");
    assert_eq!(hub.take_seen().len(), 0, "the hub is not asked");
    // The content is still there, so the link alone is made again.
    home.serve(&hub).check_works();
    assert_eq!(fetched(&hub.take_seen()).len(), 0);
}

#[test]
fn an_existing_path_comes_first() {
    let (hub, home) = (tiny(), Home::new());
    let local = home.0.join(NAME);
    fs::create_dir_all(&local).unwrap();
    for entry in fs::read_dir(fixture(MODEL)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), local.join(entry.file_name())).unwrap();
    }
    let mut command = home.command(NAME, &hub.url, &[]);
    command.current_dir(&home.0);
    Server::of_command(command).check_works();
    let mut command = home.command(NAME, &hub.url, &["--revision", "main"]);
    command.current_dir(&home.0);
    let (status, text) = fail(command);
    assert!(status == Some(2) && text.contains("is a path that exists"), "{text}");
    assert_eq!(hub.take_seen().len(), 0);
}

#[test]
fn a_revision_is_asked_for_and_has_its_own_reference() {
    let (hub, home) = (tiny(), Home::new());
    let flags = ["--revision", "refs/pr/1", "--load-format", "dummy"];
    Server::of_command(home.command(NAME, &hub.url, &flags)).check_works();
    let seen = hub.take_seen();
    let target = "/api/models/owner/tiny/revision/refs%2Fpr%2F1?blobs=true";
    assert_eq!(seen[0].target, target);
    assert!(!fetched(&seen).contains_key(WEIGHTS), "dummy weights need no file");
    assert_eq!(fs::read_to_string(home.folder().join("refs/refs/pr/1")).unwrap(), COMMIT);
}

#[test]
fn a_model_with_one_file_of_weights_is_fetched() {
    let (path, home) = (fixture("qwen2-bf16"), Home::new());
    let hub = ScriptedHub::of_directory(&path);
    let expected = tokens(&Server::start_model(&path, &["--threads", "1"]));
    assert_eq!(tokens(&home.serve(&hub)), expected);
    let got: BTreeSet<String> = fetched(&hub.take_seen()).into_keys().collect();
    assert_eq!(got, names(&path));
}

/// A company's mirror can have a certificate of the company's own authority.
#[test]
fn the_certificate_of_a_hub_is_checked() {
    let (hub, home) = (ScriptedHub::of_directory_over_tls(&fixture(MODEL)), Home::new());
    let (status, text) = home.fail(&hub);
    assert!(status == Some(1) && text.contains("the certificate is not accepted"), "{text}");
    assert!(text.contains("SSL_CERT_FILE"), "{text}");
    assert_eq!(hub.take_seen().len(), 0, "nothing is sent");
    let authority = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates/ca.pem");
    let mut command = home.command(NAME, &hub.url, &[]);
    command.env("SSL_CERT_FILE", authority);
    Server::of_command(command).check_works();
    assert!(hub.take_seen().iter().any(|seen| seen.is_store));
}
