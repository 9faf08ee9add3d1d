//! Verbs about a sandbox as a whole: what it is, what it wrote, its end.

mod activity;
mod execs;
mod logs;
mod show;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::{Value, json};
use vmm_client::{ConnectError, SessionError};

pub use execs::{Cancel, Release};
pub use logs::Logs;
pub use show::{Inspect, Ps};

use super::{chain, say, status, units};
use crate::api::{Client, ClientError, Request};
use crate::sandbox::{self, Holder, Name, Process, Sandbox, State};

/// Beyond its grace, until a sandbox that does not end by itself is killed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Until a process that was killed is gone.
const SETTLE: Duration = Duration::from_secs(10);

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// It could not be asked.
    #[error("sandbox {0}")]
    Ask(Name, #[source] ClientError),
    /// No session with its agent.
    #[error("sandbox {0}: cannot open a session with the agent")]
    Agent(Name, #[source] ConnectError),
    /// An exec of it.
    #[error(transparent)]
    Exec(SessionError),
    /// It is in no state for this.
    #[error("{0}")]
    State(String),
    /// Something of the host's.
    #[error("cannot {0}")]
    Host(&'static str, #[source] std::io::Error),
}

impl Error {
    fn status(&self) -> u8 {
        match self {
            Self::Sandbox(sandbox::Error::Missing { .. }) => status::MISSING,
            Self::Sandbox(sandbox::Error::Busy { .. }) | Self::State(_) => status::STATE,
            Self::Exec(error) => execs::status_of(error),
            _ => status::FAILED,
        }
    }
}

/// Says an error, or nothing; the exit status.
pub fn leave(result: Result<u8, Error>) -> u8 {
    result.unwrap_or_else(|error| {
        say(&format!("vmm: {}", chain(&error)));
        error.status()
    })
}

/// A sandbox by name.
#[derive(Debug, Args)]
pub struct Target {
    /// The sandbox
    #[arg(value_name = "NAME")]
    name: Name,
    /// State root
    #[arg(long, value_name = "ROOT", value_parser = units::folder)]
    dir: Option<PathBuf>,
}

impl Target {
    fn sandbox(&self) -> Result<Sandbox, Error> {
        Ok(Sandbox::new(&sandbox::root(self.dir.as_deref()), self.name.clone()).existing()?)
    }
}

/// A sandbox whose process lives, with a descriptor of that process.
struct Alive {
    sandbox: Sandbox,
    holder: Holder,
    process: OwnedFd,
}

impl Alive {
    /// `None` if nothing runs it.
    fn find(sandbox: Sandbox) -> Result<Option<Self>, Error> {
        // From the lock alone, so that no other file's damage keeps a sandbox from being ended.
        let Some(holder) = Holder::read(&sandbox.file("lock"))? else {
            return Ok(None);
        };
        let process = holder
            .process
            .open()
            .map_err(|source| Error::Host("open the sandbox's process", source))?;
        Ok(process.map(|process| Self {
            sandbox,
            holder,
            process,
        }))
    }

    fn client(&self) -> Result<Client, ClientError> {
        let folder = self.sandbox.file(&self.holder.generation.folder());
        Client::connect(&folder.join("control.sock"))
    }

    /// Waits for the process's end; false if it has not come in time.
    fn gone(&self, within: Duration) -> Result<bool, Error> {
        Process::ended(&self.process, within)
            .map_err(|source| Error::Host("wait for the sandbox's process", source))
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        match pidfd_send_signal(&self.process, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(Error::Host("signal the sandbox's process", error.into())),
        }
    }

    /// Ends it in any case: by its own hand, so that it leaves a record, if that works within a time, or by ours. A
    /// control socket that is full, or not there yet, is not the end: the first signal asks as well, a second one
    /// insists.
    fn end(&self, request: &Request) -> Result<(), Error> {
        let grace = match request {
            Request::Stop { grace } => *grace,
            _ => Duration::ZERO,
        };
        match self.client().and_then(|mut client| client.ask(request)) {
            Ok(_) => {
                if self.gone(grace + PATIENCE)? {
                    return Ok(());
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the control socket was of no use");
                for (signal, within) in [(Signal::TERM, grace), (Signal::INT, PATIENCE)] {
                    self.signal(signal)?;
                    if self.gone(within)? {
                        return Ok(());
                    }
                }
            }
        }
        self.signal(Signal::KILL)?;
        if self.gone(SETTLE)? {
            return Ok(());
        }
        Err(Error::State(format!(
            "process {} of sandbox {} was killed and is not gone after {SETTLE:?}: the host holds it up",
            self.holder.process.pid,
            self.sandbox.name()
        )))
    }
}

/// `vmm stop`
#[derive(Debug, Args)]
pub struct Stop {
    #[command(flatten)]
    target: Target,
    /// How long it may take until it is killed
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::time)]
    time: Duration,
}

impl Stop {
    /// Stops it; one that does not run is stopped already.
    pub fn main(&self) -> Result<u8, Error> {
        let sandbox = self.target.sandbox()?;
        if let Some(alive) = Alive::find(sandbox)? {
            alive.end(&Request::Stop { grace: self.time })?;
        }
        Ok(status::OK)
    }
}

/// `vmm kill`
#[derive(Debug, Args)]
pub struct Kill {
    #[command(flatten)]
    target: Target,
    /// An exec in it, by its number: then only its main process is signalled
    #[arg(value_name = "EXEC", value_parser = units::exec)]
    exec: Option<u64>,
    /// Signal for the exec, by name or number
    #[arg(short, long, value_name = "SIG", default_value = "KILL", requires = "exec", value_parser = units::signal)]
    signal: u8,
}

impl Kill {
    /// Ends it at once.
    pub fn main(&self) -> Result<u8, Error> {
        if let Some(exec) = self.exec {
            return execs::signal(&self.target, exec, self.signal);
        }
        let sandbox = self.target.sandbox()?;
        match Alive::find(sandbox)? {
            Some(alive) => alive.end(&Request::Kill)?,
            None => {
                return Err(Error::State(format!(
                    "sandbox {} does not run",
                    self.target.name
                )));
            }
        }
        Ok(status::OK)
    }
}

/// `vmm rm`
#[derive(Debug, Args)]
pub struct Rm {
    #[command(flatten)]
    target: Target,
    /// End it first if it runs; no error if there is none
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    /// Removes it with all that it left.
    pub fn main(&self) -> Result<u8, Error> {
        let sandbox = match self.target.sandbox() {
            Err(Error::Sandbox(sandbox::Error::Missing { .. })) if self.force => {
                return Ok(status::OK);
            }
            other => other?,
        };
        if self.force {
            match Alive::find(sandbox.clone()) {
                Ok(Some(alive)) => alive.end(&Request::Kill)?,
                // Files that cannot be read name nobody to end; whoever holds the lock is found below.
                Ok(None) | Err(Error::Sandbox(sandbox::Error::Damaged { .. })) => {}
                Err(error) => return Err(error),
            }
        }
        sandbox.remove()?;
        Ok(status::OK)
    }
}

/// `vmm wait`
#[derive(Debug, Args)]
pub struct Wait {
    #[command(flatten)]
    target: Target,
    /// An exec in it, by its number, in place of the sandbox itself
    #[arg(value_name = "EXEC", value_parser = units::exec)]
    exec: Option<u64>,
    /// The whole record as JSON
    #[arg(long)]
    json: bool,
}

impl Wait {
    /// Waits for its end and prints its status.
    pub fn main(&self) -> Result<u8, Error> {
        if let Some(exec) = self.exec {
            return execs::wait(&self.target, exec, self.json);
        }
        let sandbox = self.target.sandbox()?;
        let last = sandbox.file("last.json");
        let record = match Alive::find(sandbox)? {
            None => sandbox::read_json(&last)?,
            Some(alive) => {
                let told = alive
                    .client()
                    .and_then(|mut client| client.ask(&Request::Wait))
                    .inspect_err(|error| {
                        tracing::debug!(%error, "the control socket was of no use");
                    });
                // However it ended, and whatever it said, its process goes.
                while !alive.gone(Duration::from_secs(3600))? {}
                // By now it may have been removed, or live again: then what it told is all there is.
                let generation = alive.holder.generation.to_string();
                sandbox::read_json(&last)?
                    .filter(|record| record["generation"] == generation.as_str())
                    .or(told.ok())
            }
        };
        match record {
            Some(last) if self.json => print(&last),
            Some(last) => print(&last["status"]),
            None => Err(Error::State(format!(
                "sandbox {} left no record: its process was killed",
                self.target.name
            ))),
        }
    }
}

/// `vmm metrics`
#[derive(Debug, Args)]
pub struct Metrics {
    #[command(flatten)]
    target: Target,
    /// JSON, for programs
    #[arg(long)]
    json: bool,
}

impl Metrics {
    /// Prints its counters.
    pub fn main(&self) -> Result<u8, Error> {
        let sandbox = self.target.sandbox()?;
        let Some(alive) = Alive::find(sandbox)? else {
            return Err(Error::State(format!(
                "sandbox {} does not run",
                self.target.name
            )));
        };
        let asked = alive
            .client()
            .and_then(|mut client| client.ask(&Request::Metrics { agent: true }));
        let metrics = asked.map_err(|error| Error::Ask(self.target.name.clone(), error))?;
        if self.json {
            return print(&metrics);
        }
        let mut lines = Vec::new();
        flatten("", &metrics, &mut lines);
        write(&(lines.join("\n") + "\n"))
    }
}

/// A line for each number, by its path.
fn flatten(path: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                flatten(&path, value, lines);
            }
        }
        value => lines.push(format!("{path} {value}")),
    }
}

