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

// front::openai
/// Fields of one JSON object of a request; OpenAI's chat request has about 35.
pub const JSON_FIELDS_MAX: usize = 256;
/// Values in a part of a request that is kept as a JSON tree (messages, template arguments): a tree
/// takes some 100 bytes a value where the text takes two.
pub const JSON_NODES_MAX: usize = 1 << 17;
/// Choices of one request, prompts times samples; each is a sequence of its own.
pub const CHOICES_MAX: usize = 1024;
/// Samples of one prompt, as OpenAI.
pub const SAMPLES_MAX: u32 = 128;
/// Alternatives beside a token's logprob, as OpenAI's chat.
pub const TOP_LOGPROBS_MAX: usize = 20;
/// Stop strings of one request; OpenAI takes 4, other engines any number.
pub const STOP_STRINGS_MAX: usize = 32;
/// Bytes of one stop string: as many may be held back from a stream.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Stop token ids of one request.
pub const STOP_IDS_MAX: usize = 256;
/// Bytes of names that a client chooses: models, request ids, cache salts, hosts, fields.
pub const NAME_BYTES_MAX: usize = 512;
