//! One life of a sandbox, from boot to record: the loop that every other part reports to.
//!
//! ```text
//! main thread: signals, the agent's notices, the machine's end, control socket, the main workload's end, deadlines
//! devices:     the machine's device loop          exec: session -> output of the main workload
//! ```
//!
//! A life with a main workload (`vmm run`) ends with it; one without (`vmm start`) stays until it is asked to stop or
//! its guest ends. Whatever way it goes, the guest is gone and a record is written before the process leaves.

mod announce;
mod guest;
mod metrics;
mod requests;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use vmm_client::{Control, Ended, GenerationTag};
use vmm_devices::console::ConsoleLog;
use vmm_events::{Answer, Inbox, Interest, Poller, Source, Waker, inbox};
use vmm_protocol::{CancelReason, ExecRequest};

use crate::api::{self, Server};
use crate::cli::ending;
use crate::cli::interactive::{Interactive, Screen};
use crate::cli::output::{Output, exit_object};
use crate::cli::signals::Signals;
use crate::cli::stream::{self, Finished, Progress};
use crate::cli::{say, status};
use crate::console as guest_console;
use crate::control::Notice;
use crate::exits::ExitReason;
use crate::machine::{self, Config};
use crate::sandbox::{self, End, Life, LogFile, Phase as Said, Record};
pub use announce::{Announce, Error as AnnounceError};
use guest::Guest;
use metrics::Counting;

/// What is taken as an event in place of the process's end. The last three are the workload's, if there is one, and so
/// are those of its terminal.
const SIGNALS: [i32; 5] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGUSR1,
    libc::SIGUSR2,
];
/// Between asking a workload to end and killing it.
const GRACE: Duration = Duration::from_secs(2);
/// After which a guest that does not answer a cancel is unplugged.
const UNPLUG: Duration = Duration::from_secs(3);
/// Of a stop's time, what the guest's kernel has to switch off, beyond what its workloads have: at most, and at most a
/// quarter of it.
const POWER_OFF: Duration = Duration::from_secs(2);
/// Console lines in an error.
const LINES: usize = 12;

/// Where connections of the guest to a host port go, other than to the socket named after it.
pub type HostPorts = BTreeMap<u32, PathBuf>;

