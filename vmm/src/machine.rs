//! A whole machine: built from its configuration, run on the caller's thread until it ends.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_devices::vsock::Fence;
use vmm_events::Waker;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::boot::{cmdline, initramfs, kernel, params, registers};
use crate::bus::{Bus, Console};
use crate::control::{Identity, Notices};
use crate::cpuid::{self, Topology};
use crate::device_loop::DeviceLoop;
use crate::exits::{ExitReason, Metrics, Outcome};
use crate::kvm::{self, Capabilities, call};
use crate::layout::{ACPI, SERIAL_GSI};
use crate::vcpu::{Running, Vcpu};
use crate::{acpi, memory, msr};

/// Most vCPUs of a machine.
pub const MAX_CPUS: u8 = 32;

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// Guest memory in bytes.
    pub memory: u64,
    /// vCPUs, 1 to [`MAX_CPUS`].
    pub cpus: u8,
    /// An x86-64 ELF or a bzImage.
    pub kernel: PathBuf,
    /// A cpio archive, plain or compressed.
    pub initramfs: Option<PathBuf>,
    /// The guest agent to append to the initramfs.
    pub agent: Option<&'static [u8]>,
    /// The kernel's command line.
    pub cmdline: String,
    /// The vsock device, if there is one.
    pub vsock: Option<Vsock>,
}

impl Config {
    /// A machine of one vCPU and 128 MiB that boots `kernel`, with a serial port and nothing else.
    #[must_use]
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        Self {
            memory: 128 << 20,
            cpus: 1,
            kernel: kernel.into(),
            initramfs: None,
            agent: None,
            cmdline: String::new(),
            vsock: None,
        }
    }
}

/// The vsock device of a machine.
#[derive(Clone, Debug)]
pub struct Vsock {
    /// Socket for host programs; what the guest dials goes to this path with `_<port>` appended.
    pub socket: PathBuf,
    /// How clients name this life.
    pub fence: Fence,
    /// Where connections of the guest go, by port, other than to a socket beside ours.
    pub host_ports: BTreeMap<u32, PathBuf>,
    /// The guest's agent, if one is expected: who it is told to be, and who is told of it.
    pub agent: Option<(Identity, Notices)>,
}

