//! The loop's side of the device: sockets, deadlines and what each event means.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vmm_events::{Answer, Interest, Readiness, Registrar, Source, TimerId, Timers};

use super::clients::{self, Clients, Progress};
use super::connection::Connection;
use super::handshake::{self, Asked, Refusal, Situation};
use super::header::Header;
use super::muxer::{Key, Muxer};
use super::outbox::{Account, Outbox};
use super::shared::Shared;
use super::stream::{Greeting, Reading, Stream};
use super::{ControlSink, CreateError, Deadlines, Fence, Token, VsockConfig};
use crate::sparse::Sparse;
use crate::virtio::Kick;

/// Guest ports below this one take a privilege that workloads do not have.
const PRIVILEGED_PORTS: u32 = 1024;

/// Adds descriptors to the loop, whatever its tokens are.
pub(super) trait Register: Send {
    fn register(
        &self,
        fd: OwnedFd,
        interest: Interest,
        token: Token,
    ) -> Result<Source<OwnedFd>, vmm_events::Error>;
}

impl<T: From<Token> + Clone + Send + 'static> Register for Registrar<T> {
    fn register(
        &self,
        fd: OwnedFd,
        interest: Interest,
        token: Token,
    ) -> Result<Source<OwnedFd>, vmm_events::Error> {
        Registrar::register(self, fd, interest, token.into())
    }
}

/// What the device has done so far; for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets taken from the guest.
    pub tx_packets: u64,
    /// Payload bytes taken from the guest.
    pub tx_bytes: u64,
    /// Packets given to the guest.
    pub rx_packets: u64,
    /// Payload bytes given to the guest.
    pub rx_bytes: u64,
    /// Packets dropped as they were too short.
    pub malformed: u64,
    /// Clients refused with a typed answer.
    pub refusals: u64,
}

/// The loop's side of the device. Whoever owns the loop calls, in each round:
///
/// 1. [`VsockHost::timeout`] for how long to wait,
/// 2. [`VsockHost::dispatch`] for each event whose token is this device's, giving its answer to the
///    poller,
/// 3. [`VsockHost::settle`] once, which does the work on the queues.
pub struct VsockHost {
    pub(super) muxer: Muxer,
    pub(super) streams: HashMap<Key, Stream>,
    /// Streams that have data for the guest, or did when last seen; each once, in turn.
    pub(super) readable: VecDeque<Key>,
    pub(super) counters: Counters,
    /// Streams whose interest may have changed.
    pub(super) touched: Vec<Key>,
    pub(super) now: Instant,
    shared: Arc<Shared>,
    kicks: Vec<Kick>,
    /// Keeps the doorbells registered.
    _bells: Vec<Source<OwnedFd>>,
    pub(super) register: Box<dyn Register>,
    clients: Clients,
    /// Connections whose host side is over and whose guest has not answered.
    pub(super) closing: HashMap<Key, TimerId>,
    pub(super) lingering: HashMap<u64, (Source<OwnedFd>, Outbox)>,
    pub(super) next_lingering: u64,
    held: Account,
    pub(super) timers: Timers<Deadline>,
    epoch: u64,
    more: bool,
    control: Option<Box<dyn ControlSink>>,
    pub(super) control_connection: Option<Key>,
    fence: Fence,
    agent_ready: Arc<AtomicBool>,
    agent_port: u32,
    control_port: u32,
    socket: PathBuf,
    guest_ports: BTreeMap<u32, PathBuf>,
    max_connections: usize,
    failures: Sparse,
    control_refused: Sparse,
    pub(super) deadlines: Deadlines,
}

/// What to do when a time has come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Deadline {
    /// The guest has not answered a client's request.
    Connect(Key),
    /// The guest has not answered the end of a connection.
    Close(Key),
}

