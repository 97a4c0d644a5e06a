//! What a decode worker makes of a prefill worker that it has asked for a request's KV: when the request goes on, how it
//! ends, and what prefill is not to keep for it.
//!
//! ```text
//!          it says where the KV will be      it is done, or has failed
//! Unknown ────────────────────────────▶ Kept ────────────────────────▶ Over
//!    └──────────────── it fails ───────────────────────────────────────▲
//! ```
//! Without I/O and clock; `front::generations::asked` and the simulator carry out the same [`Next`]. Not here: the connection
//! to prefill (`front::asking`), the hand-off.

use crate::cause::Cause;
use crate::ids::Room;
use crate::stdx::planted::is_planted;

/// What prefill says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Said {
    /// The KV will be there; the first choice's room, where it tells one.
    Kept(Option<Room>),
    /// It has failed, or could not be asked.
    Failed(Cause),
    /// It refuses the request, as any other would.
    Refused,
    /// It was not asked, for want of room here.
    Unasked,
    /// It is done.
    Ended,
    /// Its connection was lost behind [`Said::Kept`].
    Lost,
}

/// How far the request is here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Own {
    /// Its client has some of the answer; of one that has lost prefill ([`Said::Lost`]), of each of its choices.
    pub begun: bool,
    /// All its choices have rooms.
    pub entered: bool,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Next {
    /// Nothing.
    On,
    /// Its choices enter their rooms.
    Enter,
    /// It ends for this reason, which is prefill's.
    FailAsPartners(Cause),
    /// It ends for this reason, which is its own.
    Fail(Cause),
    /// Its client gets prefill's refusal.
    Refuse,
    /// It has a while to begin, and [`Asked::hurried`] is asked then.
    Hurry,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It has not said where the KV will be.
    Unknown,
    /// It has, and is at work; the first choice's room.
    Kept(Option<Room>),
    /// It has nothing more to say.
    Over(Option<Room>),
}

/// What was asked for one request.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    stage: Stage,
    /// The hand-off has told of this failure, and prefill's own word on it is waited for.
    failing: Option<Cause>,
}

impl Default for Asked {
    fn default() -> Asked {
        Asked { stage: Stage::Unknown, failing: None }
    }
}

impl Asked {
    /// What follows from what prefill says.
    pub fn take(&mut self, said: Said, own: Own) -> Next {
        let (room, is_known) = match self.stage {
            Stage::Unknown => (None, false),
            Stage::Kept(room) | Stage::Over(room) => (room, true),
        };
        if !matches!(said, Said::Kept(_)) {
            self.stage = Stage::Over(room);
        }
        // Behind the first token it is decode's to find out what it lacks; that of a choice whose end alone was missing says
        // nothing of the others.
        let is_decodes = own.begun && is_known && own.entered;
        match said {
            Said::Kept(room) => {
                self.stage = Stage::Kept(room);
                Next::Enter
            }
            Said::Failed(_) | Said::Refused | Said::Unasked if is_decodes => Next::On,
            Said::Failed(cause) => Next::FailAsPartners(cause),
            Said::Unasked => Next::Fail(Cause::Overloaded),
            Said::Refused if own.begun => Next::FailAsPartners(Cause::Refused),
            Said::Refused => Next::Refuse,
            Said::Ended if is_planted("prefill's end is its failure") => {
                Next::FailAsPartners(Cause::PeerLost)
            }
            Said::Ended => self.unheard().map_or(Next::On, Next::Fail),
            // A link that was dialled anew since leads to a worker that knows nothing of the room.
            Said::Lost => {
                self.unheard().map_or(if own.begun { Next::On } else { Next::Hurry }, Next::Fail)
            }
        }
    }

    /// Whether a failure that the hand-off tells waits for prefill's word, which says whose it is; and whether it is the
    /// first of them.
    pub fn awaits_word(&mut self, cause: Cause) -> Option<bool> {
        // Of the others it makes no difference to whoever may try again.
        let waits = matches!(self.stage, Stage::Kept(_))
            && matches!(cause, Cause::Overloaded | Cause::Internal);
        waits.then(|| {
            let is_first = self.failing.is_none();
            self.failing.get_or_insert(cause);
            is_first
        })
    }

