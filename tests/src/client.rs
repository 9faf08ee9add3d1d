//! A program on the host that talks to a port of the guest.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::patience;

/// A connection that the guest has accepted. No call waits for longer than [`patience`].
#[derive(Debug)]
pub struct Client(pub UnixStream);

impl Client {
    /// Sends `request` and takes the answer: the connection and its `OK` line, or the whole other line.
    ///
    /// # Errors
    /// The line, empty if the connection ended without one.
    ///
    /// # Panics
    /// When the socket cannot be connected to, or nothing is answered in time.
    pub fn connect(socket: &Path, request: &str) -> Result<(Self, String), String> {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(patience())).unwrap();
        stream.set_write_timeout(Some(patience())).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while line.last() != Some(&b'\n') && stream.read(&mut byte).unwrap_or(0) == 1 {
            line.push(byte[0]);
        }
        let line = String::from_utf8_lossy(&line).into_owned();
        if line.starts_with("OK ") {
            Ok((Self(stream), line))
        } else {
            Err(line)
        }
    }

    /// Sends all of it.
    ///
    /// # Panics
    /// When it is not taken in time.
    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Receives exactly `count` bytes.
    ///
    /// # Panics
    /// When they do not come.
    pub fn receive(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Says that no more will be sent.
    ///
    /// # Panics
    /// When the socket is gone.
    pub fn finish(&self) {
        self.0.shutdown(Shutdown::Write).unwrap();
    }

    /// Receives all until the end; a reset is an end.
    ///
    /// # Panics
    /// When the end does not come in time.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Ok(_) => {}
            Err(why) if why.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(why) => panic!("after {} bytes: {why}", bytes.len()),
        }
        bytes
    }

    /// Sends bytes to an echo and checks that they come back.
    ///
    /// # Panics
    /// When they do not.
    pub fn check_echo(&mut self, bytes: &[u8]) {
        self.send(bytes);
        assert!(
            self.receive(bytes.len()) == bytes,
            "an echo of {} bytes differs",
            bytes.len()
        );
    }
}
