//! The role of the worker: queries, changes, and the comparison with the role that the router
//! expects.
//!
//! Thread: `ctl`. Not here: the steps of a role change (`server::role_change`).

use super::WorkerRoutes;
use crate::api::info::TAKEN_FOR;
use crate::api::{ApiError, ErrorCode};
use crate::http::Request;
use crate::ids::Role;
use crate::obs::log::event;
use crate::server::role_change::{RoleChange, RoleChangeRequest, RoleStatus};
use std::time::Instant;

impl WorkerRoutes {
    /// From now on, the worker's role can change.
    pub fn set_role_change(&mut self, role_change: RoleChange) {
        self.role_change = Some(role_change);
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
            Some(role_change) => role_change.status(running, self.draining),
            // A process with both roles reports the role `mixed`, which cannot change.
            None => RoleChange::new(Role::Mixed, Vec::new()).status(running, self.draining),
        }
    }

    /// Starts a role change. Returns the HTTP status and the status of the role.
    pub(super) fn change_role(
        &mut self,
        request: &Request,
        running: usize,
        now: Instant,
    ) -> Result<(u16, RoleStatus), ApiError> {
        if self.draining {
            return Err(ApiError::draining("the server is draining"));
        }
        let role_change = self.role_change.as_mut().ok_or_else(no_role)?;
        let wanted = RoleChangeRequest::parse(&request.body)?;
        if role_change.request_change(wanted, now)? {
            let (from, to) = (role_change.role(), wanted.role);
            event!(Info, "ctl", "role change: no new requests", from = from, to = to);
        }
        Ok((if role_change.is_changing() { 202 } else { 200 }, role_change.status(running, false)))
    }

    /// Checks the role that the router expects, if the request names one.
    pub(super) fn check_role(&self, request: &Request) -> Result<(), ApiError> {
        let (Some(role_change), Some(taken_for)) =
            (&self.role_change, request.head.headers.get(TAKEN_FOR))
        else {
            return Ok(());
        };
        match role_change.is_taken_for(taken_for) {
            true => Ok(()),
            false => {
                let why = format!(
                    "the router expects this worker to be {taken_for}, but it is {}",
                    role_change.name()
                );
                Err(ApiError { param: Some(TAKEN_FOR.into()), ..ApiError::draining(why) })
            }
        }
    }
}

/// The error of a process that cannot change its role.
fn no_role() -> ApiError {
    let why = "the role of baton prefill and baton decode can change; this process has both roles";
    ApiError::new(409, ErrorCode::RoleNotPossible, why)
}
