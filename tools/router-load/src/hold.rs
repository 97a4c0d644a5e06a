//! Many streams at once. Each is kept open after its first event.

use crate::case::Case;
use serde_json::json;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Opens the streams one after another, and prints a line when all are open. Holds them until
/// standard input ends.
pub fn run(target: SocketAddr, streams: usize) -> io::Result<()> {
    let request = Case::Stream(2).request(&target.to_string());
    let mut open = Vec::with_capacity(streams);
    for number in 0..streams {
        let mut stream = TcpStream::connect(target)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(&request)?;
        let mut got = Vec::new();
        let mut buffer = [0; 2048];
        while !got.windows(6).any(|text| text == b"data: ") {
            let count = stream.read(&mut buffer)?;
            got.extend_from_slice(&buffer[..count]);
            if count == 0 || !got.starts_with(b"HTTP/1.1 200") && got.len() > 12 {
                let text = String::from_utf8_lossy(&got).into_owned();
                return Err(io::Error::other(format!("stream {number}: {text}")));
            }
        }
        open.push(stream);
    }
    println!("{}", json!({"open": open.len()}));
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}
