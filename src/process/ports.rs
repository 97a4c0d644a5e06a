//! The ports of a process. They are checked before the load of a model, which can take minutes, and
//! opened after it.
//!
//! During the load they are closed, because a client takes an open port for a server that answers.

use super::ProcessError;
use crate::net::{ListenerId, Reactor};
use std::net::{IpAddr, SocketAddr};

/// A port and the flag that sets it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Port {
    /// The flag, for the error message.
    pub flag: &'static str,
    /// The port number; 0: a free port.
    pub number: u16,
}

impl Port {
    /// The port that `flag` sets.
    pub fn new(flag: &'static str, number: u16) -> Port {
        Port { flag, number }
    }

    /// Listens at this port.
    ///
    /// # Errors
    /// The port is in use, or the address does not belong to this host.
    pub fn listen(
        self,
        host: IpAddr,
        limit: usize,
        reactor: &mut Reactor,
    ) -> Result<ListenerId, ProcessError> {
        let address = SocketAddr::new(host, self.number);
        let listener = reactor.listen(&address.into(), limit);
        listener.map_err(|error| ProcessError::Listen { flag: self.flag, address, error })
    }
}

/// Checks that all ports are free at the moment.
///
/// # Errors
/// The first port that is not free.
pub fn check(host: IpAddr, ports: &[Port], reactor: &mut Reactor) -> Result<(), ProcessError> {
    // All ports are open at the same time, so that two flags with the same number are an error.
    let opened: Vec<_> = ports.iter().map(|port| port.listen(host, 1, reactor)).collect();
    opened.iter().flatten().for_each(|&listener| reactor.stop_listening(listener));
    opened.into_iter().try_for_each(|listener| listener.map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_port_that_is_taken_is_named_with_its_flag() {
        let mut reactor = Reactor::new().unwrap();
        let host: IpAddr = "127.0.0.1".parse().unwrap();
        let mut check = |number| {
            let ports = [Port::new("--port", 0), Port::new("--data-port", number)];
            check(host, &ports, &mut reactor)
        };
        let taken = TcpListener::bind((host, 0)).unwrap();
        let number = taken.local_addr().unwrap().port();
        let text = check(number).unwrap_err().to_string();
        assert!(
            text.starts_with(&format!("--data-port: cannot listen on {host}:{number}: ")),
            "{text}"
        );
        check(0).unwrap();
    }

    #[test]
    fn an_address_of_another_host_is_the_fault_of_the_host_flag() {
        let host: IpAddr = "192.0.2.1".parse().unwrap();
        let refused = check(host, &[Port::new("--port", 0)], &mut Reactor::new().unwrap());
        let text = refused.unwrap_err().to_string();
        assert!(text.starts_with("--host: cannot listen on 192.0.2.1:0: "), "{text}");
    }
}
