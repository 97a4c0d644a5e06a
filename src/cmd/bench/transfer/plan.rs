//! The plan of a bench: its rows, the time for each, and the other process.

use super::case::{Case, CaseError, Layouts, Spread, TransferEnd};
use super::talk::BenchRow;
use crate::cli::flags::{ShapeFlags, TransferBenchFlags};
use crate::config::error::ConfigError;
use crate::transfer::transport::rdma::{Nic, Settings};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The transports that this machine can measure, in the order of rows.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "rdma"];
/// Seconds for each row.
const DURATION: std::ops::RangeInclusive<f64> = 0.0..=3600.0;

/// The other process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerMode {
    /// This process starts it.
    Local,
    /// It connects here and leads.
    Listen {
        /// Address to listen on.
        address: SocketAddr,
        /// Whether the end of standard input ends this process.
        until_eof: bool,
    },
    /// It listens at this HOST:PORT and follows.
    Connect(String),
}

/// A checked command line.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchPlan {
    /// The other process.
    pub place: PeerMode,
    /// The rows to measure.
    pub(super) rows: Vec<BenchRow>,
    /// Time for each row.
    pub duration: Duration,
    /// Whether to print JSON.
    pub json: bool,
    /// File for the HTML page.
    pub report: Option<PathBuf>,
    /// Parts of `all` that the plan leaves out, with the reason.
    pub left_out: Vec<String>,
}

impl BenchPlan {
    /// Checks the flags and lists their rows.
    ///
    /// # Errors
    /// The first invalid value, with the allowed values.
    pub fn new(flags: &TransferBenchFlags) -> Result<BenchPlan, ConfigError> {
        let place = match (&flags.listen, &flags.connect) {
            (Some(address), _) => {
                PeerMode::Listen { address: *address, until_eof: flags.until_eof }
            }
            (None, Some(peer)) => PeerMode::Connect(peer.clone()),
            (None, None) => PeerMode::Local,
        };
        if !DURATION.contains(&flags.duration) {
            let limit = format!("{} to {} seconds", DURATION.start(), DURATION.end());
            return Err(value("--duration", flags.duration, limit));
        }
        let mut transports = choose("--transport", &flags.transport, &TRANSPORTS, |name| name)?;
        // The transports of `all` that this machine has.
        let mut left_out = Vec::new();
        if flags.transport == "all"
            && let Err(why) = Nic::choose(&[], &[])
        {
            transports.retain(|&name| name != "rdma");
            left_out.push(format!("rdma is left out: {why}"));
        }
        if !transports.contains(&"rdma") {
            refuse_rdma_flags(flags, &transports)?;
        }
        let mut layouts = choose("--layout", &flags.layout, &Layouts::ALL, |kind| kind.name())?;
        // `all` leaves out combinations of two layouts.
        if flags.layout == "all" {
            layouts.retain(|layouts| layouts.source == layouts.destination);
        }
        let cases = match flags.shape.pages {
            Some(pages) => vec![own(pages, &flags.shape)],
            None => cases(&flags.case)?,
        };
        let mut rows = Vec::new();
        let all_cases =
            flags.shape.pages.is_none() && ["all", "small"].contains(&flags.case.as_str());
        for case in &cases {
            let ranks =
                [(TransferEnd::Source, flags.src_tp), (TransferEnd::Destination, flags.dst_tp)];
            let unfit =
                ranks.into_iter().find_map(|(end, ranks)| case.check_ranks(end, ranks).err());
            if let Some(why) = unfit.filter(|_| all_cases) {
                left_out.push(format!("{} is left out: {why}", case.name));
                continue;
            }
            for &layouts in &layouts {
                for &transport in &transports {
                    let row = row(case, layouts, transport, flags);
                    row.check().map_err(|CaseError { flag, value, limit }| ConfigError::Value {
                        flag,
                        value,
                        limit,
                    })?;
                    rows.push(row);
                }
            }
        }
        let duration = Duration::from_secs_f64(flags.duration);
        Ok(BenchPlan {
            place,
            rows,
            duration,
            json: flags.json,
            report: flags.report.clone(),
            left_out,
        })
    }
}

