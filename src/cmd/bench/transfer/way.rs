//! The two ways to a hand-off, and what the bench does with either of them.
//!
//! Thread: the bench's own, in place of an engine. Invariants: there is one request at a time, and
//! each wait has a deadline. Not here: the ways (`side`, `library`), what is measured (`source`,
//! `destination`).

use super::case::{Case, LISTS, TransferEnd};
use crate::ids::PageId;
use serde::{Deserialize, Serialize};

/// How the bench uses the transfer engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Way {
    /// It drives an agent: its thread is `ctl`.
    Direct,
    /// It calls the functions of the C library, as the engine of a guest does.
    Library,
}

/// The source's end of hand-offs.
pub trait SourceEnd {
    /// Offers the KV of a prompt.
    fn offer(&mut self, room: u64, ids: &[u32]) -> Result<(), String>;
    /// Waits for the destination, and leases the pages of the prompt.
    fn meet(&mut self, pages: &[PageId]) -> Result<(), String>;
    /// All KV is computed: sends it.
    fn send(&mut self) -> Result<(), String>;
    /// Waits until the hand-off has ended, and frees its slot. An error: the KV has not landed.
    fn end(&mut self) -> Result<(), String>;
}

/// The destination's end of hand-offs.
pub trait DestinationEnd {
    /// Asks for the KV of a prompt.
    fn wish(&mut self, room: u64, ids: &[u32]) -> Result<(), String>;
    /// Leases the pages of the prompt.
    fn lease(&mut self, pages: &[PageId]) -> Result<(), String>;
    /// Waits until the KV has landed. Returns the time.
    fn land(&mut self) -> Result<u64, String>;
    /// Waits until the hand-off has ended, and frees its slot.
    fn end(&mut self) -> Result<(), String>;
}

/// The prompts of a row's runs. They are made before the runs, so that no run makes them.
#[derive(Debug)]
pub struct BenchPrompts {
    /// The token ids of each prompt.
    pub ids: Vec<u32>,
    lists: Vec<Vec<PageId>>,
}

impl BenchPrompts {
    /// The prompts of one side.
    pub fn new(case: &Case, end: TransferEnd) -> BenchPrompts {
        let lists = (0..LISTS).map(|list| case.list(end, list)).collect();
        BenchPrompts { ids: vec![1; case.tokens() as usize], lists }
    }

    /// The pages of the prompt in this room.
    pub fn pages(&self, room: u64) -> &[PageId] {
        &self.lists[(room % u64::from(LISTS)) as usize]
    }
}
