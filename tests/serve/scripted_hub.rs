//! A model hub on loopback that follows a script, and a store of large files that it redirects to.

use ::ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// The commit of every revision.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What happens to one request for a file.
#[derive(Clone, Debug)]
pub enum Step {
    /// The connection closes after this many bytes.
    Break(usize),
    /// As `Break`, but the connection stays open.
    Stall(usize),
    /// The connection closes without an answer.
    Close,
    /// An answer without content.
    Status(u16),
    /// The first byte is another one.
    Corrupt,
    /// The last byte is missing, and the length says so.
    Short,
    /// The range of the request is ignored.
    Whole,
    /// The answer waits.
    Delay(Duration),
}

/// A request that arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Path and query.
    pub target: String,
    /// First byte of the requested range.
    pub from: usize,
    /// Bytes of the file that were sent.
    pub sent: usize,
    /// The header `Authorization`.
    pub authorization: Option<String>,
    /// Whether the store got it.
    pub is_store: bool,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// Entries of the listing beside the files.
    odd: Vec<Value>,
    /// Status of the listing, and the hub's reason.
    refusal: Option<(u16, &'static str)>,
    steps: BTreeMap<String, VecDeque<Step>>,
    seen: Vec<Seen>,
}

pub struct ScriptedHub {
    /// Its URL.
    pub url: String,
    state: Arc<Mutex<State>>,
}

impl ScriptedHub {
    /// A hub with these files in its only repository, `owner/tiny`.
    pub fn start(files: BTreeMap<String, Vec<u8>>) -> ScriptedHub {
        ScriptedHub::of_files(files, None)
    }

    fn of_files(files: BTreeMap<String, Vec<u8>>, tls: Option<Arc<ServerConfig>>) -> ScriptedHub {
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let store = listen(state.clone(), None, tls.clone());
        let url = listen(state.clone(), Some(store), tls);
        ScriptedHub { url, state }
    }

    /// A hub with the files of a directory, and some that no loader reads.
    pub fn of_directory(path: &Path) -> ScriptedHub {
        ScriptedHub::start(read_files(path))
    }

    /// The same over HTTPS, with a certificate for `localhost` of the test authority.
    pub fn of_directory_over_tls(path: &Path) -> ScriptedHub {
        let file = |name: &str| {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates").join(name)
        };
        let certificates = CertificateDer::pem_file_iter(file("one.pem")).unwrap();
        let chain = certificates.map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(file("one.key")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key);
        ScriptedHub::of_files(read_files(path), Some(Arc::new(config.unwrap())))
    }

    /// The next requests for this file follow these steps.
    pub fn script(&self, path: &str, steps: &[Step]) {
        self.state().steps.entry(path.into()).or_default().extend(steps.iter().cloned());
    }

    /// The listing gets this status and reason.
    pub fn refuse_listing(&self, refusal: Option<(u16, &'static str)>) {
        self.state().refusal = refusal;
    }

    /// The listing gets another entry.
    pub fn list(&self, entry: Value) {
        self.state().odd.push(entry);
    }

    pub fn size(&self, path: &str) -> usize {
        self.state().files[path].len()
    }

    /// Hash of a file's content, as the listing has it.
    pub fn hash(&self, path: &str) -> String {
        hash(path, &self.state().files[path])
    }

    /// All requests since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.state().seen)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// The files of a directory, and some that no loader reads.
fn read_files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        files.insert(name, std::fs::read(entry.path()).unwrap());
    }
    let others = ["README.md", "pytorch_model.bin", "consolidated.safetensors"];
    for name in others.into_iter().chain(["original/model.safetensors"]) {
        files.insert(name.into(), b"not needed".to_vec());
    }
    files
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_large(path: &str) -> bool {
    [".safetensors", ".gguf", ".bin"].iter().any(|end| path.ends_with(end))
}

fn git_blob(bytes: &[u8]) -> String {
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

fn hash(path: &str, bytes: &[u8]) -> String {
    if is_large(path) { hex(digest(&SHA256, bytes).as_ref()) } else { git_blob(bytes) }
}

/// Serves the hub, or the store if there is no store to redirect to. Returns its URL.
fn listen(
    state: Arc<Mutex<State>>,
    store: Option<String>,
    tls: Option<Arc<ServerConfig>>,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let scheme = if tls.is_some() { "https" } else { "http" };
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (state, store, tls) = (state.clone(), store.clone(), tls.clone());
            thread::spawn(move || match tls {
                None => serve(stream, &state, store),
                Some(tls) => {
                    let session = ServerConnection::new(tls).unwrap();
                    serve(StreamOwned::new(session, stream), &state, store)
                }
            });
        }
    });
    format!("{scheme}://localhost:{port}")
}

