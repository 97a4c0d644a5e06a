//! All bounds on input from outside and on queues inside, each with its reason.
//!
//! Not here: sizes that follow from a format or an algorithm; they are in the module that uses
//! them.

mod hub;
mod keys;
mod model;
mod text;
mod transfer;

pub use hub::*;
pub use keys::*;
pub use model::*;
pub use text::*;
pub use transfer::*;

use std::time::Duration;

/// Longest HTTP request head in bytes. Common proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body unless a flag sets another limit. Prompts of a million ids as JSON fit.
pub const HTTP_BODY_DEFAULT: usize = 32 << 20;
/// Longest HTTP body that a flag can allow: the default limit of SGLang's and vLLM's routers.
pub const HTTP_BODY_MAX: usize = 256 << 20;
/// Extra bytes that a body may have at a worker that takes part in hand-offs. A router adds, for
/// each prompt, the address of the other leg. After a failover it also adds the ids of the stream.
pub const HTTP_BODY_ADDED: usize = 1 << 20;
/// Bytes of the bodies of all unanswered requests. The limit protects memory from many large bodies
/// at once; a few of the longest bodies fit. A router holds each body twice while it sends it.
pub const HTTP_BODIES_MAX: usize = 1 << 30;
/// A body up to this size is always accepted, whatever other requests hold: some thousand tokens.
/// All clients together fill at most a quarter of [`HTTP_BODIES_MAX`].
pub const HTTP_BODY_USUAL: usize = 16 << 10;

// transfer::manager
/// Time for each step from dialling a prefill worker to an open session. A live worker answers in
/// milliseconds; one that computes a long layer answers within a second.
pub const SESSION_SETUP_DEADLINE: Duration = Duration::from_secs(5);
/// Time from a failed dial of a prefill worker to the next dial. Until then its requests fail at
/// once, and other workers can retry them.
pub const DIAL_HOLD_OFF: Duration = Duration::from_secs(1);
/// RDMA sessions that may break in a row without any transfer. One break can be an accident.
pub const RDMA_BREAKS_MAX: u32 = 2;
/// How long a worker does not use the NIC, or RDMA to the peer, after [`RDMA_BREAKS_MAX`] breaks.
/// Each attempt costs its requests seconds of retransmission.
pub const RDMA_BARRED: Duration = Duration::from_secs(60);
/// Sessions of one worker: one for each worker of the other role that a router can have. At the
/// limit, a decode worker replaces a source without requests; a prefill worker refuses the session.
pub const SESSIONS_MAX: usize = ROUTER_WORKERS_MAX;
const _: () = assert!(SESSIONS_MAX <= CONTROL_CONNECTIONS_MAX);

// wire::zmtp

/// Bytes of a message. A Destination names a million pages with 4 bytes each.
pub const ZMTP_MESSAGE_MAX: usize = (4 << 20) + (64 << 10);
/// Parts of a message. An Announce has one for each process of a worker, and a few of its own.
pub const ZMTP_PARTS_MAX: usize = 128;
/// Bytes that wait for a peer: two of the largest messages. If more bytes wait, the peer is stuck.
pub const ZMTP_QUEUED_MAX: usize = 2 * ZMTP_MESSAGE_MAX;
/// Bytes of a message from a peer without a verified proof. Hello and Proof take 200.
pub const ZMTP_UNPROVEN_MESSAGE_MAX: usize = 1 << 10;
/// Parts of a message from such a peer.
pub const ZMTP_UNPROVEN_PARTS_MAX: usize = 2;
/// Bytes of a command. The metadata of a READY with a 255-byte identity takes 300.
pub const ZMTP_COMMAND_MAX: usize = 1 << 10;
/// Bytes of a message buffer kept between messages. A larger buffer is freed.
pub const ZMTP_BUFFER_KEPT: usize = 64 << 10;

// wire::message

/// Bytes of a text in a message: a field's name or value, for the log of the other side.
pub const MESSAGE_TEXT_MAX: usize = 256;
/// Ranks of a worker; tensor parallelism beyond a rack is not useful.
pub const RANKS_MAX: usize = 64;
/// Pages of one Destination: a million tokens in pages of one.
pub const PAGES_MAX: usize = 1 << 20;
/// Cluster keys that a worker accepts at a time: the old and the new key of a rotation, and two
/// more. Hello has the same number of fields for them.
pub const CLUSTER_KEYS_MAX: usize = 4;

