//! `-d`: the same command once more, in a session of its own, and a word from it when it is ready.
//!
//! ```text
//!   vmm start box -d                       vmm start box -d --background 4711
//!     spawns it, stdout a pipe  ---------->  errors go to the terminal still
//!     waits for a line  <-- box -----------  ready: stderr -> monitor.log, stdout -> /dev/null
//!     prints it, leaves with 0               stays
//! ```

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use clap::Args;

use super::errors;
use super::plan::Error;
use crate::sandbox::{LogFile, Sandbox};

/// Flags of verbs that can leave the terminal.
#[derive(Debug, Args)]
pub struct Background {
    /// Return once it is ready, and leave it running
    #[arg(short = 'd', long = "detached", alias = "detach")]
    pub detach: bool,
    /// We are what `-d` has started, for this process.
    #[arg(long = "background", hide = true, value_name = "PID")]
    pub launcher: Option<i32>,
}

type Leaver = Box<dyn FnOnce() -> io::Result<()>>;

impl Background {
    /// True if this process is to start the one in the background.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.detach && self.launcher.is_none()
    }

    /// In the background process: a session of its own, and what leaves the terminal once all is ready.
    ///
    /// # Errors
    /// [`Error::Host`].
    pub fn leaver(&self, sandbox: &Sandbox) -> Result<Option<Leaver>, Error> {
        if self.launcher.is_none() {
            return Ok(None);
        }
        // Fails only for who leads a group already, and then it needs none.
        let _ = rustix::process::setsid();
        let (name, path) = (sandbox.name().to_string(), sandbox.file("monitor.log"));
        // Now, so that what cannot be written is said while someone listens.
        let log =
            LogFile::create(&path).map_err(|source| Error::Host("the monitor's log", source))?;
        Ok(Some(Box::new(move || {
            errors::leave_for(log)?;
            let mut stdout = io::stdout();
            // A launcher that has gone meanwhile needs no word.
            let _ = writeln!(stdout, "{name}").and_then(|()| stdout.flush());
            let null = File::options().write(true).open("/dev/null")?;
            rustix::stdio::dup2_stdout(&null)?;
            Ok(())
        })))
    }
}

/// Starts this command in the background, waits until it is ready or has failed, and prints its name; the status.
///
/// # Errors
/// What the host says.
pub fn spawn(failed: u8) -> io::Result<u8> {
    let launcher = rustix::process::getppid().map_or(1, |parent| parent.as_raw_nonzero().get());
    let mut arguments: Vec<OsString> = env::args_os().skip(1).collect();
    // Behind the verb, which is the first word that is no flag, and before a `--` that ends them.
    let verb = arguments
        .iter()
        .position(|word| !word.as_encoded_bytes().starts_with(b"-"))
        .map_or(0, |at| at + 1);
    arguments.insert(verb, format!("--background={launcher}").into());
    let mut child = Command::new("/proc/self/exe")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    if line.ends_with('\n') {
        io::stdout().write_all(line.as_bytes())?;
        return Ok(super::status::OK);
    }
    // It has said why, on our stderr, unless a signal ended it.
    let status = child.wait()?;
    if status.code().is_none() {
        super::say(&format!("vmm: it ended before it was ready: {status}"));
    }
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .filter(|code| *code != 0)
        .unwrap_or(failed))
}
