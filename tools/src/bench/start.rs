//! A fresh machine to the first byte of its first workload, beside the same agent in a peer's machine.
//!
//! ```text
//!   outside   builds, makes the peer's initramfs, starts one machine ──> bench-exec start
//!   inside    A B B A A B ...
//!             A  vmm run -- echo x
//!             B  the peer's monitor, whose agent bench-exec answers and asks to run the same
//! ```
//!
//! Same kernel file, same command line, same initramfs, same agent; timed from the spawn to the byte's arrival in the
//! program that spawned.

use std::path::PathBuf;

use crate::bench::report::{self, Circumstances};
use crate::bench::stats::{Ratio, Summary};
use crate::bench::verdict;
use crate::cpio::Archive;
use crate::error::Result;
use crate::inside;
use crate::kvm::Wish;
use crate::place::{Place, write_whole};
use crate::process::{build_static, read};
use crate::run::Parts;
use crate::say;

/// At most this many times the peer's time.
const TARGET: f64 = 1.0;

/// `cargo xtask bench start`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Another monitor to compare with, such as firecracker=/usr/bin/firecracker.
    #[arg(long, value_name = "NAME=PATH", value_parser = super::peer)]
    peer: Option<PathBuf>,
    /// Rounds in which each program runs once.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(2..=1000))]
    rounds: u32,
    /// Guest memory in MiB.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(128..=65_536))]
    memory: u32,
    /// Whose KVM.
    #[arg(long, env = "VMM_KVM", value_enum, default_value = "auto")]
    kvm: Wish,
}

/// What the inside needs to know.
#[derive(serde::Serialize)]
struct Plan {
    vmm: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    peer_initramfs: PathBuf,
    peer: Option<PathBuf>,
    memory_mib: u32,
    rounds: u32,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Samples {
    cmdline: String,
    vmm_ms: Vec<f64>,
    peer_ms: Vec<f64>,
    peer_ready_ms: Vec<f64>,
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    machine: &'static str,
    peer: Option<String>,
    memory_mib: u32,
    samples: Samples,
    /// Of our time to the peer's, round by round.
    ratio: Option<Ratio>,
    target: f64,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place, arguments: &Arguments) -> Result<()> {
    let parts = Parts::ready(place, arguments.kvm)?;
    let harness = build_static(place, "bench-exec", "bench-exec")?;
    let agent = build_static(place, "vmm-agent", "vmm-agent")?;
    let initramfs = parts.image.folder.join("initramfs.cpio");
    let mut archive = Archive::default();
    archive.folder(".vmm", 0o755);
    archive.file(".vmm/agent", 0o755, &read(&agent)?);
    let peer_initramfs = inside::folder(place)?.join("start-initramfs.cpio");
    write_whole(&peer_initramfs, &archive.behind(read(&initramfs)?))?;
    let plan = Plan {
        vmm: parts.vmm.clone(),
        kernel: parts.image.folder.join("vmlinux"),
        initramfs,
        peer_initramfs,
        peer: arguments.peer.clone(),
        memory_mib: arguments.memory,
        rounds: arguments.rounds,
    };
    let plan = inside::plan(place, "start-plan.json", &plan)?;
    let words = [harness.into(), "start".into(), plan.into()];
    let samples: Samples = inside::measure(place, &parts, words.into())?;
    let report = Report {
        what: "spawn of a monitor to the first byte of its first workload, in milliseconds",
        circumstances: Circumstances::now(place, &parts.vmm),
        machine: parts.kvm.name(),
        peer: arguments.peer.as_deref().map(report::version),
        memory_mib: arguments.memory,
        ratio: (!samples.peer_ms.is_empty()).then(|| Ratio::of(&samples.vmm_ms, &samples.peer_ms)),
        samples,
        target: TARGET,
    };
    let path = report::keep(place, "start", report.circumstances.time, &report)?;
    tell(&report)?;
    say::step(format!("samples are in {}", path.display()));
    let missed = report.ratio.filter(|ratio| ratio.upper_95 > TARGET);
    let missed = missed.map(|ratio| {
        format!(
            "first byte: {:.2} of the peer is above {TARGET:.2}",
            ratio.upper_95
        )
    });
    verdict(missed.as_slice())
}

fn tell(report: &Report) -> Result<()> {
    let samples = &report.samples;
    say::data(format!(
        "spawn to a workload's first byte, {} MiB, on {}, commit {}",
        report.memory_mib, report.machine, report.circumstances.commit
    ))?;
    for (name, series) in [
        ("vmm run", &samples.vmm_ms),
        ("peer", &samples.peer_ms),
        ("peer, ready", &samples.peer_ready_ms),
    ] {
        if !series.is_empty() {
            say::data(report::row(name, &Summary::of(series)))?;
        }
    }
    if let Some(ratio) = &report.ratio {
        say::data(format!(
            "vmm / peer     {:.3}, below {:.3} with 95 % (target {TARGET:.2}: {}), n={}",
            ratio.median,
            ratio.upper_95,
            if ratio.upper_95 <= TARGET {
                "met"
            } else {
                "missed"
            },
            samples.vmm_ms.len()
        ))?;
    }
    Ok(())
}
