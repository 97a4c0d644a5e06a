//! Flags of `baton bench`.

use super::super::resolved::DataThreads;
use super::super::values::parse_peer;
use crate::limits::{LANES_MAX, RANKS_MAX};
use clap::{Args, Subcommand, value_parser};
use std::net::SocketAddr;
use std::path::PathBuf;

const BENCH_TRANSFER_COLUMNS: &str = "\
Columns: tp: ranks of source and destination; lanes: threads that copy, streams, or queue pairs between two NICs; p50,
p99: from the call at the source to the notice seen at the destination; cpu s/GB: of both processes; WRs: pieces that a
hand-off moved in (copies, frames, work requests); bells: wake-ups of shm, system calls of tcp, doorbells of rdma, each
of a hand-off; limit: the bare way with as many bytes, in turn; ratio: p50 by it, which up to 16 KiB tells wake-ups, not
copies: a hand-off wakes three threads in turn, the limit spins (tcp: waits once). --busy-poll spins too.";

/// `baton bench`.
#[derive(Subcommand, Debug)]
pub enum BenchFlags {
    /// Hand KV over between two processes, beside the bare limit of the same way in the same run
    #[command(after_help = BENCH_TRANSFER_COLUMNS)]
    Transfer(TransferBenchFlags),
}

/// `baton bench transfer`.
#[derive(Args, Clone, Debug)]
pub struct TransferBenchFlags {
    /// How bytes move: all (those of this machine), shm, tcp, rdma
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub transport: String,
    /// What is handed over: all, which is tiny-2k, smol-128, smol-1024, smol-8192, qwen-128, qwen-1024, qwen-8192,
    /// qwen-p1-contig-1024 and qwen-p1-frag-1024; small, which is tiny-2k, smol-128, qwen-64 and p1-32, for slow
    /// machines; or one of them
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub case: String,
    /// How the pools keep their pages: all (the next two), layer-major as other engines, page-major as ours,
    /// layer-to-page, page-to-layer
    #[arg(long, value_name = "NAME", default_value = "all")]
    pub layout: String,
    /// Threads that copy (shm), streams of a session (tcp), or queue pairs between two NICs (rdma), 1 to 32 [default: 1,
    /// of rdma 2]
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=LANES_MAX as i64))]
    pub lanes: Option<u16>,
    /// Tensor-parallel ranks of the source, 1 to 64, each with a pool of its KV heads; they divide the KV heads or are
    /// a multiple of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=RANKS_MAX as i64))]
    pub src_tp: u32,
    /// Tensor-parallel ranks of the destination, likewise; of more ranks than KV heads several hold the same
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=RANKS_MAX as i64))]
    pub dst_tp: u32,
    /// Most local pieces that an rdma work request gathers, 1 to 16; 1: none gathers [default: 16]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=16))]
    pub pieces: Option<u32>,
    /// Seconds for each row of figures, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    pub duration: f64,
    /// Have no thread park: each process turns all of its work in one that spins
    #[arg(long)]
    pub busy_poll: bool,
    /// Who posts and reaps what goes over rdma: the source's mover (fused), or two threads for each NIC (split)
    /// [default: fused]
    #[arg(long, value_enum, conflicts_with = "busy_poll")]
    pub data_threads: Option<DataThreads>,
    /// One JSON object a row instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also write a page with charts of all rows, which needs nothing else
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Follow whoever connects here instead of starting a second process; takes no other flag, as that one says what
    /// is measured
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "connect")]
    pub listen: Option<SocketAddr>,
    /// Lead the process that listens there, on another host or this one; each must reach the other
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_peer)]
    pub connect: Option<String>,
    /// End with whoever has started this.
    #[arg(long, hide = true, requires = "listen")]
    pub until_eof: bool,
    // Last, as what follows would stand under its heading.
    /// Instead of a case.
    #[command(flatten)]
    pub shape: ShapeFlags,
}

/// A case of one's own.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "A case of your own, instead of --case")]
pub struct ShapeFlags {
    /// Pages of a request, 1 to 524288; the pool has twice as many, at most 16 GiB
    #[arg(long, value_name = "N", conflicts_with = "case", value_parser = value_parser!(u32).range(1..=1 << 19))]
    pub pages: Option<u32>,
    /// Layers, 1 to 1024, each with a buffer for K and one for V
    #[arg(long, value_name = "N", requires = "pages", conflicts_with = "case", default_value_t = 32, value_parser = value_parser!(u32).range(1..=1024))]
    pub layers: u32,
    /// Bytes of a page in a buffer, all KV heads: a multiple of 8 for each, up to 16777216
    #[arg(long, value_name = "BYTES", requires = "pages", conflicts_with = "case", default_value_t = 32 << 10, value_parser = value_parser!(u32).range(1..=16 << 20))]
    pub item_bytes: u32,
    /// KV heads of the model, 1 to 1024, which tensor-parallel ranks share
    #[arg(long, value_name = "N", requires = "pages", conflicts_with = "case", default_value_t = 8, value_parser = value_parser!(u32).range(1..=1024))]
    pub kv_heads: u32,
    /// Have the request's pages lie anywhere in the pool, not in a run
    #[arg(long, requires = "pages", conflicts_with = "case")]
    pub fragmented: bool,
}
