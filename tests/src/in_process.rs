//! A machine in this process, with the console tapped.

use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;

use tempfile::TempDir;
use vmm::exits::ExitReason;
use vmm::machine::{Config, Handle, Machine};

use crate::{Tap, patience, require_kvm};

/// A running machine; stopped and waited for when dropped.
pub struct InProcess {
    /// What its serial port wrote.
    pub console: Tap,
    /// The folder of its kernel and sockets.
    pub folder: TempDir,
    handle: Handle,
    ended: Receiver<ExitReason>,
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
            let _ = built.send(machine.handle());
            let _ = sender.send(machine.run().expect("run the machine"));
        });
        let handle = handle.recv().expect("the machine is built");
        Self {
            console,
            folder,
            handle,
            ended,
            thread: Some(thread),
        }
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
