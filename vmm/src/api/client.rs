//! The verbs' end of the control socket. Blocking, with a deadline on each step.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::message::Request;

/// Until a request is answered, but for [`Request::Wait`].
const DEADLINE: Duration = Duration::from_secs(5);
/// More than any answer has.
const MAX_ANSWER: u64 = 1 << 20;

/// Why a sandbox could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens: its process is gone, or not so far yet.
    #[error("cannot connect to {path}")]
    Connect {
        /// The socket.
        path: String,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// Its process is gone, or did not answer in time.
    #[error("its process did not answer")]
    Io(#[source] io::Error),
    /// It closed the connection: its process is gone.
    #[error("its process closed the connection")]
    Closed,
    /// It answered something else than JSON.
    #[error("its process answered {0:?}")]
    Answer(String),
    /// It refused.
    #[error("it refused ({code}): {message}")]
    Refused {
        /// The kind.
        code: String,
        /// In plain words.
        message: String,
    },
}

/// A connection to a sandbox's process.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// [`Error::Connect`].
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Connect {
            path: path.display().to_string(),
            source,
        };
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream.set_write_timeout(Some(DEADLINE)).map_err(failed)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Asks and waits for the answer: 5 s, or for [`Request::Wait`] until the sandbox ends.
    ///
    /// # Errors
    /// All of [`Error`] but [`Error::Connect`].
    pub fn ask(&mut self, request: &Request) -> Result<Value, Error> {
        let patience = (*request != Request::Wait).then_some(DEADLINE);
        let stream = self.stream.get_mut();
        stream.set_read_timeout(patience).map_err(Error::Io)?;
        match stream.write_all(&request.line()) {
            // A server that refuses closes: what it said is there all the same.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                return Err(Error::Io(error));
            }
            _ => {}
        }
        let mut line = Vec::new();
        let read = (&mut self.stream)
            .take(MAX_ANSWER)
            .read_until(b'\n', &mut line);
        match read {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                return Err(Error::Closed);
            }
            Err(error) => return Err(Error::Io(error)),
            Ok(_) if !line.ends_with(b"\n") => return Err(Error::Closed),
            Ok(_) => {}
        }
        let other = || Error::Answer(String::from_utf8_lossy(&line).chars().take(200).collect());
        let mut value: Value = serde_json::from_slice(&line).map_err(|_| other())?;
        match (value["ok"].as_bool(), value["error"]["code"].as_str()) {
            (Some(true), _) => Ok(value["result"].take()),
            (Some(false), Some(code)) => Err(Error::Refused {
                code: code.to_owned(),
                message: value["error"]["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            }),
            _ => Err(other()),
        }
    }
}
