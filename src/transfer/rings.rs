//! The rings between one worker's mover, its scheduler and `ctl`, with both ends of each.
//!
//! All rings are bounded. A scheduler checks for room before it sends chunks, and does other work
//! if there is none. Room for one Cancel per slot always remains (`handle`). `ctl` keeps commands
//! that do not fit until its next turn (`link::local_worker::Ring`).

use super::command::LeaseEnd;
use super::handle::TransferHandle;
use super::mover::{Links, Report};
use super::pages::PageLists;
use super::status::StatusTable;
use crate::stdx::event_count::EventCount;
use crossbeam_channel as channel;
use std::sync::Arc;

/// The threads to wake after a write to a ring.
#[derive(Clone, Debug)]
pub struct Bells {
    /// The scheduler.
    pub engine: Arc<EventCount>,
    /// `ctl`.
    pub ctl: Arc<EventCount>,
    /// The mover.
    pub mover: Arc<EventCount>,
}

/// All ends; `C` is the mover's command type.
#[derive(Debug)]
pub struct Rings<C> {
    /// The mover's ends.
    pub links: Links<C>,
    /// The scheduler's ends.
    pub handle: TransferHandle<C>,
    /// `ctl`'s end of the ring to the mover.
    pub commands: channel::Sender<C>,
    /// `ctl`'s end of the ring from the mover.
    pub reports: channel::Receiver<Report>,
}

impl<C> Rings<C> {
    /// The rings of a worker with these slots and page lists, and with at most `sessions` sessions.
    pub fn new(
        status: &Arc<StatusTable>,
        pages: &Arc<PageLists>,
        sessions: usize,
        bells: &Bells,
    ) -> Rings<C> {
        let slots = status.slots();
        // Per slot, the ring usually holds at most Begin, one Chunk, Done and Cancel, or Expect and
        // Cancel.
        let (commands, to_mover) = channel::bounded(slots * 4 + sessions + 64);
        let (ends, ended): (_, channel::Receiver<LeaseEnd>) = channel::bounded(slots + 1);
        let (reports, reported) = channel::bounded(slots * 2 + sessions);
        let links = Links {
            commands: to_mover,
            ends,
            reports,
            engine: bells.engine.clone(),
            ctl: bells.ctl.clone(),
            status: status.clone(),
        };
        let handle = TransferHandle {
            status: status.clone(),
            pages: pages.clone(),
            commands: commands.clone(),
            ends: ended,
            bell: bells.mover.clone(),
        };
        Rings { links, handle, commands, reports: reported }
    }
}