/// Why a life failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The machine.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The sandbox's files.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// Its generation.
    #[error(transparent)]
    Generation(#[from] vmm_snapshot::generation::Error),
    /// Something of the host's.
    #[error("cannot set up {0}")]
    Host(&'static str, #[source] io::Error),
    /// It came to an end that nobody asked for.
    #[error("{0}")]
    Ended(String),
}

impl From<vmm_events::Error> for Error {
    fn from(error: vmm_events::Error) -> Self {
        Self::Machine(error.into())
    }
}

/// The workload that a life is for.
pub struct Workload {
    /// What to run.
    pub request: ExecRequest,
    /// Where its output goes.
    pub output: Output,
    /// What it has of the user.
    pub user: Interactive,
}

/// What a life is to be.
pub struct Plan {
    /// The machine; its vsock device is the life's.
    pub config: Config,
    /// Whose sockets and record.
    pub life: Life,
    /// No plain `CONNECT`.
    pub require_generation: bool,
    /// Where the guest's connections go.
    pub host_ports: HostPorts,
    /// What it is for, if it is for one thing.
    pub workload: Option<Workload>,
    /// How long the agent may take.
    pub ready_timeout: Duration,
    /// How long a guest that is asked to stop may take.
    pub stop_time: Duration,
    /// Who is told.
    pub announce: Announce,
    /// Called once it is ready, before anybody is told: to leave the terminal, for instance.
    pub on_ready: Option<Box<dyn FnOnce() -> io::Result<()>>>,
    /// Where the console is kept.
    pub console: Option<LogFile>,
    /// A process whose end is ours.
    pub parent: Option<OwnedFd>,
}

#[derive(Clone, Copy)]
enum Token {
    Signal,
    Machine,
    Notice,
    Counted,
    Exec,
    Parent,
    Api(api::Token),
}

/// What is told apart while the machine runs.
enum Phase {
    /// The agent is not ready yet.
    Booting,
    /// Ready, and no workload of ours.
    Up,
    /// The session is being opened, or the workload runs.
    Running(Option<Control>),
    /// Asked to end, and by whom.
    Stopping(End),
}

/// How a life ended, and the status to leave with.
struct Done {
    status: u8,
    end: End,
    reason: String,
    exit: Option<Value>,
}

/// What the exec thread is started with, once the agent is ready.
type Start = Box<dyn FnOnce() -> io::Result<()>>;

struct Supervisor {
    poller: Poller<Token>,
    signals: Source<Signals>,
    machine: Source<Waker>,
    notices: Option<Source<Inbox<Notice>>>,
    _parent: Option<Source<OwnedFd>>,
    api: Server<Token>,
    waiting: Vec<u64>,
    counting: Counting,
    guest: Guest,
    progress: Option<Source<Inbox<Progress>>>,
    start: Option<Start>,
    phase: Phase,
    /// When waiting ends whatever has not happened by then.
    deadline: Option<Instant>,
    ready_timeout: Duration,
    stop_time: Duration,
    announce: Announce,
    on_ready: Option<Box<dyn FnOnce() -> io::Result<()>>>,
    /// No terminal's end is ours.
    background: bool,
    /// The workload's, and the user's.
    screen: Screen,
    signal: Option<i32>,
    began: Instant,
    /// What a start may fail on, for the message: program and working directory.
    asked: [String; 2],
    machine_end: Option<String>,
    down: Option<String>,
    /// For the record of a life that fails.
    exit: Option<Value>,
}

/// Lives the life; the exit status.
///
/// # Errors
/// All of [`Error`]; the guest is gone, and the record says why.
pub fn run(plan: Plan) -> Result<u8, Error> {
    raise_descriptor_limit();
    let workload = plan.workload.as_ref();
    let screen = workload.map(|workload| workload.user.screen.clone());
    let of_screen = screen.as_ref().map_or(Vec::new(), Screen::signals);
    let signals = Signals::collect(&[&SIGNALS[..], &of_screen].concat())
        .map_err(|source| Error::Host("signals", source))?;
    let mut life = plan.life;
    let failure = match plan.workload {
        Some(_) => status::TOOL,
        None => status::FAILED,
    };
    let poller = Poller::new()?;
    let api = Server::bind(&life.control(), poller.registrar(), Token::Api)
        .map_err(|source| Error::Host("the control socket", source))?;
    let guest = Guest::boot(
        plan.config,
        &life,
        plan.require_generation,
        plan.host_ports,
        plan.console,
    );
    let mut guest = match guest {
        Ok(guest) => guest,
        Err(error) => {
            conclude(&mut life, &failed(&error, failure, None));
            return Err(error);
        }
    };
    let machine = poller.register(guest.ended.clone(), Interest::READ, Token::Machine)?;
    let notices = match guest.notices.take() {
        Some(notices) if guest.has_agent => {
            Some(poller.register(notices, Interest::READ, Token::Notice)?)
        }
        _ => None,
    };
    let mut counting = Counting::default();
    if let (Some(answers), true) = (guest.counted.take(), guest.has_agent) {
        counting.answers = Some(poller.register(answers, Interest::READ, Token::Counted)?);
    }
    let signals = poller.register(signals, Interest::READ, Token::Signal)?;
    let parent = match plan.parent {
        Some(parent) => Some(poller.register(parent, Interest::READ, Token::Parent)?),
        None => None,
    };
    let mut asked = [String::new(), String::new()];
    let mut progress = None;
    let mut start = None;
    if let Some(workload) = plan.workload {
        let Workload {
            request,
            output,
            user,
        } = workload;
        let (sender, words) = inbox(stream::WORDS)?;
        progress = Some(poller.register(words, Interest::READ, Token::Exec)?);
        asked = ending::asked(&request);
        let socket = life.vsock();
        let tag = GenerationTag::new(life.id(), life.generation().nonce().bytes());
        let spawn: Start =
            Box::new(move || stream::spawn(socket, tag, request, output, user, sender));
        start = Some(spawn);
    }
    let began = Instant::now();
    let mut supervisor = Supervisor {
        deadline: guest.has_agent.then(|| began + plan.ready_timeout),
        poller,
        signals,
        machine,
        notices,
        _parent: parent,
        api,
        waiting: Vec::new(),
        counting,
        guest,
        progress,
        start,
        phase: Phase::Booting,
        ready_timeout: plan.ready_timeout,
        stop_time: plan.stop_time,
        announce: plan.announce,
        background: plan.on_ready.is_some(),
        screen: screen.unwrap_or_default(),
        on_ready: plan.on_ready,
        signal: None,
        began,
        asked,
        machine_end: None,
        down: None,
        exit: None,
    };
    let (name, generation) = (life.sandbox().name().to_string(), life.id().to_string());
    tracing::info!(name, generation, pid = std::process::id(), "begins");
    let done = supervisor.serve(&mut life);
    // Before the record says that it has ended.
    supervisor.unplug();
    if let (Ok(done), true) = (&done, supervisor.on_ready.is_some()) {
        // Whoever started it in the background waits for a word.
        say(&format!(
            "vmm: it ended before it was ready: {}",
            done.reason
        ));
    }
    let record = match &done {
        Ok(done) => Record {
            end: done.end,
            reason: done.reason.clone(),
            status: done.status,
            exit: done.exit.clone(),
        },
        Err(error) => failed(error, failure, supervisor.exit.take()),
    };
    conclude(&mut life, &record);
    supervisor.tell_waiting(&record);
    done.map(|done| done.status)
}

/// Each connection takes a descriptor, and the soft limit of most systems is 1,024, for programs that use select(2).
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of descriptors stays as it is");
    }
}

