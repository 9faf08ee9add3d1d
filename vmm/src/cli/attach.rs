//! `vmm attach` and `vmm exec --detach`: execs that go on without us.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vmm_client::{Deadlines, Ended, Event, Session, StartError};
use vmm_protocol::ExecRequest;

use super::exec::reach;
use super::output::Output;
use super::plan::Error;
use super::status_file::StatusFile;
use super::{chain, ending, say, status, units};
use crate::sandbox::{self, Name};

/// Until a detached exec runs.
const START: Duration = Duration::from_secs(60);

/// Flags of `vmm attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// The sandbox
    #[arg(value_name = "NAME")]
    name: Name,
    /// The exec's number, as 'exec --detach' prints it and 'ps NAME' lists it
    #[arg(value_name = "EXEC", value_parser = units::exec)]
    exec: u64,
    /// Offsets to begin at: bytes of stdout and of stderr that are there already
    #[arg(long, value_name = "STDOUT,STDERR", default_value = "0,0", value_parser = units::offsets)]
    from: [u64; 2],
    /// State root
    #[arg(long, value_name = "ROOT", value_parser = units::folder)]
    dir: Option<PathBuf>,
    /// Write how the command ended to this new file, or open descriptor
    #[arg(long, value_name = "PATH|fd:N")]
    status_file: Option<StatusFile>,
    /// One JSON object a line instead of the output itself
    #[arg(long)]
    json: bool,
}

impl Attach {
    /// Streams it to its end; the exit status. A signal that ends us leaves the exec as it is.
    pub fn main(&self) -> u8 {
        match self.checked() {
            Ok(status) => status,
            Err(error) => {
                say(&format!("vmm: {}", chain(&error)));
                status::TOOL
            }
        }
    }

    fn checked(&self) -> Result<u8, Error> {
        let (socket, tag) = reach(&sandbox::root(self.dir.as_deref()), &self.name)?;
        let status_file = self
            .status_file
            .as_ref()
            .map(StatusFile::open)
            .transpose()?;
        let mut output = Output::of_process(self.json)
            .map_err(|source| Error::Host("stdout and stderr", source))?
            .with_status_file(status_file);
        let session = open(&socket, &tag)?;
        let exec = session
            .attach(self.exec, self.from)
            .map_err(|error| Error::Ended(chain(&error)))?;
        for event in exec {
            // A refusal is ours, not the exec's end: nothing is written of it.
            if let Event::Ended(Ended::Refused(refusal)) = &event {
                return Err(Error::Ended(refusal.to_string()));
            }
            output.event(&event).map_err(Error::Stdout)?;
            if let Event::Ended(ended) = &event {
                let asked = ["", ""].map(str::to_owned);
                return ending::status(ended, &asked, None, None).map_err(Error::Ended);
            }
        }
        Err(Error::Ended(
            "the session ended without a record".to_owned(),
        ))
    }
}

/// Starts an exec that nobody waits for, and prints its number.
///
/// # Errors
/// [`Error::Ended`] when it was refused or lost.
pub(super) fn start(
    socket: &std::path::Path,
    tag: &vmm_client::GenerationTag,
    request: &ExecRequest,
    json: bool,
) -> Result<u8, Error> {
    let started = match open(socket, tag)?.start(request, START) {
        Ok(started) => started,
        Err(StartError::Session(error)) => return Err(Error::Ended(chain(&error))),
        Err(StartError::Ended(ended)) => {
            let asked = ending::asked(request);
            return ending::status(&ended, &asked, None, None).map_err(Error::Ended);
        }
    };
    let line = if json {
        serde_json::json!({
            "event": "started", "exec": started.exec, "pid": started.pid, "schema": 1,
        })
        .to_string()
    } else {
        started.exec.to_string()
    };
    use std::io::Write;
    writeln!(std::io::stdout(), "{line}").map_err(Error::Stdout)?;
    Ok(status::OK)
}

fn open(socket: &std::path::Path, tag: &vmm_client::GenerationTag) -> Result<Session, Error> {
    Session::connect(socket, tag, &Deadlines::default()).map_err(|error| {
        Error::Ended(format!(
            "cannot open a session with the agent: {}",
            chain(&error)
        ))
    })
}
