//! Output of a command on standard output. The command exits if its reader is gone.

use std::io::{self, Write};
use std::{fmt, process};

/// Writes a line; see the macro `say!`.
pub fn line(text: fmt::Arguments<'_>) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        if error.kind() != io::ErrorKind::BrokenPipe {
            eprintln!("error: standard output cannot be written: {error}");
        }
        process::exit(1);
    }
}

/// `println!` that does not panic if the reader is gone.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::obs::output::line(format_args!($($text)*)) };
}
