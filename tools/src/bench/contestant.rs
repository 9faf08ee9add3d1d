//! A program that boots a guest, started and timed the same way whoever it is.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::error::{Error, Naming, Result};
use crate::place::write_whole;
use crate::process::line;

/// The byte by which the fast guest says that it runs.
const READY: u8 = b'!';
/// A guest that has not come by then never will.
const DEADLINE: Duration = Duration::from_secs(10);

/// One program under measurement.
pub struct Contestant {
    /// Its name in reports.
    pub name: &'static str,
    /// Its version.
    pub version: String,
    program: PathBuf,
    arguments: Vec<String>,
}

impl Contestant {
    /// The floor program.
    pub fn floor(program: PathBuf, guest: &Path) -> Self {
        Self {
            name: "floor",
            version: env!("CARGO_PKG_VERSION").into(),
            program,
            arguments: vec![guest.display().to_string()],
        }
    }

    /// `vmm run --no-agent`.
    pub fn vmm(program: PathBuf, guest: &Path, memory: u32) -> Self {
        let arguments = [
            "run",
            "--no-agent",
            "--memory",
            &format!("{memory}M"),
            "--kernel",
        ];
        let mut arguments: Vec<String> = arguments.map(str::to_owned).into();
        arguments.push(guest.display().to_string());
        Self {
            name: "vmm",
            version: super::report::version(&program),
            program,
            arguments,
        }
    }

    /// Firecracker without its API, with a vsock device as `vmm` has one, and logging off.
    pub fn firecracker(program: PathBuf, guest: &Path, memory: u32, folder: &Path) -> Result<Self> {
        let socket = folder.join("peer.sock");
        let config = json!({
            "boot-source": { "kernel_image_path": guest, "boot_args": "quiet" },
            "drives": [],
            "machine-config": { "vcpu_count": 1, "mem_size_mib": memory },
            "vsock": { "guest_cid": 3, "uds_path": socket },
        });
        let path = folder.join("peer.json");
        write_whole(&path, config.to_string().as_bytes())?;
        let arguments = ["--no-api", "--level", "Off", "--config-file"];
        let mut arguments: Vec<String> = arguments.map(str::to_owned).into();
        arguments.push(path.display().to_string());
        Ok(Self {
            name: "firecracker",
            version: super::report::version(&program),
            program,
            arguments,
        })
    }

    /// Spawns it once; milliseconds from the spawn to the first byte of the guest.
    pub fn sample(&self, folder: &Path) -> Result<f64> {
        // The one trace that a life of the peer leaves; it refuses to start over it.
        let _ = std::fs::remove_file(folder.join("peer.sock"));
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let start = Instant::now();
        let child = command
            .spawn()
            .naming(|| format!("start `{}`", line(&command)))?;
        let mut child = Ended(child);
        let ready = first_byte(&mut child.0, start);
        let elapsed = start.elapsed();
        match ready {
            Some(READY) => {
                child
                    .0
                    .wait()
                    .naming(|| format!("wait for {}", self.name))?;
                Ok(elapsed.as_secs_f64() * 1e3)
            }
            other => Err(Error::Check(format!(
                "`{}` did not boot the guest: its first byte was {other:?}",
                line(&command)
            ))),
        }
    }
}

/// The first byte on its stdout, waited for without polling.
fn first_byte(child: &mut Child, start: Instant) -> Option<u8> {
    let mut stdout = child.stdout.take()?;
    let rest = DEADLINE.saturating_sub(start.elapsed());
    let timeout = Timespec {
        tv_sec: rest.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: rest.subsec_nanos().into(),
    };
    poll(&mut [PollFd::new(&stdout, PollFlags::IN)], Some(&timeout)).ok()?;
    let mut byte = [0];
    let read = stdout.read(&mut byte).ok()?;
    child.stdout = Some(stdout);
    (read == 1).then_some(byte[0])
}

/// A child that does not outlive its measurement.
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
