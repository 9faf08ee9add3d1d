//! The tests on real machines: all programs one after another in one nest, or on the host.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::binaries::{self, Selection, TestBinary};
use super::results::{Outcome, Results, parse};
use super::{Options, Step, left_to_the_nest};
use crate::error::{Error, Naming, Result};
use crate::kvm::Kvm;
use crate::nest;
use crate::place::Place;
use crate::run::Parts;
use crate::setup;

/// Longer than all machine tests take in the nest on a slow host.
const TIMEOUT: Duration = Duration::from_secs(25 * 60);

/// Runs each program in turn: `$1` is the folder for reports, `$2` a filter or empty, then folder and program of each.
/// One machine at a time, since the nest has one processor.
const SCRIPT: &str = r#"
logs=$1 filter=$2 number=0
shift 2
ls /sys/module >"$logs/modules"
while [ $# -gt 0 ]; do
    cd "$1" || exit 125
    number=$((number + 1))
    echo "-- ${2##*/}" >&2
    {
        CARGO_MANIFEST_DIR=$1 "$2" --test-threads=1 $filter || : >"$logs/failed"
    } | tee "$logs/$number.log"
    shift 2
done
[ ! -e "$logs/failed" ]
"#;

/// Runs them and returns the summary line.
pub fn run(place: &Place, options: &Options) -> Result<String> {
    let parts = Parts::ready(place, options.wish)?;
    setup::systemd()?;
    let mut programs = binaries::build(place, &Selection::Machines)?;
    programs.retain(|binary| binary.target.starts_with("machine"));
    if programs.is_empty() {
        return Err(Error::Check(
            "vmm-tests has no test target named machine*".into(),
        ));
    }
    if parts.kvm == Kvm::Nest {
        programs.extend(left_to_the_nest(place)?);
    }

    let logs = fresh_folder(&place.target.join("machine-logs"))?;
    let mut words: Vec<OsString> = ["sh", "-c", SCRIPT, "machines"].map(OsString::from).into();
    words.push(logs.clone().into());
    words.push(options.filter.clone().unwrap_or_default().into());
    for binary in &programs {
        let folder = binary
            .command()
            .get_current_dir()
            .map(Path::to_path_buf)
            .unwrap_or_default();
        words.extend([folder.into_os_string(), binary.program.clone().into()]);
    }
    let mut env = parts.env();
    env.push(("VMM_BIN".into(), parts.vmm.clone().into()));
    env.push((
        "VMM_KERNEL_BZIMAGE".into(),
        parts.image.bzimage.clone().into(),
    ));
    let status = match parts.kvm {
        Kvm::Host => {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).envs(env);
            let status = command.status().naming(|| "start sh".into())?;
            u8::try_from(status.code().unwrap_or(125)).unwrap_or(125)
        }
        Kvm::Nest => {
            let mut nest = nest::Options::new(place, words);
            nest.env = env;
            nest.out = logs.clone();
            nest.stdin = false;
            nest.timeout = Some(TIMEOUT);
            // Tests may be run again from the start; their report is, too.
            nest.repeatable = true;
            nest::run(place, &nest, nest::own_sinks()?)?
        }
    };
    let counts = take(place, &programs, &logs, options.filter.is_none())?;
    let modules = std::fs::read_to_string(logs.join("modules")).unwrap_or_default();
    let summary = format!(
        "machine tests: {} on {} ({}, release)",
        counts.text(),
        parts.kvm.name(),
        kvm_module(&modules)
    );
    // A word that was meant for another step may match none here; alone, it matches nothing at all.
    let none_is_well = options.filter.is_some() && options.steps != [Step::Machine];
    if status != 0 || counts.failed > 0 || (counts.passed == 0 && !none_is_well) {
        return Err(Error::Check(format!("{summary}, status {status}")));
    }
    Ok(summary)
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    ignored: usize,
}

impl Counts {
    fn text(&self) -> String {
        let mut text = format!("{} passed", self.passed);
        for (count, word) in [(self.failed, "failed"), (self.ignored, "ignored")] {
            if count > 0 {
                text += &format!(", {count} {word}");
            }
        }
        text
    }
}

/// Takes the results of all programs in.
fn take(place: &Place, programs: &[TestBinary], logs: &Path, whole: bool) -> Result<Counts> {
    let mut results = Results::load(place);
    let mut counts = Counts::default();
    for (number, binary) in (1..).zip(programs) {
        let log = std::fs::read_to_string(logs.join(format!("{number}.log"))).unwrap_or_default();
        for (_, outcome) in parse(&log) {
            match outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Ignored => counts.ignored += 1,
                Outcome::Failed | Outcome::Absent => counts.failed += 1,
            }
        }
        results.take(binary, &log, whole)?;
    }
    results.save(place)?;
    Ok(counts)
}

/// The hardware's half of KVM among the loaded modules.
fn kvm_module(modules: &str) -> &str {
    modules
        .lines()
        .find(|name| name.starts_with("kvm_"))
        .unwrap_or("kvm")
}

fn fresh_folder(folder: &Path) -> Result<PathBuf> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).naming(|| format!("create {}", folder.display()))?;
    Ok(folder.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_names_what_did_not_pass() {
        assert_eq!(
            Counts {
                passed: 3,
                ..Counts::default()
            }
            .text(),
            "3 passed"
        );
        assert_eq!(
            Counts {
                passed: 3,
                failed: 1,
                ignored: 2
            }
            .text(),
            "3 passed, 1 failed, 2 ignored"
        );
        assert_eq!(kvm_module("kernel\nkvm\nkvm_amd\n"), "kvm_amd");
        assert_eq!(kvm_module("kernel\n"), "kvm");
    }
}
