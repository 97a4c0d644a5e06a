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
mod authorities;
mod buffer;
mod connection;
pub mod descriptors;
mod entropy;
mod keepalive;
mod kernel;
mod memory;
mod pem;
mod reactor;
pub mod resolver;
mod stream;
mod table;
mod timer;
mod tls;
mod waker;

pub use address::Address;
pub use authorities::{Authorities, TlsError};
pub use connection::{CloseReason, ConnId};
pub use entropy::Entropy;
pub use memory::{Dial, MemoryKernel, Signal};
pub use reactor::{Event, ListenerId, Reactor, SendError};
pub use timer::{TimerId, Timers, TimersFull};
pub use tls::{Credentials, HTTPS_ALONE};
pub use waker::Waker;
