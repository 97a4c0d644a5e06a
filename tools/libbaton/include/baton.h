/*
 * Baton's transfer engine: hands the KV cache of prompts from one process to another, over shared
 * memory, RDMA or TCP. `header` makes this file from src/abi.
 *
 * A call returns 0 or a count, or a negative baton_error. No call ends the process or unwinds. No
 * call waits for a peer, except baton_wait and the second at most of baton_agent_free. Calls that
 * copy or register memory, or that wait for a copy or a log callback, can take seconds. Any thread
 * can call.
 *
 * A request has one outcome, BATON_EVENT_KIND_LANDED or BATON_EVENT_KIND_FAILED, and then one
 * BATON_EVENT_KIND_ENDED. The outcome says whether the KV can be used. The end says that the pages
 * can be reused. Do not reuse pages before it.
 */

#ifndef BATON_H
#define BATON_H

#include <stddef.h>
#include <stdint.h>

/**
 * Version of this interface. A program refuses a library of another version.
 */
#define BATON_ABI 1

/**
 * Bytes that a source can send with the last tokens of a prompt.
 */
#define BATON_PAYLOAD_BYTES 188

/**
 * Bytes of the digest of everything that must be equal at both ends.
 */
#define BATON_KIND_BYTES 32

/**
 * Element type: IEEE single, 4 bytes.
 */
#define BATON_ELEMENT_F32 1

/**
 * Element type: IEEE half, 2 bytes.
 */
#define BATON_ELEMENT_F16 2

/**
 * Element type: bfloat16, 2 bytes.
 */
#define BATON_ELEMENT_BF16 3

/**
 * Why a call had no effect. Each call returns 0, or a count, or one of these numbers.
 */
enum baton_error
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * An argument is a null pointer, has a wrong size, or is out of range.
   */
  BATON_ERROR_ARGUMENT = -1,
  /**
   * There is no such agent or region, or it was freed.
   */
  BATON_ERROR_HANDLE = -2,
  /**
   * There is no such request, or it was released.
   */
  BATON_ERROR_REQUEST = -3,
  /**
   * The call is not for the role of this agent.
   */
  BATON_ERROR_ROLE = -4,
  /**
   * All slots of the agent, or all handles, are in use.
   */
  BATON_ERROR_FULL = -5,
  /**
   * A number of tokens is zero, beyond the prompt, or less than before.
   */
  BATON_ERROR_TOKENS = -6,
  /**
   * The pages do not fit the tokens, or one is not in the pool.
   */
  BATON_ERROR_PAGES = -7,
  /**
   * The call was made before for this request.
   */
  BATON_ERROR_REPEATED = -8,
  /**
   * The request has not ended.
   */
  BATON_ERROR_OPEN = -9,
  /**
   * The agent has ended. No event comes any more.
   */
  BATON_ERROR_DEAD = -10,
  /**
   * This process is a fork of one that has called the library.
   */
  BATON_ERROR_FORKED = -11,
  /**
   * A port, a thread, memory or a NIC cannot be had. `baton_last_error` has the reason.
   */
  BATON_ERROR_SYSTEM = -12,
  /**
   * An internal error. The call can have had a part of its effect.
   */
  BATON_ERROR_PANIC = -13,
  /**
   * An agent uses the region.
   */
  BATON_ERROR_BUSY = -14,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum baton_error baton_error;
#else
typedef int32_t baton_error;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What an agent does.
 */
enum baton_role
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * It has computed KV and hands it over: prefill.
   */
  BATON_ROLE_SOURCE = 1,
  /**
   * It receives KV: decode.
   */
  BATON_ROLE_DESTINATION = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum baton_role baton_role;
#else
typedef uint32_t baton_role;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What has happened to a request. There is one outcome, `Landed` or `Failed`, and then one
 * `Ended`.
 */
enum baton_event_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * The other end is known. It comes before the outcome, or not at all.
   */
  BATON_EVENT_KIND_MET = 1,
  /**
   * Outcome: the KV is handed over.
   */
  BATON_EVENT_KIND_LANDED = 2,
  /**
   * Outcome: the KV is not handed over. `cause` is the reason.
   */
  BATON_EVENT_KIND_FAILED = 3,
  /**
   * No transfer reads or writes the pages any more: they can be used for something else.
   */
  BATON_EVENT_KIND_ENDED = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum baton_event_kind baton_event_kind;
#else
typedef uint32_t baton_event_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Level of a log line.
 */
enum baton_log_level
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  /**
   * A failure that should not happen.
   */
  BATON_LOG_LEVEL_ERROR = 0,
  /**
   * A problem that the library can tolerate.
   */
  BATON_LOG_LEVEL_WARN = 1,
  /**
   * Normal events of interest to an operator.
   */
  BATON_LOG_LEVEL_INFO = 2,
  /**
   * More detail.
   */
  BATON_LOG_LEVEL_DEBUG = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum baton_log_level baton_log_level;
