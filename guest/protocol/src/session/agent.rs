//! The agent's side of a session.

mod ask;
mod link;

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::ops::Bound;

use crate::cause::CancelReason;
use crate::exec::Exec;
use crate::frame::{Decoder, Header};
use crate::hello::Hello;
use crate::limits::{HELLO_DEADLINE_NS, MAX_EXECS, MAX_WINDOW, STDIN_WINDOW};
use crate::message::{
    AgentMessage, ClientMessage, ExecRequest, ExecsPage, GoodbyeCode, InvalidRequest, Refusal,
    RefusedCode, Winsize,
};
pub use ask::Ask;
use link::{Link, Step, Wish};

pub use super::outbox::MissingExec;
use super::outbox::Outbox;
use super::{Inbound, Violation, demand};

/// Bytes that are queued for the socket at a time; more is taken from the stores as they are
/// written.
const HIGH_WATER: usize = 256 << 10;
/// Bytes of answers held in memory above which a client's further requests wait.
const MAX_HELD: usize = 64 << 10;

/// Where a session finds its execs, by the ids that its client gave them.
pub trait Execs {
    /// The exec of a request, from its acceptance until [`AgentSession::finished`] names it.
    fn exec(&self, id: u64) -> Option<&Exec>;
}

impl Execs for BTreeMap<u64, Exec> {
    fn exec(&self, id: u64) -> Option<&Exec> {
        self.get(&id)
    }
}

/// Something that a client wants, checked.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Run this. From now on the id is live: answer by giving [`Execs`] an exec for it, or by
    /// [`AgentSession::refuse`].
    Exec {
        /// Its id.
        id: u64,
        /// What to run, validated.
        request: Box<ExecRequest>,
    },
    /// Bytes for stdin.
    Stdin {
        /// The exec.
        id: u64,
        /// The bytes, within the exec's credit.
        data: &'a [u8],
    },
    /// Stdin ends.
    StdinClose {
        /// The exec.
        id: u64,
    },
    /// A signal for the main process.
    Signal {
        /// The exec.
        id: u64,
        /// The signal's number.
        signal: u8,
    },
    /// The terminal's new size.
    Resize {
        /// The exec.
        id: u64,
        /// The size.
        size: Winsize,
    },
    /// End it.
    Cancel {
        /// The exec.
        id: u64,
        /// Who wants it.
        reason: CancelReason,
        /// Time between `SIGTERM` and the kill, in nanoseconds.
        grace_ns: u64,
    },
    /// The client has consumed output: tell [`Exec::acknowledge`].
    Consumed {
        /// The exec.
        id: u64,
        /// Bytes of stdout and stderr.
        bytes: [u64; 2],
    },
    /// No more of an attach or a wait, whose id is live no longer.
    Detach {
        /// Its id.
        id: u64,
    },
    /// Something about an exec by its number in the guest.
    Ask {
        /// The request's id.
        id: u64,
        /// What.
        ask: Ask,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitHello { until: u64 },
    Open { version: u16 },
    Ended,
}

