//! Flags of `baton bench`.

use crate::config::DataThreadMode;
use crate::config::values::parse_peer;
use crate::limits::{LANES_MAX, RANKS_MAX};
use clap::{Args, Subcommand, value_parser};
use std::net::SocketAddr;
use std::path::PathBuf;

const BENCH_TRANSFER_COLUMNS: &str = "\
Columns:
  tp        tensor-parallel ranks of the source and of the destination
  lanes     copy threads (shm), streams (tcp), or queue pairs between two NICs (rdma)
  p50, p99  time from the call at the source to the completion seen at the destination
  cpu s/GB  CPU seconds of both processes for each GB
  WRs       pieces of a hand-off: copies, frames or work requests
  bells     wake-ups (shm), system calls (tcp) or doorbells (rdma) of a hand-off
  limit     time of as many bytes over the bare transport; both are measured alternately
  ratio     p50 divided by the limit
Up to 16 KiB the ratio shows wake-ups, not copies: a hand-off wakes three threads in turn, but the
limit spins (with tcp it waits once). With --busy-poll the hand-off spins, too.

Columns with --through-library:
  direct    p50 of hand-offs by an agent that the bench drives in its own thread
  A/A       the medians of two halves of these hand-offs, the larger divided by the smaller
  library   p50 of hand-offs through the C library; its agent has a thread of its own
  ratio     library divided by direct
  calls     system calls of a hand-off in both processes, direct and through the library, without
            the threads that move bytes; -: no count, which needs root and tracefs
  allocs    allocations of a hand-off, as calls; only a debug build counts them";

/// `baton bench`.
#[derive(Subcommand, Debug)]
pub enum BenchFlags {
    /// Measure KV transfers between two processes, and the bare limit of each transport in the same
    /// run
    #[command(after_help = BENCH_TRANSFER_COLUMNS)]
    Transfer(TransferBenchFlags),
}

/// `baton bench transfer`.
#[derive(Args, Clone, Debug)]
pub struct TransferBenchFlags {
    /// Transport to measure: shm, tcp, rdma, or all that this host has
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub transport: String,
    /// Case to measure, by its name, or a group. all: tiny-2k, smol-128, smol-1024, smol-8192,
    /// qwen-128, qwen-1024, qwen-8192, qwen-p1-contig-1024, qwen-p1-frag-1024, next-state8-1024 and
    /// next-state64-1024. small: tiny-2k, smol-128, qwen-64 and p1-32 (for slow hosts). state8 and
    /// state64: with 8 and 64 MiB of recurrent state
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub case: String,
    /// Layout of the source's and the destination's pool: layer-major (as in other engines),
    /// page-major (as in Baton), layer-to-page or page-to-layer. all: the first two
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub layout: String,
    /// Copy threads (shm), streams of a session (tcp), or queue pairs between two NICs (rdma), 1 to
    /// 32 [default: 1; rdma: 2]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=LANES_MAX as i64))]
    pub lanes: Option<u16>,
    /// Tensor-parallel ranks of the source, 1 to 64. Each has a pool for its KV heads. The number
    /// must divide the number of KV heads or be a multiple of it
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=RANKS_MAX as i64),
    )]
    pub src_tp: u32,
    /// Tensor-parallel ranks of the destination, 1 to 64, with the same rule. If there are more
    /// ranks than KV heads, several ranks hold the same head
    #[arg(
        long, value_name = "N", default_value_t = 1,
        value_parser = value_parser!(u32).range(1..=RANKS_MAX as i64),
    )]
    pub dst_tp: u32,
    /// Maximum number of local pieces that one RDMA work request gathers, 1 to 16; 1: no gathering
    /// [default: 16]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=16))]
    pub pieces: Option<u32>,
    /// Seconds for each row of results, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub duration: f64,
    /// Spin instead of sleeping: each process does all of its work in one thread that never parks
    #[arg(long)]
    pub busy_poll: bool,
    /// Compare hand-offs through the C library (libbaton) with those of an agent that the bench
    /// drives itself. Both alternate, and the bare limit is not measured
    #[arg(long, conflicts_with_all = ["busy_poll", "pieces", "data_threads", "report"])]
    pub through_library: bool,
    /// Threads that post and poll RDMA work: the source's mover (fused), or two threads for each
    /// NIC (split) [default: fused]
    #[arg(long, value_enum, conflicts_with = "busy_poll")]
    pub data_threads: Option<DataThreadMode>,
    /// Print one JSON object for each row instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write an HTML page with charts of all rows; the page needs no other file
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Listen at this address for a --connect process, and start no second process. No other flag
    /// is allowed, because the process that connects selects the measurements
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    pub listen: Option<SocketAddr>,
    /// Measure with the --listen process at this address, on this host or on another. Each host
    /// must reach the other
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_peer)]
    pub connect: Option<String>,
    /// End together with the process that started this one
    #[arg(long, hide = true, requires = "listen")]
    pub until_eof: bool,
    // This field is last, because its heading also applies to all flags after it.
    /// The shape, instead of a case.
    #[command(flatten)]
    pub shape: ShapeFlags,
}

/// A custom case.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "A case of your own, instead of --case")]
pub struct ShapeFlags {
    /// Pages of a request, 1 to 524288. The pool has twice as many, and at most 16 GiB
    #[arg(
        long, value_name = "N", conflicts_with = "case",
        value_parser = value_parser!(u32).range(1..=1 << 19),
    )]
    pub pages: Option<u32>,
    /// Layers, 1 to 1024. Each has one buffer for K and one for V
    #[arg(
        long, value_name = "N", requires = "pages", conflicts_with = "case",
        default_value_t = 32, value_parser = value_parser!(u32).range(1..=1024),
    )]
    pub layers: u32,
    /// Bytes of a page in one buffer, for all KV heads: a multiple of 8 for each head, up to
    /// 16777216
    #[arg(
        long, value_name = "BYTES", requires = "pages", conflicts_with = "case",
        default_value_t = 32 << 10, value_parser = value_parser!(u32).range(1..=16 << 20),
    )]
    pub item_bytes: u32,
    /// KV heads of the model, 1 to 1024. Tensor-parallel ranks divide them among themselves
    #[arg(
        long, value_name = "N", requires = "pages", conflicts_with = "case", default_value_t = 8,
        value_parser = value_parser!(u32).range(1..=1024),
    )]
    pub kv_heads: u32,
    /// Scatter the request's pages over the pool; without this flag they are contiguous
    #[arg(long, requires = "pages", conflicts_with = "case")]
    pub fragmented: bool,
}
