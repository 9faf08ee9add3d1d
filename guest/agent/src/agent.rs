//! The loop: one thread, every descriptor non-blocking, every wait with a deadline.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vmm_events::{Answer, Event, Interest, Poller, Registrar, Source, TimerId, Timers};
use vmm_protocol::{AgentCounters, CancelReason, GoodbyeCode, Life, ReadyStage, Stream};

use crate::cgroup::Hierarchy;
use crate::control::{Gone, Link, Word};
pub use crate::control::{last_words, report_panics};
use crate::execs::{Exec, Execs};
use crate::init::identity::{self, Unready};
use crate::leaving::{GOODBYE, Leaving};
use crate::log::Log;
use crate::pace::Pace;
use crate::platform::Platform;
use crate::reaper::{Reaper, Status};
use crate::resident;
use crate::running::{Lingering, Running};
use crate::sessions::Connection;
use crate::sys::signals::ChildSignal;

/// What one agent will hold at most; each has a refusal of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions at a time.
    pub sessions: usize,
    /// Execs at a time, over all sessions.
    pub execs: usize,
    /// Bytes that the output stores of all execs may take together.
    pub store_bytes: u64,
}

impl Limits {
    /// The limits for a guest of this many bytes: stores get a quarter of it.
    ///
    /// ```
    /// use vmm_agent::agent::Limits;
    ///
    /// assert_eq!(Limits::for_memory(128 << 20).store_bytes, 32 << 20);
    /// ```
    pub fn for_memory(bytes: u64) -> Self {
        Self {
            sessions: 128,
            execs: 2048,
            store_bytes: bytes / 4,
        }
    }
}

/// Why the loop ended without being told to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The event loop itself is broken.
    #[error("the event loop failed: {0}")]
    Events(#[from] vmm_events::Error),
    /// Children cannot be waited for.
    #[error("cannot watch for the end of children: {0}")]
    Children(#[source] Errno),
}

/// Whose a ready descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Listener,
    Children,
    Control,
    /// A session's socket.
    Session(u64),
    /// The way of a starting child to say what failed.
    Report(u64),
    /// An exec's output.
    Output(u64, Stream),
    /// An exec's stdin.
    Stdin(u64),
    /// The state of an exec's leaf.
    Leaf(u64),
}

/// What a deadline is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    Control,
    Session(u64),
    Exec(u64),
    Accept,
    Leaving,
}

/// Bytes read at once from a stream whose bytes are thrown away.
const SCRATCH: usize = 64 << 10;
/// Connections taken in one turn of the loop.
const ACCEPTS_A_TURN: usize = 16;
/// How long to leave the listener alone when the guest is out of descriptors or memory.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;

/// Runs until the monitor says to power off. All workloads have ended or been killed then.
///
/// # Errors
/// When the agent cannot go on; a lost monitor is no reason.
pub fn run<P: Platform>(platform: P, limits: Limits, log: &mut Log) -> Result<(), Error> {
    let mut agent = Agent::new(platform, limits, log)?;
    agent.dial();
    while !agent.down {
        agent.turn()?;
    }
    agent.go_down();
    Ok(())
}

pub(crate) type LeafOf<P> = <<P as Platform>::Hierarchy as Hierarchy>::Leaf;

pub(crate) struct Agent<'a, P: Platform> {
    pub(crate) platform: P,
    pub(crate) limits: Limits,
    pub(crate) log: &'a mut Log,
    poller: Poller<Token>,
    pub(crate) registrar: Registrar<Token>,
    pub(crate) timers: Timers<Due>,
    pub(crate) epoch: Instant,
    pub(crate) reaper: Reaper,
    children: Source<ChildSignal>,
    listener: Option<Source<OwnedFd>>,
    link: Link,
    link_timer: Option<(u64, TimerId)>,
    last_gone: Option<String>,
    pub(crate) life: Option<Box<Life>>,
    pub(crate) connections: BTreeMap<u64, Connection>,
    last_connection: u64,
    pub(crate) execs: Execs<LeafOf<P>>,
    pub(crate) last_exec: u64,
    pub(crate) store_bytes: u64,
    /// Leaves whose exec has ended in this turn.
    finished: Vec<Lingering<LeafOf<P>>>,
    lingering: Vec<Lingering<LeafOf<P>>>,
    /// Execs whose session was lost, until it is known whether their client was.
    lost: Vec<u64>,
    pub(crate) scratch: Box<[u8]>,
    /// There may be more dead children than one turn collects.
    uncollected: bool,
    muted: u64,
    pace: Pace,
    /// Output bytes that came in this turn.
    flood: usize,
    /// Told to switch off.
    pub(crate) leaving: Option<Leaving>,
    pub(crate) down: bool,
}

