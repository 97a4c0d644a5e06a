//! The 64 bytes that open a connection. Each byte is checked when it arrives, so that the first
//! wrong byte ends the connection.

use super::ZmtpError;

/// Bytes of a greeting.
pub const GREETING_LEN: usize = 64;
const MECHANISM: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Ours: signature, version 3.1, NULL, not as-server, filler.
pub fn greeting() -> [u8; GREETING_LEN] {
    let mut bytes = [0; GREETING_LEN];
    bytes[0] = 0xff;
    bytes[8] = 1;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12..32].copy_from_slice(MECHANISM);
    bytes
}

/// Checks the first bytes of a peer's greeting. The eight bytes inside the signature and the filler
/// are ignored. A peer with a higher version uses ours.
pub fn check_greeting(bytes: &[u8]) -> Result<(), ZmtpError> {
    if bytes.first().is_some_and(|&first| first != 0xff)
        || bytes.get(9).is_some_and(|&last| last != 0x7f)
    {
        return Err(ZmtpError::Signature);
    }
    if let Some(&major) = bytes.get(10)
        && major < 3
    {
        return Err(ZmtpError::Version { major });
    }
    if bytes.get(12..32).is_some_and(|mechanism| mechanism != MECHANISM) {
        return Err(ZmtpError::Mechanism);
    }
    if bytes.get(32).is_some_and(|&as_server| as_server != 0) {
        return Err(ZmtpError::AsServer);
    }
    Ok(())
}

/// Whether a complete, checked greeting has version 3.1 or later, which supports PING.
pub fn knows_ping(bytes: &[u8; GREETING_LEN]) -> bool {
    bytes[10] > 3 || bytes[11] >= 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_greeting_is_accepted_at_every_length() {
        let bytes = greeting();
        for len in 0..=GREETING_LEN {
            assert_eq!(check_greeting(&bytes[..len]), Ok(()));
        }
        assert!(knows_ping(&bytes));
    }

    #[test]
    fn each_field_is_refused_as_soon_as_it_has_arrived() {
        for (at, value, len, error) in [
            (0, b'G', 1, ZmtpError::Signature),
            (9, 0, 10, ZmtpError::Signature),
            (10, 1, 11, ZmtpError::Version { major: 1 }),
            (12, b'P', 32, ZmtpError::Mechanism),
            (20, b'X', 32, ZmtpError::Mechanism),
            (32, 1, 33, ZmtpError::AsServer),
        ] {
            let mut bytes = greeting();
            bytes[at] = value;
            assert_eq!(check_greeting(&bytes[..len - 1]), Ok(()));
            assert_eq!(check_greeting(&bytes[..len]), Err(error));
        }
    }

    #[test]
    fn version_3_0_is_accepted_without_ping_and_later_ones_with() {
        for (major, minor, ping) in [(3, 0, false), (3, 2, true), (4, 0, true)] {
            let mut bytes = greeting();
            (bytes[10], bytes[11]) = (major, minor);
            assert_eq!(check_greeting(&bytes), Ok(()));
            assert_eq!(knows_ping(&bytes), ping);
        }
    }
}
