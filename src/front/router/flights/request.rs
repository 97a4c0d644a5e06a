//! What a client asks, and by that who serves it.

use crate::front::openai::routed::Routed;
use crate::front::router::call::Order;

/// What a request carries, and by that who serves it.
#[derive(Clone, Debug)]
pub enum Load {
    /// For a pair.
    Routed(Routed),
    /// For a decode worker alone.
    Decode(Vec<u8>),
    /// For any worker, without a body.
    Any,
}

impl Load {
    /// How many answers there will be, side by side.
    pub(super) fn choices(&self) -> usize {
        if let Load::Routed(body) = self { body.choices() as usize } else { 1 }
    }
}

/// A request to be served.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is asked.
    pub order: Order,
    /// With which body.
    pub load: Load,
    /// Its name in the log.
    pub id: String,
}