fn row(case: &Case, layouts: Layouts, transport: &str, flags: &TransferBenchFlags) -> BenchRow {
    let usual = Settings::default();
    let lanes = if transport == "rdma" { usual.lanes as u16 } else { 1 };
    BenchRow {
        case: case.clone(),
        layouts,
        source_ranks: flags.src_tp,
        destination_ranks: flags.dst_tp,
        transport: transport.into(),
        lanes: flags.lanes.unwrap_or(lanes),
        pieces: flags.pieces.unwrap_or(usual.pieces),
        busy_poll: flags.busy_poll,
        data_threads: flags.data_threads.unwrap_or_default(),
        through_library: flags.through_library,
    }
}

/// Refuses flags of rdma if no row uses it.
fn refuse_rdma_flags(flags: &TransferBenchFlags, transports: &[&str]) -> Result<(), ConfigError> {
    let given = [
        ("--pieces", flags.pieces.map(|pieces| pieces.to_string())),
        ("--data-threads", flags.data_threads.map(|threads| threads.to_string())),
    ];
    match given.into_iter().find_map(|(flag, given)| Some((flag, given?))) {
        None => Ok(()),
        Some((flag, given)) => {
            let used = transports.join(" and ");
            Err(value(flag, given, format!("only rdma uses this flag, and all rows use {used}")))
        }
    }
}

/// The entries that `name` selects.
fn choose<T: Clone>(
    flag: &'static str,
    name: &str,
    known: &[T],
    name_of: impl Fn(&T) -> &str,
) -> Result<Vec<T>, ConfigError> {
    if name == "all" {
        return Ok(known.to_vec());
    }
    match known.iter().find(|known| name_of(known) == name) {
        Some(found) => Ok(vec![found.clone()]),
        None => {
            let names: Vec<&str> = known.iter().map(name_of).collect();
            Err(value(flag, name, format!("must be one of all, {}", names.join(", "))))
        }
    }
}

/// The cases of `all`, of `small`, or one case. A name in both lists means the larger pool.
fn cases(name: &str) -> Result<Vec<Case>, ConfigError> {
    match name {
        "all" => return Ok(Case::known()),
        "small" => return Ok(Case::small()),
        _ => {}
    }
    let mut one_each = Case::known();
    for small in Case::small() {
        if one_each.iter().all(|case| case.name != small.name) {
            one_each.push(small);
        }
    }
    if let Some(found) = one_each.iter().position(|case| case.name == name) {
        return Ok(vec![one_each.swap_remove(found)]);
    }
    let names: Vec<&str> = one_each.iter().map(|case| &case.name[..]).collect();
    Err(value("--case", name, format!("must be one of all, small, {}", names.join(", "))))
}

fn own(pages: u32, shape: &ShapeFlags) -> Case {
    let spread = if shape.fragmented { Spread::Fragmented } else { Spread::Contiguous };
    Case {
        name: "own".into(),
        pages,
        buffers: shape.layers * 2,
        item_bytes: shape.item_bytes,
        kv_heads: shape.kv_heads,
        page_size: 1,
        // Room for several different page lists.
        pool: pages.saturating_mul(2),
        spread,
    }
}