const _: () = assert!(PAGES_MAX * 4 + (1 << 10) <= ZMTP_MESSAGE_MAX);
const _: () = assert!(RANKS_MAX + 8 <= ZMTP_PARTS_MAX);

/// Minimum and maximum seconds of `--peer-timeout`. PINGs are sent four times in that time. No
/// worker should wait longer than a minute for a dead peer.
pub const PEER_TIMEOUT_RANGE: [f64; 2] = [0.5, 60.0];
/// Seconds for which a prefill worker keeps a request until a decode worker asks for it. Default of
/// `--bootstrap-timeout`, as in SGLang. Decode asks after it has pages, so the wait includes its
/// queue.
pub const BOOTSTRAP_TIMEOUT: u32 = 300;

// net

/// Connections of the process, outgoing and incoming.
pub const NET_CONNECTIONS_MAX: usize = 52 << 10;
/// Listeners of the process: HTTP, registry, control, data and a few more.
pub const NET_LISTENERS_MAX: usize = 16;
/// Bytes received on a connection and not consumed. At this limit reading pauses and other
/// connections continue. A whole HTTP head fits.
pub const NET_RECEIVED_MAX: usize = 128 << 10;
/// Reads of a TLS connection in one turn; a read takes a few records at most. A peer can send
/// records without data, such as tickets, without end. Eight thousand such records take about 10
/// ms. Full records fill the buffer in fewer reads.
pub const NET_TLS_READS_MAX: usize = 16;
/// Bytes that wait to be sent on a connection. If more bytes wait, the reader is too slow. Two of
/// the largest control messages fit, as does the longest answer with logprobs.
pub const NET_QUEUED_MAX: usize = 16 << 20;
/// Bytes waiting to be sent on all connections, so that many slow readers cannot exhaust memory.
pub const NET_QUEUED_TOTAL_MAX: usize = 256 << 20;
/// Bytes of a buffer that is kept while empty. Most messages fit.
pub const NET_BUFFER_KEPT: usize = 16 << 10;
/// Spare buffers of [`NET_BUFFER_KEPT`] bytes for connections without a buffer. Fewer connections
/// than this fill and empty a buffer in one turn.
pub const NET_BUFFERS_SPARE: usize = 64;
/// Connections accepted on one listener before other listeners continue.
pub const NET_ACCEPT_TURN: usize = 64;
/// Readiness events taken from the kernel at once.
pub const NET_READY_MAX: usize = 1024;
/// How long the remote host of an outgoing connection may stay silent. A host is silent if its
/// kernel acknowledges nothing, or takes no byte of the queued data. A host with a busy or stopped
/// process is not silent, unless the buffers of both kernels are full. The time outlasts a lost
/// packet, a switch restart and a machine migration.
pub const NET_HOST_SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long the remote host of an accepted connection may stay silent while nothing is queued for
/// it. After that, the request of a client that is gone does not use the worker any longer. The
/// time outlasts a mobile client's short loss of signal.
pub const NET_CLIENT_SILENCE_MAX: Duration = Duration::from_secs(30);
/// Time for a closing connection to send its last bytes and for the peer to close its end.
pub const NET_LINGER: Duration = Duration::from_secs(5);
/// Time for the TLS handshake of an accepted connection: two round trips, a lost packet, a slow
/// client.
pub const NET_HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// TLS handshakes in progress at a time. If there are more, the oldest is closed. Each holds tens
/// of KiB.
pub const NET_HANDSHAKES_MAX: usize = 512;
/// Bytes that a TLS session encrypts ahead of its socket: one record.
pub const TLS_SEALED_MAX: usize = 16 << 10;
/// Bytes of a file of certificates or of a key: a long chain.
pub const TLS_FILE_MAX: usize = 1 << 20;
/// Wait before the next accept if the process has no free descriptors.
pub const NET_ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Descriptors that one message passes, and that a connection holds until they are taken. A pool, a
/// ring and a doorbell in each direction use half of them.
pub const DESCRIPTORS_MAX: usize = 8;

const _: () = assert!(NET_RECEIVED_MAX > HTTP_HEAD_MAX);
const _: () = assert!(NET_QUEUED_MAX >= ZMTP_QUEUED_MAX);

// http
/// Longest chunk-size line of a chunked body: 16 digits and extensions. No common client sends
/// extensions.
pub const HTTP_CHUNK_LINE_MAX: usize = 256;
/// Bytes of trailers after a chunked body; they are skipped.
pub const HTTP_TRAILERS_MAX: usize = 8 << 10;
/// Bytes that a body's buffer reserves in advance, so that a declared length alone costs nothing.
pub const HTTP_BODY_RESERVE: usize = 16 << 10;
/// Longest server-sent event that Baton's clients read: a chunk with the prompt ids of a long
/// context.
pub const SSE_EVENT_MAX: usize = 32 << 20;

