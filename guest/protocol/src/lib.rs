//! The host-agent wire protocol: frames, state machines, limits.
