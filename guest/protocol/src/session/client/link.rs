//! What a client has of one exec.

use crate::cause::CauseKind;
use crate::limits::STDIN_WINDOW;
use crate::message::{AgentMessage, FrameKind};

use super::super::{Violation, demand};
use super::Event;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// To run it, and all of it.
    Own,
    /// To start it.
    Start,
    /// The output of one that is there.
    Attach,
    /// The end of one that is there.
    Wait,
}

#[derive(Debug)]
pub(super) struct Link {
    wish: Wish,
    pub(super) window: u64,
    /// Bytes received and not yet consumed.
    pub(super) held: [u64; 2],
    /// Bytes consumed and not yet given back.
    pub(super) consumed: [u64; 2],
    /// The first offsets of each stream.
    from: [u64; 2],
    /// The next offset of each stream.
    pub(super) next: [u64; 2],
    limit: Option<[u64; 2]>,
    started: bool,
    pub(super) stdin_left: u64,
    pub(super) stdin_closed: bool,
    /// It was given up: what still comes of it is not wanted.
    pub(super) leaving: bool,
}

impl Link {
    pub(super) fn new(wish: Wish, window: u64, from: [u64; 2], stdin: bool) -> Self {
        Self {
            wish,
            window,
            held: [0; 2],
            consumed: [0; 2],
            from,
            next: from,
            limit: None,
            started: false,
            stdin_left: STDIN_WINDOW,
            stdin_closed: !stdin,
            leaving: false,
        }
    }

    fn reads(&self) -> bool {
        matches!(self.wish, Wish::Own | Wish::Attach)
    }

    pub(super) fn detachable(&self) -> bool {
        matches!(self.wish, Wish::Attach | Wish::Wait)
    }

    /// Nothing comes behind this.
    pub(super) fn over(&self, event: &Event<'_>) -> bool {
        match event {
            Event::Exit { .. } | Event::Refused { .. } | Event::Done { .. } => true,
            Event::Started { .. } => self.wish == Wish::Start,
            _ => false,
        }
    }

    /// Decides about a message without changing anything.
    pub(super) fn judge(
        &self,
        id: u64,
        kind: FrameKind,
        message: &AgentMessage<'_>,
    ) -> Result<(), Violation> {
        let order = |holds| demand(holds, || Violation::Order { kind, id });
        if !self.reads() {
            // A start, a refusal and an end are all that is said of these.
            return order(match message {
                AgentMessage::Started { .. } => self.wish == Wish::Start,
                AgentMessage::Exit(record) => {
                    self.wish == Wish::Wait || record.cause.kind() == CauseKind::StartFailed
                }
                AgentMessage::Refused(_) => true,
                AgentMessage::Done => self.leaving,
                _ => false,
            });
        }
        match message {
            AgentMessage::Started { .. } => order(!self.started),
            AgentMessage::Refused(_) => order(!self.started && self.next == self.from),
            AgentMessage::Done => order(self.leaving),
            AgentMessage::Execs(_) | AgentMessage::Pong => order(false),
            AgentMessage::Output {
                stream,
                offset,
                data,
            } => {
                order(self.started)?;
                let (index, count) = (stream.index(), data.len() as u64);
                let expected = self.next[index];
                demand(*offset == expected, || Violation::Offset {
                    id,
                    expected,
                    found: *offset,
                })?;
                let unreturned: u64 = self.held.iter().chain(&self.consumed).sum();
                let allowed = self.window.saturating_sub(unreturned);
                demand(count <= allowed, || Violation::Credit {
                    kind,
                    id,
                    count,
                    allowed,
                })?;
                let end = expected.saturating_add(count);
                order(self.limit.is_none_or(|limit| end <= limit[index]))
            }
            AgentMessage::Limit(at) => order(
                self.started
                    && self.limit.is_none()
                    && at[0] >= self.next[0]
                    && at[1] >= self.next[1],
            ),
            AgentMessage::Exit(record) => {
                for (expected, counts) in self.next.iter().zip(&record.streams) {
                    let (expected, found) = (*expected, counts.forwarded);
                    demand(expected == found, || Violation::Offset {
                        id,
                        expected,
                        found,
                    })?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn apply(&mut self, id: u64, message: AgentMessage<'_>) -> Option<Event<'static>> {
        Some(match message {
            AgentMessage::Started { exec, pid } => {
                self.started = true;
                Event::Started { id, exec, pid }
            }
            AgentMessage::Output {
                stream,
                offset,
                data,
            } => {
                self.held[stream.index()] += data.len() as u64;
                self.next[stream.index()] += data.len() as u64;
                Event::Output {
                    id,
                    stream,
                    offset,
                    data: &[],
                }
            }
            AgentMessage::Limit(at) => {
                self.limit = Some(at);
                Event::Limit { id, at }
            }
            AgentMessage::Oom(oom) => Event::Oom { id, oom },
            AgentMessage::StdinClosed(why) => {
                self.stdin_closed = true;
                Event::StdinClosed { id, why }
            }
            AgentMessage::StdinCredit(bytes) => {
                self.stdin_left = self.stdin_left.saturating_add(bytes).min(STDIN_WINDOW);
                Event::StdinCredit {
                    id,
                    available: self.stdin_left,
                }
            }
            AgentMessage::Exit(record) => Event::Exit { id, record },
            AgentMessage::Refused(refusal) => Event::Refused { id, refusal },
            AgentMessage::Done => Event::Done { id },
            AgentMessage::Hello(_)
            | AgentMessage::Pong
            | AgentMessage::Execs(_)
            | AgentMessage::Goodbye { .. } => {
                return None;
            }
        })
    }
}