// api
/// Bytes of the response header that names ignored fields: many typos, and a head of usual size.
pub const IGNORED_FIELDS_BYTES_MAX: usize = 1 << 10;
/// Steps of a chat template that came with a request: some hundred times those of the longest
/// published template, and less than a second.
pub const TEMPLATE_STEPS_MAX: u64 = 10_000_000;
/// Fields of one JSON object of a request; OpenAI's chat request has about 35.
pub const JSON_FIELDS_MAX: usize = 256;
/// Values in a part of a request that is kept as a JSON tree (messages, template arguments). A
/// value takes about 100 bytes in the tree and can take only two in the text.
pub const JSON_NODES_MAX: usize = 1 << 17;
/// Choices of one request, prompts times samples; each is a sequence of its own.
pub const CHOICES_MAX: usize = 1024;
/// Samples of one prompt; the same limit as OpenAI.
pub const SAMPLES_MAX: u32 = 128;
/// Alternatives beside a token's logprob; the same limit as OpenAI's chat.
pub const TOP_LOGPROBS_MAX: usize = 20;
/// Bytes for the logprobs of the prompts of a request: 65,536 tokens with one alternative, 6,241
/// with twenty. Their JSON is about eight times as long, and fits what can wait for a client.
pub const PROMPT_LOGPROBS_BYTES_MAX: usize = 1 << 20;
/// Bytes for the logprobs of all prompts of a process: 256 prompts of 2,048 tokens with one
/// alternative. All of them can wait on one control link.
pub const PROMPT_LOGPROBS_MEMORY: usize = 8 << 20;
/// How long a decode worker that has the KV waits for the logprobs of its prompt. The prefill
/// worker sends them before the last KV.
pub const PROMPT_LOGPROBS_WAIT: Duration = Duration::from_secs(10);
/// Stop strings of one request; OpenAI takes 4, other engines any number.
pub const STOP_STRINGS_MAX: usize = 32;
/// Bytes of one stop string. A stream holds back at most as many bytes.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Stop token ids of one request.
pub const STOP_IDS_MAX: usize = 256;
/// Bytes of names chosen by clients: request ids, cache salts, host names.
pub const NAME_BYTES_MAX: usize = 512;

// model files
/// Most metadata entries of a GGUF file. Published files hold under a hundred.
pub const GGUF_METADATA_MAX: usize = 4096;
/// Most tensors of a GGUF file. The largest published models hold a few thousand.
pub const GGUF_TENSORS_MAX: usize = 1 << 16;
/// Longest key or tensor name of a GGUF file: the format's own bound.
pub const GGUF_NAME_MAX: usize = 65535;
/// Most ids of a vocabulary. The largest published ones have 300 thousand.
pub const TOKENIZER_VOCAB_MAX: usize = 1 << 24;
/// Longest token of a SentencePiece vocabulary, in letters. Gemma's longest has 31. All divisions
/// of each token into two are looked up.
pub const TOKENIZER_PIECE_CHARS_MAX: usize = 256;
/// Most pairs of tokens of a SentencePiece vocabulary that form a token. Gemma has 515 thousand. A
/// pair takes about 200 bytes during the load.
pub const TOKENIZER_MERGES_MAX: usize = 1 << 21;

// config

