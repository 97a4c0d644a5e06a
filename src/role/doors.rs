//! The ports that a worker of a cluster opens for its peers, by its role: all of them or none.
//!
//! Thread: the one that starts the process, which becomes `ctl`. Not here: who is let in by them (`front`).

use super::RoleError;
use super::ports::Port;
use crate::config::resolved::PartConfig;
use crate::config::values::parse_host;
use crate::front::passing::Passing;
use crate::limits::CONTROL_CONNECTIONS_MAX;
use crate::net::{ListenerId, Reactor};
use crate::wire::message::Role;
use std::net::SocketAddr;

/// A port that is open, and its number.
pub type Door = (ListenerId, u16);

/// Those of one role.
#[derive(Debug, Default)]
pub struct Doors {
    /// Where decode workers dial, of a prefill worker.
    pub control: Option<Door>,
    /// Where its registry is.
    pub registry: Option<Door>,
    /// Where lanes of tcp are dialled, of a decode worker.
    pub data: Option<Door>,
    /// Where a prefill worker shows its memory.
    pub passing: Passing,
}

/// What a role opens beside the port of HTTP.
pub fn ports(config: &PartConfig, role: Role) -> Vec<Port> {
    let takes_tcp = config.handoff.transfer.takes_tcp();
    match role {
        Role::Prefill => vec![control(config), registry(config)],
        Role::Decode => takes_tcp.then(|| data(config)).into_iter().collect(),
        Role::Mixed => Vec::new(),
    }
}

fn control(config: &PartConfig) -> Port {
    Port::new("--control-port", config.control_port)
}

fn registry(config: &PartConfig) -> Port {
    Port::new("--bootstrap-port", config.bootstrap_port)
}

fn data(config: &PartConfig) -> Port {
    Port::new("--data-port", config.data_port)
}

impl Doors {
    /// Opens those of this role.
    ///
    /// # Errors
    /// One cannot be had; the others are closed again.
    pub fn open(
        config: &PartConfig,
        role: Role,
        reactor: &mut Reactor,
    ) -> Result<Doors, RoleError> {
        let mut doors = Doors::default();
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
        config: &PartConfig,
        role: Role,
        reactor: &mut Reactor,
    ) -> Result<(), RoleError> {
        let host = config.worker.front.host;
        let mut open = |port: Port| -> Result<Door, RoleError> {
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

    /// What peers are told of the data port, an address of none being the one that they see.
    pub fn lanes(&self, config: &PartConfig) -> Option<SocketAddr> {
        let (_, port) = self.data?;
        // The configuration takes nothing but addresses here.
        let advertised =
            config.handoff.advertise_host.as_deref().and_then(|host| parse_host(host).ok());
        Some(SocketAddr::new(advertised.unwrap_or(config.worker.front.host), port))
    }
}
