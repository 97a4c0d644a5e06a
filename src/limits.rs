//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

use std::time::Duration;

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// wire::zmtp

/// Bytes of a message: a Destination names a million pages with 4 bytes each.
pub const ZMTP_MESSAGE_MAX: usize = (4 << 20) + (64 << 10);
/// Parts of a message: an Announce has one for each rank, and a few of its own.
pub const ZMTP_PARTS_MAX: usize = 128;
/// Bytes waiting for a peer: two of the largest messages; a peer further behind is stuck.
pub const ZMTP_QUEUED_MAX: usize = 2 * ZMTP_MESSAGE_MAX;
/// Bytes of a message from a peer that has not proven itself: Hello and Proof take 200.
pub const ZMTP_UNPROVEN_MESSAGE_MAX: usize = 1 << 10;
/// Parts of a message from such a peer.
pub const ZMTP_UNPROVEN_PARTS_MAX: usize = 2;
/// Bytes of a command: metadata of a READY with a 255-byte identity takes 300.
pub const ZMTP_COMMAND_MAX: usize = 1 << 10;
/// Bytes of a message buffer kept between messages; a larger one is given back.
pub const ZMTP_BUFFER_KEPT: usize = 64 << 10;

// wire::message

/// Bytes of a text in a message: a field's name or value, for the other side's log.
pub const MESSAGE_TEXT_MAX: usize = 256;
/// Ranks of a worker; tensor parallelism beyond a rack is not useful.
pub const RANKS_MAX: usize = 64;
/// Pages of one Destination: a million tokens in pages of one.
pub const PAGES_MAX: usize = 1 << 20;
/// Shortest cluster key in bytes: as strong as the hash it keys.
pub const CLUSTER_KEY_MIN: usize = 32;

const _: () = assert!(PAGES_MAX * 4 + (1 << 10) <= ZMTP_MESSAGE_MAX);
const _: () = assert!(RANKS_MAX + 8 <= ZMTP_PARTS_MAX);

// net

/// Connections of the process, dialled and accepted.
pub const NET_CONNECTIONS_MAX: usize = 16 << 10;
/// Listeners of the process: HTTP, registry, control, data and a few more.
pub const NET_LISTENERS_MAX: usize = 16;
/// Bytes received on a connection and not consumed; then reading pauses, and others have their
/// turn. An HTTP head fits whole.
pub const NET_RECEIVED_MAX: usize = 128 << 10;
/// Bytes waiting to be sent on a connection; beyond it the reader is too slow. Two of the largest
/// control messages, or the longest answer with logprobs, fit.
pub const NET_QUEUED_MAX: usize = 16 << 20;
/// Bytes waiting to be sent on all connections, so that many slow readers cannot exhaust memory.
pub const NET_QUEUED_TOTAL_MAX: usize = 256 << 20;
/// Bytes of a connection's buffer kept when it is empty; most messages fit.
pub const NET_BUFFER_KEPT: usize = 16 << 10;
/// Connections accepted on one listener before others have their turn.
pub const NET_ACCEPT_TURN: usize = 64;
/// Readiness events taken from the kernel at once.
pub const NET_READY_MAX: usize = 1024;
/// Time a closing connection has to take its last bytes and close its end.
pub const NET_LINGER: std::time::Duration = std::time::Duration::from_secs(5);
/// Wait before accepting again where the process is out of descriptors.
pub const NET_ACCEPT_RETRY: std::time::Duration = std::time::Duration::from_millis(100);
/// Descriptors passed at once, and held for a connection until taken: a pool, a ring, a doorbell
/// each way, and as many again.
pub const DESCRIPTORS_MAX: usize = 8;

const _: () = assert!(NET_RECEIVED_MAX > HTTP_HEAD_MAX);
const _: () = assert!(NET_QUEUED_MAX >= ZMTP_QUEUED_MAX);
