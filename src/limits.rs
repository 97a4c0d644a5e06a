//! Every bound on what comes from outside or waits inside, each with its reason. Modules own no
//! limits of their own.

use std::time::Duration;

/// Longest HTTP request head in bytes; the field's proxies send well under 16 KiB.
pub const HTTP_HEAD_MAX: usize = 64 << 10;
/// Most header lines of an HTTP message.
pub const HTTP_HEADERS_MAX: usize = 100;
/// Longest HTTP body unless a flag says otherwise: prompts of a million ids as JSON fit.
pub const HTTP_BODY_DEFAULT: usize = 32 << 20;
/// Longest HTTP body that a flag can allow: what SGLang's and vLLM's routers take by default.
pub const HTTP_BODY_MAX: usize = 256 << 20;
/// Bytes by which a body may be longer at a worker that takes part in hand-offs: what a router adds to one, which is
/// where the other leg is, for each of its prompts, and the ids of a stream that goes on elsewhere.
pub const HTTP_BODY_ADDED: usize = 1 << 20;
/// Bytes of the bodies of all requests that are not answered yet, so that many large ones cannot exhaust memory: a few of the
/// longest. A router has each twice while it sends it.
pub const HTTP_BODIES_MAX: usize = 1 << 30;
/// A body up to which one is taken whatever others hold: some thousand tokens; all clients together fill a quarter of the
/// above.
pub const HTTP_BODY_USUAL: usize = 16 << 10;

// transfer::manager
/// Destinations kept for requests that have not come: the router sends both legs at once, so few wait at
/// any moment; a flood of them must not eat the worker.
pub const EARLY_DESTINATIONS_MAX: usize = 1024;
/// How long one is kept: past a router's dispatch to a slow network, short beside a client's patience.
pub const EARLY_DESTINATION_LIFE: Duration = Duration::from_secs(30);
/// How long a prefill worker that was asked first keeps what it has computed for decode to claim: a router passes its answer
/// on at once, so what is older was given up.
pub const KEPT_KV_LIFE: Duration = Duration::from_secs(30);
/// Rooms that are over and still answered truly.
pub const TOMBSTONES_MAX: usize = 16_384;
/// From an Abort to its answer, before the session is reset: a source answers once what it has posted has
/// completed, for which a NIC may take the retries of a whole way.
pub const ABORT_ANSWER_MAX: Duration = Duration::from_secs(2);
/// How long: past every deadline of the other side.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(600);

/// From dialling a prefill worker to a session that stands, each step: a live worker answers in
/// milliseconds, one busy with a long layer within a second.
pub const SESSION_SETUP_DEADLINE: Duration = Duration::from_secs(5);
/// How long a prefill worker that could not be reached is not dialled again: its requests fail at once and
/// may be retried elsewhere.
pub const DIAL_HOLD_OFF: Duration = Duration::from_secs(1);
/// Sessions of RDMA that may break one after another with nothing handed over: one can be an accident.
pub const RDMA_BREAKS_MAX: u32 = 2;
/// How long that NIC, or RDMA to that peer, is then left out: each try costs its requests seconds of resending.
pub const RDMA_BARRED: Duration = Duration::from_secs(60);

// wire::zmtp

/// Bytes of a message: a Destination names a million pages with 4 bytes each.
pub const ZMTP_MESSAGE_MAX: usize = (4 << 20) + (64 << 10);
/// Parts of a message: an Announce has one for each process of a worker, and a few of its own.
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
/// Cluster keys that a worker takes at a time: the old and the new one of a rotation, and as many more. Hello has as
/// many places.
pub const CLUSTER_KEYS_MAX: usize = 4;

const _: () = assert!(PAGES_MAX * 4 + (1 << 10) <= ZMTP_MESSAGE_MAX);
const _: () = assert!(RANKS_MAX + 8 <= ZMTP_PARTS_MAX);

/// Least and most seconds of `--peer-timeout`: PINGs come four times as often, and nobody waits longer than a minute for
/// a dead peer.
pub const PEER_TIMEOUT_RANGE: [f64; 2] = [0.5, 60.0];
/// Seconds for which a prefill worker keeps a request that no decode worker asks for, unless `--bootstrap-timeout` says
/// otherwise: SGLang's figure. Decode asks once it has pages, which takes as long as its queue.
pub const BOOTSTRAP_TIMEOUT: u32 = 300;

