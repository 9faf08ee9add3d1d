//! A run with the agent: boot, wait until it is ready, run the command, stream it, and take the machine down.
//!
//! ```text
//! main thread: signals, notices of the agent, end of the machine, end of the command
//! devices:     the machine's device loop          exec: session -> stdout, stderr
//! ```

use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmm_client::{Control, Deadlines, Ended, GenerationTag};
use vmm_devices::console::ConsoleLog;
use vmm_devices::vsock::Fence;
use vmm_events::{Answer, Interest, Poller, Source, Waker};
use vmm_protocol::{CancelReason, Cause, ExecRequest, GenerationId, StartStage};
use vmm_snapshot::Generation;

use super::output::Output;
use super::stream::{Finished, Progress, stream};
use super::{Error, ended, machine_error};
use crate::cli::signals::Signals;
use crate::cli::{say, status};
use crate::control::{Identity, Notice, Notices};
use crate::exits::ExitReason;
use crate::machine::{self, Config, Handle, Machine, Vsock};
use crate::state::Life;

/// Between asking a command to end and killing it.
const GRACE: Duration = Duration::from_secs(2);
/// After which a guest that does not answer a cancel is unplugged.
const UNPLUG: Duration = Duration::from_secs(3);
/// Console lines in an error.
const LINES: usize = 12;

#[derive(Clone, Copy)]
enum Token {
    Signal,
    Machine,
    Notice,
    Exec,
}

/// What is told apart while the machine runs.
enum Phase {
    /// The agent is not ready yet.
    Booting,
    /// The session is being opened, or the command runs.
    Running(Option<Control>),
}

struct Job {
    poller: Poller<Token>,
    signals: Source<Signals>,
    _wakers: [Source<Waker>; 3],
    handle: Handle,
    machine: Option<JoinHandle<Result<ExitReason, machine::Error>>>,
    notices: Receiver<Notice>,
    progress: Receiver<Progress>,
    start: Option<Start>,
    log: ConsoleLog,
    phase: Phase,
    /// When waiting ends whatever has not happened by then.
    deadline: Option<Instant>,
    ready_timeout: Duration,
    signal: Option<i32>,
    /// What a start may fail on, for the message: program and working directory.
    asked: [String; 2],
    machine_end: Option<String>,
    down: Option<String>,
    // Last: its folder goes when nothing uses it any more.
    _life: Life,
}

/// What the exec thread is started with, once the agent is ready.
type Start = Box<dyn FnOnce() -> std::io::Result<()>>;

