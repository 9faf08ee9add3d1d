//! A machine in this process, with the console tapped and the sockets of a vsock device beside it.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use rustix::thread::Pid;
use tempfile::TempDir;
use vmm::exits::ExitReason;
use vmm::machine::{Config, Handle, Machine, Vsock};
use vmm_devices::vsock::Fence;

use crate::{Client, Tap, patience, require_kvm};

/// The generation of every machine here.
pub const FENCE: Fence = Fence {
    counter: 7,
    nonce: *b"0123456789abcdef",
    require_generation: false,
};

/// A running machine; stopped and waited for when dropped.
pub struct InProcess {
    /// What its serial port wrote.
    pub console: Tap,
    folder: TempDir,
    handle: Handle,
    ended: Receiver<ExitReason>,
    device_loop: Pid,
    thread: Option<JoinHandle<()>>,
}

impl InProcess {
    /// Boots a fast guest with 128 MiB and one vCPU.
    ///
    /// # Panics
    /// Without a KVM, or when the machine cannot be built.
    pub fn boot(guest: &[u8], cmdline: &str) -> Self {
        Self::boot_with(guest, |config| config.cmdline = cmdline.into())
    }

    /// Boots the vsock guest with a vsock device and waits until it is live.
    ///
    /// # Panics
    /// As for [`InProcess::boot`], or when the guest does not come up.
    pub fn boot_vsock(cmdline: &str) -> Self {
        let machine = Self::boot_with_vsock(vmm_guests::VSOCK, cmdline, FENCE);
        machine.console.wait_for("vsock: cid 3\n");
        machine
    }

    /// Boots a guest with a vsock device.
    ///
    /// # Panics
    /// As for [`InProcess::boot`].
    pub fn boot_with_vsock(guest: &[u8], cmdline: &str, fence: Fence) -> Self {
        Self::boot_with(guest, |config| {
            config.cmdline = cmdline.into();
            let socket = config.kernel.with_file_name("vsock.sock");
            config.vsock = Some(Vsock {
                socket,
                fence,
                host_ports: Default::default(),
                agent: None,
            });
        })
    }

    /// Boots a fast guest in a machine of another shape.
    ///
    /// # Panics
    /// As for [`InProcess::boot`].
    pub fn boot_with(guest: &[u8], change: impl FnOnce(&mut Config)) -> Self {
        require_kvm();
        let folder = tempfile::tempdir().unwrap();
        let kernel = folder.path().join("guest.elf");
        std::fs::write(&kernel, guest).unwrap();
        let mut config = Config::new(kernel);
        change(&mut config);
        let console = Tap::default();
        let ours = console.clone();
        let (built, handle) = channel();
        let (sender, ended) = channel();
        let thread = std::thread::spawn(move || {
            let machine = Machine::build(&config, Box::new(ours)).expect("build the machine");
            let _ = built.send((machine.handle(), rustix::thread::gettid()));
            let _ = sender.send(machine.run().expect("run the machine"));
        });
        let (handle, device_loop) = handle.recv().expect("the machine is built");
        Self {
            console,
            folder,
            handle,
            ended,
            device_loop,
            thread: Some(thread),
        }
    }

    /// The socket of its vsock device.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("vsock.sock")
    }

    /// Where the guest's connections to `port` of the host go.
    pub fn host_port(&self, port: u32) -> PathBuf {
        self.folder.path().join(format!("vsock.sock_{port}"))
    }

    /// A connection to a port of the guest.
    ///
    /// # Panics
    /// When it is refused.
    pub fn connect(&self, port: u32) -> Client {
        match Client::connect(&self.socket(), &format!("CONNECT {port}\n")) {
            Ok((client, _)) => client,
            Err(line) => panic!("port {port}: {line:?}; console: {}", self.console.text()),
        }
    }

    /// Times that the device loop has gone to sleep.
    ///
    /// # Panics
    /// When the loop has ended.
    pub fn sleeps(&self) -> u64 {
        let id = self.device_loop.as_raw_nonzero();
        let status = std::fs::read_to_string(format!("/proc/self/task/{id}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not end in time; says what its console has.
    pub fn end(&self) -> ExitReason {
        self.ended
            .recv_timeout(patience())
            .unwrap_or_else(|why| panic!("no end: {why}; console: {}", self.console.text()))
    }

    /// Ends it from outside.
    pub fn stop(&self) {
        self.handle.stop();
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
