//! The client's side of a session.

mod link;

use std::collections::BTreeMap;

use crate::cause::{CancelReason, Oom, Record, Stream, signal};
use crate::frame::{Decoder, Header};
use crate::hello::Hello;
use crate::limits::{HELLO_DEADLINE_NS, MAX_DATA, MAX_EXECS, MAX_WINDOW, UNCAPPED_RING};
use crate::message::{
    AgentMessage, ClientMessage, ClosedWhy, ExecRequest, ExecsPage, FrameKind, GoodbyeCode,
    InvalidRequest, Refusal, TooLarge, Winsize,
};
use crate::wire::WireError;

use super::{Inbound, Outgoing, Violation, demand};
use link::{Link, Wish};

/// The most calls (pings, lists, requests about an exec of the guest) that may be unanswered.
const MAX_CALLS: usize = 64;
/// Bytes of one read: several full frames.
const READ: usize = 256 << 10;

/// Something that an agent said, checked.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The agent's hello came, of the same generation.
    Opened {
        /// The protocol version.
        version: u16,
        /// What the agent can do beyond that.
        features: u64,
    },
    /// The process runs.
    Started {
        /// The request.
        id: u64,
        /// The exec's number in the guest.
        exec: u64,
        /// Its main process in the guest.
        pid: u32,
    },
    /// Bytes of a stream. Say [`ClientSession::consumed`] once they are.
    Output {
        /// The request.
        id: u64,
        /// Which stream.
        stream: Stream,
        /// Where in it.
        offset: u64,
        /// The bytes.
        data: &'a [u8],
    },
    /// The cap was hit.
    Limit {
        /// The request.
        id: u64,
        /// The final lengths of stdout and stderr.
        at: [u64; 2],
    },
    /// Something was killed for memory.
    Oom {
        /// The request.
        id: u64,
        /// What.
        oom: Oom,
    },
    /// Nothing reads stdin any more.
    StdinClosed {
        /// The request.
        id: u64,
        /// Why.
        why: ClosedWhy,
    },
    /// More stdin may be sent.
    StdinCredit {
        /// The request.
        id: u64,
        /// Bytes that may be sent now.
        available: u64,
    },
    /// The end.
    Exit {
        /// The request.
        id: u64,
        /// All about it.
        record: Box<Record>,
    },
    /// The request was not taken.
    Refused {
        /// The request.
        id: u64,
        /// Why.
        refusal: Refusal,
    },
    /// What was asked for of an exec is done; of an attach or a wait: it is over.
    Done {
        /// The request.
        id: u64,
    },
    /// A part of the list of execs.
    Execs {
        /// The request.
        id: u64,
        /// The part.
        page: ExecsPage,
    },
    /// The answer to a ping.
    Pong {
        /// The ping.
        id: u64,
    },
    /// The session ends by the agent's will.
    Goodbye {
        /// Why.
        code: GoodbyeCode,
        /// In plain words.
        message: String,
    },
}

