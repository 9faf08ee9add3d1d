//! Integration tests against a real KVM, by intent.
//!
//! ```text
//!   tests/fast/*.rs      fast guests, in this process or by the `vmm` program, on any KVM
//!   tests/machine/*.rs   stock kernels, by the `vmm` program, in one nest boot (feature `machine`)
//!   this library         what both use: [`InProcess`] machines, the [`Vmm`] program, a [`Sandbox`] that stays and its
//!                        [`Monitor`] seen from outside, [`Tap`]s on output
//! ```
//!
//! A test waits for an event (a line on a console, an end, a byte on a socket) with a deadline, never for time
//! to pass. A missing KVM is a failure that names the remedy, never a test that quietly passes.
//!
//! ```
//! let deadline = vmm_tests::patience();
//! assert!(deadline >= std::time::Duration::from_secs(10));
//! ```
//!
//! Limits: helpers panic on failure, as assertions do; nothing here returns an error.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // All of it is test code.

mod client;
pub mod image;
mod in_process;
mod monitor;
mod program;
mod sandbox;
mod tap;

use std::time::Duration;

pub use client::Client;
pub use in_process::{FENCE, InProcess};
pub use monitor::{Monitor, Switches};
pub use program::{Ended, Running, Vmm};
pub use sandbox::{GUEST_MEMORY, Sandbox};
pub use tap::Tap;

/// The longest that a test waits for what must come: ten times as long in the nest.
pub fn patience() -> Duration {
    match std::env::var("VMM_KVM") {
        Ok(kvm) if kvm == "nest" => Duration::from_secs(100),
        _ => Duration::from_secs(10),
    }
}

/// Fails, with the remedy, where no KVM can be used.
pub fn require_kvm() {
    if let Err(why) = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        panic!(
            "these tests need a KVM and /dev/kvm says: {why}; load kvm_intel or kvm_amd, or join the group `kvm`, \
             or run them in the nest: cargo xtask nest -- cargo test -p vmm-tests"
        );
    }
}
