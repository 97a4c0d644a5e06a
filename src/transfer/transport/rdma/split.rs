//! Posting and reaping in threads of their own: a NIC has `post`, which posts for all sessions, and `poll`, which
//! takes their completions. The mover keeps commands, states and leases; it tells a poster by a ring, and hears by
//! another what is over or lost.
//!
//! Thread: [`Poster`] and [`Poller`] are one each; a [`Seat`] is the mover's. None of them waits for another, but for a
//! seat's end: it takes the queue pairs away from the poster, which holds them for a turn at most, and destroys them.
//! Invariants: a slot's post and its Cancel come in order, so that a poster that has taken Cancel posts nothing more of
//! it; rings have room for all that can be under way; once a seat is dropped, nothing of its session is read or lands.
//! The two threads neither allocate nor free. Not here: how they are started ([`super::threads`]).

use super::posting::Posting;
use super::reaping::Reaping;
use crate::ids::SlotId;
use crate::limits::SESSIONS_MAX;
use crate::obs::log::event;
use crate::stdx::bell::Bell;
use crate::stdx::sync::{AtomicBool, Mutex, Ordering, sleep, yield_now};
use crate::sys::event::WaitSet;
use crate::transfer::transport::{Lost, Post};
use crate::transfer::waiter::{Turns, Waiter};
use crossbeam_channel as channel;
use std::io;
use std::sync::{Arc, TryLockError};
use std::time::Duration;

/// Sessions of a NIC: those that are set up, and as many again that are about to end.
const SEATS_MAX: usize = 2 * SESSIONS_MAX;
/// A turn of a poster takes microseconds; one that does not come back in so many milliseconds never will. They are
/// counted one by one, since a process that is stopped is no poster that hangs.
const TURN_MAX_MS: u32 = 10_000;
/// Looks before the first of them.
const YIELDS: u32 = 1000;

/// To a poster.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // In places of a ring; boxed, each would be allocated.
pub(super) enum Job {
    Post(Post),
    Cancel(SlotId),
}

/// To the mover.
#[derive(Clone, Copy, Debug)]
pub(super) enum Said {
    Completed(SlotId),
    Lost(Lost),
}

/// What a poster owns of a session.
#[derive(Debug)]
struct Posts {
    // Dropped first: its queue pairs complete into the other side's queue.
    posting: Posting,
    jobs: channel::Receiver<Job>,
}

/// A session on one NIC, as its threads share it. Each side is one thread's alone, until the mover takes it away.
#[derive(Debug)]
struct Joint {
    posts: Mutex<Option<Posts>>,
    reaping: Mutex<Option<Reaping>>,
    /// The mover is about to take both away.
    ends: AtomicBool,
    /// Nothing more is posted or taken.
    lost: AtomicBool,
    said: channel::Sender<Said>,
    mover: Arc<Bell>,
}

impl Joint {
    fn say(&self, said: Said) {
        let sent = self.said.try_send(said);
        debug_assert!(
            !matches!(sent, Err(channel::TrySendError::Full(_))),
            "a word for each slot fits"
        );
        self.mover.ring();
    }

    fn lose(&self, lost: Lost) {
        self.lost.store(true, Ordering::Relaxed);
        self.say(Said::Lost(lost));
    }

