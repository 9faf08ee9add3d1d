//! Verbs about one exec of a sandbox, by its number.

use std::time::{Duration, Instant};

use clap::Args;
use vmm_client::{Deadlines, Ended, Event, Session, SessionError};
use vmm_protocol::RefusedCode;

use super::{Error, Target, print, status};
use crate::cli::exec::reach;
use crate::cli::output::exit_object;
use crate::cli::{plan, units};
use crate::sandbox;

/// Until an agent has answered.
const PATIENCE: Duration = Duration::from_secs(5);
/// Beyond its grace, until an exec that was cancelled has ended: what the agent itself waits for, and some.
const SETTLE: Duration = Duration::from_secs(5);

impl Target {
    /// A session with its agent.
    pub(super) fn session(&self) -> Result<Session, Error> {
        let root = sandbox::root(self.dir.as_deref());
        let (socket, tag) = reach(&root, &self.name).map_err(|error| match error {
            plan::Error::Sandbox(error) => Error::Sandbox(error),
            other => Error::State(other.to_string()),
        })?;
        Session::connect(&socket, &tag, &Deadlines::default())
            .map_err(|error| Error::Agent(self.name.clone(), error))
    }
}

/// An exec by its number.
#[derive(Debug, Args)]
struct Number {
    /// The exec's number, as 'exec --detach' prints it and 'ps NAME' lists it
    #[arg(value_name = "EXEC", value_parser = units::exec)]
    exec: u64,
}

/// `vmm release`
#[derive(Debug, Args)]
pub struct Release {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    number: Number,
}

impl Release {
    /// Has it forgotten.
    pub fn main(&self) -> Result<u8, Error> {
        self.target.session()?.release(self.number.exec, PATIENCE)?;
        Ok(status::OK)
    }
}

/// `vmm cancel`
#[derive(Debug, Args)]
pub struct Cancel {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    number: Number,
    /// How long it may take to end after SIGTERM until all of it is killed; 0 for none
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::grace)]
    time: Duration,
}

impl Cancel {
    /// Cancels it and waits for its end; one that has ended is cancelled already.
    pub fn main(&self) -> Result<u8, Error> {
        let session = self.target.session()?;
        let exec = self.number.exec;
        session.cancel(exec, self.time, PATIENCE)?;
        let deadline = Instant::now() + self.time + SETTLE;
        match session.wait(exec)?.next_before(deadline)? {
            Some(Event::Ended(Ended::Lost(lost))) => Err(SessionError::Lost {
                reason: lost.to_string(),
            }
            .into()),
            // Ended, or forgotten since.
            _ => Ok(status::OK),
        }
    }
}

/// Sends a signal to an exec's main process.
pub(super) fn signal(target: &Target, exec: u64, number: u8) -> Result<u8, Error> {
    target.session()?.signal(exec, number, PATIENCE)?;
    Ok(status::OK)
}

/// Waits for an exec's end and prints its status, or all about it.
pub(super) fn wait(target: &Target, exec: u64, json: bool) -> Result<u8, Error> {
    let ended = target.session()?.wait(exec)?.wait();
    match &ended {
        Ended::Refused(refusal) => Err(SessionError::Refused(refusal.clone()).into()),
        Ended::Lost(lost) => Err(SessionError::Lost {
            reason: lost.reason.clone(),
        }
        .into()),
        Ended::Exit(_) if json => {
            let mut object = exit_object(&ended);
            object["schema"] = 1.into();
            print(&object)
        }
        Ended::Exit(record) => print(&record.status().into()),
    }
}

impl From<SessionError> for Error {
    fn from(error: SessionError) -> Self {
        Self::Exec(error)
    }
}

/// The exit status of a request about an exec that was not done.
pub(super) fn status_of(error: &SessionError) -> u8 {
    match error {
        SessionError::Refused(refusal) => match refusal.code {
            RefusedCode::UnknownExec => status::MISSING,
            RefusedCode::NotEnded | RefusedCode::HasEnded | RefusedCode::GoingDown => status::STATE,
            _ => status::FAILED,
        },
        _ => status::FAILED,
    }
}