fn failed(error: &Error, status: u8, exit: Option<Value>) -> Record {
    Record {
        end: End::Failed,
        reason: crate::cli::chain(error),
        status,
        exit,
    }
}

/// A record that cannot be written leaves the sandbox as a dead one, which is what it then is.
fn conclude(life: &mut Life, record: &Record) {
    let (end, reason) = (record.end.name(), &record.reason);
    tracing::info!(end, reason, status = record.status, "ended");
    if let Err(error) = life.conclude(record) {
        say(&format!("vmm: {}", crate::cli::chain(&error)));
    }
}

impl Supervisor {
    fn serve(&mut self, life: &mut Life) -> Result<Done, Error> {
        if !self.guest.has_agent {
            self.become_ready(life)?;
        }
        let mut asked = Vec::new();
        loop {
            let now = Instant::now();
            let own = self.deadline.map(|at| at.saturating_duration_since(now));
            if own == Some(Duration::ZERO) {
                if let Some(done) = self.overdue()? {
                    return Ok(done);
                }
                continue;
            }
            let timeout = [own, self.api.timeout(now)].into_iter().flatten().min();
            self.poller.wait(timeout)?;
            let now = Instant::now();
            while let Some(event) = self.poller.next_event() {
                let mut answer = Answer::Handled;
                let done = match event.token {
                    Token::Signal => self.on_signal(life)?,
                    Token::Machine => self.on_machine_end()?,
                    Token::Notice => self.on_notice(life)?,
                    Token::Counted => {
                        self.on_counted(now, &mut asked);
                        None
                    }
                    Token::Exec => self.on_progress()?,
                    Token::Parent => Some(self.killed("the process that started it has ended")),
                    Token::Api(token) => {
                        answer = self.api.dispatch(token, event.readiness, now, &mut asked);
                        None
                    }
                };
                self.poller.answer(&event, answer);
                if let Some(done) = done {
                    return Ok(done);
                }
            }
            self.api.tick(now);
            while !asked.is_empty() {
                let request = asked.remove(0);
                if let Some(done) = self.on_request(request, life, now, &mut asked)? {
                    return Ok(done);
                }
            }
        }
    }

    fn become_ready(&mut self, life: &Life) -> Result<(), Error> {
        self.deadline = None;
        self.phase = Phase::Up;
        life.say(Said::Ready)?;
        if let Some(start) = self.start.take() {
            start().map_err(|source| Error::Host("a thread", source))?;
            self.phase = Phase::Running(None);
        }
        if let Some(on_ready) = self.on_ready.take() {
            on_ready().map_err(|source| Error::Host("the background", source))?;
        }
        self.announce.ready();
        let up_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(up_ms, "ready");
        Ok(())
    }

