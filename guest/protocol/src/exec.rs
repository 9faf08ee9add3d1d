//! One exec inside the agent, as a state machine without I/O and without a clock.
//!
//! ```text
//!  Starting --started--> Running --main_exited--> Draining --both streams closed,--> Emptying
//!     |                     |                        |      or drain deadline          |
//!     |                kill recorded:           killed before,                   leaf empty, or
//!     |                KillLeaf                 or now: at once               containment deadline
//!     |                     |                        +------------------------->       |
//!  start_failed                                                                        v
//!     +-----------------------> Ended <--finish(usage)-- Finishing <-------------------+
//! ```
//!
//! The driver (the agent's loop) reports what happened (`started`, `commit`, `main_exited`,
//! `cancel`, `tick`, ...) and carries out what [`Exec::action`] asks for. Pipes are read straight
//! into the store:
//!
//! 1. [`Exec::room`] says where the next bytes of a stream go: into the store, into a scratch
//!    buffer whose content is thrown away, or nowhere yet, because an uncapped exec's ring is full.
//! 2. [`Exec::commit`] or [`Exec::drop_bytes`] says how many there were; [`Exec::would_block`] and
//!    [`Exec::close`] say that there were none for now, or will never be more.
//!
//! What was taken into the store is what a client gets: sessions only hold cursors into it.

mod readers;
mod report;
mod stdin;
mod store;

pub use readers::Reader;
pub use report::{Action, AttachError, MainEnd, Notice, NoticeKind, Room, Settings, Usage};
pub use stdin::Stdin;

use std::collections::VecDeque;

use crate::cause::{CancelReason, Cause, Counts, Oom, Record, StartStage, Stream};
use crate::limits::UNCAPPED_RING;
use crate::message::{ClosedWhy, ExecState, Policy};
use readers::Readers;
use store::Store;

/// The most notices of one exec; further memory kills are only counted.
const MAX_NOTICES: usize = 64;
/// Emptied blocks that each of an exec's stores keeps.
const SPARES: usize = 4;
/// The signal that asks a process to end.
const SIGTERM: u8 = 15;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Starting,
    Running,
    Draining { until: u64 },
    Emptying,
    Finishing,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kill {
    TimedOut,
    OutputLimit,
    Cancelled(CancelReason),
}

/// One exec.
///
/// ```
/// use vmm_protocol::exec::{Action, Exec, MainEnd, Room, Settings, Usage};
/// use vmm_protocol::{Cause, ExecRequest, Stream};
///
/// let mut request = ExecRequest::new(["yes"]);
/// request.output_limit = Some(4);
/// let mut exec = Exec::new(Settings::new(&request), 0);
/// exec.started(1, 100);
///
/// let Room::Store(space) = exec.room(Stream::Stdout) else { panic!("there is room") };
/// assert_eq!(space.len(), 4);
/// space.copy_from_slice(b"y\ny\n");
/// exec.commit(Stream::Stdout, 4);
/// assert_eq!(exec.room(Stream::Stdout), Room::Discard);
/// exec.drop_bytes(Stream::Stdout, 2, 10); // one byte more than the cap: the limit
/// assert_eq!(exec.action(), Some(Action::KillLeaf));
///
/// exec.main_exited(MainEnd::Signaled(9), 20);
/// exec.close(Stream::Stdout);
/// exec.close(Stream::Stderr);
/// exec.leaf_empty();
/// assert_eq!(exec.action(), Some(Action::ReadOut));
/// assert_eq!(exec.action(), Some(Action::Finish));
/// exec.finish(Usage::default(), 30);
/// assert_eq!(exec.record().map(|record| &record.cause), Some(&Cause::OutputLimit));
/// ```
#[derive(Debug)]
pub struct Exec {
    settings: Settings,
    began: u64,
    phase: Phase,
    stores: [Store; 2],
    counts: [Counts; 2],
    open: [bool; 2],
    readers: Readers,
    limited: bool,
    /// Set once bytes were thrown away, for the limit or another reason; from then on all are.
    discarding: bool,
    /// The drain deadline has passed: a stream that is still held is cut off.
    cutting: bool,
    truncated: bool,
    kill: Option<Kill>,
    kill_sent: bool,
    /// A kill came after the main process's exit: what is left is not waited for.
    hurried: bool,
    timeout_until: Option<u64>,
    grace_until: Option<u64>,
    contain_until: Option<u64>,
    leaf_empty: bool,
    uncontained: bool,
    end: Option<(MainEnd, u64)>,
    start_failure: Option<(StartStage, i32)>,
    main_oom: Option<Oom>,
    actions: VecDeque<Action>,
    notices: Vec<Notice>,
    record: Option<Record>,
}

