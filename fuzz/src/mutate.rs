//! Fuzzing without coverage: replays a corpus, then mutates it. A run depends only on its seed, so
//! it gives the same result on every machine.

use crate::targets;
use baton::stdx::rng::{INCREMENT, mix};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Longest generated input in bytes.
const INPUT_MAX: usize = 4 << 10;
/// Typical limits of ranges.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "-0.5",
    "2",
    "40",
    "257",
    "65536",
    "4294967296",
    "18446744073709551615",
    "1e999",
    "ffffffffffffffff",
    "x",
];
/// Mutated inputs that are kept to be mutated again.
const POOL_MAX: usize = 64;

/// The command line.
pub struct Options {
    runs: u64,
    /// The seed of mutated inputs.
    pub seed: u64,
    /// A mistake that must be found.
    pub mistake: Option<String>,
    /// The only target.
    pub target: Option<String>,
    file: Option<PathBuf>,
}

impl Options {
    /// Reads a command line.
    pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { runs: 500_000, seed: 1, mistake: None, target: None, file: None };
        while let Some(arg) = args.next() {
            let number = |value: Option<String>| {
                let value = value.ok_or_else(|| format!("{arg} needs a number"))?;
                value.parse().map_err(|_| format!("{arg} needs a number, not {value}"))
            };
            match arg.as_str() {
                "--runs" => options.runs = number(args.next())?,
                "--seed" => options.seed = number(args.next())?,
                "--plant" => options.mistake = Some(args.next().ok_or("--plant needs a mistake")?),
                _ if arg.starts_with('-') => return Err(format!("unknown option {arg}")),
                _ if options.target.is_none() => options.target = Some(arg),
                _ => options.file = Some(arg.into()),
            }
        }
        let known = |name: &String| targets::ALL.iter().any(|(target, _)| target == name);
        match options.target.as_ref().filter(|name| !known(name)) {
            Some(name) => Err(format!("no target is called {name}")),
            None => Ok(options),
        }
    }
}

/// Runs the selected targets. Returns whether none of them panics.
pub fn all(options: &Options) -> bool {
    let wanted = |name: &str| options.target.as_deref().is_none_or(|target| target == name);
    for &(name, target) in targets::ALL.iter().filter(|(name, _)| wanted(name)) {
        let result = match &options.file {
            Some(file) => replay(target, file),
            None => search(name, target, options),
        };
        match result {
            Ok(report) => println!("{name}: {report}"),
            Err(problem) => {
                eprintln!("{name}: {problem}");
                return false;
            }
        }
    }
    true
}

fn replay(target: fn(&[u8]), file: &Path) -> Result<String, String> {
    let input = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    crate::run(target, &input);
    Ok(format!("{} passes", file.display()))
}

fn search(name: &str, target: fn(&[u8]), options: &Options) -> Result<String, String> {
    let inputs = inputs(name, options.seed).map_err(|error| format!("its corpus: {error}"))?;
    let replayed = inputs.corpus.len();
    let runs = if targets::SLOW.contains(&name) { options.runs / 20 } else { options.runs };
    for input in inputs.take(replayed + runs as usize) {
        check(name, target, &input)?;
    }
    Ok(format!("{replayed} inputs replayed, {runs} made with seed {}", options.seed))
}

/// The inputs of a target without end: its corpus, then mutated ones.
pub fn inputs(name: &str, seed: u64) -> io::Result<Inputs> {
    let corpus = corpus(name)?;
    Ok(Inputs { replayed: 0, pool: corpus.clone(), corpus, rng: Rng(seed) })
}

/// See [`inputs`].
pub struct Inputs {
    corpus: Vec<Vec<u8>>,
    replayed: usize,
    /// The corpus, and some mutated inputs.
    pool: Vec<Vec<u8>>,
    rng: Rng,
}

impl Iterator for Inputs {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if let Some(input) = self.corpus.get(self.replayed) {
            self.replayed += 1;
            return Some(input.clone());
        }
        let Inputs { corpus, pool, rng, .. } = self;
        let mut input = rng.pick(pool).clone();
        for _ in 0..1 + rng.below(4) {
            mutate(&mut input, pool, rng);
        }
        input.truncate(INPUT_MAX);
        if rng.below(16) == 0 {
            if pool.len() == corpus.len() + POOL_MAX {
                pool.remove(corpus.len());
            }
            pool.push(input.clone());
        }
        Some(input)
    }
}

fn check(name: &str, target: fn(&[u8]), input: &[u8]) -> Result<(), String> {
    catch_unwind(|| crate::run(target, input)).map_err(|_| match keep(name, input) {
        Ok(path) => format!("panics on {}", path.display()),
        Err(error) => format!("panics on {input:?}, which could not be kept: {error}"),
    })
}

/// The inputs of a target in order of their names, and an empty input.
fn corpus(name: &str) -> io::Result<Vec<Vec<u8>>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut paths =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    let mut inputs = paths.iter().map(fs::read).collect::<io::Result<Vec<_>>>()?;
    inputs.push(Vec::new());
    Ok(inputs)
}

/// Stores an input that failed.
fn keep(name: &str, input: &[u8]) -> io::Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(name);
    fs::create_dir_all(&folder)?;
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = folder.join(format!("{hash:016x}"));
    fs::write(&path, input)?;
    Ok(path)
}

fn mutate(input: &mut Vec<u8>, pool: &[Vec<u8>], rng: &mut Rng) {
    let at = rng.below(input.len() + 1);
    let end = (at + 1 + rng.below(32)).min(input.len());
    match rng.below(10) {
        0 if at < input.len() => input[at] ^= 1 << rng.below(8),
        1 if at < input.len() => input[at] = rng.byte(),
        2 => input.insert(at, rng.byte()),
        3 => drop(input.drain(at..end)),
        4 => {
            let copy = input[at..end].repeat(1 + rng.below(16));
            input.splice(at..at, copy);
        }
        5 => {
            let other = rng.pick(pool);
            let from = rng.below(other.len() + 1);
            let to = (from + 1 + rng.below(64)).min(other.len());
            input.splice(at..end, other[from..to].iter().copied());
        }
        6 | 7 => {
            // A number as in binary formats.
            let bits = 1u64 << rng.below(64);
            let number =
                [bits, bits - 1, bits.wrapping_neg(), at as u64, input.len() as u64][rng.below(5)];
            let width = 1 << rng.below(4);
            let bytes = if rng.below(4) == 0 {
                &number.to_be_bytes()[8 - width..]
            } else {
                &number.to_le_bytes()[..width]
            };
            let end = (at + width).min(input.len());
            input[at..end].copy_from_slice(&bytes[..end - at]);
        }
        _ => {
            // Replaces the next number completely, because readers often fail at lengths, counts
            // and ranges.
            let skip = |from: usize, digits: bool| {
                let rest = input[from..].iter().position(|byte| byte.is_ascii_digit() != digits);
                rest.map_or(input.len(), |offset| from + offset)
            };
            let start = skip(at, false);
            input.splice(start..skip(start, true), rng.pick(&NUMBERS).bytes());
        }
    }
}

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        let word = mix(self.0);
        self.0 = self.0.wrapping_add(INCREMENT);
        word
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
