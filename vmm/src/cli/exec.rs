//! `vmm exec`: a command in a sandbox that runs already.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use vmm_client::{Control, GenerationTag};
use vmm_events::{Answer, Interest, Poller, inbox};

use super::ending;
use super::flags::ExecFlags;
use super::interactive::Interactive;
use super::output::Output;
use super::plan::Error;
use super::signals::Signals;
use super::stream::{self, Finished, Progress};
use super::{chain, say, status, units};
use crate::sandbox::{self, Current, Name, Phase, Sandbox, State, View};

/// Between asking a command to end and killing it.
const GRACE: Duration = Duration::from_secs(2);
/// After which a guest that does not answer a cancel is not waited for.
const ABANDON: Duration = Duration::from_secs(3);
/// Signals that end us. The command is cancelled with them, which begins with a TERM to it.
const ENDING: [i32; 2] = [libc::SIGINT, libc::SIGTERM];
/// Signals that are the command's.
const PASSED_ON: [i32; 4] = [
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
    // Unless it has a terminal, whose size it is then about.
    libc::SIGWINCH,
];

/// Flags of `vmm exec`.
#[derive(Debug, Args)]
pub struct Exec {
    /// The sandbox
    #[arg(value_name = "NAME")]
    name: Name,
    /// State root
    #[arg(long, value_name = "ROOT", value_parser = units::folder)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    exec: ExecFlags,
    /// Print the exec's number once it runs, and leave it running; its output is kept for 'vmm attach' until 'vmm release'
    #[arg(long, conflicts_with_all = ["status_file", "stdin"])]
    detach: bool,
    /// The command and its arguments
    #[arg(last = true, value_name = "ARGV", required = true)]
    argv: Vec<OsString>,
}

#[derive(Clone, Copy)]
enum Token {
    Signal,
    Progress,
}

impl Exec {
    /// Runs it; the exit status.
    pub fn main(self: Box<Self>) -> u8 {
        match self.checked() {
            Ok(status) => status,
            Err(error) => {
                say(&format!("vmm: {}", chain(&error)));
                status::TOOL
            }
        }
    }

    fn checked(&self) -> Result<u8, Error> {
        let request = self.exec.request(&self.argv)?;
        if self.detach {
            // Its terminal, if it has one, is nobody's: ours stays as it is.
            let (socket, tag) = reach(&sandbox::root(self.dir.as_deref()), &self.name)?;
            return super::attach::start(&socket, &tag, &request, self.exec.json);
        }
        let user = Interactive::new(&self.exec, request.tty)?;
        let screen = user.screen.clone();
        let _returned = screen.returned();
        let (socket, tag) = reach(&sandbox::root(self.dir.as_deref()), &self.name)?;
        let status_file = self.exec.open_status_file()?;
        let output = Output::of_process(self.exec.json)
            .map_err(|source| Error::Host("stdout and stderr", source))?
            .with_status_file(status_file);
        let numbers = [&ENDING[..], &PASSED_ON, &screen.signals()].concat();
        let signals =
            Signals::collect(&numbers).map_err(|source| Error::Host("signals", source))?;
        let mut poller = Poller::new()?;
        let signals = poller.register(signals, Interest::READ, Token::Signal)?;
        let (sender, progress) = inbox(stream::WORDS)?;
        let progress = poller.register(progress, Interest::READ, Token::Progress)?;
        let asked = ending::asked(&request);
        stream::spawn(socket, tag, request, output, user, sender)
            .map_err(|source| Error::Host("a thread", source))?;
        let mut control: Option<Control> = None;
        // What came for the command before there was one: each once, as the kernel keeps them.
        let mut early: Vec<u8> = Vec::new();
        let mut signal: Option<i32> = None;
        let mut deadline: Option<Instant> = None;
        loop {
            let timeout = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if let (Some(Duration::ZERO), Some(number)) = (timeout, signal) {
                say("vmm: the guest does not answer the cancel: its workload may still run");
                return Ok(status::signaled(number));
            }
            poller.wait(timeout)?;
            while let Some(event) = poller.next_event() {
                poller.answer(&event, Answer::Handled);
                match event.token {
                    Token::Signal => {
                        let Some(number) = signals.inner().next() else {
                            continue;
                        };
                        if screen.on_signal(number, signals.inner(), control.as_ref()) {
                            continue;
                        }
                        if PASSED_ON.contains(&number) {
                            let number = number as u8; // at most 64
                            match &control {
                                // A session that is gone ends the command by itself.
                                Some(control) => drop(control.signal(number)),
                                None if early.contains(&number) => {}
                                None => early.push(number),
                            }
                            continue;
                        }
                        // The first one asks, the second does not wait for the answer.
                        if signal.replace(number).is_some() || control.is_none() {
                            return Ok(status::signaled(number));
                        }
                        deadline = Some(Instant::now() + GRACE + ABANDON);
                        if let Some(control) = &control {
                            let _ = control.cancel(ending::reason(number), GRACE);
                        }
                    }
                    Token::Progress => {
                        let mut turn = progress.inner().turn();
                        for word in turn.by_ref() {
                            match word {
                                Progress::Asked(handle) => {
                                    screen.asked(&handle);
                                    for number in early.drain(..) {
                                        let _ = handle.signal(number);
                                    }
                                    control = Some(handle);
                                }
                                Progress::Done(finished) => {
                                    return conclude(finished, &asked, signal);
                                }
                            }
                        }
                        if turn.is_over() {
                            return Err(Error::Ended(stream::SILENT.to_owned()));
                        }
                    }
                }
            }
        }
    }
}

fn conclude(finished: Finished, asked: &[String; 2], signal: Option<i32>) -> Result<u8, Error> {
    match finished {
        Finished::NoSession(why) => Err(Error::Ended(why)),
        Finished::Ended {
            ended,
            stdout_error,
        } => ending::status(&ended, asked, signal, stdout_error).map_err(Error::Ended),
    }
}

/// The socket and the generation of a sandbox that is ready.
///
/// # Errors
/// [`Error::Sandbox`] if there is none; [`Error::Ended`] if it is not ready, in words.
pub fn reach(root: &std::path::Path, name: &Name) -> Result<(PathBuf, GenerationTag), Error> {
    let sandbox = Sandbox::new(root, name.clone()).existing()?;
    let View { state, config, .. } = sandbox.view()?;
    let why = match state {
        State::Alive(Phase::Ready) => None,
        State::Alive(Phase::Starting) => Some("is not ready yet: 'vmm ps' tells when it is"),
        State::Alive(Phase::Stopping) => Some("is stopping"),
        State::Dead => {
            Some("is dead, its process was killed: begin its next life with 'vmm start'")
        }
        State::Ended => Some("has ended: begin its next life with 'vmm start'"),
    };
    if let Some(why) = why {
        return Err(Error::Ended(format!("sandbox {name} {why}")));
    }
    if config.is_some_and(|config| config["agent"] == false) {
        return Err(Error::Ended(format!(
            "sandbox {name} was started with --no-agent: nothing in it runs commands for us"
        )));
    }
    let current = Current::read(&sandbox.file("current.json"))?;
    match current
        .as_ref()
        .and_then(|current| Some((current, current.folder.as_ref()?)))
    {
        Some((current, folder)) => Ok((
            folder.join("vsock.sock"),
            GenerationTag::new(current.generation, current.nonce),
        )),
        // Between the two looks it has begun to end.
        None => Err(Error::Ended(format!("sandbox {name} is stopping"))),
    }
}
