//! Replaces the product's transports: the same traits, which the models implement.

#[path = "../../../../src/transfer/transport/session_loss.rs"]
mod lost;

pub use lost::SessionLost;

use super::aux::AuxRecord;
use super::pages::PageLists;
use super::target::Target;
use crate::cause::Cause;
use crate::ids::{Generation, Room, SlotId};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

pub type SourceBinding = dyn SourceHalf;
pub type DestinationBinding = dyn DestinationHalf;

/// The memory that both sides of a worker's mover use.
#[derive(Clone, Debug)]
pub struct Memory {
    pub lists: Arc<PageLists>,
}

#[derive(Debug)]
pub struct Post {
    pub slot: SlotId,
    pub target: Target,
    pub tokens: Range<u32>,
    pub last: Option<AuxRecord>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionMode {
    Pushed,
    Pulled,
    Immediate,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Landing {
    Moved,
    Written,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Notice {
    pub slot: SlotId,
    pub generation: Generation,
    pub room: Room,
}

#[derive(Debug)]
pub struct Arrival;

pub trait SourceHalf: Send + Debug {
    fn completion(&self) -> CompletionMode;
    fn post(&mut self, memory: &Memory, post: &Post) -> Result<(), Full>;
    fn step(
        &mut self,
        _memory: &Memory,
        _completed: &mut dyn FnMut(SlotId),
    ) -> Result<bool, SessionLost> {
        Ok(false)
    }
    fn withdraw(&mut self, _slot: SlotId) -> bool {
        true
    }
    fn park(&mut self, _parked: bool) {}
}

pub trait DestinationHalf: Send + Debug {
    fn landing(&self) -> Landing {
        Landing::Moved
    }
    fn join(&mut self, _arrival: Arrival) {}
    fn step(&mut self, memory: &Memory, landings: &mut dyn Landings) -> Result<bool, SessionLost>;
    fn revoke(&mut self, _slot: SlotId) {}
    fn park(&mut self, _parked: bool) {}
    fn expect(&mut self, _notice: &Notice, _first: u32, _landings: &mut dyn Landings) {}
}

pub trait Landings {
    fn current(&self, slot: SlotId) -> Option<Notice>;
    fn expected(&mut self, notice: &Notice) -> Option<Range<u32>>;
    fn landed(&mut self, slot: SlotId, end: u32);
    fn complete(&mut self, slot: SlotId, aux: AuxRecord);
    fn lane_ended(&mut self, slot: SlotId, lane: u8, all: u32, aux: &AuxRecord);
    fn fail(&mut self, slot: SlotId, cause: Cause);
}

pub mod fake {
    use super::{CompletionMode, Full, Memory, Post, SourceHalf};

    /// Accepts every post.
    #[derive(Debug)]
    pub struct Fake;

    impl SourceHalf for Fake {
        fn completion(&self) -> CompletionMode {
            CompletionMode::Immediate
        }

        fn post(&mut self, _memory: &Memory, _post: &Post) -> Result<(), Full> {
            Ok(())
        }
    }
}