/// Longest page in tokens. A request wastes half a page on average, and longer pages gain nothing.
/// A prefill worker keeps up to this many tokens before a window, because the destination's pages
/// can be this long.
pub const PAGE_SIZE_MAX: u32 = 256;
/// Most running requests of a worker. Slots, aux records and batch arrays are allocated for all of
/// them.
pub const RUNNING_REQUESTS_MAX: u32 = 4096;
/// Most waiting requests of a worker. Each holds the ids of its body.
pub const QUEUED_REQUESTS_MAX: u32 = 65_536;
/// Most clients that wait for prefix caches to be flushed. One flush serves all of them.
pub const FLUSHES_MAX: usize = 16;
/// How long a client waits for a flush. An engine takes commands between layers, so an engine that
/// needs longer hangs.
pub const FLUSH_TIME: Duration = Duration::from_secs(10);
/// Prompts that one turn looks up in the prefix cache before admission. A lookup of a long prompt
/// takes some microseconds. Prompts behind them in the queue wait for pages as if nothing were
/// cached.
pub const PREFIX_LOOKUPS_PER_TURN: u32 = 16;
/// Fewest tokens that a checkpoint of recurrent state spares a later prompt. It costs a step of its
/// own, which takes as long as some tokens of a prompt.
pub const CHECKPOINT_TOKENS: u32 = 64;
/// Without `--state-memory`, checkpoints take one part of so many of the KV memory.
pub const STATE_MEMORY_SHARE: u64 = 4;
/// Page keys of the last prompts that a worker with checkpoints remembers, to see where prompts
/// part: a quarter of a million tokens with pages of 16. They take 1 MB.
pub const SEEN_KEYS: u32 = 1 << 14;
/// Most workers of one role in one process. They share its cores, so more workers only divide the
/// memory.
pub const WORKERS_MAX: u32 = 16;
/// Most threads of a team: more than any present machine runs.
pub const THREADS_MAX: u32 = 1024;
/// Longest context in tokens that can be configured: longer than that of any present model.
pub const CONTEXT_MAX: u32 = 1 << 24;
/// Longest chunk of a prompt in ms. A longer chunk stalls the streams of its worker.
pub const CHUNK_MS_MAX: u32 = 60_000;
/// Least KV memory of a worker in bytes. Less does not hold even a few pages of a toy model.
pub const KV_MEMORY_MIN: u64 = 1 << 20;
/// Most KV memory of a worker in bytes: more than any present machine has. It keeps sums from
/// overflow.
pub const KV_MEMORY_MAX: u64 = 1 << 46;
/// Most requests of one simulated run. Their times and lengths are kept in memory.
pub const LOAD_REQUESTS_MAX: usize = 4 << 20;
/// Most workers of one role behind a router.
pub const ROUTER_WORKERS_MAX: usize = 1024;
/// Most prompt blocks that a router remembers over all workers of a role, about 100 bytes each.
pub const ROUTER_PREFIX_BLOCKS_MAX: usize = 1 << 18;
/// Bytes of prompt text that a router compares at once: some pages.
pub const PROMPT_BLOCK_BYTES: usize = 256;
/// Most prompt blocks that a router compares: 1 MiB of text. Prefixes rarely differ beyond that.
pub const PROMPT_BLOCKS_MAX: usize = 4096;
/// Approximate bytes of text per token in most languages and vocabularies.
pub const BYTES_PER_TOKEN: usize = 4;

// server
/// Longest answer of a translated endpoint: many times the text of a long context. It goes into one
/// event or body.
pub const TRANSLATED_ANSWER_MAX: usize = 12 << 20;
const _: () = assert!(TRANSLATED_ANSWER_MAX < NET_QUEUED_MAX);
/// Entries of the metadata of a request that its answer repeats, as OpenAI bounds them,
pub const METADATA_ENTRIES_MAX: usize = 16;
/// and bytes of each.
pub const METADATA_BYTES_MAX: usize = 512;
/// Longest repetition of a request's fields in its answer, which a stream has three times.
pub const ECHO_BYTES_MAX: usize = 64 << 10;
/// How long a connection may be idle without a request. It is longer than the keep-alive of common
/// clients and proxies, so that they close first.
pub const HTTP_IDLE_MAX: Duration = Duration::from_secs(90);
/// Time from a request's first byte to its last. [`HTTP_BODY_BYTES_PER_SECOND`] extends it.
pub const HTTP_REQUEST_TIME_MAX: Duration = Duration::from_secs(60);
/// Bytes of a received body that extend [`HTTP_REQUEST_TIME_MAX`] by one second: a link of 1
/// Mbit/s.
pub const HTTP_BODY_BYTES_PER_SECOND: u64 = 128 << 10;
/// Time between two checks of certificate and key files. A change takes effect after two checks.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(2);
/// Time from a change of the cluster's keys at a router until all workers have read theirs. It
/// covers some checks and the time to copy the files to all hosts.
pub const KEYS_CHANGE_TIME: Duration = Duration::from_secs(30);
/// Client connections at a time. If there are more, the new connection is closed at once. A stream
/// uses one, and a router opens two more to workers for it.
pub const HTTP_CONNECTIONS_MAX: usize = 16 << 10;