/// Runs the command; the exit status.
pub fn run(
    mut config: Config,
    root: &std::path::Path,
    request: ExecRequest,
    output: Output,
    ready_timeout: Duration,
) -> Result<u8, Error> {
    let signals = Signals::collect(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
        .map_err(|source| Error::Host("signals", source))?;
    // A sandbox that is gone with its command has one life, and no counter to keep.
    let generation = Generation::new(1)?;
    let id = GenerationId {
        counter: generation.counter(),
        public_id: generation.public_id(),
    };
    let name = format!("run-{:08x}", id.public_id as u32);
    let life = Life::create(root, &name, &id.folder())?;
    let (notice_sender, notices) = channel();
    let (progress_sender, progress) = channel();
    let [notice_waker, exec_waker, machine_waker] =
        [Waker::new(), Waker::new(), Waker::new()].map(|waker| waker.map_err(machine_error));
    let (notice_waker, exec_waker, machine_waker) = (notice_waker?, exec_waker?, machine_waker?);
    config.vsock = Some(Vsock {
        socket: life.vsock(),
        fence: Fence {
            counter: generation.counter(),
            nonce: generation.nonce().bytes(),
            require_generation: false,
        },
        agent: Some((
            Identity {
                generation: id,
                hostname: name,
                machine_id: Generation::new(1)?.nonce().bytes(),
            },
            Notices {
                sender: notice_sender,
                waker: notice_waker.clone(),
            },
        )),
    });
    let handle = Handle::new()?;
    let log = ConsoleLog::default();
    let machine = Machine::build_with(handle.clone(), &config, Box::new(log.clone()))?;

    let poller = Poller::new().map_err(machine_error)?;
    let watch = |waker: &Waker, token| {
        poller
            .register(waker.clone(), Interest::READ, token)
            .map_err(machine_error)
    };
    let wakers = [
        watch(&notice_waker, Token::Notice)?,
        watch(&exec_waker, Token::Exec)?,
        watch(&machine_waker, Token::Machine)?,
    ];
    let signals = poller
        .register(signals, Interest::READ, Token::Signal)
        .map_err(machine_error)?;
    let thread = thread::Builder::new()
        .name("devices".to_owned())
        .spawn(move || {
            let reason = machine.run();
            machine_waker.wake();
            reason
        })
        .map_err(|source| Error::Host("a thread", source))?;
    let socket = life.vsock();
    let tag = GenerationTag::new(id, generation.nonce().bytes());
    let program = request.argv.first().map_or(&[][..], Vec::as_slice);
    let asked = [program, &request.cwd].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let start: Start = Box::new(move || {
        let report = move |progress| {
            // The main thread outlives this one, or the process ends.
            let _ = progress_sender.send(progress);
            exec_waker.wake();
        };
        thread::Builder::new()
            .name("exec".to_owned())
            .spawn(move || {
                stream(
                    &socket,
                    &tag,
                    &Deadlines::default(),
                    &request,
                    output,
                    &report,
                )
            })
            .map(|_| ())
    });
    let job = Job {
        poller,
        signals,
        _wakers: wakers,
        handle,
        machine: Some(thread),
        notices,
        progress,
        start: Some(start),
        log,
        phase: Phase::Booting,
        deadline: Some(Instant::now() + ready_timeout),
        ready_timeout,
        signal: None,
        asked,
        machine_end: None,
        down: None,
        _life: life,
    };
    job.serve()
}

impl Job {
    fn serve(mut self) -> Result<u8, Error> {
        loop {
            let now = Instant::now();
            let timeout = self.deadline.map(|at| at.saturating_duration_since(now));
            if timeout == Some(Duration::ZERO) {
                if let Some(status) = self.overdue()? {
                    return Ok(status);
                }
                continue;
            }
            self.poller.wait(timeout).map_err(machine_error)?;
            while let Some(event) = self.poller.next_event() {
                let status = match event.token {
                    Token::Signal => self.on_signal(),
                    Token::Machine => self.on_machine_end()?,
                    Token::Notice => self.on_notice()?,
                    Token::Exec => self.on_progress()?,
                };
                self.poller.answer(&event, Answer::Handled);
                if let Some(status) = status {
                    return Ok(status);
                }
            }
        }
    }

    /// The first signal asks, the second one does not wait for the answer.
    fn on_signal(&mut self) -> Option<u8> {
        let number = self.signals.inner().next()?;
        if self.signal.replace(number).is_some() {
            return Some(status::signaled(number));
        }
        match &self.phase {
            Phase::Running(Some(control)) => {
                let reason = match number {
                    libc::SIGINT => CancelReason::Interrupt,
                    libc::SIGTERM => CancelReason::Terminate,
                    _ => CancelReason::Request,
                };
                self.deadline = Some(Instant::now() + GRACE + UNPLUG);
                // A session that is gone ends the command by itself.
                let _ = control.cancel(reason, GRACE);
                None
            }
            // Nothing of the user's runs yet.
            Phase::Booting | Phase::Running(None) => {
                self.unplug();
                Some(status::signaled(number))
            }
        }
    }

    fn on_machine_end(&mut self) -> Result<Option<u8>, Error> {
        let Some(thread) = self.machine.take() else {
            return Ok(None);
        };
        // The waker stays readable: out of the loop with it.
        self._wakers[2]
            .modify(Interest::default())
            .map_err(machine_error)?;
        let why = match thread.join() {
            Ok(reason) => ended(reason?, &self.log).to_string(),
            Err(_) => "the device loop panicked".to_owned(),
        };
        let why = match self.down.take() {
            Some(down) => format!("{why}: the agent went down: {down}"),
            None => why,
        };
        match self.phase {
            Phase::Booting => {
                Err(self.lost(format!("the guest ended before its agent was ready: {why}")))
            }
            Phase::Running(_) => {
                // Its session ends with the machine, and the exec thread reports that next.
                self.machine_end = Some(why);
                Ok(None)
            }
        }
    }

    fn on_notice(&mut self) -> Result<Option<u8>, Error> {
        self._wakers[0].inner().drain();
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::Ready => {
                    if let Some(start) = self.start.take() {
                        start().map_err(|source| Error::Host("a thread", source))?;
                        self.phase = Phase::Running(None);
                        self.deadline = None;
                    }
                }
                Notice::Failed(why) => {
                    return Err(self.lost(format!("the agent could not take up its life: {why}")));
                }
                Notice::Down(why) => self.down = Some(why),
                Notice::Lost(why) => tracing::debug!("control connection: {why}"),
            }
        }
        Ok(None)
    }

    fn on_progress(&mut self) -> Result<Option<u8>, Error> {
        self._wakers[1].inner().drain();
        while let Ok(progress) = self.progress.try_recv() {
            match progress {
                Progress::Asked(control) => self.phase = Phase::Running(Some(control)),
                Progress::Done(finished) => {
                    self.unplug();
                    return self.conclude(finished).map(Some);
                }
            }
        }
        Ok(None)
    }

    /// The status of a command that has ended, with a word on what the status alone does not say.
    fn conclude(&mut self, finished: Finished) -> Result<u8, Error> {
        let (ended, stdout_error) = match finished {
            Finished::Ended {
                ended,
                stdout_error,
            } => (ended, stdout_error),
            Finished::NoSession(why) => return Err(self.lost(why)),
        };
        if let Some(error) = stdout_error {
            say(&format!(
                "vmm: cannot write to stdout, so the command was cancelled: {error}"
            ));
        }
        let record = match &ended {
            Ended::Exit(record) => record,
            Ended::Refused { message, .. } => {
                return Err(Error::Ended(format!(
                    "the agent refused the command: {message}"
                )));
            }
            Ended::Lost(lost) => return Err(self.lost(format!("the command is lost: {lost}"))),
        };
        match (&record.cause, self.signal) {
            (Cause::Exited(_) | Cause::Signaled(_), _) => {}
            (Cause::Cancelled(_), Some(number)) => return Ok(status::signaled(number)),
            (Cause::StartFailed { stage, errno }, _) => {
                let [program, directory] = &self.asked;
                let value = match stage {
                    StartStage::Execute => format!(" {program}"),
                    StartStage::Directory => format!(" {directory}"),
                    _ => String::new(),
                };
                say(&format!(
                    "vmm: the command did not start: {}{value}: {}",
                    stage.name(),
                    std::io::Error::from_raw_os_error(*errno)
                ));
            }
            (Cause::TimedOut, _) => say("vmm: the command was killed: its --timeout passed"),
            (Cause::OutputLimit, _) => {
                say("vmm: the command was killed: it wrote more than its --output-limit")
            }
            (Cause::OomKilled(oom), _) => say(&format!(
                "vmm: the command was killed for memory: {} limit, victim {} ({})",
                oom.scope.name(),
                oom.victim,
                oom.pid
            )),
            (Cause::Lost(why), _) => return Err(self.lost(format!("the command is lost: {why}"))),
            (Cause::Cancelled(_), None) => {}
        }
        Ok(record.status())
    }

    /// A deadline has passed.
    fn overdue(&mut self) -> Result<Option<u8>, Error> {
        self.deadline = None;
        match (&self.phase, self.signal) {
            (Phase::Running(_), Some(number)) => {
                self.unplug();
                Ok(Some(status::signaled(number)))
            }
            (Phase::Booting, _) => {
                let error = self.lost(format!(
                    "the agent was not ready after {:?}: raise --ready-timeout or look at the console", self.ready_timeout
                ));
                Err(error)
            }
            (Phase::Running(_), None) => Ok(None),
        }
    }

    /// Stops the machine and waits until it is gone.
    fn unplug(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.machine.take() {
            // Its reason is our own stop, or came too late to matter.
            let _ = thread.join();
        }
    }

    /// An error with what the guest said last.
    fn lost(&mut self, why: String) -> Error {
        self.unplug();
        let why = match self.machine_end.take() {
            Some(end) => format!("{why}: {end}"),
            None => why,
        };
        match self.log.last_lines(LINES) {
            empty if empty.is_empty() => Error::Ended(format!("{why}; its console is empty")),
            lines => Error::Ended(format!("{why}\nlast lines of its console:\n{lines}")),
        }
    }
}
