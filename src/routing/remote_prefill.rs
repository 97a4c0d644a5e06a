//! The state of a request for which a decode worker has asked prefill. It decides when the request
//! continues, how it ends, and whether prefill must drop kept KV.
//!
//! ```text
//!          prefill names the kept KV       it is done, or has failed
//! Unknown ───────────────────────────▶ Kept ────────────────────────▶ Over
//!    └──────────────── it fails ──────────────────────────────────────▲
//! ```
//! Pure; `worker::requests::remote_prefill` performs the [`PrefillAction`]s.
//! Not here: the connection to prefill (`worker::prefill_client`), the hand-off.

use crate::cause::Cause;
use crate::ids::Room;
use crate::stdx::failpoint::is_failpoint_active;

/// An answer of the prefill worker, or its absence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Prefill keeps the KV. Inside is the room of the first choice, if prefill names one.
    Kept(Option<Room>),
    /// Prefill has failed, or was unreachable.
    Failed(Cause),
    /// Prefill refuses the request, and any other worker would also refuse it.
    Refused,
    /// Prefill was not asked, because this worker is at its limit.
    NotSent,
    /// Prefill is done.
    Ended,
    /// The connection to prefill was lost after [`Reply::Kept`].
    Lost,
}

/// The progress of the request on the decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeProgress {
    /// Whether the client has a part of the answer. For [`Reply::Lost`]: a part of each choice.
    pub begun: bool,
    /// Whether all choices have rooms.
    pub entered: bool,
}

/// What the caller must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum PrefillAction {
    /// Nothing.
    On,
    /// Let the choices enter their rooms.
    Enter,
    /// End the request with this cause, reported as prefill's.
    FailAsPartners(Cause),
    /// End the request with this cause, reported as decode's own.
    Fail(Cause),
    /// Send prefill's refusal to the client.
    Refuse,
    /// Give the request a short time to begin, then call [`RemotePrefill::hurried`].
    Hurry,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Prefill has not named the kept KV.
    Unknown,
    /// Prefill has named the kept KV and still works. Inside is the room of the first choice.
    Kept(Option<Room>),
    /// Prefill sends no further reply.
    Over(Option<Room>),
}

/// The prefill worker's part of one request.
#[derive(Clone, Copy, Debug)]
pub struct RemotePrefill {
    stage: Stage,
    /// A failure that the hand-off reported. It waits for prefill's own report.
    failing: Option<Cause>,
}

impl Default for RemotePrefill {
    fn default() -> RemotePrefill {
        RemotePrefill { stage: Stage::Unknown, failing: None }
    }
}

impl RemotePrefill {
    /// Applies a reply of prefill and returns what the caller must do.
    pub fn apply_reply(&mut self, said: Reply, own: DecodeProgress) -> PrefillAction {
        let (room, is_known) = match self.stage {
            Stage::Unknown => (None, false),
            Stage::Kept(room) | Stage::Over(room) => (room, true),
        };
        if !matches!(said, Reply::Kept(_)) {
            self.stage = Stage::Over(room);
        }
        // After the first token, decode detects missing KV itself. A failure of one choice then
        // says nothing about the others.
        let is_decodes = own.begun && is_known && own.entered;
        match said {
            Reply::Kept(room) => {
                self.stage = Stage::Kept(room);
                PrefillAction::Enter
            }
            Reply::Failed(_) | Reply::Refused | Reply::NotSent if is_decodes => PrefillAction::On,
            Reply::Failed(cause) => PrefillAction::FailAsPartners(cause),
            Reply::NotSent => PrefillAction::Fail(Cause::Overloaded),
            Reply::Refused if own.begun => PrefillAction::FailAsPartners(Cause::Refused),
            Reply::Refused => PrefillAction::Refuse,
            Reply::Ended if is_failpoint_active("prefill's end is its failure") => {
                PrefillAction::FailAsPartners(Cause::PeerLost)
            }
            Reply::Ended => self.take_deferred().map_or(PrefillAction::On, PrefillAction::Fail),
            // If the link was dialled again in the meantime, the worker at its end does not know
            // the room.
            Reply::Lost => self.take_deferred().map_or(
                if own.begun { PrefillAction::On } else { PrefillAction::Hurry },
                PrefillAction::Fail,
            ),
        }
    }

    /// Whether a failure that the hand-off reports must wait for prefill's report, which says which
    /// side failed. `Some(true)`: it is the first such failure.
    pub fn defer_failure(&mut self, cause: Cause) -> Option<bool> {
        // For other causes, the failed side makes no difference to a router that retries.
        let waits = matches!(self.stage, Stage::Kept(_))
            && matches!(cause, Cause::Overloaded | Cause::Internal);
        waits.then(|| {
            let is_first = self.failing.is_none();
            self.failing.get_or_insert(cause);
            is_first
        })
    }