impl Exec {
    /// An exec that is about to be started.
    pub fn new(settings: Settings, now: u64) -> Self {
        let most = settings.output_limit.unwrap_or(u64::MAX);
        // What was consumed is kept in place of blocks that are free.
        let spares = if settings.detached { 1 } else { SPARES };
        Self {
            settings,
            began: now,
            phase: Phase::Starting,
            stores: [Store::new(most, spares), Store::new(most, spares)],
            counts: [Counts::default(); 2],
            open: [true; 2],
            readers: Readers::new(!settings.detached),
            limited: false,
            discarding: false,
            cutting: false,
            truncated: false,
            kill: None,
            kill_sent: false,
            hurried: false,
            timeout_until: (settings.timeout_ns > 0)
                .then(|| now.saturating_add(settings.timeout_ns)),
            grace_until: None,
            contain_until: None,
            leaf_empty: false,
            uncontained: false,
            end: None,
            start_failure: None,
            main_oom: None,
            actions: VecDeque::new(),
            notices: Vec::new(),
            record: None,
        }
    }

    // What happened.

    /// The process runs its program.
    pub fn started(&mut self, exec: u64, pid: u32) {
        if self.phase == Phase::Starting {
            self.phase = Phase::Running;
            self.notice(NoticeKind::Started { exec, pid });
        }
    }

    /// Nothing ran: the leaf, if there is one, is removed by [`Action::Finish`].
    pub fn start_failed(&mut self, stage: StartStage, errno: i32) {
        if self.phase == Phase::Starting {
            self.start_failure = Some((stage, errno));
            self.open = [false; 2];
            self.leaf_empty = true;
            self.actions.clear();
            self.phase = Phase::Emptying;
            self.settle();
        }
    }

    /// `count` bytes were read into the room of a stream.
    pub fn commit(&mut self, stream: Stream, count: usize) {
        let index = stream.index();
        self.stores[index].commit(count);
        self.counts[index].seen += count as u64;
        self.counts[index].forwarded += count as u64;
        self.trim();
    }

    /// `count` bytes of a stream were read and thrown away.
    pub fn drop_bytes(&mut self, stream: Stream, count: usize, now: u64) {
        if count == 0 {
            return;
        }
        let counts = &mut self.counts[stream.index()];
        counts.seen += count as u64;
        counts.dropped += count as u64;
        self.discarding = true;
        match self.settings.output_limit {
            Some(_) if !self.limited => {
                self.limited = true;
                self.notice(NoticeKind::Limit);
                if self.settings.policy == Policy::Kill {
                    self.record_kill(Kill::OutputLimit, now);
                }
            }
            Some(_) => {}
            None => self.truncated = true,
        }
    }

    /// Takes bytes that were read elsewhere, as [`room`](Self::room) would have them. The answer
    /// says how many went: fewer than there were only if an uncapped exec's ring is full, or the
    /// stream closed.
    pub fn absorb(&mut self, stream: Stream, mut bytes: &[u8], now: u64) -> usize {
        let whole = bytes.len();
        while !bytes.is_empty() {
            let count = match self.room(stream) {
                Room::Store(space) => {
                    let count = space.len().min(bytes.len());
                    space[..count].copy_from_slice(&bytes[..count]);
                    self.commit(stream, count);
                    count
                }
                Room::Discard => {
                    self.drop_bytes(stream, bytes.len(), now);
                    bytes.len()
                }
                Room::Wait | Room::Closed => break,
            };
            bytes = &bytes[count..];
        }
        whole - bytes.len()
    }

    /// A read would block: something still holds the stream, and has written nothing more. The
    /// stream is closed now if nothing of the exec is left to write; the answer says so.
    pub fn would_block(&mut self, stream: Stream) -> bool {
        let index = stream.index();
        let nobody_left = self.leaf_empty || self.uncontained;
        if self.phase == Phase::Emptying && self.open[index] && (nobody_left || self.cutting) {
            self.truncated = true;
            if nobody_left {
                self.open[index] = false;
                self.settle();
            }
        }
        !self.open[index]
    }

    /// A stream has ended, or never was.
    pub fn close(&mut self, stream: Stream) {
        self.open[stream.index()] = false;
        self.settle();
    }

