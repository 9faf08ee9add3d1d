//! The nest: a software-emulated machine with a real `kvm_amd`, in which one command runs.
//!
//! ```text
//!   nest::run ── attempt ── machine: QEMU, killed when dropped
//!                  │            │ four ports, a console
//!                  └─ relay: stdin, stdout, stderr <-> ports (wire chunks)
//! ```
//!
//! A nest that says nothing for [`SILENCE`] is taken for wedged. It is killed and started once more, aloud; if
//! bytes had gone in or out by then, or if the second one wedges too, it is [`Error::Nest`] (status 123).

mod boot;
mod machine;
mod relay;

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nest_init::wire::{self, Job, Size, ToHost, ToNest};

pub use relay::terminal_size;

use crate::error::{Error, Naming, Result};
use crate::place::Place;
use crate::say;

/// The longest time without a message. Init beats every two seconds; the rest is for a host under load.
const SILENCE: Duration = Duration::from_secs(60);
/// After which a silent nest is poked. QEMU's emulation of SVM has been seen to leave its processor halted with a timer
/// interrupt pending (7.2: `HLT=1`, the vector in the local APIC's IRR, interrupts enabled); any other interrupt
/// wakes it, and a message to its control port is one. Two beats and a half.
const POKE: Duration = Duration::from_secs(5);

/// The longest time from QEMU's start to init's first message; 4 to 8 s on an idle host.
const BOOT: Duration = Duration::from_secs(120);

/// What runs, and how.
pub struct Options {
    /// Command and arguments.
    pub argv: Vec<OsString>,
    /// Changes to this process's environment.
    pub env: Vec<(OsString, OsString)>,
    /// The writable folder that comes back, `VMM_OUT` in there; made where it is missing.
    pub out: PathBuf,
    /// Memory in MiB.
    pub memory: u64,
    /// The longest time for the command, boot included.
    pub timeout: Option<Duration>,
    /// Whether the host's stdin goes in.
    pub stdin: bool,
    /// A terminal of this size in place of pipes.
    pub terminal: Option<Size>,
    /// Start over even if output was shown before a wedge.
    pub repeatable: bool,
}

impl Options {
    /// The usual nest for a command: no terminal, stdin passed on.
    pub fn new(place: &Place, argv: Vec<OsString>) -> Self {
        Self {
            argv,
            env: Vec::new(),
            out: place.target.join("nest-out"),
            memory: 6144,
            timeout: None,
            stdin: true,
            terminal: None,
            repeatable: false,
        }
    }
}

/// Where the command's output goes.
pub struct Sinks {
    /// Its standard output.
    pub stdout: Box<dyn Write + Send>,
    /// Its standard error.
    pub stderr: Box<dyn Write + Send>,
}

/// Our own stdout and stderr, unbuffered.
pub fn own_sinks() -> Result<Sinks> {
    let own = |fd: std::os::fd::BorrowedFd<'_>| {
        rustix::io::dup(fd)
            .map(std::fs::File::from)
            .naming(|| "duplicate an output stream".into())
    };
    Ok(Sinks {
        stdout: Box::new(own(rustix::stdio::stdout())?),
        stderr: Box::new(own(rustix::stdio::stderr())?),
    })
}

/// Runs the command in a nest and returns its status.
pub fn run(place: &Place, options: &Options, sinks: Sinks) -> Result<u8> {
    let files = boot::files(place)?;
    std::fs::create_dir_all(&options.out).naming(|| format!("create {}", options.out.display()))?;
    let job = job(options)?;
    let deadline = options.timeout.map(|timeout| Instant::now() + timeout);
    let stdin = relay::Stdin::default();
    let sinks = Arc::new(relay::SharedSinks::new(sinks));
    let mut attempt = 1;
    loop {
        let machine = machine::Machine::start(&files, options)?;
        let result = watch(machine, &job, options, deadline, &stdin, &sinks);
        if options.stdin {
            stdin.detach();
        }
        match result {
            Ok(status) => return Ok(status),
            Err(Error::Nest(what)) => {
                let touched = !options.repeatable && (sinks.used() || stdin.taken());
                if attempt == 2 || touched {
                    let twice = if touched {
                        "bytes had gone in or out, so it is not started again"
                    } else {
                        "for the second time"
                    };
                    return Err(Error::Nest(format!("{what} ({twice})")));
                }
                say::step(format!("the nest {what}; starting it once more"));
                attempt = 2;
            }
            Err(error) => return Err(error),
        }
    }
}

