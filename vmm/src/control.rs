//! The host's end of the agent's control connection, on the device loop.
//!
//! ```text
//! vsock: guest dials CONTROL_PORT --> Slot --> Control{socket, HostControl} --> Notice to the owner
//!                                               hello -> life(generation, time, entropy, identity)
//!                                               ready -> the vsock fence opens the agent's port
//! owner's bell --> Control::ask_counters --> agent --> Counted to the owner, within a time of ours
//! ```
//!
//! What the agent says is believed of its own guest only: at worst a sandbox harms itself.

mod counters;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::rand::{GetRandomFlags, getrandom};
use vmm_events::{Answer, Interest, Poller, Readiness, Sender, Source, TrySendError};
use vmm_protocol::control::{HostControl, HostEvent};
use vmm_protocol::{GenerationId, Life};

use crate::exits::lock;
use counters::Question;
pub use counters::{COUNTED, Counted, Uncounted};

/// What the agent is told of its life, but for time and entropy, which are drawn when it asks.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Which life.
    pub generation: GenerationId,
    /// Host name of the guest.
    pub hostname: String,
    /// Its machine id.
    pub machine_id: [u8; 16],
}

/// What the owner of a machine is told of its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Sessions are taken.
    Ready,
    /// It could not take up its life.
    Failed(String),
    /// It goes down.
    Down(String),
    /// The connection is gone; the agent may dial again.
    Lost(String),
}

/// Notices that an owner may leave lying. A guest whose agent dials and hangs up, over and over, makes no more.
pub const NOTICES: usize = 32;

/// Where an owner hears of its agent.
#[derive(Clone, Debug)]
pub struct Notices {
    /// What happens to it: an inbox of [`NOTICES`].
    pub news: Sender<Notice>,
    /// One answer for each question for its counters, after a second at most: an inbox of [`COUNTED`].
    pub counted: Sender<Counted>,
}

impl Notices {
    fn tell(&self, notice: Notice) {
        // An owner that no longer listens has its reason.
        if let Err(TrySendError::Full(notice)) = self.news.try_send(notice) {
            tracing::warn!(?notice, "the agent says more than is listened to");
        }
    }

    fn count(&self, counted: Counted) {
        if let Err(TrySendError::Full(counted)) = self.counted.try_send(counted) {
            tracing::error!(
                ?counted,
                "counters were asked for before the last were taken"
            );
        }
    }
}

/// A connection that the device has accepted and the loop has not registered yet.
pub(crate) type Slot = Arc<Mutex<Option<UnixStream>>>;

/// The control connection of one generation: at most one at a time, which the device sees to.
pub(crate) struct Control {
    identity: Identity,
    notices: Notices,
    ready: Arc<AtomicBool>,
    started: Instant,
    link: Option<Link>,
    /// The last one was lost.
    lost: bool,
    question: Question,
}

struct Link {
    source: Source<UnixStream>,
    machine: HostControl,
    interest: Interest,
}

impl Control {
    pub(crate) fn new(identity: Identity, notices: Notices, ready: Arc<AtomicBool>) -> Self {
        Self {
            identity,
            notices,
            ready,
            started: Instant::now(),
            link: None,
            lost: false,
            question: Question::default(),
        }
    }

