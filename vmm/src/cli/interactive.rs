//! `-i` and `-t`: the user's side of a command besides its output.
//!
//! ```text
//!                 main thread                            exec thread                       stdin thread
//!   WINCH ------> the size, to the guest     started --> terminal raw, feeding begins ---> stdin, to the guest
//!   TSTP, CONT -> terminal as it was, raw    ended ----> feeding ends, terminal as it was
//! ```
//!
//! Until the command runs nothing is read of stdin, and the terminal is as it was: a boot can be interrupted.

use std::io::{self, IsTerminal};
use std::time::Duration;

use vmm_client::{Control, Stdin};
use vmm_protocol::{CancelReason, Winsize};

use super::flags::ExecFlags;
use super::input::{End, Source, Stop};
use super::plan::Error;
use super::say;
use super::signals::Signals;
use super::terminal::{self, Terminal};

/// Signals of a process whose terminal is a command's: those that stop and continue it, and the one that a keyboard
/// sends to end it with a core.
const LENT: [i32; 3] = [libc::SIGTSTP, libc::SIGCONT, libc::SIGQUIT];

/// What a command is given of its user.
#[derive(Debug, Default)]
pub struct Interactive {
    /// What it reads.
    pub input: Option<Source>,
    /// Where it is shown.
    pub screen: Screen,
}

/// The terminal of a command, and of its user. Clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    /// The size with which the command's begins, if it has one.
    asked: Option<Winsize>,
    /// The user's, if it becomes the command's.
    terminal: Option<Terminal>,
}

/// What is to be done once the command runs.
pub struct Begin {
    feeding: Option<(Source, Stdin)>,
    screen: Screen,
}

impl Interactive {
    /// What the flags ask for, of this process's streams; `size` is that of the request.
    ///
    /// # Errors
    /// [`Error::Flags`] for what cannot be together; [`Error::Host`] for a stdin that cannot be read.
    pub fn new(flags: &ExecFlags, size: Option<Winsize>) -> Result<Self, Error> {
        if !flags.stdin {
            // With `-t` alone the user's terminal stays as it is: nothing of it is read.
            return Ok(Self {
                input: None,
                screen: Screen {
                    asked: size,
                    terminal: None,
                },
            });
        }
        let input = Source::of_process().map_err(|source| Error::Host("-i: stdin", source))?;
        let mut screen = Screen {
            asked: size,
            terminal: None,
        };
        if flags.tty {
            if flags.json && io::stdout().is_terminal() {
                return Err(Error::Flags(
                    "--json with -i and -t would write its records over the terminal: send stdout elsewhere, or leave --json away",
                ));
            }
            screen.terminal =
                Terminal::of_stdin().map_err(|source| Error::Host("the terminal", source))?;
            if screen.terminal.is_none() {
                return Err(Error::Flags(
                    "-t with -i needs a terminal on stdin, which is none: leave -t away to pass on a file or pipe, \
                     or -i to give the command a terminal that nobody types at",
                ));
            }
        }
        Ok(Self {
            input: Some(input),
            screen,
        })
    }
}

impl Screen {
    /// Signals that [`Screen::on_signal`] is to be told of.
    pub fn signals(&self) -> Vec<i32> {
        let lent: &[i32] = match self.terminal {
            Some(_) => &LENT,
            None => &[],
        };
        [&[libc::SIGWINCH], lent].concat()
    }

    /// Does what a signal asks of a terminal; false if it is about something else.
    pub fn on_signal(&self, number: i32, signals: &Signals, control: Option<&Control>) -> bool {
        match (number, &self.terminal) {
            (libc::SIGWINCH, _) if self.asked.is_some() => {}
            (libc::SIGTSTP, Some(terminal)) => {
                terminal.suspend();
                // If the host refuses, the user's wish to stop is lost and nothing else.
                let _ = signals.stop_as_asked();
                terminal.resume();
            }
            (libc::SIGCONT, Some(terminal)) => terminal.resume(),
            _ => return false,
        }
        if let (Some(size), Some(control)) = (terminal::size(), control) {
            // A session that is gone ends the command by itself.
            let _ = control.resize(size);
        }
        true
    }

    /// The command has been asked for: what its size has become since then.
    pub fn asked(&self, control: &Control) {
        if self.asked.is_some()
            && let Some(size) = terminal::size()
            && self.asked != Some(size)
        {
            let _ = control.resize(size);
        }
    }

    /// The user has it back, for good.
    pub fn give_back(&self) {
        if let Some(terminal) = &self.terminal {
            terminal.give_back();
        }
    }

    /// Gives it back when dropped, on whatever way out.
    pub fn returned(&self) -> Returned {
        Returned(self.clone())
    }
}

/// See [`Screen::returned`].
#[derive(Debug)]
pub struct Returned(Screen);

impl Drop for Returned {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl Begin {
    /// For a command that is asked for, and not yet known to run.
    pub fn new(user: Interactive, stdin: Option<Stdin>) -> Self {
        Self {
            feeding: user.input.zip(stdin),
            screen: user.screen,
        }
    }

    /// The command runs. What fails is said, and cancels it: what it would be without is no less than its input.
    pub fn begin(self, control: &Control) -> Option<Stop> {
        let failed = |what: &str, error: &io::Error| {
            say(&format!(
                "vmm: cannot {what}, so the command was cancelled: {error}"
            ));
            let _ = control.cancel(CancelReason::ClientLost, Duration::ZERO);
        };
        let terminal = self.screen.terminal;
        if let Some(Err(error)) = terminal.as_ref().map(Terminal::lend) {
            failed("have the terminal", &error);
            return None;
        }
        let (source, stdin) = self.feeding?;
        let told = control.clone();
        let in_time = control.clone();
        let before = move || {
            if let Some(terminal) = &terminal
                && terminal.is_due()
            {
                terminal.resume();
                if let Some(size) = terminal::size() {
                    let _ = in_time.resize(size);
                }
            }
        };
        let done = move |end| {
            if let End::Failed(error) = end {
                say(&format!(
                    "vmm: cannot read stdin, so the command was cancelled: {error}"
                ));
                let _ = told.cancel(CancelReason::ClientLost, Duration::ZERO);
            }
        };
        source
            .feed(stdin, before, done)
            .inspect_err(|error| failed("read stdin", error))
            .ok()
    }
}
