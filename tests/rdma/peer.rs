//! The process that receives the writes. It serves the commands of a test over a unix socket, and
//! has no knowledge of the test.

use super::rig::{Node, PATIENCE, REGION_BYTES};
use baton::sys::event::{WaitInterest, WaitSet};
use baton::sys::verbs::{CompletionKind, Completions, Endpoint, RemoteAddress};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Names the socket to the other process.
pub const SOCKET: &str = "BATON_RDMA_PEER";

/// Receives that are posted ahead.
const RECEIVES: u64 = 24;

const CONNECT: u8 = b'c';
const READY: u8 = b'r';
const FILL: u8 = b'f';
const NOTICE: u8 = b'n';
const MEMORY: u8 = b'm';

pub struct Peer {
    child: Child,
    stream: UnixStream,
    base: RemoteAddress,
}

impl Peer {
    pub fn start() -> Peer {
        let path = std::env::temp_dir().join(format!("baton-rdma-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).expect("a socket");
        let child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--ignored", "--exact", "peer_process", "--nocapture"])
            .env(SOCKET, &path)
            .stdout(Stdio::null())
            .spawn()
            .expect("this program runs");
        let (stream, _) = listener.accept().expect("it dials");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let _ = std::fs::remove_file(&path);
        Peer { child, stream, base: RemoteAddress { address: 0, key: 0 } }
    }

    /// Resets both ends and connects them anew.
    pub fn connect(&mut self, node: &mut Node) {
        node.pair.reset().expect("any state can be left so");
        let own = node.pair.open(&node.route, rand_sequence()).expect("it was reset");
        self.stream.write_all(&[CONNECT]).expect("it listens");
        self.stream.write_all(&endpoint_bytes(&own)).expect("it listens");
        let theirs = endpoint_from(&self.read());
        node.pair.connect(&theirs).expect("it was opened");
        let address = u64::from_le_bytes(self.read());
        let key = u32::from_le_bytes(self.read());
        self.base = RemoteAddress { address, key };
        assert_eq!(self.read(), [READY]);
    }

    /// Place in its memory.
    pub fn at(&self, offset: usize) -> RemoteAddress {
        RemoteAddress { address: self.base.address + offset as u64, ..self.base }
    }

    pub fn fill(&mut self, byte: u8) {
        self.stream.write_all(&[FILL, byte]).expect("it listens");
        assert_eq!(self.read(), [READY]);
    }

    /// The immediate of the next notice, or the failure of its receive.
    pub fn await_notice(&mut self) -> Result<u32, String> {
        self.stream.write_all(&[NOTICE]).expect("it listens");
        match self.read::<5>() {
            [0, immediate @ ..] => Ok(u32::from_le_bytes(immediate)),
            _ => Err("flushed".into()),
        }
    }

    /// Its memory, byte for byte.
    pub fn memory(&mut self) -> Vec<u8> {
        self.stream.write_all(&[MEMORY]).expect("it listens");
        let mut bytes = vec![0; REGION_BYTES];
        self.stream.read_exact(&mut bytes).expect("it answers");
        bytes
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was a child");
    }

    #[track_caller]
    fn read<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes).expect("it answers");
        bytes
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Until the test hangs up.
pub fn serve(path: &Path) {
    let mut stream = UnixStream::connect(path).expect("the test listens");
    let mut node = Node::destination();
    let mut command = [0; 1];
    while stream.read_exact(&mut command).is_ok() {
        match command[0] {
            CONNECT => {
                let mut bytes = [0; ENDPOINT_BYTES];
                stream.read_exact(&mut bytes).expect("the test speaks");
                node.pair.reset().expect("any state can be left so");
                // What was flushed is of the last connection.
                let mut old = Completions::new(64);
                node.received.poll(&mut old).expect("the queue is sound");
                let own = node.pair.open(&node.route, rand_sequence()).expect("it was reset");
                for id in 0..RECEIVES {
                    node.pair.post_receive(id).expect("there is room");
                }
                node.pair.connect(&endpoint_from(&bytes)).expect("it was opened");
                stream.write_all(&endpoint_bytes(&own)).expect("the test listens");
                let registration = &node.registration;
                stream.write_all(&registration.address().to_le_bytes()).expect("the test listens");
                stream
                    .write_all(&registration.remote_key().to_le_bytes())
                    .expect("the test listens");
                stream.write_all(&[READY]).expect("the test listens");
            }
            FILL => {
                stream.read_exact(&mut command).expect("the test speaks");
                node.fill(|_| command[0]);
                stream.write_all(&[READY]).expect("the test listens");
            }
            NOTICE => stream.write_all(&notice(&mut node)).expect("the test listens"),
            MEMORY => stream.write_all(&node.memory()).expect("the test listens"),
            other => panic!("command {other}"),
        }
    }
}

/// Waits as a mover does: asks for an event, looks once more, sleeps.
fn notice(node: &mut Node) -> [u8; 5] {
    let set = WaitSet::new().expect("a set");
    set.add(node.received.events().expect("made with events"), WaitInterest::Readable)
        .expect("a descriptor");
    let mut completions = Completions::new(1);
    let begun = Instant::now();
    loop {
        node.received.request_event().expect("the queue is sound");
        if node.received.poll(&mut completions).expect("the queue is sound") > 0 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "no notice");
        set.wait(PATIENCE);
        node.received.clear_events();
    }
    let completion = completions.iter().next().expect("one was taken");
    match completion.outcome {
        Ok(CompletionKind::Notified { immediate }) => {
            node.pair.post_receive(completion.id).expect("there is room");
            let [a, b, c, d] = immediate.to_le_bytes();
            [0, a, b, c, d]
        }
        Ok(other) => panic!("{other:?}"),
        Err(_) => [1; 5],
    }
}

const ENDPOINT_BYTES: usize = 28;

fn endpoint_bytes(endpoint: &Endpoint) -> [u8; ENDPOINT_BYTES] {
    let mut bytes = [0; ENDPOINT_BYTES];
    bytes[..4].copy_from_slice(&endpoint.number.to_le_bytes());
    bytes[4..8].copy_from_slice(&endpoint.sequence.to_le_bytes());
    bytes[8..24].copy_from_slice(&endpoint.gid);
    bytes[24..26].copy_from_slice(&endpoint.lid.to_le_bytes());
    bytes[26..].copy_from_slice(&endpoint.mtu.to_le_bytes());
    bytes
}

fn endpoint_from(bytes: &[u8; ENDPOINT_BYTES]) -> Endpoint {
    Endpoint {
        number: u32::from_le_bytes(bytes[..4].try_into().expect("four bytes")),
        sequence: u32::from_le_bytes(bytes[4..8].try_into().expect("four bytes")),
        gid: bytes[8..24].try_into().expect("sixteen bytes"),
        lid: u16::from_le_bytes(bytes[24..26].try_into().expect("two bytes")),
        mtu: u16::from_le_bytes(bytes[26..].try_into().expect("two bytes")),
    }
}

fn rand_sequence() -> u32 {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).expect("the kernel has random numbers");
    u32::from_le_bytes(bytes)
}
