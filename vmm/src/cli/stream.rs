//! The exec thread: opens the session, asks for the command, and writes what comes to our own streams.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use vmm_client::{Control, Deadlines, Ended, Event, GenerationTag, Session};
use vmm_events::Sender;
use vmm_protocol::{CancelReason, ExecRequest};

use super::interactive::{Begin, Interactive};
use super::output::Output;

/// What the main thread is told.
pub enum Progress {
    /// The command has been asked for and can be cancelled.
    Asked(Control),
    /// Nothing more will come.
    Done(Finished),
}

/// How it went.
pub enum Finished {
    /// The command has ended.
    Ended {
        /// How.
        ended: Ended,
        /// What made us stop writing to stdout.
        stdout_error: Option<io::Error>,
    },
    /// There was no session to ask in.
    NoSession(String),
}

/// Words that a thread says at most: see [`Progress`].
pub const WORDS: usize = 2;

/// Of an exec thread that ended without saying how.
pub const SILENT: &str = "the thread that streams the output has ended without a word";

/// Runs `request` in the life that `tag` names on a thread of its own, which writes to `output` and lets the command have
/// what `user` gives it. What it has to say goes to `progress`, an inbox of [`WORDS`].
///
/// # Errors
/// When the host has no thread left.
pub fn spawn(
    socket: PathBuf,
    tag: GenerationTag,
    request: ExecRequest,
    output: Output,
    user: Interactive,
    progress: Sender<Progress>,
) -> io::Result<()> {
    let report = move |word| {
        // Whoever listens outlives this thread, or the process ends.
        let _ = progress.try_send(word);
    };
    thread::Builder::new()
        .name("exec".to_owned())
        .spawn(move || stream(&socket, &tag, &request, output, user, &report))
        .map(drop)
}

fn stream(
    socket: &Path,
    tag: &GenerationTag,
    request: &ExecRequest,
    mut output: Output,
    user: Interactive,
    report: &dyn Fn(Progress),
) {
    let opened = Session::connect(socket, tag, &Deadlines::default())
        .map_err(|error| {
            format!(
                "cannot open a session with the agent: {}",
                crate::cli::chain(&error)
            )
        })
        .and_then(|session| {
            let exec = session
                .exec(request)
                .map_err(|error| crate::cli::chain(&error))?;
            Ok((session, exec))
        });
    let (session, mut exec) = match opened {
        Ok(opened) => opened,
        Err(why) => return report(Progress::Done(Finished::NoSession(why))),
    };
    let control = exec.control();
    report(Progress::Asked(control.clone()));
    let screen = user.screen.clone();
    let stdin = user.input.is_some().then(|| exec.stdin()).flatten();
    let mut begin = Some(Begin::new(user, stdin));
    let mut _feeding = None;
    let mut stdout_error = None;
    for event in exec {
        match &event {
            Event::Started { .. } => {
                _feeding = begin.take().and_then(|begin| begin.begin(&control))
            }
            Event::StdinClosed(_) => _feeding = None,
            // Before a word of its end.
            Event::Ended(_) => screen.give_back(),
            _ => {}
        }
        let written = match stdout_error {
            None => output.event(&event),
            Some(_) => Ok(()),
        };
        if let Err(error) = written {
            stdout_error = Some(error);
            // Its client is lost. What still comes is taken and thrown away, up to the record.
            let _ = control.cancel(CancelReason::ClientLost, Duration::ZERO);
        }
        if let Event::Ended(ended) = event {
            return report(Progress::Done(Finished::Ended {
                ended,
                stdout_error,
            }));
        }
    }
    drop(session);
    report(Progress::Done(Finished::NoSession(
        "the session ended without a record".to_owned(),
    )));
}
