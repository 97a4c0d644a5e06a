//! Ways for the bytes.

/// What a source's mover is given of a session.
#[derive(Debug)]
pub enum SourceBinding {
    /// No bytes move.
    Fake,
}

/// What a destination's mover is given of a session.
#[derive(Debug)]
pub enum DestinationBinding {
    /// No bytes move.
    Fake,
}
