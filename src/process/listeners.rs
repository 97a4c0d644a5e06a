//! The ports that a cluster's worker opens for its peers, according to its role: all or none.
//!
//! Thread: the one that starts the process, which becomes `ctl`. Not here: which peers are accepted
//! (`peer`).

use super::RoleError;
use super::ports::Port;
use crate::config::ClusterWorkerConfig;
use crate::config::values::parse_host;
use crate::ids::Role;
use crate::limits::CONTROL_CONNECTIONS_MAX;
use crate::net::{ListenerId, Reactor};
use crate::peer::shm_handshake::ShmHandshake;
use std::net::SocketAddr;

/// An open port and its number.
pub type BoundPort = (ListenerId, u16);

/// The open ports of one role.
#[derive(Debug, Default)]
pub struct Listeners {
    /// Control links from decode workers, of a prefill worker.
    pub control: Option<BoundPort>,
    /// The bootstrap registry, of a prefill worker.
    pub registry: Option<BoundPort>,
    /// Lanes of tcp sessions, of a decode worker.
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
    ) -> Result<Listeners, RoleError> {
        let mut doors = Listeners::default();
        match doors.fill(config, role, reactor) {
            Ok(()) => Ok(doors),
            Err(error) => {
                doors.close(reactor);
                Err(error)
            }
        }
    }

    fn fill(
        &mut self,
        config: &ClusterWorkerConfig,
        role: Role,
        reactor: &mut Reactor,
    ) -> Result<(), RoleError> {
        let host = config.worker.front.host;
        let mut open = |port: Port| -> Result<BoundPort, RoleError> {
            let listener = port.listen(host, CONTROL_CONNECTIONS_MAX, reactor)?;
            Ok((listener, reactor.local_address(listener).map_or(0, |address| address.port())))
        };
        match role {
            Role::Prefill => {
                self.control = Some(open(control(config))?);
                self.registry = Some(open(registry(config))?);
                let listened = self.passing.listen(reactor);
                listened.map_err(|error| RoleError::Io("cannot listen on a unix socket", error))?;
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
        Some(SocketAddr::new(advertised.unwrap_or(config.worker.front.host), port))
    }
}
