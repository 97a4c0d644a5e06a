//! The requests of a load, and their arrival times.
//!
//! Owns: times and lengths of all requests. Prompts are generated on demand, because all prompts
//! together would take more memory than everything else. The id of a block in a trace determines
//! its tokens, so prompts share prefixes as in the trace. All other tokens are unique to their
//! request. Not here: reading traces (`trace`).

use super::cost::VOCAB;
use crate::routing::demand::Demand;
use crate::stdx::event_queue::{Nanos, SECOND};
use crate::stdx::rng::{Rng, scramble};

/// Tokens of a block of a trace (Mooncake, FAST'25).
pub const BLOCK: u32 = 512;

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestArrival {
    /// Time of arrival.
    pub at: Nanos,
    /// Tokens of its prompt.
    pub input: u32,
    /// Tokens of its answer.
    pub output: u32,
    /// Its order in queues: the lowest number is the first.
    pub priority: i32,
    /// Ids of the blocks at the beginning of its prompt. The last block can be incomplete.
    pub blocks: Box<[u64]>,
}

/// All requests, in order of time.
#[derive(Clone, PartialEq, Debug)]
pub struct Arrivals {
    list: Vec<RequestArrival>,
    /// Seed of the tokens outside blocks.
    seed: u64,
}

/// Synthetic requests. Lengths are uniform from 1 to nearly twice the mean.
#[derive(Clone, PartialEq, Debug)]
pub struct Drawn {
    /// Number of requests.
    pub requests: usize,
    /// Mean number per second; the gaps are exponential.
    pub rate: f64,
    /// Mean tokens of a prompt.
    pub input: u32,
    /// Mean tokens of an answer.
    pub output: u32,
}

impl Arrivals {
    /// All requests.
    pub fn list(&self) -> &[RequestArrival] {
        &self.list
    }

    /// Tokens of the longest request, prompt and answer.
    pub fn longest(&self) -> u32 {
        self.list.iter().map(|arrival| arrival.input + arrival.output).max().unwrap_or(1)
    }

    /// The demand that a router sees: the prompt's length, and the complete blocks of the trace at
    /// its beginning.
    pub fn work(&self, index: usize) -> Demand {
        let RequestArrival { input, ref blocks, .. } = self.list[index];
        let whole = (input / BLOCK).min(blocks.len() as u32) as usize;
        // An id is small and local to the file. A name uses all bits.
        let blocks = blocks[..whole].iter().map(|&id| scramble(id)).collect();
        Demand { sequences: 1, samples: 1, tokens: input, block: BLOCK, blocks }
    }

    /// The prompt of a request.
    pub fn prompt(&self, index: usize) -> Vec<u32> {
        let arrival = &self.list[index];
        let mut prompt = Vec::with_capacity(arrival.input as usize);
        for &id in &arrival.blocks {
            let left = arrival.input as usize - prompt.len();
            prompt.extend(tokens(scramble(id) ^ 0xb10c).take(left.min(BLOCK as usize)));
        }
        let left = arrival.input as usize - prompt.len();
        prompt.extend(tokens(scramble(self.seed ^ index as u64)).take(left));
        prompt
    }

    /// The first `count` requests.
    pub fn first(&self, count: usize) -> Arrivals {
        Arrivals { list: self.list[..count.min(self.list.len())].to_vec(), seed: self.seed }
    }

    /// The same requests, `factor` times as fast.
    pub fn faster(&self, factor: f64) -> Arrivals {
        let faster = |arrival: &RequestArrival| RequestArrival {
            at: (arrival.at as f64 / factor).round() as Nanos,
            ..arrival.clone()
        };
        Arrivals { list: self.list.iter().map(faster).collect(), seed: self.seed }
    }

    /// Sorts these requests by time.
    pub fn new(mut list: Vec<RequestArrival>, dice: &mut Rng) -> Arrivals {
        list.sort_by_key(|arrival| arrival.at);
        Arrivals { list, seed: dice.next_u64() }
    }
}

/// A sequence of tokens that this number determines.
fn tokens(seed: u64) -> impl Iterator<Item = u32> {
    const BITS: u32 = VOCAB.ilog2();
    const _: () = assert!(VOCAB.is_power_of_two());
    (0..).flat_map(move |word| {
        let word = scramble(seed.wrapping_add(word));
        (0..64 / BITS).map(move |part| (word >> (part * BITS)) as u32 % VOCAB)
    })
}

impl Drawn {
    /// Draws the requests.
    pub fn draw(&self, dice: &mut Rng) -> Arrivals {
        let mut at = 0.0;
        let list = (0..self.requests).map(|_| {
            let share = (dice.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
            at += -(1.0 - share).ln() / self.rate;
            RequestArrival {
                at: (at * SECOND as f64) as Nanos,
                input: dice.range_u32(1, 2 * self.input - 1),
                output: dice.range_u32(1, 2 * self.output - 1),
                priority: 0,
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

    #[test]
    fn prompts_begin_alike_as_far_as_their_blocks_do() {
        let line = |input, blocks: &[u64]| RequestArrival {
            at: 0,
            input,
            output: 1,
            priority: 0,
            blocks: blocks.into(),
        };
        let list = vec![
            line(1100, &[7, 8, 9]),
            line(1030, &[7, 8, 9]),
            line(1100, &[7, 9]),
            line(600, &[7]),
        ];
        let arrivals = Arrivals::new(list, &mut Rng::new(1));
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
    fn drawn_requests_have_the_mean_that_was_asked_for() {
        let drawn = Drawn { requests: 20_000, rate: 50.0, input: 64, output: 16 };
        let arrivals = drawn.draw(&mut Rng::new(3));
        let mean = |of: fn(&RequestArrival) -> u32| {
            arrivals.list().iter().map(|arrival| f64::from(of(arrival))).sum::<f64>() / 20_000.0
        };
        assert!((mean(|arrival| arrival.input) - 64.0).abs() < 1.0);
        assert!((mean(|arrival| arrival.output) - 16.0).abs() < 0.3);
        let seconds = arrivals.list().last().unwrap().at as f64 / SECOND as f64;
        assert!((seconds - 400.0).abs() < 12.0, "{seconds}");
    }
}
