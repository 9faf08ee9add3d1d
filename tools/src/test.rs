//! `cargo xtask test`: every check of the project, the cheapest first.

pub mod binaries;
mod machines;
pub mod pack;
pub mod results;

use std::process::Command;

use crate::cases;
use crate::error::{Error, Result};
use crate::fuzz;
use crate::kvm::Wish;
use crate::place::Place;
use crate::process::{self, cargo};
use crate::say;
use crate::setup;

use binaries::{Selection, TestBinary};
use results::Results;

/// One step, which can be run alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Step {
    /// The source is formatted.
    Fmt,
    /// No known misspelling.
    Typos,
    /// Licences, sources and duplicates of the dependencies.
    Deny,
    /// No warning, for the host and for the static target, with and without features.
    Clippy,
    /// The documentation builds without a warning.
    Docs,
    /// Unit, loopback and fast-guest tests, and the examples of the documentation.
    Unit,
    /// A few seconds of each fuzz target.
    Fuzz,
    /// Tests on real machines, in one nest or on the host.
    Machine,
    /// Each protection taken away turns its test red.
    Negative,
    /// Every listed case has its tests, and they passed.
    Cases,
}

/// All of them, in their order.
const STEPS: [Step; 10] = [
    Step::Fmt,
    Step::Typos,
    Step::Deny,
    Step::Clippy,
    Step::Docs,
    Step::Unit,
    Step::Fuzz,
    Step::Negative,
    Step::Machine,
    Step::Cases,
];

/// What to run.
pub struct Options {
    /// Whose KVM.
    pub wish: Wish,
    /// These steps only; all when empty.
    pub steps: Vec<Step>,
    /// Tests whose name contains this only; skips the check of the cases.
    pub filter: Option<String>,
}

/// Runs the steps; the first that fails ends it.
pub fn run(place: &Place, options: &Options) -> Result<()> {
    setup::rust_targets(place)?;
    let mut machines = None;
    for step in STEPS {
        if !options.steps.is_empty() && !options.steps.contains(&step)
            || options.filter.is_some() && matches!(step, Step::Cases | Step::Fuzz)
        {
            continue;
        }
        say::step(format!("== {step:?}").to_lowercase());
        match step {
            Step::Fmt => process::chatter(&mut cargo(place, ["fmt", "--all", "--check"]))?,
            Step::Typos => typos(place)?,
            Step::Deny => deny(place)?,
            Step::Clippy => clippy(place)?,
            Step::Docs => {
                let mut docs = cargo(
                    place,
                    [
                        "doc",
                        "--quiet",
                        "--workspace",
                        "--no-deps",
                        "--document-private-items",
                    ],
                );
                process::chatter(docs.env("RUSTDOCFLAGS", "-D warnings"))?;
            }
            Step::Unit => unit(place, options)?,
            Step::Fuzz => fuzz::smoke(place)?,
            Step::Negative => cases::negative(place)?,
            Step::Machine => machines = Some(machines::run(place, options)?),
            Step::Cases => cases::check(place)?,
        }
    }
    // The last line of all: what a person looks for first.
    match machines {
        Some(summary) => say::data(summary),
        None => Ok(()),
    }
}

fn typos(place: &Place) -> Result<()> {
    let program = setup::checker(place, "typos")?;
    process::chatter(
        Command::new(program)
            .args(["--config", "ci/typos.toml"])
            .current_dir(&place.workspace),
    )
}

fn deny(place: &Place) -> Result<()> {
    let program = setup::checker(place, "cargo-deny")?;
    let mut command = Command::new(program);
    command.args([
        "--locked",
        "--all-features",
        "--log-level",
        "warn",
        "--config",
        "ci/deny.toml",
    ]);
    // Not the advisories: their database is not everywhere within reach.
    command.args([
        "check",
        "--hide-inclusion-graph",
        "licenses",
        "bans",
        "sources",
    ]);
    process::chatter(command.current_dir(&place.workspace))
}

fn clippy(place: &Place) -> Result<()> {
    let deny = ["--", "-D", "warnings"];
    let host = ["clippy", "--quiet", "--workspace", "--all-targets"];
    process::chatter(cargo(place, host).args(deny))?;
    process::chatter(cargo(place, host).arg("--all-features").args(deny))?;
    let musl = ["clippy", "--quiet", "--target", process::MUSL];
    let packages = ["-p", "vmm", "-p", "vmm-agent", "-p", "nest-init"];
    process::chatter(cargo(place, musl).args(packages).args(deny))
}

/// Everything that needs no machine; the fast guests among it need a KVM of any kind.
fn unit(place: &Place, options: &Options) -> Result<()> {
    let binaries = binaries::build(place, &Selection::Workspace)?;
    let mut results = Results::load(place);
    let mut failed = Vec::new();
    for binary in &binaries {
        if binary.needs_kvm() && !any_kvm()? {
            say::step(format!(
                "{}: runs in the nest with the machine tests, for want of a KVM here",
                binary.name()
            ));
            continue;
        }
        if !binary.run(options.filter.as_deref(), &mut results)? {
            failed.push(binary.name());
        }
    }
    results.save(place)?;
    if !failed.is_empty() {
        return Err(Error::Check(format!(
            "tests failed in {}",
            failed.join(", ")
        )));
    }
    if options.filter.is_none() {
        process::chatter(&mut cargo(
            place,
            ["test", "--quiet", "--workspace", "--doc"],
        ))?;
    }
    Ok(())
}

/// Whether fast guests can run on this host: any KVM will do, a forbidden one is an error.
fn any_kvm() -> Result<bool> {
    match std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
    {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Err(Error::Missing {
            what: "the permission to open /dev/kvm".into(),
            remedy: "`vmm doctor` tells how to get it".into(),
        }),
        Err(_) => Ok(false),
    }
}

/// The fast-guest binaries that the unit step left to the nest.
fn left_to_the_nest(place: &Place) -> Result<Vec<TestBinary>> {
    let fast: Vec<TestBinary> = binaries::build(place, &Selection::Workspace)?
        .into_iter()
        .filter(TestBinary::needs_kvm)
        .collect();
    if fast.is_empty() || any_kvm()? {
        Ok(Vec::new())
    } else {
        Ok(fast)
    }
}
