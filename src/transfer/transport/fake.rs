//! A transport that moves no bytes. Every hand-off ends in Success. It serves load tests of one
//! role without workers of the other role.

use crate::ids::SlotId;
use crate::transfer::aux::{AUX_PAYLOAD_BYTES, AuxRecord};
use crate::transfer::transport::{
    CompletionMode, DestinationHalf, Full, Landings, Memory, Notice, Post, SessionLost, SourceHalf,
};

/// Both halves.
#[derive(Debug)]
pub struct Fake;

impl SourceHalf for Fake {
    fn completion(&self) -> CompletionMode {
        CompletionMode::Immediate
    }

    fn post(&mut self, _memory: &Memory, _post: &Post) -> Result<(), Full> {
        Ok(())
    }

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
}

impl DestinationHalf for Fake {
    fn step(
        &mut self,
        _memory: &Memory,
        _landings: &mut dyn Landings,
    ) -> Result<bool, SessionLost> {
        Ok(false)
    }

    fn revoke(&mut self, _slot: SlotId) {}

    /// Completes at once. The first token is 0, because no prefill worker sampled one.
    fn expect(&mut self, notice: &Notice, _first: u32, landings: &mut dyn Landings) {
        if landings.expected(notice).is_some() {
            let mut aux = AuxRecord::new(notice.room, [0; AUX_PAYLOAD_BYTES]);
            aux.generation = notice.generation.0;
            landings.complete(notice.slot, aux);
        }
    }
}
