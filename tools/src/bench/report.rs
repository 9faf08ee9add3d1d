//! Where raw samples and the table of a run go.

use std::path::PathBuf;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::bench::stats::Summary;
use crate::error::{Naming, Result};
use crate::place::{Place, write_whole};
use crate::process;

/// What a number means nothing without.
#[derive(serde::Serialize)]
pub struct Circumstances {
    /// Seconds since 1970.
    pub time: u64,
    /// The host's kernel.
    pub kernel: String,
    /// The KVM, in the words of `vmm doctor`.
    pub kvm: String,
    /// The commit that was measured.
    pub commit: String,
}

impl Circumstances {
    /// Of this machine and checkout.
    pub fn now(place: &Place, vmm: &std::path::Path) -> Self {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let text = |command: &mut Command| {
            process::capture(command)
                .unwrap_or_default()
                .trim()
                .to_owned()
        };
        let doctor = Command::new(vmm).args(["doctor", "--json"]).output();
        let doctor: serde_json::Value = doctor
            .ok()
            .and_then(|output| serde_json::from_slice(&output.stdout).ok())
            .unwrap_or_default();
        Self {
            time: time.map_or(0, |since| since.as_secs()),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            kvm: doctor["kvm"].as_str().unwrap_or("unknown").to_owned(),
            commit: text(
                Command::new("git")
                    .args(["rev-parse", "--short", "HEAD"])
                    .current_dir(&place.workspace),
            ),
        }
    }
}

/// What a program says of its version, first line.
pub fn version(program: &std::path::Path) -> String {
    process::capture(Command::new(program).arg("--version"))
        .ok()
        .and_then(|text| text.lines().next().map(str::to_owned))
        .unwrap_or_else(|| "unknown".into())
}

/// Writes the raw samples below `target/bench` and says where.
pub fn keep(
    place: &Place,
    name: &str,
    time: u64,
    report: &impl serde::Serialize,
) -> Result<PathBuf> {
    let folder = place.target.join("bench");
    std::fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
    let path = folder.join(format!("{name}-{time}.json"));
    let bytes = serde_json::to_vec_pretty(report)
        .map_err(std::io::Error::from)
        .naming(|| "encode the samples".into())?;
    write_whole(&path, &bytes)?;
    Ok(path)
}

/// One line of a table of times.
pub fn row(name: &str, summary: &Summary) -> String {
    format!(
        "{name:<14} p50 {:>8.2}  p90 {:>8.2}  p99 {:>8.2}  max {:>8.2} ms",
        summary.p50, summary.p90, summary.p99, summary.max
    )
}