#else
typedef uint32_t baton_log_level;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Gets the lines of `baton_log`. `line` is valid during the call.
 */
typedef void (*baton_log_callback)(uint32_t level, const char *line, void *data);

/**
 * Where the KV of a token is: byte strides from one thing to the next. The elements of a head are
 * contiguous. A token's head in a layer is at
 * `rank * rank_stride + page * page_stride + layer * layer_stride + (0 or kv_stride) +
 * head * head_stride + token * token_stride`, in bytes from the base of the region.
 */
typedef struct {
  /**
   * Pages (blocks) of the pool.
   */
  uint32_t pages;
  /**
   * Tokens of a page.
   */
  uint32_t page_size;
  /**
   * Layers of the model.
   */
  uint32_t layers;
  /**
   * KV heads of each rank.
   */
  uint32_t kv_heads;
  /**
   * Elements of one head.
   */
  uint32_t head_dim;
  /**
   * Element type: `BATON_ELEMENT_F32`, `BATON_ELEMENT_F16`, or `BATON_ELEMENT_BF16`.
   */
  uint32_t element;
  /**
   * Tensor-parallel ranks in this memory; 0 means 1.
   */
  uint32_t ranks;
  /**
   * KV heads of the model; 0 means `kv_heads`.
   */
  uint32_t model_kv_heads;
  /**
   * Bytes from a page to the next.
   */
  uint64_t page_stride;
  /**
   * Bytes from a layer to the next.
   */
  uint64_t layer_stride;
  /**
   * Bytes from keys to values.
   */
  uint64_t kv_stride;
  /**
   * Bytes from a KV head to the next.
   */
  uint64_t head_stride;
  /**
   * Bytes from a token to the next.
   */
  uint64_t token_stride;
  /**
   * Bytes from a rank to the next.
   */
  uint64_t rank_stride;
} baton_layout;

/**
 * Settings of an agent. Set all bytes to zero first, then `size`: a number that is 0 and a pointer
 * that is null mean the default.
 */
typedef struct {
  /**
   * `sizeof(baton_config)`.
   */
  uint32_t size;
  /**
   * `BATON_ROLE_SOURCE` or `BATON_ROLE_DESTINATION`.
   */
  uint32_t role;
  /**
   * The memory of the KV.
   */
  uint64_t region;
  /**
   * Its layout.
   */
  baton_layout layout;
  /**
   * Digest of everything that decides what the KV means: model, weights, kernels. It must be
   * equal at both ends.
   */
  uint8_t kind[BATON_KIND_BYTES];
  /**
   * Address where peers connect. Default: 127.0.0.1. A source names the address of one
   * interface, not 0.0.0.0, because its destinations get this address.
   */
  const char *host;
  /**
   * Networks of the sources that a destination connects to, in CIDR form, separated by commas.
   * Default: this host.
   */
  const char *allow;
  /**
   * Transports in order of preference, separated by commas: shm, rdma, tcp. Default: shm, tcp.
   */
  const char *transports;
  /**
   * Names of RDMA devices, separated by commas. Default: all that can be used.
   */
  const char *devices;
  /**
   * The cluster key: at least 32 random bytes, as in the file of `--cluster-key-file`. Without a
   * key, `host` and `allow` are loopback addresses.
   */
  const uint8_t *key;
  /**
   * Bytes of the key.
   */
  size_t key_bytes;
  /**
   * Numbers of the CPUs of the library's threads. Default: all CPUs of the process's cpuset,
   * also those that `taskset` or `numactl` has taken away.
   */
  const uint32_t *cpus;
  /**
   * How many they are.
   */
  size_t cpus_len;
  /**
   * Requests at a time. Default: 64.
   */
  uint32_t slots;
  /**
   * Pages of the longest prompt. Default: all pages of the pool.
   */
  uint32_t prompt_pages;
  /**
   * Peers at a time. Default: 16.
   */
  uint32_t sessions;
  /**
   * Streams of a tcp session, and queue pairs between two NICs. Default: 2.
   */
  uint32_t lanes;
  /**
   * Threads that copy over shm, at a destination. The thread `move-0` is one of them. Default:
   * 1.
   */
  uint32_t copy_threads;
} baton_config;

/**
 * An event of a request.
 */
typedef struct {
  /**
   * The request.
   */
  uint64_t request;
  /**
   * Its room.
   */
  uint64_t room;
  /**
   * A `baton_event_kind`.
   */
  uint32_t kind;
  /**
   * With `Failed`: the reason, for `baton_cause_name`. Otherwise 0.
   */
  uint32_t cause;
  /**
   * With `Landed`, at a destination: the bytes of the source.
   */
  uint8_t payload[BATON_PAYLOAD_BYTES];
  /**
   * Zero.
   */
  uint32_t padding;
} baton_event;

