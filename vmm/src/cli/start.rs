//! `vmm start`: a sandbox that stays.

use clap::Args;

use super::background::{self, Background};
use super::flags::{SuperviseFlags, VmFlags};
use super::plan::{self, Error};
use super::{chain, say, status};
use crate::sandbox::{self, Keep, LogFile, Name, Sandbox, sweep_unnamed};
use crate::supervisor::{self, Plan};

/// Flags of `vmm start`.
#[derive(Debug, Args)]
pub struct Start {
    /// Its name: letters, digits, '.', '_' and '-'
    #[arg(value_name = "NAME")]
    name: Name,
    #[command(flatten)]
    vm: VmFlags,
    #[command(flatten)]
    supervise: SuperviseFlags,
    #[command(flatten)]
    background: Background,
}

impl Start {
    /// Starts it; the exit status.
    pub fn main(self: Box<Self>) -> u8 {
        match self.checked() {
            Ok(status) => status,
            Err(error) => {
                say(&format!("vmm: {}", chain(&error)));
                match error {
                    Error::Sandbox(sandbox::Error::Busy { .. }) => status::STATE,
                    _ => status::FAILED,
                }
            }
        }
    }

    fn checked(&self) -> Result<u8, Error> {
        let config = plan::config(&self.vm)?;
        if self.background.wanted() {
            return background::spawn(status::FAILED)
                .map_err(|source| Error::Host("the background process", source));
        }
        self.supervise.log();
        let parent = plan::parent(self.supervise.die_with_parent, self.background.launcher)?;
        let root = sandbox::root(self.vm.dir.as_deref());
        sweep_unnamed(&root);
        let sandbox = Sandbox::new(&root, self.name.clone());
        let (claim, announce) = plan::announce(&self.supervise, sandbox.claim()?)?;
        let life = claim.begin(Keep::Records)?;
        plan::record(&sandbox, &self.vm, &config, &[])?;
        let console = LogFile::create(&sandbox.file("console.log"))
            .map_err(|source| Error::Host("the console log", source))?;
        let on_ready = self.background.leaver(&sandbox)?;
        let plan = Plan {
            config,
            life,
            require_generation: self.vm.require_generation,
            host_ports: self.vm.host_ports(),
            workload: None,
            ready_timeout: self.vm.ready_timeout,
            stop_time: self.supervise.stop_time,
            announce,
            on_ready,
            console: Some(console),
            parent,
        };
        Ok(supervisor::run(plan)?)
    }
}
