//! What a client asks about an exec of the guest, by its number.

use crate::cause::CancelReason;

/// A request by an exec's number in the guest. How each is answered is said at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Its output from some offsets on. The id is live: answer as for [`Request::Exec`](super::Request::Exec), with the
    /// exec that is there, after [`Exec::attach`](crate::exec::Exec::attach).
    Attach {
        /// The exec's number.
        exec: u64,
        /// Offsets in stdout and stderr.
        from: [u64; 2],
    },
    /// Its end. The id is live: answer as for `Attach`.
    Wait {
        /// The exec's number.
        exec: u64,
    },
    /// Which execs there are: answer by [`AgentSession::list`](super::AgentSession::list).
    List {
        /// Those with numbers above this one.
        after: u64,
    },
    /// A signal for its main process: answer by [`AgentSession::done`](super::AgentSession::done).
    Signal {
        /// The exec's number.
        exec: u64,
        /// The signal's number.
        signal: u8,
    },
    /// End it: answer by [`AgentSession::done`](super::AgentSession::done).
    Cancel {
        /// The exec's number.
        exec: u64,
        /// Who wants it.
        reason: CancelReason,
        /// Time between `SIGTERM` and the kill, in nanoseconds.
        grace_ns: u64,
    },
    /// Forget it, if it has ended: answer by [`AgentSession::done`](super::AgentSession::done).
    Release {
        /// The exec's number.
        exec: u64,
    },
}
