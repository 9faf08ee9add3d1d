//! The control socket's server, on the supervisor's loop.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use serde_json::Value;
use vmm_events::{Answer, Interest, Readiness, Registrar, Source};

use super::message::{MAX_LINE, Refusal, Request, answer, parse, refuse};

/// Clients at a time.
const MAX_CLIENTS: usize = 64;
/// Clients accepted in one go.
const ACCEPT_BATCH: usize = 16;
/// Until a client's request is whole, and until it has taken its answer. One that waits for the sandbox's end has no
/// deadline.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long new clients wait in the backlog when there is no descriptor for one.
const REST: Duration = Duration::from_secs(1);

/// What an event of the server's is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A new client.
    Listener,
    /// A client.
    Client(u64),
}

/// A request that the supervisor is to answer by [`Server::reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// By which client.
    pub client: u64,
    /// For what.
    pub request: Request,
}

struct Client {
    source: Source<OwnedFd>,
    input: Vec<u8>,
    output: Vec<u8>,
    /// A request is being served: the next one stays in the socket.
    busy: bool,
    /// Closed once its answer is out.
    closing: bool,
    deadline: Option<Instant>,
}

/// The listener and its clients.
pub struct Server<T: Clone + Send + 'static> {
    registrar: Registrar<T>,
    token: fn(Token) -> T,
    listener: Source<OwnedFd>,
    clients: BTreeMap<u64, Client>,
    next: u64,
    owner: u32,
    /// New clients are not heard until then.
    rest: Option<Instant>,
}