/// `vmm completion`
#[derive(Debug, Args)]
pub struct Completion {
    /// bash, elvish, fish, powershell or zsh
    #[arg(value_name = "SHELL")]
    shell: clap_complete::Shell,
}

impl Completion {
    /// Prints a script for a shell.
    pub fn main(&self) -> Result<u8, Error> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut super::command(), "vmm", &mut script);
        write(&String::from_utf8_lossy(&script))
    }
}

fn print(value: &Value) -> Result<u8, Error> {
    write(&format!("{value}\n"))
}

fn write(text: &str) -> Result<u8, Error> {
    use std::io::Write;
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has read enough.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::Host("write to stdout", error))
        }
        _ => Ok(status::OK),
    }
}

/// A sandbox in a listing.
fn summary(sandbox: &Sandbox) -> Result<(State, Value), sandbox::Error> {
    let view = sandbox.view()?;
    let alive = view.state.is_alive();
    let config = view.config.unwrap_or_default();
    let holder = view.holder.as_ref();
    let value = json!({
        "name": sandbox.name().as_str(),
        "state": view.state.name(),
        "pid": holder.filter(|_| alive).map(|holder| holder.process.pid),
        "generation": holder.map(|holder| holder.generation.to_string()),
        "cpus": config["cpus"],
        "memory": config["memory"],
        "command": config["command"],
        "status": view.last.map(|last| last["status"].clone()),
    });
    Ok((view.state, value))
}
