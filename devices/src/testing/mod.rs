//! The driver's side of virtio devices, for tests of this and other crates (feature `testing`).
//!
//! ```text
//!   DriverQueue: split ring in guest memory     Driver: registers through MmioDevice
//!   Rig: a vsock device, its loop on a real Poller, and a guest that does what the test says
//! ```
//!
//! Time is the test's: nothing here sleeps, and deadlines pass when the test moves
//! [`Rig::advance`].
// Tests stop at the first thing that is not as it should be.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod driver;
mod rig;

pub use driver::{Driver, DriverQueue, Part};
pub use rig::{Packet, RX_BUFFER, Rig, read};
