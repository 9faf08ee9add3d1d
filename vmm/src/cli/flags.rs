//! Flags that describe a machine and an exec, checked as they are read.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use vmm_protocol::limits::{CONTROL_PORT, DEFAULT_OUTPUT_LIMIT};
use vmm_protocol::{ExecRequest, InvalidRequest, Policy, User};

use super::errors::Errors;
use super::status_file::{self, StatusFile};
use super::terminal;
use super::units::{self, OutputLimit};
use crate::supervisor::HostPorts;

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
    /// Where the guest's connections to this port of the host go; may be repeated
    #[arg(long, value_name = "PORT=SOCKET")]
    pub host_port: Vec<HostPort>,
    /// Refuse the plain CONNECT of clients that name no generation
    #[arg(long)]
    pub require_generation: bool,
    /// How long the guest may take until its agent is ready
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::time)]
    pub ready_timeout: Duration,
}

impl VmFlags {
    /// Where the guest's connections go, by port; of two for one port the last counts.
    #[must_use]
    pub fn host_ports(&self) -> HostPorts {
        let pairs = self.host_port.iter();
        pairs.map(|pair| (pair.port, pair.socket.clone())).collect()
    }
}

/// A port of the host, and the socket that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    port: u32,
    socket: PathBuf,
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            Err(format!(
                "{text:?}: {why}: use PORT=SOCKET, as in 5000=/run/service.sock"
            ))
        };
        let Some((port, socket)) = text.split_once('=') else {
            return wrong("no '='");
        };
        let port = match port.parse() {
            // VMADDR_PORT_ANY is no port.
            Ok(port) if port < u32::MAX => port,
            _ => return wrong("the port is no number below 4294967295"),
        };
        if port == CONTROL_PORT {
            return wrong("this port is the agent's own");
        }
        if !socket.starts_with('/') || socket.len() > 107 {
            return wrong("the socket is no absolute path of at most 107 bytes");
        }
        let socket = socket.into();
        Ok(Self { port, socket })
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.port, self.socket.display())
    }
}

/// Flags for whoever supervises the process.
#[derive(Debug, Args)]
pub struct SuperviseFlags {
    /// How long a guest that is asked to stop may take
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = units::time)]
    pub stop_time: Duration,
    /// Write a line to this open descriptor once ready
    #[arg(long, value_name = "N")]
    pub ready_fd: Option<u32>,
    /// Write the process's number to this file; removed at the end
    #[arg(long, value_name = "FILE")]
    pub pid_file: Option<PathBuf>,
    /// End when the process that started this one does
    #[arg(long)]
    pub die_with_parent: bool,
    /// Form of our own log on stderr
    #[arg(long, value_name = "text|json", default_value = "text")]
    pub log_format: LogFormat,
    /// The least that is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log_level: tracing::Level,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    Text,
    /// A line of JSON.
    Json,
}

impl SuperviseFlags {
    /// Begins to log.
    pub fn log(&self) {
        let builder = tracing_subscriber::fmt()
            .with_max_level(self.log_level)
            .with_writer(Errors::default);
        // Fails only if someone logs already, as tests may.
        let _ = match self.log_format {
            LogFormat::Text => builder.with_ansi(false).try_init(),
            LogFormat::Json => builder.json().try_init(),
        };
    }
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
    /// Most bytes of stdout and stderr together, or none [default: 1M; none with -i and -t]
    #[arg(long, value_name = "SIZE", value_parser = units::output_limit)]
    pub output_limit: Option<OutputLimit>,
    /// What to do with a command that writes more
    #[arg(long, value_name = "kill|drain", default_value = "kill", value_parser = units::policy)]
    pub on_limit: Policy,
    /// Write how the command ended to this new file, or open descriptor
    #[arg(long, value_name = "PATH|fd:N")]
    pub status_file: Option<StatusFile>,
    /// Pass stdin on, up to its end; otherwise the command finds it at its end
    #[arg(short = 'i', long = "interactive")]
    pub stdin: bool,
    /// Give the command a terminal of the size of ours; stdout and stderr are then one stream
    #[arg(short = 't', long)]
    pub tty: bool,
    /// One JSON object a line instead of the output itself
    #[arg(long)]
    pub json: bool,
}

impl ExecFlags {
    /// The file for how the command ends, if there is to be one, checked.
    ///
    /// # Errors
    /// Those of [`StatusFile::open`].
    pub fn open_status_file(&self) -> Result<Option<status_file::Open>, status_file::Error> {
        self.status_file.as_ref().map(StatusFile::open).transpose()
    }

    /// The request to the agent.
    ///
    /// # Errors
    /// What no guest could run, whatever it is like.
    pub fn request(&self, argv: &[OsString]) -> Result<ExecRequest, InvalidRequest> {
        let bytes = |text: &OsString| text.as_bytes().to_vec();
        let mut request = ExecRequest::new(argv.iter().map(bytes));
        request.env = self.env.iter().map(bytes).collect();
        request.stdin = self.stdin;
        if self.tty {
            request.tty = Some(terminal::size_or_usual());
            // What the user's terminal understands; of two the later one holds. The agent has a plain one of its own.
            if let Some(term) = env::var_os("TERM").filter(|term| !term.is_empty()) {
                request.env.insert(0, [b"TERM=", term.as_bytes()].concat());
            }
        }
        request.cwd = bytes(&self.cwd);
        request.user = self.user.clone();
        request.policy = self.on_limit;
        // The value was checked to fit when it was read.
        request.timeout_ns = self.timeout.map_or(0, |time| time.as_nanos() as u64);
        request.output_limit = match &self.output_limit {
            Some(limit) => limit.0,
            // A shell that one lives in writes for as long as one does.
            None if self.stdin && self.tty => None,
            None => Some(DEFAULT_OUTPUT_LIMIT),
        };
        request.validate()?;
        Ok(request)
    }
}
