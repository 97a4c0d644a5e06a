//! The engine's side of an agent: requests by slot, and checks of what an engine orders.
//!
//! Owns: the engine's ends of the rings, and the state of each slot as the engine sees it. Thread:
//! any; calls of several threads may meet. Invariants: no call blocks or waits for `ctl`. Each
//! order comes at most once for a request, so no ring overflows. A call with the slot of an earlier
//! request is an error and has no effect, also if the request is released while the call runs. The
//! descriptor is readable while there are events, and after the agent has ended. Then each order is
//! an error. Not here: what happens with an order (`requests`).

use super::requests::{
    AgentEvent, AgentEventKind, AgentOrder, AuxPayload, SlotProgress, pack, unpack,
};
use crate::cause::Cause;
use crate::ids::{PageId, Role, Room};
use crate::kv::layout::KvLayout;
use crate::kv::page_span::PageSpan;
use crate::limits::REQUEST_TIME_MAX;
use crate::link::handoff::{Source, prompt_of};
use crate::stdx::event_count::EventCount;
use crate::stdx::failpoint::is_failpoint_active;
use crate::sys::event::EventFd;
use crate::transfer::counters::{Counters, Counts};
use crate::transfer::manager::rooms::Slot;
use crate::transfer::pages::PageLists;
use crate::transfer::status::{SlotStatus, StatusTable};
use crossbeam_channel::{Receiver, Sender, TrySendError};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Why a call has no effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AgentError {
    /// The slot has no request, or that of a later call.
    Slot,
    /// The call is not for this role.
    Role,
    /// All slots have requests.
    Full,
    /// A number of tokens is zero, beyond the prompt, or less than before.
    Tokens,
    /// The pages are too few or too many for the prompt, or one is not in the pool, or computed
    /// tokens have no pages.
    Pages,
    /// The order was given before.
    Repeated,
    /// The request has not ended, or another call for it runs.
    Open,
    /// The agent has ended.
    Dead,
}

impl AgentError {
    /// The error in words.
    pub const fn text(self) -> &'static str {
        match self {
            AgentError::Slot => "the slot has no request, or another one",
            AgentError::Role => "the call is not for the role of this agent",
            AgentError::Full => "all slots have requests",
            AgentError::Tokens => {
                "a number of tokens is zero, beyond the prompt, or less than before"
            }
            AgentError::Pages => "the pages do not fit the tokens, or one is not in the pool",
            AgentError::Repeated => "the order was given before",
            AgentError::Open => "the request has not ended, or another call for it runs",
            AgentError::Dead => "the agent has ended",
        }
    }
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for AgentError {}

/// Orders that a request has had, as bits.
const LEASED: u32 = 1;
const LAST: u32 = 2;
const CANCELLED: u32 = 4;
/// The engine has read that the request has ended.
const ENDED: u32 = 8;
/// A call changes the lists and counts of the slot.
const BUSY: u32 = 16;

/// A slot as the engine sees it.
#[derive(Debug, Default)]
struct SlotBoard {
    /// Generation of its request (0: none), and the orders that it has had. They are one word, so
    /// that a call for an earlier request changes nothing.
    state: AtomicU64,
    tokens: AtomicU32,
}

/// A call that changes the lists and counts of a slot. The request keeps the slot meanwhile.
struct ChangingCall<'a>(&'a AtomicU64);

impl Drop for ChangingCall<'_> {
    fn drop(&mut self) {
        self.0.fetch_and(!u64::from(BUSY), Ordering::Release);
    }
}

/// The parts that an agent's thread gives to its client.
#[derive(Debug)]
pub(super) struct ClientParts {
    pub(super) role: Role,
    pub(super) layout: KvLayout,
    pub(super) pages: u32,
    pub(super) prompt_pages: u32,
    pub(super) orders: Sender<AgentOrder>,
    pub(super) events: Receiver<AgentEvent>,
    pub(super) free: Receiver<Slot>,
    /// By slot.
    pub(super) progress: Arc<[SlotProgress]>,
    /// The slots' page lists.
    pub(super) lists: Arc<PageLists>,
    pub(super) status: Arc<StatusTable>,
    pub(super) counters: Arc<Counters>,
    /// Wakes `ctl`.
    pub(super) bell: Arc<EventCount>,
    /// Readable while there are events.
    pub(super) event_fd: EventFd,
    pub(super) is_dead: Arc<AtomicBool>,
}

