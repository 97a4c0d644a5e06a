//! The reactor and the state of the whole process: descriptors and signals. The tests need their
//! own process and run one after the other.
#![allow(unsafe_code)]

use baton::net::{Event, Reactor};
use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn running_out_of_descriptors_closes_newcomers_and_spins_nowhere() {
    let _guard = ONE_AT_A_TIME.lock().unwrap();
    let mut reactor = Reactor::new().unwrap();
    let listener = reactor
        .listen(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into(), 100)
        .unwrap();
    let address = reactor.local_address(listener).unwrap();
    limit_descriptors(64);
    let client = TcpStream::connect(address).unwrap();
    // All that is left.
    let hoard: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let deadline = Instant::now() + PATIENCE;
    while reactor.refused() == 0 {
        assert!(Instant::now() < deadline);
        reactor.poll(Some(deadline)).unwrap();
        assert_eq!(reactor.next_event(), None);
    }
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(
        matches!((&client).read(&mut [0; 1]), Ok(0) | Err(_)),
        "the newcomer is not left hanging"
    );
    // Nothing more happens, so nothing returns early.
    let before = Instant::now();
    reactor.poll(Some(before + Duration::from_millis(5))).unwrap();
    assert!(Instant::now() >= before + Duration::from_millis(5));

    drop(hoard);
    let _client = TcpStream::connect(address).unwrap();
    loop {
        assert!(Instant::now() < deadline);
        reactor.poll(Some(deadline)).unwrap();
        if let Some(Event::Accepted { .. }) = reactor.next_event() {
            break;
        }
    }
    limit_descriptors(1024);
}

#[test]
fn signals_come_as_events() {
    let _guard = ONE_AT_A_TIME.lock().unwrap();
    let mut reactor = Reactor::new().unwrap();
    reactor.watch_signals().unwrap();
    let deadline = Instant::now() + PATIENCE;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: `raise` has no precondition.
        unsafe { libc::raise(signal) };
        loop {
            assert!(Instant::now() < deadline);
            reactor.poll(Some(deadline)).unwrap();
            if reactor.next_event() == Some(Event::Terminate) {
                break;
            }
        }
    }
}

fn limit_descriptors(count: u64) {
    let limit = libc::rlimit { rlim_cur: count, rlim_max: count.max(1024) };
    // SAFETY: `limit` lives over the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}
