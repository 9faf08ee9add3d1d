//! A session: one connection to an agent, shared by any number of threads and execs.

mod calls;
mod state;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use vmm_protocol::session::{ClientSession, Event as Said, RequestError};
use vmm_protocol::{AGENT_PORT, ExecRequest, GenerationId, Hello, Refusal};

use crate::connect::{ConnectError, Connection, Deadlines, open};
use crate::exec::Exec;
use crate::io::{receive, transmit_all, wait};
use crate::tag::GenerationTag;
pub use calls::{StartError, Started};
use state::State;

/// Why something could not be asked of a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The request itself is wrong, or too much.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The session is gone.
    #[error("the session is lost: {reason}")]
    Lost {
        /// Why.
        reason: String,
    },
    /// The agent does not do it; nothing has changed.
    #[error(transparent)]
    Refused(Refusal),
    /// No answer came in time.
    #[error("no answer within {after:?}")]
    TimedOut {
        /// The time that it had.
        after: Duration,
    },
}

/// A session with the agent of one generation. Clones share it; it is closed when the last clone
/// and the last handle of an exec are gone.
///
/// One thread of its own takes what the agent sends; requests are written by the threads that make
/// them.
///
/// ```
/// use std::os::unix::net::UnixStream;
/// use std::time::Duration;
/// use vmm_client::Session;
/// use vmm_protocol::GenerationId;
///
/// // Nobody answers at the other end of this pair: the hello has its deadline.
/// let (ours, _theirs) = UnixStream::pair()?;
/// let generation = GenerationId { counter: 1, public_id: 2 };
/// let error = Session::over(ours, generation, Duration::from_millis(10)).unwrap_err();
/// assert_eq!(error.to_string(), "no answer to the hello within 10ms");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Session {
    link: Arc<Link>,
}

/// What closes the session when its last handle goes.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the handles and the session's thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    stream: UnixStream,
    wake: OwnedFd,
    began: Instant,
    /// An answer has come, or the session is lost.
    answered: Condvar,
}

impl Session {
    /// Connects to the agent of the sandbox whose generation is `tag`, by that generation's
    /// `vsock.sock`, and opens a session.
    pub fn connect(
        path: &Path,
        tag: &GenerationTag,
        deadlines: &Deadlines,
    ) -> Result<Self, ConnectError> {
        let Connection { stream, early, .. } = open(path, AGENT_PORT, tag, deadlines)?;
        Self::begin(stream, &early, tag.id(), deadlines.hello)
    }

    /// Opens a session over a stream that leads to an agent already.
    pub fn over(
        stream: UnixStream,
        generation: GenerationId,
        within: Duration,
    ) -> Result<Self, ConnectError> {
        stream
            .set_nonblocking(true)
            .map_err(ConnectError::io("the hello", within))?;
        Self::begin(stream, &[], generation, within)
    }

    fn begin(
        stream: UnixStream,
        early: &[u8],
        generation: GenerationId,
        within: Duration,
    ) -> Result<Self, ConnectError> {
        let began = Instant::now();
        let mut machine = ClientSession::new(Hello::new(generation), 0);
        greet(&stream, &mut machine, early, within)?;
        let failed = ConnectError::io("starting the session", within);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(error.into()))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::new(machine)),
            stream,
            wake,
            began,
            answered: Condvar::new(),
        });
        let thread = std::thread::Builder::new()
            .name("vmm-session".to_owned())
            .stack_size(256 << 10)
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(failed)?;
        Ok(Self {
            link: Arc::new(Link {
                shared,
                thread: Some(thread),
            }),
        })
    }

    /// Runs something. The request is checked before anything is sent. A detached one is over for its handle once it has
    /// started: [`start`](Self::start) is for these.
    pub fn exec(&self, request: &ExecRequest) -> Result<Exec, SessionError> {
        let mut state = self.link.shared.lock();
        let id = state.alive()?.exec(request)?;
        state.open(id);
        self.link.shared.flush(&mut state);
        drop(state);
        Ok(Exec::new(Arc::clone(&self.link), id))
    }

    /// Asks the agent for a sign of life; the answer is how long it took.
    pub fn ping(&self, within: Duration) -> Result<Duration, SessionError> {
        let began = Instant::now();
        self.call(within, ClientSession::ping)?;
        Ok(began.elapsed())
    }

    /// Why the session is lost, if it is.
    pub fn lost(&self) -> Option<String> {
        self.link.shared.lock().lost().map(str::to_owned)
    }

    /// Closes the session: its execs end as lost here, and the agent sees its client go.
    pub fn close(&self) {
        self.link.shared.close("closed by its client");
    }
}

