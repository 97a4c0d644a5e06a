//! The one place that knows mio: reactor, connections, timers.
