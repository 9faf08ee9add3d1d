//! The sandbox that is measured: started, reached, removed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vmm_client::GenerationTag;
use vmm_protocol::GenerationId;

use crate::Result;

/// Its name.
pub const NAME: &str = "bench";
/// What must have come by then never will.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// A running sandbox; gone when dropped.
pub struct Sandbox {
    vmm: PathBuf,
    folder: tempfile::TempDir,
    /// Where its guest is reached.
    pub socket: PathBuf,
    /// Its generation.
    pub tag: GenerationTag,
}

impl Sandbox {
    /// Starts it and waits until its agent is ready.
    pub fn start(vmm: &Path, kernel: &Path, initramfs: &Path) -> Result<Self> {
        // Below /tmp for its length: a socket's path has 107 bytes.
        let folder = tempfile::tempdir_in("/tmp")?;
        let mut start = verb(vmm, "start", folder.path());
        start.args(["-d", "--memory", "256M", "--ready-timeout", "240s"]);
        start.arg("--kernel").arg(kernel);
        start.arg("--initramfs").arg(initramfs);
        good(&mut start)?;
        let mut sandbox = Self {
            vmm: vmm.into(),
            socket: PathBuf::new(),
            tag: GenerationTag::new(GenerationId::default(), [0; 16]),
            folder,
        };
        let current = sandbox
            .folder
            .path()
            .join("r")
            .join(NAME)
            .join("current.json");
        let text = std::fs::read(&current)?;
        (sandbox.socket, sandbox.tag) = reached_by(&serde_json::from_slice(&text)?)
            .ok_or_else(|| format!("{} names no generation", current.display()))?;
        Ok(sandbox)
    }

    /// `vmm exec` of `true`.
    pub fn exec_true(&self) -> Command {
        let mut exec = verb(&self.vmm, "exec", self.folder.path());
        exec.args(["--", "true"]);
        exec
    }

    /// Bytes of memory that its agent has in use, as it says.
    pub fn agent_memory(&self) -> Result<u64> {
        let mut metrics = verb(&self.vmm, "metrics", self.folder.path());
        let output = metrics.arg("--json").stdout(Stdio::piped()).output()?;
        let metrics: Value = serde_json::from_slice(&output.stdout)?;
        let bytes = metrics["agent"]["resident_bytes"].as_u64();
        bytes
            .filter(|bytes| *bytes > 0)
            .ok_or_else(|| format!("no memory of the agent's in {metrics}").into())
    }

    /// An established connection to a port of a workload.
    pub fn connect(&self, port: u32) -> Result<UnixStream> {
        handshake(UnixStream::connect(&self.socket)?, port)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let _ = good(verb(&self.vmm, "rm", self.folder.path()).arg("-f"));
    }
}

/// Asks a monitor's socket for a port of its guest.
pub fn handshake(mut stream: UnixStream, port: u32) -> Result<UnixStream> {
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') && stream.read(&mut byte)? == 1 {
        line.push(byte[0]);
    }
    if !line.starts_with(b"OK ") {
        return Err(format!("port {port}: {:?}", String::from_utf8_lossy(&line)).into());
    }
    Ok(stream)
}

fn verb(vmm: &Path, verb: &str, folder: &Path) -> Command {
    let mut command = Command::new(vmm);
    command.args([verb, NAME, "--dir"]).arg(folder.join("r"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs it to its end, which must be a success.
pub fn good(command: &mut Command) -> Result<()> {
    let output = command.stderr(Stdio::piped()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(format!("{command:?}: {}: {said}", output.status).into())
}

/// Socket and generation in a sandbox's `current.json`.
fn reached_by(current: &Value) -> Option<(PathBuf, GenerationTag)> {
    let folder = Path::new(current["folder"].as_str()?);
    let generation = &current["generation"];
    let id = GenerationId {
        counter: generation["counter"].as_u64()?,
        public_id: u128::from_str_radix(generation["id"].as_str()?, 16).ok()?,
    };
    let nonce = u128::from_str_radix(current["nonce"].as_str()?, 16).ok()?;
    let tag = GenerationTag::new(id, nonce.to_be_bytes());
    Some((folder.join("vsock.sock"), tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_reached_by_what_its_record_says() {
        let current = serde_json::json!({
            "folder": "/r/box/g7-abcd0000", "nonce": "0123456789abcdef0123456789abcdef",
            "generation": { "counter": 7, "id": "abcd0000000000000000000000000000" },
        });
        let (socket, tag) = reached_by(&current).unwrap();
        assert_eq!(socket, Path::new("/r/box/g7-abcd0000/vsock.sock"));
        assert_eq!(
            tag.connect_line(1),
            "CONNECT 1 7-0123456789abcdef0123456789abcdef\n"
        );
        assert_eq!(
            reached_by(&serde_json::json!({ "state": "starting" })),
            None
        );
    }
}
