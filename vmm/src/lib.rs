//! A KVM microVM monitor with an integrated guest agent.
//!
//! One process owns one sandbox: its vCPUs, its memory, its devices. This crate is the machine and the command
//! `vmm` around it; devices live in `vmm-devices`, the wire protocol in `vmm-protocol`.
//!
//! ```text
//! cli::run --> image --> machine::Config --> Machine::build
//!   |                                          | memory, boot (kernel, initramfs + agent, e820), acpi
//!   |                                          | kvm (slots, irqchip), cpuid, msr, vcpu
//!   |                                        Machine::run
//!   |            vCPU threads --exits--> bus --+--> serial --> console
//!   |            device loop  <-- doorbells ---+--> vsock, control --> Notice::Ready
//!   `-- client session over the life's vsock.sock --> output, status
//! ```
//!
//! # Example
//!
//! A machine that boots a kernel with its own init, and what became of it:
//!
//! ```no_run
//! use vmm::exits::ExitReason;
//! use vmm::machine::{Config, Machine};
//! use vmm_devices::console::ConsoleLog;
//!
//! let mut config = Config::new("/boot/vmlinux");
//! config.initramfs = Some("/boot/initramfs.cpio".into());
//! config.cmdline = "console=ttyS0 panic=-1".to_owned();
//! let console = ConsoleLog::default();
//! let machine = Machine::build(&config, Box::new(console.clone()))?;
//! let stop = machine.handle(); // stop.stop() from any thread
//! match machine.run()? {
//!     ExitReason::Shutdown => println!("{}", console.last_lines(10)),
//!     other => eprintln!("{other}"),
//! }
//! # Ok::<(), vmm::machine::Error>(())
//! ```
//!
//! # Limits
//!
//! x86-64 Linux hosts with KVM. 1 to [`machine::MAX_CPUS`] vCPUs, [`memory::MIN`] to [`memory::MAX`] bytes of memory,
//! a kernel command line of 2,047 bytes, one vsock device, 64 KiB of console kept.
//!
//! # Modules and errors
//!
//! Machine: [`machine`] (build and run), [`memory`], [`layout`], [`boot`], [`acpi`], [`kvm`], [`cpuid`], [`msr`],
//! [`bus`] (who owns which address), [`exits`] (how it ended), [`console`], [`control`] (the agent's connection).
//! Command: [`cli`], [`image`], [`agent`], [`sandbox`], [`supervisor`], [`api`], [`doctor`]. Errors are an enum a module, gathered in
//! [`machine::Error`]; nothing that a guest does is an error of the monitor's, but the machine's [`exits::ExitReason`].

pub mod acpi;
pub mod agent;
pub mod api;
pub mod boot;
pub mod bus;
pub mod cli;
pub mod console;
pub mod control;
pub mod cpuid;
mod device_loop;
pub mod doctor;
pub mod exits;
pub mod image;
pub mod kvm;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod msr;
pub mod sandbox;
pub mod supervisor;
mod vcpu;
