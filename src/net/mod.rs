//! The only module that uses mio: a reactor of listeners and connections, and timers. The reactor
//! calls the operating system through `kernel`. The simulator has a kernel in memory.
//!
//! ```text
//!  reactor.poll(timers.next_deadline()) ─▶ while next_event() ─▶ while timers.expire(now) ─▶ again
//! ```
//! Thread: `ctl` owns the [`Reactor`] and [`Timers`]; any thread can hold a [`Waker`]. Invariants:
//! only `poll` and `flush_and_sleep` block. Buffers, connections, descriptors and timers are
//! bounded. A failure of one connection ends only that connection. A stale id has no effect. Not
//! here: the meaning of the bytes.

mod address;
#[cfg(feature = "tls")]
mod authorities;
mod buffer;
mod connection;
pub mod descriptors;
mod entropy;
mod keepalive;
mod kernel;
mod memory;
#[cfg(feature = "tls")]
mod pem;
mod reactor;
pub mod resolver;
mod stream;
mod table;
mod timer;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;
mod tls_error;
mod waker;

pub use address::Address;
#[cfg(feature = "tls")]
pub use authorities::Authorities;
pub use connection::{CloseReason, ConnId};
pub use entropy::Entropy;
pub use memory::{Dial, MemoryKernel, Signal};
pub use reactor::{Event, ListenerId, Reactor, SendError};
pub use timer::{TimerId, Timers, TimersFull};
#[cfg(not(feature = "tls"))]
pub use tls::Authorities;
pub use tls::Credentials;
#[cfg(feature = "tls")]
pub use tls::HTTPS_ALONE;
pub use tls_error::TlsError;
pub use waker::Waker;
