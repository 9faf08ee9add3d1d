//! A sandbox that stays, with the vsock guest in it, by the real program.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use crate::{Monitor, Vmm, require_kvm};

/// A sandbox in a state root of its own; removed when dropped.
pub struct Sandbox(TempDir);

/// Bytes of its guest's memory.
pub const GUEST_MEMORY: u64 = 128 << 20;

impl Sandbox {
    /// Starts one in the background and waits until its guest's driver is live.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start(cmdline: &str) -> Self {
        require_kvm();
        // Below /tmp for its length: a socket's path has 107 bytes.
        let sandbox = Self(tempfile::tempdir_in("/tmp").unwrap());
        let kernel = sandbox.0.path().join("guest.elf");
        fs::write(&kernel, vmm_guests::VSOCK).unwrap();
        let started = sandbox
            .vmm("start")
            .args(["-d", "--no-agent", "--memory", &GUEST_MEMORY.to_string()])
            .args(["--cmdline", cmdline, "--kernel"])
            .arg(kernel)
            .run();
        assert_eq!(started.status, 0, "{}", started.stderr);
        let logs = sandbox.vmm("logs").arg("-f").start();
        logs.stdout.wait_for("vsock: cid 3\n");
        sandbox
    }

    /// `vmm VERB` of it.
    pub fn vmm(&self, verb: &str) -> Vmm {
        let root = self.0.path().join("r");
        Vmm::new(verb).args(["box".as_ref(), "--dir".as_ref(), root.as_os_str()])
    }

    /// What `vmm inspect` says of it.
    ///
    /// # Panics
    /// When it says nothing.
    pub fn inspect(&self) -> Value {
        let ended = self.vmm("inspect").arg("--json").run();
        assert_eq!(ended.status, 0, "{}", ended.stderr);
        serde_json::from_str(&ended.text()).unwrap()
    }

    /// Its monitor.
    ///
    /// # Panics
    /// When it does not run.
    pub fn monitor(&self) -> Monitor {
        Monitor::of(&self.inspect())
    }

    /// The socket of its vsock device.
    ///
    /// # Panics
    /// When it does not run.
    pub fn socket(&self) -> PathBuf {
        self.inspect()["sockets"]["vsock"].as_str().unwrap().into()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.vmm("rm").arg("-f").run();
    }
}
