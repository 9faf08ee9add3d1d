//! Clients on the host that have not yet got a connection: the listening socket and the half-open
//! ones.
//!
//! They are bounded in number and in time (VS14). With all places taken a new client gets that of
//! the oldest, if that has been silent for a while; before that it waits in the listener's backlog.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use vmm_events::{Interest, Source};

use super::handshake::{MAX_LINE, Refusal};
use super::host::Register;
use super::io::retry;
use super::{CreateError, Deadlines, Token};
use crate::sparse::Sparse;

/// Clients accepted in one go.
const ACCEPT_BATCH: usize = 64;
/// How long the listener rests when no descriptor is left.
const REST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Clients {
    path: PathBuf,
    listener: Source<OwnedFd>,
    waiting: BTreeMap<u64, Client>,
    next: u64,
    places: usize,
    deadlines: Deadlines,
    owner: u32,
    /// When the listener, deaf for lack of places or descriptors, may be heard again.
    rest: Option<Instant>,
    failures: Sparse,
}

#[derive(Debug)]
struct Client {
    source: Source<OwnedFd>,
    line: Vec<u8>,
    since: Instant,
}

/// What has become of a client that had something to say.
#[derive(Debug)]
pub(super) enum Progress {
    /// Not the whole line yet.
    Waiting,
    /// It has gone, or is refused: nothing to do.
    Gone,
    /// Its line, and the socket with whatever follows it still unread.
    Line(Vec<u8>, OwnedFd),
}

impl Clients {
    pub(super) fn bind(
        path: PathBuf,
        places: usize,
        deadlines: Deadlines,
        register: &dyn Register,
    ) -> Result<Self, CreateError> {
        let listener = bind(&path).map_err(|source| CreateError::Bind {
            path: path.clone(),
            source,
        })?;
        let listener = register
            .register(listener.into(), Interest::READ, Token::Listener)
            .map_err(CreateError::Register)
            .inspect_err(|_| drop(std::fs::remove_file(&path)))?;
        Ok(Self {
            path,
            listener,
            waiting: BTreeMap::new(),
            next: 0,
            places: places.max(1),
            deadlines,
            owner: rustix::process::geteuid().as_raw(),
            rest: None,
            failures: Sparse::default(),
        })
    }

    #[cfg(test)]
    pub(super) fn pretend_owner(&mut self, owner: u32) {
        self.owner = owner;
    }

    /// How many are waiting.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes new clients.
    pub(super) fn accept(&mut self, register: &dyn Register, now: Instant) {
        for _ in 0..ACCEPT_BATCH {
            if !self.make_room(now) {
                return;
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match retry(|| rustix::net::accept_with(self.listener.inner(), flags)) {
                Ok(socket) => self.admit(socket, register, now),
                Err(Errno::AGAIN) => return,
                // It has gone before it was its turn.
                Err(Errno::CONNABORTED) => {}
                Err(error) => {
                    // Out of descriptors or memory: the client stays in the backlog, which would
                    // wake the loop for ever.
                    if let Some(count) = self.failures.tell() {
                        tracing::warn!(%error, count, "cannot accept a client");
                    }
                    self.rest_until(now + REST);
                    return;
                }
            }
        }
    }

    /// Reads on at a client's line; `None` if there is no such client.
    pub(super) fn read(&mut self, id: u64) -> Option<Progress> {
        let client = self.waiting.get_mut(&id)?;
        let progress = match client.read_line() {
            Ok(false) => return Some(Progress::Waiting),
            Ok(true) => match client.source.inner().try_clone() {
                Ok(socket) => Progress::Line(std::mem::take(&mut client.line), socket),
                Err(_) => {
                    refuse(client, "no descriptor is left");
                    Progress::Gone
                }
            },
            Err(refusal) => {
                if let Some(refusal) = refusal {
                    answer(client.source.inner(), &refusal.to_string());
                }
                Progress::Gone
            }
        };
        self.waiting.remove(&id);
        Some(progress)
    }

    /// The next time at which [`Clients::expire`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        // Ids rise with time, so the first is the oldest.
        let oldest = self.waiting.first_key_value();
        let silent = oldest.map(|(_, client)| client.since + self.deadlines.handshake);
        [silent, self.rest].into_iter().flatten().min()
    }

