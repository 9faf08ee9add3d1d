//! The user's terminal: raw while a command in a guest has it, and given back whatever happens.
//!
//! ```text
//!           lend()                 suspend(): SIGTSTP
//!   as it was ----> raw  <---------------------------> as it was, the process stopped
//!       ^            |      resume(): SIGCONT, or the next byte, once in the foreground
//!       +- give_back()      the end, an error, a signal, a panic: for good
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};

use rustix::process::getpgrp;
use rustix::termios::{
    OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize,
    tcsetattr,
};
use vmm_protocol::Winsize;

/// What most programs take a terminal to be that does not say.
const USUAL: Winsize = Winsize {
    rows: 24,
    columns: 80,
};

/// Some terminal of this process is raw.
static RAW: AtomicBool = AtomicBool::new(false);

/// Whether a line to a terminal needs a carriage return of its own.
pub fn is_raw() -> bool {
    RAW.load(Ordering::SeqCst)
}

/// The size of the terminal that the user sits at, by the first of our own streams that has one; `None` if none has.
pub fn size() -> Option<Winsize> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
        .into_iter()
        .find_map(size_of)
}

/// The size for a guest's terminal where the user may have none.
pub fn size_or_usual() -> Winsize {
    size().unwrap_or(USUAL)
}

/// Terminals that do not know their size say 0, which no program expects.
fn size_of(device: BorrowedFd<'_>) -> Option<Winsize> {
    let size = tcgetwinsize(device).ok()?;
    let known = |value: u16, usual: u16| if value == 0 { usual } else { value };
    Some(Winsize {
        rows: known(size.ws_row, USUAL.rows),
        columns: known(size.ws_col, USUAL.columns),
    })
}

/// A terminal whose bytes go to a command as they are typed. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Terminal(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    device: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// A command has it.
    lent: bool,
    /// No command will.
    over: bool,
    /// How it was before it was made raw; `None` while it is not.
    before: Option<Termios>,
}

impl Terminal {
    /// The terminal that is our stdin; `None` if that is something else.
    ///
    /// # Errors
    /// When no descriptor is left.
    pub fn of_stdin() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !isatty(&stdin) {
            return Ok(None);
        }
        // A copy: stdin itself may be closed before the end.
        Ok(Some(Self::new(stdin.as_fd().try_clone_to_owned()?)))
    }

    fn new(device: OwnedFd) -> Self {
        let shared = Arc::new(Shared {
            device,
            state: Mutex::default(),
        });
        give_back_at_a_panic(Arc::downgrade(&shared));
        Self(shared)
    }

    /// Makes it raw, for a command that now has it. In the background this stops the process, by SIGTTOU, until the
    /// user brings it to the foreground, as for any program that wants a terminal.
    ///
    /// # Errors
    /// When it is gone, or there is nobody who could bring the process to the foreground.
    pub fn lend(&self) -> io::Result<()> {
        let mut state = self.lock();
        state.lent = true;
        self.0.make_raw(&mut state)
    }

    /// As it was, while the process is stopped.
    pub fn suspend(&self) {
        self.0.restore(&mut self.lock());
    }

    /// Raw again, if a command has it and this process is in the foreground: whoever was there meanwhile may have
    /// changed it. What fails shows with the next byte that is read.
    pub fn resume(&self) {
        let mut state = self.lock();
        if state.lent && self.0.in_foreground() {
            let _ = self.0.make_raw(&mut state);
        }
    }

    /// True if it is to be made raw again and this process has come to the foreground without being told: a shell
    /// sends no SIGCONT to a job that runs.
    pub fn is_due(&self) -> bool {
        let state = self.lock();
        state.lent && !state.over && state.before.is_none() && self.0.in_foreground()
    }

    /// As it was, for good.
    pub fn give_back(&self) {
        let mut state = self.lock();
        state.over = true;
        self.0.restore(&mut state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Terminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.device.as_fd()
    }
}

impl Shared {
    /// Nothing is thrown away of what was typed or written (`Now`), and nothing waited for: the other end may be one that
    /// takes no more.
    fn make_raw(&self, state: &mut State) -> io::Result<()> {
        if state.over {
            return Ok(());
        }
        let before = match &state.before {
            Some(before) => before.clone(),
            None => tcgetattr(&self.device)?,
        };
        let mut raw = before.clone();
        raw.make_raw();
        // A read returns with the first byte, whatever program set these before.
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(&self.device, OptionalActions::Now, &raw)?;
        state.before = Some(before);
        RAW.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn restore(&self, state: &mut State) {
        let Some(before) = state.before.take() else {
            return;
        };
        RAW.store(false, Ordering::SeqCst);
        // In the background it is another's, who has set it as they need it; and to touch it would stop us.
        if self.in_foreground() {
            // Fails if it is gone.
            let _ = tcsetattr(&self.device, OptionalActions::Now, &before);
        }
    }

    fn in_foreground(&self) -> bool {
        match tcgetpgrp(&self.device) {
            Ok(group) => group == getpgrp(),
            // Not the terminal of our session, or of one that we cannot see: nobody stops us for using it.
            Err(_) => true,
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut self.state)
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        self.restore(&mut state);
    }
}

/// A panic may end the process without a destructor, and its message is to be read.
fn give_back_at_a_panic(shared: Weak<Shared>) {
    let next = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Some(shared) = shared.upgrade() {
            // Who panics may hold it.
            let state = match shared.state.try_lock() {
                Ok(state) => Some(state),
                Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut state) = state {
                state.over = true;
                shared.restore(&mut state);
            }
        }
        next(info);
    }));
}

#[cfg(test)]
mod tests;
