//! Clients that disconnect. Their requests end on both workers, and no resource stays in use.

use crate::client::PATIENCE;
use crate::server::{LONG_CONTEXT, Server, endless};
use serde_json::json;
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const LAYOUTS: [&[&str]; 3] =
    [&["--mixed"], &[], &["--prefill-workers", "2", "--decode-workers", "2"]];

#[test]
fn a_stream_without_a_reader_ends() {
    for layout in LAYOUTS {
        let flags =
            [&["--max-running-requests", "2", "--max-queued-requests", "3"], layout].concat();
        let server = Server::start_long(&flags);
        let pools = server.metrics().pools();
        // Several times the number of slots.
        for _ in 0..25 {
            let mut client = server.connect();
            client.post("/v1/completions", &endless());
            client.wait_for("data: ");
            drop(client);
            server.wait_until_idle();
        }
        assert_eq!(server.metrics().pools(), pools);
        server.check_works();
    }
}

/// At any moment: before prefill, during it, at the hand-off, in the stream.
#[test]
fn a_client_may_leave_at_any_moment() {
    for layout in LAYOUTS {
        let flags = [
            &[
                "--max-running-requests",
                "3",
                "--max-queued-requests",
                "5",
                "--chunked-prefill-size",
                "64",
            ],
            layout,
        ]
        .concat();
        let server = Server::start_long(&flags);
        let mut body = endless();
        body["prompt"] = json!(vec![7; 1500]);
        body["n"] = json!(2);
        for round in 0..60u64 {
            let mut clients: Vec<_> = (0..1 + round % 3).map(|_| server.connect()).collect();
            for client in &mut clients {
                client.post(
                    ["/v1/completions", "/v1/completions", "/metrics"][round as usize % 3],
                    &body,
                );
            }
            thread::sleep(Duration::from_micros(round * round * 20));
        }
        server.wait_until_idle();
        server.check_works();
    }
}

/// A stream that fills its worker's batch. It is too long to end by itself, and a thread reads it
/// so that the server does not cut it off.
struct Filler {
    socket: TcpStream,
    bytes: Arc<AtomicUsize>,
    reader: Option<JoinHandle<()>>,
}

impl Filler {
    fn start(server: &Server) -> Filler {
        let mut client = server.connect();
        let mut body = endless();
        body["max_tokens"] = json!(LONG_CONTEXT - 100);
        client.post("/v1/completions", &body);
        client.wait_for("data: ");
        let socket = client.stream.try_clone().unwrap();
        let bytes = Arc::new(AtomicUsize::new(0));
        let count = bytes.clone();
        let reader = thread::spawn(move || {
            let mut piece = [0; 64 << 10];
            while let Ok(read @ 1..) = client.stream.read(&mut piece) {
                count.fetch_add(read, Ordering::SeqCst);
            }
        });
        Filler { socket, bytes, reader: Some(reader) }
    }

    /// Waits for more bytes of its stream.
    fn check_runs(&self) {
        let (before, begun) = (self.bytes.load(Ordering::SeqCst), Instant::now());
        while self.bytes.load(Ordering::SeqCst) == before {
            assert!(!self.reader.as_ref().unwrap().is_finished(), "the filling stream has ended");
            assert!(begun.elapsed() < PATIENCE, "the filling stream has stalled");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let _ = self.reader.take().map(JoinHandle::join);
    }
}

#[test]
fn a_request_that_still_waits_ends_with_its_client() {
    for layout in LAYOUTS {
        let flags =
            [&["--max-running-requests", "1", "--max-queued-requests", "9"], layout].concat();
        let server = Server::start_long(&flags);
        let workers = server.metrics().pools().len() as u32 / 2;
        let fillers: Vec<_> = (0..workers.max(1)).map(|_| Filler::start(&server)).collect();
        server.wait_until("only the fillers are there", |metrics| metrics.waiting() == 0.0);
        for _ in 0..12 {
            let mut client = server.connect();
            let mut body = endless();
            body["stream"] = json!(false);
            client.post("/v1/completions", &body);
            server.wait_until("one more waits", |metrics| metrics.waiting() > 0.0);
            drop(client);
            server.wait_until("the waiting request has ended", |metrics| metrics.waiting() == 0.0);
            // The running streams continue. No waiting request can have started.
            fillers.iter().for_each(Filler::check_runs);
        }
        drop(fillers);
        server.wait_until_idle();
        server.check_works();
    }
}

#[test]
fn an_aborted_request_ends_and_is_told() {
    for layout in LAYOUTS {
        let server = Server::start_long(layout);
        let mut clients: Vec<_> = (0..4).map(|_| server.connect()).collect();
        for (index, client) in clients.iter_mut().enumerate() {
            let mut body = endless();
            body["rid"] = json!(format!("job-{}-{}", index / 2, index % 2));
            client.post("/v1/completions", &body);
            client.wait_for("data: ");
        }
        let abort = |body| server.post("/abort_request", &body).ok()["aborted"].clone();
        assert_eq!(abort(json!({"rid": "nobody"})), 0);
        assert_eq!(abort(json!({"rid": "job-0-0"})), 1);
        assert_eq!(abort(json!({"rid": "job-1"})), 2);
        assert_eq!(abort(json!({"abort_all": true})), 1);
        for mut client in clients {
            let reply = client.reply(baton::http::Method::Post);
            let last = reply.text().trim_end().rsplit("\n\n").next().unwrap();
            assert!(last.starts_with("data: {\"error\":{") && last.contains("aborted"), "{last}");
        }
        server.wait_until_idle();
        server.check_works();
    }
}

/// A reader that is too slow loses its own stream. Other clients are not affected.
#[test]
fn a_client_that_does_not_read_is_no_burden() {
    let server = Server::start_long(&[]);
    let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
    for client in &mut clients {
        let mut body = endless();
        body["logprobs"] = json!(20);
        client.post("/v1/completions", &body);
    }
    for _ in 0..20 {
        server.check_works();
    }
    drop(clients);
    server.wait_until_idle();
}
