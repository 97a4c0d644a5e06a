//! What `baton drain` makes of who answers in a worker's place: it waits for nobody without an end, and takes for a worker's end
//! nothing else.

use crate::process::PATIENCE;
use crate::tls::fixture;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Its end, which comes.
fn drain(url: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["drain", url, "--wait", "--tls-ca-file"]).arg(fixture("ca.pem"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it never ends");
        }
        thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// A byte now and then, of a handshake and of an answer, is no life.
#[test]
fn who_trickles_does_not_keep_it() {
    // The head of a record that is long, and of an answer that has no end.
    for (scheme, begin) in [("https", &b"\x16\x03\x03\x40\x00"[..]), ("http", b"HTTP/1.1 200 OK\r\nx: ")] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port());
        let trickles = thread::spawn(move || {
            let (mut tcp, _) = listener.accept().unwrap();
            tcp.write_all(begin).unwrap();
            while tcp.write_all(b"a").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let output = drain(&url);
        let (_, error) = said(&output);
        assert!(output.status.code() == Some(1) && error.contains("cannot be reached"), "{error}");
        trickles.join().unwrap();
    }
}
