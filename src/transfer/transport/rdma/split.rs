//! Posting and polling in separate threads: each NIC has `post`, which posts for all sessions, and
//! `poll`, which takes their completions. The mover keeps commands, states and leases. It sends
//! posts to a poster through a ring, and receives completions and losses through another.
//!
//! Thread: [`Poster`] and [`Poller`] run in one thread each; the mover holds a
//! [`NicSessionHandle`]. No thread waits for another, with one exception. The drop of a handle
//! takes the queue pairs from the poster, which holds them for at most one turn.
//! Invariants: a slot's post and its Cancel come in order. Rings have room for all outstanding
//! entries. After a handle is dropped, no byte of its session is read or written. The two threads
//! neither allocate nor free.

use super::completions::Reaping;
use super::posts::Posting;
use crate::ids::SlotId;
use crate::limits::SESSIONS_MAX;
use crate::stdx::event_count::EventCount;
use crate::stdx::sync::{AtomicBool, Mutex, Ordering, sleep, yield_now};
use crate::sys::event::WaitSet;
use crate::sys::last_resort;
use crate::transfer::event_loop::{LoopTask, Waiter};
use crate::transfer::transport::{Post, SessionLost};
use crossbeam_channel as channel;
use std::io;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

/// Sessions of a NIC: the open ones, and as many that are about to end.
const NIC_SESSIONS_MAX: usize = 2 * SESSIONS_MAX;
/// A poster's turn takes microseconds, so a turn of this many milliseconds hangs. The wait counts
/// milliseconds one by one, so that a stopped process does not look like a hanging poster.
const TURN_MAX_MS: u32 = 10_000;
/// Yields before the first sleep of a millisecond.
const YIELDS: u32 = 1000;

/// A message to a poster.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // In places of a ring; boxed, each would be allocated.
pub(super) enum PosterCommand {
    Post(Post),
    Cancel(SlotId),
}

/// A message to the mover.
#[derive(Clone, Copy, Debug)]
pub(super) enum NicReport {
    Completed(SlotId),
    Lost(SessionLost),
}

/// A poster's part of a session.
#[derive(Debug)]
struct Posts {
    // Dropped first, because its queue pairs complete into the other side's queue.
    posting: Posting,
    commands: channel::Receiver<PosterCommand>,
}

/// A session on one NIC, shared by its threads. Each side belongs to one thread, until the mover
/// takes it away.
#[derive(Debug)]
struct NicSession {
    posts: Mutex<Option<Posts>>,
    reaping: Mutex<Option<Reaping>>,
    /// The mover is about to take both sides away.
    ends: AtomicBool,
    /// Nothing more is posted or polled.
    lost: AtomicBool,
    reports: channel::Sender<NicReport>,
    mover: Arc<EventCount>,
}

impl NicSession {
    fn report(&self, report: NicReport) {
        let sent = self.reports.try_send(report);
        debug_assert!(
            !matches!(sent, Err(channel::TrySendError::Full(_))),
            "the ring has room for a report of each slot"
        );
        self.mover.notify();
    }

    fn lose(&self, lost: SessionLost) {
        self.lost.store(true, Ordering::Relaxed);
        self.report(NicReport::Lost(lost));
    }

    fn post(&self) -> bool {
        let Ok(mut held) = self.posts.try_lock() else { return false };
        let Some(Posts { posting, commands }) =
            held.as_mut().filter(|_| !self.lost.load(Ordering::Relaxed))
        else {
            return false;
        };
        let mut moved = false;
        let mut over = |slot| self.report(NicReport::Completed(slot));
        while let Ok(command) = commands.try_recv() {
            moved = true;
            match command {
                PosterCommand::Post(post) => posting.take(post),
                PosterCommand::Cancel(slot) if posting.withdraw(slot) => over(slot),
                PosterCommand::Cancel(_) => {}
            }
        }
        match posting.step(&mut over) {
            Ok(posted) => moved | posted,
            Err(lost) => {
                self.lose(lost);
                true
            }
        }
    }