impl VsockHost {
    pub(super) fn new<T>(
        config: VsockConfig,
        kicks: Vec<Kick>,
        shared: Arc<Shared>,
        registrar: Registrar<T>,
    ) -> Result<Self, CreateError>
    where
        T: From<Token> + Clone + Send + 'static,
    {
        let register: Box<dyn Register> = Box::new(registrar);
        let bells = kicks
            .iter()
            .enumerate()
            .map(|(index, kick)| {
                let bell = kick
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(CreateError::Kick)?;
                register
                    .register(bell, Interest::READ, Token::Kick(index))
                    .map_err(CreateError::Register)
            })
            .collect::<Result<_, _>>()?;
        let clients = Clients::bind(
            config.socket.clone(),
            config.half_open,
            config.deadlines,
            &*register,
        )?;
        Ok(Self {
            muxer: Muxer::new(config.guest_cid, config.limits),
            streams: HashMap::new(),
            readable: VecDeque::new(),
            counters: Counters::default(),
            touched: Vec::new(),
            now: Instant::now(),
            shared,
            kicks,
            _bells: bells,
            register,
            clients,
            closing: HashMap::new(),
            lingering: HashMap::new(),
            next_lingering: 0,
            held: Account::default(),
            timers: Timers::new(),
            epoch: 0,
            more: false,
            control: config.control,
            control_connection: None,
            fence: config.fence,
            agent_ready: config.agent_ready,
            agent_port: config.agent_port,
            control_port: config.control_port,
            socket: config.socket,
            guest_ports: config.guest_ports,
            max_connections: config.limits.connections,
            failures: Sparse::default(),
            control_refused: Sparse::default(),
            deadlines: config.deadlines,
        })
    }

    /// How long the loop may sleep.
    #[must_use]
    pub fn timeout(&self, now: Instant) -> Option<Duration> {
        if self.more {
            return Some(Duration::ZERO);
        }
        let clients = self.clients.deadline();
        let clients = clients.map(|deadline| deadline.saturating_duration_since(now));
        [clients, self.timers.timeout(now)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Takes one event.
    pub fn dispatch(&mut self, token: Token, readiness: Readiness, now: Instant) -> Answer {
        self.now = now;
        let handled = match token {
            // Drained whether the device runs or not (VS03); settle looks at all queues.
            Token::Kick(index) => self.kicks.get(index).is_some_and(Kick::take),
            Token::Listener => {
                self.clients.accept(&*self.register, now);
                true
            }
            Token::Client(id) => self.on_client(id),
            Token::Stream(key) => self.on_stream(key, readiness),
            Token::Lingering(id) => self.on_lingering(id),
        };
        if handled {
            Answer::Handled
        } else {
            Answer::Unhandled
        }
    }

    /// Does what the events of this round have made possible, a bounded amount of it.
    pub fn settle(&mut self, now: Instant) {
        self.now = now;
        self.expire();
        let shared = Arc::clone(&self.shared);
        let mut slot = shared.lock();
        if slot.epoch != self.epoch {
            self.epoch = slot.epoch;
            self.end_all();
        }
        self.more = false;
        if let Some(active) = &mut slot.active {
            match self.pump(active) {
                Ok(more) => self.more = more,
                Err(error) => {
                    if let Some(count) = self.failures.tell() {
                        tracing::warn!(%error, count, "vsock needs a reset");
                    }
                    active.interrupt.signal_needs_reset();
                    slot.active = None;
                    self.end_all();
                }
            }
        }
        drop(slot);
        // Even when the loop goes on at once: a guest that keeps it busy for ever must not keep it
        // from noticing the others.
        self.watch();
    }

    /// What the device has done so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Connections, those that only flush their last bytes included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.muxer.len() + self.lingering.len()
    }

    /// Clients that have not sent their line.
    #[must_use]
    pub fn half_open(&self) -> usize {
        self.clients.len()
    }

    /// What the device holds for sockets that do not take it, in bytes.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// For tests as an ordinary user: as if the sandbox were another's.
    #[cfg(test)]
    pub(super) fn pretend_owner(&mut self, owner: u32) {
        self.clients.pretend_owner(owner);
    }

    /// Length of all lists of work, for tests.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.readable.len() + self.touched.len() + self.timers.len() + self.muxer.pending()
    }

    // Clients: from the line to the guest's answer.

