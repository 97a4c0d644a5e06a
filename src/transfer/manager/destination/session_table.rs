//! The bounded table of a decode worker's sessions: the source of each, and the source that gives
//! way to a new one.
//!
//! Owns: the indices of sessions. Thread: that of the manager; the load mode of `baton sim` has one
//! table for each decode worker. Not here: stages, transports and slots of a session.

use crate::transfer::target::SessionId;
use std::time::Instant;

/// Whether a source can give way. The least gives way first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Standing {
    /// It has no session, and there is no dial before this time.
    Down(Instant),
    /// Its session is ready and has no request since this time.
    Idle(Instant),
    /// It has a request, or its session is being set up.
    Busy,
}

/// A session for a new source.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Vacancy<A> {
    /// Its index.
    pub session: SessionId,
    /// The source that gives way.
    pub replaced: Option<A>,
}

/// The source of each session.
#[derive(Clone, Debug)]
pub struct SessionTable<A>(Vec<Option<A>>);

impl<A: Clone> SessionTable<A> {
    /// A table for this many sessions.
    pub fn new(sessions: usize) -> SessionTable<A> {
        SessionTable((0..sessions).map(|_| None).collect())
    }

    /// The source of a session.
    pub fn source(&self, session: SessionId) -> Option<&A> {
        self.0[session.0 as usize].as_ref()
    }

    /// Each source with its session.
    pub fn sources(&self) -> impl Iterator<Item = (SessionId, &A)> {
        let numbered = self.0.iter().enumerate();
        numbered.filter_map(|(index, name)| Some((SessionId(index as u32), name.as_ref()?)))
    }

    /// A session for a new source. It is a free one, or that of the source that has been down for
    /// the longest, else of the idle source that was used longest ago. So old prefill workers do
    /// not block new ones. `None`: each source is busy.
    pub fn find_vacancy(&self, standing: impl Fn(&A) -> Standing) -> Option<Vacancy<A>> {
        if let Some(free) = self.0.iter().position(Option::is_none) {
            return Some(Vacancy { session: SessionId(free as u32), replaced: None });
        }
        let standings = self.sources().map(|(session, name)| (standing(name), session.0, name));
        let (_, session, name) = standings
            .filter(|&(standing, ..)| standing != Standing::Busy)
            .min_by_key(|&(standing, session, _)| (standing, session))?;
        Some(Vacancy { session: SessionId(session), replaced: Some(name.clone()) })
    }

    /// Gives a session to a source.
    pub fn assign(&mut self, session: SessionId, source: A) {
        self.0[session.0 as usize] = Some(source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn down_gives_way_before_idle_and_busy_never() {
        let base = Instant::now();
        let at = |seconds| base + Duration::from_secs(seconds);
        let mut table = SessionTable::new(4);
        for source in 0..4 {
            let free = table.find_vacancy(|_| Standing::Idle(base)).unwrap();
            assert_eq!(free, Vacancy { session: SessionId(source), replaced: None });
            table.assign(free.session, source);
        }
        let replaced = |standings: [Standing; 4]| {
            let found = table.find_vacancy(|&source| standings[source as usize])?;
            assert_eq!(found.replaced, Some(found.session.0));
            found.replaced
        };
        use Standing::{Busy, Down, Idle};
        assert_eq!(replaced([Idle(at(0)), Down(at(9)), Down(at(8)), Idle(at(1))]), Some(2));
        assert_eq!(replaced([Busy, Idle(at(5)), Idle(at(4)), Idle(at(4))]), Some(2));
        assert_eq!(replaced([Busy, Busy, Busy, Idle(at(9))]), Some(3));
        assert_eq!(replaced([Busy; 4]), None);
    }
}