const _: () = assert!(HTTP_CONNECTIONS_MAX * HTTP_BODY_USUAL <= HTTP_BODIES_MAX / 4);
const _: () = assert!(2 * (HTTP_BODY_MAX + HTTP_BODY_ADDED) <= HTTP_BODIES_MAX);
/// Time from a request's arrival to its last token. Common routers give up after the same time.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(1800);
/// Requests with prompts that wait for tokenisation.
pub const TOKENISE_QUEUE_MAX: usize = 1024;
/// Bytes of text, or ids, of a prompt that does not wait for longer ones: about 30 ms of work.
pub const TOKENISE_SHORT: usize = 64 << 10;
/// How long a drain waits for running requests. Each request ends at its own deadline before that.
/// A request that does not end is stuck.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(1830);
/// How long writes may take, once nothing runs, until they have completed and destinations have
/// confirmed them. A destination needs one turn for that. If a peer is silent for longer, its own
/// timeout closes the link.
pub const DRAIN_DONE_TIME: Duration = Duration::from_secs(5);
/// How long clients may take, once nothing runs, to read their answers.
pub const DRAIN_FLUSH_TIME: Duration = Duration::from_secs(60);
/// How long a draining process stays for peers that keep a connection to it, even if nothing runs.
/// Routers probe twice in that time.
pub const DRAIN_NOTICE_TIME: Duration = Duration::from_secs(5);

/// How long a role change waits for running requests. Default of `timeout_secs`. Most requests end
/// by then, and a longer pause would cost too much capacity.
pub const ROLE_CHANGE_TIME: Duration = Duration::from_secs(60);
/// The same for a role change by a router's rebalancing. Requests that a decode worker must finish
/// can wait for the same queue that caused the change.
pub const BALANCE_CHANGE_TIME: Duration = Duration::from_secs(600);
/// Longest wait that a role change can be given: as long as a drain.
pub const ROLE_CHANGE_TIME_MAX: Duration = DRAIN_TIME_MAX;

/// Bytes of an answer to `baton drain`. An error's message takes about 200.
pub const DRAIN_ANSWER_MAX: usize = 64 << 10;

const _: () = assert!(DRAIN_TIME_MAX.as_secs() > REQUEST_TIME_MAX.as_secs());

// Scheduler (`sched`).

/// Commands that an engine takes in one turn. A flood of them must not delay the next token of
/// streams.
pub const COMMANDS_PER_TURN: usize = 64;
/// How many later requests may pass a waiting request that does not fit or has a lower priority.
/// After that, no request passes it.
pub const PASSES_MAX: u32 = 32;
/// A prompt waits for the pass that computes its prefix if the shared part is large enough. The
/// threshold is the size of a pass divided by this number. Computing that part takes about as long
/// as the fixed cost of a pass (16.5 of 137 ms, in the fit under `benches/data`).
pub const SHARED_PART_OF_PASS: u32 = 8;
/// Tokens compared for shared prefixes in one turn: some milliseconds at most. Prompts behind them
/// begin at once.
pub const SHARED_TOKENS_PER_TURN: u32 = 1 << 20;
/// Tokens for which admission reserves pages ahead for a running request. The value is that of
/// SGLang's `--num-reserved-decode-tokens`. Most answers are shorter.
pub const RESERVED_TOKENS: u32 = 512;
/// Time between two log lines about retracted requests. If memory is scarce, retractions occur many
/// times a second.
pub const SHORTAGE_TOLD_EVERY: Duration = Duration::from_secs(1);
/// A copy of this many bytes measures the full copy rate. Smaller copies mostly measure the cost of
/// starting.
pub const PACE_COPIED_BYTES: f64 = 1024.0 * 1024.0;
/// Prompt tokens that measure the full rate of a forward pass.
pub const PACE_TOKENS: f64 = 64.0;
/// Tokens of a prefill chunk before the machine's speed is measured: a fraction of a second on the
/// slowest machine.
pub const UNMEASURED_CHUNK_TOKENS: u32 = 64;

// peer
/// Unix connections that pass descriptors, at a time. Each lives for milliseconds.
pub const PASSING_CONNECTIONS_MAX: usize = 64;
/// Time from the start of a control connection to its proof.
pub const PEER_PROOF_TIME_MAX: Duration = Duration::from_secs(1);
/// Connections without a verified proof at a time, counted separately for the control port and the
/// data port. If all workers of a large cluster connect at once, each sends its proof within
/// milliseconds. If there are more, the oldest is closed, so that strangers cannot block workers
/// with open connections.
pub const UNPROVEN_CONNECTIONS_MAX: usize = 64;
/// Time between two PINGs on a quiet link.
pub const PEER_PING_EVERY: Duration = Duration::from_millis(500);
/// How long a link may be silent before its peer counts as dead: four PINGs. Default of
/// `--peer-timeout`.
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(2);
/// Incoming control connections at a time: the decode workers of a large cluster.
pub const CONTROL_CONNECTIONS_MAX: usize = 1024;