    fn on_client(&mut self, id: u64) -> bool {
        match self.clients.read(id) {
            None => return false,
            Some(Progress::Waiting) => return true,
            Some(Progress::Gone) => {}
            Some(Progress::Line(line, socket)) => {
                let situation = Situation {
                    fence: &self.fence,
                    agent_port: self.agent_port,
                    agent_ready: self.agent_ready.load(Ordering::SeqCst),
                    active: self.shared.lock().active.is_some(),
                };
                let result = situation.judge(&line);
                match result {
                    Ok(asked) => self.connect_guest(asked, socket),
                    Err(refusal) => self.refuse(socket, refusal),
                }
            }
        }
        self.clients.resume();
        true
    }

    fn connect_guest(&mut self, asked: Asked, socket: OwnedFd) {
        let key = match self.muxer.connect(asked.port) {
            Ok(key) if self.connections() <= self.max_connections => key,
            Ok(key) => {
                self.muxer.reset(key);
                return self.refuse(socket, Refusal::Refused("too many connections"));
            }
            Err(_) => return self.refuse(socket, Refusal::Refused("too many connections")),
        };
        // Not watched until the guest has answered: what the client sends meanwhile stays in the
        // socket.
        match self
            .register
            .register(socket, Interest::NONE, Token::Stream(key))
        {
            Ok(source) => {
                let deadline = self.now + self.deadlines.connect;
                let timer = self.timers.insert(deadline, Deadline::Connect(key));
                let tagged = asked.tagged;
                let greeting = Some(Greeting { tagged, timer });
                self.add_stream(key, source, greeting);
            }
            Err(error) => {
                tracing::debug!(%error, "cannot watch a client");
                self.muxer.reset(key);
            }
        }
    }

    fn add_stream(&mut self, key: Key, source: Source<OwnedFd>, greeting: Option<Greeting>) {
        let window = self.muxer.connection(key).map_or(0, Connection::window);
        let stream = Stream::new(source, greeting, window, &self.held);
        self.streams.insert(key, stream);
    }

    pub(super) fn refuse(&mut self, socket: impl AsFd, refusal: Refusal) {
        self.counters.refusals += 1;
        clients::answer(socket, &refusal.to_string());
    }

    /// The guest has accepted a client's connection.
    pub(super) fn on_established(&mut self, key: Key) {
        let Some(stream) = self.streams.get_mut(&key) else {
            return;
        };
        let Some(greeting) = stream.greeting.take() else {
            return;
        };
        self.timers.cancel(greeting.timer);
        let counter = greeting.tagged.then_some(self.fence.counter);
        let line = handshake::accepted(key.host_port, counter);
        if !clients::answer(stream.source.inner(), &line) {
            // It has closed already; what it sent before still goes to the guest (VS08).
            self.muxer
                .update(key, |connection| connection.host_stopped_receiving(false));
        }
        self.make_readable(key);
    }

    // Servers: what the guest dials.

    /// The guest asks for a connection.
    pub(super) fn on_request(&mut self, key: Key, request: &Header) {
        let is_control = key.host_port == self.control_port;
        let socket = if self.connections() >= self.max_connections {
            None
        } else if is_control {
            self.control_socket(key)
        } else {
            self.server_socket(key.host_port)
        };
        // Watched from the first settle on.
        let source = socket.and_then(|socket| {
            self.register
                .register(socket, Interest::NONE, Token::Stream(key))
                .ok()
        });
        let Some(source) = source else {
            return self.muxer.refuse(key);
        };
        if self.muxer.accept(key, request) {
            if is_control {
                self.control_connection = Some(key);
            }
            self.add_stream(key, source, None);
            self.touched.push(key);
        }
    }

    /// Our end of a new control connection: one at a time, and only from a port that takes
    /// privilege.
    fn control_socket(&mut self, key: Key) -> Option<OwnedFd> {
        if key.guest_port >= PRIVILEGED_PORTS || self.control_connection.is_some() {
            if let Some(count) = self.control_refused.tell() {
                let port = key.guest_port;
                tracing::warn!(port, count, "control connection refused");
            }
            return None;
        }
        let sink = self.control.as_mut()?;
        let (ours, theirs) = UnixStream::pair().ok()?;
        theirs.set_nonblocking(true).ok()?;
        sink.connected(theirs);
        Some(ours.into())
    }

