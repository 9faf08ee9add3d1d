//! `cargo xtask test --pack FILE`: the tests that need a KVM as one archive, for a machine that has one and no Rust.
//!
//! ```text
//!   vmm-tests/run              the runner, POSIX sh
//!             COMMIT, LICENSE
//!             bin/vmm          the release build
//!             image/           kernel and initramfs of the guests
//!             docs/            all of it: tests read the documentation
//!             tests/bin/       static test programs; tests/ is their $CARGO_MANIFEST_DIR
//!             tests/programs   each with the number of its tests, all of which must have run
//!             tests/needs      what single tests need besides
//! ```
//!
//! The archive is written under a temporary name and takes the place of no file.

mod archive;

use std::fs;
use std::path::Path;
use std::process::Command;

use super::binaries::{self, Selection, TestBinary};
use crate::error::{Error, Naming, Result};
use crate::image;
use crate::place::Place;
use crate::process::{self, build_static, capture};
use crate::say;
use crate::setup;
use archive::{Contents, Output};

/// The runner.
const RUN: &str = include_str!("pack/run.sh");

/// Builds and packs; prints the archive's path.
pub fn run(place: &Place, file: &Path) -> Result<()> {
    // A name that cannot be used is told before anything is built.
    let output = Output::at(file)?;
    setup::rust_targets(place)?;
    let vmm = build_static(place, "vmm", "vmm")?;
    let image = image::image(place, false)?;
    let mut programs = Vec::new();
    for binary in binaries::build(place, &Selection::Packed)? {
        if binary.needs_kvm() {
            programs.push(Program::inspect(place, &binary)?);
        }
    }
    let parts = Parts {
        workspace: &place.workspace,
        vmm: &vmm,
        image: &image.folder,
        commit: commit(place),
        programs,
    };
    let contents = parts.contents()?;
    let _progress = say::progress(format!("writing {}", file.display()));
    output.write(&contents)?;
    say::step(format!(
        "{} tests; where it goes: tar xf FILE && cd {} && ./run --kvm host",
        parts.tests().count(),
        archive::FOLDER
    ));
    say::data(file.display())
}

/// The commit that is packed, with a mark when it is not all of it.
fn commit(place: &Place) -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--exclude=*"])
        .current_dir(&place.workspace);
    capture(&mut git).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
}

/// A test program that can be packed.
struct Program {
    name: String,
    file: std::path::PathBuf,
    tests: Vec<String>,
}

impl Program {
    /// Asks it for its tests. An error if it has a path of the checkout in it, which it would look for elsewhere.
    fn inspect(place: &Place, binary: &TestBinary) -> Result<Self> {
        let bytes = process::read(&binary.program)?;
        for folder in [&binary.folder, &place.target] {
            if holds(&bytes, folder.as_os_str().as_encoded_bytes()) {
                return Err(Error::Check(format!(
                    "{} has the path {} in it and cannot be packed: find files by vmm_tests::checkout, not by env!",
                    binary.name(),
                    folder.display()
                )));
            }
        }
        let list = capture(binary.command().arg("--list"))?;
        let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(Self {
            name: binary.target.clone(),
            file: binary.program.clone(),
            tests: tests.map(str::to_owned).collect(),
        })
    }
}

fn holds(bytes: &[u8], wanted: &[u8]) -> bool {
    let Some((first, _)) = wanted.split_first() else {
        return true;
    };
    let starts = bytes.iter().enumerate().filter(|(_, byte)| *byte == first);
    starts
        .into_iter()
        .any(|(at, _)| bytes[at..].starts_with(wanted))
}

/// What an archive is made of.
struct Parts<'a> {
    workspace: &'a Path,
    vmm: &'a Path,
    image: &'a Path,
    commit: String,
    programs: Vec<Program>,
}

impl Parts<'_> {
    fn tests(&self) -> impl Iterator<Item = &str> {
        self.programs
            .iter()
            .flat_map(|program| program.tests.iter().map(String::as_str))
    }

    fn contents(&self) -> Result<Contents> {
        if self.tests().next().is_none() {
            return Err(Error::Check("vmm-tests has no tests to pack".into()));
        }
        let mut contents = Contents::default();
        contents.text("run", 0o755, RUN)?;
        contents.text("COMMIT", 0o644, &format!("{}\n", self.commit))?;
        contents.file("LICENSE", 0o644, &self.workspace.join("LICENSE"))?;
        contents.file("bin/vmm", 0o755, self.vmm)?;
        for name in ["vmlinux", "vmlinuz", "initramfs.cpio"] {
            contents.file(&format!("image/{name}"), 0o644, &self.image.join(name))?;
        }
        contents.folder("docs", &self.workspace.join("docs"))?;
        let mut programs = String::new();
        for program in &self.programs {
            let path = format!("tests/bin/{}", program.name);
            contents.file(&path, 0o755, &program.file)?;
            programs += &format!("{} {}\n", program.name, program.tests.len());
        }
        contents.text("tests/programs", 0o644, &programs)?;
        contents.text("tests/needs", 0o644, &self.needs()?)?;
        Ok(contents)
    }

    /// The list of needs; each of its tests has to be there.
    fn needs(&self) -> Result<String> {
        let path = self.workspace.join("tests/needs");
        let text = fs::read_to_string(&path).naming(|| format!("read {}", path.display()))?;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let test = line.split_once(' ').map(|(_, test)| test);
            if test.is_none_or(|test| self.tests().all(|known| known != test)) {
                return Err(Error::malformed(&path, format!("no test for {line:?}")));
            }
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
