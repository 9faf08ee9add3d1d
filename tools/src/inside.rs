//! A program of ours where the KVM is: on this host, or in a nest. It says what it found on stdout.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Naming, Result};
use crate::kvm::Kvm;
use crate::nest;
use crate::place::{Place, write_whole};
use crate::process::capture;
use crate::run::Parts;

/// This program itself.
pub fn own() -> Result<OsString> {
    let own = std::env::current_exe().naming(|| "find this program".into())?;
    Ok(own.into())
}

/// Writes a plan for the program to read: `target/bench` is the same folder in there.
pub fn plan(place: &Place, name: &str, plan: &impl serde::Serialize) -> Result<PathBuf> {
    let text = serde_json::to_vec(plan)
        .map_err(std::io::Error::from)
        .naming(|| "encode the plan".into())?;
    let path = folder(place)?.join(name);
    write_whole(&path, &text)?;
    Ok(path)
}

/// `target/bench`, made where it is missing.
pub fn folder(place: &Place) -> Result<PathBuf> {
    let folder = place.target.join("bench");
    std::fs::create_dir_all(&folder).naming(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

/// Runs it to its end, which must be a success, and returns its stdout; its stderr is shown. A `repeatable` one is
/// started over in a nest that wedged.
pub fn run(place: &Place, parts: &Parts, words: Vec<OsString>, repeatable: bool) -> Result<String> {
    match parts.kvm {
        Kvm::Host => {
            let mut command = Command::new(&words[0]);
            capture(command.args(&words[1..]).envs(parts.env()))
        }
        Kvm::Nest => {
            let program = Path::new(&words[0]).display().to_string();
            let mut options = nest::Options::new(place, words);
            options.env = parts.env();
            options.stdin = false;
            options.repeatable = repeatable;
            let sink = Shared::default();
            let mut sinks = nest::own_sinks()?;
            sinks.stdout = Box::new(sink.clone());
            match nest::run(place, &options, sinks)? {
                0 => Ok(sink.text()),
                status => Err(Error::Check(format!(
                    "{program} left with {status} in the nest: {}",
                    sink.text()
                ))),
            }
        }
    }
}

/// The same for a program whose stdout is one JSON value.
pub fn measure<T: serde::de::DeserializeOwned>(
    place: &Place,
    parts: &Parts,
    words: Vec<OsString>,
) -> Result<T> {
    let output = run(place, parts, words, true)?;
    serde_json::from_str(output.trim())
        .map_err(|error| Error::Check(format!("no samples ({error}): {output}")))
}

/// Bytes that a nest writes to.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Shared {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
