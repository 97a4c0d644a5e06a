//! The role of the worker: told, changed, and compared with what it is taken for.

use super::{Routes, no_page};
use crate::front::http::Request;
use crate::front::openai::ApiError;
use crate::front::turning::{NOT_POSSIBLE, TAKEN_FOR, Told, Turning, Wanted};
use crate::obs::log::event;
use crate::wire::message::Role;
use std::time::Instant;

impl Routes {
    /// The worker's role can change from now on.
    pub fn set_turning(&mut self, turning: Turning) {
        self.turning = Some(turning);
    }

    /// Its role, and the change of it, where it can change.
    pub fn turning(&mut self) -> Option<&mut Turning> {
        self.turning.as_mut()
    }

    /// Whether it is about to have another role.
    pub fn is_changing(&self) -> bool {
        self.turning.as_ref().is_some_and(Turning::is_changing)
    }

    /// Whether it takes nothing new for that.
    pub(super) fn empties(&self) -> bool {
        self.turning.as_ref().is_some_and(Turning::takes_nothing)
    }

    /// What is told of it while so many requests run.
    pub(super) fn role(&self, running: usize) -> Told {
        match &self.turning {
            Some(turning) => turning.told(running),
            // A process that serves by itself does both, and always will.
            None => Turning::new(Role::Mixed, Vec::new()).told(running),
        }
    }

    /// Has it be another one; what is told of that, with which status.
    pub(super) fn change_role(
        &mut self,
        request: &Request,
        running: usize,
        now: Instant,
    ) -> Result<(u16, Told), ApiError> {
        no_page(request)?;
        if self.draining {
            return Err(ApiError::draining("the server is draining"));
        }
        let turning = self.turning.as_mut().ok_or_else(no_role)?;
        let wanted = Wanted::parse(&request.body)?;
        if turning.ask(wanted, now)? {
            let (from, to) = (turning.role(), wanted.role);
            event!(Info, "ctl", "its role is to change: no new requests", from = from, to = to);
        }
        Ok((if turning.is_changing() { 202 } else { 200 }, turning.told(running)))
    }

    /// Whether it is what its router takes it for, where that is said.
    pub(super) fn check_role(&self, request: &Request) -> Result<(), ApiError> {
        let (Some(turning), Some(taken_for)) = (&self.turning, request.head.headers.get(TAKEN_FOR))
        else {
            return Ok(());
        };
        match turning.is_taken_for(taken_for) {
            true => Ok(()),
            false => {
                let why =
                    format!("this worker is taken for {taken_for}, and is {}", turning.name());
                Err(ApiError { param: Some(TAKEN_FOR.into()), ..ApiError::draining(why) })
            }
        }
    }
}

/// What is said of the role of a process that has none to change.
fn no_role() -> ApiError {
    let why =
        "the role of baton prefill and baton decode can change; this process serves by itself";
    ApiError::new(409, NOT_POSSIBLE, why)
}
