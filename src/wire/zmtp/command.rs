//! Bodies of commands: READY with its metadata, ERROR, PING, PONG. Others are skipped.

use super::{Socket, ZmtpError};

/// Longest context of a PING (RFC 37).
pub const PING_CONTEXT_MAX: usize = 16;

/// A parsed command.
#[derive(PartialEq, Eq, Debug)]
pub enum Command<'a> {
    /// The peer's half of the NULL handshake.
    Ready { socket: Socket, identity: &'a [u8] },
    /// The peer refuses the connection.
    Error { reason: &'a [u8] },
    /// Asks for a PONG with the same context.
    Ping { context: &'a [u8] },
    /// Answers a PING.
    Pong { context: &'a [u8] },
    /// A command of another socket type or of a later version.
    Unknown,
}

impl<'a> Command<'a> {
    /// Reads a command frame's body.
    pub fn parse(body: &'a [u8]) -> Result<Command<'a>, ZmtpError> {
        let (name, body) = split_short(body).ok_or(ZmtpError::Command("without a name"))?;
        match name {
            b"READY" => ready(body),
            b"ERROR" => match split_short(body) {
                Some((reason, [])) => Ok(Command::Error { reason }),
                _ => Err(ZmtpError::Command("ERROR")),
            },
            // The first two bytes are the time to live. They are ignored, because the caller sets
            // the deadlines.
            b"PING" => match body.get(2..) {
                Some(context) if context.len() <= PING_CONTEXT_MAX => Ok(Command::Ping { context }),
                _ => Err(ZmtpError::Command("PING")),
            },
            b"PONG" => Ok(Command::Pong { context: body }),
            _ => Ok(Command::Unknown),
        }
    }

    /// Appends the body of READY.
    pub fn write_ready(socket: Socket, identity: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"\x05READY");
        property(b"Socket-Type", socket.name().as_bytes(), out);
        property(b"Identity", identity, out);
    }

    /// Appends the body of ERROR; the reason has at most 255 bytes.
    pub fn write_error(reason: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\x05ERROR");
        out.push(reason.len() as u8);
        out.extend_from_slice(reason.as_bytes());
    }

    /// Appends the body of PING. The peer may close the connection if nothing follows within
    /// `ttl_tenths` tenths of a second (0: never).
    pub fn write_ping(ttl_tenths: u16, context: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"\x04PING");
        out.extend_from_slice(&ttl_tenths.to_be_bytes());
        out.extend_from_slice(context);
    }

    /// Appends the body of PONG.
    pub fn write_pong(context: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"\x04PONG");
        out.extend_from_slice(context);
    }
}

fn ready(mut rest: &[u8]) -> Result<Command<'_>, ZmtpError> {
    const MALFORMED: ZmtpError = ZmtpError::Command("READY");
    let mut socket = None;
    let mut identity = &[][..];
    while !rest.is_empty() {
        let (name, tail) = split_short(rest).ok_or(MALFORMED)?;
        let (len, tail) = tail.split_first_chunk().ok_or(MALFORMED)?;
        let (value, tail) =
            tail.split_at_checked(u32::from_be_bytes(*len) as usize).ok_or(MALFORMED)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket = Some(Socket::from_name(value).ok_or(ZmtpError::SocketType)?);
        } else if name.eq_ignore_ascii_case(b"Identity") {
            identity = value;
        }
        rest = tail;
    }
    if identity.len() > 255 {
        return Err(MALFORMED);
    }
    Ok(Command::Ready { socket: socket.ok_or(ZmtpError::SocketType)?, identity })
}

/// Splits off a length byte and that many bytes.
fn split_short(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&len, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(len))
}

fn property(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.push(name.len() as u8);
    out.extend_from_slice(name);
    out.extend_from_slice(&(value.len() as u32).to_be_bytes());
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_round_trip() {
        let mut body = Vec::new();
        Command::write_ready(Socket::Router, b"me", &mut body);
        let ready = Command::Ready { socket: Socket::Router, identity: b"me" };
        assert_eq!(Command::parse(&body), Ok(ready));
        for cut in 7..body.len() {
            // A cut between two properties leaves a shorter, valid list.
            if cut != 6 + 12 + 4 + 6 {
                assert!(Command::parse(&body[..cut]).is_err(), "{cut}");
            }
        }
        body.clear();
        Command::write_ping(7, b"context", &mut body);
        assert_eq!(Command::parse(&body), Ok(Command::Ping { context: b"context" }));
        body.clear();
        Command::write_pong(b"", &mut body);
        assert_eq!(Command::parse(&body), Ok(Command::Pong { context: b"" }));
        body.clear();
        Command::write_error("no", &mut body);
        assert_eq!(Command::parse(&body), Ok(Command::Error { reason: b"no" }));
    }

    #[test]
    fn metadata_names_ignore_case_and_unknown_ones_are_skipped() {
        let mut body = b"\x05READY".to_vec();
        property(b"X-Other", b"value", &mut body);
        property(b"socket-TYPE", b"DEALER", &mut body);
        let ready = Command::Ready { socket: Socket::Dealer, identity: b"" };
        assert_eq!(Command::parse(&body), Ok(ready));
    }

    #[test]
    fn an_unreadable_command_is_refused_and_an_unknown_name_is_skipped() {
        assert_eq!(Command::parse(b""), Err(ZmtpError::Command("without a name")));
        assert_eq!(Command::parse(b"\x09PING"), Err(ZmtpError::Command("without a name")));
        assert_eq!(Command::parse(b"\x04PING\0"), Err(ZmtpError::Command("PING")));
        assert_eq!(
            Command::parse(b"\x04PING\0\x000123456789abcdefg"),
            Err(ZmtpError::Command("PING"))
        );
        assert_eq!(Command::parse(b"\x05READY"), Err(ZmtpError::SocketType));
        let mut body = b"\x05READY".to_vec();
        property(b"Socket-Type", b"PUB", &mut body);
        assert_eq!(Command::parse(&body), Err(ZmtpError::SocketType));
        assert_eq!(Command::parse(b"\x09SUBSCRIBEtopic"), Ok(Command::Unknown));
    }
}
