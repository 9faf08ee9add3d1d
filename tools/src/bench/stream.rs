//! A workload in a stock guest: throughput of its uncapped output, beside the same pipeline over a peer, interleaved.
//!
//! ```text
//!   outside   builds, makes the peer's initramfs, starts one machine ──> inside (this program again)
//!   inside    A  vmm run --output-limit none -- sh -c PROGRAM        ──> its stdout, a pipe
//!             B  peer: bench-guest, PROGRAM | cat into vsock         ──> its unix socket
//!             C  vmm run --output-limit none -- sh -c 'PROGRAM | cat'
//! ```
//!
//! All start guests of the same kernel, userland and memory. Timed are the bytes from the first to the last; the
//! first byte from the spawn on is shown beside them, but the peer's guest has no agent to wait for here: `bench start`
//! compares that. A and B are compared: in both the program writes to a pipe, and what reads that
//! pipe, the agent there and `cat` here, writes to vsock. C has one pipe more than B, and is shown beside them.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::bench::contestant::Ended;
use crate::bench::report::{self, Circumstances};
use crate::bench::stats::{Ratio, Summary};
use crate::bench::verdict;
use crate::cpio::Archive;
use crate::error::{Error, Naming, Result};
use crate::inside;
use crate::kvm::Wish;
use crate::place::{Place, write_whole};
use crate::process::{build_static, line, read};
use crate::run::Parts;
use crate::say;

/// Throughput: at least this many times the peer's.
const TARGET: f64 = 1.5;
/// A guest that has not sent its first byte by then never will.
const DEADLINE: Duration = Duration::from_secs(120);

/// `cargo xtask bench stream`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Another monitor to compare with, such as firecracker=/usr/bin/firecracker.
    #[arg(long, value_name = "NAME=PATH", value_parser = super::peer)]
    peer: Option<PathBuf>,
    /// Rounds in which each program runs once.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// MiB that the guest program writes.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
    /// Whose KVM.
    #[arg(long, env = "VMM_KVM", value_enum, default_value = "auto")]
    kvm: Wish,
    /// A plan to measure by, here and now; what the command gives itself in the machine.
    #[arg(long, hide = true)]
    plan: Option<PathBuf>,
}

/// What the inside needs to know.
#[derive(serde::Serialize, serde::Deserialize)]
struct Plan {
    vmm: PathBuf,
    kernel: PathBuf,
    initramfs: PathBuf,
    peer: Option<PathBuf>,
    rounds: u32,
    bytes: u64,
    program: String,
}

/// One contestant's rounds.
#[derive(Default, serde::Serialize, serde::Deserialize)]
struct Series {
    /// Spawn to the first byte.
    first_ms: Vec<f64>,
    /// First byte to the last.
    mb_s: Vec<f64>,
}

impl Series {
    fn push(&mut self, (first_ms, mb_s): (f64, f64)) {
        self.first_ms.push(first_ms);
        self.mb_s.push(mb_s);
    }
}