    /// The failure on which prefill's word was waited for, and is no longer.
    pub fn unheard(&mut self) -> Option<Cause> {
        self.failing.take()
    }

    /// The while is over that it had to begin.
    pub fn hurried(&self, begun: bool) -> Next {
        if begun { Next::On } else { Next::FailAsPartners(Cause::PeerLost) }
    }

    /// From which room on it may keep KV for the request. While it is at work it sees its client leave; its end may be on its
    /// way. What was claimed is no longer kept.
    pub fn room(&self) -> Option<Room> {
        match self.stage {
            Stage::Unknown => None,
            Stage::Kept(room) | Stage::Over(room) => room,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Option<Room> = Some(Room(7));
    const NEW: Own = Own { begun: false, entered: false };
    const WAITS: Own = Own { begun: false, entered: true };
    const TELLS: Own = Own { begun: true, entered: true };

    fn kept() -> Asked {
        let mut asked = Asked::default();
        assert_eq!(asked.take(Said::Kept(ROOM), NEW), Next::Enter);
        asked
    }

    #[test]
    fn a_request_enters_its_room_when_prefill_has_said_which() {
        assert_eq!(Asked::default().room(), None, "there is nothing to give up");
        let mut asked = kept();
        assert_eq!(asked.take(Said::Ended, WAITS), Next::On);
        assert_eq!(asked.room(), ROOM, "it may not have been claimed");
    }

    #[test]
    fn prefill_s_failure_is_the_request_s_until_decode_tells() {
        let failed = Said::Failed(Cause::Internal);
        assert_eq!(Asked::default().take(failed, NEW), Next::FailAsPartners(Cause::Internal));
        assert_eq!(kept().take(failed, WAITS), Next::FailAsPartners(Cause::Internal));
        assert_eq!(kept().take(failed, TELLS), Next::On);
        assert_eq!(Asked::default().take(Said::Refused, NEW), Next::Refuse);
        assert_eq!(kept().take(Said::Refused, WAITS), Next::Refuse);
        assert_eq!(Asked::default().take(Said::Unasked, NEW), Next::Fail(Cause::Overloaded));
        // The end of a choice was all that was missing of it.
        let told = Own { begun: true, entered: false };
        assert_eq!(
            Asked::default().take(Said::Refused, told),
            Next::FailAsPartners(Cause::Refused)
        );
    }

    #[test]
    fn a_request_whose_prefill_worker_was_lost_has_a_while_to_begin() {
        let mut asked = kept();
        assert_eq!(asked.take(Said::Lost, WAITS), Next::Hurry);
        assert_eq!(asked.hurried(true), Next::On, "it had everything");
        assert_eq!(asked.hurried(false), Next::FailAsPartners(Cause::PeerLost));
        assert_eq!(kept().take(Said::Lost, TELLS), Next::On);
        let mut failing = kept();
        assert_eq!(failing.awaits_word(Cause::Internal), Some(true));
        assert_eq!(failing.take(Said::Lost, WAITS), Next::Fail(Cause::Internal));
    }

    #[test]
    fn a_failure_that_the_hand_off_tells_waits_for_prefill_s_word() {
        let mut asked = kept();
        assert_eq!(asked.awaits_word(Cause::PeerLost), None);
        assert_eq!(asked.awaits_word(Cause::Overloaded), Some(true));
        assert_eq!(asked.awaits_word(Cause::Internal), Some(false));
        let mut other = asked;
        assert_eq!(asked.take(Said::Ended, WAITS), Next::Fail(Cause::Overloaded));
        assert_eq!(asked.awaits_word(Cause::Overloaded), None, "it has nothing more to say");
        assert_eq!(
            other.take(Said::Failed(Cause::Draining), WAITS),
            Next::FailAsPartners(Cause::Draining)
        );
        assert_eq!(Asked::default().awaits_word(Cause::Overloaded), None);
    }
}
