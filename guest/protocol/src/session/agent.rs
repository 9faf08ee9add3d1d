//! The agent's side of a session.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::ops::Bound;

use crate::cause::{CancelReason, Stream};
use crate::exec::Exec;
use crate::frame::{Decoder, Header};
use crate::hello::Hello;
use crate::limits::{HELLO_DEADLINE_NS, MAX_DATA, MAX_EXECS, STDIN_WINDOW};
use crate::message::{AgentMessage, ClientMessage, ExecRequest, GoodbyeCode, RefusedCode, Winsize};

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
}

#[derive(Debug)]
struct Link {
    /// Output bytes that may be unconsumed at the client.
    window: u64,
    /// Those that are.
    in_flight: [u64; 2],
    /// How much of each stream has been queued.
    sent: [u64; 2],
    /// How many notices have been.
    notices: usize,
    /// The stream that had its turn last.
    turn: Stream,
    /// Stdin bytes that the client may still send.
    stdin_left: u64,
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
        if let ClientMessage::Exec(_) | ClientMessage::Ping = message {
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
                let refusal = match request.validate() {
                    Err(error) => Some((RefusedCode::Invalid, error.to_string())),
                    Ok(()) if self.links.len() >= MAX_EXECS => Some((
                        RefusedCode::TooManyExecs,
                        format!("the session has {MAX_EXECS} execs"),
                    )),
                    Ok(()) => None,
                };
                if let Some((code, message)) = refusal {
                    self.push(id, &AgentMessage::Refused { code, message });
                    return None;
                }
                self.links.insert(id, Link::new(request.window));
                Some(Request::Exec { id, request })
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

    // Out.

    /// The request is not taken: its id is free, and nothing ran.
    pub fn refuse(&mut self, id: u64, code: RefusedCode, message: &str) {
        if self.links.remove(&id).is_some() {
            self.push(
                id,
                &AgentMessage::Refused {
                    code,
                    message: message.to_owned(),
                },
            );
        }
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
            Step::Exit(message) => {
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

    /// Requests whose terminal record has been written since the last call: their execs may go.
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
    Request(Request<'static>),
}

enum Step {
    Output { stream: Stream, length: usize },
    Notice(AgentMessage<'static>),
    Exit(AgentMessage<'static>),
}

impl Link {
    fn new(window: u64) -> Self {
        Self {
            window,
            in_flight: [0; 2],
            sent: [0; 2],
            notices: 0,
            turn: Stream::Stderr,
            stdin_left: STDIN_WINDOW,
        }
    }

    /// The next frame of an exec: bytes as far as credit reaches, each notice in its place among
    /// them, or ahead of bytes that have no credit; the record after all.
    fn step(&self, exec: &Exec) -> Option<Step> {
        let notice = exec.notices().get(self.notices);
        let due = notice
            .is_some_and(|notice| notice.at[0] <= self.sent[0] && notice.at[1] <= self.sent[1]);
        if let (Some(notice), true) = (notice, due) {
            return Some(Step::Notice(notice.message()));
        }
        let credit = self
            .window
            .saturating_sub(self.in_flight[0])
            .saturating_sub(self.in_flight[1]);
        let order = match self.turn {
            Stream::Stdout => [Stream::Stderr, Stream::Stdout],
            Stream::Stderr => [Stream::Stdout, Stream::Stderr],
        };
        let mut unsent = false;
        for stream in order {
            let sent = self.sent[stream.index()];
            let until = notice.map_or(u64::MAX, |notice| notice.at[stream.index()]);
            let most = until.saturating_sub(sent).min(credit).min(MAX_DATA as u64);
            let length = exec.bytes(stream, sent, most as usize).len();
            if length > 0 {
                return Some(Step::Output { stream, length });
            }
            unsent |= exec.length(stream) > sent;
        }
        match (notice, exec.record()) {
            (Some(notice), _) => Some(Step::Notice(notice.message())),
            (None, Some(record)) if !unsent => {
                Some(Step::Exit(AgentMessage::Exit(Box::new(record.clone()))))
            }
            _ => None,
        }
    }
}
