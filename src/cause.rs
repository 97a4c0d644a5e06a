//! Why a request failed: one taxonomy for the wire, HTTP status, metrics and log.
//!
//! Owns: the table of causes, with the retries that each permits. `routing::attempts` decides which
//! workers the retry avoids.

use std::fmt;

macro_rules! causes {
    ($(
        $(#[$doc:meta])*
        $name:ident = $number:literal, $text:literal, $status:literal, $retry:ident;
    )*) => {
        /// A typed failure. The number has five bits and travels in the status word and in
        /// messages.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum Cause {
            $($(#[$doc])* $name = $number,)*
        }

        impl Cause {
            /// All causes in order of their numbers.
            pub const ALL: &'static [Cause] = &[$(Cause::$name),*];

            /// The cause of a number from outside. An unknown number is `Internal`.
            pub fn from_number(number: u8) -> Cause {
                match number {
                    $($number => Cause::$name,)*
                    _ => Cause::Internal,
                }
            }

            /// The position in [`Cause::ALL`].
            pub fn index(self) -> usize {
                let place = Cause::ALL.iter().position(|&cause| cause == self);
                place.expect("ALL holds all causes")
            }

            /// The cause with this name, if there is one.
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

            /// Whether another pair can be tried.
            pub const fn retry(self) -> Retry {
                match self { $(Cause::$name => Retry::$retry,)* }
            }
        }
    };
}

/// Whether a request that failed can be tried on another pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Retry {
    /// No: every worker would fail it, or it is not wanted any more.
    Never,
    /// At most once.
    Once,
    /// As often as the retry limits permit.
    Allowed,
}

causes! {
    /// The client has closed its connection.
    ClientGone = 1, "client_gone", 499, Never;
    /// The request itself is wrong. Every worker would refuse it.
    Refused = 2, "refused", 400, Never;
    /// A queue or a pool is full; another worker may have room.
    Overloaded = 3, "overloaded", 429, Allowed;
    /// The worker at the other end of the hand-off is dead or cut off.
    PeerLost = 4, "peer_lost", 502, Allowed;
    /// A deadline passed.
    Deadline = 5, "deadline", 408, Never;
    /// The two legs describe different requests: token count, hash or page count differ.
    Mismatch = 6, "mismatch", 400, Never;
    /// Bytes or a record failed their check.
    Corrupt = 7, "corrupt", 502, Allowed;
    /// The other leg of the request ended first.
    OtherLeg = 8, "other_leg", 502, Allowed;
    /// The worker is draining.
    Draining = 9, "draining", 503, Allowed;
    /// A fault of Baton. The request itself is the likely reason and would fail again.
    Internal = 10, "internal", 500, Once;
    /// The two workers cannot transfer KV: key, role, model, KV layout or transports differ. The
    /// logs of both workers name the field.
    Incompatible = 11, "incompatible", 502, Allowed;
    /// The NIC of the other worker denied a write to its own address: key, bounds or permission.
    Denied = 12, "denied", 502, Allowed;
    /// A NIC could not send, or its retries were never acknowledged. The two workers reach each
    /// other over their control link, but not over the fabric.
    Unreachable = 13, "unreachable", 502, Allowed;
    /// The transfer was stopped because another transfer of the same session failed.
    Flushed = 14, "flushed", 502, Allowed;
    /// The worker received an abort for the request.
    Aborted = 15, "aborted", 499, Never;
    /// The grammar of the request needs more work or memory than allowed.
    Grammar = 16, "grammar", 400, Never;
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
