//! From a generation's socket to a stream into its guest: connect, ask by the tagged line, take the
//! answer.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use vmm_protocol::session::Violation;
use vmm_protocol::{GoodbyeCode, frame};

use crate::io::{receive, transmit_all, wait};
use crate::tag::GenerationTag;

/// The longest answer line that is taken, in bytes.
const MAX_LINE: usize = 512;

/// Why there is no connection to a guest.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket is not there, or does not take connections: the sandbox is not running, or this
    /// life is over.
    #[error("connecting to {path}")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A step did not end in time.
    #[error("no answer to {step} within {after:?}")]
    TimedOut {
        /// Which.
        step: &'static str,
        /// The time that it had.
        after: Duration,
    },
    /// The monitor serves another generation.
    #[error("generation {tag} is over: {message}")]
    Stale {
        /// The generation that was asked for.
        tag: GenerationTag,
        /// What the monitor said.
        message: String,
    },
    /// The guest cannot take it yet.
    #[error("the guest is not ready: {message}")]
    NotReady {
        /// What the monitor said.
        message: String,
    },
    /// It will not be served.
    #[error("refused: {message}")]
    Refused {
        /// What the monitor said.
        message: String,
    },
    /// The monitor answered something that is no answer.
    #[error("unexpected answer {line:?}")]
    Answer {
        /// The line, cut.
        line: String,
    },
    /// The other side closed before the step was done.
    #[error("the connection was closed during {step}")]
    Closed {
        /// Which.
        step: &'static str,
    },
    /// Reading or writing failed.
    #[error("input or output during {step}")]
    Io {
        /// The step.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The agent's first frames were not those of this generation, or of the protocol.
    #[error("the agent's hello is wrong: {}", .0.describe())]
    Hello(Violation),
    /// The agent ended the session instead of opening it.
    #[error("the agent declined the session ({code}): {message}")]
    Goodbye {
        /// Why.
        code: GoodbyeCode,
        /// In plain words.
        message: String,
    },
}

impl ConnectError {
    /// Worth another try on the same generation.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::NotReady { .. } | Self::TimedOut { .. })
    }

    pub(crate) fn io(step: &'static str, after: Duration) -> impl Fn(io::Error) -> Self {
        move |source| match source.kind() {
            ErrorKind::TimedOut => Self::TimedOut { step, after },
            _ => Self::Io { step, source },
        }
    }
}

/// How long each step may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    /// Until the monitor has taken the connection.
    pub connect: Duration,
    /// Until it has answered the tagged line, which includes the guest's own acceptance.
    pub answer: Duration,
    /// Until the agent's hello is there.
    pub hello: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        let five = Duration::from_secs(5);
        Self {
            connect: five,
            answer: five,
            hello: five,
        }
    }
}

/// A stream to a port of a guest, and what came on it behind the answer.
#[derive(Debug)]
pub struct Connection {
    /// The stream, nonblocking.
    pub stream: UnixStream,
    /// The host port that the monitor gave to it.
    pub host_port: u32,
    /// Bytes that the guest sent already.
    pub early: Vec<u8>,
}

/// Connects to a port of the guest whose generation is `tag`, by the socket of that generation. A
/// monitor of another generation answers [`ConnectError::Stale`] at once, and no byte reaches its
/// guest.
pub fn open(
    path: &Path,
    port: u32,
    tag: &GenerationTag,
    deadlines: &Deadlines,
) -> Result<Connection, ConnectError> {
    let stream = dial(path, deadlines.connect)?;
    let deadline = Instant::now() + deadlines.answer;
    let failed = ConnectError::io("the connect line", deadlines.answer);
    // A monitor that refuses may close before it has read the line: its answer is there all the
    // same.
    match transmit_all(stream.as_fd(), tag.connect_line(port).as_bytes(), deadline) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => return Err(failed(error)),
        _ => {}
    }
    let mut answer = Vec::new();
    loop {
        if let Some(end) = answer.iter().position(|byte| *byte == b'\n') {
            let early = answer.split_off(end + 1);
            answer.truncate(end);
            let host_port = judge(&String::from_utf8_lossy(&answer), tag)?;
            return Ok(Connection {
                stream,
                host_port,
                early,
            });
        }
        if answer.len() >= MAX_LINE {
            return Err(unexpected(&String::from_utf8_lossy(&answer)));
        }
        let mut space = [0; MAX_LINE];
        match receive(stream.as_fd(), &mut space).map_err(&failed)? {
            Some(0) => {
                return Err(ConnectError::Closed {
                    step: "the connect line",
                });
            }
            Some(count) => answer.extend_from_slice(&space[..count]),
            None => wait(stream.as_fd(), PollFlags::IN, deadline).map_err(&failed)?,
        }
    }
}