    /// Connects to who serves a port of the guest's dialling. A unix socket answers at once:
    /// connected, nobody there, or its backlog full, which counts as nobody (VS12).
    fn server_socket(&self, port: u32) -> Option<OwnedFd> {
        let path = self.guest_ports.get(&port).cloned().unwrap_or_else(|| {
            let mut path = self.socket.clone().into_os_string();
            path.push(format!("_{port}"));
            path.into()
        });
        let address = SocketAddrUnix::new(&path).ok()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        let connected = rustix::net::connect(&socket, &address);
        connected
            .inspect_err(|error| tracing::debug!(port, %error, "nobody serves the port"))
            .ok()?;
        Some(socket)
    }

    // Events of a connection's socket.

    fn on_stream(&mut self, key: Key, readiness: Readiness) -> bool {
        let (Some(stream), Some(connection)) = (self.streams.get(&key), self.muxer.connection(key))
        else {
            return false;
        };
        let queued = !stream.outbox.is_empty();
        let reads = connection.reads_host();
        let mut handled = false;
        if reads && readiness.readable() {
            // In line already, or out of credit, it is watched until the next settle at most.
            if stream.reading == Reading::Idle {
                self.make_readable(key);
            }
            handled = true;
        }
        if queued && (readiness.writable() || readiness.hung_up()) {
            self.flush(key);
            handled = true;
        }
        if !reads && !queued && (readiness.hung_up() || readiness.failed()) {
            // Both sides of the socket are over: nobody is there for what the guest may still send.
            self.host_gone(key);
            handled = true;
        }
        handled
    }

    fn on_lingering(&mut self, id: u64) -> bool {
        let Some((source, outbox)) = self.lingering.get_mut(&id) else {
            return false;
        };
        if outbox.flush(source.inner().as_fd()).is_err() || outbox.is_empty() {
            self.lingering.remove(&id);
        }
        true
    }

    /// Puts a stream in the line of those with data for the guest.
    pub(super) fn make_readable(&mut self, key: Key) {
        if let Some(stream) = self.streams.get_mut(&key)
            && stream.reading != Reading::Ready
        {
            stream.reading = Reading::Ready;
            self.readable.push_back(key);
        }
        self.touched.push(key);
    }

    /// The device was reset or has failed: all its connections are over.
    fn end_all(&mut self) {
        let keys: Vec<Key> = self.streams.keys().copied().collect();
        for key in keys {
            self.closed(key, Refusal::NotReady("the guest's driver was reset"));
        }
        for (_, timer) in self.closing.drain() {
            self.timers.cancel(timer);
        }
        self.control_connection = None;
        self.touched.clear();
        self.muxer.clear();
    }

    fn expire(&mut self) {
        self.clients.expire(self.now);
        while let Some(deadline) = self.timers.expired(self.now) {
            match deadline {
                Deadline::Connect(key) => {
                    self.muxer.reset(key);
                    self.closed(key, Refusal::NotReady("the guest did not answer in time"));
                }
                Deadline::Close(key) => self.reset(key),
            }
        }
    }

    /// States to the loop what each changed stream waits for.
    fn watch(&mut self) {
        for key in std::mem::take(&mut self.touched) {
            let (Some(stream), Some(connection)) =
                (self.streams.get(&key), self.muxer.connection(key))
            else {
                continue;
            };
            if let Err(error) = stream.source.modify(stream.interest(connection)) {
                tracing::warn!(%error, ?key, "cannot watch a connection");
                self.reset(key);
            }
        }
    }
}

impl Drop for VsockHost {
    fn drop(&mut self) {
        self.end_all();
    }
}

impl fmt::Debug for VsockHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockHost")
            .field("connections", &self.connections())
            .field("half_open", &self.half_open())
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}
