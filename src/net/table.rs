//! Connections by id.
//!
//! Invariant: an id is used once. Each reuse of an index has a higher generation, from 1.

use super::connection::{ConnId, Connection, ConnectionState};

#[derive(Debug)]
pub(super) struct ConnectionTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    capacity: usize,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

impl ConnectionTable {
    /// A table that grows to `capacity` connections.
    pub(super) fn new(capacity: usize) -> ConnectionTable {
        ConnectionTable { slots: Vec::new(), free: Vec::new(), capacity }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() == self.capacity
    }

    /// Stores a connection. The table must not be full.
    pub(super) fn insert(&mut self, connection: Connection) -> ConnId {
        assert!(!self.is_full(), "table of connections is full");
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, connection: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1).max(1);
        let before = slot.connection.replace(connection);
        assert!(before.is_none(), "a free index has no connection");
        ConnId { index, generation: slot.generation }
    }

    pub(super) fn get(&self, id: ConnId) -> Option<&Connection> {
        let slot =
            self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation)?;
        slot.connection.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: ConnId) -> Option<&mut Connection> {
        let slot = self
            .slots
            .get_mut(id.index as usize)
            .filter(|slot| slot.generation == id.generation)?;
        slot.connection.as_mut()
    }

    /// The connections in a given state.
    pub(super) fn in_state(&self, state: ConnectionState) -> Vec<ConnId> {
        let named = |(index, slot): (usize, &Slot)| {
            let connection = slot.connection.as_ref()?;
            let id = ConnId { index: index as u32, generation: slot.generation };
            (connection.state == state).then_some(id)
        };
        self.slots.iter().enumerate().filter_map(named).collect()
    }

    /// All connections.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.slots.iter_mut().filter_map(|slot| slot.connection.as_mut())
    }

    pub(super) fn remove(&mut self, id: ConnId) -> Option<Connection> {
        let slot = self
            .slots
            .get_mut(id.index as usize)
            .filter(|slot| slot.generation == id.generation)?;
        let connection = slot.connection.take()?;
        self.free.push(id.index);
        Some(connection)
    }
}
