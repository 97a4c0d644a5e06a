//! The real operating system: epoll through mio, and signals.

use super::signals::Signals;
use super::{HANGUPS, SIGNALS, WAKER};
use crate::limits::NET_READY_MAX;
use crate::net::address::Address;
use crate::net::stream::{Listener, Stream};
use crate::net::waker::Waker;
use crate::sys::stream::ready::Readiness;
use libc::{SIGHUP, SIGINT, SIGTERM};
use mio::{Interest, Token};
use std::io::{self, ErrorKind};
use std::time::Duration;

#[derive(Debug)]
pub(in crate::net) struct SystemKernel {
    poll: mio::Poll,
    ready: mio::Events,
    signals: Option<Signals>,
    hangups: Option<Signals>,
}

impl SystemKernel {
    pub(super) fn new() -> io::Result<SystemKernel> {
        let ready = mio::Events::with_capacity(NET_READY_MAX);
        Ok(SystemKernel { poll: mio::Poll::new()?, ready, signals: None, hangups: None })
    }

    pub(super) fn waker(&self) -> io::Result<Waker> {
        Ok(Waker::system(mio::Waker::new(self.poll.registry(), Token(WAKER))?))
    }

    pub(super) fn wait(
        &mut self,
        timeout: Option<Duration>,
        ready: &mut Vec<Readiness>,
    ) -> io::Result<()> {
        match self.poll.poll(&mut self.ready, timeout) {
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            other => other?,
        }
        ready.extend(self.ready.iter().map(|event| Readiness {
            token: event.token().0,
            readable: event.is_readable() || event.is_error(),
            writable: event.is_writable() || event.is_error(),
            read_closed: event.is_read_closed() || event.is_error(),
            broken: event.is_error(),
        }));
        Ok(())
    }

    pub(super) fn watch_signals(&mut self) -> io::Result<()> {
        self.signals = Some(self.watch(&[SIGINT, SIGTERM], SIGNALS)?);
        Ok(())
    }

    pub(super) fn watch_hangups(&mut self) -> io::Result<()> {
        self.hangups = Some(self.watch(&[SIGHUP], HANGUPS)?);
        Ok(())
    }

    fn watch(&self, signals: &[i32], token: usize) -> io::Result<Signals> {
        let mut signals = Signals::install(signals)?;
        self.poll.registry().register(signals.stream(), Token(token), Interest::READABLE)?;
        Ok(signals)
    }

    pub(super) fn take_signals(&mut self, token: usize) -> usize {
        let signals = if token == SIGNALS { &mut self.signals } else { &mut self.hangups };
        signals.as_mut().map_or(0, Signals::take)
    }

    pub(super) fn listen(&mut self, address: &Address, token: usize) -> io::Result<Listener> {
        let mut listener = Listener::bind(address)?;
        if let Some(source) = listener.source() {
            self.poll.registry().register(source, Token(token), Interest::READABLE)?;
        }
        Ok(listener)
    }

    pub(super) fn register(&mut self, stream: &mut Stream, token: usize) -> io::Result<()> {
        let source = stream.source().ok_or(ErrorKind::Unsupported)?;
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(source, Token(token), interest)
    }

    pub(super) fn deregister(&mut self, stream: &mut Stream) {
        if let Some(source) = stream.source() {
            // Fails only if it was not registered.
            let _ = self.poll.registry().deregister(source);
        }
    }
}
