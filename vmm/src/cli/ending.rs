//! What the end of a command means for a shell.

use vmm_client::Ended;
use vmm_protocol::{Cause, StartStage};

use super::{say, status};

/// The exit status of a command that has ended, with a word on stderr on what the status alone does not say. `asked` is
/// its program and working directory; `signal` the one that made us cancel it.
///
/// # Errors
/// In words, when it is lost or was refused: that is a failure of the tool's (125).
pub(crate) fn status(
    ended: &Ended,
    asked: &[String; 2],
    signal: Option<i32>,
) -> Result<u8, String> {
    let record = match ended {
        Ended::Exit(record) => record,
        Ended::Refused { message, .. } => {
            return Err(format!("the agent refused the command: {message}"));
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
                std::io::Error::from_raw_os_error(*errno)
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