// net

/// Connections of the process, dialled and accepted.
pub const NET_CONNECTIONS_MAX: usize = 52 << 10;
/// Listeners of the process: HTTP, registry, control, data and a few more.
pub const NET_LISTENERS_MAX: usize = 16;
/// Bytes received on a connection and not consumed; then reading pauses, and others have their
/// turn. An HTTP head fits whole.
pub const NET_RECEIVED_MAX: usize = 128 << 10;
/// Reads of a TLS connection in a turn, each of some records at most: a peer may send tickets or their like without an end, a byte
/// of data among them or none, and eight thousand of them take some 10 ms. Whole records fill the buffer in fewer.
pub const NET_TLS_READS_MAX: usize = 16;
/// Bytes waiting to be sent on a connection; beyond it the reader is too slow. Two of the largest
/// control messages, or the longest answer with logprobs, fit.
pub const NET_QUEUED_MAX: usize = 16 << 20;
/// Bytes waiting to be sent on all connections, so that many slow readers cannot exhaust memory.
pub const NET_QUEUED_TOTAL_MAX: usize = 256 << 20;
/// Bytes of a buffer kept when it is empty; most messages fit.
pub const NET_BUFFER_KEPT: usize = 16 << 10;
/// Buffers of that many bytes kept for connections that have none: more than fill and empty again in one turn.
pub const NET_BUFFERS_SPARE: usize = 64;
/// Connections accepted on one listener before others have their turn.
pub const NET_ACCEPT_TURN: usize = 64;
/// Readiness events taken from the kernel at once.
pub const NET_READY_MAX: usize = 1024;
/// How long the host at the other end of a connection that was dialled may answer nothing, not even by its
/// kernel, or take no byte of what waits for it. A busy or stopped process is no reason unless so much waits that
/// both kernels are full. More than a lost packet, a switch that starts anew or a
/// machine that is moved takes.
pub const NET_HOST_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time a closing connection has to take its last bytes and close its end.
pub const NET_LINGER: Duration = Duration::from_secs(5);
/// Time that the TLS handshake of one who was accepted has: two round trips, a lost packet, a slow client.
pub const NET_HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Such handshakes under way; of more, the oldest ends. A session holds tens of KiB by then.
pub const NET_HANDSHAKES_MAX: usize = 512;
/// Bytes that a TLS session seals ahead of its socket: one record.
pub const TLS_SEALED_MAX: usize = 16 << 10;
/// Bytes of a file of certificates or of a key: a long chain.
pub const TLS_FILE_MAX: usize = 1 << 20;
/// Wait before accepting again where the process is out of descriptors.
pub const NET_ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Descriptors passed at once, and held for a connection until taken: a pool, a ring, a doorbell
/// each way, and as many again.
pub const DESCRIPTORS_MAX: usize = 8;

const _: () = assert!(NET_RECEIVED_MAX > HTTP_HEAD_MAX);
const _: () = assert!(NET_QUEUED_MAX >= ZMTP_QUEUED_MAX);

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
/// Bytes of names that a client chooses: request ids, cache salts, host names.
pub const NAME_BYTES_MAX: usize = 512;

// model files
/// Most metadata entries of a GGUF file; published ones hold under a hundred.
pub const GGUF_METADATA_MAX: usize = 4096;
/// Most tensors of a GGUF file; the largest published models hold a few thousand.
pub const GGUF_TENSORS_MAX: usize = 1 << 16;
/// Longest key or tensor name of a GGUF file, the format's own bound.
pub const GGUF_NAME_MAX: usize = 65535;
/// Most ids of a vocabulary; the largest published ones have 300 thousand.
pub const TOKENIZER_VOCAB_MAX: usize = 1 << 24;
/// Longest head of a safetensors file, the format's own bound.
pub const SAFETENSORS_HEADER_MAX: usize = 100_000_000;
/// Longest JSON file of a model's directory but for its tokenizer; indices of large models reach
/// some megabytes.
pub const MODEL_JSON_MAX: usize = 64 << 20;

// config

