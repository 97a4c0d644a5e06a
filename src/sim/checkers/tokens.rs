//! The right tokens, each once and in order: an answer is the beginning of what it must be at any moment, and
//! all of it when the request ends well.

/// What a client has of an answer, which may go on.
pub fn begins(id: usize, answer: &[u32], expected: &[u32]) -> Result<(), String> {
    match expected.starts_with(answer) {
        true => Ok(()),
        false => Err(format!("request {id} got the tokens {answer:?} and should get {expected:?}")),
    }
}

/// What a client has of an answer that ended well.
pub fn whole(id: usize, answer: &[u32], expected: &[u32]) -> Result<(), String> {
    match answer.len() == expected.len() {
        true => begins(id, answer, expected),
        false => Err(format!("request {id} ended well with {answer:?} and should have got {expected:?}")),
    }
}
