//! The role of the worker: queries, changes, and the check against the role that the router
//! assumes.
//!
//! Thread: `ctl`. Not here: the steps of a role change (`server::role_change`).

use super::WorkerRoutes;
use crate::api::ApiError;
use crate::api::info::TAKEN_FOR;
use crate::http::Request;
use crate::ids::Role;
use crate::obs::log::event;
use crate::server::authorization::refuse_browser_request;
use crate::server::role_change::{NOT_POSSIBLE, RoleChange, RoleChangeRequest, RoleStatus};
use std::time::Instant;

impl WorkerRoutes {
    /// The worker's role can change from now on.
    pub fn set_role_change(&mut self, turning: RoleChange) {
        self.role_change = Some(turning);
    }

    /// The state of role changes, if the role can change.
    pub fn role_change(&mut self) -> Option<&mut RoleChange> {
        self.role_change.as_mut()
    }

    /// Whether a role change is in progress.
    pub fn is_changing(&self) -> bool {
        self.role_change.as_ref().is_some_and(RoleChange::is_changing)
    }

    /// Whether a role change refuses new requests.
    pub(super) fn empties(&self) -> bool {
        self.role_change.as_ref().is_some_and(RoleChange::takes_nothing)
    }

    /// The status of the role for `GET /role`, with this number of running requests.
    pub(super) fn role(&self, running: usize) -> RoleStatus {
        match &self.role_change {
            Some(turning) => turning.status(running),
            // A process with both roles reports the role `mixed`, and keeps it.
            None => RoleChange::new(Role::Mixed, Vec::new()).status(running),
        }
    }

    /// Starts a role change. Returns the HTTP status and the status of the role.
    pub(super) fn change_role(
        &mut self,
        request: &Request,
        running: usize,
        now: Instant,
    ) -> Result<(u16, RoleStatus), ApiError> {
        refuse_browser_request(request)?;
        if self.draining {
            return Err(ApiError::draining("the server is draining"));
        }
        let turning = self.role_change.as_mut().ok_or_else(no_role)?;
        let wanted = RoleChangeRequest::parse(&request.body)?;
        if turning.request_change(wanted, now)? {
            let (from, to) = (turning.role(), wanted.role);
            event!(Info, "ctl", "role change: no new requests", from = from, to = to);
        }
        Ok((if turning.is_changing() { 202 } else { 200 }, turning.status(running)))
    }

    /// Checks the role that the router assumes, if the request names it.
    pub(super) fn check_role(&self, request: &Request) -> Result<(), ApiError> {
        let (Some(turning), Some(taken_for)) =
            (&self.role_change, request.head.headers.get(TAKEN_FOR))
        else {
            return Ok(());
        };
        match turning.is_taken_for(taken_for) {
            true => Ok(()),
            false => {
                let why = format!(
                    "this worker was expected to be {taken_for}, but it is {}",
                    turning.name()
                );
                Err(ApiError { param: Some(TAKEN_FOR.into()), ..ApiError::draining(why) })
            }
        }
    }
}

/// The error of a process that cannot change its role.
fn no_role() -> ApiError {
    let why = "the role of baton prefill and baton decode can change; this process has both roles";
    ApiError::new(409, NOT_POSSIBLE, why)
}
