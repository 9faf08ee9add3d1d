//! `cargo xtask soak`: sandboxes under random use for minutes, every byte of output checked, everything at its baseline
//! at the end.
//!
//! ```text
//!   outside   builds, starts one machine ──> inside (this program again)
//!   inside    workers, each with a sandbox of its own: start, then at random
//!               exec, stdin, limit, timeout, cancel, client killed, detach and attach, two clients after each other,
//!               signal, stop and start, kill and start
//!             after each round: what was received is a prefix, the cause is the one that was provoked
//!             at the end: descriptors, connections, leaves, kept execs, processes, sockets and folders as at the beginning
//! ```
//!
//! The seed is printed: with the same one the same things are asked for in the same order by each worker.

mod detached;
mod sandbox;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Naming, Result};
use crate::inside;
use crate::kvm::Wish;
use crate::place::Place;
use crate::random::Random;
use crate::run::Parts;
use crate::say;
use sandbox::Sandbox;

/// Sandboxes at a time.
const WORKERS: u64 = 2;

/// Flags of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// How long.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=24 * 60))]
    minutes: u64,
    /// What decides what is done; drawn and printed when absent.
    #[arg(long)]
    seed: Option<u64>,
    /// Whose KVM.
    #[arg(long, env = "VMM_KVM", value_enum, default_value = "auto")]
    kvm: Wish,
    /// The monitor to soak, here and now; what the command gives itself in the machine.
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

/// Soaks; an error if anything was not as it has to be.
pub fn run(place: &Place, arguments: &Arguments) -> Result<u8> {
    let seed = arguments.seed.unwrap_or_else(|| {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        now.as_nanos() as u64
    });
    if let Some(vmm) = &arguments.inside {
        return soak(vmm, Duration::from_secs(60 * arguments.minutes), seed).map(|()| 0);
    }
    let parts = Parts::ready(place, arguments.kvm)?;
    say::step(format!(
        "{} minutes on {} with --seed {seed}",
        arguments.minutes,
        parts.kvm.name()
    ));
    let words = [
        inside::own()?,
        "soak".into(),
        "--minutes".into(),
        arguments.minutes.to_string().into(),
        "--seed".into(),
        seed.to_string().into(),
        "--inside".into(),
        parts.vmm.clone().into(),
    ];
    let text = inside::run(place, &parts, words.into(), false)?;
    say::data(text.trim_end()).map(|()| 0)
}

fn soak(vmm: &Path, time: Duration, seed: u64) -> Result<()> {
    let folder = tempfile::tempdir_in("/tmp").naming(|| "create a folder".into())?;
    let root = folder.path().join("r");
    let before = monitors()?;
    let end = Instant::now() + time;
    let counts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|number| {
                let root = &root;
                scope.spawn(move || work(vmm, root, end, number, seed))
            })
            .collect();
        let mut all = BTreeMap::new();
        for worker in workers {
            let counts = worker
                .join()
                .map_err(|_| Error::Check("a worker panicked".into()))??;
            for (what, count) in counts {
                *all.entry(what).or_insert(0) += count;
            }
        }
        Ok(all)
    })?;
    let left: Vec<_> = std::fs::read_dir(&root)
        .naming(|| format!("list {}", root.display()))?
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    if !left.is_empty() {
        return Err(Error::Check(format!("left in the state root: {left:?}")));
    }
    let after = monitors()?;
    if after != before {
        return Err(Error::Check(format!(
            "{after} processes of vmm are left, there were {before}"
        )));
    }
    for (what, count) in &counts {
        say::data(format!("{what:<24} {count}"))?;
    }
    say::data("everything is at its baseline")
}

/// Processes that run a monitor.
fn monitors() -> Result<usize> {
    let processes = std::fs::read_dir("/proc").naming(|| "list /proc".into())?;
    Ok(processes
        .flatten()
        .filter(|entry| {
            std::fs::read_to_string(entry.path().join("comm"))
                .is_ok_and(|name| name.trim() == "vmm")
        })
        .count())
}

type Counts = BTreeMap<&'static str, u64>;

/// One worker: a sandbox of its own, used at random until the time is over.
fn work(vmm: &Path, root: &Path, end: Instant, number: u64, seed: u64) -> Result<Counts> {
    let mut random = Random::part(seed, number);
    let mut counts = Counts::new();
    let sandbox = Sandbox::new(vmm, root, &format!("soak{number}"));
    sandbox.start()?;
    *counts.entry("start").or_insert(0) += 1;
    let mut baseline = sandbox.baseline()?;
    while Instant::now() < end {
        let what = match random.below(28) {
            0..=5 => sandbox.whole(random.below(20_000)).map(|()| "exec"),
            6..=8 => sandbox
                .limited(1 + random.below(200_000))
                .map(|()| "exec over its limit"),
            9..=10 => sandbox.timed_out().map(|()| "exec over its time"),
            11..=13 => sandbox
                .cancelled(random.below(50_000))
                .map(|()| "exec cancelled"),
            14..=16 => sandbox
                .client_killed(random.below(50_000))
                .map(|()| "client killed"),
            17 => sandbox.many(2 + random.below(7)).map(|()| "execs at once"),
            18..=19 => sandbox
                .echoed(random.below(100_000))
                .map(|()| "stdin and back"),
            20..=22 => sandbox
                .kept(random.below(20_000), random.below(100_000))
                .map(|()| "detached, attached"),
            23..=24 => sandbox
                .taken_over(random.below(100_000))
                .map(|()| "detached, two clients"),
            25 => sandbox.signalled().map(|()| "detached, signalled"),
            26 => {
                sandbox.settled(&baseline)?;
                sandbox.stop()?;
                sandbox.start()?;
                baseline = sandbox.baseline()?;
                Ok("stop and start")
            }
            _ => {
                sandbox.kill()?;
                sandbox.start()?;
                baseline = sandbox.baseline()?;
                Ok("kill and start")
            }
        }?;
        *counts.entry(what).or_insert(0) += 1;
    }
    sandbox.settled(&baseline)?;
    sandbox.remove()?;
    Ok(counts)
}