/// Answers one request. The client sees the end of the connection as the end of the answer.
fn serve(mut stream: impl Read + Write, state: &Mutex<State>, store: Option<String>) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let field = |name: &str| {
        let fields = head.lines().filter_map(|line| line.split_once(": "));
        fields.into_iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    };
    let target = head.split(' ').nth(1)?.to_owned();
    let range = field("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-'));
    let from = range.map_or(0, |from| from.parse().unwrap());
    let seen = Seen {
        target: target.clone(),
        from,
        sent: 0,
        authorization: field("authorization").map(str::to_owned),
        is_store: store.is_none(),
    };
    let index = {
        let mut state = state.lock().unwrap();
        state.seen.push(seen);
        state.seen.len() - 1
    };
    if target.starts_with("/api/models/") {
        let state = state.lock().unwrap();
        let is_here = target.starts_with("/api/models/owner/tiny/revision/");
        let (status, reason) = state.refusal.unwrap_or(if is_here { (200, "") } else { (404, "") });
        let body = if status == 200 { listing(&state).to_string() } else { String::new() };
        let reason = format!("x-error-code: {reason}\r\n");
        return answer(&mut stream, status, &reason, body.as_bytes());
    }
    let path = target.split('?').next()?;
    let path = path.strip_prefix(&format!("/owner/tiny/resolve/{COMMIT}/"));
    let path = path.or_else(|| target.strip_prefix("/store/")?.strip_suffix("?signature=1"));
    let Some(path) = path else { return answer(&mut stream, 404, "", b"") };
    if let Some(store) = store.filter(|_| is_large(path)) {
        let location = format!("location: {store}/store/{path}?signature=1\r\n");
        return answer(&mut stream, 302, &location, b"");
    }
    let (step, bytes) = {
        let mut state = state.lock().unwrap();
        let step = state.steps.get_mut(path).and_then(VecDeque::pop_front);
        (step, state.files.get(path)?.clone())
    };
    let sent = send_file(&mut stream, step, bytes, range.map(|_| from))?;
    // A test can have taken the list meanwhile.
    if let Some(seen) = state.lock().unwrap().seen.get_mut(index) {
        seen.sent = sent;
    }
    Some(())
}

fn send_file(
    stream: &mut (impl Read + Write),
    step: Option<Step>,
    mut bytes: Vec<u8>,
    range: Option<usize>,
) -> Option<usize> {
    let mut range = range;
    let mut most = usize::MAX;
    match &step {
        None => {}
        Some(Step::Break(count) | Step::Stall(count)) => most = *count,
        Some(Step::Close) => return None,
        Some(Step::Status(status)) => {
            answer(stream, *status, "", b"");
            return None;
        }
        Some(Step::Corrupt) => bytes[0] ^= 1,
        Some(Step::Short) => {
            bytes.pop();
        }
        Some(Step::Whole) => range = None,
        Some(Step::Delay(time)) => thread::sleep(*time),
    }
    let (from, size) = (range.unwrap_or(0), bytes.len());
    let (status, more) = match range {
        Some(from) => {
            (206, format!("content-range: bytes {from}-{}/{size}\r\n", size.saturating_sub(1)))
        }
        None => (200, String::new()),
    };
    let rest = bytes.get(from..).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n{more}\r\n",
        rest.len()
    );
    let sent = &rest[..rest.len().min(most)];
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(sent).ok()?;
    stream.flush().ok()?;
    if let Some(Step::Stall(_)) = step {
        // Until the client is gone.
        let _ = stream.read(&mut [0]);
    }
    Some(sent.len())
}

fn listing(state: &State) -> Value {
    let file = |(path, bytes): (&String, &Vec<u8>)| {
        let mut entry = json!({"rfilename": path, "size": bytes.len(), "blobId": git_blob(bytes)});
        if is_large(path) {
            entry["blobId"] = json!("f".repeat(40));
            entry["lfs"] = json!({"sha256": hash(path, bytes), "size": bytes.len(),
                "pointerSize": 130});
        }
        entry
    };
    let files: Vec<Value> = state.files.iter().map(file).chain(state.odd.clone()).collect();
    json!({"id": "owner/tiny", "sha": COMMIT, "private": false, "siblings": files})
}

fn answer(stream: &mut impl Write, status: u16, fields: &str, body: &[u8]) -> Option<()> {
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n{fields}\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).ok()?;
    stream.flush().ok()
}
