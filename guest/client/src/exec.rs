//! Handles of one exec: its events, its control, its stdin.

use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmm_protocol::session::ClientSession;
use vmm_protocol::session::RequestError;
use vmm_protocol::{CancelReason, Stream, Winsize};

use crate::event::{Ended, Event};
use crate::session::{Link, SessionError};

/// One exec, as an iterator over its events, the last of which is [`Event::Ended`].
///
/// Bytes that the handle has not taken hold up this exec alone: once its window is full, the agent
/// keeps the rest. A handle that is dropped before the end cancels its exec, as a lost client does, if it started it by
/// [`Session::exec`](crate::Session::exec); an exec that it was attached to goes on.
#[derive(Debug)]
pub struct Exec {
    control: Control,
    stdin_taken: bool,
    done: bool,
    /// Whether it ends with this handle.
    owned: bool,
}

/// All that an exec wrote, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collected {
    /// Everything received of stdout.
    pub stdout: Vec<u8>,
    /// Everything received of stderr.
    pub stderr: Vec<u8>,
    /// How it ended.
    pub ended: Ended,
}

impl Exec {
    pub(crate) fn new(link: Arc<Link>, id: u64) -> Self {
        Self {
            control: Control { link, id },
            stdin_taken: false,
            done: false,
            owned: true,
        }
    }

    /// The handle of an exec that is not ours to end.
    pub(crate) fn attached(link: Arc<Link>, id: u64) -> Self {
        let mut exec = Self::new(link, id);
        (exec.stdin_taken, exec.owned) = (true, false);
        exec
    }

    /// Its id in the session.
    pub fn id(&self) -> u64 {
        self.control.id
    }

    /// The next event by a deadline: `Ok(None)` after the last one.
    pub fn next_before(&mut self, deadline: Instant) -> Result<Option<Event>, SessionError> {
        let began = Instant::now();
        self.take(Some(deadline))
            .ok_or_else(|| SessionError::TimedOut {
                after: deadline - began,
            })
    }

    /// `None` if the deadline passed.
    fn take(&mut self, deadline: Option<Instant>) -> Option<Option<Event>> {
        if self.done {
            return Some(None);
        }
        let id = self.control.id;
        let shared = &self.control.link.shared;
        let mut state = shared.lock();
        loop {
            if let Some(event) = state.take(id) {
                shared.flush(&mut state);
                self.done = matches!(event, Event::Ended(_));
                return Some(Some(event));
            }
            let more = state.queue(id).filter(|queue| !queue.ended);
            let Some(changed) = more.map(|queue| Arc::clone(&queue.changed)) else {
                self.done = true;
                return Some(None);
            };
            state =
                match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                    None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    Some(Duration::ZERO) => return None,
                    Some(left) => {
                        changed
                            .wait_timeout(state, left)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                };
        }
    }

    /// Takes everything to the end. What is collected is bounded by the exec's output limit, and by
    /// nothing if it has none.
    pub fn collect_output(mut self) -> Collected {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        loop {
            match self.next() {
                Some(Event::Output {
                    stream: Stream::Stdout,
                    data,
                    ..
                }) => stdout.extend_from_slice(&data),
                Some(Event::Output {
                    stream: Stream::Stderr,
                    data,
                    ..
                }) => stderr.extend_from_slice(&data),
                Some(Event::Ended(ended)) => {
                    return Collected {
                        stdout,
                        stderr,
                        ended,
                    };
                }
                Some(_) => {}
                None => {
                    return Collected {
                        stdout,
                        stderr,
                        ended: gone(),
                    };
                }
            }
        }
    }

    /// Waits for the end and throws the output away.
    pub fn wait(mut self) -> Ended {
        loop {
            match self.next() {
                Some(Event::Ended(ended)) => return ended,
                Some(_) => {}
                None => return gone(),
            }
        }
    }

    /// A handle by which other threads can cancel, signal and resize.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Its stdin, once. Only an exec that asked for stdin reads it.
    pub fn stdin(&mut self) -> Option<Stdin> {
        let first = !std::mem::replace(&mut self.stdin_taken, true);
        first.then(|| Stdin {
            control: self.control.clone(),
        })
    }
}

impl Iterator for Exec {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.take(None).flatten()
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if !self.done && self.owned {
            // It has ended, or is ended: either way nothing is left to be told.
            let _ = self
                .control
                .cancel(CancelReason::ClientLost, Duration::ZERO);
        }
        let shared = &self.control.link.shared;
        let mut state = shared.lock();
        state.abandon(self.control.id);
        shared.flush(&mut state);
    }
}

/// The last event was taken before.
fn gone() -> Ended {
    Ended::Lost(crate::event::Lost {
        reason: "its end was taken before".to_owned(),
        received: [0; 2],
    })
}

/// Ends, signals and resizes an exec from any thread. All of it is harmless after the end.
#[derive(Debug, Clone)]
pub struct Control {
    link: Arc<Link>,
    id: u64,
}

impl Control {
    /// Ends the exec: `SIGTERM` now and the kill of everything after the grace, or at once without
    /// one.
    pub fn cancel(&self, reason: CancelReason, grace: Duration) -> Result<(), SessionError> {
        let grace_ns = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        self.ask(|machine, id| machine.cancel(id, reason, grace_ns))
    }

    /// Sends a signal to the main process.
    pub fn signal(&self, number: u8) -> Result<(), SessionError> {
        self.ask(|machine, id| machine.signal(id, number))
    }

    /// Tells the terminal's new size.
    pub fn resize(&self, size: Winsize) -> Result<(), SessionError> {
        self.ask(|machine, id| machine.resize(id, size))
    }

    fn ask(
        &self,
        ask: impl FnOnce(&mut ClientSession, u64) -> Result<(), RequestError>,
    ) -> Result<(), SessionError> {
        let mut state = self.link.shared.lock();
        match ask(state.alive()?, self.id) {
            // The end may have crossed the request on its way.
            Err(RequestError::NotLive { .. }) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => {
                self.link.shared.flush(&mut state);
                Ok(())
            }
        }
    }
}

/// The writing end of an exec's stdin; closed when dropped.
///
/// A write waits until the workload has taken enough of what was written before, and fails with
/// `BrokenPipe` once nothing reads it any more, which is no failure of the exec.
#[derive(Debug)]
pub struct Stdin {
    control: Control,
}

impl Write for Stdin {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let Control { link, id } = &self.control;
        let mut state = link.shared.lock();
        loop {
            let Some(queue) = state.queue(*id).filter(|queue| !queue.stdin_closed) else {
                return Err(ErrorKind::BrokenPipe.into());
            };
            let changed = Arc::clone(&queue.changed);
            let sent = state
                .alive()
                .and_then(|machine| Ok(machine.stdin(*id, data)?));
            let count = sent.map_err(|error| io::Error::new(ErrorKind::BrokenPipe, error))?;
            if count > 0 || data.is_empty() {
                link.shared.flush(&mut state);
                return Ok(count);
            }
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Stdin {
    fn drop(&mut self) {
        // After the end there is nothing left to close.
        let _ = self.control.ask(ClientSession::stdin_close);
    }
}