    fn post(&self) -> bool {
        let Ok(mut held) = self.posts.try_lock() else { return false };
        let Some(Posts { posting, jobs }) =
            held.as_mut().filter(|_| !self.lost.load(Ordering::Relaxed))
        else {
            return false;
        };
        let mut moved = false;
        let mut over = |slot| self.say(Said::Completed(slot));
        while let Ok(job) = jobs.try_recv() {
            moved = true;
            match job {
                Job::Post(post) => posting.take(post),
                Job::Cancel(slot) if posting.withdraw(slot) => over(slot),
                Job::Cancel(_) => {}
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
        match reaping.step(&mut |slot| self.say(Said::Completed(slot))) {
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

/// A thread's sessions.
#[derive(Debug)]
struct Joints {
    arrivals: channel::Receiver<Arc<Joint>>,
    here: Vec<Arc<Joint>>,
    /// Back to who made them, since the last one frees.
    leaving: channel::Sender<Arc<Joint>>,
}

impl Joints {
    fn new(
        arrivals: channel::Receiver<Arc<Joint>>,
        leaving: channel::Sender<Arc<Joint>>,
    ) -> Joints {
        Joints { arrivals, here: Vec::with_capacity(SEATS_MAX), leaving }
    }

    /// Gives those back that end, and takes in those that are new. True where there were any: they have not been
    /// told yet whether the thread parks.
    fn renew(&mut self) -> bool {
        let ended = |joint: &Arc<Joint>| joint.ends.load(Ordering::Acquire);
        while let Some(at) = self.here.iter().position(ended) {
            // It has room for all that arrive between two looks of who drains it before each arrival.
            let _ = self.leaving.try_send(self.here.swap_remove(at));
        }
        let before = self.here.len();
        while self.here.len() < SEATS_MAX
            && let Ok(joint) = self.arrivals.try_recv()
        {
            self.here.push(joint);
        }
        self.here.len() > before
    }
}

/// What the thread `post` of a NIC does.
#[derive(Debug)]
pub struct Poster(Joints);

impl Turns for Poster {
    fn step(&mut self) -> bool {
        let renewed = self.0.renew();
        self.0.here.iter().fold(renewed, |moved, joint| moved | joint.post())
    }

    /// Only threads of this process have work for it, and ring.
    fn park(&mut self, _parked: bool) {}
}

/// What the thread `poll` of a NIC does.
#[derive(Debug)]
pub struct Poller {
    joints: Joints,
    poster: Arc<Bell>,
}

impl Turns for Poller {
    fn step(&mut self) -> bool {
        let renewed = self.joints.renew();
        let moved = self.joints.here.iter().fold(false, |moved, joint| moved | joint.reap());
        if moved {
            // There may be room again.
            self.poster.ring();
        }
        renewed | moved
    }

    fn park(&mut self, parked: bool) {
        self.joints.here.iter().for_each(|joint| joint.park(parked));
    }
}

/// A NIC's two threads, before they run: each step by step, or [`Split::start`].
#[derive(Debug)]
pub struct Split {
    /// `post`, and where it parks.
    pub poster: (Poster, Waiter),
    /// `poll`, and where it parks.
    pub poller: (Poller, Waiter),
    /// Whose they are, by name.
    pub nic: String,
}

/// Where sessions are brought to a NIC's threads.
#[derive(Debug)]
pub(super) struct Desk {
    posters: channel::Sender<Arc<Joint>>,
    pollers: channel::Sender<Arc<Joint>>,
    left: channel::Receiver<Arc<Joint>>,
    poster: Arc<Bell>,
    poller: Arc<Bell>,
    wait: Arc<WaitSet>,
    mover: Arc<Bell>,
}

impl Split {
    /// Both, and the way to them. `mover` is woken when they have something to say.
    pub(super) fn new(nic: &str, mover: &Arc<Bell>, spin: bool) -> io::Result<(Split, Desk)> {
        let (posting, polling) = (Waiter::new(spin)?, Waiter::new(spin)?);
        let (posters, poster) = channel::bounded(SEATS_MAX);
        let (pollers, poller) = channel::bounded(SEATS_MAX);
        let (leaving, left) = channel::bounded(4 * SEATS_MAX);
        let desk = Desk {
            posters,
            pollers,
            left,
            poster: posting.bell.clone(),
            poller: polling.bell.clone(),
            wait: polling.set.clone(),
            mover: mover.clone(),
        };
        let poller =
            Poller { joints: Joints::new(poller, leaving.clone()), poster: posting.bell.clone() };
        let poster = (Poster(Joints::new(poster, leaving)), posting);
        Ok((Split { poster, poller: (poller, polling), nic: nic.into() }, desk))
    }
}

impl Desk {
    /// Where the poller parks.
    pub(super) fn wait(&self) -> &WaitSet {
        &self.wait
    }

    /// Gives a session to the two threads.
    ///
    /// # Errors
    /// They have too many.
    pub(super) fn seat(
        &self,
        (posting, reaping): (Posting, Reaping),
        slots: usize,
        said: &channel::Sender<Said>,
    ) -> io::Result<Seat> {
        while self.left.try_recv().is_ok() {}
        // Of each slot a post and its Cancel, behind the Cancel of a use that was over before it was taken.
        let (jobs, taken) = channel::bounded(3 * slots);
        let joint = Arc::new(Joint {
            posts: Mutex::new(Some(Posts { posting, jobs: taken })),
            reaping: Mutex::new(Some(reaping)),
            ends: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            said: said.clone(),
            mover: self.mover.clone(),
        });
        let seat = Seat { joint: joint.clone(), jobs, poster: self.poster.clone() };
        let full = |_| io::Error::other("too many sessions on a NIC");
        self.posters.try_send(joint.clone()).map_err(full)?;
        self.pollers.try_send(joint).map_err(full)?;
        self.poller.ring();
        Ok(seat)
    }
}

/// The mover's end of a session on one NIC.
#[derive(Debug)]
pub(super) struct Seat {
    joint: Arc<Joint>,
    jobs: channel::Sender<Job>,
    poster: Arc<Bell>,
}

impl Seat {
    pub(super) fn tell(&self, job: Job) {
        let sent = self.jobs.try_send(job);
        debug_assert!(sent.is_ok(), "a post and two Cancels of each slot fit");
        self.poster.ring();
    }
}

/// The queue pairs are gone when this has returned, so that leases may end.
impl Drop for Seat {
    fn drop(&mut self) {
        self.joint.ends.store(true, Ordering::Release);
        drop(take(&self.joint.posts));
        drop(take(&self.joint.reaping));
    }
}

/// Takes a side away from its thread, which holds it for a turn at most and does not come back to one that ends.
fn take<T>(side: &Mutex<Option<T>>) -> Option<T> {
    let mut looks = 0;
    loop {
        looks += 1;
        match side.try_lock() {
            Ok(mut held) => return held.take(),
            // Its thread is gone.
            Err(TryLockError::Poisoned(held)) => return held.into_inner().take(),
            Err(TryLockError::WouldBlock) if looks < YIELDS => yield_now(),
            Err(TryLockError::WouldBlock) if looks < YIELDS + TURN_MAX_MS => {
                sleep(Duration::from_millis(1));
            }
            Err(TryLockError::WouldBlock) => {
                // The NIC may read and write what would now be given to others, and nobody can stop it but the kernel.
                event!(Error, "move", "a thread that posts or polls hangs: the process ends");
                std::process::abort();
            }
        }
    }
}