    /// Drops the clients that had their time, and hears new ones again.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(entry) = self.waiting.first_entry() {
            if now < entry.get().since + self.deadlines.handshake {
                break;
            }
            refuse(&entry.remove(), "no request in time");
        }
        if self.rest.is_some_and(|until| until <= now) {
            self.hear();
        }
    }

    /// Hears new clients again if there is room for one.
    pub(super) fn resume(&mut self) {
        if self.rest.is_some() && self.waiting.len() < self.places {
            self.hear();
        }
    }

    fn admit(&mut self, socket: OwnedFd, register: &dyn Register, now: Instant) {
        let peer = rustix::net::sockopt::socket_peercred(&socket);
        if !peer.is_ok_and(|peer| may_connect(peer.uid.as_raw(), self.owner)) {
            let refusal = Refusal::Refused("this sandbox belongs to another user");
            answer(&socket, &refusal.to_string());
            return;
        }
        let id = self.next;
        self.next += 1;
        match register.register(socket, Interest::READ, Token::Client(id)) {
            Ok(source) => {
                let line = Vec::new();
                let since = now;
                self.waiting.insert(
                    id,
                    Client {
                        source,
                        line,
                        since,
                    },
                );
            }
            Err(error) => tracing::debug!(%error, "cannot watch a client"),
        }
    }

    /// False if there is no place for one more now.
    fn make_room(&mut self, now: Instant) -> bool {
        if self.waiting.len() < self.places {
            return true;
        }
        let Some(entry) = self.waiting.first_entry() else {
            return true;
        };
        let patience = entry.get().since + self.deadlines.handshake_grace;
        if now < patience {
            self.rest_until(patience);
            return false;
        }
        refuse(&entry.remove(), "no request in time");
        true
    }

    fn rest_until(&mut self, until: Instant) {
        self.rest = Some(until);
        if let Err(error) = self.listener.modify(Interest::NONE) {
            tracing::error!(%error, "cannot rest the listener");
        }
    }

    fn hear(&mut self) {
        self.rest = None;
        if let Err(error) = self.listener.modify(Interest::READ) {
            tracing::error!(%error, "cannot listen any more");
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Client {
    /// True once the line is whole; it is read without what follows it, which belongs to the guest.
    fn read_line(&mut self) -> Result<bool, Option<Refusal>> {
        let socket = self.source.inner();
        let mut buffer = [0; MAX_LINE];
        let room = MAX_LINE - self.line.len();
        let peek = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let seen = match retry(|| rustix::net::recv(socket, &mut buffer[..room], peek)) {
            Ok((0, _)) => return Err(None),
            Ok((seen, _)) => seen,
            Err(Errno::AGAIN) => return Ok(false),
            Err(_) => return Err(None),
        };
        let end = buffer[..seen].iter().position(|byte| *byte == b'\n');
        let take = end.map_or(seen, |end| end + 1);
        // What was peeked at is there: this neither blocks nor comes short.
        let taken = retry(|| rustix::net::recv(socket, &mut buffer[..take], RecvFlags::DONTWAIT));
        if !taken.is_ok_and(|(taken, _)| taken == take) {
            return Err(None);
        }
        self.line.extend_from_slice(&buffer[..end.unwrap_or(take)]);
        match end {
            Some(_) => Ok(true),
            None if self.line.len() == MAX_LINE => Err(Some(Refusal::Refused("line too long"))),
            None => Ok(false),
        }
    }
}

/// Sends a client its one line of answer. False if it no longer listens; it may still have
/// something to say.
pub(super) fn answer(socket: impl AsFd, line: &str) -> bool {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // Nothing was sent on this socket before, so that a line always fits.
    retry(|| rustix::net::send(&socket, line.as_bytes(), flags)) == Ok(line.len())
}

fn refuse(client: &Client, reason: &'static str) {
    answer(client.source.inner(), &Refusal::Refused(reason).to_string());
}

/// Only the owner and root may connect, whatever the modes of the folders above say.
fn may_connect(peer: u32, owner: u32) -> bool {
    peer == owner || peer == 0
}

fn bind(path: &PathBuf) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    let prepared = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| listener.set_nonblocking(true));
    if let Err(error) = prepared {
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ho06_only_the_owner_and_root_may_connect() {
        assert!(may_connect(1000, 1000));
        assert!(may_connect(0, 1000));
        assert!(!may_connect(1001, 1000));
        assert!(!may_connect(1000, 0));
    }
}
