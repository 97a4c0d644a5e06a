//! Bytes on a TCP lane after its preamble. For any input, bytes are written to the slot's pages or
//! nowhere, and an invalid frame ends the session.

use super::landing::{SLOTS, Slot, layout, memory};
use baton::sys::event::WaitSet;
use baton::transfer::plan::Template;
use baton::transfer::transport::tcp::TcpDestination;
use baton::transfer::transport::{Arrival, DestinationHalf};
use std::io::Write;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The first byte is the number of following bytes that `ctl` has already read.
pub fn run(data: &[u8]) {
    let Some((&early, bytes)) = data.split_first() else { return };
    let (early, late) = bytes.split_at(usize::from(early).min(bytes.len()));
    let memory = memory(0);
    let template = Template::new(&layout(), &layout()).expect("the same");
    let mut half =
        TcpDestination::new(template, 1, SLOTS, Arc::new(WaitSet::new().expect("epoll")));
    // A stream that needs no port.
    let (mut near, far) = UnixStream::pair().expect("sockets");
    let stream = TcpStream::from(OwnedFd::from(far)).into();
    half.join(Arrival { lane: 0, stream, early: early.to_vec() });
    near.set_nonblocking(true).expect("a socket");
    let mut slot = Slot::default();
    if bytes.is_empty() {
        assert!(half.step(&memory, &mut slot).is_ok(), "the lane stands");
    }
    let mut rest = late;
    loop {
        let sent = near.write(rest).unwrap_or(0);
        rest = &rest[sent..];
        match half.step(&memory, &mut slot) {
            Ok(moved) if moved || sent > 0 => slot.check(&memory),
            _ => break,
        }
    }
    slot.check(&memory);
}