fn job(options: &Options) -> Result<Job> {
    let absolute = |path: &std::path::Path| {
        path.canonicalize()
            .naming(|| format!("resolve {}", path.display()))
    };
    let out = absolute(&options.out)?;
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    for (name, value) in options
        .env
        .iter()
        .cloned()
        .chain([("VMM_OUT".into(), out.clone().into())])
    {
        env.retain(|(other, _)| *other != name);
        env.push((name, value));
    }
    Ok(Job {
        argv: options
            .argv
            .iter()
            .cloned()
            .map(OsString::into_vec)
            .collect(),
        env: env
            .into_iter()
            .map(|(name, value)| [name.into_vec(), value.into_vec()].join(&b'='))
            .collect(),
        cwd: std::env::current_dir()
            .naming(|| "find the working directory".into())?
            .into_os_string()
            .into_vec(),
        out: out.into_os_string().into_vec(),
        terminal: options.terminal,
    })
}

/// One attempt: from the machine's start to the command's status.
fn watch(
    mut machine: machine::Machine,
    job: &Job,
    options: &Options,
    deadline: Option<Instant>,
    stdin: &relay::Stdin,
    sinks: &Arc<relay::SharedSinks>,
) -> Result<u8> {
    let booting = say::progress("booting the nest");
    let mut control = machine
        .ports
        .control
        .try_clone()
        .naming(|| "clone the control port".into())?;
    match next(&mut control, BOOT, deadline) {
        Ok(ToHost::Up) => {}
        Ok(_) => return Err(Error::Nest(format!("spoke out of turn{}", machine.tail()))),
        Err(end) => return Err(ended(&mut machine, end, options, "did not boot")),
    }
    drop(booting);
    let outputs = relay::Outputs::start(&machine.ports, sinks)?;
    wire::write_chunk(&mut control, &ToNest::Job(job.clone()).encode())
        .naming(|| "send the job".into())?;
    if options.stdin {
        stdin.attach(
            machine
                .ports
                .stdin
                .try_clone()
                .naming(|| "clone the stdin port".into())?,
        );
    } else {
        let mut port = &machine.ports.stdin;
        wire::write_chunk(&mut port, b"").naming(|| "end stdin".into())?;
    }
    let _sizes = options
        .terminal
        .map(|size| relay::follow_size(control.try_clone(), size));
    let mut pokes = 0;
    loop {
        let message = next(&mut control, POKE, deadline);
        if let Err(End::Silent) = message
            && pokes < SILENCE.as_secs() / POKE.as_secs()
        {
            pokes += 1;
            // One that is gone is found by the next read.
            let _ = wire::write_chunk(&mut control, &ToNest::Poke.encode());
            continue;
        }
        if message.is_ok() && std::mem::take(&mut pokes) > 0 {
            say::step(
                "the nest had halted with an interrupt pending, a fault of its emulator; it was woken",
            );
        }
        match message {
            Ok(ToHost::Up | ToHost::Beat) => {
                if sinks.broken() {
                    // What a shell reports for a program that writes to a closed pipe.
                    return Ok(128 + 13);
                }
            }
            Ok(ToHost::Failed { status, message }) => {
                say::step(format!("nest: {message}"));
                return Ok(status);
            }
            Ok(ToHost::Exit { status }) => {
                outputs.finish()?;
                return Ok(status);
            }
            Err(end) => return Err(ended(&mut machine, end, options, "went silent")),
        }
    }
}

/// Why no message came.
enum End {
    Silent,
    Deadline,
    Closed(io::Error),
}

/// The next message, within its own time and the whole command's.
fn next(
    control: &mut UnixStream,
    within: Duration,
    deadline: Option<Instant>,
) -> std::result::Result<ToHost, End> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    if left == Some(Duration::ZERO) {
        return Err(End::Deadline);
    }
    let by_deadline = left.is_some_and(|left| left < within);
    let patience = left.map_or(within, |left| left.min(within));
    control
        .set_read_timeout(Some(patience))
        .map_err(End::Closed)?;
    match wire::read_chunk(control).and_then(|chunk| ToHost::decode(&chunk)) {
        Ok(message) => Ok(message),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
        {
            Err(if by_deadline {
                End::Deadline
            } else {
                End::Silent
            })
        }
        Err(error) => Err(End::Closed(error)),
    }
}

fn ended(machine: &mut machine::Machine, end: End, options: &Options, silent: &str) -> Error {
    match end {
        End::Deadline => Error::TimedOut(options.timeout.unwrap_or_default().as_secs()),
        End::Silent => Error::Nest(format!("{silent}{}", machine.tail())),
        End::Closed(error) => match machine.failure() {
            Some(refusal) => refusal,
            None => Error::Nest(format!(
                "ended without a status ({error}){}",
                machine.tail()
            )),
        },
    }
}
