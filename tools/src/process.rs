//! Other programs.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Naming, Result};
use crate::place::Place;

/// The program's path, where `$PATH` has it.
pub fn find(program: &str) -> Option<PathBuf> {
    // Where a user's PATH often lacks the folders that system tools are in.
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|file| {
            rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok() && file.is_file()
        })
}

/// The whole command line, for messages.
pub fn line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs it to its end with its output captured; stdout is returned, the rest is shown when it fails.
pub fn capture(command: &mut Command) -> Result<String> {
    capture_bytes(command).map(|stdout| String::from_utf8_lossy(&stdout).into_owned())
}

/// The same where stdout is not text.
pub fn capture_bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .naming(|| format!("start `{}`", line(command)))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    Err(failed(
        command,
        output.status,
        format!("\n{}", said.trim_end()),
    ))
}

/// Runs it to its end with all its output on our stderr.
pub fn chatter(command: &mut Command) -> Result<()> {
    let stderr = rustix::io::dup(rustix::stdio::stderr()).naming(|| "duplicate stderr".into())?;
    let status = command
        .stdin(Stdio::null())
        .stdout(stderr)
        .status()
        .naming(|| format!("start `{}`", line(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(failed(command, status, String::new()))
    }
}

fn failed(command: &Command, status: std::process::ExitStatus, output: String) -> Error {
    Error::Command {
        command: line(command),
        status: status.to_string(),
        output,
    }
}

/// Cargo, in the checkout, with the toolchain that built this program.
pub fn cargo<S: AsRef<OsStr>>(place: &Place, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(&place.workspace);
    // `cargo run` sets these for the tool's own package; a build of another must not see them.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        }) {
            command.env_remove(name);
        }
    }
    command
}

/// Target of everything static.
pub const MUSL: &str = "x86_64-unknown-linux-musl";

/// Builds a static binary of the workspace and returns its path.
pub fn build_static(place: &Place, package: &str, binary: &str) -> Result<PathBuf> {
    crate::setup::rust_targets(place)?;
    let _progress = crate::say::progress(format!("building {binary}"));
    chatter(&mut cargo(
        place,
        [
            "build",
            "--quiet",
            "--release",
            "--target",
            MUSL,
            "--package",
            package,
            "--bin",
            binary,
        ],
    ))?;
    Ok(place.target.join(MUSL).join("release").join(binary))
}

/// Whether this process may change the system.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Reads a whole file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).naming(|| format!("read {}", path.display()))
}