/**
 * Counters of an agent since its start.
 */
typedef struct {
  /**
   * `sizeof(baton_counter_values)`.
   */
  uint32_t size;
  /**
   * Requests that have not been released.
   */
  uint32_t open;
  /**
   * Requests that have landed.
   */
  uint64_t landed;
  /**
   * Requests that have failed.
   */
  uint64_t failed;
  /**
   * Copies of shm, frames of tcp, work requests of RDMA.
   */
  uint64_t work_requests;
  /**
   * Wake-ups of shm, system calls of tcp, doorbells of RDMA.
   */
  uint64_t doorbells;
} baton_counter_values;

/**
 * All errors.
 */
#define baton_error_ALL { baton_error_Argument, baton_error_Handle, baton_error_Request, baton_error_Role, baton_error_Full, baton_error_Tokens, baton_error_Pages, baton_error_Repeated, baton_error_Open, baton_error_Dead, baton_error_Forked, baton_error_System, baton_error_Panic, baton_error_Busy, }

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the interface: `BATON_ABI` of the header that the library was built with.
 */
uint32_t baton_abi(void);

/**
 * The name of an error, "unknown", or "none" for a result that is no error. The text is valid for
 * ever.
 */
const char *baton_error_name(int32_t error);

/**
 * Writes the text of this thread's last error, with a final zero. Returns the bytes of the whole
 * text without the zero: a text of more than `bytes - 1` bytes is cut.
 *
 * # Safety
 * `out` has room for `bytes` bytes.
 */
size_t baton_last_error(char *out, size_t bytes);

/**
 * Writes the name of a cause, as `baton_last_error` writes its text.
 *
 * # Safety
 * `out` has room for `bytes` bytes.
 */
size_t baton_cause_name(uint32_t cause, char *out, size_t bytes);

/**
 * Sends log lines of `level` and more severe ones to `callback`, or to standard error if it is
 * null. It is for the whole process. Before the first call, warnings go to standard error. A
 * thread of its own calls `callback`. If the callback is slow, lines are left out, and one line
 * says how many. It must not throw an exception. It can call every function except this one.
 *
 * The former callback still gets the lines that wait, for a second at most. This call waits until
 * it has returned, and it is not called any more. Before the end of the program, a call with null
 * gets the last lines.
 *
 * # Safety
 * `callback` can be called with `data` by any thread until it is replaced.
 */
int32_t baton_log(baton_log_callback callback, void *data, uint32_t level);

/**
 * Allocates a region of zeroed memory that peers on this host can map read-only. Its length is
 * `bytes`, rounded up to whole memory pages.
 *
 * # Safety
 * `region` is writable.
 */
int32_t baton_region_new(size_t bytes, uint64_t *region);

/**
 * Makes a region of memory that the caller has allocated. With `remap` 1, its whole memory pages
 * move onto a memory file, in place and with their content: peers on this host can then map them.
 * A source with shm needs that. With `remap` 0, the memory stays as it is. Address and length are
 * multiples of 8. No other adopted region has any of the bytes: several agents can use one region.
 * Remapped memory is private, anonymous and writable, as that of malloc.
 *
 * After `baton_region_free`, the memory is private again. Both moves copy the memory pages that
 * are not zero: the process needs as much free memory as they have. Locks, huge pages and NUMA
 * nodes that were chosen for the memory are lost.
 *
 * # Safety
 * The bytes stay readable and writable until the region is freed. No thread writes remapped memory
 * during this call and during `baton_region_free`. No device has its pages then: not CUDA
 * (`cudaHostRegister`), not a NIC (`ibv_reg_mr`), not io_uring. A device would go on with the
 * former pages. A process that is forked meanwhile shares remapped memory with its parent.
 * `region` is writable.
 */
int32_t baton_region_adopt(void *base, size_t bytes, uint32_t remap, uint64_t *region);

/**
 * The first byte and the length of a region. It stays mapped until it is freed.
 *
 * # Safety
 * `base` and `bytes` are writable.
 */
int32_t baton_region_base(uint64_t region, void **base, size_t *bytes);

/**
 * Frees a region that no agent uses. If adopted memory cannot be made private again, the error is
 * `System`: the region stays as it is, and the call can be repeated. If `baton-ctl` or `move-0` of
 * an agent has panicked, its region stays mapped, and the error is `Busy`.
 */
int32_t baton_region_free(uint64_t region);

/**
 * Starts an agent with threads of its own.
 *
 * # Safety
 * As many bytes of `config` as its `size` says are readable, and its pointers are readable. Its
 * texts end with a zero. `agent` is writable.
 */
int32_t baton_agent_new(const baton_config *config, uint64_t *agent);

