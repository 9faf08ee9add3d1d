//! A client that can also misbehave: frames by hand over the codec, nothing checked for it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use vmm_protocol::{
    AgentMessage, CancelReason, Cause, ClientMessage, ClosedWhy, Decoder, ExecRequest, ExecsPage,
    GenerationId, GoodbyeCode, Hello, Record, RefusedCode, Stream,
};

use crate::harness::{PATIENCE, readable_within};

/// A message of the agent's, owned.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    Hello(Hello),
    Started { pid: u32 },
    Output(Stream, Vec<u8>),
    Limit([u64; 2]),
    StdinClosed(ClosedWhy),
    StdinCredit(u64),
    Exit(Record),
    Refused(RefusedCode, String),
    Pong,
    Goodbye(GoodbyeCode, String),
    Oom,
    Done,
    Execs(ExecsPage),
}

/// One session, as a client sees it.
pub struct Client {
    pub stream: UnixStream,
    decoder: Decoder,
    pub sent: u64,
    received: u64,
    last_id: u64,
    /// What came for other requests than the one that was waited for.
    waiting: BTreeMap<u64, Vec<Said>>,
    /// How much of each stream of each request has come: offsets must have no gap.
    offsets: BTreeMap<u64, [u64; 2]>,
    /// Whether output is credited as it comes.
    pub crediting: bool,
}

/// An exec from its first message to its last.
#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub said: Vec<Said>,
}

impl Outcome {
    pub fn record(&self) -> &Record {
        match self.said.last() {
            Some(Said::Exit(record)) => record,
            other => panic!("no record but {other:?}"),
        }
    }

    pub fn cause(&self) -> &Cause {
        &self.record().cause
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Client {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            decoder: Decoder::with_capacity(256 << 10),
            sent: 0,
            received: 0,
            last_id: 0,
            waiting: BTreeMap::new(),
            offsets: BTreeMap::new(),
            crediting: true,
        }
    }

    /// Both hellos.
    pub fn hello(&mut self, generation: GenerationId) {
        self.send(0, &ClientMessage::Hello(Hello::new(generation)));
        assert_eq!(self.next(), Some((0, Said::Hello(Hello::new(generation)))));
    }

    pub fn send(&mut self, id: u64, message: &ClientMessage<'_>) {
        self.try_send(id, message).unwrap();
    }

    /// Sends to a session that the agent may be ending meanwhile.
    pub fn try_send(&mut self, id: u64, message: &ClientMessage<'_>) -> std::io::Result<()> {
        self.sent += 1;
        let mut bytes = Vec::new();
        message.encode(id, self.sent, &mut bytes).unwrap();
        self.stream.write_all(&bytes)
    }

    /// Sends a request under a new id, and does not wait.
    pub fn exec(&mut self, request: &ExecRequest) -> u64 {
        self.last_id += 1;
        self.send(
            self.last_id,
            &ClientMessage::Exec(Box::new(request.clone())),
        );
        self.last_id
    }

    /// Waits until the process runs.
    pub fn started(&mut self, id: u64) -> u32 {
        match self.next_of(id) {
            Some(Said::Started { pid }) => pid,
            other => panic!("not started but {other:?}"),
        }
    }

    pub fn cancel(&mut self, id: u64, grace_ns: u64) {
        self.send(
            id,
            &ClientMessage::Cancel {
                reason: CancelReason::Request,
                grace_ns,
            },
        );
    }

    pub fn ping(&mut self) -> u64 {
        self.last_id += 1;
        self.send(self.last_id, &ClientMessage::Ping);
        self.last_id
    }

    /// Sends a ping and waits for its answer: everything sent before has been handled then.
    pub fn round_trip(&mut self) {
        let id = self.ping();
        assert_eq!(self.next_of(id), Some(Said::Pong));
    }

