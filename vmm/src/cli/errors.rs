//! Where this process says what it has to say: stderr, or, once it has left the terminal, a bounded log.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::terminal;
use crate::sandbox::LogFile;

/// The log of a process in the background.
static LOG: Mutex<Option<LogFile>> = Mutex::new(None);

/// A writer to wherever that is now.
#[derive(Clone, Copy, Debug, Default)]
pub struct Errors;

/// From now on everything goes to `log`, stderr itself included, which a panic writes to.
///
/// # Errors
/// What the host says.
pub fn leave_for(log: LogFile) -> io::Result<()> {
    rustix::stdio::dup2_stderr(log.file())?;
    *lock() = Some(log);
    Ok(())
}

/// On a terminal that a command has, a line feed does not begin a line.
fn to_stderr(bytes: &[u8]) -> io::Result<usize> {
    let mut stderr = io::stderr();
    if !terminal::is_raw() || !stderr.is_terminal() {
        return stderr.write(bytes);
    }
    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    stderr.write_all(&lines.join(&b"\r\n"[..]))?;
    Ok(bytes.len())
}

fn lock() -> MutexGuard<'static, Option<LogFile>> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Write for Errors {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut log = lock();
        let Some(log) = &mut *log else {
            return to_stderr(bytes);
        };
        let before = log.length();
        let count = log.write(bytes)?;
        if log.length() < before {
            // A new file has begun.
            rustix::stdio::dup2_stderr(log.file())?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
