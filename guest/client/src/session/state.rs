//! What a session's handles and its thread share under the lock: the protocol machine and a queue
//! per exec.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar};

use vmm_protocol::session::{ClientSession, Event as Said};
use vmm_protocol::{ExecsPage, Refusal, Stream};

use super::SessionError;
use crate::bytes::Shelf;
use crate::event::{Ended, Event, Lost};

/// Events of one exec above which output joins what is queued already, and notices end the session:
/// what an agent can make a client hold is bounded by windows and by this.
const MAX_QUEUED: usize = 256;
/// Reads before the lock is given to others.
const MAX_READS: usize = 4;

/// What an agent says to a call.
#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Execs(ExecsPage),
    Refused(Refusal),
}

#[derive(Debug)]
pub(crate) struct State {
    machine: ClientSession,
    execs: BTreeMap<u64, Queue>,
    /// Calls that someone waits for, and their answers.
    calls: BTreeMap<u64, Option<Answer>>,
    lost: Option<String>,
    write_failed: bool,
    /// Buffers for output, used again.
    shelf: Arc<Shelf>,
}

/// What one exec has said and its handle has not yet taken.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) events: VecDeque<Event>,
    pub(crate) changed: Arc<Condvar>,
    /// The last event has been queued.
    pub(crate) ended: bool,
    /// The workload takes no more stdin.
    pub(crate) stdin_closed: bool,
    /// The handle is gone.
    abandoned: bool,
}

impl State {
    pub(super) fn new(machine: ClientSession) -> Self {
        Self {
            machine,
            execs: BTreeMap::new(),
            calls: BTreeMap::new(),
            lost: None,
            write_failed: false,
            shelf: Arc::default(),
        }
    }

    pub(crate) fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// The machine, for a request.
    pub(crate) fn alive(&mut self) -> Result<&mut ClientSession, SessionError> {
        match &self.lost {
            Some(reason) => Err(SessionError::Lost {
                reason: reason.clone(),
            }),
            None => Ok(&mut self.machine),
        }
    }

    pub(super) fn open(&mut self, id: u64) {
        let queue = Queue {
            events: VecDeque::new(),
            changed: Arc::default(),
            ended: false,
            stdin_closed: false,
            abandoned: false,
        };
        self.execs.insert(id, queue);
    }

    pub(crate) fn queue(&mut self, id: u64) -> Option<&mut Queue> {
        self.execs.get_mut(&id)
    }

    /// The next event of an exec, whose bytes count as consumed.
    pub(crate) fn take(&mut self, id: u64) -> Option<Event> {
        let event = self.execs.get_mut(&id)?.events.pop_front()?;
        if let Event::Output { stream, data, .. } = &event {
            self.machine.consumed(id, *stream, data.len() as u64);
        }
        Some(event)
    }

    /// The handle is gone: what comes is thrown away until the end. Of an exec of its own that is consumed, too.
    pub(crate) fn abandon(&mut self, id: u64) {
        // Before anything is given back: what was not taken by the handle stays at the agent.
        let _ = self.machine.detach(id);
        while self.take(id).is_some() {}
        match self.execs.get_mut(&id) {
            Some(queue) if !queue.ended => queue.abandoned = true,
            _ => drop(self.execs.remove(&id)),
        }
    }

    pub(super) fn await_answer(&mut self, id: u64) {
        self.calls.insert(id, None);
    }

    /// The answer to a call, once.
    pub(super) fn answer(&mut self, id: u64) -> Option<Answer> {
        self.calls.get_mut(&id)?.take()
    }

    /// Nobody waits for it any more.
    pub(super) fn forget_call(&mut self, id: u64) {
        self.calls.remove(&id);
    }

    fn answered(&mut self, id: u64, answer: Answer) -> bool {
        match self.calls.get_mut(&id) {
            Some(waiting) => {
                *waiting = Some(answer);
                true
            }
            None => false,
        }
    }

    /// Ends the session: every exec that has not ended is lost.
    pub(super) fn lose(&mut self, reason: &str) {
        if self.lost.is_some() {
            return;
        }
        self.lost = Some(reason.to_owned());
        for (id, queue) in &mut self.execs {
            let received = self.machine.received(*id).unwrap_or_default();
            queue.stdin_closed = true;
            if !queue.ended {
                queue.end(Ended::Lost(Lost {
                    reason: reason.to_owned(),
                    received,
                }));
            }
        }
        self.execs.retain(|_, queue| !queue.abandoned);
    }

    pub(super) fn sending(&self) -> bool {
        !self.write_failed && !self.machine.outgoing().is_empty()
    }

    /// Sends what the socket takes; `false` if the session's thread has something to do about the
    /// rest.
    pub(super) fn send(&mut self, mut transmit: impl FnMut(&[u8]) -> io::Result<usize>) -> bool {
        while self.sending() {
            match transmit(self.machine.outgoing()) {
                Ok(0) => return false,
                Ok(count) => self.machine.wrote(count),
                Err(_) => self.write_failed = true,
            }
        }
        // What the agent said before it went is read before the session is given up.
        !self.write_failed
    }