// peer::bootstrap
/// Bytes of a registry's answer. A topology takes about 500.
pub const REGISTRY_ANSWER_MAX: usize = 64 << 10;
/// Bytes of a request to a registry. The registration of a rank takes about 500.
pub const REGISTRY_REQUEST_MAX: usize = 64 << 10;
/// Ranks of one prefill worker in its registry.
pub const REGISTRY_RANKS_MAX: usize = 4096;
/// Rooms for which the data-parallel rank is remembered: SGLang's value.
pub const REGISTRY_ROOMS_MAX: usize = 1 << 16;
/// How long such a room is remembered: SGLang's value.
pub const REGISTRY_ROOM_LIFE: Duration = Duration::from_secs(120);

// net::resolver
/// Host names with a lookup that runs or waits: those of prefill workers seen for the first time.
pub const NAMES_ASKED_MAX: usize = 64;
/// Host names looked up at once. Names with a silent name server block no more than these threads.
pub const NAME_THREADS: usize = 4;
/// Host names remembered. The body of a request can contain any name.
pub const NAMES_KNOWN_MAX: usize = 1024;
/// How long the addresses of a name are remembered: a common maximum TTL in the DNS of small
/// clusters.
pub const NAME_LIFE: Duration = Duration::from_secs(30);
/// How long a name lookup may take. Resolvers repeat a lost query after 5 s; the lookup ends
/// before.
pub const NAME_DEADLINE: Duration = Duration::from_secs(4);

// worker
/// How long an engine's progress counter may stay unchanged: many times the longest layer of a
/// forward pass.
pub const ENGINE_STILL_MAX: Duration = Duration::from_secs(10);
/// Longest time between two checks of the counter; there are ten a second. After a longer gap the
/// process, or its host, was paused.
pub const LOOK_GAP_MAX: Duration = Duration::from_secs(1);

// transfer::plan
/// Pieces of one tile in the plan of a session. A piece is a head's K or V of a token in a layer,
/// for one rank. A peer's layout decides how many pieces `ctl` must compute. The pieces take 16 MiB
/// while they are sorted, and at most twice as much afterwards. A model of 128 layers and 8 KV
/// heads in pages of 256 tokens has half as many.
pub const PLAN_PIECES_MAX: u64 = 1 << 20;

// transfer::transport
/// Lanes of a session. The status word has a bit for each.
pub const LANES_MAX: usize = 32;
/// Lanes kept until their session is open. A session has few lanes and opens within milliseconds.
pub const EARLY_LANES_MAX: usize = 64;

// routing, registry, router

