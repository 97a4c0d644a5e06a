//! Resolves host names to addresses, on its own threads. The system's resolver blocks for seconds
//! if a name server is silent. On `ctl` that would stall all streams, and on a single thread all
//! other names.
//!
//! Thread: `names-N` resolve, `ctl` asks. Invariants: names in progress and cached names are
//! bounded, and each has a deadline. A late answer is still cached. A name that is not found is not
//! cached.

use crate::limits::{NAME_DEADLINE, NAME_LIFE, NAME_THREADS, NAMES_ASKED_MAX, NAMES_KNOWN_MAX};
use crossbeam_channel::{Receiver, Sender};
use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Instant;
use std::{io, thread};

/// The addresses of a name, best first and at least one, or the reason why there is none.
pub type Addresses = Result<Vec<IpAddr>, String>;

/// The handle of `ctl`.
#[derive(Debug)]
pub struct Resolver {
    asks: Sender<String>,
    answers: Receiver<(String, Addresses)>,
    /// Names with a look-up in progress, and the deadline of each; `None` if no caller waits any
    /// more.
    asked: BTreeMap<String, Option<Instant>>,
    known: BTreeMap<String, (Vec<IpAddr>, Instant)>,
}

impl Resolver {
    /// Starts the threads with the system's resolver. They call `wake` after each answer.
    pub fn start(wake: impl Fn() + Send + Sync + 'static) -> io::Result<Resolver> {
        Resolver::over(look_up, wake)
    }

    /// Starts the threads with `look_up`.
    pub fn over(
        look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Resolver> {
        let (resolver, worker) = Resolver::stepped(look_up, wake);
        let worker = Arc::new(worker);
        for number in 0..NAME_THREADS {
            let worker = worker.clone();
            thread::Builder::new().name(format!("names-{number}")).spawn(move || worker.run())?;
        }
        Ok(resolver)
    }

    /// A resolver without threads: the caller steps the worker.
    pub fn stepped<L, W>(look_up: L, wake: W) -> (Resolver, NameWorker<L, W>)
    where
        L: Fn(&str) -> io::Result<Vec<IpAddr>>,
        W: Fn(),
    {
        let (asks, asked) = crossbeam_channel::bounded(NAMES_ASKED_MAX);
        let (answer, answers) = crossbeam_channel::bounded(NAMES_ASKED_MAX);
        let resolver = Resolver { asks, answers, asked: BTreeMap::new(), known: BTreeMap::new() };
        (resolver, NameWorker { asked, answer, look_up, wake })
    }

    /// Returns the addresses of `name` if they are cached, or an error if no look-up can begin.
    /// Otherwise [`Resolver::poll`] or [`Resolver::expire`] returns the result later.
    pub fn resolve(&mut self, name: &str, now: Instant) -> Option<Addresses> {
        if let Some((addresses, _)) = self.known.get(name).filter(|(_, until)| now < *until) {
            return Some(Ok(addresses.clone()));
        }
        if let Some(until) = self.asked.get_mut(name) {
            until.get_or_insert(now + NAME_DEADLINE);
            return None;
        }
        if self.asked.len() >= NAMES_ASKED_MAX || self.asks.try_send(name.to_owned()).is_err() {
            return Some(Err("too many names are being looked up".into()));
        }
        self.asked.insert(name.to_owned(), Some(now + NAME_DEADLINE));
        None
    }

    /// Forgets all names with this address, because connecting to it failed.
    pub fn forget(&mut self, address: IpAddr) {
        self.known.retain(|_, (addresses, _)| !addresses.contains(&address));
    }

    /// Whether an answer has arrived.
    pub fn has_events(&self) -> bool {
        !self.answers.is_empty()
    }

    /// The next name that a caller waits for, and its addresses.
    pub fn poll(&mut self, now: Instant) -> Option<(String, Addresses)> {
        while let Ok((name, found)) = self.answers.try_recv() {
            if let Ok(addresses) = &found {
                self.remember(name.clone(), addresses.clone(), now);
            }
            if self.asked.remove(&name).flatten().is_some() {
                return Some((name, found));
            }
        }
        None
    }

    /// The next name that missed its deadline.
    pub fn expire(&mut self, now: Instant) -> Option<(String, Addresses)> {
        let is_late = |until: &Option<Instant>| until.is_some_and(|until| until <= now);
        let (name, until) = self.asked.iter_mut().find(|(_, until)| is_late(until))?;
        *until = None;
        Some((name.clone(), Err("it was not found in time".into())))
    }

    fn remember(&mut self, name: String, addresses: Vec<IpAddr>, now: Instant) {
        if self.known.len() >= NAMES_KNOWN_MAX {
            self.known.retain(|_, (_, until)| now < *until);
        }
        if self.known.len() < NAMES_KNOWN_MAX {
            self.known.insert(name, (addresses, now + NAME_LIFE));
        }
    }
}

/// Looks up names.
pub struct NameWorker<L, W> {
    asked: Receiver<String>,
    answer: Sender<(String, Addresses)>,
    look_up: L,
    wake: W,
}

impl<L: Fn(&str) -> io::Result<Vec<IpAddr>>, W: Fn()> NameWorker<L, W> {
    /// Looks up names until the resolver is dropped.
    fn run(&self) {
        let _ = self.asked.iter().try_for_each(|name| self.find(name));
    }

