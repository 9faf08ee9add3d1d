//! The real agent loop without a machine: over unix sockets, as an ordinary user, over a fake
//! cgroup tree. Each test is named after the fault that it shows to be absent.
// The helpers of tests may unwrap as the tests do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod counters;
mod detached;
mod fake;
mod harness;
mod leaving;
mod library;
mod lifecycle;
mod output;
mod races;
mod sessions;
mod start;
