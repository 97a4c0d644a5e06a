//! Bytes between peers: ZMTP framing and the control messages, without I/O.