    fn reap(&self) -> bool {
        let Ok(mut held) = self.reaping.try_lock() else { return false };
        let Some(reaping) = held.as_mut().filter(|_| !self.lost.load(Ordering::Relaxed)) else {
            return false;
        };
        match reaping.step(&mut |slot| self.report(NicReport::Completed(slot))) {
            Ok(moved) => moved,
            Err(lost) => {
                self.lose(lost);
                true
            }
        }
    }

    fn park(&self, parked: bool) {
        if let Ok(mut held) = self.reaping.try_lock()
            && let Some(reaping) = held.as_mut()
        {
            reaping.park(parked);
        }
    }
}

/// The sessions of a thread.
#[derive(Debug)]
struct NicSessions {
    arrivals: channel::Receiver<Arc<NicSession>>,
    here: Vec<Arc<NicSession>>,
    /// Returns sessions to their makers, because dropping the last reference frees memory.
    leaving: channel::Sender<Arc<NicSession>>,
}

impl NicSessions {
    fn new(
        arrivals: channel::Receiver<Arc<NicSession>>,
        leaving: channel::Sender<Arc<NicSession>>,
    ) -> NicSessions {
        NicSessions { arrivals, here: Vec::with_capacity(NIC_SESSIONS_MAX), leaving }
    }

    /// Returns sessions that end, and adds new ones. Returns true if there were new ones, because
    /// their events are not armed for a park yet.
    fn renew(&mut self) -> bool {
        let ended = |session: &Arc<NicSession>| session.ends.load(Ordering::Acquire);
        while let Some(at) = self.here.iter().position(ended) {
            // The ring has room for all sessions that arrive between two calls. It is drained
            // before each arrival.
            let _ = self.leaving.try_send(self.here.swap_remove(at));
        }
        let before = self.here.len();
        while self.here.len() < NIC_SESSIONS_MAX
            && let Ok(session) = self.arrivals.try_recv()
        {
            self.here.push(session);
        }
        self.here.len() > before
    }
}

/// The work of a NIC's thread `post`.
#[derive(Debug)]
pub struct Poster(NicSessions);

impl LoopTask for Poster {
    fn step(&mut self) -> bool {
        let renewed = self.0.renew();
        self.0.here.iter().fold(renewed, |moved, session| moved | session.post())
    }

    /// Only threads of this process give it work, and they ring the bell.
    fn park(&mut self, _parked: bool) {}
}

/// The work of a NIC's thread `poll`.
#[derive(Debug)]
pub struct Poller {
    sessions: NicSessions,
    poster: Arc<EventCount>,
}

impl LoopTask for Poller {
    fn step(&mut self) -> bool {
        let renewed = self.sessions.renew();
        let moved = self.sessions.here.iter().fold(false, |moved, session| moved | session.reap());
        if moved {
            // There may be room again.
            self.poster.notify();
        }
        renewed | moved
    }

    fn park(&mut self, parked: bool) {
        self.sessions.here.iter().for_each(|session| session.park(parked));
    }
}

/// A NIC's two threads before they start, with their waiters.
#[derive(Debug)]
pub struct Split {
    /// `post`, and where it parks.
    pub poster: (Poster, Waiter),
    /// `poll`, and where it parks.
    pub poller: (Poller, Waiter),
    /// The name of the NIC.
    pub nic: String,
}

/// The handle that adds sessions to a NIC's threads.
#[derive(Debug)]
pub(super) struct NicThreads {
    posters: channel::Sender<Arc<NicSession>>,
    pollers: channel::Sender<Arc<NicSession>>,
    left: channel::Receiver<Arc<NicSession>>,
    poster: Arc<EventCount>,
    poller: Arc<EventCount>,
    wait: Arc<WaitSet>,
    mover: Arc<EventCount>,
}

