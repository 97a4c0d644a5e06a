//! What comes, and when: the requests of a trace, or drawn ones.
//!
//! Owns: times and lengths of all requests. Prompts are made when they are asked for, since all at once would take more
//! memory than all else: the tokens of a trace's block follow from its id, so that prompts begin alike where those of the
//! trace did; all other tokens are no other request's.

use super::super::agenda::{MILLI, Nanos, SECOND};
use super::super::dice::Dice;
use super::super::model::mix;
use super::cost::VOCAB;
use crate::config::error::ConfigError;
use crate::limits::{CONTEXT_MAX, LOAD_REQUESTS_MAX};
use serde::Deserialize;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;

/// Tokens of a block of a trace. (Mooncake, FAST'25.)
const BLOCK: u32 = 512;

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub struct Arrival {
    /// When.
    pub at: Nanos,
    /// Tokens of its prompt.
    pub input: u32,
    /// Tokens of its answer.
    pub output: u32,
    /// The blocks its prompt begins with; the last may be cut.
    blocks: Box<[u64]>,
}

/// All requests, in order of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Arrivals {
    list: Vec<Arrival>,
    /// Of tokens that no block says.
    seed: u64,
}

/// A trace: a JSON object a line, as Mooncake writes them.
#[derive(Clone, PartialEq, Debug)]
pub struct File {
    /// Where.
    pub path: PathBuf,
    /// The first of it.
    pub most: Option<usize>,
    /// How much faster than it says requests come.
    pub speed: f64,
    /// By how much, of the trace's time, a request may come later.
    pub jitter: Nanos,
}

/// Requests of no trace, with lengths from 1 to nearly twice the mean, all alike.
#[derive(Clone, PartialEq, Debug)]
pub struct Drawn {
    /// How many.
    pub requests: usize,
    /// Of a second, on average: the gaps are exponential.
    pub rate: f64,
    /// Mean tokens of a prompt.
    pub input: u32,
    /// Mean tokens of an answer.
    pub output: u32,
}

/// A line of a trace.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    /// Of blocks; equal ones have equal tokens and equal blocks before them.
    #[serde(default)]
    hash_ids: Vec<u64>,
}

impl Arrivals {
    /// All of them.
    pub fn list(&self) -> &[Arrival] {
        &self.list
    }

    /// Tokens of the longest, prompt and answer.
    pub fn longest(&self) -> u32 {
        self.list.iter().map(|arrival| arrival.input + arrival.output).max().unwrap_or(1)
    }

    /// The prompt of a request.
    pub fn prompt(&self, index: usize) -> Vec<u32> {
        let arrival = &self.list[index];
        let mut prompt = Vec::with_capacity(arrival.input as usize);
        for &id in &arrival.blocks {
            let left = arrival.input as usize - prompt.len();
            prompt.extend(tokens(mix(id) ^ 0xb10c).take(left.min(BLOCK as usize)));
        }
        let left = arrival.input as usize - prompt.len();
        prompt.extend(tokens(mix(self.seed ^ index as u64)).take(left));
        prompt
    }

    fn new(mut list: Vec<Arrival>, dice: &mut Dice) -> Arrivals {
        list.sort_by_key(|arrival| arrival.at);
        Arrivals { list, seed: dice.draw() }
    }
}

/// Tokens that follow from a number.
fn tokens(seed: u64) -> impl Iterator<Item = u32> {
    const BITS: u32 = VOCAB.ilog2();
    const _: () = assert!(VOCAB.is_power_of_two());
    (0..).flat_map(move |word| {
        let word = mix(seed.wrapping_add(word));
        (0..64 / BITS).map(move |part| (word >> (part * BITS)) as u32 % VOCAB)
    })
}

impl File {
    /// Its requests.
    ///
    /// # Errors
    /// It cannot be read, or a line is no request.
    pub fn read(&self, dice: &mut Dice) -> Result<Arrivals, ConfigError> {
        let bad = |reason| ConfigError::File { flag: "--trace-file", path: self.path.clone(), reason };
        let file = fs::File::open(&self.path).map_err(|error| bad(error.to_string()))?;
        let most = self.most.unwrap_or(LOAD_REQUESTS_MAX);
        let mut list = Vec::new();
        for (line, text) in (1..).zip(BufReader::new(file).lines()) {
            let here = |reason: String| bad(format!("line {line}: {reason}"));
            let text = text.map_err(|error| here(error.to_string()))?;
            if text.trim().is_empty() {
                continue;
            }
            if list.len() == most {
                match self.most {
                    Some(_) => break,
                    None => return Err(here(format!("more than {LOAD_REQUESTS_MAX} requests"))),
                }
            }
            let mut arrival = parse(&text).and_then(arrival).map_err(here)?;
            let jitter = if self.jitter > 0 { dice.within(0, self.jitter) } else { 0 };
            arrival.at = ((arrival.at + jitter) as f64 / self.speed).round() as Nanos;
            list.push(arrival);
        }
        match self.most {
            _ if list.is_empty() => Err(bad("there is no request in it".into())),
            Some(most) if list.len() < most => {
                let limit = format!("there are {} in --trace-file {}", list.len(), self.path.display());
                Err(ConfigError::Value { flag: "--requests", value: most.to_string(), limit })
            }
            _ => Ok(Arrivals::new(list, dice)),
        }
    }
}

