//! What a cluster of workers needs beside the hand-off. Without I/O.

pub mod registry;