    /// The main process was reaped.
    pub fn main_exited(&mut self, end: MainEnd, now: u64) {
        if !matches!(self.phase, Phase::Starting | Phase::Running) {
            return;
        }
        self.end = Some((end, now));
        self.grace_until = None;
        self.phase = Phase::Draining {
            until: now.saturating_add(self.settings.drain_ns),
        };
        if self.kill.is_some() {
            // Killed, or gone by itself within the grace: what is left of the leaf goes now.
            self.kill_leaf(now);
            self.phase = Phase::Emptying;
        }
        if self.leaf_empty {
            self.actions.push_back(Action::ReadOut);
        }
        self.settle();
    }

    /// No process is left in the leaf.
    pub fn leaf_empty(&mut self) {
        if !self.leaf_empty {
            self.leaf_empty = true;
            self.actions.push_back(Action::ReadOut);
            self.settle();
        }
    }

    /// Something was killed for memory; `main` if it was the main process.
    pub fn oom(&mut self, oom: Oom, main: bool) {
        if main {
            self.main_oom.get_or_insert_with(|| oom.clone());
        }
        if self.notices.len() < MAX_NOTICES && !matches!(self.phase, Phase::Ended) {
            self.notice(NoticeKind::Oom(oom));
        }
    }

    /// Nothing reads stdin any more. Told once.
    pub fn stdin_closed(&mut self, why: ClosedWhy) {
        let told = self
            .notices
            .iter()
            .any(|notice| matches!(notice.what, NoticeKind::StdinClosed(_)));
        if !told && !matches!(self.phase, Phase::Ended) {
            self.notice(NoticeKind::StdinClosed(why));
        }
    }

    /// Someone wants it to end: `SIGTERM` now and the leaf killed after the grace, or at once if
    /// that is 0. Accepted at any time; of several kills the first is the cause.
    pub fn cancel(&mut self, reason: CancelReason, grace_ns: u64, now: u64) {
        if grace_ns == 0 || self.end.is_some() || self.kill_sent {
            self.record_kill(Kill::Cancelled(reason), now);
            return;
        }
        if matches!(self.phase, Phase::Starting | Phase::Running) {
            self.kill.get_or_insert(Kill::Cancelled(reason));
            let until = now.saturating_add(grace_ns);
            if self.grace_until.is_none() {
                self.actions.push_back(Action::Signal(SIGTERM));
            }
            // A second cancel may shorten the grace, never lengthen it.
            self.grace_until = Some(self.grace_until.map_or(until, |earlier| earlier.min(until)));
        }
    }

    /// One more reader, from an offset of each stream on. Nothing behind that leaves the store before it was consumed.
    ///
    /// # Errors
    /// [`AttachError`]; nothing has changed then.
    pub fn attach(&mut self, from: [u64; 2]) -> Result<Reader, AttachError> {
        let [earliest, length] = [
            self.stores.each_ref().map(Store::earliest),
            self.stores.each_ref().map(Store::end),
        ];
        if from[0] < earliest[0] || from[1] < earliest[1] {
            let possible = [from[0].max(earliest[0]), from[1].max(earliest[1])];
            return Err(AttachError::BelowStart { earliest, possible });
        }
        if from[0] > length[0] || from[1] > length[1] {
            return Err(AttachError::BeyondEnd { from, length });
        }
        Ok(self.readers.attach(from))
    }

    /// A reader takes no more; `true` if that made room where there was none.
    pub fn detach(&mut self, reader: Reader) -> bool {
        self.with_readers(|readers, _| readers.detach(reader))
    }

    /// Bytes of each stream that a reader has consumed; `true` if that made room where there was
    /// none.
    pub fn acknowledge(&mut self, reader: Reader, consumed: [u64; 2]) -> bool {
        self.with_readers(|readers, lengths| readers.consumed(reader, consumed, lengths))
    }

    fn with_readers(&mut self, change: impl FnOnce(&mut Readers, [u64; 2])) -> bool {
        let full = self.ring_room() == 0;
        change(&mut self.readers, self.stores.each_ref().map(Store::end));
        self.trim();
        full && self.ring_room() > 0
    }

    /// From now on it is kept as a detached exec is.
    pub fn keep(&mut self) {
        self.settings.detached = true;
    }

