//! The host's session library: connect, hello, exec.
