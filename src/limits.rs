//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

use std::time::Duration;

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// model files
/// Most metadata entries of a GGUF file; published ones hold under a hundred.
pub const GGUF_METADATA_MAX: usize = 4096;
/// Most tensors of a GGUF file; the largest published models hold a few thousand.
pub const GGUF_TENSORS_MAX: usize = 1 << 16;
/// Longest key or tensor name of a GGUF file, the format's own bound.
pub const GGUF_NAME_MAX: usize = 65535;
/// Most ids of a vocabulary; the largest published ones have 300 thousand.
pub const TOKENIZER_VOCAB_MAX: usize = 1 << 24;
/// Most alternatives shown beside a token; the most that OpenAI's interface takes.
pub const TOP_LOGPROBS_MAX: usize = 20;
/// Longest head of a safetensors file, the format's own bound.
pub const SAFETENSORS_HEADER_MAX: usize = 100_000_000;
/// Longest JSON file of a model's directory but for its tokenizer; indices of large models reach
/// some megabytes.
pub const MODEL_JSON_MAX: usize = 64 << 20;

// transfer::manager
/// Destinations kept for requests that have not come: the router sends both legs at once, so few wait at
/// any moment; a flood of them must not eat the worker.
pub const EARLY_DESTINATIONS_MAX: usize = 1024;
/// How long one is kept: past a router's dispatch to a slow network, short beside a client's patience.
pub const EARLY_DESTINATION_LIFE: Duration = Duration::from_secs(30);
/// Rooms that are over and still answered truly.
pub const TOMBSTONES_MAX: usize = 16_384;
/// How long: past every deadline of the other side.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(600);

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
/// From dialling a prefill worker to a session that stands, each step: a live worker answers in
/// milliseconds, one busy with a long layer within a second.
pub const SESSION_SETUP_DEADLINE: Duration = Duration::from_secs(5);
/// How long a prefill worker that could not be reached is not dialled again: its requests fail at once and
/// may be retried elsewhere.
pub const DIAL_HOLD_OFF: Duration = Duration::from_secs(1);

// Scheduler (`sched`).

/// Commands an engine takes in one turn: a flood of them must not keep streams from their next token.
pub const COMMANDS_PER_TURN: usize = 64;
/// How often a request that does not fit may be passed by later ones that do; then nobody passes it.
pub const PASSES_MAX: u32 = 32;
/// Tokens of a prefill chunk before the machine's speed has been measured: a fraction of a second on
/// the slowest machine.
pub const UNMEASURED_CHUNK_TOKENS: u32 = 64;
