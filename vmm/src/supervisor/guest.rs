//! A machine with an agent in it, running in a thread of its own.

use std::time::Duration;

use vmm_devices::console::ConsoleLog;
use vmm_devices::vsock::Fence;
use vmm_events::{Inbox, Waker, inbox};
use vmm_snapshot::Generation;

use super::{Error, HostPorts};
use crate::bus::Console;
use crate::control::{COUNTED, Counted, Identity, NOTICES, Notice, Notices};
use crate::exits::{ExitReason, Metrics};
use crate::machine::{self, Config, Handle, Machine, MachineThread, Vsock};
use crate::sandbox::{Life, LogFile};

/// The machine's thread and what comes from it.
pub(super) struct Guest {
    handle: Handle,
    thread: Option<MachineThread>,
    /// What its agent has to say; taken by whoever watches it.
    pub(super) notices: Option<Inbox<Notice>>,
    /// What it has counted, when asked; likewise.
    pub(super) counted: Option<Inbox<Counted>>,
    pub(super) log: ConsoleLog,
    /// Woken when the machine has ended.
    pub(super) ended: Waker,
    pub(super) has_agent: bool,
}

impl Guest {
    /// Builds the machine of a life and starts it.
    pub(super) fn boot(
        mut config: Config,
        life: &Life,
        require_generation: bool,
        host_ports: HostPorts,
        kept: Option<LogFile>,
    ) -> Result<Self, Error> {
        let (news, notices) = inbox(NOTICES)?;
        let (counts, counted) = inbox(COUNTED)?;
        let ended = Waker::new()?;
        let has_agent = config.agent.is_some();
        let identity = Identity {
            generation: life.id(),
            hostname: life.sandbox().name().to_string(),
            machine_id: Generation::new(1)?.nonce().bytes(),
        };
        config.vsock = Some(Vsock {
            socket: life.vsock(),
            fence: Fence {
                counter: life.id().counter,
                nonce: life.generation().nonce().bytes(),
                require_generation,
            },
            host_ports,
            agent: has_agent.then_some((
                identity,
                Notices {
                    news,
                    counted: counts,
                },
            )),
        });
        let handle = Handle::new()?;
        let log = ConsoleLog::default();
        let console: Console = match kept {
            Some(file) => Box::new(Kept {
                log: log.clone(),
                file: Some(file),
            }),
            None => Box::new(log.clone()),
        };
        let machine = Machine::build_with(handle.clone(), &config, console)?;
        let thread = machine
            .spawn(ended.clone())
            .map_err(|source| Error::Host("a thread", source))?;
        Ok(Self {
            handle,
            thread: Some(thread),
            notices: Some(notices),
            counted: Some(counted),
            log,
            ended,
            has_agent,
        })
    }

    /// Asks the agent to switch off, with a time for its workloads.
    pub(super) fn power_off(&self, grace: Duration) {
        self.handle.power_off(grace);
    }

    /// Asks the agent for its counters: one question, one answer in [`Guest::counted`].
    pub(super) fn ask_counters(&self) {
        self.handle.ask_counters();
    }

    /// Ends it at once; [`Guest::ended`] tells when.
    pub(super) fn stop(&self) {
        self.handle.stop();
    }

    /// What its device loop has done.
    pub(super) fn metrics(&self) -> Metrics {
        self.handle.metrics()
    }

    /// Waits for its thread, which has ended or is about to; `None` if that was done before.
    pub(super) fn join(&mut self) -> Option<Result<ExitReason, machine::Error>> {
        self.thread.take().map(MachineThread::join)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop();
        let _ = self.join();
    }
}

/// A console that is kept in memory, for errors, and in a bounded file, for `vmm logs`.
struct Kept {
    log: ConsoleLog,
    /// None once it could not be written: the guest goes on without it.
    file: Option<LogFile>,
}

impl std::io::Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.log.append(bytes);
        if let Some(file) = &mut self.file
            && let Err(error) = file.write_all(bytes)
        {
            tracing::warn!(%error, "the console log cannot be written any more");
            self.file = None;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
