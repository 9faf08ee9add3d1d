//! Streams through the vsock device alone, both ways, beside a socket pair that carries the same bytes, interleaved.
//!
//! ```text
//!   A  thread ──> socket pair ──> thread
//!   B  this program ──> vsock.sock ──> device ──> fast guest, which counts        (DRAIN)
//!   C  fast guest, which has its bytes ready ──> device ──> vsock.sock ──> this program   (FLOOD)
//! ```
//!
//! Every byte is copied twice in all three: into a socket and out of it. What B and C take beyond A is the device's
//! work, the doorbells and the wait for the guest. The guest polls for as long as its sandbox runs, in A, too.
//!
//! Two threads that share a processor pass bytes ten times as fast as two that wake each other across processors, and
//! which of the two it is the scheduler decides anew every moment. So that one thing is measured, the guest has one
//! processor, and all of the host's side (this program's threads, the device's loop) another, in A, B and C alike.
//! A machine that does other work takes the guest's processor away, which A does not feel: the report says how much of
//! that there was, and `chrt --rr 1 cargo xtask bench device` keeps it out.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use crate::bench::contestant::Ended;
use crate::bench::report::{self, Circumstances};
use crate::bench::stats::{Ratio, Summary};
use crate::bench::stream::wait_readable;
use crate::bench::{guest, verdict};
use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::process::{build_static, capture, line};
use crate::say;

/// Rounds before those that count.
const WARM_UP: u32 = 2;
/// At least this share of the socket pair, each way.
const TARGET: f64 = 0.5;
/// What the guest may wait for its processor before that is said.
const BUSY: f64 = 0.05;
/// Bytes of one write and of one read.
const CHUNK: usize = 64 * 1024;
/// Nothing here takes as long.
const DEADLINE: Duration = Duration::from_secs(60);
/// Large packets, so that the guest's work for each is not what is measured.
const CMDLINE: &str = "rxsize=65536 tx=one event_idx=1";
/// Services of the guest, see `vmm_guests::ports`.
const DRAIN: u32 = 37;
const FLOOD: u32 = 39;
/// What a flood is full of.
const FLOOD_BYTE: u8 = 0x5a;

/// `cargo xtask bench device`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Rounds in which each stream runs once.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(10..=1000))]
    rounds: u32,
    /// MiB of each stream.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    mib: u32,
}

#[derive(serde::Serialize)]
struct Series {
    name: &'static str,
    summary_gb_s: Summary,
    samples_gb_s: Vec<f64>,
}

#[derive(serde::Serialize)]
struct Share {
    of: &'static str,
    median: f64,
    lower_95: f64,
    target: f64,
    met: bool,
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    processors: usize,
    /// The machine's at begin and end.
    load: [String; 2],
    /// The share of the time that the guest's processor was others': both directions wait for the guest then, and the
    /// socket pair does not.
    guest_waited: f64,
    mib: u32,
    chunk_bytes: usize,
    guest: &'static str,
    series: Vec<Series>,
    shares: Vec<Share>,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place, arguments: &Arguments) -> Result<()> {
    let folder = tempfile::tempdir().naming(|| "create a folder".into())?;
    let guest = guest(place, folder.path(), "vsock")?;
    let vmm = build_static(place, "vmm", "vmm")?;
    let circumstances = Circumstances::now(place, &vmm);
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    let before = load();
    let sandbox = Sandbox::start(&vmm, &guest, folder.path().join("root"))?;
    let socket = sandbox.live()?;
    let vcpu = sandbox.place()?;
    let began = waited(&vcpu)?;
    let bytes = u64::from(arguments.mib) << 20;
    let mut samples = [const { Vec::new() }; 3];
    for round in 0..WARM_UP + arguments.rounds {
        let _progress = say::progress(format!("round {round} of {}", WARM_UP + arguments.rounds));
        let speeds = [pair(bytes)?, drain(&socket, bytes)?, flood(&socket, bytes)?];
        if round >= WARM_UP {
            for (samples, seconds) in samples.iter_mut().zip(speeds) {
                samples.push(bytes as f64 / seconds / 1e9);
            }
        }
    }
    let ended = waited(&vcpu)?;
    drop(sandbox);
    let (ran, waited) = (ended.0 - began.0, ended.1 - began.1);
    let [pair, drain, flood] = samples;
    let shares = vec![
        share("host to guest", &drain, &pair),
        share("guest to host", &flood, &pair),
    ];
    let series = [
        ("socket pair", pair),
        ("host to guest", drain),
        ("guest to host", flood),
    ];
    let report = Report {
        what: "GB/s through the vsock device with a fast guest, and through a socket pair",
        circumstances,
        processors,
        load: [before, load()],
        guest_waited: waited / (ran + waited).max(1.0),
        mib: arguments.mib,
        chunk_bytes: CHUNK,
        guest: CMDLINE,
        series: series
            .into_iter()
            .map(|(name, samples_gb_s)| Series {
                name,
                summary_gb_s: Summary::of(&samples_gb_s),
                samples_gb_s,
            })
            .collect(),
        shares,
    };
    let path = report::keep(place, "device", report.circumstances.time, &report)?;
    tell(&report)?;
    say::step(format!("samples are in {}", path.display()));
    let missed: Vec<String> = report
        .shares
        .iter()
        .filter(|share| !share.met)
        .map(|share| {
            format!(
                "{}: {:.2} of a socket pair is below {TARGET:.2}",
                share.of, share.lower_95
            )
        })
        .collect();
    verdict(&missed)
}