/// Time between two health probes of a worker. A hung worker is detected, and its streams fail
/// over, within this time plus the time of two probes: 4 s.
pub const ROUTER_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a probe may take. A busy worker answers from `ctl` in milliseconds, and the kernel
/// retransmits a lost packet after 0.2 s.
pub const ROUTER_PROBE_TIME: Duration = Duration::from_millis(1500);
/// Failed probes in a row before a worker is down. One probe can get lost. The second is sent at
/// once.
pub const ROUTER_PROBE_FAILURES: u32 = 2;
/// How long a connection to a worker may take, including its TLS handshake. The kernel retransmits
/// a lost packet after 1 s.
pub const ROUTER_CONNECT_TIME: Duration = Duration::from_secs(3);
/// Pairs tried for one request while none of them accepts a connection. Workers that die together,
/// such as those of one rack, can be the first choices until their probes fail.
pub const ROUTER_PAIRS_MAX: u32 = 8;
/// Requests that may be retried at once after a fault: usually all streams of a worker that dies.
pub const RETRIES_AT_ONCE: u32 = 256;
/// Requests that may be retried each second beyond [`RETRIES_AT_ONCE`]. A cluster that fails every
/// request must not get much more load than its clients send.
pub const RETRIES_PER_SECOND: u32 = 100;
/// Longest wait before the first retry. The wait grows up to [`RETRY_DELAY_MAX`]. The first wait is
/// short because another worker is usually available. Later waits are longer than short outages of
/// all workers, such as a new dial of a link.
pub const RETRY_DELAY: Duration = Duration::from_millis(10);
/// See [`RETRY_DELAY`].
pub const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);
/// How long a failed request is retried, from its first failure. A restarted worker is ready by
/// then if its model is small.
pub const RETRY_TIME_MAX: Duration = Duration::from_secs(15);
/// Time from a request's deadline until the router ends the request itself. The worker ends it at
/// the deadline, and its answer has more detail.
pub const ROUTER_GRACE: Duration = Duration::from_secs(1);
/// How long a worker may take to end an aborted request before its connection is closed. A worker
/// that has received the abort needs milliseconds.
pub const ROUTER_ABORT_TIME: Duration = Duration::from_secs(1);
/// How long a prefill leg may run on after decode's complete answer. Prefill ends it after the
/// current step of its engine. An engine with a longer step counts as hung.
pub const ROUTER_PREFILL_END_TIME: Duration = ENGINE_STILL_MAX;
/// How long the router chooses a worker last after a failed request. A worker that fails requests
/// at once has the least load and would get all requests. The time equals the hold-off of an
/// unreachable prefill worker.
pub const ROUTER_SUSPECT_TIME: Duration = DIAL_HOLD_OFF;
/// Most failures to open a circuit, or successes to close it, that can be configured. Each one is
/// remembered for each worker.
pub const BREAKER_FAILURES_MAX: u32 = 1000;
/// Maximum seconds over which a circuit counts failures, or stays open: a day.
pub const BREAKER_SECONDS_MAX: u32 = 86_400;
/// Most health probes in a row that can be configured.
pub const HEALTH_PROBES_MAX: u32 = 1000;
/// Most seconds between probes, or for one probe, that can be configured.
pub const HEALTH_SECONDS_MAX: u32 = 86_400;
/// Longest wait before a retry that can be configured, in ms. A longer wait would exceed
/// [`RETRY_TIME_MAX`].
pub const RETRY_BACKOFF_MS_MAX: u32 = 60_000;
/// Connections at a time on a separate metrics port.
pub const SCRAPERS_MAX: usize = 64;
/// Retries of a request. Default of the flag.
pub const RETRIES_DEFAULT: u32 = 4;
/// How long an idle connection to a worker is kept. Common servers keep theirs for at least 5 s, so
/// no request meets a connection that is being closed.
pub const ROUTER_IDLE_TIME: Duration = Duration::from_secs(4);
/// Idle connections kept, to all workers together.
pub const ROUTER_IDLE_MAX: usize = 1024;
/// Bytes of a non-streamed answer of a worker that are collected before any is passed on. A short
/// answer then has a length, and the client gets an error instead of a truncated answer if the
/// worker is lost.
pub const ROUTER_ANSWER_MAX: usize = 1 << 20;
/// Bytes of a request body queued at once on a connection to a worker.
pub const ROUTER_PIECE: usize = 256 << 10;
/// Bytes that wait for a client before the router stops reading from its worker.
pub const ROUTER_CLIENT_QUEUED_MAX: usize = 128 << 10;
/// Time after the router has stopped reading from a worker for a slow client. If the worker closes
/// the connection in this time, the slow client counts as the cause.
pub const ROUTER_CATCH_UP_TIME: Duration = Duration::from_secs(2);
/// Pieces of answers in [`ROUTER_DENSE_TIME`] above which traffic is dense. That equals 320 streams
/// of 50 tokens a second, or 32 streams of a worker that computes nothing.
pub const ROUTER_DENSE_PIECES: usize = 16;
/// Time over which pieces are counted; see [`ROUTER_DENSE_PIECES`].
pub const ROUTER_DENSE_TIME: Duration = Duration::from_millis(1);
/// Requests from which on the router coalesces dense traffic.
pub const ROUTER_DENSE_STREAMS: usize = 16;
/// How long a router pauses after a turn in dense traffic, so that each stream collects more. The
/// decode step of a model that needs a router takes longer. Measured with 32 streams that never
/// pause: 300 µs relayed the most events, and 100 and 1,000 µs relayed a third fewer.
pub const ROUTER_REST_TIME: Duration = Duration::from_micros(300);
/// Requests from a decode worker to prefill workers at a time, in the decode-first flow. The number
/// equals the most running requests of a worker.
pub const PREFILL_ASKS_MAX: usize = 4096;
/// Bytes of one event of a prefill worker's answer, or of a non-streamed answer. It holds the place
/// of the KV, or a token with its alternatives.
pub const PREFILL_REPLY_MAX: usize = 64 << 10;
/// How long a prefill worker may take to announce where the KV of a request will be. It announces
/// that after tokenisation, which takes a second or two for a million tokens. If a worker has a
/// queue of such prompts, another worker is the better choice.
pub const PREFILL_SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long decode waits for prefill's own error message after the hand-off has reported a failure.
/// Both arrive at about the same time.
pub const PREFILL_REPLY_TIME: Duration = Duration::from_millis(250);
/// How long a request may continue at its decode worker after its prefill worker is lost. Decode
/// detects the loss within milliseconds, or it has all the KV and answers.
pub const ROUTER_LOST_PREFILL_TIME: Duration = Duration::from_secs(5);
/// Bytes of an error code in a worker's answer that is logged: one word.
pub const ERROR_CODE_MAX: usize = 64;
/// Bytes of a model name that a worker reports and `/workers` repeats: a path.
pub const MODEL_NAME_MAX: usize = 4096;
/// Time between two checks of worker load. Windows are seconds long.
pub const BALANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest prefill queue time that can be configured as a threshold. A request reaches its deadline
/// before it waits longer.
pub const BALANCE_MS_MAX: u32 = 600_000;
/// Longest window, and dwell time: a day.
pub const BALANCE_SECONDS_MAX: u32 = 86_400;
/// How long all workers together may take for a request that is sent to each of them.
pub const ROUTER_FANOUT_TIME: Duration = Duration::from_secs(10);