/// Longest page in tokens: a request wastes half a page on average, and longer pages gain nothing.
pub const PAGE_SIZE_MAX: u32 = 256;
/// Most requests running in a worker; slots, aux records and batch arrays are allocated for all of them.
pub const RUNNING_REQUESTS_MAX: u32 = 4096;
/// Most requests waiting in a worker; each holds its body's ids.
pub const QUEUED_REQUESTS_MAX: u32 = 65_536;
/// Most clients that wait for prefix caches to be emptied; one is enough for all of them.
pub const FLUSHES_MAX: usize = 16;
/// How long one waits: an engine looks for commands between layers, so one that takes longer hangs.
pub const FLUSH_TIME: Duration = Duration::from_secs(10);
/// Prompts of one turn that are looked up in the prefix cache before they are admitted, each some microseconds for a
/// long one; those behind them in line wait for pages as if it had nothing of them.
pub const PREFIX_LOOKUPS_PER_TURN: u32 = 16;
/// Most workers of one role in one process; they share its cores, so more only cuts the memory up.
pub const WORKERS_MAX: u32 = 16;
/// Most threads of a team: beyond any machine of today.
pub const THREADS_MAX: u32 = 1024;
/// Longest context in tokens that may be asked for; beyond any model of today.
pub const CONTEXT_MAX: u32 = 1 << 24;
/// Longest chunk of a prompt in ms: a chunk that runs longer stalls its worker's streams.
pub const CHUNK_MS_MAX: u32 = 60_000;
/// Least KV memory of a worker in bytes: less holds not even a few pages of a toy model.
pub const KV_MEMORY_MIN: u64 = 1 << 20;
/// Most KV memory of a worker in bytes: beyond any machine of today; guards sums against overflow.
pub const KV_MEMORY_MAX: u64 = 1 << 46;
/// Most bytes of a cluster key; a longer file is something else.
pub const CLUSTER_KEY_MAX: usize = 4096;
/// Most bytes of a file of API keys.
pub const API_KEYS_FILE_MAX: usize = 1 << 20;
/// Most requests of one simulated run: their times and lengths are kept.
pub const LOAD_REQUESTS_MAX: usize = 4 << 20;
/// Most workers of one role behind a router.
pub const ROUTER_WORKERS_MAX: usize = 1024;
/// Most blocks of prompts that a router keeps in mind over all workers of a role: some 100 bytes each.
pub const ROUTER_PREFIX_BLOCKS_MAX: usize = 1 << 18;
/// Bytes of a prompt's text that a router compares at once: some pages.
pub const PROMPT_BLOCK_BYTES: usize = 256;
/// Most of these that it compares: 1 MiB of text, beyond which beginnings that differ are rare.
pub const PROMPT_BLOCKS_MAX: usize = 4096;
/// Bytes of text to a token, about, in most languages and vocabularies.
pub const BYTES_PER_TOKEN: usize = 4;

// front
/// How long a connection may stand without a request: longer than the keep-alive of common clients and
/// proxies, so that they close first.
pub const HTTP_IDLE_MAX: Duration = Duration::from_secs(90);
/// From a request's first byte to its last, and
pub const HTTP_REQUEST_TIME_MAX: Duration = Duration::from_secs(60);
/// as much longer as a link of 1 Mbit/s takes for what has come of its body.
pub const HTTP_BODY_BYTES_PER_SECOND: u64 = 128 << 10;
/// Between two looks at files of certificates and keys: a change is used after two of them.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(2);
/// From a change of the cluster's keys at a router until all workers will have read theirs: some looks, and time for who
/// copies the files from host to host.
pub const KEYS_CHANGE_TIME: Duration = Duration::from_secs(30);
/// Client connections at a time; beyond it new ones are closed at once. A stream is one, and a router costs it two more
/// to workers.
pub const HTTP_CONNECTIONS_MAX: usize = 16 << 10;

