//! Effects of a decode worker's protocol.

use crate::cause::Cause;
use crate::kv::layout::KvLayout;
use crate::transfer::command::DestinationCommand;
use crate::transfer::manager::choice::TransportChoice;
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::plan::Template;
use crate::transfer::target::SessionId;
use crate::wire::message::{Message, Rank, Transport, Welcome};
use std::time::Duration;

/// Effects of the protocol. `L` names a link, `A` the address of a prefill worker.
pub trait DestinationEffects<L, A> {
    /// Sends a message over a link.
    fn send(&mut self, link: L, message: &Message<'_>);
    /// Sends a command to the worker's mover.
    fn mover(&mut self, command: DestinationCommand);
    /// Opens a link; `DestinationManager::link_up` or `DestinationManager::dial_failed`
    /// follows.
    fn dial(&mut self, source: &A);
    /// Ends a link.
    fn hang_up(&mut self, link: L);
    /// This worker's offer to a source in a new session: one rank, except the transports in
    /// `without`. `None` if no transport is left.
    fn make_rank(&mut self, session: SessionId, source: &A, without: &[Transport]) -> Option<Rank>;
    /// Takes back the offer for a session that was not established.
    fn withdraw(&mut self, session: SessionId);
    /// Sets up this side of the transport that the source chose; `DestinationManager::bound`
    /// follows.
    fn bind(&mut self, link: L, session: SessionId, how: DestinationSetup<'_>);
    /// Reports to the scheduler that the slot's session is ready, so that pages can be leased.
    fn ready(&mut self, slot: Slot, session: SessionId);
    /// Reports the logprobs of a slot's prompt, as its source sent them.
    fn record(&mut self, slot: Slot, bytes: &[u8]);
    /// Reports to the scheduler that a slot has failed; it is marked already.
    fn failed(&mut self, slot: Slot, cause: Cause);
    /// Logs that a transport is not offered for a while because it broke repeatedly.
    fn left_out(&mut self, source: &A, transport: Transport, time: Duration);
    /// Logs that two workers are not compatible.
    fn refused(&mut self, source: &A, mismatch: &Mismatch);
}

/// The parameters of a transport.
#[derive(Debug)]
pub struct DestinationSetup<'a> {
    /// The source's choice and the reason.
    pub choice: TransportChoice,
    /// The source's answer.
    pub welcome: &'a Welcome,
    /// The source's layout, checked.
    pub layout: KvLayout,
    /// The plan of the session.
    pub template: Template,
}
