//! The kinds of requests.

use std::str::FromStr;

/// One kind of request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// A request with one answer of a few hundred bytes.
    Plain,
    /// A stream of this many events, one for each token, and one event that ends it.
    Stream(usize),
    /// A request with a body of 60 kB and a plain answer.
    Long,
}

impl FromStr for Case {
    type Err = ();

    fn from_str(name: &str) -> Result<Case, ()> {
        match name {
            "plain" => Ok(Case::Plain),
            "long" => Ok(Case::Long),
            _ => name
                .strip_prefix("stream-")
                .and_then(|tokens| tokens.parse().ok())
                .map(Case::Stream)
                .ok_or(()),
        }
    }
}

impl Case {
    /// The whole request, head and body.
    pub fn request(self, host: &str) -> Vec<u8> {
        let prompt = match self {
            Case::Long => "many words ".repeat(60_000 / 11),
            _ => "Why is the sky blue, and the sea?".to_owned(),
        };
        let (stream, tokens) = match self {
            Case::Stream(tokens) => (true, tokens),
            _ => (false, 16),
        };
        let body = serde_json::json!({
            "model": "mock",
            "messages": [{"role": "user", "content": prompt}],
            "stream": stream,
            "max_tokens": tokens,
            "temperature": 0,
        })
        .to_string();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        [head, body].concat().into_bytes()
    }

    /// Number of events in a complete answer.
    pub fn events(self) -> usize {
        match self {
            Case::Stream(tokens) => tokens + 1,
            _ => 0,
        }
    }
}