/// Exchanges hellos. What the agent says behind its own stays for the session's thread.
fn greet(
    stream: &UnixStream,
    machine: &mut ClientSession,
    mut early: &[u8],
    within: Duration,
) -> Result<(), ConnectError> {
    const STEP: &str = "the hello";
    let failed = ConnectError::io(STEP, within);
    let deadline = Instant::now() + within;
    let hello = machine.outgoing().to_vec();
    match transmit_all(stream.as_fd(), &hello, deadline) {
        // What the agent said before it closed tells more than that it did.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(failed(error)),
        _ => machine.wrote(hello.len()),
    }
    loop {
        match machine.next().map_err(ConnectError::Hello)? {
            Some(Said::Opened { .. }) => return Ok(()),
            Some(Said::Goodbye { code, message }) => {
                return Err(ConnectError::Goodbye { code, message });
            }
            Some(_) => continue,
            None => {}
        }
        let space = machine.space();
        let count = match early.is_empty() {
            false => {
                let count = space.len().min(early.len());
                space[..count].copy_from_slice(&early[..count]);
                early = &early[count..];
                count
            }
            true => match receive(stream.as_fd(), space).map_err(&failed)? {
                Some(0) => return Err(ConnectError::Closed { step: STEP }),
                Some(count) => count,
                None => {
                    wait(stream, PollFlags::IN, deadline).map_err(&failed)?;
                    continue;
                }
            },
        };
        machine.filled(count, 0);
    }
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A thread that panicked left no half-done change that matters: the machine judges before
        // it acts.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what the socket takes now; the session's thread sends the rest.
    pub(crate) fn flush(&self, state: &mut State) {
        if !self.send(state) {
            self.nudge();
        }
    }

    /// `false` if something is left for the session's thread.
    fn send(&self, state: &mut State) -> bool {
        state.send(|bytes| crate::io::transmit(self.stream.as_fd(), bytes))
    }

    fn nudge(&self) {
        // A full counter wakes as well as a larger one.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn close(&self, reason: &str) {
        self.lock().lose(reason);
        self.answered.notify_all();
        // Fails only if the other side is gone already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.nudge();
    }

    /// The session's thread: takes what comes until the session is lost.
    fn run(&self) {
        // Whatever ends this thread, nobody waits for it any longer.
        let _closer = Closer(self);
        let mut first = true;
        while self.lock().lost().is_none() {
            // What came with the hello is in the machine already.
            if !std::mem::take(&mut first) && !self.sleep() {
                self.close("waiting for the agent failed");
            }
            let mut state = self.lock();
            let now = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let answers = state.receive(now, |space| receive(self.stream.as_fd(), space));
            self.send(&mut state);
            let lost = state.lost().is_some();
            drop(state);
            if answers || lost {
                self.answered.notify_all();
            }
        }
    }

    /// Waits until there is something to do.
    fn sleep(&self) -> bool {
        let sending = self.lock().sending();
        let flags = if sending {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        let mut fds = [
            PollFd::new(&self.stream, flags),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => {
                if !fds[1].revents().is_empty() {
                    let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                }
                true
            }
            Err(rustix::io::Errno::INTR) => true,
            Err(_) => false,
        }
    }
}

struct Closer<'a>(&'a Shared);

impl Drop for Closer<'_> {
    fn drop(&mut self) {
        self.0.close("the session's thread has ended");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.close("closed by its client");
        if let Some(thread) = self.thread.take() {
            // The thread runs no code of the user's, so it cannot be the one that drops this.
            let _ = thread.join();
        }
    }
}