/// Connects with a deadline: the kernel makes the connector of a unix socket wait while the backlog
/// is full.
fn dial(path: &Path, within: Duration) -> Result<UnixStream, ConnectError> {
    let failed = |error: Errno| match error {
        Errno::AGAIN => ConnectError::TimedOut {
            step: "connecting",
            after: within,
        },
        error => ConnectError::Socket {
            path: path.to_owned(),
            source: error.into(),
        },
    };
    let address = SocketAddrUnix::new(path).map_err(failed)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    // A timeout of zero would mean none.
    let within_some = within.max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(within_some)).map_err(failed)?;
    while let Err(error) = connect(&socket, &address) {
        if error != Errno::INTR {
            return Err(failed(error));
        }
    }
    let stream = UnixStream::from(socket);
    stream
        .set_nonblocking(true)
        .map_err(ConnectError::io("connecting", within))?;
    Ok(stream)
}

/// Reads an answer line, which comes without its line feed.
fn judge(line: &str, tag: &GenerationTag) -> Result<u32, ConnectError> {
    let rest = |prefix: &str| line.strip_prefix(prefix).map(|text| text.trim().to_owned());
    if let Some(message) = rest("ERR STALE") {
        return Err(ConnectError::Stale { tag: *tag, message });
    }
    if let Some(message) = rest("ERR NOT_READY") {
        return Err(ConnectError::NotReady { message });
    }
    if let Some(message) = rest("ERR REFUSED") {
        return Err(ConnectError::Refused { message });
    }
    let accepted = line
        .strip_prefix("OK ")
        .and_then(|numbers| numbers.split_once(' '));
    match accepted.map(|(port, counter)| (port.parse::<u32>(), counter.parse::<u64>())) {
        Some((Ok(port), Ok(counter))) if counter == tag.id().counter => Ok(port),
        Some((Ok(_), Ok(counter))) => Err(ConnectError::Stale {
            tag: *tag,
            message: format!("this is generation {counter}"),
        }),
        _ => Err(unexpected(line)),
    }
}

fn unexpected(line: &str) -> ConnectError {
    ConnectError::Answer {
        line: line.chars().take(frame::HEADER_LEN * 4).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_protocol::GenerationId;

    fn tag() -> GenerationTag {
        GenerationTag::new(
            GenerationId {
                counter: 7,
                public_id: 1,
            },
            [1; 16],
        )
    }

    #[test]
    fn ge11_answers_have_their_types() {
        assert_eq!(judge("OK 1073741824 7", &tag()).unwrap(), 1 << 30);
        let kind = |line| match judge(line, &tag()).unwrap_err() {
            ConnectError::Stale { .. } => "stale",
            ConnectError::NotReady { .. } => "not ready",
            ConnectError::Refused { .. } => "refused",
            ConnectError::Answer { .. } => "answer",
            _ => "other",
        };
        assert_eq!(kind("ERR STALE this is generation 8"), "stale");
        assert_eq!(kind("OK 5 8"), "stale");
        assert_eq!(kind("ERR NOT_READY the agent is not ready"), "not ready");
        assert_eq!(kind("ERR REFUSED no"), "refused");
        // The untagged answer of another monitor says nothing about the generation.
        for line in ["OK 5", "OK", "", "OK x 7", "OK 5 7 8", "HELLO", "ERR"] {
            assert_eq!(kind(line), "answer", "{line}");
        }
    }

    #[test]
    fn nonce_is_in_no_error() {
        for line in ["ERR STALE x", "OK 5 8"] {
            let error = judge(line, &tag()).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("0101"), "{error:?}");
        }
    }
}
