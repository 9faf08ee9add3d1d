//! Commands in a running sandbox, by every way in, beside what they are made of.
//!
//! ```text
//!   outside   builds, puts the helper into an initramfs, starts one machine ──> bench-exec measure
//!   inside    one sandbox; in each round, one after another:
//!             twenty execs at once over one session, all and each
//!             vmm exec -- true          spawn to exit
//!             the same, pooled          request to end          ─┐ compared
//!             `true` in the guest       fork to the end of wait ─┤
//!             a byte to the guest and back                      ─┘
//!             echo, pooled              request to first byte
//!             dd, pooled                output from first byte to last
//! ```

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

/// An exec over a pooled session: at most this many times a process and a round trip.
const TARGET: f64 = 1.5;
/// The helper in the guest.
const HELPER: &str = ".vmm/bench-exec";

/// `cargo xtask bench exec`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Rounds in which each kind runs once.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    rounds: u32,
    /// MiB of output in each round.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    mib: u32,
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
    helper: String,
    rounds: u32,
    output_mib: u32,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Samples {
    command_ms: Vec<f64>,
    pooled_ms: Vec<f64>,
    spawn_ms: Vec<f64>,
    echo_ms: Vec<f64>,
    first_byte_ms: Vec<f64>,
    output_mb_s: Vec<f64>,
    burst_all_ms: Vec<f64>,
    burst_ms: Vec<f64>,
}

impl Samples {
    /// Every kind that is a time.
    fn times(&self) -> [(&'static str, &[f64]); 7] {
        [
            ("vmm exec", &self.command_ms),
            ("pooled", &self.pooled_ms),
            ("spawn", &self.spawn_ms),
            ("vsock echo", &self.echo_ms),
            ("first byte", &self.first_byte_ms),
            ("20 at once", &self.burst_all_ms),
            ("each of 20", &self.burst_ms),
        ]
    }

    /// What a pooled exec is made of, round by round.
    fn bare(&self) -> Vec<f64> {
        let pairs = self.spawn_ms.iter().zip(&self.echo_ms);
        pairs.map(|(spawn, echo)| spawn + echo).collect()
    }
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    machine: &'static str,
    rounds: u32,
    /// Of a pooled exec to a process and a round trip in the same guest.
    pooled: Ratio,
    target: f64,
    met: bool,
    summaries_ms: Vec<(&'static str, Summary)>,
    samples: Samples,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place, arguments: &Arguments) -> Result<()> {
    let parts = Parts::ready(place, arguments.kvm)?;
    let helper = build_static(place, "bench-exec", "bench-exec")?;
    let mut archive = Archive::default();
    archive.folder(".vmm", 0o755);
    archive.file(HELPER, 0o755, &read(&helper)?);
    let initramfs = inside::folder(place)?.join("exec-initramfs.cpio");
    let image = read(&parts.image.folder.join("initramfs.cpio"))?;
    write_whole(&initramfs, &archive.behind(image))?;
    let plan = Plan {
        vmm: parts.vmm.clone(),
        kernel: parts.image.folder.join("vmlinux"),
        initramfs,
        helper: format!("/{HELPER}"),
        rounds: arguments.rounds,
        output_mib: arguments.mib,
    };
    let plan = inside::plan(place, "exec-plan.json", &plan)?;
    let words = [helper.into(), "measure".into(), plan.into()];
    let samples: Samples = inside::measure(place, &parts, words.into())?;
    let pooled = Ratio::of(&samples.pooled_ms, &samples.bare());
    let report = Report {
        what: "commands in a running sandbox, in milliseconds; output in MB/s",
        circumstances: Circumstances::now(place, &parts.vmm),
        machine: parts.kvm.name(),
        rounds: arguments.rounds,
        pooled,
        target: TARGET,
        met: pooled.upper_95 <= TARGET,
        summaries_ms: samples
            .times()
            .map(|(name, series)| (name, Summary::of(series)))
            .into(),
        samples,
    };
    let path = report::keep(place, "exec", report.circumstances.time, &report)?;
    tell(&report)?;
    say::step(format!("samples are in {}", path.display()));
    let missed = (!report.met).then(|| {
        format!(
            "pooled exec: {:.2} of a process and a round trip is above {TARGET:.2}",
            pooled.upper_95
        )
    });
    verdict(missed.as_slice())
}

fn tell(report: &Report) -> Result<()> {
    say::data(format!(
        "commands in a running sandbox, on {}, commit {}, n={}",
        report.machine, report.circumstances.commit, report.rounds
    ))?;
    for (name, summary) in &report.summaries_ms {
        say::data(report::row(name, summary))?;
    }
    let output = Summary::of(&report.samples.output_mb_s);
    say::data(format!(
        "output         median {:.1} MB/s, best {:.1}; stdin is not measured: `vmm exec` has none yet",
        output.p50, output.max
    ))?;
    say::data(format!(
        "pooled / (spawn + vsock echo) {:.3}, below {:.3} with 95 % (target {TARGET:.2}: {})",
        report.pooled.median,
        report.pooled.upper_95,
        if report.met { "met" } else { "missed" }
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pooled_exec_is_compared_with_its_parts_of_the_same_round() {
        let one = || vec![1.0];
        let samples = Samples {
            command_ms: one(),
            pooled_ms: one(),
            spawn_ms: vec![1.0, 2.0, 3.0],
            echo_ms: vec![10.0, 20.0, 30.0],
            first_byte_ms: one(),
            output_mb_s: one(),
            burst_all_ms: one(),
            burst_ms: one(),
        };
        assert_eq!(samples.bare(), [11.0, 22.0, 33.0]);
    }
}