    /// The clock says `now`: carries out what has become due.
    pub fn tick(&mut self, now: u64) {
        if self.timeout_until.is_some_and(|at| at <= now) {
            self.timeout_until = None;
            self.record_kill(Kill::TimedOut, now);
        }
        if self.grace_until.is_some_and(|at| at <= now) {
            self.grace_until = None;
            self.kill_leaf(now);
        }
        if let Phase::Draining { until } = self.phase
            && until <= now
        {
            self.cut_off(now);
        }
        if self.contain_until.is_some_and(|at| at <= now) {
            self.contain_until = None;
            if !self.leaf_empty || self.end.is_none() {
                self.uncontained = true;
                self.phase = Phase::Emptying;
                self.actions.push_back(Action::ReadOut);
                self.settle();
            }
        }
    }

    /// The leaf is removed and its usage known: the record is made. Does something once, after
    /// [`Action::Finish`].
    pub fn finish(&mut self, usage: Usage, now: u64) {
        if self.phase != Phase::Finishing {
            return;
        }
        self.phase = Phase::Ended;
        let ended = self.end.as_ref().map_or(now, |(_, at)| *at);
        self.record = Some(Record {
            cause: self.cause(),
            streams: self.counts,
            truncated: self.truncated,
            limited: self.limited,
            leaf_empty: self.leaf_empty,
            unproven: usage.unproven || self.uncontained,
            wall_ns: ended.saturating_sub(self.began),
            cpu_ns: usage.cpu_ns,
            peak_memory: usage.peak_memory,
        });
    }

    // What is to be done.