/// The lower bound of a share is the inverse of the upper bound of its inverse.
fn share(of: &'static str, ours: &[f64], pair: &[f64]) -> Share {
    let inverse = Ratio::of(pair, ours);
    let lower_95 = 1.0 / inverse.upper_95;
    Share {
        of,
        median: 1.0 / inverse.median,
        lower_95,
        target: TARGET,
        met: lower_95 >= TARGET,
    }
}

fn tell(report: &Report) -> Result<()> {
    let c = &report.circumstances;
    say::data(format!(
        "{} MiB in chunks of {} bytes, {} processors, load {} to {}, kernel {}, KVM {}, commit {}",
        report.mib,
        report.chunk_bytes,
        report.processors,
        report.load[0],
        report.load[1],
        c.kernel,
        c.kvm,
        c.commit
    ))?;
    for series in &report.series {
        let worst = series.samples_gb_s.iter().copied().fold(f64::MAX, f64::min);
        let Summary { p50, max, .. } = series.summary_gb_s;
        say::data(format!(
            "{:<14} p50 {p50:>6.2}  min {worst:>6.2}  max {max:>6.2} GB/s  n={}",
            series.name,
            series.samples_gb_s.len()
        ))?;
    }
    if report.guest_waited > BUSY {
        say::data(format!(
            "the guest's processor was others' for {:.0} % of the time: the shares below are too small",
            100.0 * report.guest_waited
        ))?;
    }
    for share in &report.shares {
        say::data(format!(
            "{:<14} {:.3} of the socket pair, at least {:.3} with 95 % (target {:.2}: {})",
            share.of,
            share.median,
            share.lower_95,
            share.target,
            if share.met { "met" } else { "missed" }
        ))?;
    }
    Ok(())
}

/// The load average of the last minute.
fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// Nanoseconds that a thread has run, and those that it has waited for a processor.
fn waited(thread: &Path) -> Result<(f64, f64)> {
    let path = thread.join("schedstat");
    let text = read_text(&path)?;
    let mut numbers = text.split(' ').filter_map(|word| word.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(ran), Some(waited)) => Ok((ran, waited)),
        _ => Err(Error::malformed(&path, format!("has {text:?}"))),
    }
}

fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).naming(|| format!("read {}", path.display()))
}

/// Seconds that two threads take to pass `bytes` through a socket pair.
fn pair(bytes: u64) -> Result<f64> {
    let (ours, mut theirs) = UnixStream::pair().naming(|| "create a socket pair".into())?;
    std::thread::scope(|scope| {
        let start = Instant::now();
        let writer = scope.spawn(move || {
            let mut ours = ours;
            write(&mut ours, bytes)
        });
        let count = read(&mut theirs)?;
        let seconds = start.elapsed().as_secs_f64();
        writer
            .join()
            .map_err(|_| Error::Check("the writer has panicked".into()))??;
        counted(count, bytes)?;
        Ok(seconds)
    })
}

/// Seconds until the guest has counted `bytes`.
fn drain(socket: &Path, bytes: u64) -> Result<f64> {
    let mut stream = connect(socket, DRAIN)?;
    let start = Instant::now();
    write(&mut stream, bytes)?;
    stream
        .shutdown(Shutdown::Write)
        .naming(|| "end a stream".into())?;
    let mut count = [0; 8];
    stream
        .read_exact(&mut count)
        .naming(|| "read the guest's count".into())?;
    let seconds = start.elapsed().as_secs_f64();
    counted(u64::from_le_bytes(count), bytes)?;
    Ok(seconds)
}

/// Seconds until `bytes` have come from the guest.
fn flood(socket: &Path, bytes: u64) -> Result<f64> {
    let mut stream = connect(socket, FLOOD)?;
    let start = Instant::now();
    stream
        .write_all(&bytes.to_le_bytes())
        .naming(|| "ask for a flood".into())?;
    let count = read(&mut stream)?;
    let seconds = start.elapsed().as_secs_f64();
    counted(count, bytes)?;
    Ok(seconds)
}

fn counted(count: u64, bytes: u64) -> Result<()> {
    if count == bytes {
        return Ok(());
    }
    Err(Error::Check(format!("{count} bytes came of {bytes}")))
}

/// Writes `bytes`, the same as a flood is full of, in whole chunks and a rest.
fn write(stream: &mut UnixStream, bytes: u64) -> Result<()> {
    let chunk = vec![FLOOD_BYTE; CHUNK];
    let mut left = bytes;
    while left > 0 {
        let length = left.min(CHUNK as u64);
        stream
            .write_all(&chunk[..length as usize])
            .naming(|| "write a stream".into())?;
        left -= length;
    }
    Ok(())
}