#[derive(Default, serde::Serialize, serde::Deserialize)]
struct Samples {
    vmm: Series,
    vmm_pipeline: Series,
    peer: Series,
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    machine: &'static str,
    peer: Option<String>,
    program: String,
    samples: Samples,
    /// Of our time to the first byte to that of the peer's guest, which has no agent.
    first: Option<Ratio>,
    /// Of the peer's throughput to ours: its inverse is how many times as fast we are.
    throughput: Option<Ratio>,
    /// The same with one pipe more on our side than on the peer's.
    pipeline: Option<Ratio>,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place, arguments: Arguments) -> Result<()> {
    if let Some(plan) = &arguments.plan {
        return measure(plan);
    }
    let parts = Parts::ready(place, arguments.kvm)?;
    let program = format!(
        "dd if=/dev/zero bs=64k count={} 2>/dev/null",
        arguments.mib * 16
    );
    let initramfs = parts.image.folder.join("initramfs.cpio");
    let peer_initramfs = inside::folder(place)?.join("stream-initramfs.cpio");
    if arguments.peer.is_some() {
        let guest = build_static(place, "bench-guest", "bench-guest")?;
        let mut archive = Archive::default();
        archive.folder(".vmm", 0o755);
        archive.file(".vmm/bench-guest", 0o755, &read(&guest)?);
        archive.file(".vmm/pipeline", 0o644, piped(&program).as_bytes());
        let archive = archive.behind(read(&initramfs)?);
        write_whole(&peer_initramfs, &archive)?;
    }
    let plan = Plan {
        vmm: parts.vmm.clone(),
        kernel: parts.image.folder.join("vmlinux"),
        initramfs: peer_initramfs,
        peer: arguments.peer.clone(),
        rounds: arguments.rounds,
        bytes: u64::from(arguments.mib) << 20,
        program: program.clone(),
    };
    let words = [
        inside::own()?,
        "bench".into(),
        "stream".into(),
        "--plan".into(),
        inside::plan(place, "stream-plan.json", &plan)?.into(),
    ];
    let samples: Samples = inside::measure(place, &parts, words.into())?;
    let beside = |ours: &[f64], theirs: &[f64]| {
        (!ours.is_empty() && !theirs.is_empty()).then(|| Ratio::of(ours, theirs))
    };
    let report = Report {
        what: "a workload in a stock guest: spawn to first byte, and MB/s from first byte to last",
        circumstances: Circumstances::now(place, &parts.vmm),
        machine: parts.kvm.name(),
        peer: arguments.peer.as_deref().map(report::version),
        program,
        first: beside(&samples.vmm.first_ms, &samples.peer.first_ms),
        throughput: beside(&samples.peer.mb_s, &samples.vmm.mb_s),
        pipeline: beside(&samples.peer.mb_s, &samples.vmm_pipeline.mb_s),
        samples,
    };
    let path = report::keep(place, "stream", report.circumstances.time, &report)?;
    tell(&report)?;
    say::step(format!("samples are in {}", path.display()));
    let mut missed = Vec::new();
    if let Some(ratio) = report.throughput.filter(|r| 1.0 / r.upper_95 < TARGET) {
        missed.push(format!(
            "throughput: {:.2} times the peer is below {TARGET:.2}",
            1.0 / ratio.upper_95
        ));
    }
    verdict(&missed)
}

fn tell(report: &Report) -> Result<()> {
    let samples = &report.samples;
    for (name, series) in [
        ("vmm", &samples.vmm),
        ("vmm, | cat", &samples.vmm_pipeline),
        ("peer, | cat", &samples.peer),
    ] {
        if series.mb_s.is_empty() {
            continue;
        }
        let Summary { p50, max, .. } = Summary::of(&series.mb_s);
        say::data(report::row(name, &Summary::of(&series.first_ms)))?;
        say::data(format!(
            "{name:<14} median {p50:.1} MB/s, best {max:.1}, n={}",
            series.mb_s.len()
        ))?;
    }
    if let (Some(first), Some(throughput)) = (&report.first, &report.throughput) {
        say::data(format!(
            "first byte at {:.2} of the time of a guest without an agent, below {:.2} with 95 %",
            first.median, first.upper_95
        ))?;
        say::data(format!(
            "{:.2} times the peer's throughput, at least {:.2} with 95 % (target {TARGET:.2}), on {}",
            1.0 / throughput.median,
            1.0 / throughput.upper_95,
            report.machine
        ))?;
    }
    if let Some(pipeline) = &report.pipeline {
        say::data(format!(
            "{:.2} times with one pipe more here than there",
            1.0 / pipeline.median
        ))?;
    }
    Ok(())
}

fn measure(path: &Path) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&read(path)?)
        .map_err(|error| Error::malformed(path, error.to_string()))?;
    let mut samples = Samples::default();
    for _ in 0..plan.rounds {
        samples.vmm.push(ours(&plan, &plan.program)?);
        if let Some(program) = &plan.peer {
            samples.peer.push(theirs(&plan, program)?);
        }
        let piped = piped(&plan.program);
        samples.vmm_pipeline.push(ours(&plan, &piped)?);
    }
    say::data(json!(samples))
}