    /// The first signal asks, the second one does not wait for the answer.
    fn on_signal(&mut self, life: &Life) -> Result<Option<Done>, Error> {
        let Some(number) = self.signals.inner().next() else {
            return Ok(None);
        };
        let control = match &self.phase {
            Phase::Running(control) => control.as_ref(),
            _ => None,
        };
        if self.screen.on_signal(number, self.signals.inner(), control) {
            return Ok(None);
        }
        let hup = number == libc::SIGHUP && self.is_run();
        if [libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH].contains(&number)
            || (hup && matches!(self.phase, Phase::Running(Some(_))))
        {
            if let (Phase::Running(Some(control)), Ok(number)) = (&self.phase, u8::try_from(number))
            {
                // A session that is gone ends the command by itself.
                let _ = control.signal(number);
            }
            return Ok(None);
        }
        if number == libc::SIGHUP && self.background && !self.is_run() {
            return Ok(None);
        }
        let forced = self.signal.replace(number).is_some();
        if !self.is_run() {
            // A life that stays: signals are how supervisors end it, and that is no failure.
            if forced || matches!(self.phase, Phase::Booting) {
                self.begin_end(life, End::Stopped)?;
                self.guest.stop();
                return Ok(None);
            }
            self.stop(life, self.stop_time)?;
            return Ok(None);
        }
        if forced {
            return Ok(Some(self.signalled(number)));
        }
        match &self.phase {
            Phase::Running(Some(control)) => {
                self.deadline = Some(Instant::now() + GRACE + UNPLUG);
                // A session that is gone ends the command by itself.
                let _ = control.cancel(ending::reason(number), GRACE);
                Ok(None)
            }
            // Nothing of the user's runs yet.
            _ => Ok(Some(self.signalled(number))),
        }
    }

    /// True if this life is for one workload.
    fn is_run(&self) -> bool {
        !self.asked[0].is_empty()
    }

    fn signalled(&self, number: i32) -> Done {
        Done {
            status: status::signaled(number),
            end: End::Killed,
            reason: format!("signal {number}"),
            exit: None,
        }
    }

    fn killed(&self, why: &str) -> Done {
        Done {
            status: status::signaled(libc::SIGKILL),
            end: End::Killed,
            reason: why.to_owned(),
            exit: None,
        }
    }

    /// Says that it is on its way down; once.
    fn begin_end(&mut self, life: &Life, end: End) -> Result<(), Error> {
        if !matches!(self.phase, Phase::Stopping(_)) {
            self.phase = Phase::Stopping(end);
            tracing::info!("asked to stop");
            self.announce.stopping();
            life.say(Said::Stopping)?;
        }
        Ok(())
    }

    /// Asks a guest to switch off, within a time.
    fn stop(&mut self, life: &Life, grace: Duration) -> Result<(), Error> {
        if let Phase::Running(Some(control)) = &self.phase {
            // The workload's end is the life's.
            let _ = control.cancel(CancelReason::Terminate, grace);
            self.signal.get_or_insert(libc::SIGTERM);
            self.deadline = Some(Instant::now() + grace + UNPLUG);
            self.announce.stopping();
            return Ok(life.say(Said::Stopping)?);
        }
        let ready = !matches!(self.phase, Phase::Booting | Phase::Running(None));
        self.begin_end(life, End::Stopped)?;
        if self.guest.has_agent && ready && !grace.is_zero() {
            // Asked again, it may have less time but not more.
            let until = Instant::now() + grace;
            self.deadline = Some(self.deadline.map_or(until, |earlier| earlier.min(until)));
            self.guest
                .power_off(grace.saturating_sub(POWER_OFF.min(grace / 4)));
        } else {
            self.guest.stop();
            self.deadline = None;
        }
        Ok(())
    }

    fn on_machine_end(&mut self) -> Result<Option<Done>, Error> {
        let Some(reason) = self.guest.join() else {
            return Ok(None);
        };
        // The waker stays readable: out of the loop with it.
        self.machine.modify(Interest::NONE)?;
        let reason = ended(reason?, &self.guest.log);
        let why = match self.down.take() {
            Some(down) => format!("{reason}: the agent went down: {down}"),
            None => reason.to_string(),
        };
        match self.phase {
            Phase::Booting => {
                Err(self.lost(format!("the guest ended before its agent was ready: {why}")))
            }
            Phase::Running(_) => {
                // Its session ends with the machine, and the exec thread reports that next.
                self.machine_end = Some(why);
                Ok(None)
            }
            Phase::Stopping(end) => Ok(Some(Done {
                // A run whose workload never began has not gone well.
                status: if self.is_run() {
                    status::signaled(libc::SIGTERM)
                } else {
                    status::OK
                },
                end,
                reason: "it was asked to stop".to_owned(),
                exit: None,
            })),
            Phase::Up if reason == ExitReason::Shutdown => Ok(Some(Done {
                status: status::OK,
                end: End::Guest,
                reason: why,
                exit: None,
            })),
            Phase::Up => Err(self.lost(why)),
        }
    }

