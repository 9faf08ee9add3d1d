//! What the end of a command means for a shell.

use std::io;

use vmm_client::Ended;
use vmm_protocol::{CancelReason, Cause, ExecRequest, StartStage};

use super::{say, status};

/// What a command's start may fail on, for the message: program and working directory.
pub(crate) fn asked(request: &ExecRequest) -> [String; 2] {
    let program = request.argv.first().map_or(&[][..], Vec::as_slice);
    [program, &request.cwd].map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

/// Why a command is cancelled when a signal ends us.
pub(crate) fn reason(signal: i32) -> CancelReason {
    match signal {
        libc::SIGINT => CancelReason::Interrupt,
        _ => CancelReason::Terminate,
    }
}

/// The exit status of a command that has ended, with a word on stderr on what the status alone does not say. `asked` is
/// what [`asked`] made of its request; `signal` the one that made us cancel it, `stdout_error` what did so before.
///
/// # Errors
/// In words, when it is lost or was refused: that is a failure of the tool's (125).
pub(crate) fn status(
    ended: &Ended,
    asked: &[String; 2],
    signal: Option<i32>,
    stdout_error: Option<io::Error>,
) -> Result<u8, String> {
    if let Some(error) = stdout_error {
        say(&format!(
            "vmm: cannot write to stdout, so the command was cancelled: {error}"
        ));
    }
    let record = match ended {
        Ended::Exit(record) => record,
        Ended::Refused(refusal) => {
            return Err(format!("the agent refused the command: {refusal}"));
        }
        Ended::Lost(lost) => return Err(format!("the command is lost: {lost}")),
    };
    match (&record.cause, signal) {
        (Cause::Exited(_) | Cause::Signaled(_), _) => {}
        (Cause::Cancelled(_), Some(number)) => return Ok(status::signaled(number)),
        (Cause::StartFailed { stage, errno }, _) => {
            let [program, directory] = asked;
            let value = match stage {
                StartStage::Execute => format!(" {program}"),
                StartStage::Directory => format!(" {directory}"),
                _ => String::new(),
            };
            say(&format!(
                "vmm: the command did not start: {}{value}: {}",
                stage.name(),
                io::Error::from_raw_os_error(*errno)
            ));
        }
        (Cause::TimedOut, _) => say("vmm: the command was killed: its --timeout passed"),
        (Cause::OutputLimit, _) => {
            say("vmm: the command was killed: it wrote more than its --output-limit")
        }
        (Cause::OomKilled(oom), _) => say(&format!(
            "vmm: the command was killed for memory: {} limit, victim {} ({})",
            oom.scope.name(),
            oom.victim,
            oom.pid
        )),
        (Cause::Lost(why), _) => return Err(format!("the command is lost: {why}")),
        (Cause::Cancelled(_), None) => {}
    }
    Ok(record.status())
}