    /// Takes a connection from the device.
    pub(crate) fn accept<T: Clone + Send + 'static>(
        &mut self,
        slot: &Slot,
        poller: &Poller<T>,
        token: T,
    ) {
        let Some(stream) = lock(slot).take() else {
            return;
        };
        match poller.register(stream, Interest::READ, token) {
            Ok(source) => {
                let machine = HostControl::new(self.now(Instant::now()));
                self.link = Some(Link {
                    source,
                    machine,
                    interest: Interest::READ,
                });
                self.lost = false;
            }
            Err(error) => self.notices.tell(Notice::Lost(error.to_string())),
        }
    }

    /// Time until [`Control::tick`] is due.
    pub(crate) fn timeout(&self, now: Instant) -> Option<Duration> {
        let link = self.link.as_ref().and_then(|link| link.machine.deadline());
        let at = link.into_iter().chain(self.question.deadline()).min()?;
        Some(Duration::from_nanos(at.saturating_sub(self.now(now))))
    }

    /// Ends a connection, or a question, that has missed its deadline.
    pub(crate) fn tick(&mut self, now: Instant) {
        let now = self.now(now);
        if let Some(link) = &mut self.link
            && let Err(violation) = link.machine.tick(now)
        {
            self.lose(violation.to_string());
        }
        if self.question.deadline().is_some_and(|at| at <= now) {
            self.question.give_up();
            self.notices.count(Err(Uncounted::Late));
        }
    }

    /// Asks the agent for its counters; the owner has one answer, whatever comes of it. While one is outstanding, that
    /// is the answer to this question, too.
    pub(crate) fn ask_counters(&mut self, now: Instant) {
        let link = self.link.as_ref();
        if !link.is_some_and(|link| link.machine.ready()) {
            let why = match self.lost {
                true => Uncounted::Gone,
                false => Uncounted::NotReady,
            };
            self.notices.count(Err(why));
        } else if self.question.open(self.now(now)) {
            self.dispatch(Readiness::default(), now);
        }
    }

    /// Asks the agent to switch off. Without an agent to ask, whoever wanted it has a deadline.
    pub(crate) fn power_off(&mut self, grace: Duration, now: Instant) {
        let grace = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        if let Some(link) = &mut self.link
            && link.machine.power_off(grace).is_ok()
        {
            self.dispatch(Readiness::default(), now);
        }
    }

    /// Serves the connection.
    pub(crate) fn dispatch(&mut self, readiness: Readiness, now: Instant) -> Answer {
        let Some(mut link) = self.link.take() else {
            return Answer::Unhandled;
        };
        match self.serve(&mut link, readiness, self.now(now)) {
            Ok(()) => self.link = Some(link),
            Err(why) => {
                drop(link);
                self.lose(why);
            }
        }
        Answer::Handled
    }

    fn serve(&mut self, link: &mut Link, readiness: Readiness, now: u64) -> Result<(), String> {
        if readiness.readable() {
            match rustix::io::read(link.source.inner(), link.machine.space()) {
                Ok(0) => return Err("the agent closed its control connection".to_owned()),
                Ok(count) => link.machine.filled(count, now),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        while let Some(event) = link
            .machine
            .next()
            .map_err(|violation| violation.to_string())?
        {
            match event {
                HostEvent::Hello { .. } => {
                    let life = self.life().map_err(|error| error.to_string())?;
                    link.machine
                        .live(&life)
                        .map_err(|error| error.to_string())?;
                }
                HostEvent::Ready => {
                    // Before the owner hears of it: it connects at once.
                    self.ready.store(true, Ordering::Release);
                    self.notices.tell(Notice::Ready);
                }
                HostEvent::Failed {
                    stage,
                    errno,
                    message,
                } => {
                    let cause = match errno {
                        0 => String::new(),
                        errno => format!(" ({})", io::Error::from_raw_os_error(errno)),
                    };
                    self.notices.tell(Notice::Failed(format!(
                        "{}: {message}{cause}",
                        stage.name()
                    )));
                }
                HostEvent::Down { reason, message } => {
                    self.notices
                        .tell(Notice::Down(format!("{}: {message}", reason.name())));
                }
                HostEvent::Counters { number, counters } => {
                    // One that comes too late is nobody's.
                    if self.question.answered(number) {
                        self.notices.count(Ok(counters));
                    }
                }
                HostEvent::Pong { .. } => {}
            }
        }
        if self.question.unsent() {
            // None while the agent owes an answer that came, or will come, too late.
            let number = link.machine.ask_counters();
            if let Some(number) = number.map_err(|error| error.to_string())? {
                self.question.sent(number);
            }
        }
        while !link.machine.outgoing().is_empty() {
            match rustix::io::write(link.source.inner(), link.machine.outgoing()) {
                Ok(count) => link.machine.wrote(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        let interest = Interest::default()
            .with(Interest::READ, link.machine.wants_read())
            .with(Interest::WRITE, !link.machine.outgoing().is_empty());
        if interest != link.interest {
            link.source
                .modify(interest)
                .map_err(|error| error.to_string())?;
            link.interest = interest;
        }
        Ok(())
    }

    fn life(&self) -> io::Result<Life> {
        let mut life = Life::new(self.identity.generation);
        life.hostname.clone_from(&self.identity.hostname);
        life.machine_id = self.identity.machine_id;
        // Up to 256 bytes come whole (getrandom(2)).
        getrandom(&mut life.entropy, GetRandomFlags::empty())?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        life.wall_clock_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        Ok(life)
    }

    fn lose(&mut self, why: String) {
        self.link = None;
        self.lost = true;
        self.ready.store(false, Ordering::Release);
        self.notices.tell(Notice::Lost(why));
        if self.question.give_up() {
            self.notices.count(Err(Uncounted::Gone));
        }
    }

    fn now(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_nanos() as u64
    }
}

#[cfg(test)]
mod tests;
