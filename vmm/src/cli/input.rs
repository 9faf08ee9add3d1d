//! What a command reads: our own stdin, one block at a time, as fast as the command takes it.
//!
//! ```text
//!   poll ---- readable ----> read a block ----> write it, which waits for the command's credit ---> again
//!     |                        | end: the command's stdin ends
//!     +---- told to stop, or nobody reads any more: our stdin is let go of, and whoever writes to it learns that
//! ```

use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::termios::isatty;
use vmm_events::Waker;

/// Bytes that are read at once: what the agent grants before the command has taken any.
const BLOCK: usize = vmm_protocol::limits::STDIN_WINDOW as usize;

/// Where a command's input comes from.
#[derive(Debug)]
pub struct Source {
    device: OwnedFd,
    /// It has no end that its writer could see.
    terminal: bool,
    /// It is the process's own stdin, of which no other copy is to stay open once nobody reads it.
    own: bool,
}

/// How the feeding ended.
#[derive(Debug)]
pub enum End {
    /// With the end of the input: the command's stdin is closed behind it.
    Input,
    /// The command reads no more.
    Command,
    /// What was read so far is a part, and must not be taken for the whole.
    Failed(io::Error),
}

/// Stops a feeding, at the latest when dropped.
#[derive(Debug)]
pub struct Stop(Waker);

impl Stop {
    /// No byte is read from here on.
    pub fn stop(&self) {
        self.0.wake();
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Source {
    /// Our own stdin.
    ///
    /// # Errors
    /// When it is not open for reading, or no descriptor is left.
    pub fn of_process() -> io::Result<Self> {
        let mut source = Self::new(io::stdin().as_fd().try_clone_to_owned()?)?;
        source.own = true;
        Ok(source)
    }

    fn new(device: OwnedFd) -> io::Result<Self> {
        match fcntl_getfl(&device)? & OFlags::RWMODE {
            OFlags::WRONLY => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it is open for writing only",
            )),
            _ => Ok(Self {
                // Asked now: a terminal that was hung up is none any more.
                terminal: isatty(&device),
                own: false,
                device,
            }),
        }
    }

    /// Feeds it to `sink` on a thread of its own, which nobody waits for. `before` is called when there is something to
    /// read, `done` with how it ended.
    ///
    /// # Errors
    /// When the host has no thread or descriptor left.
    pub fn feed(
        self,
        sink: impl Write + Send + 'static,
        before: impl Fn() + Send + 'static,
        done: impl FnOnce(End) + Send + 'static,
    ) -> io::Result<Stop> {
        let waker = Waker::new().map_err(io::Error::other)?;
        let stop = waker.clone();
        thread::Builder::new()
            .name("stdin".to_owned())
            .stack_size(256 << 10)
            .spawn(move || {
                let mut sink = sink;
                let end = self.pump(&mut sink, stop.as_fd(), &before);
                // What fails is told before the command sees the end of its input.
                if !matches!(end, End::Input) {
                    self.let_go();
                }
                done(end);
            })
            .map(|_| Stop(waker))
    }

    /// Never sets O_NONBLOCK, which others who share the input would find set: a read follows only where `poll` has seen
    /// something. Should another reader be faster, this one waits for the next byte, and nobody waits for it.
    fn pump(&self, sink: &mut impl Write, stop: BorrowedFd<'_>, before: &dyn Fn()) -> End {
        let mut block = vec![0; BLOCK];
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(self.device.as_fd(), PollFlags::IN),
            ];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return End::Failed(error.into()),
            }
            if !fds[0].revents().is_empty() {
                return End::Command;
            }
            before();
            let count = match rustix::io::read(&self.device, &mut *block) {
                Ok(0) => return End::Input,
                Ok(count) => count,
                // Someone else has set O_NONBLOCK, and someone else has read what there was.
                Err(Errno::INTR | Errno::AGAIN) => continue,
                // It was hung up, or is another's for good.
                Err(Errno::IO) if self.terminal => return End::Input,
                Err(error) => return End::Failed(error.into()),
            };
            if sink.write_all(&block[..count]).is_err() {
                // Whatever it was, the command's end says it better.
                return End::Command;
            }
        }
    }

    /// Nobody reads it any more, which is what its writer is to see.
    fn let_go(self) {
        if !self.own || self.terminal {
            return;
        }
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        if let Ok(null) = rustix::fs::open(c"/dev/null", flags, Mode::empty()) {
            let _ = rustix::stdio::dup2_stdin(&null);
        }
    }
}

#[cfg(test)]
mod tests;
