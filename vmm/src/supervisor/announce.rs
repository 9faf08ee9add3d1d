//! Telling whoever started us how far we are: systemd's socket, a descriptor, a pid file, a parent.

use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use crate::cli::inherited;

/// Who is told.
#[derive(Debug, Default)]
pub struct Announce {
    notify: Option<(UnixDatagram, SocketAddr)>,
    ready: Vec<File>,
    pid_file: Option<PathBuf>,
}

/// Why somebody cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `$NOTIFY_SOCKET`.
    #[error("NOTIFY_SOCKET={0:?} is no socket that can be told")]
    Notify(PathBuf, #[source] io::Error),
    /// `--ready-fd`.
    #[error("--ready-fd {0} cannot be written: give an open descriptor")]
    ReadyFd(u32, #[source] io::Error),
    /// `--pid-file`.
    #[error("--pid-file {} cannot be written", .0.display())]
    PidFile(PathBuf, #[source] io::Error),
}

impl Announce {
    /// Everybody who wants to be told. The pid file is written now, the others hear when it is time.
    ///
    /// # Errors
    /// All of [`Error`]: who cannot be told is found before anything is started.
    pub fn new(ready_fd: Option<u32>, pid_file: Option<&Path>) -> Result<Self, Error> {
        let mut announce = Self::default();
        if let Some(path) = env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) {
            let address = match path.as_bytes().strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name),
                None => SocketAddr::from_pathname(&path),
            };
            let failed = |error| Error::Notify(path.clone().into(), error);
            let socket = UnixDatagram::unbound().map_err(failed)?;
            socket.set_nonblocking(true).map_err(failed)?;
            announce.notify = Some((socket, address.map_err(failed)?));
        }
        if let Some(number) = ready_fd {
            let file = inherited::take(number).map_err(|error| Error::ReadyFd(number, error))?;
            announce.ready.push(file);
        }
        if let Some(path) = pid_file {
            fs::write(path, format!("{}\n", std::process::id()))
                .map_err(|error| Error::PidFile(path.to_owned(), error))?;
            announce.pid_file = Some(path.to_owned());
        }
        Ok(announce)
    }

    /// One more to be told of readiness, by a line.
    pub fn also(&mut self, file: File) {
        self.ready.push(file);
    }

    /// Ready: said once.
    pub fn ready(&mut self) {
        self.tell("READY=1");
        for mut file in self.ready.drain(..) {
            // Who has gone needs no word.
            let _ = file.write_all(b"ready\n");
        }
    }

    /// On the way down.
    pub fn stopping(&self) {
        self.tell("STOPPING=1");
    }

    fn tell(&self, word: &str) {
        if let Some((socket, address)) = &self.notify
            && let Err(error) = socket.send_to_addr(word.as_bytes(), address)
        {
            tracing::warn!(%error, "NOTIFY_SOCKET did not take {word}");
        }
    }
}

impl Drop for Announce {
    fn drop(&mut self) {
        if let Some(path) = &self.pid_file {
            // Someone else's by now, if it names another process.
            let own = std::process::id().to_string();
            if fs::read_to_string(path).is_ok_and(|text| text.trim() == own) {
                let _ = fs::remove_file(path);
            }
        }
    }
}