/// The engine's side of an agent.
#[derive(Debug)]
pub struct AgentClient {
    parts: ClientParts,
    boards: Box<[SlotBoard]>,
    /// Outcomes that the engine has read.
    landed: AtomicU64,
    failed: AtomicU64,
}

/// Counters of an agent since its start.
#[derive(Clone, Copy, Debug)]
pub struct AgentCounts {
    /// Slots that are not free.
    pub open: u32,
    /// Requests that have landed, as far as the engine has read it.
    pub landed: u64,
    /// Requests that have failed, as far as the engine has read it.
    pub failed: u64,
    /// Operations of the transports.
    pub transfer: Counts,
}

impl AgentClient {
    pub(super) fn new(parts: ClientParts) -> AgentClient {
        let boards = (0..parts.status.slots()).map(|_| SlotBoard::default()).collect();
        AgentClient { parts, boards, landed: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    /// Whether the agent has ended: no event will come.
    pub fn is_dead(&self) -> bool {
        self.parts.is_dead.load(Ordering::Acquire)
    }

    /// Offers the KV of a prompt in `room`, at a source. The engine computes it and calls
    /// [`AgentClient::lease`] and [`AgentClient::compute`], also before a destination has come. The
    /// request fails after `within`, at most [`REQUEST_TIME_MAX`].
    ///
    /// # Errors
    /// [`AgentError::Role`], [`AgentError::Tokens`], [`AgentError::Full`], [`AgentError::Dead`].
    pub fn offer(&self, room: Room, ids: &[u32], within: Duration) -> Result<Slot, AgentError> {
        self.check_role(Role::Prefill)?;
        self.enter(room, ids, None, within)
    }

    /// Asks for the KV of a prompt in `room`, at a destination. `source` is the address of the
    /// source's agent, or the control port of a prefill worker. The request fails after `within`,
    /// at most [`REQUEST_TIME_MAX`].
    ///
    /// # Errors
    /// [`AgentError::Role`], [`AgentError::Tokens`], [`AgentError::Full`], [`AgentError::Dead`].
    pub fn wish(
        &self,
        room: Room,
        source: SocketAddr,
        ids: &[u32],
        within: Duration,
    ) -> Result<Slot, AgentError> {
        self.check_role(Role::Decode)?;
        let source = SocketAddr::new(source.ip().to_canonical(), source.port());
        self.enter(room, ids, Some(Source::Remote(source)), within)
    }

    fn check_role(&self, role: Role) -> Result<(), AgentError> {
        if self.parts.role == role { Ok(()) } else { Err(AgentError::Role) }
    }

    fn enter(
        &self,
        room: Room,
        ids: &[u32],
        source: Option<Source>,
        within: Duration,
    ) -> Result<Slot, AgentError> {
        let prompt = prompt_of(ids);
        let pages = prompt.tokens.div_ceil(self.parts.layout.page_size);
        if ids.is_empty() || pages > self.parts.prompt_pages {
            return Err(AgentError::Tokens);
        }
        if self.is_dead() {
            return Err(AgentError::Dead);
        }
        let slot = self.parts.free.try_recv().map_err(|_| AgentError::Full)?;
        let board = &self.boards[slot.id.index()];
        board.tokens.store(prompt.tokens, Ordering::Relaxed);
        board.state.store(pack(slot, 0), Ordering::Release);
        let within = within.min(REQUEST_TIME_MAX);
        self.order(AgentOrder::Enter { slot, room, prompt, source, within })?;
        Ok(slot)
    }

    /// Leases pages of the prompt to the transfer, until [`AgentEventKind::Ended`]. A source can
    /// lease its pages in several calls, in the order of the tokens. A destination leases the pages
    /// of the whole prompt in one call; the KV of the first `prefix` tokens is already there.
    ///
    /// Calls of `lease` and [`AgentClient::compute`] for one request come one after the other.
    ///
    /// # Errors
    /// [`AgentError::Slot`], [`AgentError::Repeated`] at a destination, [`AgentError::Pages`],
    /// [`AgentError::Tokens`]: the prefix leaves no token, ends inside a page, or a source has one.
    /// [`AgentError::Open`]: another such call for the request runs.
    pub fn lease(&self, slot: Slot, prefix: u32, pages: &[PageId]) -> Result<(), AgentError> {
        let _call = self.begin_change(slot)?;
        let board = self.board(slot)?;
        let (tokens, layout) = (board.tokens.load(Ordering::Relaxed), &self.parts.layout);
        let is_source = self.parts.role == Role::Prefill;
        let is_whole = prefix.is_multiple_of(layout.page_size);
        if prefix >= tokens || !is_whole || (prefix > 0 && is_source) {
            return Err(AgentError::Tokens);
        }
        let progress = &self.parts.progress[slot.id.index()];
        let first = unpack(progress.leased.load(Ordering::Relaxed), slot).unwrap_or(0) as usize;
        let (wanted, leased) = (layout.pages_for(tokens) as usize, first + pages.len());
        let is_count_right = if is_source { leased <= wanted } else { pages.len() == wanted };
        let is_outside = |page: &PageId| page.0 >= self.parts.pages;
        if !is_count_right || pages.is_empty() || pages.iter().any(is_outside) {
            return Err(AgentError::Pages);
        }
        if !is_source {
            self.set(slot, LEASED)?;
        }
        if self.is_dead() {
            return Err(AgentError::Dead);
        }
        self.parts.lists.store(slot.id, PageSpan { first, pages });
        progress.prefix.store(prefix, Ordering::Relaxed);
        progress.leased.store(pack(slot, leased as u32), Ordering::Release);
        self.wake();
        Ok(())
    }

    /// The KV of the first `tokens` of the prompt is computed, at a source. Their pages are leased.
    /// The last tokens leave after [`AgentClient::send_last`].
    ///
    /// # Errors
    /// [`AgentError::Slot`], [`AgentError::Role`], [`AgentError::Tokens`], [`AgentError::Pages`],
    /// [`AgentError::Dead`], [`AgentError::Open`]: another such call for the request runs.
    pub fn compute(&self, slot: Slot, tokens: u32) -> Result<(), AgentError> {
        self.check_role(Role::Prefill)?;
        let _call = self.begin_change(slot)?;
        let all = self.board(slot)?.tokens.load(Ordering::Relaxed);
        let progress = &self.parts.progress[slot.id.index()];
        let leased = unpack(progress.leased.load(Ordering::Relaxed), slot).unwrap_or(0);
        let is_known = tokens <= all;
        let is_leased = self.parts.layout.pages_for(tokens) <= leased;
        if is_known && !is_leased && !is_failpoint_active("tokens without pages are taken") {
            return Err(AgentError::Pages);
        }
        if self.is_dead() {
            return Err(AgentError::Dead);
        }
        let grown = |word| match unpack(word, slot).unwrap_or(0) <= tokens && is_known {
            true => Some(pack(slot, tokens)),
            false => None,
        };
        let updated = progress.computed.fetch_update(Ordering::AcqRel, Ordering::Acquire, grown);
        updated.map_err(|_| AgentError::Tokens)?;
        self.wake();
        Ok(())
    }

    /// What the destination gets with the last tokens, at a source.
    ///
    /// # Errors
    /// [`AgentError::Slot`], [`AgentError::Role`], [`AgentError::Repeated`].
    pub fn send_last(&self, slot: Slot, payload: &AuxPayload) -> Result<(), AgentError> {
        self.check_role(Role::Prefill)?;
        self.set(slot, LAST)?;
        self.order(AgentOrder::Last { slot, payload: *payload })
    }

    /// Ends the request, unless it has an outcome. Its events still come. The other end learns it
    /// if both have met. A source learns it as soon as [`AgentEventKind::Met`] has come at the
    /// destination.
    ///
    /// # Errors
    /// [`AgentError::Slot`], [`AgentError::Repeated`].
    pub fn cancel(&self, slot: Slot) -> Result<(), AgentError> {
        self.set(slot, CANCELLED)?;
        self.order(AgentOrder::Cancel { slot, cause: Cause::Aborted })
    }

    /// Gives the slot back. The engine has read [`AgentEventKind::Ended`]. The slot is free for a
    /// new request when the agent has taken the order.
    ///
    /// # Errors
    /// [`AgentError::Slot`], [`AgentError::Open`].
    pub fn release(&self, slot: Slot) -> Result<(), AgentError> {
        let ended =
            |word| unpack(word, slot).filter(|bits| bits & (ENDED | BUSY) == ENDED).map(|_| 0);
        let state = &self.board(slot)?.state;
        let taken = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, ended);
        taken.map_err(|word| match unpack(word, slot) {
            Some(_) => AgentError::Open,
            None => AgentError::Slot,
        })?;
        self.order(AgentOrder::Release { slot })
    }

    /// The next event.
    pub fn poll(&self) -> Option<AgentEvent> {
        if self.parts.events.is_empty() {
            self.parts.event_fd.clear();
            // An event, or the end of the agent, can have come before the clear.
            if !self.parts.events.is_empty() || self.is_dead() {
                self.parts.event_fd.signal();
            }
        }
        let event = self.parts.events.try_recv().ok()?;
        match event.kind {
            AgentEventKind::Met => {}
            AgentEventKind::Landed(_) => _ = self.landed.fetch_add(1, Ordering::Relaxed),
            AgentEventKind::Failed(_) => _ = self.failed.fetch_add(1, Ordering::Relaxed),
            AgentEventKind::Ended => {
                let marked = self.set(event.slot, ENDED);
                debug_assert!(marked.is_ok(), "a request ends once, before its release");
            }
        }
        Some(event)
    }

    /// Readable when events have come, or the agent has ended.
    pub fn event_fd(&self) -> &EventFd {
        &self.parts.event_fd
    }

    /// The status words by slot.
    pub fn status_table(&self) -> &Arc<StatusTable> {
        &self.parts.status
    }

    /// What the agent has done since its start.
    pub fn counts(&self) -> AgentCounts {
        let free = self.parts.free.len() as u32;
        AgentCounts {
            open: self.boards.len() as u32 - free,
            landed: self.landed.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            transfer: self.parts.counters.counts(),
        }
    }

    /// The status of a request, read from memory.
    ///
    /// # Errors
    /// [`AgentError::Slot`].
    pub fn status(&self, slot: Slot) -> Result<SlotStatus, AgentError> {
        self.board(slot)?;
        Ok(self.parts.status.load(slot.id))
    }

    /// Wakes the agent's thread.
    pub(super) fn wake(&self) {
        self.parts.bell.notify();
    }

    fn board(&self, slot: Slot) -> Result<&SlotBoard, AgentError> {
        // No request has generation 0.
        let board = self.boards.get(slot.id.index()).filter(|_| slot.generation.0 != 0);
        let board = board.ok_or(AgentError::Slot)?;
        let is_current = unpack(board.state.load(Ordering::Acquire), slot).is_some()
            || is_failpoint_active("call of an earlier request is taken");
        if is_current { Ok(board) } else { Err(AgentError::Slot) }
    }

    /// Keeps the slot for its request while a call changes its lists and counts.
    fn begin_change(&self, slot: Slot) -> Result<ChangingCall<'_>, AgentError> {
        match self.set(slot, BUSY) {
            Ok(()) => Ok(ChangingCall(&self.boards[slot.id.index()].state)),
            Err(AgentError::Repeated) => Err(AgentError::Open),
            Err(error) => Err(error),
        }
    }

    /// Notes an order of a request that must come once.
    fn set(&self, slot: Slot, bit: u32) -> Result<(), AgentError> {
        let new = |word| {
            let is_new = |bits: &u32| {
                bits & bit == 0 || is_failpoint_active("order of a request is taken twice")
            };
            let bits = unpack(word, slot).filter(is_new)?;
            Some(pack(slot, bits | bit))
        };
        let state = &self.board(slot)?.state;
        let updated = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, new);
        updated.map(drop).map_err(|word| match unpack(word, slot) {
            Some(_) => AgentError::Repeated,
            None => AgentError::Slot,
        })
    }

    /// Gives the agent an order. An error: it has ended.
    fn order(&self, order: AgentOrder) -> Result<(), AgentError> {
        let given = self.parts.orders.try_send(order);
        let is_full = matches!(given, Err(TrySendError::Full(_)));
        debug_assert!(!is_full, "the ring has room for all orders of all slots");
        given.map_err(|_| AgentError::Dead)?;
        self.wake();
        Ok(())
    }
}
