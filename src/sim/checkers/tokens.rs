//! The right tokens, each once and in order: an answer is the beginning of what it must be at any moment, and
//! all of it when the request ends well.

use super::{Checked, Checker, Finding};

/// What an engine told next of an answer, whoever listens; `expected` is what it has to tell still.
pub fn next(id: usize, process: usize, token: u32, expected: Option<u32>) -> Checked {
    if expected == Some(token) {
        return Ok(());
    }
    let what = format!(
        "process {process} has the token {token} for request {id} where {expected:?} is right"
    );
    Err(Finding::about(Checker::Tokens, id, what))
}

/// What a client has of an answer, which may go on.
pub fn begins(id: usize, answer: &[u32], expected: &[u32]) -> Checked {
    match expected.starts_with(answer) {
        true => Ok(()),
        false => {
            let what =
                format!("request {id} got the tokens {answer:?} and should get {expected:?}");
            Err(Finding::about(Checker::Tokens, id, what))
        }
    }
}

/// What a client has of an answer that ended well.
pub fn whole(id: usize, answer: &[u32], expected: &[u32]) -> Checked {
    match answer.len() == expected.len() {
        true => begins(id, answer, expected),
        false => {
            let what =
                format!("request {id} ended well with {answer:?} and should have got {expected:?}");
            Err(Finding::about(Checker::Tokens, id, what))
        }
    }
}
