//! Runs the command between its ports.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use nest_init::wire::{self, Job, Size, ToHost, ToNest};
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use crate::ports::Ports;
use crate::{Fault, Naming};

/// First argument of init's own second life: the process that takes a terminal and becomes the command.
pub const TERMINAL_CHILD: &str = "terminal-child";

/// Starts the job, moves its bytes, reaps, and says how it ended.
pub fn run(job: &Job, ports: &Ports, inbox: &File) -> Result<ToHost, Fault> {
    match job.terminal {
        Some(size) => with_terminal(job, size, ports, inbox),
        None => with_pipes(job, ports, inbox),
    }
}

/// Reads what the host says while the command runs, and hands on new sizes of its terminal.
fn listen(inbox: &File, mut resized: impl FnMut(Size) + Send + 'static) -> Result<(), Fault> {
    let mut inbox = inbox.try_clone().naming("clone control port")?;
    std::thread::spawn(move || {
        while let Ok(message) = crate::receive(&mut inbox) {
            if let ToNest::Resize(size) = message {
                resized(size);
            }
        }
    });
    Ok(())
}

fn with_pipes(job: &Job, ports: &Ports, inbox: &File) -> Result<ToHost, Fault> {
    listen(inbox, |_| ())?;
    let mut command = crate::command(job);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(job, &error)),
    };
    // Absent only when not asked for.
    let (Some(stdin), Some(stdout), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe)).naming("take the command's pipes");
    };
    feed(
        ports.stdin.try_clone().naming("clone stdin port")?,
        OwnedFd::from(stdin).into(),
    );
    std::thread::scope(|scope| {
        let out = scope.spawn(|| drain(OwnedFd::from(stdout).into(), &ports.stdout));
        let err = scope.spawn(|| drain(OwnedFd::from(stderr).into(), &ports.stderr));
        let status = reap_until(child.id())?;
        end_all();
        for (pump, name) in [(out, "stdout"), (err, "stderr")] {
            pump.join()
                .map_err(|_| io::Error::other("pump panicked"))
                .and_then(|end| end)
                .naming(format!("move {name}"))?;
        }
        Ok(ToHost::Exit { status })
    })
}

fn with_terminal(job: &Job, size: Size, ports: &Ports, inbox: &File) -> Result<ToHost, Fault> {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).naming("open a terminal")?;
    grantpt(&main).naming("grant the terminal")?;
    unlockpt(&main).naming("unlock the terminal")?;
    resize(&main, size).naming("size the terminal")?;
    let name = ptsname(&main, Vec::new()).naming("name the terminal")?;

    // The first word that the child sees is the terminal; the rest is the command.
    let mut second = crate::command(job);
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(TERMINAL_CHILD)
        .arg(name.to_string_lossy().as_ref())
        .arg(second.get_program())
        .args(second.get_args());
    command.env_clear().envs(
        second
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    if let Some(cwd) = second.get_current_dir() {
        command.current_dir(cwd);
    }
    second.stdin(Stdio::null());
    let child = match command.stdin(Stdio::null()).spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(job, &error)),
    };
    let main = File::from(main);
    feed(
        ports.stdin.try_clone().naming("clone stdin port")?,
        main.try_clone().naming("clone the terminal")?,
    );
    let sized = main.try_clone().naming("clone the terminal")?;
    listen(inbox, move |size| {
        let _ = resize(&sized, size);
    })?;
    std::thread::scope(|scope| {
        let out = scope.spawn(|| drain(main, &ports.stdout));
        let status = reap_until(child.id())?;
        end_all();
        out.join()
            .map_err(|_| io::Error::other("pump panicked"))
            .and_then(|end| end)
            .naming("move the terminal")?;
        wire::write_chunk(&mut &ports.stderr, b"").naming("end stderr")?;
        Ok(ToHost::Exit { status })
    })
}

/// The terminal's child: takes it as its controlling terminal and becomes the command.
pub fn terminal_child(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(terminal), Some(program)) = (arguments.next(), arguments.next()) else {
        return ExitCode::from(125);
    };
    let streams = rustix::process::setsid()
        .map_err(io::Error::from)
        .and_then(|_| File::options().read(true).write(true).open(&terminal))
        .and_then(|file| {
            rustix::process::ioctl_tiocsctty(&file)?;
            Ok((file.try_clone()?, file.try_clone()?, file))
        });
    let (stdin, stdout, stderr) = match streams {
        Ok(streams) => streams,
        Err(error) => {
            eprintln!("{}: {error}", terminal.display());
            return ExitCode::from(125);
        }
    };
    let error = Command::new(&program)
        .args(arguments)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(
            stderr
                .try_clone()
                .map_or_else(|_| Stdio::null(), Stdio::from),
        )
        .exec();
    let _ = writeln!(&stderr, "{}: {error}", program.display());
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
        127
    } else {
        126
    })
}

fn resize(terminal: impl std::os::fd::AsFd, size: Size) -> io::Result<()> {
    tcsetwinsize(
        terminal,
        Winsize {
            ws_row: size.rows,
            ws_col: size.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )?;
    Ok(())
}

/// Moves the host's stdin to the command in a thread of its own, which outlives the command when that never reads.
fn feed(mut port: File, mut command: File) {
    std::thread::spawn(move || {
        while let Ok(data) = wire::read_chunk(&mut port) {
            // A command that has closed its stdin loses the rest, as it would have on the host.
            if data.is_empty() || command.write_all(&data).is_err() {
                return;
            }
        }
    });
}

/// Moves a stream of the command to its port up to its end, and marks that.
fn drain(mut command: File, mut port: &File) -> io::Result<()> {
    let mut block = vec![0; wire::BLOCK];
    loop {
        let length = match command.read(&mut block) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // A terminal whose last user has gone says EIO.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error()) => 0,
            Err(error) => return Err(error),
        };
        wire::write_chunk(&mut port, &block[..length])?;
        if length == 0 {
            return Ok(());
        }
    }
}

/// Reaps every process, orphans included, until `child` has ended.
fn reap_until(child: u32) -> Result<u8, Fault> {
    loop {
        let (pid, status) = match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some(ended)) => ended,
            Ok(None) | Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error).naming("wait for the command"),
        };
        if pid.as_raw_nonzero().get().unsigned_abs() == child {
            let code = status
                .exit_status()
                .or_else(|| status.terminating_signal().map(|signal| 128 + signal));
            return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(125));
        }
    }
}

/// Ends whatever the command left behind, so that its streams end too.
fn end_all() {
    // Group 1 is kill(2)'s -1: every process but init itself. None left is no failure.
    let _ = rustix::process::kill_process_group(Pid::INIT, Signal::KILL);
}

fn not_started(job: &Job, error: &io::Error) -> ToHost {
    let name = job
        .argv
        .first()
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .unwrap_or_default();
    ToHost::Failed {
        status: if error.kind() == io::ErrorKind::NotFound {
            127
        } else {
            126
        },
        message: format!("{name}: {error}"),
    }
}
