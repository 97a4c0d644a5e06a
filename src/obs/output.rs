//! What a command tells on standard output. Where nobody reads it any more, the command ends: there is nobody to work for.

use std::fmt;
use std::io::{self, Write};
use std::process;

/// Writes a line; see [`say!`].
pub fn line(text: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        if error.kind() != io::ErrorKind::BrokenPipe {
            eprintln!("error: standard output cannot be written: {error}");
        }
        process::exit(1);
    }
}

/// `println!` that does not panic where the reader is gone.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::obs::output::line(format_args!($($text)*)) };
}
