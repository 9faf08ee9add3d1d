//! Commands in a running sandbox, by every way in, beside what they are made of.
//!
//! ```text
//!   outside   builds, puts the helper into an initramfs, starts one machine ──> bench-exec measure
//!   inside    one sandbox; in each round, one after another:
//!             twenty execs at once over one session, all and each
//!             vmm exec -- true          spawn to exit
//!             the same, pooled          request to end          ─┐ compared
//!             `true` in the guest       fork to the end of wait ─┤
//!             the same                  vfork to the end of wait
//!             a byte to the guest and back                      ─┘
//!             echo, pooled              request to first byte
//!             dd, pooled                output from first byte to last
//!             and in a busy guest       see `busy`
//! ```

mod busy;

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
    /// Execs around which the agent's memory is measured.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    execs: u32,
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
    execs: u32,
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Samples {
    command_ms: Vec<f64>,
    pooled_ms: Vec<f64>,
    fork_ms: Vec<f64>,
    vfork_ms: Vec<f64>,
    echo_ms: Vec<f64>,
    first_byte_ms: Vec<f64>,
    output_mb_s: Vec<f64>,
    burst_all_ms: Vec<f64>,
    burst_ms: Vec<f64>,
    busy: busy::Samples,
}

impl Samples {
    /// Every kind that is a time.
    fn times(&self) -> [(&'static str, &[f64]); 8] {
        [
            ("vmm exec", &self.command_ms),
            ("pooled", &self.pooled_ms),
            ("fork", &self.fork_ms),
            ("vfork", &self.vfork_ms),
            ("vsock echo", &self.echo_ms),
            ("first byte", &self.first_byte_ms),
            ("20 at once", &self.burst_all_ms),
            ("each of 20", &self.burst_ms),
        ]
    }

    /// Of a pooled exec to a process and a round trip, round by round.
    fn pooled_to(&self, process_ms: &[f64]) -> Ratio {
        let pairs = process_ms.iter().zip(&self.echo_ms);
        let bare: Vec<f64> = pairs.map(|(process, echo)| process + echo).collect();
        Ratio::of(&self.pooled_ms, &bare)
    }
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    machine: &'static str,
    rounds: u32,
    /// Of a pooled exec to a process, forked as the agent forks, and a round trip in the same guest.
    pooled: Ratio,
    /// The same with the cheapest process there is.
    pooled_to_vfork: Ratio,
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
        execs: arguments.execs,
    };
    let plan = inside::plan(place, "exec-plan.json", &plan)?;
    let words = [helper.into(), "measure".into(), plan.into()];
    let samples: Samples = inside::measure(place, &parts, words.into())?;
    let pooled = samples.pooled_to(&samples.fork_ms);
    let report = Report {
        what: "commands in a running sandbox, in milliseconds; output in MB/s",
        circumstances: Circumstances::now(place, &parts.vmm),
        machine: parts.kvm.name(),
        rounds: arguments.rounds,
        pooled,
        pooled_to_vfork: samples.pooled_to(&samples.vfork_ms),
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
    report.samples.busy.tell(parts.kvm)?;
    say::step(format!("samples are in {}", path.display()));
    let mut missed = report.samples.busy.missed(parts.kvm);
    missed.extend((!report.met).then(|| {
        format!(
            "pooled exec: {:.2} of a process and a round trip is above {TARGET:.2}",
            pooled.upper_95
        )
    }));
    verdict(&missed)
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
        "output         median {:.1} MB/s, best {:.1}",
        output.p50, output.max
    ))?;
    say::data(format!(
        "pooled / (fork + vsock echo) {:.3}, below {:.3} with 95 % (target {TARGET:.2}: {})",
        report.pooled.median,
        report.pooled.upper_95,
        if report.met { "met" } else { "missed" }
    ))?;
    say::data(format!(
        "with vfork     {:.3}, below {:.3} with 95 %",
        report.pooled_to_vfork.median, report.pooled_to_vfork.upper_95
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pooled_exec_is_compared_with_its_parts_of_the_same_round() {
        let none = Vec::new;
        let samples = Samples {
            command_ms: none(),
            pooled_ms: vec![33.0, 66.0, 99.0],
            fork_ms: vec![1.0, 2.0, 3.0],
            vfork_ms: none(),
            echo_ms: vec![10.0, 20.0, 30.0],
            first_byte_ms: none(),
            output_mb_s: none(),
            burst_all_ms: none(),
            burst_ms: none(),
            busy: busy::Samples::default(),
        };
        let ratio = samples.pooled_to(&samples.fork_ms);
        assert!((ratio.median - 3.0).abs() < 1e-9 && (ratio.upper_95 - 3.0).abs() < 1e-9);
    }
}
