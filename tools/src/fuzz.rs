//! `cargo xtask fuzz`: a fuzz target of `tests/fuzz` for some seconds, or all of them.
//!
//! What a target finds is kept in `target/fuzz/artifacts`, what it has learned in `target/fuzz/corpus`. The project's own
//! toolchain serves: what is fuzzed has no unsafe code, so no sanitizer is wanted and no nightly compiler needed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::process::{self, cargo};
use crate::say;
use crate::setup;

/// The targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Target {
    /// An agent's session against whatever a client sends.
    Agent,
    /// A client's session against whatever an agent sends.
    Client,
    /// The decoder and every message against any bytes.
    Frames,
}

impl Target {
    fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Client => "client",
            Self::Frames => "frames",
        }
    }
}

/// Flags of the command.
#[derive(clap::Args)]
pub struct Arguments {
    /// What to fuzz; each of them when absent.
    #[arg(value_enum)]
    target: Option<Target>,
    /// For how long each.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=7 * 24 * 3600))]
    seconds: u32,
}

/// Seconds of each target among the project's checks.
const SMOKE: u32 = 10;
/// Bytes of an input: more than all operations that one run looks at have.
const MAX_INPUT: u32 = 4096;

/// Fuzzes; an error if anything was found.
pub fn run(place: &Place, arguments: &Arguments) -> Result<()> {
    match arguments.target {
        Some(target) => fuzz(place, target, arguments.seconds),
        None => all(place, arguments.seconds),
    }
}

/// A short run of each.
pub fn smoke(place: &Place) -> Result<()> {
    all(place, SMOKE)
}

fn all(place: &Place, seconds: u32) -> Result<()> {
    for target in [Target::Agent, Target::Client, Target::Frames] {
        fuzz(place, target, seconds)?;
    }
    Ok(())
}

fn fuzz(place: &Place, target: Target, seconds: u32) -> Result<()> {
    let program = setup::fuzzer(place)?;
    let name = target.name();
    let folder = |kind: &str| -> Result<PathBuf> {
        let folder = place.target.join("fuzz").join(kind).join(name);
        fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
        Ok(folder)
    };
    let (corpus, artifacts) = (folder("corpus")?, folder("artifacts")?);
    say::step(format!("fuzzing {name} for {seconds} s"));
    // Cargo's environment, without its program: cargo-fuzz asks for the one on the PATH.
    let mut fuzz = Command::new(program);
    for (key, value) in cargo(place, [] as [&str; 0]).get_envs() {
        match value {
            Some(value) => fuzz.env(key, value),
            None => fuzz.env_remove(key),
        };
    }
    fuzz.current_dir(&place.workspace)
        .args([
            "fuzz",
            "run",
            "--fuzz-dir",
            "tests/fuzz",
            "--sanitizer",
            "none",
        ])
        .arg("--target-dir")
        .arg(place.target.join("fuzz/build"))
        .arg(name)
        .arg(corpus)
        .arg("--")
        .args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={MAX_INPUT}"),
            format!("-artifact_prefix={}/", artifacts.display()),
            "-print_final_stats=1".to_owned(),
            "-verbosity=0".to_owned(),
        ]);
    process::chatter(&mut fuzz).map_err(|error| match error {
        Error::Command { .. } => Error::Check(format!(
            "{name} found something, or was not built: see above; inputs are in {}",
            artifacts.display()
        )),
        other => other,
    })
}
