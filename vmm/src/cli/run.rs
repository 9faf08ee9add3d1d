//! `vmm run`: one life, from boot to the command's status.

use std::ffi::OsString;

use clap::Args;
use vmm_snapshot::Generation;

use super::background::{self, Background};
use super::flags::{ExecFlags, SuperviseFlags, VmFlags};
use super::interactive::Interactive;
use super::output::Output;
use super::plan::{self, Error};
use super::{chain, say, status};
use crate::sandbox::{self, Keep, LogFile, Name, Sandbox, sweep_unnamed};
use crate::supervisor::{self, Plan, Workload};

mod console;

/// Flags of `vmm run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Keep its logs and last record under this name, until `vmm rm`
    #[arg(long, value_name = "NAME")]
    name: Option<Name>,
    #[command(flatten)]
    vm: VmFlags,
    #[command(flatten)]
    exec: ExecFlags,
    #[command(flatten)]
    supervise: SuperviseFlags,
    #[command(flatten)]
    background: Background,
    /// The command and its arguments
    #[arg(last = true, value_name = "ARGV")]
    argv: Vec<OsString>,
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
                if self.background.detach || self.name.is_some() {
                    return Err(Error::Flags(
                        "'run --no-agent' streams a console and keeps nothing: use 'vmm start NAME --no-agent -d'",
                    ));
                }
                if self.exec.stdin || self.exec.tty {
                    return Err(Error::Flags(
                        "'run --no-agent' streams a console that takes no input: leave -i and -t away",
                    ));
                }
                console::run(&plan::config(&self.vm)?)
            }
            None => Err(Error::NoCommand),
            Some(_) => self.life(),
        }
    }

    fn life(&self) -> Result<u8, Error> {
        let request = self.exec.request(&self.argv)?;
        if self.exec.stdin && (self.background.detach || self.background.launcher.is_some()) {
            return Err(Error::Flags(
                "-d leaves the terminal and its stdin behind: leave -i away, or -d",
            ));
        }
        let config = plan::config(&self.vm)?;
        let status_file = self.exec.open_status_file()?;
        if self.background.wanted() {
            return background::spawn(status::TOOL)
                .map_err(|source| Error::Host("the background process", source));
        }
        let user = Interactive::new(&self.exec, request.tty)?;
        let _returned = user.screen.returned();
        self.supervise.log();
        let parent = plan::parent(self.supervise.die_with_parent, self.background.launcher)?;
        let root = sandbox::root(self.vm.dir.as_deref());
        sweep_unnamed(&root);
        let background = self.background.launcher.is_some();
        // What runs in the background is to be found again.
        let (name, keep) = match &self.name {
            Some(name) => (name.clone(), Keep::Records),
            None => (
                unnamed()?,
                if background {
                    Keep::Records
                } else {
                    Keep::Nothing
                },
            ),
        };
        let sandbox = Sandbox::new(&root, name);
        let claim = sandbox.claim()?;
        if !claim.is_new() {
            return Err(Error::Taken(sandbox.name().clone()));
        }
        let (claim, announce) = plan::announce(&self.supervise, claim)?;
        let life = claim.begin(keep)?;
        let mut console = None;
        if keep == Keep::Records {
            plan::record(&sandbox, &self.vm, &config, &self.argv)?;
            let log = LogFile::create(&sandbox.file("console.log"))
                .map_err(|source| Error::Host("the console log", source))?;
            console = Some(log);
        }
        let output = if background {
            LogFile::create(&sandbox.file("output.log"))
                .map(|log| Output::to_log(log, self.exec.json))
        } else {
            Output::of_process(self.exec.json)
        }
        .map_err(|source| Error::Host("stdout and stderr", source))?;
        let output = output.with_status_file(status_file);
        let on_ready = self.background.leaver(&sandbox)?;
        let plan = Plan {
            config,
            life,
            require_generation: self.vm.require_generation,
            host_ports: self.vm.host_ports(),
            workload: Some(Workload {
                request,
                output,
                user,
            }),
            ready_timeout: self.vm.ready_timeout,
            stop_time: self.supervise.stop_time,
            announce,
            on_ready,
            console,
            parent,
        };
        Ok(supervisor::run(plan)?)
    }
}

/// A name for a run that was given none.
fn unnamed() -> Result<Name, Error> {
    let random = Generation::new(1)
        .map_err(sandbox::Error::from)?
        .public_id() as u32;
    format!("run-{random:08x}")
        .parse()
        .map_err(|_| Error::Flags("a name of our own making is no name"))
}
