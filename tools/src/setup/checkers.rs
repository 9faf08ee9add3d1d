//! The checkers of the source text: programs that are not part of the toolchain, in pinned versions in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Naming, Result};
use crate::place::{Place, digest, write_whole};
use crate::process;
use crate::say;

/// The checkers' programs.
pub const NAMES: [&str; 2] = ["typos", "cargo-deny"];

/// The fuzzer's version: it comes from the crates' registry alone.
const CARGO_FUZZ: &str = "0.13.2";

/// Versions and digests, in pip's format.
const PINS: &str = "ci/checkers.txt";

/// The program's path; fetched when it is not in the cache in the pinned version.
pub fn checker(place: &Place, name: &str) -> Result<PathBuf> {
    let pins = place.workspace.join(PINS);
    let text = fs::read_to_string(&pins).naming(|| format!("read {}", pins.display()))?;
    let pin = pin(&text, name)
        .ok_or_else(|| Error::malformed(&pins, format!("has no line for {name}")))?;
    let folder = place.cached("checkers")?;
    let _lock = place.lock("checkers")?;
    let program = folder.join(format!("{name}-{}", digest([pin.as_bytes()])));
    if program.exists() {
        return Ok(program);
    }
    say::step(format!("fetching {name}"));
    let work = tempfile::tempdir_in(&folder)
        .naming(|| format!("create a folder in {}", folder.display()))?;
    let fetched = match by_wheel(work.path(), pin, name) {
        Ok(fetched) => fetched,
        Err(error) => {
            say::step(format!(
                "no wheel of {name} ({error}); building it, which takes minutes"
            ));
            by_cargo(work.path(), pin, name)?
        }
    };
    rustix::fs::chmod(&fetched, rustix::fs::Mode::from_raw_mode(0o755))
        .naming(|| format!("open {}", fetched.display()))?;
    fs::rename(&fetched, &program).naming(|| format!("move {name} to {}", program.display()))?;
    Ok(program)
}

/// cargo-fuzz, of the version that the targets are kept to, and the C++ compiler that libFuzzer is built by.
pub fn fuzzer(place: &Place) -> Result<PathBuf> {
    if process::find("c++").is_none() {
        if !process::is_root() {
            return Err(Error::Missing {
                what: "a C++ compiler, for libFuzzer".into(),
                remedy: "as root: apt-get install g++".into(),
            });
        }
        say::step("apt-get install g++");
        crate::apt::install(&["g++"])?;
    }
    let folder = place.cached("checkers")?;
    let _lock = place.lock("checkers")?;
    let program = folder.join(format!("cargo-fuzz-{CARGO_FUZZ}"));
    if program.exists() {
        return Ok(program);
    }
    say::step("building cargo-fuzz, which takes a minute");
    let work = tempfile::tempdir_in(&folder)
        .naming(|| format!("create a folder in {}", folder.display()))?;
    let pin = format!("cargo-fuzz=={CARGO_FUZZ}");
    let built = by_cargo(work.path(), &pin, "cargo-fuzz")?;
    fs::rename(&built, &program).naming(|| format!("move cargo-fuzz to {}", program.display()))?;
    Ok(program)
}

/// The line of a checker: its package's name is the checker's or ends with it.
fn pin<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find(|line| {
        line.split_once("==")
            .is_some_and(|(package, _)| package == name || package.ends_with(&format!("-{name}")))
    })
}

/// The quick way: a wheel is a zip file with the program in it.
fn by_wheel(work: &Path, pin: &str, name: &str) -> Result<PathBuf> {
    let requirements = work.join("requirements.txt");
    write_whole(&requirements, pin.as_bytes())?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
    ]);
    process::capture(
        pip.arg("--dest")
            .arg(work)
            .arg("--requirement")
            .arg(&requirements),
    )?;
    let wheel = only(work, |name| name.ends_with(".whl"))?;
    process::capture(
        Command::new("python3")
            .args(["-m", "zipfile", "--extract"])
            .arg(wheel)
            .arg(work),
    )?;
    Ok(only(work, |name| name.ends_with(".data"))?
        .join("scripts")
        .join(name))
}

/// The slow way, which needs nothing but the toolchain.
fn by_cargo(work: &Path, pin: &str, name: &str) -> Result<PathBuf> {
    let version = pin
        .split_once("==")
        .and_then(|(_, rest)| rest.split(' ').next())
        .unwrap_or_default();
    let package = if name == "typos" { "typos-cli" } else { name };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args([
            "install",
            "--quiet",
            "--locked",
            "--version",
            version,
            package,
            "--root",
        ])
        .arg(work);
    process::chatter(&mut cargo)?;
    Ok(work.join("bin").join(name))
}

fn only(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).naming(|| format!("list {}", folder.display()))?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(&wanted)
        })
        .ok_or_else(|| Error::malformed(folder, "has not what was fetched into it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checker_has_one_line() {
        let text = "# note\ntypos==1.2.3 --hash=x\nby-somebody-cargo-deny==0.1 --hash=y\n";
        assert_eq!(pin(text, "typos").unwrap(), "typos==1.2.3 --hash=x");
        assert!(pin(text, "cargo-deny").unwrap().starts_with("by-somebody"));
        assert_eq!(pin(text, "deny-not"), None);
    }
}
