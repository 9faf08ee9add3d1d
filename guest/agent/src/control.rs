//! The control connection: the agent's word with the monitor of its life.
//!
//! ```text
//!          dial            writable       life told, ready         gone, or no answer
//!   Down ---------> Dialing --------> Up ------------------> Up ----------------> Down, dial again
//! ```
//!
//! A restored guest finds its connection cut by the transport reset, dials, and is told its new
//! life. So whether a lost session is a lost client can only be said once this connection has
//! confirmed that the life is still the same.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use vmm_events::{Interest, Registrar, Source};
use vmm_protocol::control::{AgentControl, ControlEvent};
use vmm_protocol::limits::HELLO_DEADLINE_NS;
use vmm_protocol::session::Violation;
use vmm_protocol::{AgentCounters, ControlToHost, DownReason, Life};

use crate::agent::Token;
use crate::init::identity::Unready;
use crate::log::Log;
use crate::platform::Platform;

/// The first pause before dialling again; it doubles up to [`LONGEST_PAUSE_NS`].
const FIRST_PAUSE_NS: u64 = 10_000_000;
const LONGEST_PAUSE_NS: u64 = 1_000_000_000;

/// Why the connection is given up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Gone {
    #[error("cannot dial the monitor: {0}")]
    Dial(Errno),
    #[error("the monitor closed the connection")]
    Closed,
    #[error("the connection failed: {0}")]
    Failed(Errno),
    #[error("the monitor did not answer in time")]
    Deadline,
    #[error("the monitor broke the protocol: {}", .0.describe())]
    Violation(#[from] Violation),
    #[error("cannot watch the connection")]
    Watch(#[from] vmm_events::Error),
}

enum Phase {
    Down,
    Dialing(Source<OwnedFd>),
    Up(Box<Wire>),
}

struct Wire {
    source: Source<OwnedFd>,
    control: AgentControl,
}

/// The agent's end of the control connection.
pub(crate) struct Link {
    phase: Phase,
    /// When dialling has taken too long, an answer is overdue, or the next dial is due.
    deadline: Option<u64>,
    pause: u64,
    /// The question that has no answer yet.
    asked: Option<u64>,
}

/// What the monitor wants.
pub(crate) enum Word {
    Life(Box<Life>),
    PowerOff {
        grace_ns: u64,
    },
    /// The life is still the same, for everything that was asked so far.
    Confirmed,
    /// What has been counted: [`Link::counters`] answers.
    Counters,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            phase: Phase::Down,
            deadline: None,
            pause: FIRST_PAUSE_NS,
            asked: None,
        }
    }

    /// When [`Link::tick`] is due.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let theirs = match &self.phase {
            Phase::Up(wire) => wire.control.deadline(),
            Phase::Down | Phase::Dialing(_) => None,
        };
        self.deadline.into_iter().chain(theirs).min()
    }

    /// Starts to dial.
    pub(crate) fn dial<P: Platform>(
        &mut self,
        platform: &mut P,
        registrar: &Registrar<Token>,
        now: u64,
    ) -> Result<(), Gone> {
        let socket = platform.dial().map_err(Gone::Dial)?;
        self.phase = Phase::Dialing(registrar.register(socket, Interest::WRITE, Token::Control)?);
        self.deadline = Some(now.saturating_add(HELLO_DEADLINE_NS));
        Ok(())
    }

    /// Gives the connection up; the next dial is due after a pause.
    pub(crate) fn give_up(&mut self, now: u64) {
        self.phase = Phase::Down;
        self.asked = None;
        remember(None);
        self.deadline = Some(now.saturating_add(self.pause));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE_NS);
    }

    /// The clock says `now`: `true` if it is time to dial.
    pub(crate) fn tick(&mut self, now: u64) -> Result<bool, Gone> {
        if let Phase::Up(wire) = &mut self.phase {
            wire.control.tick(now)?;
        }
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return Ok(false);
        }
        self.deadline = None;
        match self.phase {
            Phase::Down => Ok(true),
            Phase::Dialing(_) | Phase::Up(_) => Err(Gone::Deadline),
        }
    }

    /// The socket is ready: words from the monitor go to `words`.
    pub(crate) fn ready(&mut self, words: &mut Vec<Word>, now: u64) -> Result<(), Gone> {
        match std::mem::replace(&mut self.phase, Phase::Down) {
            Phase::Down => return Ok(()),
            Phase::Dialing(source) => {
                let decided = rustix::net::sockopt::socket_error(source.inner());
                decided.and_then(|result| result).map_err(Gone::Dial)?;
                self.deadline = None;
                self.phase = Phase::Up(Box::new(Wire {
                    source,
                    control: AgentControl::new(now),
                }));
            }
            Phase::Up(mut wire) => {
                // Words that came before the end are words still.
                let open = wire.read(now);
                while let Some(event) = wire.control.next()? {
                    words.push(match event {
                        ControlEvent::Life(life) => Word::Life(life),
                        ControlEvent::PowerOff { grace_ns } => Word::PowerOff { grace_ns },
                        ControlEvent::Counters => Word::Counters,
                        // An answer to an earlier question says nothing of what was lost since.
                        ControlEvent::Confirmed { token } if self.asked != Some(token) => continue,
                        ControlEvent::Confirmed { .. } => {
                            (self.asked, self.deadline) = (None, None);
                            Word::Confirmed
                        }
                    });
                }
                self.phase = Phase::Up(wire);
                open?;
            }
        }
        self.flush()
    }

    /// The life that was told is applied.
    pub(crate) fn up(&mut self) -> Result<(), Gone> {
        self.pause = FIRST_PAUSE_NS;
        self.say(AgentControl::ready)
    }

    /// The life that was told could not be applied.
    pub(crate) fn failed(&mut self, unready: &Unready) -> Result<(), Gone> {
        let errno = unready.errno.raw_os_error();
        self.say(|control| control.failed(unready.stage, errno, &unready.to_string()))
    }

    /// What was counted, as the monitor asked.
    pub(crate) fn counters(&mut self, counters: AgentCounters) -> Result<(), Gone> {
        self.say(|control| control.counters(counters))
    }

    /// Asks whether the life is still the same. If there is nobody to ask, the next life that is
    /// told will be the answer.
    pub(crate) fn confirm(&mut self, now: u64) -> Result<(), Gone> {
        let Phase::Up(wire) = &mut self.phase else {
            return Ok(());
        };
        if wire.control.generation().is_some() {
            self.asked = Some(wire.control.confirm());
            self.deadline = Some(now.saturating_add(HELLO_DEADLINE_NS));
        }
        self.flush()
    }

    fn say(&mut self, what: impl FnOnce(&mut AgentControl)) -> Result<(), Gone> {
        if let Phase::Up(wire) = &mut self.phase {
            what(&mut wire.control);
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Gone> {
        match &mut self.phase {
            Phase::Up(wire) => wire.flush(),
            Phase::Down | Phase::Dialing(_) => Ok(()),
        }
    }
}

impl Wire {
    fn flush(&mut self) -> Result<(), Gone> {
        while !self.control.outgoing().is_empty() {
            match rustix::io::write(self.source.inner(), self.control.outgoing()) {
                Ok(count) => self.control.wrote(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(Gone::Failed(error)),
            }
        }
        let socket = rustix::io::fcntl_dupfd_cloexec(self.source.inner(), 3).ok();
        // Half a frame on its way leaves no place for another.
        let whole = self.control.outgoing().is_empty();
        let sequence = self.control.sent() + 1;
        remember(
            socket
                .filter(|_| whole)
                .map(|socket| LastWords { socket, sequence }),
        );
        let interest = Interest::READ.with(Interest::WRITE, !whole);
        Ok(self.source.modify(interest)?)
    }

    fn read(&mut self, now: u64) -> Result<(), Gone> {
        match rustix::io::read(self.source.inner(), self.control.space()) {
            Ok(0) => Err(Gone::Closed),
            Ok(count) => {
                self.control.filled(count, now);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(Gone::Failed(error)),
        }
    }
}

/// What a panic needs to say goodbye: it has no way to the agent's own state.
struct LastWords {
    socket: OwnedFd,
    sequence: u64,
}

static LAST_WORDS: Mutex<Option<LastWords>> = Mutex::new(None);

fn remember(words: Option<LastWords>) {
    *LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner) = words;
}

/// Tells the monitor that the guest goes down, if it can be told without waiting.
pub fn last_words(reason: DownReason, message: &str) {
    // A panic under the lock itself has no way to be told; it must not hang here.
    let Ok(mut words) = LAST_WORDS.try_lock() else {
        return;
    };
    if let Some(LastWords { socket, sequence }) = words.take() {
        let mut bytes = Vec::new();
        let message = ControlToHost::Down {
            reason,
            message: message.to_owned(),
        };
        if message.encode(sequence, &mut bytes).is_ok() {
            let _ = rustix::io::write(socket, &bytes);
        }
    }
}

/// From now on a panic is logged, told to the monitor, and then `end` ends the process: init must
/// not die by itself, which the kernel answers with a panic of its own and perhaps a reboot loop.
pub fn report_panics(log: fn() -> Log, end: fn()) {
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.to_string();
        log().error(&message);
        last_words(DownReason::Panic, &message);
        end();
    }));
}
