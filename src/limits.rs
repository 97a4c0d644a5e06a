//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// Scheduler (`sched`).

/// Commands an engine takes in one turn: a flood of them must not keep streams from their next token.
pub const COMMANDS_PER_TURN: usize = 64;
/// How often a request that does not fit may be passed by later ones that do; then nobody passes it.
pub const PASSES_MAX: u32 = 32;
/// Tokens of a prefill chunk before the machine's speed has been measured: a fraction of a second on
/// the slowest machine.
pub const UNMEASURED_CHUNK_TOKENS: u32 = 64;