/// One line of a trace; the line's number is known better here than where it is read.
fn parse(text: &str) -> Result<Line, String> {
    serde_json::from_str(text).map_err(|error| {
        let (said, place) =
            (error.to_string(), format!(" at line {} column {}", error.line(), error.column()));
        format!("{}, at column {}", said.strip_suffix(&place).unwrap_or(&said), error.column())
    })
}

fn arrival(line: Line) -> Result<Arrival, String> {
    let Line { timestamp, input_length: input, output_length: output, hash_ids } = line;
    if !(0.0..=1e12).contains(&timestamp) {
        return Err(format!("timestamp {timestamp}: 0 to 10^12 milliseconds"));
    }
    for (name, length) in [("input_length", input), ("output_length", output)] {
        if !(1..=CONTEXT_MAX / 2).contains(&length) {
            return Err(format!("{name} {length}: 1 to {}", CONTEXT_MAX / 2));
        }
    }
    let blocks = input.div_ceil(BLOCK) as usize;
    if hash_ids.len() > blocks {
        let given = hash_ids.len();
        return Err(format!("{given} hash_ids: {input} tokens are {blocks} blocks of {BLOCK}"));
    }
    let at = (timestamp * MILLI as f64).round() as Nanos;
    Ok(Arrival { at, input, output, blocks: hash_ids.into() })
}

impl Drawn {
    /// Draws them.
    pub fn draw(&self, dice: &mut Dice) -> Arrivals {
        let mut at = 0.0;
        let list = (0..self.requests).map(|_| {
            let share = (dice.draw() >> 11) as f64 / (1_u64 << 53) as f64;
            at += -(1.0 - share).ln() / self.rate;
            Arrival {
                at: (at * SECOND as f64) as Nanos,
                input: dice.number(1, 2 * self.input - 1),
                output: dice.number(1, 2 * self.output - 1),
                blocks: Box::default(),
            }
        });
        let list = list.collect();
        Arrivals::new(list, dice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Arrival, String> {
        parse(text).and_then(arrival)
    }

    #[test]
    fn prompts_begin_alike_as_far_as_their_blocks_do() {
        let line = |input, blocks: &str| {
            parsed(&format!(
                r#"{{"timestamp":0,"input_length":{input},"output_length":1,"hash_ids":[{blocks}]}}"#
            ))
            .unwrap()
        };
        let list = vec![line(1100, "7,8,9"), line(1030, "7,8,9"), line(1100, "7,9"), line(600, "7")];
        let arrivals = Arrivals::new(list, &mut Dice::new(1));
        let prompts: Vec<_> = (0..4).map(|index| arrivals.prompt(index)).collect();
        let alike = |a: usize, b: usize| {
            prompts[a].iter().zip(&prompts[b]).take_while(|(one, other)| one == other).count()
        };
        assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [1100, 1030, 1100, 600]);
        assert_eq!(alike(0, 1), 1030);
        assert!((512..530).contains(&alike(0, 2)), "by chance a few tokens more");
        assert!((512..530).contains(&alike(0, 3)), "what no block says is its own");
        assert!(prompts.concat().iter().all(|&token| token < VOCAB));
    }

    #[test]
    fn a_line_that_is_no_request_is_refused_by_name() {
        let refused = |text| parsed(text).unwrap_err();
        assert!(refused(r#"{"timestamp":0,"input_length":0,"output_length":1}"#).contains("input_length 0"));
        assert!(refused(r#"{"timestamp":-1,"input_length":1,"output_length":1}"#).contains("timestamp -1"));
        assert_eq!(
            refused(r#"{"timestamp":0,"input_length":1}"#),
            "missing field `output_length`, at column 32"
        );
        assert!(refused(r#"{"timestamp":0,"input_length":1,"output_length":1,"x":1}"#).contains('x'));
        let blocks = refused(r#"{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1,2]}"#);
        assert!(blocks.contains("2 hash_ids"));
    }

    #[test]
    fn drawn_requests_have_the_mean_that_was_asked_for() {
        let drawn = Drawn { requests: 20_000, rate: 50.0, input: 64, output: 16 };
        let arrivals = drawn.draw(&mut Dice::new(3));
        let mean = |of: fn(&Arrival) -> u32| {
            arrivals.list().iter().map(|arrival| f64::from(of(arrival))).sum::<f64>() / 20_000.0
        };
        assert!((mean(|arrival| arrival.input) - 64.0).abs() < 1.0);
        assert!((mean(|arrival| arrival.output) - 16.0).abs() < 0.3);
        let seconds = arrivals.list().last().unwrap().at as f64 / SECOND as f64;
        assert!((seconds - 400.0).abs() < 12.0, "{seconds}");
    }
}
