//! The init agent as a library, so that the loopback harness drives the very loop that runs in a guest.
