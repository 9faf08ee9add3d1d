//! From flags to what a life is to be: shared by `run` and `start`.

use std::ffi::OsString;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, getppid, pidfd_open};
use serde_json::json;

use super::flags::{SuperviseFlags, VmFlags};
use crate::image::{self, Image};
use crate::machine::{self, Config};
use crate::sandbox::{self, Claim, Sandbox};
use crate::supervisor::{self, Announce};
use crate::{agent, memory};

/// Why a life failed, or was never begun.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `run` without a command.
    #[error("no command: give one after '--', for instance 'vmm run -- sh -c \"echo hello\"'")]
    NoCommand,
    /// A command for a guest that runs none.
    #[error("--no-agent boots a guest with its own init: it runs no command, remove '-- {0:?}'")]
    CommandWithoutAgent(OsString),
    /// Flags that mean nothing together.
    #[error("{0}")]
    Flags(&'static str),
    /// What no guest could run.
    #[error("invalid command")]
    Request(#[from] vmm_protocol::InvalidRequest),
    /// No image.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// A machine that cannot be.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// The name of a run is taken.
    #[error("sandbox {0} exists already: use another --name, or remove it with 'vmm rm {0}'")]
    Taken(sandbox::Name),
    /// Its life.
    #[error(transparent)]
    Life(#[from] supervisor::Error),
    /// Who is told.
    #[error(transparent)]
    Announce(#[from] supervisor::AnnounceError),
    /// Where the exit is written.
    #[error(transparent)]
    StatusFile(#[from] super::status_file::Error),
    /// Something of the host's.
    #[error("cannot set up {0}")]
    Host(&'static str, #[source] std::io::Error),
    /// It came to an end that nobody asked for.
    #[error("{0}")]
    Ended(String),
    /// Nobody reads.
    #[error("cannot write to stdout")]
    Stdout(#[source] std::io::Error),
}

impl From<vmm_events::Error> for Error {
    fn from(error: vmm_events::Error) -> Self {
        Self::Machine(error.into())
    }
}

/// The machine that the flags describe.
///
/// # Errors
/// [`Error::Image`].
pub fn config(vm: &VmFlags) -> Result<Config, Error> {
    let Image {
        kernel, initramfs, ..
    } = Image::find(vm.kernel.as_deref(), vm.initramfs.as_deref(), vm.no_agent)?;
    let default = if vm.no_agent {
        image::CMDLINE_CONSOLE
    } else {
        image::CMDLINE_AGENT
    };
    let cmdline = format!("{default} {}", vm.cmdline);
    memory::check(vm.memory).map_err(machine::Error::from)?;
    Ok(Config {
        memory: vm.memory,
        cpus: vm.cpus,
        kernel,
        initramfs,
        agent: (!vm.no_agent).then_some(agent::PROGRAM),
        cmdline: cmdline.trim_end().to_owned(),
        vsock: None,
    })
}

/// Writes down what a sandbox is started with.
///
/// # Errors
/// [`Error::Sandbox`].
pub fn record(
    sandbox: &Sandbox,
    vm: &VmFlags,
    config: &Config,
    argv: &[OsString],
) -> Result<(), Error> {
    let command: Vec<_> = argv.iter().map(|word| word.to_string_lossy()).collect();
    let ports: Vec<_> = vm.host_port.iter().map(ToString::to_string).collect();
    let value = json!({
        "schema": 1,
        "kernel": config.kernel,
        "initramfs": config.initramfs,
        "memory": config.memory,
        "cpus": config.cpus,
        "cmdline": config.cmdline,
        "agent": config.agent.is_some(),
        "require_generation": vm.require_generation,
        "host_ports": ports,
        "command": command,
    });
    Ok(sandbox::write_json(&sandbox.file("config.json"), &value)?)
}

/// The process whose end is to be ours.
///
/// # Errors
/// [`Error::Host`] if it has ended already.
pub fn parent(wanted: bool, launcher: Option<i32>) -> Result<Option<OwnedFd>, Error> {
    if !wanted {
        return Ok(None);
    }
    let parent = match launcher {
        Some(launcher) => Pid::from_raw(launcher),
        None => getppid(),
    };
    // In a container we may be the first process, with no parent that we could see.
    let Some(parent) = parent else {
        return Err(Error::Flags(
            "--die-with-parent: this process has no parent that it could see end",
        ));
    };
    pidfd_open(parent, PidfdFlags::empty())
        .map(Some)
        .map_err(|error| Error::Host("--die-with-parent", error.into()))
}

/// Who is told how far a claimed sandbox is. Not before it is claimed: whoever runs it has said the same things already.
///
/// # Errors
/// [`Error::Announce`]; a sandbox that the claim made is gone again.
pub fn announce(flags: &SuperviseFlags, claim: Claim) -> Result<(Claim, Announce), Error> {
    match Announce::new(flags.ready_fd, flags.pid_file.as_deref()) {
        Ok(announce) => Ok((claim, announce)),
        Err(error) => {
            if claim.is_new() {
                // What cannot be removed is a sandbox that never ran, which `rm` takes.
                let _ = claim.remove();
            }
            Err(error.into())
        }
    }
}
