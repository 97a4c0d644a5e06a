//! Frame headers: flags, then one or eight bytes of length.

use super::ZmtpError;

const MORE: u8 = 0b001;
const LONG: u8 = 0b010;
const COMMAND: u8 = 0b100;
/// Bytes of the longest header.
pub const HEADER_MAX: usize = 9;

/// The header before a frame's body.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// Another part of the same message follows.
    pub more: bool,
    /// A command, not a part of a message.
    pub command: bool,
    /// Bytes of the body: a claim until it is checked against a bound.
    pub len: u64,
}

impl FrameHeader {
    /// Bytes of the header that begins with `flags`.
    pub fn header_len(flags: u8) -> usize {
        if flags & LONG == 0 { 2 } else { HEADER_MAX }
    }

    /// Reads a whole header; `bytes` has exactly [`header_len`](Self::header_len) bytes.
    pub fn parse(bytes: &[u8]) -> Result<FrameHeader, ZmtpError> {
        let flags = bytes[0];
        let command = flags & COMMAND != 0;
        let more = flags & MORE != 0;
        if flags & !(MORE | LONG | COMMAND) != 0 || (command && more) {
            return Err(ZmtpError::Flags(flags));
        }
        let len = match bytes[1..] {
            [short] => u64::from(short),
            _ => u64::from_be_bytes(bytes[1..HEADER_MAX].try_into().expect("eight bytes")),
        };
        Ok(FrameHeader { more, command, len })
    }

    /// Appends the header, in its short form if the length fits a byte.
    pub fn write(self, out: &mut Vec<u8>) {
        let flags = if self.more { MORE } else { 0 } | if self.command { COMMAND } else { 0 };
        match u8::try_from(self.len) {
            Ok(len) => out.extend_from_slice(&[flags, len]),
            Err(_) => {
                out.push(flags | LONG);
                out.extend_from_slice(&self.len.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_in_both_forms() {
        for len in [0, 1, 255, 256, 1 << 20, u64::MAX] {
            for (more, command) in [(false, false), (true, false), (false, true)] {
                let header = FrameHeader { more, command, len };
                let mut bytes = Vec::new();
                header.write(&mut bytes);
                assert_eq!(bytes.len(), if len < 256 { 2 } else { 9 });
                assert_eq!(FrameHeader::header_len(bytes[0]), bytes.len());
                assert_eq!(FrameHeader::parse(&bytes), Ok(header));
            }
        }
    }

    #[test]
    fn reserved_bits_and_a_command_with_more_are_refused() {
        for flags in [8, 0x80, COMMAND | MORE] {
            assert_eq!(FrameHeader::parse(&[flags, 0]), Err(ZmtpError::Flags(flags)));
        }
    }
}
