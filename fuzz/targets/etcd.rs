//! A router's view of etcd: whatever a reading and a watch bring, in whatever pieces, gives the same changes.

use baton::cluster::errand::Errand;
use baton::cluster::etcd::view::{Change, View};
use std::time::Instant;

/// The first byte is the size of the pieces; the rest is a reading, and behind a zero byte the lines of the watch.
pub fn run(data: &[u8]) {
    let Some((&step, bytes)) = data.split_first() else { return };
    let (whole, lines) = match bytes.iter().position(|&byte| byte == 0) {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &[][..]),
    };
    let begun = Instant::now();
    let a = follow(whole, lines, usize::from(step).max(1), begun);
    let b = follow(whole, lines, usize::MAX, begun);
    assert_eq!(a, b);
}

fn follow(whole: &[u8], lines: &[u8], step: usize, now: Instant) -> (Vec<Change>, bool) {
    let mut view = View::new(Vec::new(), now);
    assert!(view.poll(now).is_some_and(|request| !request.is_stream));
    let mut is_good = view.answered(200, whole, now).is_ok();
    if is_good {
        assert!(view.poll(now).is_some_and(|request| request.is_stream));
        is_good = lines.chunks(step).all(|piece| view.piece(piece, now).is_ok());
    }
    (std::iter::from_fn(|| view.change()).collect(), is_good)
}