const _: () = assert!(HTTP_CONNECTIONS_MAX * HTTP_BODY_USUAL <= HTTP_BODIES_MAX / 4);
const _: () = assert!(2 * (HTTP_BODY_MAX + HTTP_BODY_ADDED) <= HTTP_BODIES_MAX);
/// From a request's arrival to its last token: the field's routers give up after as long.
pub const REQUEST_TIME_MAX: Duration = Duration::from_secs(1800);
/// Requests whose prompts wait to be tokenised.
pub const TOKENISE_QUEUE_MAX: usize = 1024;
/// Bytes of text, or ids, of a prompt that is tokenised before longer ones: some 30 ms, and as much as most ever send.
pub const TOKENISE_SHORT: usize = 64 << 10;
/// How long a drain waits for requests that run: each has a deadline of its own, and ends before that; what does not
/// is stuck.
pub const DRAIN_TIME_MAX: Duration = Duration::from_secs(1830);
/// How long destinations may take, once nothing runs, to say that they have seen what was written to them: a turn of theirs; one
/// that is silent for longer loses its link by that.
pub const DRAIN_DONE_TIME: Duration = Duration::from_secs(5);
/// How long clients may take, once nothing runs, to read what they were answered.
pub const DRAIN_FLUSH_TIME: Duration = Duration::from_secs(60);
/// How long a process that drains is there for those who keep a connection to it, also when nothing runs: routers
/// look twice in that time.
pub const DRAIN_NOTICE_TIME: Duration = Duration::from_secs(5);

/// How long a change of role waits for requests that run, unless it is told otherwise: most have ended by then, and a
/// worker that took nothing for longer would be missed.
pub const ROLE_CHANGE_TIME: Duration = Duration::from_secs(60);
/// The same where a router's balance asks: what a decode worker is to finish may wait for the very queue that calls for the
/// change.
pub const BALANCE_CHANGE_TIME: Duration = Duration::from_secs(600);
/// How long it may be told to wait: as a drain.
pub const ROLE_CHANGE_TIME_MAX: Duration = DRAIN_TIME_MAX;

/// Bytes of an answer to `baton drain`; an error's message takes some 200.
pub const DRAIN_ANSWER_MAX: usize = 64 << 10;

const _: () = assert!(DRAIN_TIME_MAX.as_secs() > REQUEST_TIME_MAX.as_secs());

// Scheduler (`sched`).

/// Commands an engine takes in one turn: a flood of them must not keep streams from their next token.
pub const COMMANDS_PER_TURN: usize = 64;
/// How often a request that does not fit may be passed by later ones that do; then nobody passes it.
pub const PASSES_MAX: u32 = 32;
/// A prompt waits for the pass that reads what it begins with, where that is so large a part of a pass (one in so many) or
/// more: about what a pass takes by itself, whatever it reads (16.5 of 137 ms, in the fit under `benches/data`).
pub const SHARED_PART_OF_PASS: u32 = 8;
/// Tokens that are compared for it in one turn, some milliseconds at most; who comes behind them begins at once.
pub const SHARED_TOKENS_PER_TURN: u32 = 1 << 20;
/// Tokens ahead of what it has that a running request is promised pages for: as many as SGLang's
/// `--num-reserved-decode-tokens`, longer than most answers.
pub const RESERVED_TOKENS: u32 = 512;
/// Between two lines of the log that say that requests gave up their pages: where memory is scarce they do so many times a
/// second.
pub const SHORTAGE_TOLD_EVERY: Duration = Duration::from_secs(1);
/// A copy of so many bytes tells the whole pace of copies; of smaller ones much is the cost of beginning.
pub const PACE_COPIED_BYTES: f64 = 1024.0 * 1024.0;
/// Prompt tokens that tell the whole pace of a forward pass.
pub const PACE_TOKENS: f64 = 64.0;
/// Tokens of a prefill chunk before the machine's speed has been measured: a fraction of a second on
/// the slowest machine.
pub const UNMEASURED_CHUNK_TOKENS: u32 = 64;
/// Sessions of one worker with peers: prefill workers of a large cluster, each announced once.
pub const SESSIONS_MAX: usize = 256;
/// Most layers of a model with dummy weights; the deepest published ones have under two hundred.
pub const DUMMY_LAYERS_MAX: usize = 1024;
/// Elements of its largest tensor, which is held in memory; embeddings of the largest published models
/// have two thousand million.
pub const DUMMY_ELEMENTS_MAX: usize = 1 << 32;
/// Unix connections that pass descriptors, at a time; each lives for milliseconds.
pub const PASSING_CONNECTIONS_MAX: usize = 64;
/// From a control connection's first byte to its proof.
pub const PEER_PROOF_TIME_MAX: Duration = Duration::from_secs(1);
/// Connections at a time, of the control and of the data port each, that have proven nothing: the workers of a large
/// cluster that all come at once do so within milliseconds. One more, and the oldest goes, so that strangers who
/// keep theirs open keep nobody out.
pub const UNPROVEN_CONNECTIONS_MAX: usize = 64;
/// How often a quiet link is asked for a sign of life.
pub const PEER_PING_EVERY: Duration = Duration::from_millis(500);
/// How long a link may be silent before its peer counts as dead, unless `--peer-timeout` says otherwise: four PINGs.
pub const PEER_SILENCE_MAX: Duration = Duration::from_secs(2);
/// Control connections accepted at a time: decode workers of a large cluster.
pub const CONTROL_CONNECTIONS_MAX: usize = 1024;
/// Names of hosts being looked up or waiting for it: prefill workers that were never met before.
pub const NAMES_ASKED_MAX: usize = 64;
/// Names of hosts looked up at once: those whose name server is silent hold up no more than this many.
pub const NAME_THREADS: usize = 4;
/// Names of hosts remembered; a request's body may name any.
pub const NAMES_KNOWN_MAX: usize = 1024;
/// How long a name's addresses are remembered: what name servers let small clusters be cached for at most.
pub const NAME_LIFE: Duration = Duration::from_secs(30);
/// How long a name may take: a lost question, which resolvers repeat after 5 s, is not waited for.
pub const NAME_DEADLINE: Duration = Duration::from_secs(4);
/// Bytes of a registry's answer; a topology takes some 500.
pub const REGISTRY_ANSWER_MAX: usize = 64 << 10;
/// Bytes of a request to a registry: a rank's registration takes some 500.
pub const REGISTRY_REQUEST_MAX: usize = 64 << 10;
/// Ranks of one prefill worker in its registry.
pub const REGISTRY_RANKS_MAX: usize = 4096;
/// Rooms whose data-parallel rank is remembered, and for how long: SGLang's figure.
pub const REGISTRY_ROOMS_MAX: usize = 1 << 16;
/// See [`REGISTRY_ROOMS_MAX`].
pub const REGISTRY_ROOM_LIFE: Duration = Duration::from_secs(120);
/// How long an engine's progress counter may stand still: many times the longest layer of a forward pass.
pub const ENGINE_STILL_MAX: Duration = Duration::from_secs(10);
/// Between two looks at it, which are ten in a second: more, and the process, or its host, was paused.
pub const LOOK_GAP_MAX: Duration = Duration::from_secs(1);