    /// Looks up the next name. Returns whether there was one.
    pub fn step(&self) -> bool {
        let Ok(name) = self.asked.try_recv() else { return false };
        self.find(name).is_ok()
    }

    /// An error means that the resolver no longer exists.
    fn find(&self, name: String) -> Result<(), ()> {
        let found = match (self.look_up)(&name) {
            Ok(addresses) if addresses.is_empty() => Err("it has no address".into()),
            Ok(addresses) => Ok(addresses),
            Err(error) => Err(error.to_string()),
        };
        self.answer.send((name, found)).map_err(|_| ())?;
        (self.wake)();
        Ok(())
    }
}

/// Looks a name up by the system's resolver, which can block for seconds.
///
/// # Errors
/// There is no such name, or no answer.
pub fn look_up(name: &str) -> io::Result<Vec<IpAddr>> {
    Ok((name, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(60);
    const HOME: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// Substitute of a name server: it counts look-ups, which wait for their answers.
    struct Server {
        answers: crossbeam_channel::Sender<io::Result<Vec<IpAddr>>>,
        woken: std::sync::mpsc::Receiver<()>,
        asked: Arc<AtomicUsize>,
    }

    impl Server {
        fn start() -> (Resolver, Server) {
            let (answers, held) = crossbeam_channel::unbounded();
            let (wake, woken) = channel();
            let asked = Arc::new(AtomicUsize::new(0));
            let count = asked.clone();
            let look_up = move |_: &str| {
                count.fetch_add(1, Ordering::SeqCst);
                held.recv_timeout(PATIENCE)
                    .unwrap_or_else(|_| Err(io::Error::other("the test is over")))
            };
            let resolver = Resolver::over(look_up, move || wake.send(()).unwrap_or(())).unwrap();
            (resolver, Server { answers, woken, asked })
        }

        /// Answers the oldest look-up, and waits until the resolver has sent the answer to its
        /// owner.
        fn answer(&self, answer: io::Result<Vec<IpAddr>>) {
            self.answers.send(answer).unwrap();
            self.woken.recv_timeout(PATIENCE).unwrap();
        }
    }

    #[test]
    fn a_name_is_looked_up_once_and_remembered_for_a_while() {
        let (mut names, server) = Server::start();
        let now = Instant::now();
        assert_eq!(names.resolve("a", now), None);
        assert_eq!(names.resolve("a", now), None, "its look-up is in progress");
        assert_eq!(names.poll(now), None);
        server.answer(Ok(vec![HOME]));
        assert!(names.has_events());
        assert_eq!(names.poll(now), Some(("a".into(), Ok(vec![HOME]))));
        assert_eq!(names.poll(now), None);
        assert_eq!(names.resolve("a", now), Some(Ok(vec![HOME])));
        assert_eq!(server.asked.load(Ordering::SeqCst), 1);
        assert_eq!(names.resolve("a", now + NAME_LIFE), None, "it is looked up again");
        names.forget(HOME);
        assert_eq!(names.resolve("a", now), None);
    }

    #[test]
    fn a_failed_lookup_is_reported_and_repeated() {
        let (mut names, server) = Server::start();
        let now = Instant::now();
        for (answer, why) in
            [(Err(io::Error::other("no such name")), "no such name"), (Ok(vec![]), "no address")]
        {
            assert_eq!(names.resolve("a", now), None);
            server.answer(answer);
            let (name, found) = names.poll(now).unwrap();
            assert!(
                name == "a" && found.as_ref().is_err_and(|text| text.contains(why)),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_silent_server_costs_a_deadline_and_its_late_answer_is_kept() {
        let (mut names, server) = Server::start();
        let now = Instant::now();
        assert_eq!(names.resolve("a", now), None);
        assert_eq!(names.expire(now), None);
        let late = now + NAME_DEADLINE;
        assert!(names.expire(late).is_some_and(|(name, found)| name == "a" && found.is_err()));
        assert_eq!(names.expire(late), None);
        server.answer(Ok(vec![HOME]));
        assert_eq!(names.poll(late), None, "no caller waits for it");
        assert_eq!(names.resolve("a", late), Some(Ok(vec![HOME])));
    }

    #[test]
    fn a_name_that_is_still_looked_up_is_not_asked_for_twice() {
        let (mut names, server) = Server::start();
        let now = Instant::now();
        assert_eq!(names.resolve("a", now), None);
        let late = now + NAME_DEADLINE;
        assert!(names.expire(late).is_some());
        assert_eq!(names.resolve("a", late), None);
        assert_eq!(names.expire(late), None, "the second caller has its own deadline");
        server.answer(Ok(vec![HOME]));
        assert_eq!(names.poll(late), Some(("a".into(), Ok(vec![HOME]))));
        assert_eq!(server.asked.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_silent_server_of_one_name_holds_no_other_up() {
        let (end, held) = crossbeam_channel::bounded::<()>(0);
        let (woken, wakes) = channel();
        let look_up = move |name: &str| {
            if name == "silent" {
                let _ = held.recv_timeout(2 * PATIENCE);
            }
            Ok(vec![HOME])
        };
        let mut names = Resolver::over(look_up, move || woken.send(()).unwrap_or(())).unwrap();
        let now = Instant::now();
        assert_eq!(names.resolve("silent", now), None);
        assert_eq!(names.resolve("a", now), None);
        wakes.recv_timeout(PATIENCE).unwrap();
        assert_eq!(names.poll(now), Some(("a".into(), Ok(vec![HOME]))));
        drop(end);
    }

    #[test]
    fn names_under_way_are_bounded() {
        let (mut names, _server) = Server::start();
        let now = Instant::now();
        let refused = (0..2 * NAMES_ASKED_MAX)
            .filter(|n| names.resolve(&n.to_string(), now).is_some())
            .count();
        assert_eq!(refused, NAMES_ASKED_MAX);
    }

    #[test]
    fn the_systems_resolver_knows_this_host() {
        let (woken, wakes) = channel();
        let mut names = Resolver::start(move || woken.send(()).unwrap_or(())).unwrap();
        assert_eq!(names.resolve("localhost", Instant::now()), None);
        wakes.recv_timeout(PATIENCE).unwrap();
        let (_, found) = names.poll(Instant::now()).unwrap();
        assert!(found.unwrap().iter().all(IpAddr::is_loopback));
    }
}
