//! Published traces: one JSON object per line (Mooncake), or a table of times and lengths (Azure),
//! plain or compressed with zstd.
//!
//! Owns: the meaning of a line. Not here: the tokens of prompts (`arrivals`).

use super::arrivals::{Arrivals, BLOCK, RequestArrival};
use crate::config::error::ConfigError;
use crate::limits::{CONTEXT_MAX, LOAD_REQUESTS_MAX};
use crate::stdx::event_queue::{MILLI, Nanos, SECOND};
use crate::stdx::rng::Rng;
use serde::Deserialize;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The first bytes of a zstd frame (RFC 8878, section 3.1.1).
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// The first line of the Azure LLM inference trace of 2023.
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// A trace file and its use.
#[derive(Clone, PartialEq, Debug)]
pub struct File {
    /// Its path.
    pub path: PathBuf,
    /// Number of first requests to use; `None`: all.
    pub most: Option<usize>,
    /// Factor of the request rate, relative to the trace.
    pub speed: f64,
    /// Largest random delay of a request, in the trace's time.
    pub jitter: Nanos,
}

/// A line of a Mooncake trace.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    /// Not in published traces.
    #[serde(default)]
    priority: i32,
    /// Ids of blocks. Equal ids mean equal tokens and equal blocks before them.
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// The lines of a file, decompressed if needed.
///
/// # Errors
/// The file cannot be read.
pub fn lines(path: &Path) -> io::Result<impl Iterator<Item = io::Result<String>>> {
    let mut file = BufReader::new(fs::File::open(path)?);
    let is_packed = file.fill_buf()?.starts_with(&ZSTD);
    let unpacked: Box<dyn Read> = match is_packed {
        false => Box::new(file),
        true => Box::new(ruzstd::decoding::StreamingDecoder::new(file).map_err(io::Error::other)?),
    };
    Ok(BufReader::new(unpacked).lines())
}

impl File {
    /// Reads the requests.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not a request.
    pub fn read(&self, dice: &mut Rng) -> Result<Arrivals, ConfigError> {
        let bad =
            |reason| ConfigError::File { flag: "--trace-file", path: self.path.clone(), reason };
        let lines = lines(&self.path).map_err(|error| bad(error.to_string()))?;
        let most = self.most.unwrap_or(LOAD_REQUESTS_MAX);
        let (mut list, mut is_table, mut first) = (Vec::new(), false, None);
        for (line, text) in (1..).zip(lines) {
            let here = |reason: String| bad(format!("line {line}: {reason}"));
            let text = text.map_err(|error| here(error.to_string()))?;
            let text = text.trim();
            if line == 1 && text == AZURE {
                is_table = true;
                continue;
            }
            if text.is_empty() {
                continue;
            }
            if list.len() == most {
                match self.most {
                    Some(_) => break,
                    None => return Err(here(format!("more than {LOAD_REQUESTS_MAX} requests"))),
                }
            }
            let mut arrival = match is_table {
                true => row(text, &mut first),
                false => parse(text).and_then(arrival),
            }
            .map_err(here)?;
            let jitter = if self.jitter > 0 { dice.range_u64(0, self.jitter) } else { 0 };
            arrival.at = ((arrival.at + jitter) as f64 / self.speed).round() as Nanos;
            list.push(arrival);
        }
        match self.most {
            _ if list.is_empty() => Err(bad("it contains no request".into())),
            Some(most) if list.len() < most => {
                let limit =
                    format!("there are {} in --trace-file {}", list.len(), self.path.display());
                Err(ConfigError::Value { flag: "--requests", value: most.to_string(), limit })
            }
            _ => Ok(Arrivals::new(list, dice)),
        }
    }
}

