//! Init of the nest: mounts the host's root and runs one command in it.
//!
//! The kernel starts it as `/init` of a minimal initramfs. In order: kernel file systems, modules, the control
//! port, the job, the host's root by 9p with writable layers over its scratch folders, the command between its
//! ports, its status. Then it stands still until the host ends the machine, which is quicker than a power-off.

mod clock;
mod mounts;
mod ports;
mod streams;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Mutex;

use nest_init::wire::{self, Job, ToHost, ToNest};

/// An operation of init that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
struct Fault {
    what: String,
    source: io::Error,
}

/// Names the operation that an error came from.
trait Naming<T> {
    fn naming(self, what: impl Into<String>) -> Result<T, Fault>;
}

impl<T, E: Into<io::Error>> Naming<T> for Result<T, E> {
    fn naming(self, what: impl Into<String>) -> Result<T, Fault> {
        self.map_err(|source| Fault {
            what: what.into(),
            source: source.into(),
        })
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments
        .next()
        .is_some_and(|word| word == streams::TERMINAL_CHILD)
    {
        return streams::terminal_child(arguments);
    }
    if std::process::id() != 1 {
        eprintln!("nest-init is the nest's PID 1: use `cargo xtask nest -- CMD`");
        return ExitCode::from(125);
    }
    if let Err(fault) = life() {
        // Before the control port there is only the console; the host shows its last lines.
        eprintln!("nest-init: {fault}");
    }
    // Reached when the host is gone, too: a machine without its host has nothing left to do.
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    ExitCode::FAILURE
}

/// The nest's whole life; returns when the host has closed the control port.
fn life() -> Result<(), Fault> {
    mounts::kernel_file_systems()?;
    load_modules(Path::new("/modules"))?;
    let ports = ports::Ports::open()?;
    let control = Mutex::new(ports.control.try_clone().naming("clone control port")?);
    let tell = |message: ToHost| {
        // A host that no longer listens is found by the read below.
        if let Ok(mut port) = control.lock() {
            let _ = wire::write_chunk(&mut *port, &message.encode());
        }
    };
    tell(ToHost::Up);
    let mut inbox = ports.control.try_clone().naming("clone control port")?;
    let ToNest::Job(job) = receive(&mut inbox)? else {
        return Err(io::Error::from(io::ErrorKind::InvalidData))
            .naming("first message is not a job");
    };

    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                std::thread::sleep(wire::BEAT);
                tell(ToHost::Beat);
            }
        });
        tell(match run(&job, &ports, &mut inbox) {
            Ok(last) => last,
            Err(fault) => ToHost::Failed {
                status: 125,
                message: fault.to_string(),
            },
        });
        loop {
            std::thread::park();
        }
    })
}

/// Prepares the host's root and runs the job in it; the message is the nest's last.
fn run(job: &Job, ports: &ports::Ports, inbox: &mut fs::File) -> Result<ToHost, Fault> {
    mounts::host_root(job)?;
    ports::loopback_up()?;
    rustix::system::sethostname(b"nest").naming("set the host's name")?;
    // Guests larger than the nest's own memory are the rule: they touch little of it.
    fs::write("/proc/sys/vm/overcommit_memory", "1").naming("allow overcommit")?;
    let last = streams::run(job, ports, inbox)?;
    mounts::release(job)?;
    Ok(last)
}

fn receive(inbox: &mut fs::File) -> Result<ToNest, Fault> {
    wire::read_chunk(inbox)
        .and_then(|chunk| ToNest::decode(&chunk))
        .naming("read control port")
}

/// Loads what `order` lists, one file name a line, in its order.
fn load_modules(folder: &Path) -> Result<(), Fault> {
    let order = fs::read_to_string(folder.join("order")).naming("read module list")?;
    for name in order.lines() {
        if name == "kvm.ko" {
            clock::wait_until_measured()?;
        }
        let file = fs::File::open(folder.join(name)).naming(format!("open module {name}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).naming(format!("load module {name}")),
        }
    }
    Ok(())
}

/// A command as the job describes it, without its streams.
fn command(job: &Job) -> Command {
    use std::os::unix::ffi::OsStrExt;
    let words: Vec<&std::ffi::OsStr> = job
        .argv
        .iter()
        .map(|word| std::ffi::OsStr::from_bytes(word))
        .collect();
    let mut command = Command::new(words.first().copied().unwrap_or_default());
    command.args(words.get(1..).unwrap_or_default());
    command.env_clear();
    for entry in &job.env {
        if let Some(at) = entry
            .iter()
            .skip(1)
            .position(|byte| *byte == b'=')
            .map(|at| at + 1)
        {
            command.env(
                std::ffi::OsStr::from_bytes(&entry[..at]),
                std::ffi::OsStr::from_bytes(&entry[at + 1..]),
            );
        }
    }
    command.current_dir(std::ffi::OsStr::from_bytes(&job.cwd));
    command.process_group(0);
    command
}