    fn on_notice(&mut self, life: &Life) -> Result<Option<Done>, Error> {
        while let Some(notice) = next(self.notices.as_ref()) {
            match notice {
                Notice::Ready if matches!(self.phase, Phase::Booting) => self.become_ready(life)?,
                Notice::Ready => tracing::debug!("the agent is ready again"),
                Notice::Failed(why) => {
                    return Err(self.lost(format!("the agent could not take up its life: {why}")));
                }
                Notice::Down(why) => self.down = Some(why),
                Notice::Lost(why) => tracing::debug!("control connection: {why}"),
            }
        }
        Ok(None)
    }

    fn on_progress(&mut self) -> Result<Option<Done>, Error> {
        while let Some(progress) = next(self.progress.as_ref()) {
            match progress {
                // On its way down it stays there.
                Progress::Asked(control) if matches!(self.phase, Phase::Running(_)) => {
                    self.screen.asked(&control);
                    self.phase = Phase::Running(Some(control));
                }
                Progress::Asked(_) => {}
                Progress::Done(finished) => {
                    self.unplug();
                    return self.finished(finished).map(Some);
                }
            }
        }
        let words = self.progress.as_ref().map(|words| words.inner().turn());
        match words.is_some_and(|turn| turn.is_over()) {
            true => Err(self.lost(stream::SILENT.to_owned())),
            false => Ok(None),
        }
    }

    /// The status of a workload that has ended, with a word on what the status alone does not say.
    fn finished(&mut self, finished: Finished) -> Result<Done, Error> {
        let (ended, stdout_error) = match finished {
            Finished::Ended {
                ended,
                stdout_error,
            } => (ended, stdout_error),
            Finished::NoSession(why) => return Err(self.lost(why)),
        };
        let exit = exit_object(&ended);
        match ending::status(&ended, &self.asked, self.signal, stdout_error) {
            Ok(status) => Ok(Done {
                status,
                end: match self.signal {
                    Some(_) => End::Stopped,
                    None => End::Finished,
                },
                reason: "its workload ended".to_owned(),
                exit: Some(exit),
            }),
            Err(why) => {
                self.exit = Some(exit);
                Err(match ended {
                    Ended::Refused(_) => Error::Ended(why),
                    _ => self.lost(why),
                })
            }
        }
    }

    /// A deadline has passed.
    fn overdue(&mut self) -> Result<Option<Done>, Error> {
        self.deadline = None;
        match (&self.phase, self.signal) {
            (Phase::Booting, _) => {
                let limit = self.ready_timeout;
                Err(self.lost(format!(
                    "the agent was not ready after {limit:?}: raise --ready-timeout or look at the console"
                )))
            }
            (Phase::Running(_), Some(number)) => Ok(Some(self.signalled(number))),
            (Phase::Stopping(_), _) => {
                // Its time is over; the machine's end comes next.
                self.guest.stop();
                Ok(None)
            }
            (Phase::Up | Phase::Running(_), _) => Ok(None),
        }
    }

    /// Stops the machine and waits until it is gone.
    fn unplug(&mut self) {
        self.guest.stop();
        // Its reason is our own stop, or came too late to matter.
        let _ = self.guest.join();
    }

    /// An error with what the guest said last.
    fn lost(&mut self, why: String) -> Error {
        self.unplug();
        let why = match self.machine_end.take() {
            Some(end) => format!("{why}: {end}"),
            None => why,
        };
        match self.guest.log.last_lines(LINES) {
            empty if empty.is_empty() => Error::Ended(format!("{why}; its console is empty")),
            lines => Error::Ended(format!("{why}\nlast lines of its console:\n{lines}")),
        }
    }
}

/// One item, which may change whoever holds the inbox; what is left is woken for, or taken by the next call.
fn next<T>(inbox: Option<&Source<Inbox<T>>>) -> Option<T> {
    inbox?.inner().turn().next()
}

/// A machine's end, with the panic that its console tells of: most kernels panic before, or without, a driver for
/// the panic device, and then ask for a reset.
pub(crate) fn ended(reason: ExitReason, log: &ConsoleLog) -> ExitReason {
    match reason {
        ExitReason::Reset => match guest_console::panic(log) {
            Some(message) => ExitReason::Panic(Some(message)),
            None => ExitReason::Reset,
        },
        ExitReason::Panic(None) => ExitReason::Panic(guest_console::panic(log)),
        other => other,
    }
}