/// Why a machine could not be built or started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Too many vCPUs, or none.
    #[error("{0} vCPUs: use --cpus 1 to {max}", max = MAX_CPUS)]
    Cpus(u8),
    /// The host's KVM.
    #[error(transparent)]
    Kvm(#[from] kvm::Error),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] kernel::Error),
    /// The initramfs.
    #[error(transparent)]
    Initramfs(#[from] initramfs::Error),
    /// The command line.
    #[error(transparent)]
    Cmdline(#[from] cmdline::Error),
    /// Boot data does not fit.
    #[error("guest memory is too small for boot data: use a larger --memory")]
    Write(#[from] vm_memory::GuestMemoryError),
    /// No descriptor or epoll instance left.
    #[error("cannot set up the device loop")]
    Events(#[from] vmm_events::Error),
    /// No descriptor left.
    #[error("cannot create an event descriptor")]
    Descriptor(#[source] io::Error),
    /// The vsock device.
    #[error("cannot set up the vsock device")]
    Vsock(#[from] vmm_devices::vsock::CreateError),
    /// A list for KVM did not fit.
    #[error("cannot build the list of {0}")]
    List(&'static str),
}

/// Ends a machine from any thread. Made before the machine, so that what the machine is built of may use it.
#[derive(Clone)]
pub struct Handle {
    outcome: Arc<Outcome>,
}

impl Handle {
    /// A handle for a machine to come.
    ///
    /// # Errors
    /// [`Error::Events`] when no descriptor is left.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            outcome: Arc::new(Outcome::new(Waker::new()?, Waker::new()?)),
        })
    }

    /// Stops the machine at once, like pulling its plug. `run` then returns [`ExitReason::Stopped`], unless the
    /// guest has ended it first.
    pub fn stop(&self) {
        self.outcome.end(ExitReason::Stopped);
    }

    /// Asks the guest's agent to switch the machine off, after its workloads have had `grace` to end by themselves.
    /// Nothing happens if there is no agent: give it a deadline.
    pub fn power_off(&self, grace: Duration) {
        self.outcome.ask_power_off(grace);
    }

    /// Asks the guest's agent for its counters. The answer comes by [`Notices::counted`], one for each question, within
    /// a second; ask again only when it has. None comes once the machine has ended, which drops that sender, or where
    /// no agent was configured.
    pub fn ask_counters(&self) {
        self.outcome.ask_counters();
    }

    /// What the device loop had done when it last went to sleep.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.outcome.metrics()
    }

    /// Becomes readable, and stays so, when the machine ends.
    #[must_use]
    pub fn ended(&self) -> &Waker {
        self.outcome.waker()
    }
}

/// A machine that is ready to run.
///
/// Fields drop in order: vCPUs and the machine go before the memory that they use.
pub struct Machine {
    vcpus: Vec<Vcpu>,
    bus: Arc<Bus>,
    handle: Handle,
    vsock: Option<Vsock>,
    vm: VmFd,
    memory: GuestMemoryMmap,
}

impl Machine {
    /// Builds a machine on `/dev/kvm`. What the guest writes to its serial port goes to `console`.
    ///
    /// # Errors
    /// All of [`Error`]; nothing is left behind.
    pub fn build(config: &Config, console: Console) -> Result<Self, Error> {
        Self::build_with(Handle::new()?, config, console)
    }

    /// Builds a machine that `handle` stops.
    ///
    /// # Errors
    /// As for [`Machine::build`].
    pub fn build_with(handle: Handle, config: &Config, console: Console) -> Result<Self, Error> {
        // What can be wrong with the user's input comes before anything that costs time.
        if !(1..=MAX_CPUS).contains(&config.cpus) {
            return Err(Error::Cpus(config.cpus));
        }
        memory::check(config.memory)?;
        cmdline::check(&config.cmdline, None)?;
        let kernel_file = kernel::open(&config.kernel)?;
        let archive = match &config.initramfs {
            Some(path) => Some((initramfs::open(path)?, path.as_path())),
            None => None,
        };
        let kvm = kvm::open(Path::new(kvm::DEVICE))?;
        let capabilities = Capabilities::ask(&kvm)?;
        if usize::from(config.cpus) > capabilities.max_cpus {
            return Err(Error::Cpus(config.cpus));
        }

        // All that reads the user's files comes before the machine: destroying one takes the kernel tens of
        // milliseconds, which an error has no use for.
        let memory = memory::create(config.memory)?;
        let kernel = kernel::load(&memory, kernel_file, &config.kernel)?;
        let initramfs = initramfs::load(&memory, archive, config.agent, kernel.end)?;
        let limit = kernel.header.map(|header| header.cmdline_size);
        cmdline::write(&memory, &config.cmdline, limit)?;
        params::write(&memory, kernel.header, initramfs)?;
        registers::write_tables(&memory)?;
        let tables = acpi::build(config.cpus, usize::from(config.vsock.is_some()));
        memory.write_slice(&tables, GuestAddress(ACPI))?;

        let vm = kvm::create_vm(&kvm)?;
        kvm::furnish(&vm, &memory)?;
        let serial = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(Error::Descriptor)?;
        vm.register_irqfd(&serial, SERIAL_GSI)
            .map_err(call("KVM_IRQFD"))?;
        let bus = Arc::new(Bus::new(console, serial));

        let vcpus = vcpus(&kvm, &vm, config.cpus, capabilities, kernel.entry)?;
        Ok(Self {
            vcpus,
            bus,
            handle,
            vsock: config.vsock.clone(),
            vm,
            memory,
        })
    }

    /// A handle to stop it with.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Guest memory, shared with the machine.
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Accesses of the guest to addresses that nobody owns are counted here.
    #[must_use]
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Runs the machine on a thread of its own, and wakes `done` when it has ended.
    ///
    /// # Errors
    /// When the host has no thread left; the machine is gone then.
    pub fn spawn(self, done: Waker) -> io::Result<MachineThread> {
        thread::Builder::new()
            .name("devices".to_owned())
            .spawn(move || {
                let reason = self.run();
                done.wake();
                reason
            })
            .map(MachineThread)
    }

    /// Runs the machine: vCPUs in threads of their own, the device loop on this one, until it ends.
    ///
    /// # Errors
    /// [`Error::Kvm`] when a thread cannot be started, [`Error::Events`] when the loop fails; all threads have
    /// ended by then.
    pub fn run(self) -> Result<ExitReason, Error> {
        let Self {
            vcpus,
            bus,
            handle,
            vsock,
            vm,
            memory,
        } = self;
        let Handle { outcome } = handle;
        let mut devices = DeviceLoop::new(&outcome)?;
        if let Some(vsock) = vsock {
            bus.attach(vec![devices.add_vsock(vsock, &vm, &memory)?]);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let mut running = Threads {
            threads: Vec::with_capacity(vcpus.len()),
            stop: stop.clone(),
        };
        for vcpu in vcpus {
            running
                .threads
                .push(vcpu.spawn(bus.clone(), outcome.clone(), stop.clone())?);
        }
        let reason = devices.run(&outcome);
        // vCPUs, then devices, then the machine, and last the memory that all of them use.
        drop(running);
        drop(devices);
        drop((vm, memory));
        reason
    }
}

/// The thread of [`Machine::spawn`].
pub struct MachineThread(JoinHandle<Result<ExitReason, Error>>);

impl MachineThread {
    /// Waits for the machine's end.
    ///
    /// # Errors
    /// Those of [`Machine::run`].
    pub fn join(self) -> Result<ExitReason, Error> {
        let panicked = || ExitReason::Failed("the device loop panicked".to_owned());
        self.0.join().unwrap_or_else(|_| Ok(panicked()))
    }
}

/// vCPU threads that are stopped and waited for, however the machine's run ends.
struct Threads {
    threads: Vec<Running>,
    stop: Arc<AtomicBool>,
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        for thread in &self.threads {
            thread.kick();
        }
        for thread in self.threads.drain(..) {
            thread.join();
        }
    }
}

fn vcpus(
    kvm: &Kvm,
    vm: &VmFd,
    cpus: u8,
    capabilities: Capabilities,
    entry: u64,
) -> Result<Vec<Vcpu>, Error> {
    let supported = kvm
        .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
        .map_err(call("KVM_GET_SUPPORTED_CPUID"))?;
    let msrs = msr::boot().map_err(|_| Error::List("boot MSRs"))?;
    let mut vcpus = Vec::with_capacity(usize::from(cpus));
    for id in 0..cpus {
        let vcpu = Vcpu::create(vm, id)?;
        let mut cpuid = supported.clone();
        let topology = Topology {
            cpus,
            apic_id: id,
            tsc_deadline: capabilities.tsc_deadline,
        };
        cpuid::filter(&mut cpuid, topology);
        vcpu.configure(&cpuid, &msrs, (id == 0).then_some(entry))?;
        vcpus.push(vcpu);
    }
    Ok(vcpus)
}