/// The program with a pipe of its own behind it.
fn piped(program: &str) -> String {
    format!("{program} | cat")
}

fn ours(plan: &Plan, script: &str) -> Result<(f64, f64)> {
    let mut command = Command::new(&plan.vmm);
    command
        .args([
            "run",
            "--memory",
            "256M",
            "--output-limit",
            "none",
            "--",
            "sh",
            "-c",
            script,
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let spawned = Instant::now();
    let child = command
        .spawn()
        .naming(|| format!("start `{}`", line(&command)))?;
    let mut child = Ended(child);
    let stdout = child.0.stdout.take();
    let stdout = stdout.ok_or_else(|| Error::Check("no stdout".into()))?;
    let speed = drain(stdout, plan.bytes, spawned)?;
    let status = child.0.wait().naming(|| "wait for vmm".into())?;
    if !status.success() {
        return Err(Error::Check(format!(
            "`{}` left with {status}",
            line(&command)
        )));
    }
    Ok(speed)
}

fn theirs(plan: &Plan, program: &Path) -> Result<(f64, f64)> {
    let folder = tempfile::tempdir().naming(|| "create a folder".into())?;
    let socket = folder.path().join("peer.sock");
    let listener = folder.path().join("peer.sock_52");
    let listener =
        UnixListener::bind(&listener).naming(|| format!("bind {}", listener.display()))?;
    let config = json!({
        "boot-source": {
            "kernel_image_path": plan.kernel,
            "initrd_path": plan.initramfs,
            "boot_args": "quiet panic=-1 reboot=k 8250.nr_uarts=0 rdinit=/.vmm/bench-guest",
        },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 256 },
        "vsock": { "guest_cid": 3, "uds_path": socket },
    });
    let path = folder.path().join("peer.json");
    write_whole(&path, config.to_string().as_bytes())?;
    let mut command = Command::new(program);
    command
        .args(["--no-api", "--level", "Off", "--config-file"])
        .arg(&path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let spawned = Instant::now();
    let child = command
        .spawn()
        .naming(|| format!("start `{}`", line(&command)))?;
    let _child = Ended(child);
    wait_readable(&listener)?;
    let (stream, _) = listener.accept().naming(|| "accept the guest".into())?;
    drain(stream, plan.bytes, spawned)
}

/// Reads all that is expected, or less if it ends before: milliseconds to the first byte, and MB/s from there to the last.
fn drain(
    mut source: impl Read + std::os::fd::AsFd,
    expected: u64,
    spawned: Instant,
) -> Result<(f64, f64)> {
    let mut buffer = vec![0; 256 * 1024];
    wait_readable(&source)?;
    let start = Instant::now();
    let mut read = || {
        source
            .read(&mut buffer)
            .naming(|| "read the output".into())
            .map(|count| count as u64)
    };
    let first = read()?;
    let mut count = first;
    while count < expected {
        match read()? {
            0 => break,
            more => count += more,
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    if count != expected {
        return Err(Error::Check(format!("{count} bytes came of {expected}")));
    }
    let first_ms = start.duration_since(spawned).as_secs_f64() * 1e3;
    Ok((first_ms, (count - first) as f64 / elapsed / 1e6))
}

/// Waits for a guest's next byte.
pub(super) fn wait_readable(source: &impl std::os::fd::AsFd) -> Result<()> {
    let timeout = Timespec {
        tv_sec: DEADLINE.as_secs() as i64,
        tv_nsec: 0,
    };
    let ready = poll(&mut [PollFd::new(source, PollFlags::IN)], Some(&timeout));
    match ready.naming(|| "wait for the guest".into())? {
        0 => Err(Error::Check(format!(
            "the guest has sent nothing in {DEADLINE:?}"
        ))),
        _ => Ok(()),
    }
}