    /// Takes what has come; `true` if the answer to a call was among it.
    pub(super) fn receive(
        &mut self,
        now: u64,
        mut receive: impl FnMut(&mut [u8]) -> io::Result<Option<usize>>,
    ) -> bool {
        let mut pong = self.deliver();
        for _ in 0..MAX_READS {
            if self.lost.is_some() {
                break;
            }
            match receive(self.machine.space()) {
                Ok(Some(0)) => self.lose("the agent closed the connection"),
                Ok(Some(count)) => {
                    self.machine.filled(count, now);
                    pong |= self.deliver();
                }
                Ok(None) if self.write_failed => self.lose("the agent takes nothing any more"),
                Ok(None) => break,
                Err(error) => self.lose(&format!("reading failed: {error}")),
            }
        }
        pong
    }

    /// Hands out what the machine has.
    fn deliver(&mut self) -> bool {
        let mut pong = false;
        loop {
            let said = match self.machine.next() {
                Ok(Some(said)) => said,
                Ok(None) => return pong,
                Err(violation) => {
                    self.lose(&format!(
                        "the agent broke the protocol: {}",
                        violation.describe()
                    ));
                    return pong;
                }
            };
            let (id, event) = match said {
                Said::Output {
                    id,
                    stream,
                    offset,
                    data,
                } => {
                    let count = data.len() as u64;
                    let wanted = self
                        .execs
                        .get_mut(&id)
                        .is_some_and(|queue| queue.output(stream, offset, data, &self.shelf));
                    if !wanted {
                        self.machine.consumed(id, stream, count);
                    }
                    continue;
                }
                Said::Pong { id } => {
                    pong |= self.answered(id, Answer::Done);
                    continue;
                }
                Said::Execs { id, page } => {
                    pong |= self.answered(id, Answer::Execs(page));
                    continue;
                }
                Said::Done { id } => {
                    if !self.answered(id, Answer::Done) {
                        // Of an attach or a wait whose handle is gone.
                        self.execs.remove(&id);
                    } else {
                        pong = true;
                    }
                    continue;
                }
                Said::Refused { id, refusal } if self.calls.contains_key(&id) => {
                    pong |= self.answered(id, Answer::Refused(refusal));
                    continue;
                }
                Said::Goodbye { code, message } => {
                    self.lose(&format!("the agent ended the session ({code}): {message}"));
                    return pong;
                }
                Said::Opened { .. } => continue,
                Said::StdinCredit { id, .. } => {
                    if let Some(queue) = self.execs.get_mut(&id) {
                        queue.changed.notify_all();
                    }
                    continue;
                }
                Said::Started { id, exec, pid } => {
                    self.notice(id, Event::Started { exec, pid });
                    // Of a detached exec that is all.
                    if let (None, Some(queue)) =
                        (self.machine.received(id), self.execs.get_mut(&id))
                    {
                        queue.ended = true;
                    }
                    continue;
                }
                Said::Limit { id, at } => (id, Event::Limit(at)),
                Said::Oom { id, oom } => (id, Event::Oom(oom)),
                Said::StdinClosed { id, why } => (id, Event::StdinClosed(why)),
                Said::Exit { id, record } => (id, Event::Ended(Ended::Exit(record))),
                Said::Refused { id, refusal } => (id, Event::Ended(Ended::Refused(refusal))),
            };
            if !self.notice(id, event) {
                self.lose("the agent sent more notices than any exec has");
                return pong;
            }
        }
    }

    /// `false` if there are too many of them.
    fn notice(&mut self, id: u64, event: Event) -> bool {
        let Some(queue) = self.execs.get_mut(&id) else {
            return true;
        };
        match event {
            Event::Ended(ended) => {
                queue.stdin_closed = true;
                queue.end(ended);
                if queue.abandoned {
                    self.execs.remove(&id);
                }
                return true;
            }
            Event::StdinClosed(_) => queue.stdin_closed = true,
            _ => {}
        }
        if queue.events.len() >= 2 * MAX_QUEUED {
            return false;
        }
        if !queue.abandoned {
            queue.events.push_back(event);
        }
        queue.changed.notify_all();
        true
    }
}

impl Queue {
    /// Queues output; `false` if nobody wants it.
    fn output(&mut self, stream: Stream, offset: u64, data: &[u8], shelf: &Arc<Shelf>) -> bool {
        if self.abandoned {
            return false;
        }
        if self.events.len() >= MAX_QUEUED {
            // Of two chunks in a row one is of this stream, unless a notice lies between.
            let mut latest = self.events.iter_mut().rev().take(2);
            if let Some(Event::Output { data: queued, .. }) = latest.find(
                |event| matches!(event, Event::Output { stream: queued, .. } if *queued == stream),
            ) {
                queued.extend_from_slice(data);
                return true;
            }
        }
        self.events.push_back(Event::Output {
            stream,
            offset,
            data: shelf.copy(data),
        });
        self.changed.notify_all();
        true
    }

    fn end(&mut self, ended: Ended) {
        self.ended = true;
        self.events.push_back(Event::Ended(ended));
        self.changed.notify_all();
    }
}
