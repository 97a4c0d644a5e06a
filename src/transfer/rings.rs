//! The rings between one worker's mover, its scheduler and `ctl`, both ends of each.
//!
//! Bounded. A scheduler asks for room before it hands chunks over and goes on with other work where there is
//! none; room for one Cancel per slot is always left (`handle`). `ctl` keeps what finds no room for its next
//! turn (`front::worker::Ring`).

use super::command::LeaseEnd;
use super::handle::Handle;
use super::mover::{Links, Report};
use super::pages::PageLists;
use super::status::StatusTable;
use crate::stdx::bell::Bell;
use crossbeam_channel as channel;
use std::sync::Arc;

/// Who is woken by what is put into a ring.
#[derive(Clone, Debug)]
pub struct Bells {
    /// The scheduler.
    pub engine: Arc<Bell>,
    /// `ctl`.
    pub ctl: Arc<Bell>,
    /// The mover.
    pub mover: Arc<Bell>,
}

/// All ends; `C` is what the mover is told.
#[derive(Debug)]
pub struct Rings<C> {
    /// The mover's.
    pub links: Links<C>,
    /// The scheduler's.
    pub handle: Handle<C>,
    /// `ctl`'s, to the mover.
    pub commands: channel::Sender<C>,
    /// `ctl`'s, from the mover.
    pub reports: channel::Receiver<Report>,
}

impl<C> Rings<C> {
    /// For a worker with these slots and page lists that takes part in up to `sessions`.
    pub fn new(
        status: &Arc<StatusTable>,
        pages: &Arc<PageLists>,
        sessions: usize,
        bells: &Bells,
    ) -> Rings<C> {
        let slots = status.slots();
        // As a rule Begin, a Chunk, Done and Cancel of every slot are under way, or Expect and Cancel.
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
        let handle = Handle {
            status: status.clone(),
            pages: pages.clone(),
            commands: commands.clone(),
            ends: ended,
            bell: bells.mover.clone(),
        };
        Rings { links, handle, commands, reports: reported }
    }
}
