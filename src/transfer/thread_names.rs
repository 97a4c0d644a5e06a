//! The names of the threads that move bytes. `ps -T` shows them, and the bench counts by them.

/// The mover.
pub const MOVER: &str = "move-0";
/// The threads that copy beside the mover: their number follows.
pub const COPY: &str = "copy";
/// The thread of a NIC that posts: the NIC's number follows.
pub const POST: &str = "post";
/// The thread of a NIC that polls: the NIC's number follows.
pub const POLL: &str = "poll";

/// Whether this is the name of a thread that moves bytes.
pub fn moves_bytes(name: &str) -> bool {
    [MOVER, COPY, POST, POLL].iter().any(|kind| name.starts_with(kind))
}