const _: () = assert!(DRAIN_NOTICE_TIME.as_secs() > 2 * ROUTER_PROBE_INTERVAL.as_secs());
/// How long a registry entry lives without renewal. Two renewals may be lost.
pub const REGISTRY_ENTRY_LIFE: Duration = Duration::from_secs(6);
/// Time between two renewals.
pub const REGISTRY_RENEWAL: Duration = Duration::from_secs(2);
/// Time from a failed renewal to the next one. A restarted registry thus soon knows its workers
/// again.
pub const REGISTRY_RETRY: Duration = Duration::from_millis(500);
/// How long a registry may take for one renewal: less than the time between two renewals.
pub const REGISTRY_ANSWER_TIME: Duration = Duration::from_millis(1500);
/// Bytes of a registry's answer, or of a line of etcd's watch: the maximum number of entries in
/// base 64.
pub const REGISTRY_TASK_ANSWER_MAX: usize = 4 << 20;
/// See [`REGISTRY_TASK_ANSWER_MAX`].
pub const ETCD_LINE_MAX: usize = REGISTRY_TASK_ANSWER_MAX;
/// Keys of etcd that are read at once. As many entries of 1 KiB take about a tenth of
/// [`REGISTRY_TASK_ANSWER_MAX`].
pub const ETCD_PAGE_MAX: usize = 256;
/// Keys under etcd's prefix that are not worker entries and get a log line each. So many lines
/// suffice to find the cause.
pub const ETCD_ODD_MAX: usize = 32;
/// How long a watch of etcd lasts before all keys are read again. A member that is cut off from the
/// others would show a state that no longer changes.
pub const REGISTRY_STREAM_LIFE: Duration = Duration::from_secs(10);
/// Routers, or members of an etcd, that one process can be given.
pub const REGISTRY_HOSTS_MAX: usize = 16;
/// Entries of a registry: as many workers of both roles as a router accepts.
pub const REGISTRY_ENTRIES_MAX: usize = 2 * ROUTER_WORKERS_MAX;
/// Departed workers for which a router remembers the successor. Fewer workers than that change
/// their roles in an hour.
pub const PAST_WORKERS_MAX: usize = 256;
/// How long a nonce is valid. A registration follows within milliseconds.
pub const REGISTRY_NONCE_LIFE: Duration = Duration::from_secs(10);
/// Used nonces that are still valid: one for each renewal of each entry within a nonce's life.
/// There is room for workers that come and go.
pub const REGISTRY_NONCES_USED_MAX: usize = 32 << 10;

const _: () = assert!(
    REGISTRY_NONCES_USED_MAX as u128
        >= REGISTRY_ENTRIES_MAX as u128 * REGISTRY_NONCE_LIFE.as_millis()
            / REGISTRY_RENEWAL.as_millis()
);

// Each client needs three connections: its own, and one for each of its two legs. Each worker needs
// one for probes.
const _: () = assert!(
    3 * HTTP_CONNECTIONS_MAX + 2 * ROUTER_WORKERS_MAX + ROUTER_IDLE_MAX + SCRAPERS_MAX
        <= NET_CONNECTIONS_MAX
);
