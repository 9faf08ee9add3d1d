//! Spawn to the first serial byte of a fast guest: floor, `vmm` and the peer, interleaved.

use std::path::PathBuf;

use crate::bench::contestant::Contestant;
use crate::bench::report::{self, Circumstances};
use crate::bench::stats::{Ratio, Summary};
use crate::bench::{guest, verdict};
use crate::error::{Naming, Result};
use crate::place::Place;
use crate::process::build_static;
use crate::say;

/// Rounds before those that count: file cache and frequency settle.
const WARM_UP: u32 = 3;
/// At most this many times the floor.
const FLOOR_TARGET: f64 = 2.0;
/// At most this share of the peer.
const PEER_TARGET: f64 = 0.35;

#[derive(serde::Serialize)]
struct Series {
    name: &'static str,
    version: String,
    summary_ms: Summary,
    samples_ms: Vec<f64>,
}

#[derive(serde::Serialize)]
struct Comparison {
    with: &'static str,
    ratio: Ratio,
    target: f64,
    met: bool,
}

#[derive(serde::Serialize)]
struct Report {
    what: &'static str,
    circumstances: Circumstances,
    memory_mib: u32,
    series: Vec<Series>,
    comparisons: Vec<Comparison>,
}

/// Measures, prints, keeps and judges.
pub fn run(place: &Place, peer: Option<PathBuf>, rounds: u32, memory: u32) -> Result<()> {
    let folder = tempfile::tempdir().naming(|| "create a folder".into())?;
    let guest = guest(place, folder.path(), "serial")?;
    let vmm = build_static(place, "vmm", "vmm")?;
    let floor = build_static(place, "floor", "floor")?;

    let circumstances = Circumstances::now(place, &vmm);
    let mut contestants = vec![
        Contestant::floor(floor, &guest),
        Contestant::vmm(vmm, &guest, memory),
    ];
    if let Some(path) = peer {
        contestants.push(Contestant::firecracker(
            path,
            &guest,
            memory,
            folder.path(),
        )?);
    }
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..WARM_UP + rounds {
        let _progress = say::progress(format!("round {round} of {}", WARM_UP + rounds));
        for (contestant, samples) in contestants.iter().zip(&mut samples) {
            // A failure is a failure, not a skipped sample.
            let sample = contestant.sample(folder.path())?;
            if round >= WARM_UP {
                samples.push(sample);
            }
        }
    }
    let comparisons = compare(&contestants, &samples);
    let report = Report {
        what: "milliseconds from spawn to the first serial byte of a fast guest",
        circumstances,
        memory_mib: memory,
        series: contestants
            .iter()
            .zip(samples)
            .map(|(contestant, samples_ms)| Series {
                name: contestant.name,
                version: contestant.version.clone(),
                summary_ms: Summary::of(&samples_ms),
                samples_ms,
            })
            .collect(),
        comparisons,
    };
    let path = report::keep(place, "boot", report.circumstances.time, &report)?;
    tell(&report)?;
    say::step(format!("samples are in {}", path.display()));
    let missed: Vec<String> = report
        .comparisons
        .iter()
        .filter(|comparison| !comparison.met)
        .map(|c| {
            format!(
                "{:.2} of {} is above {:.2}",
                c.ratio.upper_95, c.with, c.target
            )
        })
        .collect();
    verdict(&missed)
}

/// `vmm`, which is second, against the others.
fn compare(contestants: &[Contestant], samples: &[Vec<f64>]) -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for (index, contestant) in contestants.iter().enumerate() {
        let target = match index {
            0 => FLOOR_TARGET,
            1 => continue,
            _ => PEER_TARGET,
        };
        let ratio = Ratio::of(&samples[1], &samples[index]);
        comparisons.push(Comparison {
            with: contestant.name,
            ratio,
            target,
            met: ratio.upper_95 <= target,
        });
    }
    comparisons
}

fn tell(report: &Report) -> Result<()> {
    let c = &report.circumstances;
    say::data(format!(
        "boot of a fast guest, {} MiB, kernel {}, KVM {}, commit {}",
        report.memory_mib, c.kernel, c.kvm, c.commit
    ))?;
    for series in &report.series {
        let row = report::row(series.name, &series.summary_ms);
        say::data(format!(
            "{row}  n={}  {}",
            series.samples_ms.len(),
            series.version
        ))?;
    }
    for comparison in &report.comparisons {
        say::data(format!(
            "vmm / {:<11} {:.3}, below {:.3} with 95 % (target {:.2}: {})",
            comparison.with,
            comparison.ratio.median,
            comparison.ratio.upper_95,
            comparison.target,
            if comparison.met { "met" } else { "missed" }
        ))?;
    }
    Ok(())
}
