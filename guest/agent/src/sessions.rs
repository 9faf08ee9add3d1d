//! Session sockets: bytes in and out of the session's state machine.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::Shutdown;
use vmm_events::{Answer, Interest, Readiness, Source, TimerId};
use vmm_protocol::exec::Exec as ExecState;
use vmm_protocol::session::{AgentSession, Execs as ExecsOf, Request};
use vmm_protocol::{ExecRequest, GenerationId, GoodbyeCode, Hello};

use crate::agent::Agent;
use crate::cgroup::Leaf;
use crate::execs::{Exec, Execs};
use crate::platform::Platform;
use crate::running::{Running, Surroundings};

/// Reads of one socket in one turn of the loop: then the others have theirs.
const READS_A_TURN: usize = 8;
/// Writes of one socket in one turn of the loop.
const WRITES_A_TURN: usize = 8;

/// One session and its socket.
pub(crate) struct Connection {
    pub(crate) session: AgentSession,
    /// The client's request ids, and the execs' numbers.
    pub(crate) ids: BTreeMap<u64, u64>,
    pub(crate) timer: Option<(u64, TimerId)>,
    source: Source<OwnedFd>,
    /// The socket takes no more for now.
    blocked: bool,
    end: End,
}

/// How far a session is from its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// It goes on.
    Open,
    /// It is closed once what is queued went as far as it goes.
    Close,
    /// It is half-closed once all that is queued is written, and closed when the client hangs up.
    Part,
    /// Half-closed.
    Parted,
}

/// The execs of one session, by its ids.
struct View<'a, L: Leaf> {
    ids: &'a BTreeMap<u64, u64>,
    execs: &'a Execs<L>,
}

impl<L: Leaf> ExecsOf for View<'_, L> {
    fn exec(&self, id: u64) -> Option<&ExecState> {
        Some(&self.execs.get(self.ids.get(&id)?)?.running.state)
    }
}

/// The socket is of no use any more.
struct Dead;

impl Connection {
    pub(crate) fn new(source: Source<OwnedFd>, generation: GenerationId, now: u64) -> Self {
        Self {
            session: AgentSession::new(Hello::new(generation), now),
            ids: BTreeMap::new(),
            timer: None,
            source,
            blocked: false,
            end: End::Open,
        }
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        self.session.deadline()
    }

    /// True until it is on its way to its end.
    pub(crate) fn goes_on(&self) -> bool {
        self.end == End::Open
    }

    /// Ends it with a reason: that is the last that is written.
    pub(crate) fn end(&mut self, code: GoodbyeCode, message: &str) {
        self.session.goodbye(code, message);
        self.end = End::Close;
    }

    /// Ends it with a reason, and leaves the client the time to read all that was said.
    pub(crate) fn part(&mut self, code: GoodbyeCode, message: &str) {
        self.session.goodbye(code, message);
        self.end = End::Part;
    }

    fn parting(&self) -> bool {
        matches!(self.end, End::Part | End::Parted)
    }

    /// Writes what there is as far as it goes.
    fn try_write<L: Leaf>(&mut self, execs: &Execs<L>, now: u64) -> Result<(), Dead> {
        let view = View {
            ids: &self.ids,
            execs,
        };
        for _ in 0..WRITES_A_TURN {
            // Nothing more is queued for a socket that is full: what an exec has meanwhile stays
            // in its store and goes out in large frames later.
            if self.blocked {
                break;
            }
            self.session.fill(&view);
            let Ok(slices) = self.session.gather(&view) else {
                return Err(Dead);
            };
            if slices.is_empty() {
                break;
            }
            match rustix::io::writev(self.source.inner(), &slices) {
                Ok(count) => {
                    drop(slices);
                    self.session.wrote(count, now);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.blocked = true;
                    break;
                }
                Err(_) => return Err(Dead),
            }
        }
        if self.end == End::Part && self.session.queued() == 0 {
            self.end = End::Parted;
            rustix::net::shutdown(self.source.inner(), Shutdown::Write).map_err(|_| Dead)?;
        }
        self.watch()
    }

    fn watch(&self) -> Result<(), Dead> {
        let interest = Interest::NONE
            .with(Interest::READ, self.session.wants_read() || self.parting())
            .with(Interest::WRITE, self.session.queued() > 0);
        self.source.modify(interest).map_err(|_| Dead)
    }
}

