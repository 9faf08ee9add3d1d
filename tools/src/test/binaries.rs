//! Test programs: built by cargo, run by us, so that each result is known with its package and target.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::SystemTime;

use serde::Deserialize;

use super::results::{Outcome, Results};
use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::process::{self, cargo};
use crate::say;

/// The package of the tests that need a KVM.
const KVM_PACKAGE: &str = "vmm-tests";

/// Which test programs.
pub enum Selection {
    /// All that need no feature.
    Workspace,
    /// Those on real machines.
    Machines,
    /// All that need a KVM, static and without a trace of where they were built.
    Packed,
    /// One package's with its negative controls compiled in.
    Negative(String),
}

/// One test program.
#[derive(Clone, Debug)]
pub struct TestBinary {
    /// Its package.
    pub package: String,
    /// Its target: `lib`, or the name of a program or of an integration test.
    pub target: String,
    /// The program.
    pub program: PathBuf,
    /// The package's folder, which tests run in.
    pub folder: PathBuf,
}

impl TestBinary {
    /// Package and target.
    pub fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Whether it runs guests, on a KVM of any kind.
    pub fn needs_kvm(&self) -> bool {
        self.package == KVM_PACKAGE && self.target != "lib"
    }

    /// Changes when the program was built anew.
    pub fn stamp(&self) -> Result<String> {
        let data = std::fs::metadata(&self.program)
            .naming(|| format!("read {}", self.program.display()))?;
        let built = data
            .modified()
            .ok()
            .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        Ok(format!(
            "{} {}",
            data.len(),
            built.unwrap_or_default().as_nanos()
        ))
    }

    /// The program as cargo would start it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .stdin(Stdio::null());
        command
    }

    /// Runs it, its report on our stdout, and takes the results in; whether all passed.
    pub fn run(&self, filter: Option<&str>, results: &mut Results) -> Result<bool> {
        say::step(format!("-- {}", self.name()));
        let mut command = self.command();
        command.args(filter).stdout(Stdio::piped());
        let failed = || format!("run {}", self.program.display());
        let mut child = command.spawn().naming(failed)?;
        let mut report = Vec::new();
        if let Some(mut stdout) = child.stdout.take() {
            let mut block = [0; 8192];
            while let length @ 1.. = stdout.read(&mut block).naming(failed)? {
                report.extend_from_slice(&block[..length]);
                std::io::stdout()
                    .write_all(&block[..length])
                    .naming(|| "write to stdout".into())?;
            }
        }
        let status = child.wait().naming(failed)?;
        results.take(self, &String::from_utf8_lossy(&report), filter.is_none())?;
        Ok(status.success())
    }

    /// Runs one test of it and says how it went; what it prints is shown when `shown`.
    pub fn run_one(&self, name: &str, env: Option<(&str, &str)>) -> Result<Outcome> {
        let mut command = self.command();
        command.args(["--exact", name]).envs(env);
        let output = command
            .output()
            .naming(|| format!("start {}", self.program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(
            if text.contains("\nrunning 1 test\n") || text.starts_with("running 1 test\n") {
                match (output.status.success(), text.contains("1 passed")) {
                    (true, true) => Outcome::Passed,
                    (true, false) => Outcome::Ignored,
                    (false, _) => Outcome::Failed,
                }
            } else {
                Outcome::Absent
            },
        )
    }
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds the test programs and lists them in the order of package and target.
pub fn build(place: &Place, selection: &Selection) -> Result<Vec<TestBinary>> {
    let _progress = say::progress("building tests");
    let mut command = cargo(
        place,
        [
            "test",
            "--quiet",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
        ],
    );
    match selection {
        Selection::Workspace => command.arg("--workspace"),
        Selection::Machines => {
            command.args(["--package", KVM_PACKAGE, "--features", "machine", "--tests"])
        }
        Selection::Packed => {
            command.args(["--package", KVM_PACKAGE, "--features", "machine", "--tests"]);
            // By a flag of cargo, not by the environment: the agent's nested build would take that for its own.
            command.args(["--target", process::MUSL, "--config", &untraceable()])
        }
        Selection::Negative(package) => {
            command.args(["--package", package, "--features", "negative-control"])
        }
    };
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .naming(|| format!("start `{}`", process::line(&command)))?;
    if !output.status.success() {
        return Err(Error::Command {
            command: process::line(&command),
            status: output.status.to_string(),
            output: String::new(),
        });
    }
    Ok(programs(&String::from_utf8_lossy(&output.stdout)))
}

/// Cargo's configuration for programs with neither symbols nor the paths of this machine.
fn untraceable() -> String {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let remap = home.map(|home| format!("--remap-path-prefix={}=cargo", home.display()));
    let flags = ["-Cdebuginfo=0".to_owned(), "-Cstrip=symbols".to_owned()];
    let flags: Vec<String> = flags.into_iter().chain(remap).collect();
    format!(
        "target.{}.rustflags={}",
        process::MUSL,
        toml::Value::from(flags)
    )
}

/// The test programs in cargo's messages.
fn programs(messages: &str) -> Vec<TestBinary> {
    let mut found: Vec<TestBinary> = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(|message| {
            message.reason == "compiler-artifact"
                && message.profile.as_ref().is_some_and(|p| p.test)
        })
        .filter_map(|message| {
            let (target, manifest) = (message.target?, message.manifest_path?);
            let folder = manifest.parent()?.to_path_buf();
            let package = package_name(&manifest)?;
            let library = target.kind.iter().any(|kind| kind.ends_with("lib"));
            let target = if library {
                "lib".to_owned()
            } else {
                target.name
            };
            Some(TestBinary {
                package,
                target,
                program: message.executable?,
                folder,
            })
        })
        .collect();
    found.sort_by_key(TestBinary::name);
    found
}

/// The `name` in a manifest's package section: messages have it only inside an opaque id.
fn package_name(manifest: &std::path::Path) -> Option<String> {
    let text = std::fs::read_to_string(manifest).ok()?;
    let table: toml::Table = text.parse().ok()?;
    Some(table.get("package")?.get("name")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_in_cargos_messages() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = folder.path().join("Cargo.toml");
        std::fs::write(&manifest, "[package]\nname = \"some-crate\"\n").unwrap();
        let artifact = |kind: &str, name: &str, test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact", "manifest_path": manifest, "executable": format!("/t/{name}"),
                "target": { "name": name, "kind": [kind] }, "profile": { "test": test },
            })
            .to_string()
        };
        let messages = [
            artifact("test", "loopback", true),
            artifact("lib", "some_crate", true),
            artifact("bin", "agent", false),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ]
        .join("\n");
        let names: Vec<String> = programs(&messages).iter().map(TestBinary::name).collect();
        assert_eq!(names, ["some-crate lib", "some-crate loopback"]);
    }
}
