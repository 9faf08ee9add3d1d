//! The `vmm` program, run as a user runs it.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::{Tap, Terminal, patience};

/// A command line of `vmm`.
pub struct Vmm {
    command: Command,
    patience: Duration,
}

impl Vmm {
    /// `vmm VERB` with nothing on stdin.
    pub fn new(verb: &str) -> Self {
        let mut command = Command::new(binary_path());
        command.arg(verb).stdin(Stdio::null());
        Self {
            command,
            patience: patience(),
        }
    }

    /// `vmm run` of a stock guest, which may take its time to boot where processors are emulated.
    pub fn machine() -> Self {
        Self::new("run")
            .args(["--ready-timeout", "240s"])
            .patience(Duration::from_secs(300))
    }

    /// The program itself.
    pub fn binary() -> &'static Path {
        binary_path()
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = S>) -> Self {
        self.command.args(arguments);
        self
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Waits longer than usual for its end.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Its stdin.
    #[must_use]
    pub fn stdin(mut self, stdin: impl Into<Stdio>) -> Self {
        self.command.stdin(stdin);
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(mut self) -> Running {
        let started = Instant::now();
        let mut child = self
            .command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|why| panic!("start {:?}: {why}", self.command));
        Running {
            stdout: Tap::on(child.stdout.take().unwrap()),
            stderr: Tap::on(child.stderr.take().unwrap()),
            line: format!("{:?}", self.command),
            patience: self.patience,
            started,
            child,
        }
    }

    /// Starts it on a terminal, in a session of its own. Both its streams are the screen.
    ///
    /// # Panics
    /// When it cannot be started; `setsid` (util-linux) does it.
    pub fn start_on(self, terminal: &Terminal) -> Running {
        let started = Instant::now();
        let mut command = terminal.seat(&self.command);
        let child = command
            .spawn()
            .unwrap_or_else(|why| panic!("start {command:?}: {why}"));
        Running {
            stdout: terminal.screen.clone(),
            stderr: Tap::default(),
            line: format!("{command:?}"),
            patience: self.patience,
            started,
            child,
        }
    }

    /// Runs it to its end.
    ///
    /// # Panics
    /// When it does not end in time.
    pub fn run(self) -> Ended {
        self.start().end()
    }
}

/// A `vmm` that runs; killed when dropped.
pub struct Running {
    /// Its standard output.
    pub stdout: Tap,
    /// Its standard error.
    pub stderr: Tap,
    line: String,
    patience: Duration,
    started: Instant,
    child: Child,
}

/// How a `vmm` ended and what it wrote.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status; that of a signal is negative.
    pub status: i32,
    /// All of its standard output.
    pub stdout: Vec<u8>,
    /// All of its standard error, as text.
    pub stderr: String,
    /// From its start to its end.
    pub took: Duration,
}

impl Running {
    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it has gone.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for its end and returns its status alone, that of a signal as a negative number. What was written to a
    /// terminal has no end.
    ///
    /// # Panics
    /// When it does not end in time; says what it wrote.
    pub fn status(mut self) -> i32 {
        number(self.wait())
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not end in time; says what it wrote.
    pub fn end(mut self) -> Ended {
        let status = self.wait();
        let took = self.started.elapsed();
        Ended {
            status: number(status),
            stdout: self.stdout.to_end(),
            stderr: String::from_utf8_lossy(&self.stderr.to_end()).into_owned(),
            took,
        }
    }

    fn wait(&mut self) -> ExitStatus {
        let pidfd = pidfd_open(self.pid(), PidfdFlags::empty()).unwrap();
        let timeout = Timespec {
            tv_sec: self.patience.as_secs() as i64,
            tv_nsec: 0,
        };
        let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)).unwrap();
        if ready == 0 {
            panic!(
                "{} has not ended after {:?}\nstdout: {}\nstderr: {}",
                self.line,
                self.patience,
                self.stdout.text(),
                self.stderr.text()
            );
        }
        self.child.wait().unwrap()
    }
}

fn number(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| -status.signal().unwrap_or(0))
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// `$VMM_BIN`, else the program of this workspace, built if need be.
fn binary_path() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("VMM_BIN") {
            return path.into();
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--quiet", "--package", "vmm", "--bin", "vmm"])
            .status()
            .expect("start cargo");
        assert!(
            built.success(),
            "vmm does not build; or set $VMM_BIN to one that is built"
        );
        // target/debug/deps/test-1234 -> target/debug/vmm
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(2).unwrap().join("vmm")
    })
}