/// Why a client's own request cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It is invalid.
    #[error("invalid request")]
    Invalid(#[from] InvalidRequest),
    /// A message is larger than its kind may be.
    #[error("message too large")]
    TooLarge(#[from] TooLarge),
    /// A value is out of range.
    #[error("value out of range")]
    Value(#[from] WireError),
    /// The session has as many execs or pings as it may have.
    #[error("the session has as many open requests as it may have")]
    TooMany,
    /// No exec of this id is live: it has ended, or never was.
    #[error("no live exec {id}")]
    NotLive {
        /// The id.
        id: u64,
    },
    /// The session has ended.
    #[error("the session has ended")]
    Ended,
}

/// What a request that has one answer wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Ping,
    List,
    Act,
}

impl Call {
    fn answered_by(self, kind: FrameKind) -> bool {
        match self {
            Self::Ping => kind == FrameKind::Pong,
            Self::List => matches!(kind, FrameKind::Execs | FrameKind::Refused),
            Self::Act => matches!(kind, FrameKind::Done | FrameKind::Refused),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    AwaitHello { until: u64 },
    Open { version: u16 },
    Ended,
}

/// The client's side of one connection.
///
/// Requests may be made at once; they follow the hello, and an agent of another generation takes
/// none of them. What is to be sent is [`outgoing`](Self::outgoing); what comes goes into
/// [`space`](Self::space) and out of [`next`](Self::next).
#[derive(Debug)]
pub struct ClientSession {
    hello: Hello,
    phase: Phase,
    inbound: Inbound,
    out: Outgoing,
    links: BTreeMap<u64, Link>,
    calls: BTreeMap<u64, Call>,
    last_id: u64,
}

impl ClientSession {
    /// A connection that has just been made. The client's hello is queued.
    pub fn new(hello: Hello, now: u64) -> Self {
        let mut session = Self {
            hello,
            phase: Phase::AwaitHello {
                until: now.saturating_add(HELLO_DEADLINE_NS),
            },
            inbound: Inbound::new(Decoder::with_capacity(READ)),
            out: Outgoing::default(),
            links: BTreeMap::new(),
            calls: BTreeMap::new(),
            last_id: 0,
        };
        let written = session.push(0, &ClientMessage::Hello(hello));
        debug_assert_eq!(written, Ok(()));
        session
    }

    /// The protocol version, once the agent's hello was taken.
    pub fn version(&self) -> Option<u16> {
        match self.phase {
            Phase::Open { version } => Some(version),
            _ => None,
        }
    }

    /// The session has ended; nothing more can be asked for.
    pub fn ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// Execs that have not ended.
    pub fn live(&self) -> impl Iterator<Item = u64> + '_ {
        self.links.keys().copied()
    }

    /// The next offset of each stream of a live exec: what was received lies before it.
    pub fn received(&self, id: u64) -> Option<[u64; 2]> {
        self.links.get(&id).map(|link| link.next)
    }

    // Requests.

    /// Asks to run something; the answer is its id.
    pub fn exec(&mut self, request: &ExecRequest) -> Result<u64, RequestError> {
        request.validate()?;
        if self.links.len() >= MAX_EXECS {
            return Err(RequestError::TooMany);
        }
        let id = self.last_id + 1;
        self.push(id, &ClientMessage::Exec(Box::new(request.clone())))?;
        self.last_id = id;
        let wish = if request.detached {
            Wish::Start
        } else {
            Wish::Own
        };
        let link = Link::new(wish, request.window, [0; 2], request.stdin);
        self.links.insert(id, link);
        Ok(id)
    }

    /// Asks for the output of an exec of the guest from some offsets on, and for its end; the answer is the request's
    /// id, which is then used like that of an exec.
    pub fn attach(&mut self, exec: u64, from: [u64; 2], window: u64) -> Result<u64, RequestError> {
        if window == 0 || window > MAX_WINDOW {
            return Err(InvalidRequest::Window { window }.into());
        }
        let message = ClientMessage::Attach { exec, from, window };
        self.link(&message, Link::new(Wish::Attach, window, from, false))
    }

    /// Asks for the end of an exec of the guest; the answer is the request's id.
    pub fn wait(&mut self, exec: u64) -> Result<u64, RequestError> {
        let link = Link::new(Wish::Wait, 0, [0; 2], false);
        self.link(&ClientMessage::Wait(exec), link)
    }

    fn link(&mut self, message: &ClientMessage<'_>, link: Link) -> Result<u64, RequestError> {
        if self.links.len() >= MAX_EXECS {
            return Err(RequestError::TooMany);
        }
        let id = self.last_id + 1;
        self.push(id, message)?;
        self.last_id = id;
        self.links.insert(id, link);
        Ok(id)
    }

    /// Gives up an attach or a wait; its exec goes on. What still comes of it need not be consumed; its end is
    /// [`Event::Done`], or the end that crossed it on the way. False for an exec of the session's own.
    pub fn detach(&mut self, id: u64) -> Result<bool, RequestError> {
        let link = self
            .links
            .get_mut(&id)
            .ok_or(RequestError::NotLive { id })?;
        if !link.detachable() {
            return Ok(false);
        }
        if !std::mem::replace(&mut link.leaving, true) {
            self.push(id, &ClientMessage::Detach)?;
        }
        Ok(true)
    }

    /// Sends as much stdin as there is credit for; the answer says how much. After the workload has
    /// closed its end, everything is taken and nothing sent.
    pub fn stdin(&mut self, id: u64, data: &[u8]) -> Result<usize, RequestError> {
        let link = self
            .links
            .get_mut(&id)
            .ok_or(RequestError::NotLive { id })?;
        if link.stdin_closed {
            return Ok(data.len());
        }
        let count = data
            .len()
            .min(usize::try_from(link.stdin_left).unwrap_or(usize::MAX));
        link.stdin_left -= count as u64;
        for chunk in data[..count].chunks(MAX_DATA) {
            self.push(id, &ClientMessage::Stdin(chunk))?;
        }
        Ok(count)
    }

    /// Bytes of stdin that may be sent now.
    pub fn stdin_available(&self, id: u64) -> u64 {
        self.links.get(&id).map_or(0, |link| link.stdin_left)
    }

    /// Closes stdin.
    pub fn stdin_close(&mut self, id: u64) -> Result<(), RequestError> {
        let link = self
            .links
            .get_mut(&id)
            .ok_or(RequestError::NotLive { id })?;
        if std::mem::replace(&mut link.stdin_closed, true) {
            return Ok(());
        }
        self.push(id, &ClientMessage::StdinClose)
    }

    /// Sends a signal to the main process.
    pub fn signal(&mut self, id: u64, number: u8) -> Result<(), RequestError> {
        let number = signal(number)?;
        self.about(id, &ClientMessage::Signal(number))
    }

    /// Tells the terminal's new size.
    pub fn resize(&mut self, id: u64, size: Winsize) -> Result<(), RequestError> {
        if size.rows == 0 || size.columns == 0 {
            return Err(InvalidRequest::Winsize.into());
        }
        self.about(id, &ClientMessage::Resize(size))
    }

    /// Ends an exec.
    pub fn cancel(
        &mut self,
        id: u64,
        reason: CancelReason,
        grace_ns: u64,
    ) -> Result<(), RequestError> {
        self.about(id, &ClientMessage::Cancel { reason, grace_ns })
    }

    /// Bytes of a stream were consumed: credit is given back in portions.
    pub fn consumed(&mut self, id: u64, stream: Stream, count: u64) {
        let Some(link) = self.links.get_mut(&id).filter(|link| !link.leaving) else {
            return;
        };
        let index = stream.index();
        let count = count.min(link.held[index]);
        link.held[index] -= count;
        link.consumed[index] += count;
        // A quarter at a time: few frames, and the agent never runs dry of a reader that keeps up. An
        // uncapped exec waits once a whole ring is not given back, however large the window is.
        let portion = link.window.min(UNCAPPED_RING as u64).div_ceil(4);
        if link.consumed[0] + link.consumed[1] >= portion {
            let consumed = std::mem::take(&mut link.consumed);
            let written = self.push(id, &ClientMessage::Credit(consumed));
            debug_assert!(written.is_ok() || self.ended());
        }
    }

    /// Asks whether the agent is there; the answer is the ping's id.
    pub fn ping(&mut self) -> Result<u64, RequestError> {
        self.call(Call::Ping, &ClientMessage::Ping)
    }

    /// Asks which execs there are with numbers above `after`; the answer is the request's id.
    pub fn list(&mut self, after: u64) -> Result<u64, RequestError> {
        self.call(Call::List, &ClientMessage::List { after })
    }

    /// Sends a signal to the main process of an exec of the guest; the answer is the request's id.
    pub fn signal_exec(&mut self, exec: u64, number: u8) -> Result<u64, RequestError> {
        let signal = signal(number)?;
        self.call(Call::Act, &ClientMessage::SignalExec { exec, signal })
    }

    /// Ends an exec of the guest; the answer is the request's id.
    pub fn cancel_exec(
        &mut self,
        exec: u64,
        reason: CancelReason,
        grace_ns: u64,
    ) -> Result<u64, RequestError> {
        let message = ClientMessage::CancelExec {
            exec,
            reason,
            grace_ns,
        };
        self.call(Call::Act, &message)
    }

    /// Has an exec of the guest that has ended forgotten; the answer is the request's id.
    pub fn release(&mut self, exec: u64) -> Result<u64, RequestError> {
        self.call(Call::Act, &ClientMessage::Release(exec))
    }

    fn call(&mut self, call: Call, message: &ClientMessage<'_>) -> Result<u64, RequestError> {
        if self.calls.len() >= MAX_CALLS {
            return Err(RequestError::TooMany);
        }
        let id = self.last_id + 1;
        self.push(id, message)?;
        self.last_id = id;
        self.calls.insert(id, call);
        Ok(id)
    }

    fn about(&mut self, id: u64, message: &ClientMessage<'_>) -> Result<(), RequestError> {
        match self.links.contains_key(&id) {
            true => self.push(id, message),
            false => Err(RequestError::NotLive { id }),
        }
    }

    fn push(&mut self, id: u64, message: &ClientMessage<'_>) -> Result<(), RequestError> {
        if self.ended() {
            return Err(RequestError::Ended);
        }
        self.out
            .push(|sequence, out| message.encode(id, sequence, out))?;
        Ok(())
    }

    /// Bytes to be sent.
    pub fn outgoing(&self) -> &[u8] {
        self.out.pending()
    }

    /// The first `count` of them were.
    pub fn wrote(&mut self, count: usize) {
        self.out.wrote(count);
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

    /// The next event. After an error the session has ended.
    #[expect(
        clippy::should_implement_trait,
        reason = "lends from the session, which an Iterator cannot"
    )]
    pub fn next(&mut self) -> Result<Option<Event<'_>>, Violation> {
        if self.ended() {
            return Ok(None);
        }
        match self.advance() {
            Ok(Some(Event::Output {
                id, stream, offset, ..
            })) => {
                let payload = self.inbound.frame().map_or(&[][..], |frame| frame.payload);
                // The fields before the data were read when the frame was judged.
                Ok(Some(Event::Output {
                    id,
                    stream,
                    offset,
                    data: payload.get(13..).unwrap_or_default(),
                }))
            }
            Ok(event) => Ok(event),
            Err(violation) => {
                self.phase = Phase::Ended;
                Err(violation)
            }
        }
    }

    /// Takes one frame: judged whole, then applied. Output comes back without its data.
    fn advance(&mut self) -> Result<Option<Event<'static>>, Violation> {
        if !self.inbound.take()? {
            return Ok(None);
        }
        let Some(frame) = self.inbound.frame() else {
            return Ok(None);
        };
        let message = AgentMessage::decode(&frame)?;
        let Header { id, kind, .. } = frame.header;
        match message {
            AgentMessage::Hello(theirs) => return self.opened(id, theirs).map(Some),
            AgentMessage::Goodbye { code, message } => {
                self.phase = Phase::Ended;
                return Ok(Some(Event::Goodbye { code, message }));
            }
            _ => {}
        }
        if !matches!(self.phase, Phase::Open { .. }) {
            return Err(Violation::Hello { kind });
        }
        if let Some(call) = self.calls.get(&id) {
            demand(call.answered_by(kind), || Violation::Order { kind, id })?;
            self.calls.remove(&id);
            return Ok(match message {
                AgentMessage::Pong => Some(Event::Pong { id }),
                AgentMessage::Done => Some(Event::Done { id }),
                AgentMessage::Execs(page) => Some(Event::Execs { id, page }),
                AgentMessage::Refused(refusal) => Some(Event::Refused { id, refusal }),
                _ => None,
            });
        }
        let link = self
            .links
            .get_mut(&id)
            .ok_or(Violation::UnknownId { kind, id })?;
        link.judge(id, kind, &message)?;
        let event = link.apply(id, message);
        if event.as_ref().is_some_and(|event| link.over(event)) {
            self.links.remove(&id);
        }
        Ok(event)
    }

    fn opened(&mut self, id: u64, theirs: Hello) -> Result<Event<'static>, Violation> {
        let kind = FrameKind::AgentHello;
        demand(
            matches!(self.phase, Phase::AwaitHello { .. }) && id == 0,
            || Violation::Hello { kind },
        )?;
        let ours = self.hello.versions;
        if theirs.generation != self.hello.generation {
            return Err(Violation::Stale {
                ours: self.hello.generation,
                theirs: theirs.generation,
            });
        }
        let version = ours.common(theirs.versions).ok_or(Violation::Version {
            ours,
            theirs: theirs.versions,
        })?;
        self.phase = Phase::Open { version };
        Ok(Event::Opened {
            version,
            features: theirs.features,
        })
    }

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<u64> {
        match self.phase {
            Phase::AwaitHello { until } => Some(until),
            _ => None,
        }
    }

    /// The clock says `now`.
    pub fn tick(&mut self, now: u64) -> Result<(), Violation> {
        match self.deadline() {
            Some(at) if at <= now => {
                self.phase = Phase::Ended;
                Err(Violation::Deadline)
            }
            _ => Ok(()),
        }
    }
}
