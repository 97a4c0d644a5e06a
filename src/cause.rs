//! Why a request failed: the one taxonomy, the same on the wire, in HTTP status, metrics and log.
//!
//! Owns: the table of causes. What may be retried is decided here and nowhere else.

use std::fmt;

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $status:literal, $retry:literal;)*) => {
        /// A typed failure. The number has five bits and travels in the status word and in messages.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum Cause {
            $($(#[$doc])* $name = $number,)*
        }

        impl Cause {
            /// All causes in order of their numbers.
            pub const ALL: &'static [Cause] = &[$(Cause::$name),*];

            /// The cause of a number that came from outside; an unknown one is `Internal`.
            pub fn from_number(number: u8) -> Cause {
                match number {
                    $($number => Cause::$name,)*
                    _ => Cause::Internal,
                }
            }

            /// The cause of this name, if it is one.
            pub fn named(name: &str) -> Option<Cause> {
                Cause::ALL.iter().find(|cause| cause.name() == name).copied()
            }

            /// Label in metrics, log and error bodies.
            pub const fn name(self) -> &'static str {
                match self { $(Cause::$name => $text,)* }
            }

            /// HTTP status that a client sees.
            pub const fn http_status(self) -> u16 {
                match self { $(Cause::$name => $status,)* }
            }

            /// Whether another pair may be tried before the first token has left.
            pub const fn may_be_retried(self) -> bool {
                match self { $(Cause::$name => $retry,)* }
            }
        }
    };
}

causes! {
    /// Who asked has closed its connection.
    ClientGone = 1, "client_gone", 499, false;
    /// The request itself is wrong: the same everywhere.
    Refused = 2, "refused", 400, false;
    /// A queue or a pool is full; another worker may have room.
    Overloaded = 3, "overloaded", 429, true;
    /// The worker at the other end of the hand-off is dead or cut off.
    PeerLost = 4, "peer_lost", 502, true;
    /// A deadline passed.
    Deadline = 5, "deadline", 408, false;
    /// The two legs do not mean the same request: token count, hash or page count differ.
    Mismatch = 6, "mismatch", 400, false;
    /// Bytes or a record failed their check.
    Corrupt = 7, "corrupt", 502, true;
    /// The other leg of the request ended first.
    OtherLeg = 8, "other_leg", 502, true;
    /// The worker is draining.
    Draining = 9, "draining", 503, true;
    /// A fault of ours.
    Internal = 10, "internal", 500, true;
    /// The two workers can hand nothing over: key, role, model, KV layout or transports differ. The logs of
    /// both name the field.
    Incompatible = 11, "incompatible", 502, true;
    /// The other worker's NIC let nothing be written where it had said: key, bounds or permission.
    Denied = 12, "denied", 502, true;
    /// A NIC could not send it, or sent it again and again and it was never acknowledged: the two workers reach each
    /// other over their control link, and not over the fabric.
    Unreachable = 13, "unreachable", 502, true;
    /// Stopped where it was, since another transfer of the same session broke.
    Flushed = 14, "flushed", 502, true;
    /// Somebody asked for its end.
    Aborted = 15, "aborted", 499, false;
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_fit_five_bits_and_round_trip() {
        for &cause in Cause::ALL {
            assert!((cause as u8) < 32);
            assert_eq!(Cause::from_number(cause as u8), cause);
        }
        assert_eq!(Cause::from_number(31), Cause::Internal);
    }
}
