//! The owner's question for the agent's counters: one at a time, answered within a time of ours whatever the agent does.
//!
//! ```text
//!                          .--------- an older answer is owed -------.
//!                          |                                         v it has come
//!   asked ----------> open until ----> sent with a number ----> answered
//!                          |                |
//!                          '----------------'---> the time is over: late; the connection is lost: gone
//! ```
//!
//! The protocol has one question on its way at a time, too, and no way to take one back. So an answer that comes after
//! its time belongs to nobody; who has asked meanwhile waits for it to pass, and then for the answer to a question of
//! their own.

use std::time::Duration;

use vmm_protocol::AgentCounters;

/// How long an answer may take.
pub const DEADLINE: Duration = Duration::from_secs(1);
/// Answers that an owner has to be able to hold: it asks again only when it has taken the last one.
pub const COUNTED: usize = 1;

/// What comes of a question.
pub type Counted = Result<AgentCounters, Uncounted>;

/// Why an agent has said nothing of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Uncounted {
    /// It has not dialled yet, or has not taken up its life.
    #[error("the agent is not ready")]
    NotReady,
    /// Its connection was lost, perhaps over this very question.
    #[error("the agent's control connection is gone")]
    Gone,
    /// It did not answer.
    #[error("the agent did not answer within {DEADLINE:?}")]
    Late,
}

/// The question that is open, if one is. Pure: times are its caller's, in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Question {
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    until: u64,
    /// `None` while it cannot be sent.
    number: Option<u64>,
}

impl Question {
    /// Opens one; `false` if one is open, whose answer will do.
    pub(super) fn open(&mut self, now: u64) -> bool {
        let until = now.saturating_add(DEADLINE.as_nanos() as u64);
        let free = self.open.is_none();
        self.open.get_or_insert(Open {
            until,
            number: None,
        });
        free
    }

    /// True while the open one is still to be sent.
    pub(super) fn unsent(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.number.is_none())
    }

    /// The open one has gone out with this number.
    pub(super) fn sent(&mut self, number: u64) {
        if let Some(open) = &mut self.open {
            open.number = Some(number);
        }
    }

    /// An answer with this number has come: whether it closes the open one.
    pub(super) fn answered(&mut self, number: u64) -> bool {
        let ours = |open: &mut Open| open.number == Some(number);
        self.open.take_if(ours).is_some()
    }

    /// Closes it without an answer; whether one was open.
    pub(super) fn give_up(&mut self) -> bool {
        self.open.take().is_some()
    }

    /// When it is late.
    pub(super) fn deadline(&self) -> Option<u64> {
        self.open.as_ref().map(|open| open.until)
    }
}
