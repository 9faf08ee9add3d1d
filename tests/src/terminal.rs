//! A terminal as a user has one, and programs on it.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::Tap;

/// Our end of a terminal: its keys, its size and what stands on it.
pub struct Terminal {
    keys: File,
    device: OwnedFd,
    /// Everything that was written to it.
    pub screen: Tap,
    /// Its reader ends with this.
    watched: PipeWriter,
}

/// Reads the screen until nobody watches it any more, so that no copy of our end is left then.
struct Watcher {
    screen: File,
    watched: PipeReader,
}

impl Read for Watcher {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let mut fds = [
            PollFd::new(&self.screen, PollFlags::IN),
            PollFd::new(&self.watched, PollFlags::IN),
        ];
        poll(&mut fds, None)?;
        match fds[1].revents().is_empty() {
            true => self.screen.read(space),
            false => Ok(0),
        }
    }
}

impl Terminal {
    /// A terminal of this many rows and columns.
    ///
    /// # Panics
    /// When the host has none left.
    pub fn new(rows: u16, columns: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).unwrap();
        unlockpt(&ours).unwrap();
        let device = ioctl_tiocgptpeer(&ours, flags).unwrap();
        let keys = File::from(ours);
        let (reader, watched) = io::pipe().unwrap();
        let watcher = Watcher {
            screen: keys.try_clone().unwrap(),
            watched: reader,
        };
        let terminal = Self {
            screen: Tap::on(watcher),
            keys,
            device,
            watched,
        };
        terminal.resize(rows, columns);
        terminal
    }

    /// Gives it another size; whoever is in its foreground hears of it.
    ///
    /// # Panics
    /// When it is gone.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.keys, size).unwrap();
    }

    /// Types.
    ///
    /// # Panics
    /// When it is gone.
    pub fn keys(&self, text: &str) {
        (&self.keys).write_all(text.as_bytes()).unwrap();
    }

    /// Types a line and waits for `answer`, which the line itself must not show.
    ///
    /// # Panics
    /// When the answer does not come in time.
    pub fn ask(&self, line: &str, answer: &str) {
        assert!(!line.contains(answer), "{line:?} shows {answer:?}");
        self.keys(&format!("{line}\n"));
        self.screen.wait_for(answer);
    }

    /// All its modes and keys, for comparing.
    ///
    /// # Panics
    /// When it is gone.
    pub fn modes(&self) -> String {
        format!("{:?}", tcgetattr(&self.device).unwrap())
    }

    /// Whether keys go to a program as they are pressed.
    ///
    /// # Panics
    /// When it is gone.
    pub fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.device).unwrap().local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// `command` in a session of its own, with this as its terminal and as its three streams. Its process is the command
    /// itself.
    ///
    /// # Panics
    /// When the host has no descriptor left.
    pub fn seat(&self, command: &Command) -> Command {
        let device = || Stdio::from(self.device.try_clone().unwrap());
        let mut seated = Command::new("setsid");
        seated
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(device())
            .stdout(device())
            .stderr(device());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => seated.env(name, value),
                None => seated.env_remove(name),
            };
        }
        seated
    }

    /// Our end of it goes, as when a window is closed.
    ///
    /// # Panics
    /// When its reader does not end.
    pub fn hang_up(self) {
        drop(self.watched);
        self.screen.to_end();
    }
}