    /// Takes the failure that waited for prefill's report.
    pub fn take_deferred(&mut self) -> Option<Cause> {
        self.failing.take()
    }

    /// Applies the end of the short time to begin.
    pub fn hurried(&self, begun: bool) -> PrefillAction {
        if begun { PrefillAction::On } else { PrefillAction::FailAsPartners(Cause::PeerLost) }
    }

    /// The first room for which prefill can still keep KV. Before prefill has named the KV, the
    /// result is `None`: prefill then notices by itself that its client left. After a claim,
    /// prefill keeps no KV under this room.
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
    const NEW: DecodeProgress = DecodeProgress { begun: false, entered: false };
    const WAITS: DecodeProgress = DecodeProgress { begun: false, entered: true };
    const TELLS: DecodeProgress = DecodeProgress { begun: true, entered: true };

    fn kept() -> RemotePrefill {
        let mut asked = RemotePrefill::default();
        assert_eq!(asked.apply_reply(Reply::Kept(ROOM), NEW), PrefillAction::Enter);
        asked
    }

    #[test]
    fn a_request_enters_its_room_when_prefill_has_said_which() {
        assert_eq!(RemotePrefill::default().room(), None, "there is nothing to give up");
        let mut asked = kept();
        assert_eq!(asked.apply_reply(Reply::Ended, WAITS), PrefillAction::On);
        assert_eq!(asked.room(), ROOM, "it may not have been claimed");
    }

    #[test]
    fn prefill_s_failure_is_the_request_s_until_decode_tells() {
        let failed = Reply::Failed(Cause::Internal);
        assert_eq!(
            RemotePrefill::default().apply_reply(failed, NEW),
            PrefillAction::FailAsPartners(Cause::Internal)
        );
        assert_eq!(
            kept().apply_reply(failed, WAITS),
            PrefillAction::FailAsPartners(Cause::Internal)
        );
        assert_eq!(kept().apply_reply(failed, TELLS), PrefillAction::On);
        assert_eq!(
            RemotePrefill::default().apply_reply(Reply::Refused, NEW),
            PrefillAction::Refuse
        );
        assert_eq!(kept().apply_reply(Reply::Refused, WAITS), PrefillAction::Refuse);
        assert_eq!(
            RemotePrefill::default().apply_reply(Reply::NotSent, NEW),
            PrefillAction::Fail(Cause::Overloaded)
        );
        // Only the end of a choice was missing.
        let progress = DecodeProgress { begun: true, entered: false };
        assert_eq!(
            RemotePrefill::default().apply_reply(Reply::Refused, progress),
            PrefillAction::FailAsPartners(Cause::Refused)
        );
    }

    #[test]
    fn a_request_that_lost_its_prefill_worker_has_some_time_to_begin() {
        let mut asked = kept();
        assert_eq!(asked.apply_reply(Reply::Lost, WAITS), PrefillAction::Hurry);
        assert_eq!(asked.hurried(true), PrefillAction::On, "it had everything");
        assert_eq!(asked.hurried(false), PrefillAction::FailAsPartners(Cause::PeerLost));
        assert_eq!(kept().apply_reply(Reply::Lost, TELLS), PrefillAction::On);
        let mut failing = kept();
        assert_eq!(failing.defer_failure(Cause::Internal), Some(true));
        assert_eq!(failing.apply_reply(Reply::Lost, WAITS), PrefillAction::Fail(Cause::Internal));
    }

    #[test]
    fn a_failure_that_the_hand_off_tells_waits_for_prefill_s_word() {
        let mut asked = kept();
        assert_eq!(asked.defer_failure(Cause::PeerLost), None);
        assert_eq!(asked.defer_failure(Cause::Overloaded), Some(true));
        assert_eq!(asked.defer_failure(Cause::Internal), Some(false));
        let mut other = asked;
        assert_eq!(asked.apply_reply(Reply::Ended, WAITS), PrefillAction::Fail(Cause::Overloaded));
        assert_eq!(asked.defer_failure(Cause::Overloaded), None, "it has nothing more to say");
        assert_eq!(
            other.apply_reply(Reply::Failed(Cause::Draining), WAITS),
            PrefillAction::FailAsPartners(Cause::Draining)
        );
        assert_eq!(RemotePrefill::default().defer_failure(Cause::Overloaded), None);
    }
}
