//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body: prompts of a million ids as JSON fit.
pub const HTTP_BODY_MAX: usize = 32 << 20;

// front::http
/// Longest chunk-size line of a chunked body: 16 digits and extensions that nobody uses.
pub const HTTP_CHUNK_LINE_MAX: usize = 256;
/// Bytes of trailers after a chunked body; they are skipped.
pub const HTTP_TRAILERS_MAX: usize = 8 << 10;
/// What a body's buffer reserves before its bytes come, so that a length alone costs nothing.
pub const HTTP_BODY_RESERVE: usize = 16 << 10;
/// Longest server-sent event that a client of ours reads: a chunk with prompt ids of a long context.
pub const SSE_EVENT_MAX: usize = 32 << 20;
