//! The guest's serial output on its way out: kept in a bounded log, and passed on where someone reads it.
//!
//! Passing on goes from the vCPU thread straight to the descriptor: a slow reader slows the guest down and loses
//! nothing, and a stop of the machine breaks the wait.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use vmm_devices::console::ConsoleLog;
use vmm_events::Waker;

/// The message of the last kernel panic in a console.
#[must_use]
pub fn panic(log: &ConsoleLog) -> Option<String> {
    const MARK: &str = "Kernel panic - not syncing: ";
    let text = log.last_lines(usize::MAX);
    let start = text.rfind(MARK)? + MARK.len();
    Some(text[start..].lines().next().unwrap_or_default().to_owned())
}

/// Keeps the console in a log and passes it on to a descriptor.
pub struct PassOn {
    log: ConsoleLog,
    out: OwnedFd,
    stop: Waker,
    on_error: Box<dyn FnMut(io::Error) + Send>,
    broken: bool,
}

impl PassOn {
    /// Passes on to `out` until it fails, which `on_error` is told once. `stop` is the waker that a stop of the
    /// machine wakes: no wait for a slow reader outlasts it.
    pub fn new(
        log: ConsoleLog,
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

impl Write for PassOn {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.log.append(bytes);
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
    fn lc05_panic_message_is_found() {
        let log = ConsoleLog::default();
        assert_eq!(panic(&log), None);
        log.append(
            b"[ 1.0] Kernel panic - not syncing: No working init found.\r\n[ 1.1] CPU: 0\r\n",
        );
        assert_eq!(panic(&log).unwrap(), "No working init found.");
    }

    #[test]
    fn passing_on_stops_waiting_for_a_reader_when_the_machine_stops() {
        let (reader, writer) = io::pipe().unwrap();
        let stop = Waker::new().unwrap();
        let mut out = PassOn::new(ConsoleLog::default(), writer.into(), stop.clone(), |_| {});
        let (sent, done) = channel();
        let thread = std::thread::spawn(move || {
            // More than any pipe holds.
            out.write_all(&vec![b'x'; 2 << 20]).unwrap();
            sent.send(()).unwrap();
        });
        stop.wake();
        done.recv().unwrap();
        thread.join().unwrap();
        drop(reader);
    }

    #[test]
    fn passing_on_reports_a_closed_reader_once_and_goes_on_keeping() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let (sent, errors) = channel();
        let log = ConsoleLog::default();
        let mut out = PassOn::new(
            log.clone(),
            writer.into(),
            Waker::new().unwrap(),
            move |error| {
                sent.send(error.kind()).unwrap();
            },
        );
        out.write_all(b"one\n").unwrap();
        out.write_all(b"two\n").unwrap();
        drop(out);
        assert_eq!(
            errors.iter().collect::<Vec<_>>(),
            [io::ErrorKind::BrokenPipe]
        );
        assert_eq!(log.last_lines(9), "one\ntwo");
    }

    #[test]
    fn passing_on_passes_all_on() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut out = PassOn::new(
            ConsoleLog::default(),
            writer.into(),
            Waker::new().unwrap(),
            |_| {},
        );
        let thread = std::thread::spawn(move || out.write_all(&vec![b'y'; 1 << 20]).unwrap());
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        thread.join().unwrap();
        assert_eq!(all.len(), 1 << 20);
    }
}