    /// The rest of an exec, to its record or its refusal.
    pub fn finish(&mut self, id: u64) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            let said = self.next_of(id).expect("the session ended before the exec");
            match &said {
                Said::Output(Stream::Stdout, data) => outcome.stdout.extend_from_slice(data),
                Said::Output(Stream::Stderr, data) => outcome.stderr.extend_from_slice(data),
                _ => {}
            }
            let last = matches!(said, Said::Exit(_) | Said::Refused(..));
            outcome.said.push(said);
            if last {
                return outcome;
            }
        }
    }

    pub fn run(&mut self, request: &ExecRequest) -> Outcome {
        let id = self.exec(request);
        self.finish(id)
    }

    /// The next message of one request; what comes for others is kept for them.
    pub fn next_of(&mut self, id: u64) -> Option<Said> {
        if let Some(waiting) = self.waiting.get_mut(&id)
            && !waiting.is_empty()
        {
            return Some(waiting.remove(0));
        }
        loop {
            let (of, said) = self.next()?;
            if of == id || of == 0 {
                return Some(said);
            }
            self.waiting.entry(of).or_default().push(said);
        }
    }

    /// Whether anything more has come within a time that must pass.
    pub fn quiet_for(&mut self, time: std::time::Duration) -> bool {
        !self.decoder.partial() && !readable_within(&self.stream, time)
    }

    /// The next message, or `None` at the end of the session.
    pub fn next(&mut self) -> Option<(u64, Said)> {
        loop {
            if let Some(frame) = self.decoder.next().unwrap() {
                let id = frame.header.id;
                self.received += 1;
                assert_eq!(
                    frame.header.sequence, self.received,
                    "frames come in sequence"
                );
                let said = match AgentMessage::decode(&frame).unwrap() {
                    AgentMessage::Hello(hello) => Said::Hello(hello),
                    AgentMessage::Started { pid, .. } => Said::Started { pid },
                    AgentMessage::Output {
                        stream,
                        offset,
                        data,
                    } => {
                        let seen = &mut self.offsets.entry(id).or_default()[stream.index()];
                        assert_eq!(offset, *seen, "offsets have no gap");
                        *seen += data.len() as u64;
                        Said::Output(stream, data.to_vec())
                    }
                    AgentMessage::Limit(at) => Said::Limit(at),
                    AgentMessage::Oom(_) => Said::Oom,
                    AgentMessage::StdinClosed(why) => Said::StdinClosed(why),
                    AgentMessage::StdinCredit(bytes) => Said::StdinCredit(bytes),
                    AgentMessage::Exit(record) => Said::Exit(*record),
                    AgentMessage::Refused(refusal) => Said::Refused(refusal.code, refusal.message),
                    AgentMessage::Done => Said::Done,
                    AgentMessage::Execs(page) => Said::Execs(page),
                    AgentMessage::Pong => Said::Pong,
                    AgentMessage::Goodbye { code, message } => Said::Goodbye(code, message),
                };
                if let (Said::Output(stream, data), true) = (&said, self.crediting) {
                    let mut credit = [0; 2];
                    credit[stream.index()] = data.len() as u64;
                    let _ = self.try_send(id, &ClientMessage::Credit(credit));
                }
                return Some((id, said));
            }
            match self.stream.read(self.decoder.space()) {
                Ok(0) => return None,
                Ok(count) => self.decoder.filled(count),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("session: {error}"),
            }
        }
    }
}

/// A shell script as a request.
pub fn sh(script: &str) -> ExecRequest {
    ExecRequest::new(["/bin/sh", "-c", script])
}

/// The session's end, and why.
pub fn goodbye(client: &mut Client) -> GoodbyeCode {
    loop {
        match client.next() {
            Some((0, Said::Goodbye(code, _))) => {
                assert_eq!(client.next(), None, "nothing comes after a goodbye");
                return code;
            }
            Some(_) => {}
            None => panic!("the session ended without a word"),
        }
    }
}