/**
 * Ends an agent. It waits for its last messages, at most for a second, and for a copy that one of
 * its threads makes. After the call, nothing of it reads or writes the region, and a copy that a
 * peer is still making is void. Requests that have not ended get no more events.
 */
int32_t baton_agent_free(uint64_t agent);

/**
 * Writes the address of a source for its destinations, as `baton_last_error` writes its text.
 * Returns the bytes of the whole text.
 *
 * # Safety
 * `out` has room for `bytes` bytes.
 */
int32_t baton_address(uint64_t agent, char *out, size_t bytes);

/**
 * The status words of an agent, one for each slot; the slot is the low half of a request's number.
 * A word is, from its highest bit: 24 bits generation, 3 bits state, 5 bits cause, 32 bits lanes.
 * The states are 0 failed, 1 bootstrapping, 2 waiting for input, 3 transferring, 4 success. Read
 * them with acquire order. They stay mapped until the process ends. Null: the call failed.
 *
 * A word belongs to a request if its generation is the high half of the request's number. After
 * the release, the word soon has the generation of a request that does not exist yet, and the
 * state bootstrapping.
 *
 * # Safety
 * `slots` is writable, or null.
 */
const uint64_t *baton_status(uint64_t agent, uint32_t *slots);

/**
 * A descriptor that is readable while there are events. It belongs to the agent: do not close it.
 * Remove it from epoll sets before `baton_agent_free`, because the number can be used again.
 */
int32_t baton_event_fd(uint64_t agent);

/**
 * Offers the KV of a prompt in `room`, at a source. The request fails after `within_ms`, at most
 * half an hour. There is no default: it fails at once if `within_ms` is 0.
 *
 * # Safety
 * `ids` has `len` token ids. `request` is writable.
 */
int32_t baton_offer(uint64_t agent,
                    uint64_t room,
                    const uint32_t *ids,
                    size_t len,
                    uint32_t within_ms,
                    uint64_t *request);

/**
 * Asks for the KV of a prompt in `room`, at a destination. `source` is the address of the source's
 * agent, or the control port of a Baton prefill worker. The request fails after `within_ms`, as
 * with `baton_offer`.
 *
 * # Safety
 * `source` ends with a zero, `ids` has `len` token ids. `request` is writable.
 */
int32_t baton_wish(uint64_t agent,
                   uint64_t room,
                   const char *source,
                   const uint32_t *ids,
                   size_t len,
                   uint32_t within_ms,
                   uint64_t *request);

/**
 * Leases pages of the prompt to the transfer, until its event `Ended`. A source can lease its
 * pages in several calls, in the order of the tokens; `prefix` is 0. A destination leases the
 * pages of the whole prompt in one call. It already has the KV of the first `prefix` tokens, which
 * fill whole pages. Calls for one request come one after the other.
 *
 * # Safety
 * `pages` has `len` numbers.
 */
int32_t baton_lease(uint64_t agent,
                    uint64_t request,
                    uint32_t prefix,
                    const uint32_t *pages,
                    size_t len);

/**
 * The KV of the first `tokens` tokens is computed, at a source. Their pages are leased.
 */
int32_t baton_compute(uint64_t agent, uint64_t request, uint32_t tokens);

/**
 * Sends up to `BATON_PAYLOAD_BYTES` bytes with the last tokens, at a source. The last tokens leave
 * after this call. The destination gets the bytes with its event `Landed`, filled up with zeros.
 *
 * # Safety
 * `payload` has `bytes` bytes; it can be null if they are 0.
 */
int32_t baton_send_last(uint64_t agent, uint64_t request, const uint8_t *payload, size_t bytes);

/**
 * Ends a request, unless it has an outcome. Its events still come. The other end learns it if both
 * have met. A source learns it as soon as the event `Met` has come at the destination. So a
 * destination that needs nothing waits for `Met`, then cancels.
 */
int32_t baton_cancel(uint64_t agent, uint64_t request);

/**
 * Gives the slot of a request back, after its event `Ended` was read.
 */
int32_t baton_release(uint64_t agent, uint64_t request);

/**
 * Takes up to `len` events. Returns how many; 0 means that there are no more now. Each event is
 * taken once.
 *
 * # Safety
 * `events` has room for `len` events.
 */
int32_t baton_poll(uint64_t agent, baton_event *events, size_t len);

/**
 * Waits until there are events, at most for `micros` microseconds and a minute. Returns 1 if there
 * are events or the agent has ended. Returns 0 if the time is over, or earlier if the thread has
 * handled a signal.
 */
int32_t baton_wait(uint64_t agent, uint64_t micros);

/**
 * Writes the counters of an agent. `out->size` is `sizeof(baton_counter_values)`.
 *
 * # Safety
 * As many bytes of `out` as its `size` says are readable and writable.
 */
int32_t baton_counters(uint64_t agent, baton_counter_values *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BATON_H */
