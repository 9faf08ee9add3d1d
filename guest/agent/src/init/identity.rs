//! Taking on a life: time, randomness, names.

use std::io::Write;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec};
use vmm_protocol::{Life, ReadyStage};

use crate::files::replace;
use crate::sys::kernel;

/// The public part of the generation, for workloads.
pub const GENERATION_FILE: &str = "/run/vmm/generation";

/// A life that could not be applied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot apply this life at {stage}: {what}: {errno}")]
pub struct Unready {
    /// The step.
    pub stage: ReadyStage,
    /// What was tried.
    pub what: &'static str,
    /// The kernel's answer.
    pub errno: Errno,
}

impl Unready {
    /// For `map_err`: a failure of `what` at `stage`.
    pub(crate) fn at(stage: ReadyStage, what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self { stage, what, errno }
    }

    fn io(stage: ReadyStage, what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self {
            stage,
            what,
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        }
    }
}

/// Applies all of a life. Randomness first: what follows may draw from it.
///
/// # Errors
/// The first step that failed; the guest is then not ready.
pub fn apply(life: &Life) -> Result<(), Unready> {
    let random = rustix::fs::open(
        c"/dev/urandom",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(Unready::at(ReadyStage::Entropy, "/dev/urandom"))?;
    kernel::add_entropy(random, &life.entropy)
        .map_err(Unready::at(ReadyStage::Entropy, "reseed"))?;

    // 2^63 ns are 292 years: both parts fit.
    let time = Timespec {
        tv_sec: i64::try_from(life.wall_clock_ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(life.wall_clock_ns % 1_000_000_000).unwrap_or(0),
    };
    rustix::time::clock_settime(ClockId::Realtime, time)
        .map_err(Unready::at(ReadyStage::Clock, "clock_settime"))?;

    rustix::system::sethostname(life.hostname.as_bytes())
        .map_err(Unready::at(ReadyStage::Identity, "sethostname"))?;
    let mut id = life
        .machine_id
        .iter()
        .fold(String::new(), |id, byte| format!("{id}{byte:02x}"));
    id.push('\n');
    replace(Path::new("/etc/machine-id"), id.as_bytes())
        .map_err(Unready::io(ReadyStage::Identity, "/etc/machine-id"))?;
    let mut text = Vec::new();
    for (name, value) in environment(life) {
        let _ = writeln!(text, "{name}={value}");
    }
    replace(Path::new(GENERATION_FILE), &text)
        .map_err(Unready::io(ReadyStage::Identity, GENERATION_FILE))
}

/// What every workload finds in its environment; the same lines are in [`GENERATION_FILE`].
pub fn environment(life: &Life) -> [(&'static str, String); 2] {
    [
        ("VMM_GENERATION", life.generation.to_string()),
        ("VMM_RESTORE_COUNT", life.restore_count.to_string()),
    ]
}
