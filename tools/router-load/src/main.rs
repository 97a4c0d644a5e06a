//! The load for measuring a router: workers that answer at once, and clients that send the next
//! request after each answer.
//!
//! ```text
//! router-load workers --prefill PORT --decode PORT [--hold]
//! router-load ask --target HOST:PORT --case CASE --connections N --seconds S [--pid PID]
//! router-load hold --target HOST:PORT --streams N
//! ```
//! Each command runs in one thread. `ask` and `hold` print one line of JSON. `tools/router-figures`
//! runs all three.

mod answer;
mod ask;
mod case;
mod hold;
mod workers;

use std::collections::HashMap;
use std::process::ExitCode;

/// `--name value` pairs. A name without a value has an empty value.
struct Options(HashMap<String, String>);

impl Options {
    fn read(words: &[String]) -> Result<Options, String> {
        let mut found = HashMap::new();
        let mut words = words.iter().peekable();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").ok_or(format!("{word:?} is not an option"))?;
            let value = words.next_if(|next| !next.starts_with("--")).cloned().unwrap_or_default();
            found.insert(name.to_owned(), value);
        }
        Ok(Options(found))
    }

    fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    fn get<T: std::str::FromStr>(&self, name: &str) -> Result<T, String> {
        let value = self.0.get(name).ok_or(format!("--{name} is missing"))?;
        value.parse().map_err(|_| format!("--{name} {value:?} is not valid"))
    }
}

fn run(words: &[String]) -> Result<(), String> {
    let (command, rest) = words.split_first().ok_or("expected workers, ask or hold")?;
    let options = Options::read(rest)?;
    let told = match command.as_str() {
        "workers" => {
            workers::run(options.get("prefill")?, options.get("decode")?, options.has("hold"))
        }
        "ask" => ask::run(&ask::Load {
            target: options.get("target")?,
            case: options.get("case")?,
            connections: options.get("connections")?,
            seconds: options.get("seconds")?,
            pid: if options.has("pid") { Some(options.get("pid")?) } else { None },
        }),
        "hold" => hold::run(options.get("target")?, options.get("streams")?),
        _ => return Err(format!("{command:?} is neither workers, ask nor hold")),
    };
    told.map_err(|error| error.to_string())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("router-load: {error}");
            ExitCode::FAILURE
        }
    }
}
