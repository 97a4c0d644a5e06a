//! No bytes move and every hand-off says Success: for load tests of one role without its counterpart.

use crate::ids::SlotId;
use crate::model::logprobs::{Sampled, TopLogprobs};
use crate::transfer::aux::AuxRecord;
use crate::transfer::transport::{
    Completion, DestinationHalf, Full, Landings, Lost, Memory, Notice, Post, SourceHalf,
};

/// Both halves.
#[derive(Debug)]
pub struct Fake;

impl SourceHalf for Fake {
    fn completion(&self) -> Completion {
        Completion::Immediate
    }

    fn post(&mut self, _memory: &Memory, _post: &Post) -> Result<(), Full> {
        Ok(())
    }

    fn step(&mut self, _memory: &Memory, _completed: &mut dyn FnMut(SlotId)) -> Result<bool, Lost> {
        Ok(false)
    }

    fn withdraw(&mut self, _slot: SlotId) -> bool {
        true
    }
}

impl DestinationHalf for Fake {
    fn step(&mut self, _memory: &Memory, _landings: &mut dyn Landings) -> Result<bool, Lost> {
        Ok(false)
    }

    fn revoke(&mut self, _slot: SlotId) {}

    /// The first token is 0: there was no prefill to sample one.
    fn expect(&mut self, notice: &Notice, _first: u32, landings: &mut dyn Landings) {
        if landings.expected(notice).is_some() {
            let first = Sampled { token: 0, logprob: 0.0, top: TopLogprobs::EMPTY };
            let mut aux = AuxRecord::new(notice.room, &first, 0);
            aux.generation = notice.generation.0;
            landings.complete(notice.slot, aux);
        }
    }
}