/// Reads to the end; how many bytes that were. The first and the last of each read are looked at.
fn read(stream: &mut UnixStream) -> Result<u64> {
    let mut chunk = vec![0; CHUNK];
    let mut count = 0;
    loop {
        let length = stream.read(&mut chunk).naming(|| "read a stream".into())?;
        let Some(last) = length.checked_sub(1) else {
            return Ok(count);
        };
        if (chunk[0], chunk[last]) != (FLOOD_BYTE, FLOOD_BYTE) {
            return Err(Error::Check(format!("wrong bytes after {count}")));
        }
        count += length as u64;
    }
}

/// A connection to a port of the guest.
fn connect(socket: &Path, port: u32) -> Result<UnixStream> {
    let naming = || format!("connect to {}", socket.display());
    let mut stream = UnixStream::connect(socket).naming(naming)?;
    stream.set_read_timeout(Some(DEADLINE)).naming(naming)?;
    stream.set_write_timeout(Some(DEADLINE)).naming(naming)?;
    stream
        .write_all(format!("CONNECT {port}\n").as_bytes())
        .naming(naming)?;
    let mut answer = Vec::new();
    let mut byte = [0];
    // Byte by byte: what follows the line is the guest's.
    while answer.last() != Some(&b'\n') {
        stream.read_exact(&mut byte).naming(naming)?;
        answer.extend(byte);
    }
    if answer.starts_with(b"OK ") {
        return Ok(stream);
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    Err(Error::Check(format!("port {port}: {}", answer.trim_end())))
}

/// The guest in a sandbox of the monitor's own, removed when dropped.
struct Sandbox {
    vmm: PathBuf,
    root: PathBuf,
}

impl Sandbox {
    const NAME: &str = "device";

    fn start(vmm: &Path, guest: &Path, root: PathBuf) -> Result<Self> {
        let vmm = vmm.to_owned();
        let sandbox = Self { vmm, root };
        let flags = ["-d", "--no-agent", "--memory", "128M", "--cmdline", CMDLINE];
        capture(
            sandbox
                .command("start")
                .args(flags)
                .arg("--kernel")
                .arg(guest),
        )?;
        Ok(sandbox)
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.vmm);
        command.args([verb, Self::NAME, "--dir"]).arg(&self.root);
        command
    }

    /// What `inspect` says.
    fn view(&self) -> Result<Value> {
        let text = capture(self.command("inspect").arg("--json"))?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Check(format!("inspect --json: {error}: {text}")))
    }

    /// Gives the vCPU one processor, and the monitor's other threads and this program another. The vCPU's folder below
    /// `/proc`.
    fn place(&self) -> Result<PathBuf> {
        let naming = || "place threads on processors".into();
        let allowed = sched_getaffinity(None)
            .map_err(std::io::Error::from)
            .naming(naming)?;
        let mut all = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
        let (Some(first), Some(second)) = (all.next(), all.next()) else {
            return Err(Error::Check("this takes two processors".into()));
        };
        let put = |thread, processor| {
            let mut set = CpuSet::new();
            set.set(processor);
            sched_setaffinity(thread, &set)
                .map_err(std::io::Error::from)
                .naming(naming)
        };
        let view = self.view()?;
        let folder = format!("/proc/{}/task", view["pid"]);
        let threads = std::fs::read_dir(&folder).naming(|| format!("list {folder}"))?;
        let mut vcpu = None;
        for thread in threads {
            let thread = thread.naming(|| format!("list {folder}"))?;
            let name = read_text(&thread.path().join("comm"))?;
            let id = thread.file_name();
            let id = id.to_str().and_then(|id| id.parse().ok());
            let id = id.and_then(Pid::from_raw);
            let id = id.ok_or_else(|| Error::Check(format!("{thread:?} is no thread")))?;
            let guest = name.starts_with("vcpu");
            put(Some(id), if guest { first } else { second })?;
            vcpu = guest.then(|| thread.path()).or(vcpu);
        }
        put(None, second)?;
        vcpu.ok_or_else(|| Error::Check(format!("{folder} has no vCPU")))
    }

    /// Waits until the guest's driver is up; the socket of its device.
    fn live(&self) -> Result<PathBuf> {
        let mut logs = self.command("logs");
        logs.arg("-f").stdin(Stdio::null()).stdout(Stdio::piped());
        let child = logs.spawn().naming(|| format!("start `{}`", line(&logs)))?;
        let mut child = Ended(child);
        let stdout = child.0.stdout.take();
        let stdout = stdout.ok_or_else(|| Error::Check("no stdout".into()))?;
        wait_readable(&stdout)?;
        let mut said = String::new();
        BufReader::new(stdout)
            .read_line(&mut said)
            .naming(|| "read the console".into())?;
        if !said.starts_with("vsock: cid ") {
            return Err(Error::Check(format!("the guest said {said:?}")));
        }
        let view = self.view()?;
        let socket = view["sockets"]["vsock"].as_str();
        socket
            .map(PathBuf::from)
            .ok_or_else(|| Error::Check(format!("no socket: {view}")))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = capture(self.command("rm").arg("-f"));
    }
}