// transfer::plan
/// Pieces of a tile (a head's K or V of a token in a layer, for one rank), of which a session's plan is made: what a
/// peer's layout can ask of `ctl`, 16 MiB while they are sorted and at worst twice as much kept. A model of 128 layers
/// and 8 KV heads in pages of 256 tokens has half as many.
pub const PLAN_PIECES_MAX: u64 = 1 << 20;

// transfer::transport
/// Lanes of a session: the status word has a bit for each.
pub const LANES_MAX: usize = 32;
/// Lanes kept until their session is open; a session has few, and opens within milliseconds.
pub const EARLY_LANES_MAX: usize = 64;

// cluster, front::router

/// Between two probes of a worker's health: one that stands still is noticed, and its streams go on elsewhere, within
/// this and two probes, 4 s.
pub const ROUTER_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// How long a probe may take: a busy worker answers from `ctl` in milliseconds, and the kernel repeats a lost packet
/// after 0.2 s.
pub const ROUTER_PROBE_TIME: Duration = Duration::from_millis(1500);
/// Probes in a row that fail before a worker is down: one may be lost. The second comes at once.
pub const ROUTER_PROBE_FAILURES: u32 = 2;
/// How long a connection to a worker may take, with a TLS handshake over it: the kernel repeats a lost packet after 1 s.
pub const ROUTER_CONNECT_TIME: Duration = Duration::from_secs(3);
/// Pairs tried for one request while none of them takes a connection.
pub const ROUTER_PAIRS_MAX: u32 = 4;
/// Requests that may be sent again at once after a fault: all streams of a worker that dies, as a rule.
pub const RETRIES_AT_ONCE: u32 = 256;
/// Requests that may be sent again each second beyond that: a cluster that fails them all is not asked much more often
/// than its clients ask.
pub const RETRIES_PER_SECOND: u32 = 100;
/// Longest wait before a request's second try, and what it grows to. The first is short, since another worker is there as
/// a rule; the later ones outlast what keeps all of them away for a moment: a link that is dialled anew.
pub const RETRY_DELAY: Duration = Duration::from_millis(10);
/// See [`RETRY_DELAY`].
pub const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);
/// How long a request that failed is tried again, from its first failure: a worker that is started anew is there by then,
/// and its model loaded if it is a small one.
pub const RETRY_TIME_MAX: Duration = Duration::from_secs(15);
/// How much later than a worker the router ends a request whose client's time is up: the worker's answer says more.
pub const ROUTER_GRACE: Duration = Duration::from_secs(1);
/// How long a worker has to end a request that it is told to abort, before its connection is closed: it does so in
/// milliseconds once it has heard.
pub const ROUTER_ABORT_TIME: Duration = Duration::from_secs(1);
/// How long a worker at which a request failed is asked last: what fails at once has always least to do, and would draw
/// all requests to itself. As long as a prefill worker that could not be reached is not dialled again.
pub const ROUTER_SUSPECT_TIME: Duration = DIAL_HOLD_OFF;
/// Most failures that a circuit may take to open, or answers to close: each is remembered, for each worker.
pub const BREAKER_FAILURES_MAX: u32 = 1000;
/// Seconds that a circuit may count failures over, or stay open: a day.
pub const BREAKER_SECONDS_MAX: u32 = 86_400;
/// Looks at a worker's health in a row, and seconds between them or for one, that may be asked for.
pub const HEALTH_PROBES_MAX: u32 = 1000;
/// See [`HEALTH_PROBES_MAX`].
pub const HEALTH_SECONDS_MAX: u32 = 86_400;
/// Longest wait before a try that may be asked for, in ms: longer ones would outlast [`RETRY_TIME_MAX`] in any case.
pub const RETRY_BACKOFF_MS_MAX: u32 = 60_000;
/// Connections at a time of those who read metrics on a port of their own.
pub const SCRAPERS_MAX: usize = 64;
/// Further tries of a request unless a flag says otherwise.
pub const RETRIES_DEFAULT: u32 = 4;
/// How long a connection to a worker is kept without a request: less than the least keep-alive of common
/// servers (5 s), so that no request meets a connection that is being closed.
pub const ROUTER_IDLE_TIME: Duration = Duration::from_secs(4);
/// Connections kept without a request, to all workers together.
pub const ROUTER_IDLE_MAX: usize = 1024;
/// Bytes of a worker's answer that are gathered before any is passed on, unless it is a stream: whole
/// answers have a length, and a worker lost on the way is an error instead of a torso.
pub const ROUTER_ANSWER_MAX: usize = 1 << 20;
/// Bytes of a request's body queued at once on a connection to a worker.
pub const ROUTER_PIECE: usize = 256 << 10;
/// Bytes that wait for a client before its worker is no longer read from.
pub const ROUTER_CLIENT_QUEUED_MAX: usize = 128 << 10;
/// Since that was so last, until what had come meanwhile has been read: a worker that ends within it may have given its
/// slow reader up.
pub const ROUTER_CATCH_UP_TIME: Duration = Duration::from_secs(2);
/// As many pieces of answers
pub const ROUTER_DENSE_PIECES: usize = 16;
/// in this time
pub const ROUTER_DENSE_TIME: Duration = Duration::from_millis(1);
/// for as many requests are so dense (320 streams of 50 tokens a second, or 32 of a worker that computes nothing)
pub const ROUTER_DENSE_STREAMS: usize = 16;
/// that a router rests so long behind a turn, for more of each to come: less than a step of any model that is worth a
/// router. With 32 streams that never pause 300 us had the most events pass, 100 and 1,000 us a third fewer.
pub const ROUTER_REST_TIME: Duration = Duration::from_micros(300);
/// Requests of a decode worker to prefill workers at once, where a router leaves them to it: as many as a worker runs at most.
pub const PREFILL_ASKS_MAX: usize = 4096;
/// Bytes of one event of their answers, or of an answer that is none: where KV is, or a token with its alternatives.
pub const ASKED_ANSWER_MAX: usize = 64 << 10;
/// How long a prefill worker that is asked may take nothing in before it has said where the KV will be: it says so once the
/// prompt is tokenised, which takes a second or two of a million tokens; one with a line of such before it is better left alone.
pub const ASKED_SILENCE_MAX: Duration = Duration::from_secs(10);
/// How long prefill's own word on a failure is waited for, once the hand-off has told of it: both come at about the same time.
pub const ASKED_WORD_TIME: Duration = Duration::from_millis(250);
/// How long decode may still decide about a request whose prefill worker was lost: it learns of the loss
/// by itself within milliseconds, or has everything and answers.
pub const ROUTER_LOST_PREFILL_TIME: Duration = Duration::from_secs(5);
/// Bytes of an error code in a worker's answer that is logged: a word.
pub const ERROR_CODE_MAX: usize = 64;
/// Bytes of a model's name that a worker tells and `/workers` repeats: a path.
pub const MODEL_NAME_MAX: usize = 4096;
/// Between two looks at how hard workers are pressed: windows are seconds.
pub const BALANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Longest time that may be asked for as what prefill workers may be behind: longer is never, as requests end before.
pub const BALANCE_MS_MAX: u32 = 600_000;
/// Longest window, and dwell time: a day.
pub const BALANCE_SECONDS_MAX: u32 = 86_400;
/// How long all workers together may take for what is asked of each of them.
pub const ROUTER_FANOUT_TIME: Duration = Duration::from_secs(10);

