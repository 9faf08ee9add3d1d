//! Chatter: all of it on stderr. Progress only where a person watches.

use std::io::{IsTerminal, Write};

/// One line about a step that changes something.
pub fn step(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "xtask: {text}");
}

/// A line that the next one replaces, on a terminal only; gone when dropped.
#[must_use]
pub struct Progress(bool);

/// Shows `text` until the returned value is dropped.
pub fn progress(text: impl std::fmt::Display) -> Progress {
    let mut stderr = std::io::stderr();
    let shown = stderr.is_terminal();
    if shown {
        let _ = write!(stderr, "\r\x1b[K{text} ...");
    }
    Progress(shown)
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.0 {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// One piece of data, on stdout.
pub fn data(text: impl std::fmt::Display) -> crate::error::Result<()> {
    use crate::error::Naming;
    writeln!(std::io::stdout(), "{text}").naming(|| "write to stdout".into())
}