impl<'a, P: Platform> Agent<'a, P> {
    fn new(platform: P, limits: Limits, log: &'a mut Log) -> Result<Self, Error> {
        let poller = Poller::new()?;
        let signal = ChildSignal::new().map_err(Error::Children)?;
        Ok(Self {
            children: poller.register(signal, Interest::READ, Token::Children)?,
            registrar: poller.registrar(),
            poller,
            platform,
            limits,
            log,
            timers: Timers::new(),
            epoch: Instant::now(),
            reaper: Reaper::default(),
            listener: None,
            link: Link::new(),
            link_timer: None,
            last_gone: None,
            life: None,
            connections: BTreeMap::new(),
            last_connection: 0,
            execs: BTreeMap::new(),
            last_exec: 0,
            store_bytes: 0,
            finished: Vec::new(),
            lingering: Vec::new(),
            lost: Vec::new(),
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            uncollected: false,
            muted: 0,
            pace: Pace::default(),
            flood: 0,
            leaving: None,
            down: false,
        })
    }

    /// One round: sleep, then whatever happened, then whatever is due.
    fn turn(&mut self) -> Result<(), Error> {
        let timeout = match self.uncollected {
            true => Some(Duration::ZERO),
            false => self.timers.timeout(Instant::now()),
        };
        self.poller.wait(timeout)?;
        while let Some(event) = self.poller.next_event() {
            let answer = self.dispatch(event);
            self.poller.answer(&event, answer);
        }
        if self.uncollected {
            self.collect();
        }
        let now = Instant::now();
        while let Some(due) = self.timers.expired(now) {
            self.due(due);
        }
        self.leave();
        self.tidy();
        if let Some(relaxed) = self.pace.turn(std::mem::take(&mut self.flood)) {
            self.platform.relax(relaxed);
        }
        let muted = self.poller.counters().muted;
        if muted > self.muted {
            self.muted = muted;
            self.log
                .error("a descriptor had events that nobody handled: no longer watched");
        }
        Ok(())
    }

    /// What nobody waits for, once the turn's records are on their way.
    fn tidy(&mut self) {
        for finished in self.finished.drain(..) {
            self.lingering.extend(finished.leave(&self.registrar));
        }
        if self.life.is_some() {
            self.platform.hierarchy().prepare();
        }
    }

