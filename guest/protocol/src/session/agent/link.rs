//! What a session has sent of one exec, and what it sends next.

use crate::cause::Stream;
use crate::exec::{Exec, NoticeKind};
use crate::limits::{MAX_DATA, STDIN_WINDOW};
use crate::message::AgentMessage;

/// What a client wants of an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// All of it, and to be its client.
    Own,
    /// That it starts, no more.
    Start,
    /// Its output, from some offsets on, and its end.
    Attach,
    /// Its end.
    Wait,
}

#[derive(Debug)]
pub(super) struct Link {
    wish: Wish,
    /// Output bytes that may be unconsumed at the client.
    window: u64,
    /// Those that are.
    pub(super) in_flight: [u64; 2],
    /// How much of each stream has been queued.
    pub(super) sent: [u64; 2],
    /// How many notices have been.
    pub(super) notices: usize,
    /// The stream that had its turn last.
    pub(super) turn: Stream,
    /// Stdin bytes that the client may still send.
    pub(super) stdin_left: u64,
}

pub(super) enum Step {
    Output {
        stream: Stream,
        length: usize,
    },
    Notice(AgentMessage<'static>),
    /// The last frame.
    Last(AgentMessage<'static>),
}

impl Link {
    pub(super) fn new(wish: Wish, window: u64, from: [u64; 2]) -> Self {
        Self {
            wish,
            window,
            in_flight: [0; 2],
            sent: from,
            notices: 0,
            turn: Stream::Stderr,
            stdin_left: if wish == Wish::Own { STDIN_WINDOW } else { 0 },
        }
    }

    /// The client gets this exec's output.
    pub(super) fn reads(&self) -> bool {
        matches!(self.wish, Wish::Own | Wish::Attach)
    }

    /// The client is the exec's own.
    pub(super) fn owns(&self) -> bool {
        self.wish == Wish::Own
    }

    /// The client can go before the exec does.
    pub(super) fn detachable(&self) -> bool {
        matches!(self.wish, Wish::Attach | Wish::Wait)
    }

    /// The next frame of an exec: bytes as far as credit reaches, each notice in its place among
    /// them, or ahead of bytes that have no credit; the record after all.
    pub(super) fn step(&self, exec: &Exec) -> Option<Step> {
        let end = || {
            Some(Step::Last(AgentMessage::Exit(Box::new(
                exec.record()?.clone(),
            ))))
        };
        let notice = exec.notices().get(self.notices);
        match self.wish {
            Wish::Wait => return end(),
            Wish::Start => {
                return match notice {
                    Some(notice) if matches!(notice.what, NoticeKind::Started { .. }) => {
                        Some(Step::Last(notice.message()))
                    }
                    // What comes before the start, if it ever does, is had by attaching.
                    _ => end(),
                };
            }
            Wish::Own | Wish::Attach => {}
        }
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
        match notice {
            Some(notice) => Some(Step::Notice(notice.message())),
            None if !unsent => end(),
            None => None,
        }
    }
}
