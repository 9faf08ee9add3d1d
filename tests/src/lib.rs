//! Integration tests against a real KVM, by intent.
//!
//! ```text
//!   tests/fast/*.rs      fast guests, in this process or by the `vmm` program, on any KVM
//!   tests/machine/*.rs   stock kernels, by the `vmm` program, in one nest boot (feature `machine`)
//!   this library         what both use: [`InProcess`] machines, the [`Vmm`] program, a [`Sandbox`] that stays and its
//!                        [`Monitor`] seen from outside, [`Tap`]s on output, a [`Terminal`]
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

mod cgroup;
mod client;
pub mod image;
mod in_process;
mod monitor;
mod program;
mod sandbox;
mod tap;
mod terminal;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use cgroup::Cgroup;
pub use client::Client;
pub use in_process::{FENCE, InProcess};
pub use monitor::{Monitor, Switches};
pub use program::{Ended, Running, Vmm};
pub use sandbox::{GUEST_MEMORY, Sandbox};
pub use tap::Tap;
pub use terminal::Terminal;

/// The longest that a test waits for what must come: 10 s, times `$VMM_PATIENCE` where a person knows the machine to be
/// slow, and ten times as long in the nest.
///
/// # Panics
/// When `$VMM_PATIENCE` is not a number from 1 to 100.
pub fn patience() -> Duration {
    let factor = match std::env::var("VMM_PATIENCE") {
        Ok(text) => text
            .parse()
            .ok()
            .filter(|factor| (1..=100).contains(factor))
            .unwrap_or_else(|| panic!("VMM_PATIENCE={text}: expected a number from 1 to 100")),
        Err(_) if std::env::var("VMM_KVM").is_ok_and(|kvm| kvm == "nest") => 10,
        Err(_) => 1,
    };
    Duration::from_secs(10) * factor
}

/// A file of the checkout, or of the archive that `cargo xtask test --pack` made of it: what runs a test says where this
/// package is, so that no test program looks where it was built.
///
/// # Panics
/// When nothing says so, or the file is not there.
pub fn checkout(path: &str) -> PathBuf {
    let Some(package) = std::env::var_os("CARGO_MANIFEST_DIR") else {
        panic!("$CARGO_MANIFEST_DIR is not set: run these tests by `cargo xtask test`");
    };
    let file = Path::new(&package).join("..").join(path);
    assert!(file.exists(), "{} is missing", file.display());
    file
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
