//! A prefill and a decode worker that compute nothing. Each answers at once. Each event of a stream
//! is a separate write, as in an engine.
//!
//! Thread: one for both workers.
//! Invariants: they answer the queries that routers send to workers, and accept only bodies with a
//! `Content-Length`.

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Prefill,
    Decode,
}

struct Caller {
    role: Role,
    stream: TcpStream,
    input: Vec<u8>,
    output: Vec<u8>,
}

/// Serves until the process is killed. With `hold`, the decode worker sends one event of each
/// stream and keeps the stream open.
pub fn run(prefill: u16, decode: u16, hold: bool) -> io::Result<()> {
    let mut poll = Poll::new()?;
    let roles = [(Role::Prefill, prefill), (Role::Decode, decode)];
    let mut listeners = Vec::new();
    for (token, (role, port)) in roles.into_iter().enumerate() {
        let mut listener = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
        poll.registry().register(&mut listener, Token(token), Interest::READABLE)?;
        listeners.push((role, listener));
    }
    let mut callers: HashMap<Token, Caller> = HashMap::new();
    let mut next = roles.len();
    let mut events = Events::with_capacity(1024);
    let mut buffer = vec![0; 256 << 10];
    println!("ready");
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            let token = event.token();
            let Some((role, listener)) = listeners.get(token.0) else {
                let Some(caller) = callers.get_mut(&token) else { continue };
                if !caller.turn(&mut buffer, hold).unwrap_or(false) {
                    callers.remove(&token);
                }
                continue;
            };
            while let Ok((mut stream, _)) = listener.accept() {
                stream.set_nodelay(true)?;
                let token = Token(next);
                next += 1;
                poll.registry().register(
                    &mut stream,
                    token,
                    Interest::READABLE | Interest::WRITABLE,
                )?;
                callers.insert(
                    token,
                    Caller { role: *role, stream, input: Vec::new(), output: Vec::new() },
                );
            }
        }
    }
}

impl Caller {
    /// Reads and answers. Returns whether the connection is still open.
    fn turn(&mut self, buffer: &mut [u8], hold: bool) -> io::Result<bool> {
        self.flush()?;
        loop {
            match self.stream.read(buffer) {
                Ok(0) => return Ok(false),
                Ok(got) => self.input.extend_from_slice(&buffer[..got]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        while self.request(hold)? {}
        Ok(true)
    }

    /// Answers one request if it has arrived completely. Returns whether it has.
    fn request(&mut self, hold: bool) -> io::Result<bool> {
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut head = httparse::Request::new(&mut fields);
        let head_len = match head.parse(&self.input) {
            Ok(httparse::Status::Complete(len)) => len,
            Ok(httparse::Status::Partial) => return Ok(false),
            // For example, the preface of HTTP/2.
            Err(_) => return Err(io::ErrorKind::InvalidData.into()),
        };
        let length = head
            .headers
            .iter()
            .find(|field| field.name.eq_ignore_ascii_case("content-length"))
            .and_then(|field| std::str::from_utf8(field.value).ok()?.parse::<usize>().ok())
            .unwrap_or(0);
        if self.input.len() < head_len + length {
            return Ok(false);
        }
        let (path, posted) =
            (head.path.unwrap_or_default().to_owned(), head.method == Some("POST"));
        let rest = self.input.split_off(head_len + length);
        let request = std::mem::replace(&mut self.input, rest);
        if posted {
            self.generate(&request[head_len..], hold)?;
        } else {
            self.tell(path.split('?').next().unwrap_or_default())?;
        }
        Ok(true)
    }

    fn tell(&mut self, path: &str) -> io::Result<()> {
        let mode = if self.role == Role::Prefill { "prefill" } else { "decode" };
        let told = match path {
            "/health" => json!({}),
            "/v1/models" => {
                json!({"object": "list",
                       "data": [{"id": "mock", "object": "model", "owned_by": "sglang"}]})
            }
            "/server_info" | "/get_server_info" => {
                json!({"model_path": "mock", "served_model_name": "mock",
                       "disaggregation_mode": mode, "tp_size": 1, "dp_size": 1})
            }
            "/model_info" | "/get_model_info" => {
                json!({"model_path": "mock", "is_generation": true})
            }
            _ => {
                return self.send(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\
                      Content-Type: application/json\r\n\r\n{}",
                );
            }
        };
        self.json(&told)
    }

    fn generate(&mut self, body: &[u8], hold: bool) -> io::Result<()> {
        let asked = Asked::of(body);
        let tokens = if self.role == Role::Prefill { 1 } else { asked.tokens };
        if !asked.stream {
            return self.send(whole(tokens).as_bytes());
        }
        self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
              Transfer-Encoding: chunked\r\n\r\n",
        )?;
        let event = "data: {\"id\":\"chatcmpl-0123456789abcdef\",\
                     \"object\":\"chat.completion.chunk\",\"created\":1790000000,\
                     \"model\":\"mock\",\"choices\":[{\"index\":0,\
                     \"delta\":{\"content\":\" blue\"},\"logprobs\":null,\
                     \"finish_reason\":null}]}\n\n";
        let chunk = format!("{:x}\r\n{event}\r\n", event.len());
        for _ in 0..tokens {
            self.send(chunk.as_bytes())?;
            if hold && self.role == Role::Decode {
                return Ok(());
            }
        }
        self.send(b"e\r\ndata: [DONE]\n\n\r\n")?;
        self.send(b"0\r\n\r\n")
    }

    fn json(&mut self, told: &Value) -> io::Result<()> {
        self.send(with_head(&told.to_string()).as_bytes())
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if !self.output.is_empty() {
            self.output.extend_from_slice(bytes);
            return Ok(());
        }
        let mut sent = 0;
        while sent < bytes.len() {
            match self.stream.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.output.extend_from_slice(&bytes[sent..]);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        let waiting = std::mem::take(&mut self.output);
        self.send(&waiting)
    }
}

fn with_head(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A complete answer with this many tokens.
fn whole(tokens: usize) -> String {
    let text = " blue because it scatters".repeat(tokens.div_ceil(4));
    with_head(&format!(
        "{{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\
         \"created\":1790000000,\"model\":\"mock\",\
         \"choices\":[{{\"index\":0,\
         \"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}},\
         \"logprobs\":null,\"finish_reason\":\"length\"}}],\
         \"usage\":{{\"prompt_tokens\":12,\"completion_tokens\":{tokens},\
         \"total_tokens\":{}}}}}",
        12 + tokens
    ))
}

/// The fields of a body that matter here. Each router writes bodies in its own form, so the code
/// searches for the fields. The search must be cheap, so that a long body costs time only in the
/// router.
struct Asked {
    stream: bool,
    tokens: usize,
}

impl Asked {
    fn of(body: &[u8]) -> Asked {
        // The fields are near the edges of a long body: only its middle is one long field.
        let edges = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(' ', "");
        let text = match body.len() {
            len @ 4096.. => edges(&body[..2048]) + &edges(&body[len - 2048..]),
            _ => edges(body),
        };
        let number = |name: &str| {
            let (_, rest) = text.split_once(name)?;
            let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
            rest[..end].parse().ok()
        };
        let tokens = ["\"max_completion_tokens\":", "\"max_tokens\":", "\"max_new_tokens\":"];
        Asked {
            stream: text.contains("\"stream\":true"),
            tokens: tokens.iter().find_map(|name| number(name)).unwrap_or(16),
        }
    }
}
