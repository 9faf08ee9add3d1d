//! Moves the command's streams between this process and the ports.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nest_init::wire::{self, Size, ToNest};

use super::Sinks;
use super::machine::Ports;
use crate::error::{Error, Naming, Result};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Our stdin, read by one thread for all attempts: a blocked read cannot be called back.
#[derive(Default)]
pub struct Stdin(Arc<Mutex<Source>>);

#[derive(Default)]
struct Source {
    port: Option<UnixStream>,
    started: bool,
    ended: bool,
    taken: bool,
}

impl Stdin {
    /// From now on bytes go to this port.
    pub fn attach(&self, mut port: UnixStream) {
        let mut source = lock(&self.0);
        if source.ended {
            let _ = wire::write_chunk(&mut port, b"");
        }
        source.port = Some(port);
        if !std::mem::replace(&mut source.started, true) {
            let shared = Arc::clone(&self.0);
            std::thread::spawn(move || read_stdin(&shared));
        }
    }

    /// The port's machine has ended.
    pub fn detach(&self) {
        lock(&self.0).port = None;
    }

    /// Whether any byte was read, which a second attempt would miss.
    pub fn taken(&self) -> bool {
        lock(&self.0).taken
    }
}

fn read_stdin(shared: &Mutex<Source>) {
    let mut block = vec![0; wire::BLOCK];
    loop {
        let length = match io::stdin().read(&mut block) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        let port = {
            let mut source = lock(shared);
            source.ended |= length == 0;
            source.taken |= length != 0;
            source.port.as_ref().and_then(|port| port.try_clone().ok())
        };
        // Written without the lock: a command that does not read holds up only this thread.
        if let Some(mut port) = port {
            let _ = wire::write_chunk(&mut port, &block[..length]);
        }
        if length == 0 {
            return;
        }
    }
}

/// Where output goes, for all attempts.
pub struct SharedSinks {
    stdout: Mutex<Box<dyn Write + Send>>,
    stderr: Mutex<Box<dyn Write + Send>>,
    used: AtomicBool,
    broken: AtomicBool,
}

impl SharedSinks {
    /// Takes the sinks over.
    pub fn new(sinks: Sinks) -> Self {
        Self {
            stdout: Mutex::new(sinks.stdout),
            stderr: Mutex::new(sinks.stderr),
            used: AtomicBool::new(false),
            broken: AtomicBool::new(false),
        }
    }

    /// Whether any byte was passed on.
    pub fn used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether a reader of ours has gone.
    pub fn broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

/// The threads of one attempt that move output.
pub struct Outputs(Vec<JoinHandle<io::Result<()>>>);

impl Outputs {
    /// Starts moving both streams.
    pub fn start(ports: &Ports, sinks: &Arc<SharedSinks>) -> Result<Self> {
        let clone = |port: &UnixStream| port.try_clone().naming(|| "clone an output port".into());
        let (stdout, stderr) = (clone(&ports.stdout)?, clone(&ports.stderr)?);
        let (first, second) = (Arc::clone(sinks), Arc::clone(sinks));
        Ok(Self(vec![
            std::thread::spawn(move || pass(stdout, &first.stdout, &first)),
            std::thread::spawn(move || pass(stderr, &second.stderr, &second)),
        ]))
    }

    /// Waits until both streams are through.
    pub fn finish(self) -> Result<()> {
        for thread in self.0 {
            match thread.join() {
                Ok(end) => end.naming(|| "pass the command's output on".into())?,
                Err(_) => return Err(Error::Invalid("an output thread panicked".into())),
            }
        }
        Ok(())
    }
}

/// Passes one stream on up to its end.
fn pass(
    mut port: UnixStream,
    sink: &Mutex<Box<dyn Write + Send>>,
    shared: &SharedSinks,
) -> io::Result<()> {
    loop {
        let chunk = wire::read_chunk(&mut port)?;
        if chunk.is_empty() {
            return Ok(());
        }
        shared.used.store(true, Ordering::Relaxed);
        let mut sink = lock(sink);
        if let Err(error) = sink.write_all(&chunk).and_then(|()| sink.flush()) {
            // Whoever read us has gone; the command is ended at the next message.
            shared.broken.store(true, Ordering::Relaxed);
            if error.kind() != io::ErrorKind::BrokenPipe {
                return Err(error);
            }
        }
    }
}

/// Tells the nest about the terminal's changes of size. They are looked for four times a second: without a signal
/// handler there is nothing to wait on, and only an interactive shell is served by it.
pub fn follow_size(control: io::Result<UnixStream>, mut last: Size) -> io::Result<()> {
    let mut control = control?;
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_millis(250));
            let Some(size) = terminal_size().filter(|size| *size != last) else {
                continue;
            };
            last = size;
            if wire::write_chunk(&mut control, &ToNest::Resize(size).encode()).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// The size of the terminal that is our stdin, when it is one.
pub fn terminal_size() -> Option<Size> {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdin()).ok()?;
    (size.ws_row != 0 && size.ws_col != 0).then_some(Size {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}
