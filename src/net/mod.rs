//! The one place that knows mio: a reactor of listeners and connections, and the timers beside it.
//!
//! ```text
//!  reactor.poll(timers.next_deadline()) ─▶ while next_event() ─▶ while timers.expire(now) ─▶ again
//! ```
//! Thread: `ctl` owns the [`Reactor`] and [`Timers`]; any thread may hold a [`Waker`].
//! Invariants: nothing blocks but `poll`; buffers, connections, descriptors and timers are bounded;
//! trouble of one connection ends that connection alone; a stale id does nothing.
//! Not here: what the bytes mean.

mod authorities;
mod buffer;
mod connection;
pub mod descriptors;
mod reactor;
mod signals;
mod silence;
mod stream;
mod table;
mod timer;
mod tls;
mod waker;

pub use authorities::{Authorities, Distrust};
pub use connection::{CloseReason, ConnId};
pub use reactor::{Event, ListenerId, Reactor, SendError};
pub use stream::{Address, dial};
pub use timer::{TimerId, Timers, TimersFull};
pub use tls::{Credentials, HTTPS_ALONE};
pub use waker::Waker;