impl<T: Clone + Send + 'static> Server<T> {
    /// Binds the socket, mode 0600, in a folder of ours.
    ///
    /// # Errors
    /// What the host says.
    pub fn bind(path: &Path, registrar: Registrar<T>, token: fn(Token) -> T) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        // The folder keeps others out in between.
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        let listener = registrar
            .register(
                OwnedFd::from(listener),
                Interest::READ,
                token(Token::Listener),
            )
            .map_err(io::Error::other)?;
        Ok(Self {
            registrar,
            token,
            listener,
            clients: BTreeMap::new(),
            next: 0,
            owner: rustix::process::geteuid().as_raw(),
            rest: None,
        })
    }

    /// How long the loop may sleep before [`Server::tick`] is due.
    #[must_use]
    pub fn timeout(&self, now: Instant) -> Option<Duration> {
        let clients = self.clients.values().filter_map(|client| client.deadline);
        let first = clients.chain(self.rest).min()?;
        Some(first.saturating_duration_since(now))
    }

    /// Lets go of clients that are too slow.
    pub fn tick(&mut self, now: Instant) {
        if self.rest.is_some_and(|until| until <= now) {
            self.rest = match self.listener.modify(Interest::READ) {
                Ok(()) => None,
                Err(_) => Some(now + REST),
            };
        }
        self.clients.retain(|_, client| {
            let late = client.deadline.is_some_and(|deadline| deadline <= now);
            if late && client.output.is_empty() {
                // It is told if it listens, and not waited for.
                let _ = send(client, &refuse(&Refusal::TooSlow));
            }
            !late
        });
    }

    /// Serves an event; requests that are whole are added to `asked`.
    pub fn dispatch(
        &mut self,
        token: Token,
        readiness: Readiness,
        now: Instant,
        asked: &mut Vec<Asked>,
    ) -> Answer {
        match token {
            Token::Listener => self.accept(now),
            Token::Client(id) => {
                let Some(client) = self.clients.get_mut(&id) else {
                    return Answer::Unhandled;
                };
                if !serve(client, readiness) {
                    self.clients.remove(&id);
                } else {
                    self.look(id, now, asked);
                }
            }
        }
        Answer::Handled
    }

    /// Answers a request.
    pub fn reply(&mut self, client: u64, result: &Value, now: Instant, asked: &mut Vec<Asked>) {
        if let Some(there) = self.clients.get_mut(&client) {
            there.busy = false;
            there.output.extend_from_slice(&answer(result));
            self.look(client, now, asked);
        }
    }

    /// True if a client has not gone.
    #[must_use]
    pub fn is_there(&self, client: u64) -> bool {
        self.clients.contains_key(&client)
    }

    /// The answer of a request waits: the client may take its time.
    pub fn defer(&mut self, client: u64) {
        if let Some(there) = self.clients.get_mut(&client) {
            there.deadline = None;
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPT_BATCH {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(self.listener.inner(), flags) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    // No descriptor is left: whoever waits would wake the loop for ever.
                    tracing::warn!(%error, "cannot accept a client of the control socket");
                    self.rest = Some(now + REST);
                    let _ = self.listener.modify(Interest::NONE);
                    return;
                }
            };
            let refusal = match rustix::net::sockopt::socket_peercred(&socket) {
                Ok(peer) if ![0, self.owner].contains(&peer.uid.as_raw()) => {
                    Some(Refusal::Peer(peer.uid.as_raw()))
                }
                Ok(_) if self.clients.len() >= MAX_CLIENTS => Some(Refusal::TooMany(MAX_CLIENTS)),
                Ok(_) => None,
                Err(_) => continue,
            };
            if let Some(refusal) = refusal {
                let _ = rustix::net::send(
                    &socket,
                    &refuse(&refusal),
                    SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
                );
                continue;
            }
            let id = self.next;
            let token = (self.token)(Token::Client(id));
            if let Ok(source) = self.registrar.register(socket, Interest::READ, token) {
                self.next += 1;
                self.clients.insert(
                    id,
                    Client {
                        source,
                        input: Vec::new(),
                        output: Vec::new(),
                        busy: false,
                        closing: false,
                        deadline: Some(now + DEADLINE),
                    },
                );
            }
        }
    }

    /// Takes a client's next whole request, sends what there is, and watches for what can happen next.
    fn look(&mut self, id: u64, now: Instant, asked: &mut Vec<Asked>) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        if !client.busy && !client.closing {
            match next_line(client) {
                Ok(Some(request)) => {
                    client.busy = true;
                    client.deadline = None;
                    asked.push(Asked {
                        client: id,
                        request,
                    });
                }
                Ok(None) => {
                    // The time for the next request runs from the last answer.
                    if client.output.is_empty() && client.input.is_empty()
                        || client.deadline.is_none()
                    {
                        client.deadline = Some(now + DEADLINE);
                    }
                }
                Err(refusal) => {
                    client.output.extend_from_slice(&refuse(&refusal));
                    client.closing = true;
                }
            }
        }
        let output = std::mem::take(&mut client.output);
        let kept = match send(client, &output) {
            Ok(sent) => {
                client.output = output[sent..].to_vec();
                let done = client.closing && client.output.is_empty();
                let reads = !client.busy && !client.closing && client.input.len() < MAX_LINE;
                let interest = Interest::NONE
                    .with(Interest::READ, reads)
                    .with(Interest::WRITE, !client.output.is_empty())
                    // Only for the hang-up of one that waits, which comes unasked with any interest.
                    .with(Interest::PRIORITY, client.busy);
                !done && client.source.modify(interest).is_ok()
            }
            Err(_) => false,
        };
        if !kept {
            self.clients.remove(&id);
        }
    }
}

/// Reads what has come; whether the client is still there.
fn serve(client: &mut Client, readiness: Readiness) -> bool {
    if client.busy && (readiness.hung_up() || readiness.failed()) {
        return false;
    }
    if !readiness.readable() || client.busy || client.closing {
        return true;
    }
    let mut space = [0; MAX_LINE];
    let room = MAX_LINE - client.input.len().min(MAX_LINE);
    match rustix::net::recv(
        client.source.inner(),
        &mut space[..room],
        RecvFlags::DONTWAIT,
    ) {
        Ok((_, 0)) => false,
        Ok((_, count)) => {
            client.input.extend_from_slice(&space[..count.min(room)]);
            true
        }
        Err(Errno::AGAIN | Errno::INTR) => true,
        Err(_) => false,
    }
}

fn next_line(client: &mut Client) -> Result<Option<Request>, Refusal> {
    match client.input.iter().position(|byte| *byte == b'\n') {
        Some(end) => {
            let line: Vec<u8> = client.input.drain(..=end).collect();
            parse(&line[..end]).map(Some)
        }
        None if client.input.len() >= MAX_LINE => Err(Refusal::TooLong),
        None => Ok(None),
    }
}

fn send(client: &Client, bytes: &[u8]) -> Result<usize, Errno> {
    if bytes.is_empty() {
        return Ok(0);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::send(client.source.inner(), bytes, flags) {
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        other => other,
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
