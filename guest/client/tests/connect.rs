//! The tagged connect line against a monitor of the tests.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test says so by failing"
)]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use common::{Agent, GENERATION, SOON};
use vmm_client::{ConnectError, Deadlines, GenerationTag, Session, open};
use vmm_protocol::{ExecRequest, GenerationId};

fn tag() -> GenerationTag {
    GenerationTag::new(GENERATION, [0xcd; 16])
}

struct Monitor {
    folder: tempfile::TempDir,
    listener: UnixListener,
}

impl Monitor {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("vsock.sock")).unwrap();
        Self { folder, listener }
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("vsock.sock")
    }

    /// Takes one connection and its line.
    fn accept(&self) -> (UnixStream, String) {
        let (stream, _) = self.listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        (stream, line)
    }
}

/// What a client makes of this answer, after which the monitor closes.
fn answered(answer: &'static [u8]) -> ConnectError {
    let monitor = Monitor::new();
    std::thread::scope(|scope| {
        scope.spawn(|| monitor.accept().0.write_all(answer).unwrap());
        open(&monitor.path(), 1000, &tag(), &Deadlines::default()).unwrap_err()
    })
}

fn within(milliseconds: u64) -> Deadlines {
    let short = Duration::from_millis(milliseconds);
    Deadlines {
        connect: short,
        answer: short,
        hello: short,
    }
}

#[test]
fn session_is_opened_through_the_monitor() {
    let monitor = Monitor::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, line) = monitor.accept();
            assert_eq!(line, format!("CONNECT 1000 7-{}\n", "cd".repeat(16)));
            // The agent's hello comes in the same packet as the answer.
            let mut agent = Agent::new(stream.try_clone().unwrap());
            agent.session.fill(&agent.execs);
            let mut bytes = b"OK 1073741824 7\n".to_vec();
            let hello: Vec<u8> = agent.session.gather(&agent.execs).unwrap()[0].to_vec();
            agent.session.wrote(hello.len(), 0);
            bytes.extend_from_slice(&hello);
            stream.write_all(&bytes).unwrap();
            agent.serve();
        });
        let session = Session::connect(&monitor.path(), &tag(), &Deadlines::default()).unwrap();
        let exec = session.exec(&ExecRequest::new(["test"])).unwrap();
        exec.control().signal(9).unwrap();
        assert_eq!(exec.wait().status(), 137);
    });
}

#[test]
fn ge11_stale_not_ready_and_refused_are_told_apart() {
    assert!(matches!(
        answered(b"ERR STALE this is generation 8\n"),
        ConnectError::Stale { .. }
    ));
    assert!(matches!(answered(b"OK 5 8\n"), ConnectError::Stale { .. }));
    let error = answered(b"ERR NOT_READY the agent is not ready\n");
    assert!(error.is_transient());
    assert_eq!(
        error.to_string(),
        "the guest is not ready: the agent is not ready"
    );
    assert!(matches!(
        answered(b"ERR REFUSED nothing listens there\n"),
        ConnectError::Refused { .. }
    ));
    assert!(matches!(
        answered(b"HTTP/1.1 400 Bad Request\r\n"),
        ConnectError::Answer { .. }
    ));
    assert!(
        matches!(answered(b"OK 5\n"), ConnectError::Answer { .. }),
        "says no generation"
    );
    assert!(
        matches!(answered(&[b'x'; 4096]), ConnectError::Answer { .. }),
        "a line without end"
    );
    assert!(matches!(answered(b"OK 5"), ConnectError::Closed { .. }));
    assert!(matches!(answered(b""), ConnectError::Closed { .. }));
}

#[test]
fn vs11_silent_monitor_is_given_up_at_the_deadline() {
    let monitor = Monitor::new();
    let began = Instant::now();
    let error = open(&monitor.path(), 1000, &tag(), &within(50)).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::TimedOut {
                step: "the connect line",
                ..
            }
        ),
        "{error}"
    );
    assert!(began.elapsed() < SOON);
}

#[test]
fn vs12_full_backlog_is_given_up_at_the_deadline() {
    let monitor = Monitor::new();
    rustix::net::listen(&monitor.listener, 0).unwrap();
    let _first = UnixStream::connect(monitor.path()).unwrap();
    let error = loop {
        // How many a backlog of 0 takes is the kernel's affair; then it is full.
        match open(&monitor.path(), 1000, &tag(), &within(50)) {
            Err(ConnectError::TimedOut {
                step: "connecting", ..
            }) => break "full",
            Err(ConnectError::TimedOut { .. }) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(error, "full");
}

#[test]
fn sandbox_that_is_not_there_is_named_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock.sock");
    let error = open(&path, 1000, &tag(), &Deadlines::default()).unwrap_err();
    assert!(error.to_string().contains("vsock.sock"), "{error}");
    let long = folder.path().join("x".repeat(120));
    assert!(matches!(
        open(&long, 1000, &tag(), &Deadlines::default()),
        Err(ConnectError::Socket { .. })
    ));
}

#[test]
fn nonce_is_shown_by_nothing() {
    let shown = format!("{:?} {}", tag(), tag());
    assert!(!shown.contains("cd") && !shown.contains("205"), "{shown}");
    let other = GenerationTag::new(
        GenerationId {
            counter: 7,
            ..GENERATION
        },
        [0xce; 16],
    );
    assert_ne!(tag(), other);
}