impl Split {
    /// Both threads and their handle. They wake `mover` after a report.
    pub(super) fn new(
        nic: &str,
        mover: &Arc<EventCount>,
        spin: bool,
    ) -> io::Result<(Split, NicThreads)> {
        let (posting, polling) = (Waiter::new(spin)?, Waiter::new(spin)?);
        let (posters, poster) = channel::bounded(NIC_SESSIONS_MAX);
        let (pollers, poller) = channel::bounded(NIC_SESSIONS_MAX);
        let (leaving, left) = channel::bounded(4 * NIC_SESSIONS_MAX);
        let threads = NicThreads {
            posters,
            pollers,
            left,
            poster: posting.bell.clone(),
            poller: polling.bell.clone(),
            wait: polling.set.clone(),
            mover: mover.clone(),
        };
        let poller = Poller {
            sessions: NicSessions::new(poller, leaving.clone()),
            poster: posting.bell.clone(),
        };
        let poster = (Poster(NicSessions::new(poster, leaving)), posting);
        Ok((Split { poster, poller: (poller, polling), nic: nic.into() }, threads))
    }
}

impl NicThreads {
    /// Where the poller parks.
    pub(super) fn wait(&self) -> &WaitSet {
        &self.wait
    }

    /// Gives a session to the two threads.
    ///
    /// # Errors
    /// If the threads have too many sessions.
    pub(super) fn add_session(
        &self,
        (posting, reaping): (Posting, Reaping),
        slots: usize,
        reports: &channel::Sender<NicReport>,
    ) -> io::Result<NicSessionHandle> {
        while self.left.try_recv().is_ok() {}
        // Per slot: a post and its Cancel, and the Cancel of an earlier use that completed before
        // the poster took that Cancel.
        let (commands, receiver) = channel::bounded(3 * slots);
        let session = Arc::new(NicSession {
            posts: Mutex::new(Some(Posts { posting, commands: receiver })),
            reaping: Mutex::new(Some(reaping)),
            ends: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            reports: reports.clone(),
            mover: self.mover.clone(),
        });
        let handle =
            NicSessionHandle { session: session.clone(), commands, poster: self.poster.clone() };
        let full = |_| io::Error::other("too many sessions on a NIC");
        self.posters.try_send(session.clone()).map_err(full)?;
        self.pollers.try_send(session).map_err(full)?;
        self.poller.notify();
        Ok(handle)
    }
}

/// The mover's end of a session on one NIC.
#[derive(Debug)]
pub(super) struct NicSessionHandle {
    session: Arc<NicSession>,
    commands: channel::Sender<PosterCommand>,
    poster: Arc<EventCount>,
}

impl NicSessionHandle {
    pub(super) fn send(&self, command: PosterCommand) {
        let sent = self.commands.try_send(command);
        debug_assert!(sent.is_ok(), "a post and two Cancels of each slot fit");
        self.poster.notify();
    }
}

/// The drop destroys the queue pairs, so that leases can end after it.
impl Drop for NicSessionHandle {
    fn drop(&mut self) {
        self.session.ends.store(true, Ordering::Release);
        drop(take(&self.session.posts));
        drop(take(&self.session.reaping));
    }
}

/// Takes a side from its thread. The thread holds it for at most one turn, and does not return to a
/// session that ends.
fn take<T>(side: &Mutex<Option<T>>) -> Option<T> {
    let mut tries = 0;
    loop {
        tries += 1;
        match side.try_lock() {
            Ok(mut held) => return held.take(),
            // Its thread has panicked.
            Err(TryLockError::Poisoned(held)) => return held.into_inner().take(),
            Err(TryLockError::WouldBlock) if tries < YIELDS => yield_now(),
            Err(TryLockError::WouldBlock) if tries < YIELDS + TURN_MAX_MS => {
                sleep(Duration::from_millis(1));
            }
            Err(TryLockError::WouldBlock) => {
                // The NIC can still access memory that is about to be reused.
                last_resort::end(format_args!("a thread that posts or polls hangs"));
                return None;
            }
        }
    }
}