/// The agent's side of one connection.
///
/// The driver's loop, per connection:
///
/// - readable and [`wants_read`](Self::wants_read): read into [`space`](Self::space),
///   [`filled`](Self::filled), then [`next`](Self::next) until it says `None`, acting on each
///   request;
/// - after any of that, after an exec's output or notices grew, and when writable:
///   [`fill`](Self::fill), write what [`gather`](Self::gather) gives, [`wrote`](Self::wrote), until
///   nothing is queued or the socket is full; then [`finished`](Self::finished) names execs that
///   may be released, and `next` may have more;
/// - an error of `next` or [`tick`](Self::tick): [`end`](Self::end) with it, one last write, close;
/// - end of file or an error of the socket: the execs in [`live`](Self::live) have lost their
///   client.
///
/// ```
/// use std::collections::BTreeMap;
/// use vmm_protocol::exec::Exec;
/// use vmm_protocol::session::{AgentSession, ClientSession, Request};
/// use vmm_protocol::{ExecRequest, GenerationId, Hello};
///
/// let hello = Hello::new(GenerationId { counter: 1, public_id: 2 });
/// let mut client = ClientSession::new(hello, 0);
/// let id = client.exec(&ExecRequest::new(["true"]))?;
///
/// let mut agent = AgentSession::new(hello, 0);
/// let bytes = client.outgoing().to_vec();
/// agent.space()[..bytes.len()].copy_from_slice(&bytes);
/// agent.filled(bytes.len(), 1);
/// assert!(matches!(agent.next()?, Some(Request::Exec { id: asked, .. }) if asked == id));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AgentSession {
    hello: Hello,
    phase: Phase,
    inbound: Inbound,
    outbox: Outbox,
    links: BTreeMap<u64, Link>,
    last_id: u64,
    /// The exec that had its turn last.
    turn: u64,
}

impl AgentSession {
    /// A connection that has just been accepted. The agent's hello is queued.
    pub fn new(hello: Hello, now: u64) -> Self {
        let mut session = Self {
            hello,
            phase: Phase::AwaitHello {
                until: now.saturating_add(HELLO_DEADLINE_NS),
            },
            inbound: Inbound::new(Decoder::new()),
            outbox: Outbox::default(),
            links: BTreeMap::new(),
            last_id: 0,
            turn: 0,
        };
        session.push(0, &AgentMessage::Hello(hello));
        session
    }

    /// The protocol version, once the client's hello was taken.
    pub fn version(&self) -> Option<u16> {
        match self.phase {
            Phase::Open { version } => Some(version),
            _ => None,
        }
    }

