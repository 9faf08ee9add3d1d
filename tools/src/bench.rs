//! Measurements of the monitor, beside a floor and a peer, with their raw samples kept as JSON.
//!
//! ```text
//!   boot    spawn to the first serial byte of a fast guest, on the host's own KVM, A B C A B C ...
//!   device  streams through the vsock device alone, both ways, beside a socket pair that carries the same
//!   size    the monitor's own memory with an idle guest, and what the binaries take on disk
//!   exec    commands in a running sandbox by every way in, beside the bare cost of a process and of a round trip
//!   start   a fresh machine to its first workload's first byte, beside the same agent in the peer's machine
//!   stream  a workload in a stock guest: its uncapped output, beside the same over the peer
//! ```

mod boot;
mod contestant;
mod device;
mod exec;
mod report;
mod size;
mod start;
mod stats;
mod stream;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::place::{Place, write_whole};
use crate::process::{capture_bytes, cargo};
use crate::setup;

/// `cargo xtask bench`.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// Spawn to the first serial byte of a fast guest, beside the floor program and a peer.
    Boot {
        /// Another monitor to compare with, such as firecracker=/usr/bin/firecracker.
        #[arg(long, value_name = "NAME=PATH", value_parser = peer)]
        peer: Option<PathBuf>,
        /// Rounds in which each program runs once.
        #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(10..=10_000))]
        rounds: u32,
        /// Guest memory in MiB.
        #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(64..=65_536))]
        memory: u32,
    },
    /// Streams through the vsock device alone, with a fast guest at its far end, both ways, as a share of a socket
    /// pair that carries the same bytes.
    Device(device::Arguments),
    /// The monitor's own memory with an idle guest of 128 MiB, and the size of the binaries.
    Size,
    /// Commands in a running sandbox, in the nest where the host's KVM has no hardware behind it: by `vmm exec`, over a
    /// pooled session, twenty at once, beside a bare process and a bare round trip in the same guest.
    Exec(exec::Arguments),
    /// A fresh machine with a stock kernel, in the nest where the host's KVM has no hardware behind it: spawn to the
    /// first byte of its first workload.
    Start(start::Arguments),
    /// A workload in a stock guest, in the nest where the host's KVM has no hardware behind it: the throughput of its
    /// output.
    Stream(stream::Arguments),
}

/// Runs one and fails where a target is missed.
pub fn run(place: &Place, bench: Bench) -> Result<u8> {
    match bench {
        Bench::Boot {
            peer,
            rounds,
            memory,
        } => boot::run(place, peer, rounds, memory),
        Bench::Device(arguments) => device::run(place, &arguments),
        Bench::Size => size::run(place),
        Bench::Exec(arguments) => exec::run(place, &arguments),
        Bench::Start(arguments) => start::run(place, &arguments),
        Bench::Stream(arguments) => stream::run(place, arguments),
    }
    .map(|()| 0)
}

/// The peer's path; only one peer is known.
fn peer(text: &str) -> std::result::Result<PathBuf, String> {
    match text.split_once('=') {
        Some(("firecracker", path)) if !path.is_empty() => Ok(path.into()),
        Some((name, _)) if name != "firecracker" => Err(format!(
            "{name:?} is not a known peer: use firecracker=PATH"
        )),
        _ => Err("expected firecracker=PATH".into()),
    }
}

/// Writes a fast guest to a file of its name in `folder`.
///
/// It is built now and not with this program, which brings the target that building it takes.
fn guest(place: &Place, folder: &Path, name: &str) -> Result<PathBuf> {
    setup::rust_targets(place)?;
    let words = ["run", "--quiet", "--package", "vmm-guests", "--", name];
    let path = folder.join(name).with_extension("elf");
    write_whole(&path, &capture_bytes(&mut cargo(place, words))?)?;
    Ok(path)
}

/// All targets that were missed, as one failure.
fn verdict(missed: &[String]) -> Result<()> {
    if missed.is_empty() {
        return Ok(());
    }
    Err(Error::Check(missed.join("; ")))
}
