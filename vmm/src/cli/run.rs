//! `vmm run`: one life, from boot to the command's status.

use std::ffi::OsString;

use clap::Args;

use super::flags::{ExecFlags, VmFlags};
use super::{chain, say, status};
use crate::exits::ExitReason;
use crate::image::{self, Image};
use crate::machine::{self, Config};
use crate::{agent, console as guest_console, state};
use output::Output;
use vmm_devices::console::ConsoleLog;

mod console;
mod exec;
mod output;
mod stream;

/// Flags of `vmm run`.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    vm: VmFlags,
    #[command(flatten)]
    exec: ExecFlags,
    /// The command and its arguments
    #[arg(last = true, value_name = "ARGV")]
    argv: Vec<OsString>,
}

/// Why a run failed before its workload started.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("no command: give one after '--', for instance 'vmm run -- sh -c \"echo hello\"'")]
    NoCommand,
    #[error("--no-agent boots a guest with its own init: it runs no command, remove '-- {0:?}'")]
    CommandWithoutAgent(OsString),
    #[error("invalid command")]
    Request(#[from] vmm_protocol::InvalidRequest),
    #[error(transparent)]
    Image(#[from] image::Error),
    #[error(transparent)]
    Machine(#[from] machine::Error),
    #[error(transparent)]
    State(#[from] state::Error),
    #[error(transparent)]
    Generation(#[from] vmm_snapshot::generation::Error),
    #[error("cannot set up {0}")]
    Host(&'static str, #[source] std::io::Error),
    #[error("{0}")]
    Ended(String),
    #[error("cannot write to stdout")]
    Stdout(#[source] std::io::Error),
}

impl Run {
    /// Runs and returns the exit status.
    pub fn main(self: Box<Self>) -> u8 {
        match self.checked() {
            Ok(status) => status,
            Err(error) => {
                say(&format!("vmm: {}", chain(&error)));
                status::TOOL
            }
        }
    }

    fn checked(&self) -> Result<u8, Error> {
        match self.argv.first() {
            Some(program) if self.vm.no_agent => Err(Error::CommandWithoutAgent(program.clone())),
            None if self.vm.no_agent => {
                // Flags without effect here are still checked.
                self.exec.request(&[OsString::from("-")])?;
                console::run(&self.config(None)?)
            }
            None => Err(Error::NoCommand),
            Some(_) => {
                let request = self.exec.request(&self.argv)?;
                let config = self.config(Some(agent::PROGRAM))?;
                let output = Output::of_process(self.exec.json)
                    .map_err(|source| Error::Host("stdout and stderr", source))?;
                let root = state::root(self.vm.dir.as_deref());
                exec::run(config, &root, request, output, self.vm.ready_timeout)
            }
        }
    }

    /// The machine that the flags describe.
    fn config(&self, agent: Option<&'static [u8]>) -> Result<Config, Error> {
        let Image {
            kernel, initramfs, ..
        } = Image::find(
            self.vm.kernel.as_deref(),
            self.vm.initramfs.as_deref(),
            self.vm.no_agent,
        )?;
        let default = if agent.is_some() {
            image::CMDLINE_AGENT
        } else {
            image::CMDLINE_CONSOLE
        };
        let cmdline = format!("{default} {}", self.vm.cmdline);
        Ok(Config {
            memory: self.vm.memory,
            cpus: self.vm.cpus,
            kernel,
            initramfs,
            agent,
            cmdline: cmdline.trim_end().to_owned(),
            vsock: None,
        })
    }
}

/// A machine's end, with the panic that its console tells of: most kernels panic before, or without, a driver for
/// the panic device, and then ask for a reset.
fn ended(reason: ExitReason, log: &ConsoleLog) -> ExitReason {
    match reason {
        ExitReason::Reset => match guest_console::panic(log) {
            Some(message) => ExitReason::Panic(Some(message)),
            None => ExitReason::Reset,
        },
        ExitReason::Panic(None) => ExitReason::Panic(guest_console::panic(log)),
        other => other,
    }
}

fn machine_error(error: vmm_events::Error) -> Error {
    Error::Machine(error.into())
}
