//! The ports that a cluster's worker opens for its peers. They depend on its role; either all open
//! or none.
//!
//! Thread: the thread that starts the process and becomes `ctl`. Not here: the acceptance of peers
//! (`link`).

use super::ProcessError;
use super::ports::Port;
use crate::config::ClusterWorkerConfig;
use crate::config::values::parse_host;
use crate::ids::Role;
use crate::limits::CONTROL_CONNECTIONS_MAX;
use crate::link::shm_handshake::ShmHandshake;
use crate::net::{ListenerId, Reactor};
use std::net::SocketAddr;

/// An open port and its number.
pub type BoundPort = (ListenerId, u16);

/// The open ports of one role.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Port of a prefill worker for control links from decode workers.
    pub control: Option<BoundPort>,
    /// Port of a prefill worker for its bootstrap registry.
    pub registry: Option<BoundPort>,
    /// Port of a decode worker for lanes of tcp sessions.
    pub data: Option<BoundPort>,
    /// The unix socket by which a prefill worker shares its memory.
    pub passing: ShmHandshake,
}

/// The ports of a role, other than the HTTP port.
pub fn ports(config: &ClusterWorkerConfig, role: Role) -> Vec<Port> {
    let takes_tcp = config.handoff.transfer.takes_tcp();
    match role {
        Role::Prefill => vec![control(config), registry(config)],
        Role::Decode => takes_tcp.then(|| data(config)).into_iter().collect(),
        Role::Mixed => Vec::new(),
    }
}

fn control(config: &ClusterWorkerConfig) -> Port {
    Port::new("--control-port", config.control_port)
}

fn registry(config: &ClusterWorkerConfig) -> Port {
    Port::new("--bootstrap-port", config.bootstrap_port)
}

fn data(config: &ClusterWorkerConfig) -> Port {
    Port::new("--data-port", config.data_port)
}

impl Listeners {
    /// Opens the ports of this role.
    ///
    /// # Errors
    /// A port cannot be opened; the others are closed again.
    pub fn open(
        config: &ClusterWorkerConfig,
        role: Role,
        reactor: &mut Reactor,
    ) -> Result<Listeners, ProcessError> {
        let mut listeners = Listeners::default();
        match listeners.fill(config, role, reactor) {
            Ok(()) => Ok(listeners),
            Err(error) => {
                listeners.close(reactor);
                Err(error)
            }
        }
    }

    fn fill(
        &mut self,
        config: &ClusterWorkerConfig,
        role: Role,
        reactor: &mut Reactor,
    ) -> Result<(), ProcessError> {
        let host = config.worker.server.host;
        let mut open = |port: Port| -> Result<BoundPort, ProcessError> {
            let listener = port.listen(host, CONTROL_CONNECTIONS_MAX, reactor)?;
            Ok((listener, reactor.local_address(listener).map_or(0, |address| address.port())))
        };
        match role {
            Role::Prefill => {
                self.control = Some(open(control(config))?);
                self.registry = Some(open(registry(config))?);
                let listened = self.passing.listen(reactor);
                listened
                    .map_err(|error| ProcessError::Io("cannot listen on a unix socket", error))?;
            }
            Role::Decode if config.handoff.transfer.takes_tcp() => {
                self.data = Some(open(data(config))?)
            }
            Role::Decode | Role::Mixed => {}
        }
        Ok(())
    }

    fn close(self, reactor: &mut Reactor) {
        for (listener, _) in [self.control, self.registry, self.data].into_iter().flatten() {
            reactor.stop_listening(listener);
        }
        self.passing.close(reactor);
    }

    /// The address that peers get for the data port. If it is 0.0.0.0 or ::, they use the address
    /// at which they reach this worker.
    pub fn data_address(&self, config: &ClusterWorkerConfig) -> Option<SocketAddr> {
        let (_, port) = self.data?;
        // `resolve` and `check_role` refuse names for a decode worker.
        let advertised =
            config.handoff.advertise_host.as_deref().and_then(|host| parse_host(host).ok());
        Some(SocketAddr::new(advertised.unwrap_or(config.worker.server.host), port))
    }
}
