//! A worker's entry in a registry, which is a router or etcd.

use crate::config::secret::Secret;
use crate::registry::call::{RegistryRequest, RegistryTask};
use crate::registry::etcd::lease::EtcdLease;
use crate::registry::router_lease::RouterLease;
use std::time::Instant;

/// One worker's entry in one registry.
#[derive(Debug)]
pub enum RegistryLease {
    /// The registry is a router.
    Router(RouterLease),
    /// The registry is etcd.
    Etcd(EtcdLease),
}

impl RegistryLease {
    /// Removes the entry and creates no other.
    pub fn withdraw(&mut self, now: Instant) {
        match self {
            RegistryLease::Router(enrolment) => enrolment.withdraw(now),
            RegistryLease::Etcd(enrolment) => enrolment.withdraw(now),
        }
    }

    /// Proves this key from now on.
    pub fn set_key(&mut self, key: Option<&Secret>) {
        match self {
            RegistryLease::Router(enrolment) => enrolment.set_key(key.cloned()),
            RegistryLease::Etcd(enrolment) => enrolment.set_key(key),
        }
    }

    /// Pauses or resumes the renewals, because a worker that hangs must look dead.
    pub fn pause(&mut self, paused: bool) {
        match self {
            RegistryLease::Router(enrolment) => enrolment.pause(paused),
            RegistryLease::Etcd(enrolment) => enrolment.pause(paused),
        }
    }

    /// Whether no request follows.
    pub fn is_over(&self) -> bool {
        match self {
            RegistryLease::Router(enrolment) => enrolment.is_over(),
            RegistryLease::Etcd(enrolment) => enrolment.is_over(),
        }
    }

    fn task(&mut self) -> &mut dyn RegistryTask {
        match self {
            RegistryLease::Router(enrolment) => enrolment,
            RegistryLease::Etcd(enrolment) => enrolment,
        }
    }
}

impl RegistryTask for RegistryLease {
    fn scheme(&self) -> &'static str {
        match self {
            RegistryLease::Router(enrolment) => enrolment.scheme(),
            RegistryLease::Etcd(enrolment) => enrolment.scheme(),
        }
    }

    fn poll(&mut self, now: Instant) -> Option<RegistryRequest> {
        self.task().poll(now)
    }

    fn handle_answer(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
        self.task().handle_answer(status, body, now)
    }

    fn handle_piece(&mut self, bytes: &[u8], now: Instant) -> Result<(), String> {
        self.task().handle_piece(bytes, now)
    }

    fn is_first_kept(&mut self) -> bool {
        self.task().is_first_kept()
    }

    fn handle_failure(&mut self, now: Instant) {
        self.task().handle_failure(now);
    }
}
