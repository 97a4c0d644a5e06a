//! A router's view of etcd: a range response and a watch give the same changes, however their bytes
//! are split.

use baton::registry::call::RegistryTask;
use baton::registry::etcd::view::{EtcdChange, EtcdView};
use std::time::Instant;

/// The first byte is the size of the pieces. The rest is the range response, a zero byte, and the
/// lines of the watch.
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

fn follow(whole: &[u8], lines: &[u8], step: usize, now: Instant) -> (Vec<EtcdChange>, bool) {
    let mut view = EtcdView::new(Vec::new(), now);
    assert!(view.poll(now).is_some_and(|request| !request.is_stream));
    let mut is_good = view.handle_answer(200, whole, now).is_ok();
    if is_good {
        assert!(view.poll(now).is_some_and(|request| request.is_stream));
        is_good = lines.chunks(step).all(|piece| view.handle_piece(piece, now).is_ok());
    }
    (std::iter::from_fn(|| view.change()).collect(), is_good)
}
