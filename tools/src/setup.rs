//! What a fresh Debian needs.

use std::path::PathBuf;
use std::process::Command;

use crate::error::{Error, Result};
use crate::place::Place;
use crate::process;

/// The emulator, where it is.
pub struct Qemu {
    /// The program.
    pub program: PathBuf,
    /// Its root when it was unpacked into the cache rather than installed.
    root: Option<PathBuf>,
}

impl Qemu {
    /// Adds what an unpacked QEMU needs to find its libraries and firmware.
    pub fn dress(&self, command: Command) -> Command {
        command
    }
}

/// Finds QEMU.
pub fn qemu(_place: &Place) -> Result<Qemu> {
    match process::find("qemu-system-x86_64") {
        Some(program) => Ok(Qemu {
            program,
            root: None,
        }),
        None => Err(Error::Missing {
            what: "qemu-system-x86_64".into(),
            remedy: "apt-get install qemu-system-x86 seabios".into(),
        }),
    }
}
