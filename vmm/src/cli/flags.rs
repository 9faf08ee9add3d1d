//! Flags that describe a machine and an exec, checked as they are read.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vmm_protocol::{ExecRequest, InvalidRequest, Policy, User};

use super::units::{self, OutputLimit};

/// Flags of the machine.
#[derive(Debug, Args)]
pub struct VmFlags {
    /// Kernel: an x86-64 ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initramfs: a cpio archive, plain or compressed; the agent is appended to it
    #[arg(long, value_name = "FILE")]
    pub initramfs: Option<PathBuf>,
    /// Guest memory
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = units::memory)]
    pub memory: u64,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::cpus)]
    pub cpus: u8,
    /// Kernel command line, appended to the default one
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true, value_parser = units::cmdline)]
    pub cmdline: String,
    /// State root
    #[arg(long, value_name = "ROOT", value_parser = units::folder)]
    pub dir: Option<PathBuf>,
    /// Boot a guest with its own init and stream its serial console
    #[arg(long)]
    pub no_agent: bool,
    /// How long the guest may take until its agent is ready
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::time)]
    pub ready_timeout: Duration,
}

/// Flags of a command to run.
#[derive(Debug, Args)]
pub struct ExecFlags {
    /// Environment variable, over the guest's small default; may be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = units::EnvParser)]
    pub env: Vec<OsString>,
    /// Working directory
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub cwd: OsString,
    /// User, and group, in numbers
    #[arg(long, value_name = "UID[:GID]", value_parser = units::user)]
    pub user: Option<User>,
    /// Kill the command when this much time has passed
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    pub timeout: Option<Duration>,
    /// Most bytes of stdout and stderr together, or none
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = units::output_limit)]
    pub output_limit: OutputLimit,
    /// What to do with a command that writes more
    #[arg(long, value_name = "kill|drain", default_value = "kill", value_parser = units::policy)]
    pub on_limit: Policy,
    /// One JSON object a line instead of the output itself
    #[arg(long)]
    pub json: bool,
}

impl ExecFlags {
    /// The request to the agent.
    ///
    /// # Errors
    /// What no guest could run, whatever it is like.
    pub fn request(&self, argv: &[OsString]) -> Result<ExecRequest, InvalidRequest> {
        let bytes = |text: &OsString| text.as_bytes().to_vec();
        let mut request = ExecRequest::new(argv.iter().map(bytes));
        request.env = self.env.iter().map(bytes).collect();
        request.cwd = bytes(&self.cwd);
        request.user = self.user.clone();
        request.policy = self.on_limit;
        // The value was checked to fit when it was read.
        request.timeout_ns = self.timeout.map_or(0, |time| time.as_nanos() as u64);
        request.output_limit = self.output_limit.0;
        request.validate()?;
        Ok(request)
    }
}
