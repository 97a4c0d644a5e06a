//! The types and numbers of the C ABI. Their comments become those of the header.

use crate::agent::client::AgentError;
use crate::transfer::aux::AUX_PAYLOAD_BYTES;
use std::ffi::{CStr, c_char, c_void};

/// Version of this interface. A program refuses a library of another version.
pub const ABI: u32 = 1;
/// Bytes that a source can send with the last tokens of a prompt.
pub const PAYLOAD_BYTES: usize = 188;
/// Bytes of the digest of everything that must be equal at both ends.
pub const KIND_BYTES: usize = 32;

const _: () = assert!(PAYLOAD_BYTES == AUX_PAYLOAD_BYTES);

/// Element type: IEEE single, 4 bytes.
pub const ELEMENT_F32: u32 = 1;
/// Element type: IEEE half, 2 bytes.
pub const ELEMENT_F16: u32 = 2;
/// Element type: bfloat16, 2 bytes.
pub const ELEMENT_BF16: u32 = 3;

/// Why a call had no effect. Each call returns 0, or a count, or one of these numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub enum BatonError {
    /// An argument is a null pointer, has a wrong size, or is out of range.
    Argument = -1,
    /// There is no such agent or region, or it was freed.
    Handle = -2,
    /// There is no such request, or it was released.
    Request = -3,
    /// The call is not for the role of this agent.
    Role = -4,
    /// All slots of the agent, or all handles, are in use.
    Full = -5,
    /// A number of tokens is zero, beyond the prompt, or less than before.
    Tokens = -6,
    /// The pages do not fit the tokens, or one is not in the pool.
    Pages = -7,
    /// The call was made before for this request.
    Repeated = -8,
    /// The request has not ended.
    Open = -9,
    /// The agent has ended. No event comes any more.
    Dead = -10,
    /// This process is a fork of one that has called the library.
    Forked = -11,
    /// A port, a thread, memory or a NIC cannot be had. `baton_last_error` has the reason.
    System = -12,
    /// An internal error. The call can have had a part of its effect.
    Panic = -13,
    /// An agent uses the region.
    Busy = -14,
}

impl BatonError {
    /// All errors.
    pub const ALL: [BatonError; 14] = [
        BatonError::Argument,
        BatonError::Handle,
        BatonError::Request,
        BatonError::Role,
        BatonError::Full,
        BatonError::Tokens,
        BatonError::Pages,
        BatonError::Repeated,
        BatonError::Open,
        BatonError::Dead,
        BatonError::Forked,
        BatonError::System,
        BatonError::Panic,
        BatonError::Busy,
    ];

    /// The name, as [`baton_error_name`](super::baton_error_name) gives it.
    pub fn name(self) -> &'static CStr {
        match self {
            BatonError::Argument => c"argument",
            BatonError::Handle => c"handle",
            BatonError::Request => c"request",
            BatonError::Role => c"role",
            BatonError::Full => c"full",
            BatonError::Tokens => c"tokens",
            BatonError::Pages => c"pages",
            BatonError::Repeated => c"repeated",
            BatonError::Open => c"open",
            BatonError::Dead => c"dead",
            BatonError::Forked => c"forked",
            BatonError::System => c"system",
            BatonError::Panic => c"panic",
            BatonError::Busy => c"busy",
        }
    }

    /// The error in words.
    pub fn text(self) -> &'static str {
        match self {
            BatonError::Argument => "an argument is out of range",
            BatonError::Handle => "there is no such agent or region, or it was freed",
            BatonError::Request => "there is no such request, or it was released",
            BatonError::Role => AgentError::Role.text(),
            BatonError::Full => "all slots or handles are in use",
            BatonError::Tokens => AgentError::Tokens.text(),
            BatonError::Pages => AgentError::Pages.text(),
            BatonError::Repeated => AgentError::Repeated.text(),
            BatonError::Open => AgentError::Open.text(),
            BatonError::Dead => AgentError::Dead.text(),
            BatonError::Forked => "this process is a fork of one that has called the library",
            BatonError::System => "the system refuses",
            BatonError::Panic => "internal error",
            BatonError::Busy => "an agent uses the region",
        }
    }
}

impl From<AgentError> for BatonError {
    fn from(error: AgentError) -> BatonError {
        match error {
            AgentError::Slot => BatonError::Request,
            AgentError::Role => BatonError::Role,
            AgentError::Full => BatonError::Full,
            AgentError::Tokens => BatonError::Tokens,
            AgentError::Pages => BatonError::Pages,
            AgentError::Repeated => BatonError::Repeated,
            AgentError::Open => BatonError::Open,
            AgentError::Dead => BatonError::Dead,
        }
    }
}

/// What an agent does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum BatonRole {
    /// It has computed KV and hands it over: prefill.
    Source = 1,
    /// It receives KV: decode.
    Destination = 2,
}

/// What has happened to a request. There is one outcome, `Landed` or `Failed`, and then one
/// `Ended`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum BatonEventKind {
    /// The other end is known. It comes before the outcome, or not at all.
    Met = 1,
    /// Outcome: the KV is handed over.
    Landed = 2,
    /// Outcome: the KV is not handed over. `cause` is the reason.
    Failed = 3,
    /// No transfer reads or writes the pages any more: they can be used for something else.
    Ended = 4,
}

