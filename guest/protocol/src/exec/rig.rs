//! A workload of the tests: two pipes with bytes in them, and the loop that reads them as the agent
//! does.

use super::*;
use crate::message::ExecRequest;

pub(super) const BOTH: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

pub(super) struct Rig {
    pub exec: Exec,
    /// How much of what was written has been read: the pipes hold the rest.
    pub read: [usize; 2],
    /// Everything that was ever written.
    pub written: [Vec<u8>; 2],
    /// Something still holds the writing end.
    pub held: [bool; 2],
    pub now: u64,
    pub actions: Vec<Action>,
    /// The leaf cannot be emptied by a kill.
    pub unkillable: bool,
}

pub(super) fn settings(limit: Option<u64>, policy: Policy) -> Settings {
    let mut request = ExecRequest::new(["test"]);
    request.output_limit = limit;
    request.policy = policy;
    Settings::new(&request)
}

impl Rig {
    pub fn new(settings: Settings) -> Self {
        let mut exec = Exec::new(settings, 0);
        exec.started(1, 100);
        Self {
            exec,
            read: [0; 2],
            written: Default::default(),
            held: [true; 2],
            now: 0,
            actions: Vec::new(),
            unkillable: false,
        }
    }

    pub fn write(&mut self, stream: Stream, bytes: &[u8]) {
        if self.held[stream.index()] {
            self.written[stream.index()].extend_from_slice(bytes);
        }
    }

    /// Reads one stream until it would block, ends or has no room, at most `most` bytes at a time.
    pub fn read(&mut self, stream: Stream, most: usize) {
        let index = stream.index();
        loop {
            let pipe = &self.written[index][self.read[index]..];
            if pipe.is_empty() {
                match self.held[index] {
                    true => drop(self.exec.would_block(stream)),
                    false => self.exec.close(stream),
                }
                break;
            }
            match self.exec.room(stream) {
                Room::Store(space) => {
                    let count = space.len().min(pipe.len()).min(most);
                    space[..count].copy_from_slice(&pipe[..count]);
                    self.read[index] += count;
                    self.exec.commit(stream, count);
                }
                Room::Discard => {
                    let count = pipe.len().min(most);
                    self.read[index] += count;
                    self.exec.drop_bytes(stream, count, self.now);
                }
                Room::Wait | Room::Closed => break,
            }
        }
    }

    /// Carries out what the exec asks for, as an agent does.
    pub fn act(&mut self) {
        while let Some(action) = self.exec.action() {
            self.actions.push(action);
            match action {
                Action::KillLeaf if !self.unkillable => {
                    self.held = [false; 2];
                    self.exec.main_exited(MainEnd::Signaled(9), self.now);
                    self.exec.leaf_empty();
                }
                Action::ReadOut => BOTH
                    .into_iter()
                    .for_each(|stream| self.read(stream, usize::MAX)),
                Action::Finish => self.exec.finish(Usage::default(), self.now),
                Action::KillLeaf | Action::Signal(_) => {}
            }
        }
    }

    /// Reads both streams and acts.
    pub fn turn(&mut self) {
        BOTH.into_iter()
            .for_each(|stream| self.read(stream, usize::MAX));
        self.act();
    }

    pub fn tick(&mut self, now: u64) {
        self.now = now;
        self.exec.tick(now);
        self.act();
    }

    pub fn exit(&mut self, code: u8) {
        self.held = [false; 2];
        self.exec.main_exited(MainEnd::Exited(code), self.now);
        self.exec.leaf_empty();
    }

    /// What a client would get of a stream.
    pub fn forwarded(&self, stream: Stream) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let offset = self.exec.earliest(stream) + all.len() as u64;
            match self.exec.bytes(stream, offset, usize::MAX) {
                [] => return all,
                piece => all.extend_from_slice(piece),
            }
        }
    }

    pub fn cause(&self) -> Option<&Cause> {
        self.exec.record().map(|record| &record.cause)
    }
}