    /// Requests that have not ended.
    pub fn live(&self) -> impl Iterator<Item = u64> + '_ {
        self.links.keys().copied()
    }

    // In.

    /// Where bytes from the socket go.
    pub fn space(&mut self) -> &mut [u8] {
        self.inbound.space()
    }

    /// `count` bytes came.
    pub fn filled(&mut self, count: usize, now: u64) {
        self.inbound.filled(count, now);
    }

    /// Whether the client's bytes should be read: not while it leaves too many answers unread.
    pub fn wants_read(&self) -> bool {
        self.phase != Phase::Ended && self.outbox.held() < MAX_HELD
    }

    /// The next request. What needs no driver (hello, ping, requests that are refused by rule,
    /// frames for an exec that has just ended) is answered on the way.
    #[expect(
        clippy::should_implement_trait,
        reason = "lends from the session, which an Iterator cannot"
    )]
    pub fn next(&mut self) -> Result<Option<Request<'_>>, Violation> {
        while self.wants_read() && self.inbound.take()? {
            let Some(frame) = self.inbound.frame() else {
                break;
            };
            let message = ClientMessage::decode(&frame)?;
            let data = match message {
                ClientMessage::Stdin(data) => frame.payload.len() - data.len()..frame.payload.len(),
                _ => 0..0,
            };
            match Self::judge(
                self.hello,
                self.phase,
                &self.links,
                self.last_id,
                &frame.header,
                &message,
            )? {
                Verdict::Ignore => {}
                Verdict::Open { version } => self.phase = Phase::Open { version },
                Verdict::Act => {
                    let header = frame.header;
                    // Nothing that is returned lends from the frame but stdin, which is lent again
                    // below.
                    let owned = match message {
                        ClientMessage::Stdin(data) => Owned::Stdin(data.len() as u64),
                        ClientMessage::Exec(request) => Owned::Exec(request),
                        ClientMessage::StdinClose => {
                            Owned::Request(Request::StdinClose { id: header.id })
                        }
                        ClientMessage::Signal(signal) => Owned::Request(Request::Signal {
                            id: header.id,
                            signal,
                        }),
                        ClientMessage::Resize(size) => Owned::Request(Request::Resize {
                            id: header.id,
                            size,
                        }),
                        ClientMessage::Cancel { reason, grace_ns } => {
                            Owned::Request(Request::Cancel {
                                id: header.id,
                                reason,
                                grace_ns,
                            })
                        }
                        ClientMessage::Credit(bytes) => Owned::Credit(bytes),
                        ClientMessage::Ping => Owned::Ping,
                        ClientMessage::Attach { exec, from, window } => {
                            Owned::Attach { exec, from, window }
                        }
                        ClientMessage::Wait(exec) => Owned::Wait(exec),
                        ClientMessage::Detach => Owned::Detach,
                        ClientMessage::List { after } => Owned::Ask(Ask::List { after }),
                        ClientMessage::SignalExec { exec, signal } => {
                            Owned::Ask(Ask::Signal { exec, signal })
                        }
                        ClientMessage::CancelExec {
                            exec,
                            reason,
                            grace_ns,
                        } => Owned::Ask(Ask::Cancel {
                            exec,
                            reason,
                            grace_ns,
                        }),
                        ClientMessage::Release(exec) => Owned::Ask(Ask::Release { exec }),
                        ClientMessage::Hello(_) => continue,
                    };
                    if let Some(request) = self.apply(header.id, owned) {
                        if let Request::Stdin { id, .. } = request {
                            let payload =
                                self.inbound.frame().map_or(&[][..], |frame| frame.payload);
                            return Ok(Some(Request::Stdin {
                                id,
                                data: &payload[data],
                            }));
                        }
                        return Ok(Some(request));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Decides about a message without changing anything.
    fn judge(
        hello: Hello,
        phase: Phase,
        links: &BTreeMap<u64, Link>,
        last_id: u64,
        header: &Header,
        message: &ClientMessage<'_>,
    ) -> Result<Verdict, Violation> {
        let &Header { id, kind, .. } = header;
        if let ClientMessage::Hello(theirs) = message {
            demand(matches!(phase, Phase::AwaitHello { .. }) && id == 0, || {
                Violation::Hello { kind }
            })?;
            if theirs.generation != hello.generation {
                return Err(Violation::Stale {
                    ours: hello.generation,
                    theirs: theirs.generation,
                });
            }
            let ours = hello.versions;
            let version = ours.common(theirs.versions).ok_or(Violation::Version {
                ours,
                theirs: theirs.versions,
            })?;
            return Ok(Verdict::Open { version });
        }
        if !matches!(phase, Phase::Open { .. }) {
            return Err(Violation::Hello { kind });
        }
        if kind.begins() {
            demand(id != 0, || Violation::UnknownId { kind, id })?;
            demand(id > last_id, || Violation::ReusedId { id, last: last_id })?;
            return Ok(Verdict::Act);
        }
        demand(id != 0 && id <= last_id, || Violation::UnknownId {
            kind,
            id,
        })?;
        // An exec's end and a frame for it may cross on the way: that is no mistake of the
        // client's.
        let Some(link) = links.get(&id) else {
            return Ok(Verdict::Ignore);
        };
        if let ClientMessage::Stdin(_) | ClientMessage::StdinClose = message {
            demand(link.owns(), || Violation::Order { kind, id })?;
        }
        match message {
            ClientMessage::Stdin(data) => {
                let (count, allowed) = (data.len() as u64, link.stdin_left);
                demand(count <= allowed, || Violation::Credit {
                    kind,
                    id,
                    count,
                    allowed,
                })?;
            }
            ClientMessage::Detach => {
                demand(link.detachable(), || Violation::Order { kind, id })?;
            }
            ClientMessage::Credit(bytes) => {
                for (count, allowed) in bytes.iter().copied().zip(link.in_flight) {
                    demand(count <= allowed, || Violation::Credit {
                        kind,
                        id,
                        count,
                        allowed,
                    })?;
                }
            }
            _ => {}
        }
        Ok(Verdict::Act)
    }

    fn apply(&mut self, id: u64, owned: Owned) -> Option<Request<'static>> {
        match owned {
            Owned::Ping => {
                self.last_id = id;
                self.push(id, &AgentMessage::Pong);
                None
            }
            Owned::Exec(request) => {
                self.last_id = id;
                let wish = if request.detached {
                    Wish::Start
                } else {
                    Wish::Own
                };
                self.open(id, request.validate(), || {
                    Link::new(wish, request.window, [0; 2])
                })
                .then_some(Request::Exec { id, request })
            }
            Owned::Attach { exec, from, window } => {
                self.last_id = id;
                let valid = match window {
                    1..=MAX_WINDOW => Ok(()),
                    window => Err(InvalidRequest::Window { window }),
                };
                self.open(id, valid, || Link::new(Wish::Attach, window, from))
                    .then_some(Request::Ask {
                        id,
                        ask: Ask::Attach { exec, from },
                    })
            }
            Owned::Wait(exec) => {
                self.last_id = id;
                self.open(id, Ok(()), || Link::new(Wish::Wait, 0, [0; 2]))
                    .then_some(Request::Ask {
                        id,
                        ask: Ask::Wait { exec },
                    })
            }
            Owned::Detach => {
                self.links.remove(&id)?;
                self.push(id, &AgentMessage::Done);
                self.outbox.end(id);
                Some(Request::Detach { id })
            }
            Owned::Ask(ask) => {
                self.last_id = id;
                Some(Request::Ask { id, ask })
            }
            Owned::Stdin(count) => {
                let link = self.links.get_mut(&id)?;
                link.stdin_left = link.stdin_left.saturating_sub(count);
                Some(Request::Stdin { id, data: &[] })
            }
            Owned::Credit(bytes) => {
                let link = self.links.get_mut(&id)?;
                for (in_flight, count) in link.in_flight.iter_mut().zip(bytes) {
                    *in_flight = in_flight.saturating_sub(count);
                }
                Some(Request::Consumed { id, bytes })
            }
            Owned::Request(request) => Some(request),
        }
    }

    /// Makes a request live, or refuses it; whether it is live.
    fn open(
        &mut self,
        id: u64,
        valid: Result<(), InvalidRequest>,
        link: impl FnOnce() -> Link,
    ) -> bool {
        let refusal = match valid {
            Err(error) => Refusal::new(error.code(), error.to_string()),
            Ok(()) if self.links.len() >= MAX_EXECS => Refusal::new(
                RefusedCode::TooManyExecs,
                format!("the session has {MAX_EXECS} open requests, its limit"),
            ),
            Ok(()) => {
                self.links.insert(id, link());
                return true;
            }
        };
        self.push(id, &AgentMessage::Refused(refusal));
        false
    }

    // Out.

    /// The request is not taken: its id is free, and nothing ran.
    pub fn refuse(&mut self, id: u64, refusal: Refusal) {
        if self.links.remove(&id).is_some() {
            self.push(id, &AgentMessage::Refused(refusal));
        }
    }

    /// The answer to a request about an exec of the guest.
    pub fn done(&mut self, id: u64, result: Result<(), Refusal>) {
        match result {
            Ok(()) => self.push(id, &AgentMessage::Done),
            Err(refusal) => self.push(id, &AgentMessage::Refused(refusal)),
        }
    }

    /// The answer to a list.
    pub fn list(&mut self, id: u64, page: ExecsPage) {
        self.push(id, &AgentMessage::Execs(page));
    }

    /// Whether a live request takes its exec's output.
    pub fn reads(&self, id: u64) -> bool {
        self.links.get(&id).is_some_and(Link::reads)
    }

    /// The workload took stdin bytes: as many more may come.
    pub fn grant_stdin(&mut self, id: u64, bytes: u64) {
        if let (Some(link), true) = (self.links.get_mut(&id), bytes > 0) {
            link.stdin_left = link.stdin_left.saturating_add(bytes).min(STDIN_WINDOW);
            self.push(id, &AgentMessage::StdinCredit(bytes));
        }
    }

    /// Queues what the execs have for the client, in turns of one frame, as far as credit and the
    /// socket allow.
    pub fn fill(&mut self, execs: &impl Execs) {
        while self.phase != Phase::Ended
            && self.outbox.queued() < HIGH_WATER
            && self.queue_one(execs)
        {}
    }

    fn queue_one(&mut self, execs: &impl Execs) -> bool {
        let later = self
            .links
            .range((Bound::Excluded(self.turn), Bound::Unbounded));
        let earlier = self.links.range(..=self.turn);
        let ready = later.chain(earlier).find_map(|(id, link)| {
            let step = link.step(execs.exec(*id)?)?;
            Some((*id, step))
        });
        let Some((id, step)) = ready else {
            return false;
        };
        self.turn = id;
        match step {
            Step::Output { stream, length } => {
                if let Some(link) = self.links.get_mut(&id) {
                    let offset = link.sent[stream.index()];
                    link.sent[stream.index()] += length as u64;
                    link.in_flight[stream.index()] += length as u64;
                    link.turn = stream;
                    self.outbox.output(id, stream, offset, length);
                }
            }
            Step::Notice(message) => {
                if let Some(link) = self.links.get_mut(&id) {
                    link.notices += 1;
                }
                self.push(id, &message);
            }
            Step::Last(message) => {
                self.links.remove(&id);
                self.push(id, &message);
                self.outbox.end(id);
            }
        }
        true
    }

    /// Bytes that are queued for the socket.
    pub fn queued(&self) -> usize {
        self.outbox.queued()
    }

    /// The pieces of the next write. Output is lent from the stores.
    pub fn gather<'a>(&'a self, execs: &'a impl Execs) -> Result<Vec<IoSlice<'a>>, MissingExec> {
        self.outbox.gather(execs)
    }

    /// The first `count` bytes of that were written.
    pub fn wrote(&mut self, count: usize, now: u64) {
        let paused = !self.wants_read();
        self.outbox.wrote(count);
        if paused {
            self.inbound.excuse(now);
        }
    }

    /// Requests whose last frame has been written since the last call: nothing of their execs is needed for them.
    pub fn finished(&mut self) -> Vec<u64> {
        self.outbox.finished()
    }

    fn push(&mut self, id: u64, message: &AgentMessage<'_>) {
        // Every message that an agent makes is far below its kind's limit: texts are cut to
        // MAX_TEXT.
        let written = self.outbox.push(id, message);
        debug_assert_eq!(written, Ok(()));
    }

    // Time and end.

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::AwaitHello { until } => Some(until),
            Phase::Open { .. } if self.wants_read() => self.inbound.deadline(),
            _ => None,
        }
    }

    /// The clock says `now`.
    pub fn tick(&mut self, now: u64) -> Result<(), Violation> {
        match self.deadline() {
            Some(at) if at <= now => Err(Violation::Deadline),
            _ => Ok(()),
        }
    }

    /// Ends the session for a violation: a goodbye is queued, and nothing after it.
    pub fn end(&mut self, violation: &Violation) {
        self.goodbye(violation.code(), &violation.describe());
    }

    /// Ends the session: a goodbye is queued, and nothing after it.
    pub fn goodbye(&mut self, code: GoodbyeCode, message: &str) {
        if self.phase != Phase::Ended {
            self.push(
                0,
                &AgentMessage::Goodbye {
                    code,
                    message: message.to_owned(),
                },
            );
            self.phase = Phase::Ended;
        }
    }
}

enum Verdict {
    Ignore,
    Open { version: u16 },
    Act,
}

enum Owned {
    Exec(Box<ExecRequest>),
    Stdin(u64),
    Credit([u64; 2]),
    Ping,
    Attach {
        exec: u64,
        from: [u64; 2],
        window: u64,
    },
    Wait(u64),
    Detach,
    Ask(Ask),
    Request(Request<'static>),
}