/// Level of a log line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum BatonLogLevel {
    /// A failure that should not happen.
    Error = 0,
    /// A problem that the library can tolerate.
    Warn = 1,
    /// Normal events of interest to an operator.
    Info = 2,
    /// More detail.
    Debug = 3,
}

/// Gets the lines of `baton_log`. `line` is valid during the call.
pub type BatonLogCallback =
    Option<unsafe extern "C" fn(level: u32, line: *const c_char, data: *mut c_void)>;

/// Where the KV of a token is: byte strides from one thing to the next. The elements of a head are
/// contiguous. A token's head in a layer is at
/// `rank * rank_stride + page * page_stride + layer * layer_stride + (0 or kv_stride) +
/// head * head_stride + token * token_stride`, in bytes from the base of the region.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct BatonLayout {
    /// Pages (blocks) of the pool.
    pub pages: u32,
    /// Tokens of a page.
    pub page_size: u32,
    /// Layers of the model.
    pub layers: u32,
    /// KV heads of each rank.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Element type: `BATON_ELEMENT_F32`, `BATON_ELEMENT_F16`, or `BATON_ELEMENT_BF16`.
    pub element: u32,
    /// Tensor-parallel ranks in this memory; 0 means 1.
    pub ranks: u32,
    /// KV heads of the model; 0 means `kv_heads`.
    pub model_kv_heads: u32,
    /// Bytes from a page to the next.
    pub page_stride: u64,
    /// Bytes from a layer to the next.
    pub layer_stride: u64,
    /// Bytes from keys to values.
    pub kv_stride: u64,
    /// Bytes from a KV head to the next.
    pub head_stride: u64,
    /// Bytes from a token to the next.
    pub token_stride: u64,
    /// Bytes from a rank to the next.
    pub rank_stride: u64,
}

/// Settings of an agent. Set all bytes to zero first, then `size`: a number that is 0 and a pointer
/// that is null mean the default.
#[derive(Debug)]
#[repr(C)]
pub struct BatonConfig {
    /// `sizeof(baton_config)`.
    pub size: u32,
    /// `BATON_ROLE_SOURCE` or `BATON_ROLE_DESTINATION`.
    pub role: u32,
    /// The memory of the KV.
    pub region: u64,
    /// Its layout.
    pub layout: BatonLayout,
    /// Digest of everything that decides what the KV means: model, weights, kernels. It must be
    /// equal at both ends.
    pub kind: [u8; KIND_BYTES],
    /// Address where peers connect. Default: 127.0.0.1. A source names the address of one
    /// interface, not 0.0.0.0, because its destinations get this address.
    pub host: *const c_char,
    /// Networks of the sources that a destination connects to, in CIDR form, separated by commas.
    /// Default: this host.
    pub allow: *const c_char,
    /// Transports in order of preference, separated by commas: shm, rdma, tcp. Default: shm, tcp.
    pub transports: *const c_char,
    /// Names of RDMA devices, separated by commas. Default: all that can be used.
    pub devices: *const c_char,
    /// The cluster key: at least 32 random bytes, as in the file of `--cluster-key-file`. Without a
    /// key, `host` and `allow` are loopback addresses.
    pub key: *const u8,
    /// Bytes of the key.
    pub key_bytes: usize,
    /// Numbers of the CPUs of the library's threads. Default: all CPUs of the process's cpuset,
    /// also those that `taskset` or `numactl` has taken away.
    pub cpus: *const u32,
    /// How many they are.
    pub cpus_len: usize,
    /// Requests at a time. Default: 64.
    pub slots: u32,
    /// Pages of the longest prompt. Default: all pages of the pool.
    pub prompt_pages: u32,
    /// Peers at a time. Default: 16.
    pub sessions: u32,
    /// Streams of a tcp session, and queue pairs between two NICs. Default: 2.
    pub lanes: u32,
    /// Threads that copy over shm, at a destination. The thread `move-0` is one of them. Default:
    /// 1.
    pub copy_threads: u32,
}

/// An event of a request.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatonEvent {
    /// The request.
    pub request: u64,
    /// Its room.
    pub room: u64,
    /// A `baton_event_kind`.
    pub kind: u32,
    /// With `Failed`: the reason, for `baton_cause_name`. Otherwise 0.
    pub cause: u32,
    /// With `Landed`, at a destination: the bytes of the source.
    pub payload: [u8; PAYLOAD_BYTES],
    /// Zero.
    pub padding: u32,
}

/// Counters of an agent since its start.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct BatonCounters {
    /// `sizeof(baton_counter_values)`.
    pub size: u32,
    /// Requests that have not been released.
    pub open: u32,
    /// Requests that have landed.
    pub landed: u64,
    /// Requests that have failed.
    pub failed: u64,
    /// Copies of shm, frames of tcp, work requests of RDMA.
    pub work_requests: u64,
    /// Wake-ups of shm, system calls of tcp, doorbells of RDMA.
    pub doorbells: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_numbered_from_minus_one_and_their_names_differ() {
        let numbers = BatonError::ALL.map(|error| error as i32);
        assert_eq!(numbers, std::array::from_fn(|index| -1 - index as i32));
        let names: std::collections::BTreeSet<_> = BatonError::ALL.map(BatonError::name).into();
        assert_eq!(names.len(), BatonError::ALL.len());
    }
}