fn value(flag: &'static str, value: impl ToString, limit: String) -> ConfigError {
    ConfigError::Value { flag, value: value.to_string(), limit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, HostInfo, Invocation};

    fn plan(words: &str) -> Result<BenchPlan, String> {
        let machine = HostInfo::of_one_cpu();
        let arguments = ["baton", "bench", "transfer"].into_iter().chain(words.split_whitespace());
        match cli::parse(arguments, &machine) {
            Ok(Invocation::BenchTransfer(flags)) => {
                BenchPlan::new(&flags).map_err(|error| error.to_string())
            }
            Ok(other) => Err(format!("{other:?}")),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn all_is_every_case_layout_and_transport() {
        let all = plan("").unwrap();
        assert_eq!(all.place, PeerMode::Local);
        assert_eq!(all.rows.len(), Case::known().len() * 2 * 2);
        assert_eq!(plan("--case small --transport shm --layout page-major").unwrap().rows.len(), 4);
        let of_two = plan("--case small --transport shm --layout page-major --dst-tp 2").unwrap();
        assert_eq!(of_two.rows.len(), 3);
        assert!(of_two.left_out.iter().any(|why| {
            why.starts_with("smol-128 is left out: --dst-tp 2: must divide the 3 KV heads")
        }));
    }

    #[test]
    fn names_choose_one() {
        let one =
            plan("--case qwen-64 --transport tcp --layout layer-major --lanes 4").unwrap().rows;
        assert_eq!(one.len(), 1);
        assert_eq!((one[0].case.pages, one[0].lanes), (4, 4));
        let one =
            plan("--case qwen-64 --src-tp 2 --dst-tp 16 --layout layer-to-page --transport shm")
                .unwrap()
                .rows;
        assert_eq!((one.len(), one[0].ranks()), (1, "2:16".to_string()));
        assert_eq!(one[0].moved().bytes(), 2 * one[0].case.bytes(), "each head on two ranks");
        let own = plan("--pages 10 --layers 2 --item-bytes 4096 --fragmented --transport shm")
            .unwrap()
            .rows;
        assert_eq!(own[0].case.bytes(), 10 * 4 * 4096);
    }

    #[test]
    fn help_lists_the_cases() {
        let help = plan("--help").unwrap_err();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let names = |cases: Vec<Case>| {
            let names: Vec<String> = cases.into_iter().map(|case| case.name).collect();
            let (last, others) = names.split_last().unwrap();
            format!("{} and {last}", others.join(", "))
        };
        for (name, cases) in [("all", Case::known()), ("small", Case::small())] {
            let line = format!("{name}: {}", names(cases));
            assert!(help.contains(&line), "{line}: {help}");
        }
    }

    #[test]
    fn an_invalid_flag_is_refused_with_the_accepted_values() {
        for (words, said) in [
            ("--case smol", "--case smol: must be one of all, small, tiny-2k, smol-128,"),
            ("--case qwen", ", qwen-64, p1-32"),
            ("--transport ucx", "must be one of all, shm, tcp, rdma"),
            ("--layout token-major", "page-major"),
            ("--duration 9999", "0 to 3600"),
            (
                "--pages 10 --item-bytes 100",
                "--item-bytes 100 with --kv-heads 8: must be a multiple of 64",
            ),
            (
                "--pages 10 --kv-heads 3",
                "--item-bytes 32768 with --kv-heads 3: must be a multiple of 24",
            ),
            ("--pages 10 --item-bytes 0", "for '--item-bytes <BYTES>': 0 is not in 1..="),
            (
                "--case smol-128 --src-tp 2",
                "--src-tp 2: must divide the 3 KV heads of smol-128, or",
            ),
            (
                "--case qwen-128 --dst-tp 3",
                "--dst-tp 3: must divide the 8 KV heads of qwen-128, or",
            ),
            (
                "--case qwen-8192 --transport shm --dst-tp 65",
                "for '--dst-tp <N>': 65 is not in 1..=64",
            ),
            (
                "--pages 2000 --dst-tp 64",
                "--dst-tp 64: all pools of own have 67108864000 bytes, at most",
            ),
            ("--pages 0", "for '--pages <N>': 0 is not in 1..=524288"),
            ("--pages 524289", "for '--pages <N>': 524289 is not in 1..=524288"),
            (
                "--pages 524288",
                "--pages 524288 with --layers 32 and --item-bytes 32768: \
                 its pool has 2199023255552 bytes",
            ),
            ("--connect nowhere", "a peer is HOST:PORT"),
            ("--layers 3", "pages"),
            ("--lanes 33", "32"),
            (
                "--transport shm --pieces 4",
                "--pieces 4: only rdma uses this flag, and all rows use shm",
            ),
            (
                "--transport tcp --data-threads fused",
                "--data-threads fused: only rdma uses this flag",
            ),
            ("--listen 127.0.0.1:1 --connect 127.0.0.1:1", "cannot be used with"),
            ("--through-library --busy-poll", "cannot be used with"),
            ("--through-library --report page.html", "cannot be used with"),
        ] {
            let error = plan(words).unwrap_err();
            assert!(error.contains(said), "{words}: {error}");
        }
    }
}
