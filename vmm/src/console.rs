//! The guest's serial output: its last part kept in memory, and passed on where someone reads it.
//!
//! A guest may write for ever, so what is kept is a ring. Passing on goes from the vCPU thread straight to the
//! descriptor: a slow reader slows the guest down and loses nothing, and a stop of the machine breaks the wait.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_events::Waker;

use crate::exits::lock;

/// Bytes kept of a guest's console.
pub const KEPT: usize = 64 << 10;

/// The last [`KEPT`] bytes of a console. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<VecDeque<u8>>>);

impl Log {
    /// The last `lines` whole or broken lines, lossy where they are not text; control bytes but newline and tab
    /// left out, since they may go to a terminal.
    #[must_use]
    pub fn tail(&self, lines: usize) -> String {
        let bytes: Vec<u8> = lock(&self.0).iter().copied().collect();
        let text: String = String::from_utf8_lossy(&bytes)
            .chars()
            .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
            .collect();
        let all: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim().is_empty())
            .collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// The message of the last kernel panic in it.
    #[must_use]
    pub fn panic(&self) -> Option<String> {
        const MARK: &str = "Kernel panic - not syncing: ";
        let text = self.tail(usize::MAX);
        let start = text.rfind(MARK)? + MARK.len();
        Some(text[start..].lines().next().unwrap_or_default().to_owned())
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut kept = lock(&self.0);
        let new = &bytes[bytes.len().saturating_sub(KEPT)..];
        let excess = (kept.len() + new.len()).saturating_sub(KEPT);
        kept.drain(..excess);
        kept.extend(new);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps the console in a [`Log`] and passes it on to a descriptor.
pub struct Tee {
    log: Log,
    out: OwnedFd,
    stop: Waker,
    on_error: Box<dyn FnMut(io::Error) + Send>,
    broken: bool,
}

impl Tee {
    /// Passes on to `out` until it fails, which `on_error` is told once. `stop` is the waker that a stop of the
    /// machine wakes: no wait for a slow reader outlasts it.
    pub fn new(
        log: Log,
        out: OwnedFd,
        stop: Waker,
        on_error: impl FnMut(io::Error) + Send + 'static,
    ) -> Self {
        Self {
            log,
            out,
            stop,
            on_error: Box::new(on_error),
            broken: false,
        }
    }

    fn pass_on(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            // A blocking descriptor that is writable takes at least PIPE_BUF bytes without blocking (POSIX
            // `write`), so the wait is here, where the stop ends it.
            let mut fds = [
                PollFd::from_borrowed_fd(self.out.as_fd(), PollFlags::OUT),
                PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            if fds[0].revents().is_empty() {
                return Ok(());
            }
            match rustix::io::write(&self.out, &bytes[..bytes.len().min(PIPE_BUF)]) {
                Ok(written) => bytes = &bytes[written..],
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// What a pipe takes at once or not at all (Linux `limits.h`).
const PIPE_BUF: usize = 4096;

impl Write for Tee {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.log.write_all(bytes)?;
        if !self.broken
            && let Err(error) = self.pass_on(bytes)
        {
            self.broken = true;
            (self.on_error)(error);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::sync::mpsc::channel;

    #[test]
    fn lc07_a_flooding_console_keeps_its_last_part() {
        let mut log = Log::default();
        for index in 0..100_000 {
            writeln!(log, "line {index}").unwrap();
        }
        assert_eq!(lock(&log.0).len(), KEPT);
        assert_eq!(log.tail(2), "line 99998\nline 99999");
        log.write_all(&vec![b'x'; 3 * KEPT]).unwrap();
        assert_eq!(lock(&log.0).len(), KEPT);
    }

    #[test]
    fn tail_has_no_control_bytes() {
        let mut log = Log::default();
        log.write_all(b"a\x1b[31mb\r\n\n\xff\n").unwrap();
        assert_eq!(log.tail(9), "a[31mb\n\u{fffd}");
    }

    #[test]
    fn lc05_panic_message_is_found() {
        let mut log = Log::default();
        assert_eq!(log.panic(), None);
        log.write_all(
            b"[ 1.0] Kernel panic - not syncing: No working init found.  Try\r\n[ 1.1] CPU: 0\r\n",
        )
        .unwrap();
        assert_eq!(log.panic().unwrap(), "No working init found.  Try");
    }

    #[test]
    fn tee_stops_waiting_for_a_reader_when_the_machine_stops() {
        let (reader, writer) = io::pipe().unwrap();
        let stop = Waker::new().unwrap();
        let mut tee = Tee::new(Log::default(), writer.into(), stop.clone(), |_| {});
        let (sent, done) = channel();
        let thread = std::thread::spawn(move || {
            // More than any pipe holds.
            tee.write_all(&vec![b'x'; 2 << 20]).unwrap();
            sent.send(()).unwrap();
        });
        stop.wake();
        done.recv().unwrap();
        thread.join().unwrap();
        drop(reader);
    }

    #[test]
    fn tee_reports_a_closed_reader_once_and_goes_on_keeping() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let (sent, errors) = channel();
        let log = Log::default();
        let mut tee = Tee::new(
            log.clone(),
            writer.into(),
            Waker::new().unwrap(),
            move |error| {
                sent.send(error.kind()).unwrap();
            },
        );
        tee.write_all(b"one\n").unwrap();
        tee.write_all(b"two\n").unwrap();
        drop(tee);
        assert_eq!(
            errors.iter().collect::<Vec<_>>(),
            [io::ErrorKind::BrokenPipe]
        );
        assert_eq!(log.tail(9), "one\ntwo");
    }

    #[test]
    fn tee_passes_all_on() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut tee = Tee::new(Log::default(), writer.into(), Waker::new().unwrap(), |_| {});
        let thread = std::thread::spawn(move || tee.write_all(&vec![b'y'; 1 << 20]).unwrap());
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        thread.join().unwrap();
        assert_eq!(all.len(), 1 << 20);
    }
}
