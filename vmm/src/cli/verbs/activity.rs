//! Whether a sandbox is busy, stalled or dead, and its execs: what its agent says within a time, and its process where
//! the agent says nothing.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vmm_protocol::{ExecInfo, ExecState};

use super::{Alive, Error, Target};
use crate::api::Request;
use crate::sandbox::{Phase, State, View};

/// Until an agent that has answered the first has answered the rest.
const PATIENCE: Duration = Duration::from_secs(5);

/// A look at one sandbox.
pub(super) struct Activity {
    /// In one word.
    state: &'static str,
    /// Since something moved: an exec of one that answers; anything from the guest, of one that does not.
    progress: Option<Duration>,
    /// How long the agent took to answer.
    answer: Option<Duration>,
    /// Its execs, where the agent has answered.
    pub(super) execs: Option<Vec<ExecInfo>>,
}

impl Activity {
    /// Looks. Each step has a deadline, and what cannot be learned is left out.
    pub(super) fn of(target: &Target, view: &View) -> Self {
        let quiet = |state| Self {
            state,
            progress: None,
            answer: None,
            execs: None,
        };
        match view.state {
            State::Alive(Phase::Ready) => {}
            other => return quiet(other.name()),
        }
        if view
            .config
            .as_ref()
            .is_some_and(|config| config["agent"] == false)
        {
            // Nobody in there answers us; whether anything moves the process knows.
            let progress = guest_progress(target).ok().flatten();
            return Self {
                progress,
                ..quiet("no_agent")
            };
        }
        let began = Instant::now();
        match execs(target) {
            Ok(execs) => {
                let busy = execs.iter().any(|info| info.state != ExecState::Ended);
                let moved = execs
                    .iter()
                    .filter(|info| !busy || info.state != ExecState::Ended)
                    .map(|info| Duration::from_nanos(info.progress_ns))
                    .min();
                Self {
                    state: if busy { "busy" } else { "idle" },
                    progress: moved,
                    answer: Some(began.elapsed()),
                    execs: Some(execs),
                }
            }
            Err(error) => {
                tracing::debug!(%error, "the agent does not answer");
                // It may have ended meanwhile.
                match target
                    .sandbox()
                    .and_then(|sandbox| Ok(sandbox.view()?.state))
                {
                    Ok(State::Alive(Phase::Ready)) => Self {
                        progress: guest_progress(target).ok().flatten(),
                        ..quiet("stalled")
                    },
                    Ok(state) => quiet(state.name()),
                    Err(_) => quiet("unknown"),
                }
            }
        }
    }

    /// As `inspect` has it.
    pub(super) fn json(&self) -> Value {
        let millis = |time: Option<Duration>| {
            time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
        };
        json!({
            "state": self.state,
            "progress_ms": millis(self.progress),
            "answer_ms": millis(self.answer),
        })
    }
}

fn execs(target: &Target) -> Result<Vec<ExecInfo>, Error> {
    Ok(target.session()?.list(PATIENCE)?)
}

/// Since its process has heard anything from the guest.
fn guest_progress(target: &Target) -> Result<Option<Duration>, Error> {
    let Some(alive) = Alive::find(target.sandbox()?)? else {
        return Ok(None);
    };
    let status = alive
        .client()
        .and_then(|mut client| client.ask(&Request::Status))
        .map_err(|error| Error::Ask(target.name.clone(), error))?;
    Ok(status["guest_quiet_ms"].as_u64().map(Duration::from_millis))
}

/// An exec as `ps NAME --json` and `inspect` list it.
pub(super) fn row(info: &ExecInfo) -> Value {
    let millis = |nanoseconds: u64| nanoseconds / 1_000_000;
    json!({
        "exec": info.exec,
        "pid": info.pid,
        "state": info.state.name(),
        "kept": info.kept,
        "clients": info.clients,
        "stdout": {"earliest": info.earliest[0], "length": info.length[0]},
        "stderr": {"earliest": info.earliest[1], "length": info.length[1]},
        "store_bytes": info.store_bytes,
        "age_ms": millis(info.age_ns),
        "progress_ms": millis(info.progress_ns),
        "cpu_ms": millis(info.cpu_ns),
        "cause": info.end.map(|(cause, _)| cause.name()),
        "status": info.end.map(|(_, status)| status),
        "command": info.command,
    })
}

/// The execs of one sandbox, for people.
pub(super) fn table(execs: &[ExecInfo]) -> String {
    let mut text = format!(
        "{:>6} {:<9} {:>8} {:>8} {:>10} {:>10} {:>6}  COMMAND\n",
        "EXEC", "STATE", "AGE", "PROGRESS", "STDOUT", "STDERR", "STATUS"
    );
    let seconds = |nanoseconds: u64| format!("{:.1}s", nanoseconds as f64 / 1e9);
    for info in execs {
        let status = info
            .end
            .map_or_else(|| "-".to_owned(), |(_, status)| status.to_string());
        // It comes from the guest: cut, and nothing that a terminal would obey.
        let command: String = info
            .command
            .chars()
            .filter(|c| !c.is_control())
            .take(40)
            .collect();
        let line = format!(
            "{:>6} {:<9} {:>8} {:>8} {:>10} {:>10} {:>6}  {command}",
            info.exec,
            info.state.name(),
            seconds(info.age_ns),
            seconds(info.progress_ns),
            info.length[0],
            info.length[1],
            status,
        );
        text += line.trim_end();
        text.push('\n');
    }
    text
}
