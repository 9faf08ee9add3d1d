//! All connections of one guest: who owns which pair of ports, and which packets are owed. Pure: no
//! I/O.
//!
//! ```text
//!   TX packet --> on_packet --> Verdict for the host's side (connect, write, shut down, close)
//!   host side --> connect / accept / update / reset
//!   RX buffer <-- next_control: resets first, then what the connections owe, in turn
//! ```

use std::collections::{HashMap, HashSet, VecDeque};

use super::connection::{Connection, Effect, Origin};
use super::header::{HOST_CID, Header, MAX_PAYLOAD, Op, TYPE_STREAM};

/// Ports given to clients on the host start here: far from any that a server would choose.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Resets owed to the guest for connections that do not exist. A guest that provokes more than this
/// without taking any is not owed the rest.
const MAX_RESETS: usize = 1024;

/// How many connections get the large window; beyond that the small one bounds memory.
const LARGE_WINDOWS: usize = 32;

/// What names a connection; the guest's address is fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Port on the host's side.
    pub host_port: u32,
    /// Port in the guest.
    pub guest_port: u32,
}

/// Bounds of the muxer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once.
    pub connections: usize,
    /// Buffer for what the guest sends, in bytes: that of the first 32 connections at once.
    pub large_window: u32,
    /// The same for all others.
    pub small_window: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            large_window: 256 * 1024,
            small_window: MAX_PAYLOAD,
        }
    }
}

/// What a packet of the guest asks of the host's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: it was dropped, or answered by a reset.
    Nothing,
    /// Connect to the host's port, then [`Muxer::accept`] or [`Muxer::refuse`].
    Request(Key),
    /// The guest has accepted what a client on the host asked for.
    Established(Key),
    /// Write this many bytes of the payload to the host's socket.
    Data(Key, u32),
    /// There may be credit again.
    Credit(Key),
    /// A direction has ended; look at the connection.
    Ended(Key),
    /// The guest is done both ways, its reset is on the way and the connection is gone: flush and
    /// close.
    Finished(Key),
    /// The connection is gone: close.
    Closed(Key),
}

/// No more connections can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {0} connections are in use")]
pub struct Full(pub usize);

/// The connections.
#[derive(Debug)]
pub struct Muxer {
    guest_cid: u64,
    limits: Limits,
    connections: HashMap<Key, Connection>,
    /// Ports that clients on the host were given: freed by the end of the connection that owns
    /// them, never by one of the guest's making that happens to use the same number.
    host_ports: HashSet<u32>,
    next_host_port: u32,
    resets: VecDeque<Header>,
    /// Connections that may owe something, each once.
    owing: VecDeque<Key>,
    owing_set: HashSet<Key>,
    resets_dropped: u64,
}

impl Muxer {
    /// No connections.
    #[must_use]
    pub fn new(guest_cid: u64, limits: Limits) -> Self {
        Self {
            guest_cid,
            limits,
            connections: HashMap::new(),
            host_ports: HashSet::new(),
            next_host_port: FIRST_HOST_PORT,
            resets: VecDeque::new(),
            owing: VecDeque::new(),
            owing_set: HashSet::new(),
            resets_dropped: 0,
        }
    }

    /// Number of connections.
    #[must_use]
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// True without connections.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// One connection.
    #[must_use]
    pub fn connection(&self, key: Key) -> Option<&Connection> {
        self.connections.get(&key)
    }

