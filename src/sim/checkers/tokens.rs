//! Answers have the right tokens, each once and in order. An answer is a prefix of the expected one
//! at any moment, and equal to it when the request ends successfully.

use super::{Checked, Checker, Finding};

/// Checks the next token that an engine reports for an answer. `expected` is the right token.
pub fn next(id: usize, process: usize, token: u32, expected: Option<u32>) -> Checked {
    if expected == Some(token) {
        return Ok(());
    }
    let what = format!(
        "process {process} has the token {token} for request {id} where {expected:?} is right"
    );
    Err(Finding::about(Checker::Tokens, id, what))
}

/// Checks the part of an answer that a client has, while the answer can continue.
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

/// Checks the answer of a request that has ended successfully.
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
