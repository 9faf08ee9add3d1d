//! Execs by their numbers in the guest: from any session, whoever started them.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use vmm_protocol::limits::DEFAULT_WINDOW;
use vmm_protocol::session::{ClientSession, RequestError};
use vmm_protocol::{CancelReason, ExecInfo, ExecRequest};

use super::state::Answer;
use super::{Session, SessionError};
use crate::event::{Ended, Event};
use crate::exec::Exec;

/// A detached exec that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// Its number in the guest, by which it is found from any session.
    pub exec: u64,
    /// Its main process in the guest.
    pub pid: u32,
}

/// Why a detached exec does not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// It could not be asked for, or no word came in time.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// It did not start, or the session was lost meanwhile: then it may run.
    #[error("the exec did not start")]
    Ended(Ended),
}

impl Session {
    /// Starts an exec that outlives this session and every other, and waits until it runs. Its output and its record are
    /// kept until [`release`](Self::release), or for the life of the guest.
    ///
    /// ```no_run
    /// # fn example(session: &vmm_client::Session) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use vmm_client::Event;
    /// use vmm_protocol::ExecRequest;
    ///
    /// const SOON: Duration = Duration::from_secs(5);
    /// let exec = session.start(&ExecRequest::new(["make", "all"]), SOON)?.exec;
    /// // From here on in any session, in any process, of this generation:
    /// let output = session.attach(exec, [0, 0])?.collect_output();
    /// session.release(exec, SOON)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`StartError`]. One that has not started in time is cancelled.
    pub fn start(&self, request: &ExecRequest, within: Duration) -> Result<Started, StartError> {
        let mut request = request.clone();
        request.detached = true;
        let deadline = Instant::now() + within;
        let mut exec = self.exec(&request)?;
        loop {
            match exec.next_before(deadline)? {
                Some(Event::Started { exec, pid }) => return Ok(Started { exec, pid }),
                Some(Event::Ended(ended)) => return Err(StartError::Ended(ended)),
                Some(_) => {}
                None => return Err(SessionError::TimedOut { after: within }.into()),
            }
        }
    }

    /// The output of an exec from an offset in stdout and one in stderr on, and its end. What it was told before comes
    /// again: that it started, its limit, kills for memory. Dropping the handle leaves the exec as it is.
    ///
    /// Offsets are those of [`Event::Output`]; after a lost connection, those of [`Lost::received`](crate::Lost).
    ///
    /// ```no_run
    /// # fn example(session: &vmm_client::Session, lost: &vmm_client::Lost) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::io::Write;
    /// use vmm_client::Event;
    ///
    /// for event in session.attach(12, lost.received)? {
    ///     if let Event::Output { data, .. } = event {
    ///         std::io::stdout().write_all(&data)?;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`SessionError::Lost`], and [`SessionError::Request`] when too much is asked of the session. That there is no such
    /// exec, or that the offset is kept no longer, is its only event: [`Ended::Refused`].
    pub fn attach(&self, exec: u64, from: [u64; 2]) -> Result<Exec, SessionError> {
        self.attach_with(exec, from, DEFAULT_WINDOW)
    }

    /// As [`attach`](Self::attach), with an output window in bytes, 1 to 16 MiB.
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn attach_with(
        &self,
        exec: u64,
        from: [u64; 2],
        window: u64,
    ) -> Result<Exec, SessionError> {
        self.open(|machine| machine.attach(exec, from, window))
    }

    /// The end of an exec alone: a handle whose only event is [`Event::Ended`].
    ///
    /// ```no_run
    /// # fn example(session: &vmm_client::Session) -> Result<(), Box<dyn std::error::Error>> {
    /// assert_eq!(session.wait(12)?.wait().status(), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`attach`](Self::attach).
    pub fn wait(&self, exec: u64) -> Result<Exec, SessionError> {
        self.open(|machine| machine.wait(exec))
    }

    /// All execs of the guest that run or are kept, in the order of their numbers. Each part of the list has the time.
    ///
    /// # Errors
    /// [`SessionError`].
    pub fn list(&self, within: Duration) -> Result<Vec<ExecInfo>, SessionError> {
        let mut all: Vec<ExecInfo> = Vec::new();
        loop {
            let after = all.last().map_or(0, |info| info.exec);
            match self.call(within, |machine| machine.list(after))? {
                Answer::Execs(page) => {
                    // Numbers that do not grow would have no end.
                    let grown = page.execs.first().is_some_and(|info| info.exec > after);
                    let more = page.more && grown;
                    all.extend(page.execs);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Ok(all),
            }
        }
    }

    /// Sends a signal to the main process of an exec.
    ///
    /// # Errors
    /// [`SessionError::Refused`] if there is none, or it has ended.
    pub fn signal(&self, exec: u64, number: u8, within: Duration) -> Result<(), SessionError> {
        self.call(within, |machine| machine.signal_exec(exec, number))
            .map(drop)
    }

    /// Ends an exec: `SIGTERM` now and the kill of everything after the grace, or at once without one. One that has ended
    /// already needs no more.
    ///
    /// # Errors
    /// [`SessionError::Refused`] if there never was one.
    pub fn cancel(&self, exec: u64, grace: Duration, within: Duration) -> Result<(), SessionError> {
        let grace = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        self.call(within, |machine| {
            machine.cancel_exec(exec, CancelReason::Request, grace)
        })
        .map(drop)
    }

    /// Has an exec that has ended forgotten, with its output and its record.
    ///
    /// # Errors
    /// [`SessionError::Refused`] if there is none, or it has not ended.
    pub fn release(&self, exec: u64, within: Duration) -> Result<(), SessionError> {
        self.call(within, |machine| machine.release(exec)).map(drop)
    }

    fn open(
        &self,
        ask: impl FnOnce(&mut ClientSession) -> Result<u64, RequestError>,
    ) -> Result<Exec, SessionError> {
        let mut state = self.link.shared.lock();
        let id = ask(state.alive()?)?;
        state.open(id);
        self.link.shared.flush(&mut state);
        drop(state);
        Ok(Exec::attached(Arc::clone(&self.link), id))
    }

    /// Asks something that has one answer, and waits for it.
    pub(super) fn call(
        &self,
        within: Duration,
        ask: impl FnOnce(&mut ClientSession) -> Result<u64, RequestError>,
    ) -> Result<Answer, SessionError> {
        let began = Instant::now();
        let shared = &self.link.shared;
        let mut state = shared.lock();
        let id = ask(state.alive()?)?;
        state.await_answer(id);
        shared.flush(&mut state);
        let result = loop {
            match state.answer(id) {
                Some(Answer::Refused(refusal)) => break Err(SessionError::Refused(refusal)),
                Some(answer) => break Ok(answer),
                None => {}
            }
            if let Err(lost) = state.alive() {
                break Err(lost);
            }
            let Some(left) = within.checked_sub(began.elapsed()) else {
                break Err(SessionError::TimedOut { after: within });
            };
            (state, _) = shared
                .answered
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
        };
        state.forget_call(id);
        result
    }
}