const _: () = assert!(DRAIN_NOTICE_TIME.as_secs() > 2 * ROUTER_PROBE_INTERVAL.as_secs());
/// How long an entry in a registry lasts without being renewed: two renewals may be lost.
pub const REGISTRY_ENTRY_LIFE: Duration = Duration::from_secs(6);
/// Between two renewals.
pub const REGISTRY_RENEWAL: Duration = Duration::from_secs(2);
/// After one that failed: a registry that has started anew soon knows its workers again.
pub const REGISTRY_RETRY: Duration = Duration::from_millis(500);
/// How long a registry may take for one renewal: less than between two of them.
pub const REGISTRY_ANSWER_TIME: Duration = Duration::from_millis(1500);
/// Bytes of a registry's answer, or of a line of etcd's watch: all entries that there may be, in base 64.
pub const ERRAND_ANSWER_MAX: usize = 4 << 20;
/// See [`ERRAND_ANSWER_MAX`].
pub const ETCD_LINE_MAX: usize = ERRAND_ANSWER_MAX;
/// Keys of etcd that are read at once: as many entries of a kibibyte are a tenth of [`ERRAND_ANSWER_MAX`].
pub const ETCD_PAGE_MAX: usize = 256;
/// Keys under etcd's prefix that are no worker's entries and are named in the log one by one: who looks for them knows
/// by then.
pub const ETCD_ODD_MAX: usize = 32;
/// How long a watch of etcd stands before everything is read anew: a member that is cut off from the others goes on
/// watching what no longer changes.
pub const REGISTRY_STREAM_LIFE: Duration = Duration::from_secs(10);
/// Routers, or members of an etcd, that one process is told of.
pub const REGISTRY_HOSTS_MAX: usize = 16;
/// Entries of a registry: as many workers of both roles as a router takes.
pub const REGISTRY_ENTRIES_MAX: usize = 2 * ROUTER_WORKERS_MAX;
/// Workers that have left of which a router knows what has become of them: as many as may change their roles in an hour, and
/// more.
pub const PAST_WORKERS_MAX: usize = 256;
/// How long a nonce may be used: a registration follows within milliseconds.
pub const REGISTRY_NONCE_LIFE: Duration = Duration::from_secs(10);
/// Nonces that were used and could be used again: renewals of all entries within their life, with room for workers
/// that come and go.
pub const REGISTRY_NONCES_USED_MAX: usize = 32 << 10;

const _: () = assert!(
    REGISTRY_NONCES_USED_MAX as u128
        >= REGISTRY_ENTRIES_MAX as u128 * REGISTRY_NONCE_LIFE.as_millis()
            / REGISTRY_RENEWAL.as_millis()
);

// A client, its two legs, and a probe of every worker.
const _: () = assert!(
    3 * HTTP_CONNECTIONS_MAX + 2 * ROUTER_WORKERS_MAX + ROUTER_IDLE_MAX + SCRAPERS_MAX
        <= NET_CONNECTIONS_MAX
);