impl<P: Platform> Agent<'_, P> {
    /// A session's socket is readable or writable.
    pub(crate) fn session_ready(&mut self, key: u64, readiness: Readiness) -> Answer {
        let Some(mut connection) = self.connections.remove(&key) else {
            return Answer::Unhandled;
        };
        connection.blocked &= !readiness.writable();
        let result = self.receive(key, &mut connection);
        self.keep(key, connection, result);
        Answer::Handled
    }

    /// Reads and acts until nothing has come, in this turn's share.
    fn receive(&mut self, key: u64, connection: &mut Connection) -> Result<(), Dead> {
        for _ in 0..READS_A_TURN {
            let space = match connection.parting() {
                // It is heard no more, only watched until it hangs up.
                true => &mut *self.scratch,
                false if connection.session.wants_read() => connection.session.space(),
                false => return Ok(()),
            };
            match rustix::io::read(connection.source.inner(), space) {
                Ok(0) => return Err(Dead),
                Ok(_) if connection.parting() => {}
                Ok(count) => {
                    let now = self.now();
                    connection.session.filled(count, now);
                    self.act(key, connection);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(_) => return Err(Dead),
            }
        }
        Ok(())
    }

    /// Writes what a session has to say. Reading may go on once it was heard.
    pub(crate) fn flush(&mut self, key: u64) {
        if let Some(connection) = self.connections.remove(&key) {
            self.keep(key, connection, Ok(()));
        }
    }

    /// Writes, releases what was written, and puts the connection back if it goes on.
    fn keep(&mut self, key: u64, mut connection: Connection, mut result: Result<(), Dead>) {
        loop {
            let now = self.now();
            let paused = !connection.session.wants_read();
            if result.is_ok() {
                result = connection.try_write(&self.execs, now);
            }
            for id in connection.session.finished() {
                if let Some(number) = connection.ids.remove(&id) {
                    self.unlink(number, (key, id));
                }
            }
            if result.is_ok()
                && paused
                && connection.session.wants_read()
                && connection.end == End::Open
            {
                // Requests that waited, whole, in the session's buffer.
                self.act(key, &mut connection);
                continue;
            }
            break;
        }
        if result.is_err() || connection.end == End::Close {
            self.session_lost(connection, key);
        } else {
            self.connections.insert(key, connection);
            self.arm_session(key);
        }
    }

    pub(crate) fn session_due(&mut self, key: u64) {
        let Some(mut connection) = self.connections.remove(&key) else {
            return;
        };
        connection.timer = None;
        let now = self.now();
        if let Err(violation) = connection.session.tick(now) {
            connection.session.end(&violation);
            connection.end = End::Close;
        }
        self.keep(key, connection, Ok(()));
    }

    /// Acts on every request that has come whole.
    fn act(&mut self, key: u64, connection: &mut Connection) {
        loop {
            let now = self.now();
            let request = match connection.session.next() {
                Ok(Some(request)) => request,
                Ok(None) => return,
                Err(violation) => {
                    self.log
                        .info(format_args!("session {key} ends: {}", violation.describe()));
                    connection.session.end(&violation);
                    connection.end = End::Close;
                    return;
                }
            };
            let (id, number) = match request {
                Request::Exec { id, request } => {
                    self.start(key, connection, id, &request);
                    continue;
                }
                // Its exec is needed until all that was queued of it is written.
                Request::Detach { .. } => continue,
                Request::Ask { id, ask } => {
                    self.asked(key, connection, id, ask);
                    continue;
                }
                Request::Stdin { id, .. }
                | Request::StdinClose { id }
                | Request::Signal { id, .. }
                | Request::Resize { id, .. }
                | Request::Cancel { id, .. }
                | Request::Consumed { id, .. } => (id, connection.ids.get(&id).copied()),
            };
            let Some(number) = number else { continue };
            let Some(exec) = self.execs.get_mut(&number) else {
                continue;
            };
            let running = &mut exec.running;
            match request {
                Request::Stdin { data, .. } => running.push_stdin(data),
                Request::StdinClose { .. } => running.close_stdin(),
                Request::Signal { signal, .. } => running.signal(signal),
                Request::Resize { size, .. } => running.resize(size),
                Request::Cancel {
                    reason, grace_ns, ..
                } => {
                    running.state.cancel(reason, grace_ns, now);
                }
                Request::Consumed { bytes, .. } => {
                    if let Some(Some(reader)) = exec.links.get(&(key, id)) {
                        running.state.acknowledge(*reader, bytes);
                    }
                }
                _ => {}
            }
            self.settle(number);
            // Others may wait for what this has brought about.
            if self
                .execs
                .get(&number)
                .is_some_and(|exec| exec.links.len() > 1)
            {
                self.flush_links(number);
            }
            // The connection is in hand here, not in the map where settling looks for it.
            if let Some(exec) = self.execs.get_mut(&number) {
                connection
                    .session
                    .grant_stdin(id, exec.running.take_credit());
            }
        }
    }

    fn start(&mut self, key: u64, connection: &mut Connection, id: u64, request: &ExecRequest) {
        if let Err(refusal) = self.admit(request) {
            return connection.session.refuse(id, refusal);
        }
        let now = self.now();
        let environment = self.environment();
        self.last_exec += 1;
        let number = self.last_exec;
        let confine = self.platform.confine();
        let surroundings = Surroundings {
            hierarchy: self.platform.hierarchy(),
            registrar: &self.registrar,
            reaper: &mut self.reaper,
            environment: &environment,
            confine,
        };
        let running = Running::start(number, request, surroundings, now);
        self.store_bytes += running.store_bytes;
        connection.ids.insert(id, number);
        self.execs
            .insert(number, Exec::new(running, (key, id), request.detached));
        self.settle(number);
    }
}
