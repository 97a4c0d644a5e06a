//! An entry that a worker keeps up, whatever keeps the registry.

use super::enrolment::Enrolment;
use super::errand::{Errand, Request};
use super::etcd::enrolment::EtcdEnrolment;
use crate::config::secret::Secret;
use std::time::Instant;

/// One worker at one registry.
#[derive(Debug)]
pub enum Keeping {
    /// In a router.
    Router(Enrolment),
    /// In etcd.
    Etcd(EtcdEnrolment),
}

impl Keeping {
    /// Takes the entry back, and keeps none from now on.
    pub fn withdraw(&mut self, now: Instant) {
        match self {
            Keeping::Router(enrolment) => enrolment.withdraw(now),
            Keeping::Etcd(enrolment) => enrolment.withdraw(now),
        }
    }

    /// The entry is proven by this key from now on.
    pub fn set_key(&mut self, key: Option<&Secret>) {
        match self {
            Keeping::Router(enrolment) => enrolment.set_key(key.cloned()),
            Keeping::Etcd(enrolment) => enrolment.set_key(key),
        }
    }

    /// Whether renewing rests: a worker that hangs is to look dead.
    pub fn pause(&mut self, paused: bool) {
        match self {
            Keeping::Router(enrolment) => enrolment.pause(paused),
            Keeping::Etcd(enrolment) => enrolment.pause(paused),
        }
    }

    /// Whether nothing more will be asked.
    pub fn is_over(&self) -> bool {
        match self {
            Keeping::Router(enrolment) => enrolment.is_over(),
            Keeping::Etcd(enrolment) => enrolment.is_over(),
        }
    }

    fn errand(&mut self) -> &mut dyn Errand {
        match self {
            Keeping::Router(enrolment) => enrolment,
            Keeping::Etcd(enrolment) => enrolment,
        }
    }
}

impl Errand for Keeping {
    fn scheme(&self) -> &'static str {
        match self {
            Keeping::Router(enrolment) => enrolment.scheme(),
            Keeping::Etcd(enrolment) => enrolment.scheme(),
        }
    }

    fn poll(&mut self, now: Instant) -> Option<Request> {
        self.errand().poll(now)
    }

    fn answered(&mut self, status: u16, body: &[u8], now: Instant) -> Result<(), String> {
        self.errand().answered(status, body, now)
    }

    fn piece(&mut self, bytes: &[u8], now: Instant) -> Result<(), String> {
        self.errand().piece(bytes, now)
    }

    fn is_first_kept(&mut self) -> bool {
        self.errand().is_first_kept()
    }

    fn failed(&mut self, now: Instant) {
        self.errand().failed(now);
    }
}
