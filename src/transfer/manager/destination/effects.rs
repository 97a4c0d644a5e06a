//! What the protocol of a decode worker makes happen.

use crate::cause::Cause;
use crate::kv::layout::KvLayout;
use crate::transfer::command::{DestinationCommand, SessionId};
use crate::transfer::manager::choice::Choice;
use crate::transfer::manager::identity::Mismatch;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::plan::Template;
use crate::wire::message::{Message, Rank, Transport, Welcome};
use std::time::Duration;

/// What the protocol makes happen. `L` names a link, `A` where a prefill worker is reached.
pub trait DestinationEffects<L, A> {
    /// Sends a message over a link.
    fn send(&mut self, link: L, message: &Message<'_>);
    /// Tells the worker's mover.
    fn mover(&mut self, command: DestinationCommand);
    /// Opens a link; [`DestinationManager::link_up`] or [`DestinationManager::dial_failed`] follows.
    fn dial(&mut self, source: &A);
    /// Ends a link.
    fn hang_up(&mut self, link: L);
    /// What this worker offers to a source in a new session: one rank, these transports not in it. `None`
    /// where nothing is left to offer.
    fn offer(&mut self, session: SessionId, source: &A, without: &[Transport]) -> Option<Rank>;
    /// What was offered for a session that has not come to be is not wanted any more.
    fn withdraw(&mut self, session: SessionId);
    /// Sets up this side of the transport that the source chose; [`DestinationManager::bound`] follows.
    fn bind(&mut self, link: L, session: SessionId, how: Binding<'_>);
    /// Tells the scheduler that the slot's session stands, and that pages may be leased.
    fn ready(&mut self, slot: Slot, session: SessionId);
    /// Tells the scheduler that a slot has failed; it is marked already.
    fn failed(&mut self, slot: Slot, cause: Cause);
    /// A transport that breaks again and again is not offered for a while; for the log.
    fn left_out(&mut self, source: &A, transport: Transport, time: Duration);
    /// Two workers do not fit; for the log.
    fn refused(&mut self, source: &A, mismatch: &Mismatch);
}

/// What a transport is made of.
#[derive(Debug)]
pub struct Binding<'a> {
    /// What the source chose, and why.
    pub choice: Choice,
    /// The source's answer.
    pub welcome: &'a Welcome,
    /// The source's layout, checked.
    pub layout: KvLayout,
    /// Where the bytes come to.
    pub template: Template,
}
