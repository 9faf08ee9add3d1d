//! An agent of the tests: the real protocol machine, with execs that write what the test says.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_client::Session;
use vmm_protocol::exec::{Action, Exec, MainEnd, Reader, Room, Settings, Usage};
use vmm_protocol::session::{AgentSession, Ask, Request};
use vmm_protocol::{
    ExecInfo, ExecState, ExecsPage, GenerationId, Hello, Refusal, RefusedCode, Stream,
};

pub const GENERATION: GenerationId = GenerationId {
    counter: 7,
    public_id: 0xfeed,
};
pub const SOON: Duration = Duration::from_secs(5);

/// An agent over one stream. Its execs end by a signal, a cancel, or the end of stdin.
pub struct Agent {
    pub stream: UnixStream,
    pub session: AgentSession,
    pub execs: BTreeMap<u64, Exec>,
    pub stdin: BTreeMap<u64, Vec<u8>>,
    pub cancelled: Vec<u64>,
}

impl Agent {
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            session: AgentSession::new(Hello::new(GENERATION), 0),
            execs: BTreeMap::new(),
            stdin: BTreeMap::new(),
            cancelled: Vec::new(),
        }
    }

    /// Reads once, and takes every request of it. `false` at the end.
    pub fn hear(&mut self) -> bool {
        self.say();
        let count = match self.stream.read(self.session.space()) {
            Ok(0) | Err(_) => return false,
            Ok(count) => count,
        };
        self.session.filled(count, 0);
        while let Some(request) = self.session.next().expect("the client keeps the protocol") {
            match request {
                Request::Exec { id, request } => {
                    let mut exec = Exec::new(Settings::new(&request), 0);
                    exec.started(id, 1);
                    self.execs.insert(id, exec);
                }
                Request::Consumed { id, bytes } => {
                    let _ = self
                        .execs
                        .get_mut(&id)
                        .map(|exec| exec.acknowledge(Reader::FIRST, bytes));
                }
                Request::Stdin { id, data } => {
                    self.stdin.entry(id).or_default().extend_from_slice(data)
                }
                Request::Cancel {
                    id,
                    reason,
                    grace_ns,
                } => {
                    self.cancelled.push(id);
                    let exec = self.execs.get_mut(&id).expect("a live exec");
                    exec.cancel(reason, grace_ns, 0);
                    end(exec, MainEnd::Signaled(9));
                }
                Request::StdinClose { id } => end(
                    self.execs.get_mut(&id).expect("a live exec"),
                    MainEnd::Exited(0),
                ),
                Request::Signal { id, signal } => {
                    end(
                        self.execs.get_mut(&id).expect("a live exec"),
                        MainEnd::Signaled(signal),
                    );
                }
                Request::Resize { .. } | Request::Detach { .. } => {}
                Request::Ask { id, ask } => self.asked(id, ask),
            }
        }
        self.say();
        true
    }

    /// Execs are found by their numbers elsewhere: here there are none, but for a list of three in two parts.
    fn asked(&mut self, id: u64, ask: Ask) {
        let refusal = Refusal::new(RefusedCode::UnknownExec, "there is none");
        match ask {
            Ask::Attach { .. } | Ask::Wait { .. } => self.session.refuse(id, refusal),
            Ask::List { after } => {
                let execs: Vec<ExecInfo> = (after + 1..=3).take(2).map(listed).collect();
                let more = execs.last().is_some_and(|last| last.exec < 3);
                self.session.list(id, ExecsPage { execs, more });
            }
            Ask::Signal { .. } | Ask::Release { .. } => self.session.done(id, Err(refusal)),
            Ask::Cancel { .. } => self.session.done(id, Ok(())),
        }
    }

    /// Writes all that can be written.
    pub fn say(&mut self) {
        loop {
            self.session.fill(&self.execs);
            let bytes: Vec<u8> = match self
                .session
                .gather(&self.execs)
                .expect("execs are kept")
                .as_slice()
            {
                [] => break,
                slices => slices
                    .iter()
                    .flat_map(|slice| slice.iter().copied())
                    .collect(),
            };
            if self.stream.write_all(&bytes).is_err() {
                break;
            }
            self.session.wrote(bytes.len(), 0);
        }
        for id in self.session.finished() {
            self.execs.remove(&id);
        }
    }

    /// Hears until an exec of this id is there.
    pub fn await_exec(&mut self, id: u64) {
        while !self.execs.contains_key(&id) {
            assert!(self.hear(), "the client went before its exec {id} came");
        }
    }

    /// Writes to a stream of an exec as its workload would, waiting for the client where it must.
    pub fn write(&mut self, id: u64, stream: Stream, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(exec) = self.execs.get_mut(&id) else {
                return;
            };
            match exec.room(stream) {
                Room::Store(space) => {
                    let count = space.len().min(bytes.len());
                    space[..count].copy_from_slice(&bytes[..count]);
                    exec.commit(stream, count);
                    bytes = &bytes[count..];
                    self.say();
                }
                Room::Wait => assert!(self.hear(), "the client went while its exec waited"),
                Room::Discard => {
                    exec.drop_bytes(stream, bytes.len(), 0);
                    return self.say();
                }
                Room::Closed => return,
            }
        }
    }

    pub fn exit(&mut self, id: u64, code: u8) {
        end(
            self.execs.get_mut(&id).expect("a live exec"),
            MainEnd::Exited(code),
        );
        self.say();
    }

    /// Serves until the client goes.
    pub fn serve(&mut self) {
        while self.hear() {}
    }
}

fn listed(exec: u64) -> ExecInfo {
    ExecInfo {
        exec,
        pid: 1,
        state: ExecState::Running,
        kept: true,
        clients: 0,
        earliest: [0; 2],
        length: [0; 2],
        store_bytes: 0,
        age_ns: 0,
        progress_ns: 0,
        cpu_ns: 0,
        end: None,
        command: String::new(),
    }
}

pub fn end(exec: &mut Exec, main: MainEnd) {
    exec.main_exited(main, 1);
    exec.leaf_empty();
    exec.close(Stream::Stdout);
    exec.close(Stream::Stderr);
    while let Some(action) = exec.action() {
        if action == Action::Finish {
            exec.finish(Usage::default(), 1);
        }
    }
}

/// A session with an agent that does this.
pub fn with_agent<T: Send + 'static>(
    script: impl FnOnce(&mut Agent) -> T + Send + 'static,
) -> (Session, JoinHandle<T>) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let agent = std::thread::spawn(move || script(&mut Agent::new(theirs)));
    let session = Session::over(ours, GENERATION, SOON).expect("a session");
    (session, agent)
}