    /// Takes a packet of the guest whose `payload` bytes are really there.
    pub fn on_packet(&mut self, header: &Header, payload: usize) -> Verdict {
        // Not ours to answer: no such host, or not this guest (section 5.10.6.4.2).
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            return Verdict::Nothing;
        }
        let key = Key {
            host_port: header.dst_port,
            guest_port: header.src_port,
        };
        let op = Op::from_wire(header.op);
        if header.kind != TYPE_STREAM {
            // Of a type that was not offered: refused in its own type (section 5.10.6.4.2).
            if op != Some(Op::Reset) {
                self.owe_reset(key, header.kind);
            }
            return Verdict::Nothing;
        }
        let Some(connection) = self.connections.get_mut(&key) else {
            return match op {
                Some(Op::Request) => Verdict::Request(key),
                // A reset is never answered, or two sides could go on for ever.
                Some(Op::Reset) => Verdict::Nothing,
                _ => {
                    self.owe_reset(key, TYPE_STREAM);
                    Verdict::Nothing
                }
            };
        };
        match connection.on_packet(header, payload) {
            Ok(Effect::Established) => Verdict::Established(key),
            Ok(Effect::Data(length)) => Verdict::Data(key, length),
            Ok(Effect::Credit) => {
                self.note(key);
                Verdict::Credit(key)
            }
            Ok(Effect::Ended) => Verdict::Ended(key),
            Ok(Effect::Finished) => {
                self.reset(key);
                Verdict::Finished(key)
            }
            Ok(Effect::Reset) => {
                self.remove(key);
                Verdict::Closed(key)
            }
            Err(violation) => {
                tracing::debug!(?key, %violation, "connection reset");
                self.reset(key);
                Verdict::Closed(key)
            }
        }
    }

    /// Asks the guest for a connection to its port `guest_port`.
    ///
    /// # Errors
    /// [`Full`].
    pub fn connect(&mut self, guest_port: u32) -> Result<Key, Full> {
        let window = self.window()?;
        let host_port = self.take_host_port();
        let key = Key {
            host_port,
            guest_port,
        };
        self.connections.insert(key, Connection::requested(window));
        self.note(key);
        Ok(key)
    }

    /// The host's socket has taken the connection that `request` asked for. False if it cannot be:
    /// it is refused then.
    #[must_use]
    pub fn accept(&mut self, key: Key, request: &Header) -> bool {
        let accepted = self
            .window()
            .ok()
            .and_then(|window| Connection::accepted(window, request).ok());
        let Some(connection) = accepted else {
            self.refuse(key);
            return false;
        };
        self.connections.insert(key, connection);
        self.note(key);
        true
    }

    /// Refuses a connection that the guest asked for.
    pub fn refuse(&mut self, key: Key) {
        self.owe_reset(key, TYPE_STREAM);
    }

    /// Changes a connection; what it owes afterwards will be sent. `None` if it is gone.
    pub fn update<T>(&mut self, key: Key, change: impl FnOnce(&mut Connection) -> T) -> Option<T> {
        let connection = self.connections.get_mut(&key)?;
        let result = change(connection);
        if connection.owes() {
            self.note(key);
        }
        Some(result)
    }

    /// Resets a connection from our side.
    pub fn reset(&mut self, key: Key) {
        let Some(connection) = self.remove(key) else {
            return;
        };
        // A guest that has never heard of it is not told.
        let mut connection = connection;
        if connection.is_open() || connection.next_control() != Some((Op::Request, 0)) {
            self.owe_reset(key, TYPE_STREAM);
        }
    }

    /// True if a packet without data is owed to the guest.
    pub fn has_control(&mut self) -> bool {
        while let Some(key) = self.owing.front() {
            if self.connections.get(key).is_some_and(Connection::owes) {
                return true;
            }
            self.owing_set.remove(key);
            self.owing.pop_front();
        }
        !self.resets.is_empty()
    }

    /// Takes the next packet without data that is owed.
    pub fn next_control(&mut self) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(key) = self.owing.pop_front() {
            self.owing_set.remove(&key);
            let Some(connection) = self.connections.get_mut(&key) else {
                continue;
            };
            let Some((op, flags)) = connection.next_control() else {
                continue;
            };
            let header = self.header(key, op, flags, 0);
            // To the back of the line with what else it owes.
            if self.connections.get(&key).is_some_and(Connection::owes) {
                self.note(key);
            }
            return header;
        }
        None
    }

    /// The header for `length` bytes of data to the guest, which count as sent. `None` if the
    /// connection is gone.
    pub fn data_header(&mut self, key: Key, length: u32) -> Option<Header> {
        self.connections.get_mut(&key)?.sent(length);
        self.header(key, Op::ReadWrite, 0, length)
    }

    /// Forgets everything: the device was reset.
    pub fn clear(&mut self) {
        self.connections.clear();
        self.host_ports.clear();
        self.resets.clear();
        self.owing.clear();
        self.owing_set.clear();
    }

    /// How many resets were never sent as the guest took none.
    #[must_use]
    pub fn resets_dropped(&self) -> u64 {
        self.resets_dropped
    }

    /// Length of all lists, for tests.
    #[cfg(test)]
    pub(super) fn pending(&self) -> usize {
        self.owing.len() + self.owing_set.len() + self.resets.len()
    }

    fn header(&mut self, key: Key, op: Op, flags: u32, len: u32) -> Option<Header> {
        let (buf_alloc, fwd_cnt) = self.connections.get_mut(&key)?.stamp();
        Some(Header {
            op: op.to_wire(),
            flags,
            len,
            buf_alloc,
            fwd_cnt,
            ..self.addressed(key, TYPE_STREAM)
        })
    }

    fn addressed(&self, key: Key, kind: u16) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.guest_cid,
            src_port: key.host_port,
            dst_port: key.guest_port,
            kind,
            ..Header::default()
        }
    }

    fn owe_reset(&mut self, key: Key, kind: u16) {
        if self.resets.len() == MAX_RESETS {
            self.resets_dropped += 1;
            return;
        }
        let reset = Header {
            op: Op::Reset.to_wire(),
            ..self.addressed(key, kind)
        };
        self.resets.push_back(reset);
    }

    fn note(&mut self, key: Key) {
        if self.owing_set.insert(key) {
            self.owing.push_back(key);
        }
    }

    fn remove(&mut self, key: Key) -> Option<Connection> {
        let connection = self.connections.remove(&key)?;
        if self.owing_set.remove(&key) {
            // Or connections that come and go while the guest takes no packet would pile up here.
            self.owing.retain(|owing| *owing != key);
        }
        if connection.origin() == Origin::Host {
            self.host_ports.remove(&key.host_port);
        }
        Some(connection)
    }

    fn window(&self) -> Result<u32, Full> {
        if self.connections.len() >= self.limits.connections {
            return Err(Full(self.limits.connections));
        }
        Ok(if self.connections.len() < LARGE_WINDOWS {
            self.limits.large_window
        } else {
            self.limits.small_window
        })
    }

    /// A port that no client has, rotating, so that a late packet of a former connection meets
    /// none.
    fn take_host_port(&mut self) -> u32 {
        // Ends: there are 2^30 times more ports than connections.
        loop {
            let port = self.next_host_port;
            self.next_host_port = match port.checked_add(1) {
                // The last number means "any port".
                Some(u32::MAX) | None => FIRST_HOST_PORT,
                Some(next) => next,
            };
            if self.host_ports.insert(port) {
                return port;
            }
        }
    }
}

#[cfg(test)]
mod tests;