    /// The next thing to do; ask until there is none, after every report.
    pub fn action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`tick`](Self::tick) is due.
    pub fn deadline(&self) -> Option<u64> {
        let drain = match self.phase {
            Phase::Draining { until } => Some(until),
            _ => None,
        };
        [
            self.timeout_until,
            self.grace_until,
            drain,
            self.contain_until,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Where the next bytes of a stream go.
    pub fn room(&mut self, stream: Stream) -> Room<'_> {
        if !self.open[stream.index()] {
            return Room::Closed;
        }
        let room = match self.settings.output_limit {
            Some(_) if self.limited && crate::negative_control("EX02") => u64::MAX,
            _ if self.discarding => return Room::Discard,
            Some(limit) => {
                match limit.saturating_sub(self.counts[0].forwarded + self.counts[1].forwarded) {
                    1.. if crate::negative_control("EX01") => u64::MAX,
                    // The chunk that crosses the cap is taken up to the last byte that fits. What
                    // follows is read into nowhere: only that a byte did follow makes it a
                    // crossing.
                    room => room,
                }
            }
            None => self.ring_room(),
        };
        match (room, self.settings.output_limit) {
            (0, Some(_)) => Room::Discard,
            (0, None) if self.nobody_waits() => Room::Discard,
            (0, None) => Room::Wait,
            (room, _) => Room::Store(self.stores[stream.index()].space(room)),
        }
    }

    // What a session sends.

    /// Everything that was told so far, in order; only ever grows.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// The length of a stream as it will be forwarded, so far.
    pub fn length(&self, stream: Stream) -> u64 {
        self.stores[stream.index()].end()
    }

    /// The first offset of a stream that can still be had.
    pub fn earliest(&self, stream: Stream) -> u64 {
        self.stores[stream.index()].earliest()
    }

    /// Bytes of a stream from an offset on, at most `limit`; empty if there are none there.
    pub fn bytes(&self, stream: Stream, offset: u64, limit: usize) -> &[u8] {
        self.stores[stream.index()].slice(offset, limit)
    }

    /// What it is doing, for people.
    pub fn state(&self) -> ExecState {
        let full = self.settings.output_limit.is_none()
            && !self.discarding
            && self.open != [false; 2]
            && self.ring_room() == 0
            && !self.nobody_waits();
        match self.phase {
            Phase::Ended => ExecState::Ended,
            Phase::Starting => ExecState::Starting,
            _ if full => ExecState::Waiting,
            Phase::Running if !self.kill_sent => ExecState::Running,
            _ => ExecState::Ending,
        }
    }

    /// Once it has ended: gives back what its stores hold beyond the bytes themselves; what they take then.
    pub fn seal(&mut self) -> u64 {
        self.stores.iter_mut().map(Store::seal).sum()
    }

    /// The record, once the exec has ended. It goes after the last byte.
    pub fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    // How it is decided.

    /// Bytes that an uncapped exec may still take before the client has consumed some.
    fn ring_room(&self) -> u64 {
        let consumed = self.readers.consumed_by_all();
        let waiting: u64 = (0..2)
            .map(|index| self.stores[index].end() - consumed[index])
            .sum();
        (UNCAPPED_RING as u64).saturating_sub(waiting)
    }

    /// What was consumed leaves an uncapped exec's stores: at once, or from a detached one when the ring is full.
    fn trim(&mut self) {
        if self.settings.output_limit.is_some() {
            return;
        }
        let consumed = self.readers.consumed_by_all();
        if !self.settings.detached {
            for (store, consumed) in self.stores.iter_mut().zip(consumed) {
                store.release(consumed);
            }
            return;
        }
        let held = |stores: &[Store; 2]| -> u64 {
            stores
                .iter()
                .map(|store| store.end() - store.earliest())
                .sum()
        };
        while held(&self.stores) > UNCAPPED_RING as u64 {
            let spare =
                |index: usize| consumed[index].saturating_sub(self.stores[index].earliest());
            let most = usize::from(spare(1) > spare(0));
            if !self.stores[most].release_block(consumed[most]) {
                return;
            }
        }
    }

    /// It was killed and is gone: bytes that find no room now will never find any in time.
    fn nobody_waits(&self) -> bool {
        (self.kill.is_some() || self.hurried) && (self.leaf_empty || self.uncontained)
    }

    fn notice(&mut self, what: NoticeKind) {
        let at = [self.stores[0].end(), self.stores[1].end()];
        self.notices.push(Notice { at, what });
    }

    /// The one place where a cause that we send is decided: the first recorded stays. The main
    /// process's own end stands against a timeout and a cancel that come after it, but not against
    /// output beyond the cap.
    fn record_kill(&mut self, kill: Kill, now: u64) {
        match self.phase {
            Phase::Finishing | Phase::Ended => return,
            Phase::Starting | Phase::Running => {
                self.kill.get_or_insert(kill);
            }
            Phase::Draining { .. } | Phase::Emptying => {
                if kill == Kill::OutputLimit {
                    self.kill.get_or_insert(kill);
                }
                self.hurried = true;
            }
        }
        self.grace_until = None;
        self.kill_leaf(now);
        if self.end.is_some() {
            self.phase = Phase::Emptying;
            self.actions.push_back(Action::ReadOut);
        }
        self.settle();
    }

    fn kill_leaf(&mut self, now: u64) {
        if !self.kill_sent {
            self.kill_sent = true;
            self.contain_until = Some(now.saturating_add(self.settings.contain_ns));
            if !self.leaf_empty {
                self.actions.push_back(Action::KillLeaf);
            }
        }
    }

    /// The drain deadline passed with a stream still open. Whether something holds it, or only its
    /// bytes have not been read yet, shows when it is read once more before the kill.
    fn cut_off(&mut self, now: u64) {
        self.cutting = true;
        self.phase = Phase::Emptying;
        self.actions.push_back(Action::ReadOut);
        self.kill_leaf(now);
        self.actions.push_back(Action::ReadOut);
        self.settle();
    }

    /// Moves on where nothing is left to wait for.
    fn settle(&mut self) {
        let closed = self.open == [false; 2];
        if let (Phase::Draining { .. }, true) = (self.phase, closed) {
            self.phase = Phase::Emptying;
            // Whatever else the main process left behind goes with it.
            let now = self.end.as_ref().map_or(self.began, |(_, at)| *at);
            self.kill_leaf(now);
        }
        if self.phase == Phase::Emptying && closed && (self.leaf_empty || self.uncontained) {
            (self.timeout_until, self.grace_until, self.contain_until) = (None, None, None);
            self.phase = Phase::Finishing;
            self.actions.push_back(Action::Finish);
        }
    }

    fn cause(&self) -> Cause {
        if let Some((stage, errno)) = self.start_failure {
            return Cause::StartFailed { stage, errno };
        }
        match (self.kill, &self.end) {
            (Some(Kill::TimedOut), _) => Cause::TimedOut,
            (Some(Kill::OutputLimit), _) => Cause::OutputLimit,
            (Some(Kill::Cancelled(reason)), _) => Cause::Cancelled(reason),
            (None, Some((MainEnd::Signaled(9), _))) if self.main_oom.is_some() => self
                .main_oom
                .clone()
                .map_or(Cause::Signaled(9), Cause::OomKilled),
            (None, Some((MainEnd::Exited(code), _))) => Cause::Exited(*code),
            (None, Some((MainEnd::Signaled(signal), _))) => Cause::Signaled(*signal),
            (None, Some((MainEnd::Unknown(why), _))) => Cause::Lost(why.clone()),
            (None, None) => Cause::Lost("the main process's end was never seen".to_owned()),
        }
    }
}

#[cfg(test)]
mod property;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod tests;