/// Parses one line of a Mooncake trace. The caller adds the line's number to an error.
fn parse(text: &str) -> Result<Line, String> {
    serde_json::from_str(text).map_err(|error| {
        let (said, place) =
            (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
        format!("{}, at column {}", said.strip_suffix(&place).unwrap_or(&said), error.column())
    })
}

fn arrival(line: Line) -> Result<RequestArrival, String> {
    let Line { timestamp, input_length: input, output_length: output, priority, hash_ids } = line;
    if !(0.0..=1e12).contains(&timestamp) {
        return Err(format!("timestamp {timestamp}: 0 to 10^12 milliseconds"));
    }
    lengths([("input_length", input), ("output_length", output)])?;
    let blocks = input.div_ceil(BLOCK) as usize;
    if hash_ids.len() > blocks {
        let given = hash_ids.len();
        return Err(format!("{given} hash_ids: {input} tokens are {blocks} blocks of {BLOCK}"));
    }
    let at = (timestamp * MILLI as f64).round() as Nanos;
    Ok(RequestArrival { at, input, output, priority, blocks: hash_ids.into() })
}

fn lengths(named: [(&str, u32); 2]) -> Result<(), String> {
    let wrong = named.into_iter().find(|(_, length)| !(1..=CONTEXT_MAX / 2).contains(length));
    wrong.map_or(Ok(()), |(name, length)| Err(format!("{name} {length}: 1 to {}", CONTEXT_MAX / 2)))
}

/// Parses one row of an Azure trace. Times count from the first row.
fn row(text: &str, first: &mut Option<i128>) -> Result<RequestArrival, String> {
    let mut cells = text.split(',');
    let (Some(time), Some(input), Some(output), None) =
        (cells.next(), cells.next(), cells.next(), cells.next())
    else {
        return Err(format!("not three cells, as in {AZURE}"));
    };
    let number = |name: &str, cell: &str| {
        cell.parse::<u32>().map_err(|error| format!("{name} {cell}: {error}"))
    };
    let (input, output) = (number("ContextTokens", input)?, number("GeneratedTokens", output)?);
    lengths([("ContextTokens", input), ("GeneratedTokens", output)])?;
    let time =
        moment(time).ok_or_else(|| format!("TIMESTAMP {time}: as 2023-11-16 18:17:03.9799600"))?;
    let at = time - *first.get_or_insert(time);
    let at = Nanos::try_from(at).map_err(|_| "TIMESTAMP: before the first row's".to_owned())?;
    Ok(RequestArrival { at, input, output, priority: 0, blocks: Box::default() })
}

/// Nanoseconds of `YYYY-MM-DD hh:mm:ss[.fraction]` since a fixed day.
fn moment(text: &str) -> Option<i128> {
    let (date, time) = text.split_once(' ')?;
    let part = |part: Option<&str>, range: std::ops::RangeInclusive<i64>| {
        part?.parse::<i64>().ok().filter(|number| range.contains(number))
    };
    let mut date = date.splitn(3, '-');
    let (year, month, day) =
        (part(date.next(), 1..=9999)?, part(date.next(), 1..=12)?, part(date.next(), 1..=31)?);
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (part(time.next(), 0..=23)?, part(time.next(), 0..=59)?);
    let seconds: f64 = time.next()?.parse().ok().filter(|seconds| (0.0..61.0).contains(seconds))?;
    // Days of the civil calendar, with years that begin in March (Richards, Mapping Time and its
    // History, 2013).
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    let whole = i128::from((days * 24 + hour) * 60 + minute) * 60;
    Some(whole * i128::from(SECOND) + (seconds * SECOND as f64).round() as i128)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_no_request_is_refused_by_name() {
        let refused = |text| parse(text).and_then(arrival).unwrap_err();
        assert!(
            refused(r#"{"timestamp":0,"input_length":0,"output_length":1}"#)
                .contains("input_length 0")
        );
        assert!(
            refused(r#"{"timestamp":-1,"input_length":1,"output_length":1}"#)
                .contains("timestamp -1")
        );
        assert_eq!(
            refused(r#"{"timestamp":0,"input_length":1}"#),
            "missing field `output_length`, at column 32"
        );
        assert!(
            refused(r#"{"timestamp":0,"input_length":1,"output_length":1,"x":1}"#).contains('x')
        );
        let blocks =
            refused(r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]}"#);
        assert!(blocks.contains("2 hash_ids"));
    }

    #[test]
    fn rows_of_a_table_count_from_the_first() {
        let mut first = None;
        let mut at = |text| row(text, &mut first).map(|row| (row.at, row.input, row.output));
        assert_eq!(at("2023-11-30 23:59:59.9000000,48,10"), Ok((0, 48, 10)));
        assert_eq!(at("2023-12-01 00:00:01.4000001,7,1").map(|row| row.0 / MILLI), Ok(1500));
        assert!(at("2023-11-30 23:59:58.0,48,10").unwrap_err().contains("before the first"));
        assert!(at("2023-13-01 00:00:01,48,10").unwrap_err().contains("TIMESTAMP 2023-13"));
        assert!(at("2023-12-01 00:00:02,0,10").unwrap_err().contains("ContextTokens 0"));
        assert!(at("2023-12-01 00:00:02,5").unwrap_err().contains("three cells"));
        let days = |text| moment(text).unwrap() / i128::from(SECOND) / 86_400;
        assert_eq!(days("2024-03-01 00:00:00") - days("2024-02-28 00:00:00"), 2);
        assert_eq!(days("2023-03-01 00:00:00") - days("2023-02-28 00:00:00"), 1);
    }
}