    /// Nanoseconds of the one clock that all deadlines are measured by.
    pub(crate) fn now(&self) -> u64 {
        // 2^64 ns are 584 years.
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn dispatch(&mut self, event: Event<Token>) -> Answer {
        match event.token {
            Token::Listener => self.accept(),
            Token::Children => self.collect(),
            Token::Control => self.control_ready(),
            Token::Session(key) => return self.session_ready(key, event.readiness),
            Token::Report(exec) => return self.exec(exec, |running, _, _| running.report_ready()),
            Token::Output(exec, stream) => {
                let mut bytes = 0;
                let answer = self.exec(exec, |running, scratch, now| {
                    bytes = running.output_ready(stream, scratch, now);
                });
                self.flood += bytes;
                return answer;
            }
            Token::Stdin(exec) => return self.exec(exec, |running, _, _| running.write_stdin()),
            Token::Leaf(exec) => {
                let before = self.lingering.len();
                self.lingering
                    .retain_mut(|leaf| leaf.number != exec || !leaf.retry());
                let known = self.exec(exec, |running, _, _| running.leaf_changed());
                // A lingering leaf that is still populated has been looked at, too.
                let lingers = self.lingering.iter().any(|leaf| leaf.number == exec);
                if lingers || self.lingering.len() < before {
                    return Answer::Handled;
                }
                return known;
            }
        }
        Answer::Handled
    }

    fn due(&mut self, due: Due) {
        match due {
            Due::Exec(exec) => {
                self.exec(exec, |running, _, now| {
                    running.timer = None;
                    running.state.tick(now);
                });
            }
            Due::Session(key) => self.session_due(key),
            Due::Control => self.control_due(),
            Due::Leaving => self.leaving_due(),
            Due::Accept => {
                if let Some(listener) = &self.listener {
                    let _ = listener.modify(Interest::READ);
                }
            }
        }
    }

    /// Does something to an exec, then what follows from it.
    pub(crate) fn exec(
        &mut self,
        number: u64,
        act: impl FnOnce(&mut Running<LeafOf<P>>, &mut [u8], u64),
    ) -> Answer {
        let now = self.now();
        let Some(exec) = self.execs.get_mut(&number) else {
            return Answer::Unhandled;
        };
        act(&mut exec.running, &mut self.scratch, now);
        self.settle(number);
        self.flush_links(number);
        Answer::Handled
    }

    /// Carries out what an exec's state machine asks for, and sets its next deadline.
    pub(crate) fn settle(&mut self, number: u64) {
        let now = self.now();
        let Some(exec) = self.execs.get_mut(&number) else {
            return;
        };
        let running = &mut exec.running;
        let ended = running.settle(&self.registrar, &mut self.finished, &mut self.scratch, now);
        exec.ended |= ended;
        let due = running.state.deadline();
        let epoch = self.epoch;
        rearm(
            &mut self.timers,
            &mut running.timer,
            due,
            epoch,
            Due::Exec(number),
        );
        if let Some((session, id)) = exec.owner
            && let Some(connection) = self.connections.get_mut(&session)
        {
            connection
                .session
                .grant_stdin(id, exec.running.take_credit());
        }
        if ended {
            self.ended(number);
        }
        let over = self.execs.get(&number).is_some_and(Exec::over);
        if over && !self.lost.contains(&number) {
            self.forget(number);
        }
    }

    /// Nobody will ask for this exec again.
    pub(crate) fn forget(&mut self, number: u64) {
        if let Some(mut exec) = self.execs.remove(&number) {
            rearm(
                &mut self.timers,
                &mut exec.running.timer,
                None,
                self.epoch,
                Due::Exec(number),
            );
            self.store_bytes = self.store_bytes.saturating_sub(exec.running.store_bytes);
        }
    }

    fn collect(&mut self) {
        let mut dead: Vec<(u64, Status)> = Vec::new();
        // Drained before looking: who dies from here on wakes the loop again.
        self.children.inner().drain();
        self.uncollected = self.reaper.collect(&mut dead);
        for (number, status) in dead {
            self.exec(number, |running, _, now| running.main_exited(status, now));
        }
    }

    // Sessions come.

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_A_TURN {
            let Some(listener) = &self.listener else {
                return;
            };
            match self.platform.accept(listener.inner()) {
                Ok(Some(socket)) => self.welcome(socket),
                Ok(None) => self
                    .log
                    .error("refused a connection that is not the host's"),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    self.log
                        .error(format_args!("cannot accept a connection: {error}"));
                    // The connection stays in the backlog and would wake the loop again at once.
                    let _ = listener.modify(Interest::NONE);
                    let at = self.now().saturating_add(ACCEPT_PAUSE_NS);
                    self.timers.insert(instant(self.epoch, at), Due::Accept);
                    return;
                }
            }
        }
    }

    fn welcome(&mut self, socket: OwnedFd) {
        let Some(life) = &self.life else { return };
        let generation = life.generation;
        self.last_connection += 1;
        let key = self.last_connection;
        let source = match self
            .registrar
            .register(socket, Interest::READ, Token::Session(key))
        {
            Ok(source) => source,
            Err(error) => {
                return self
                    .log
                    .error(format_args!("cannot take a session: {error}"));
            }
        };
        let mut connection = Connection::new(source, generation, self.now());
        if self.leaving.is_some() {
            connection.end(GoodbyeCode::GoingDown, GOODBYE);
        } else if self.connections.len() >= self.limits.sessions {
            let message = format!("the agent has {} sessions, its limit", self.limits.sessions);
            connection.end(GoodbyeCode::TooManySessions, &message);
        }
        self.connections.insert(key, connection);
        self.flush(key);
    }

    /// A session has ended. Its execs go on until it is known that their client is lost.
    pub(crate) fn session_lost(&mut self, connection: Connection, key: u64) {
        let orphans = self.disown(key, connection, false);
        self.lost.extend(orphans);
        if !self.lost.is_empty() {
            let now = self.now();
            if let Err(gone) = self.link.confirm(now) {
                self.control_gone(&gone);
            }
            self.arm_link();
        }
    }

    // The monitor.

    fn dial(&mut self) {
        let now = self.now();
        if let Err(gone) = self.link.dial(&mut self.platform, &self.registrar, now) {
            self.control_gone(&gone);
        }
        self.arm_link();
    }

    fn control_ready(&mut self) {
        let mut words = Vec::new();
        let now = self.now();
        let mut result = self.link.ready(&mut words, now);
        for word in words {
            match word {
                Word::PowerOff { grace_ns } => self.power_off(grace_ns),
                Word::Life(life) => self.live(life),
                Word::Confirmed => self.confirmed(),
                Word::Counters => {
                    let told = self.link.counters(self.counters());
                    result = result.and(told);
                }
            }
        }
        if let Err(gone) = result {
            self.control_gone(&gone);
        }
        self.arm_link();
    }

    fn counters(&self) -> AgentCounters {
        let counters = self.poller.counters();
        let sessions = self
            .connections
            .values()
            .filter(|session| session.goes_on());
        let execs = self.execs.values().filter(|exec| !exec.ended);
        AgentCounters {
            wakeups: counters.wakeups,
            without_progress: counters.without_progress,
            stale_events: counters.stale,
            muted: counters.muted,
            sessions: sessions.count() as u64,
            execs: execs.count() as u64,
            resident_bytes: resident::bytes().unwrap_or(0),
        }
    }

    fn control_due(&mut self) {
        self.link_timer = None;
        let now = self.now();
        match self.link.tick(now) {
            Ok(true) => self.dial(),
            Ok(false) => {}
            Err(gone) => self.control_gone(&gone),
        }
        self.arm_link();
    }

    fn control_gone(&mut self, gone: &Gone) {
        let message = format!("control connection: {gone}");
        // Not again and again while the monitor is away.
        if self.last_gone.as_ref() != Some(&message) {
            self.log.info(&message);
            self.last_gone = Some(message);
        }
        let now = self.now();
        self.link.give_up(now);
    }

    fn arm_link(&mut self) {
        let (due, epoch) = (self.link.deadline(), self.epoch);
        rearm(
            &mut self.timers,
            &mut self.link_timer,
            due,
            epoch,
            Due::Control,
        );
    }

    /// Takes on a life: sessions of another one end, and only then this one is said to be ready.
    fn live(&mut self, life: Box<Life>) {
        let told = match self.take_on(life) {
            Ok(()) => self.link.up(),
            Err(unready) => {
                self.log.error(&unready);
                self.link.failed(&unready)
            }
        };
        if let Err(gone) = told {
            self.control_gone(&gone);
        }
    }

    fn take_on(&mut self, life: Box<Life>) -> Result<(), Unready> {
        if self.life.as_ref().map(|life| life.generation) == Some(life.generation) {
            self.confirmed();
        } else {
            // Their clients are in another life; these execs run on into their stores, where they can be attached to.
            for number in std::mem::take(&mut self.lost) {
                if let Some(exec) = self.execs.get_mut(&number) {
                    exec.keep();
                }
                self.settle(number);
            }
            for (key, connection) in std::mem::take(&mut self.connections) {
                self.disown(key, connection, true);
            }
            self.life = None;
            self.platform.apply(&life)?;
            self.life = Some(life);
        }
        if self.listener.is_none() {
            let stage = ReadyStage::Listen;
            let socket = self
                .platform
                .listen()
                .map_err(Unready::at(stage, "listen"))?;
            let source = self
                .registrar
                .register(socket, Interest::READ, Token::Listener);
            let unwatched = |_| Unready {
                stage,
                what: "epoll",
                errno: Errno::NOMEM,
            };
            self.listener = Some(source.map_err(unwatched)?);
        }
        Ok(())
    }

    /// Closes a session. The numbers of its own execs that run on come back, or these are kept, with what has not been
    /// told of those that have ended.
    fn disown(&mut self, key: u64, mut connection: Connection, keep: bool) -> Vec<u64> {
        rearm(
            &mut self.timers,
            &mut connection.timer,
            None,
            self.epoch,
            Due::Session(key),
        );
        let mut running = Vec::new();
        for (id, number) in connection.ids {
            let Some(exec) = self.execs.get_mut(&number) else {
                continue;
            };
            if exec.owner == Some((key, id)) {
                if keep {
                    exec.keep();
                } else if !exec.ended {
                    running.push(number);
                }
            }
            self.unlink(number, (key, id));
        }
        running
    }

    /// The life is still the same: what was lost before that was asked is lost indeed.
    fn confirmed(&mut self) {
        for number in std::mem::take(&mut self.lost) {
            self.exec(number, |running, _, now| {
                running.state.cancel(CancelReason::ClientLost, 0, now);
            });
        }
    }

    /// What the environment of every workload says of this life.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        self.life
            .as_ref()
            .map(|life| identity::environment(life).to_vec())
            .unwrap_or_default()
    }

    pub(crate) fn arm_session(&mut self, key: u64) {
        if let Some(connection) = self.connections.get_mut(&key) {
            let due = connection.deadline();
            rearm(
                &mut self.timers,
                &mut connection.timer,
                due,
                self.epoch,
                Due::Session(key),
            );
        }
    }
}

fn instant(epoch: Instant, at: u64) -> Instant {
    // Deadlines are bounded by a year; should the clock not hold one, it is as good as never.
    let year = Duration::from_secs(366 * 24 * 3600);
    epoch
        .checked_add(Duration::from_nanos(at))
        .unwrap_or_else(|| epoch + year)
}

/// Moves a timer to where it is due, if it is not there.
pub(crate) fn rearm(
    timers: &mut Timers<Due>,
    timer: &mut Option<(u64, TimerId)>,
    due: Option<u64>,
    epoch: Instant,
    what: Due,
) {
    if timer.map(|(at, _)| at) == due {
        return;
    }
    if let Some((_, id)) = timer.take() {
        timers.cancel(id);
    }
    *timer = due.map(|at| (at, timers.insert(instant(epoch, at), what)));
}
