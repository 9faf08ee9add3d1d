//! Virtual devices: virtio-mmio transport, virtio-vsock, serial console, panic port. No KVM types.
//!
//! ```text
//!            vCPU threads                               device loop (one thread)
//!   MMIO exit --> VirtioMmio<Vsock> -- queues (lock) --> VsockHost <--> unix sockets of host programs
//!   ioeventfd --------------- Kick ------------------------^  |
//!   irqfd     <-------------- Interrupt ----------------------+
//!   PIO exit  --> SerialPort --> ConsoleLog (bounded)
//!             --> pvpanic    --> PanicEvent
//! ```
//!
//! The vCPU side answers register accesses under a short lock and touches no data. The loop side
//! owns all descriptors, moves all data and is driven by a [`vmm_events::Poller`] of its owner's,
//! beside whatever else that loop watches. They share the queues only, which the driver's
//! `DRIVER_OK` hands over and a reset takes back.
//!
//! # Example
//!
//! What a monitor does for a vsock device. With KVM it registers each [`virtio::Kick`]'s eventfd as
//! an ioeventfd at the window's base + [`virtio::NOTIFY_OFFSET`] (32 bits wide, datamatch = queue
//! index), and `line` as an irqfd.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use std::time::{Duration, Instant};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//! use vmm_devices::virtio::{MmioDevice, VirtioDevice, VirtioMmio};
//! use vmm_devices::vsock::{self, Fence, VsockConfig};
//! use vmm_events::{Answer, Poller};
//! use vmm_sys_util::eventfd::EventFd;
//!
//! #[derive(Clone)]
//! enum Token {
//!     Vsock(vsock::Token),
//! }
//!
//! impl From<vsock::Token> for Token {
//!     fn from(token: vsock::Token) -> Self {
//!         Self::Vsock(token)
//!     }
//! }
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let fence = Fence { counter: 1, nonce: [7; 16], require_generation: false };
//! let mut config = VsockConfig::new(folder.join("vsock.sock"), fence);
//! config.control = Some(Box::new(|stream| println!("the agent has dialled: {stream:?}")));
//!
//! let mut poller: Poller<Token> = Poller::new()?;
//! let (device, mut host) = vsock::create(config, poller.registrar())?;
//! let kicks = device.kicks().to_vec(); // ioeventfds
//! let line = EventFd::new(0)?; // irqfd: register `line`, the device keeps a clone
//! let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let registers = Arc::new(Mutex::new(VirtioMmio::new(device, memory, line.try_clone()?)));
//!
//! // vCPU thread, on an MMIO exit in the device's window:
//! let mut magic = [0; 4];
//! registers.lock().unwrap().read(0, &mut magic);
//! assert_eq!(&magic, b"virt");
//!
//! // Loop thread, one round:
//! kicks[vsock::TX_QUEUE].ring();
//! poller.wait(host.timeout(Instant::now()).or(Some(Duration::from_secs(1))))?;
//! while let Some(event) = poller.next_event() {
//!     let answer = match event.token {
//!         Token::Vsock(token) => host.dispatch(token, event.readiness, Instant::now()),
//!     };
//!     poller.answer(&event, answer);
//! }
//! host.settle(Instant::now());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Limits
//!
//! - Memory for what host sockets do not take: a connection's credit window, 256 KiB (or what a monitor
//!   chooses by [`vsock::socket_window`], at most 512) for the first 32 at once and 64 KiB for others, at
//!   most 1,024 connections ([`vsock::Limits`]). Nothing is held for what goes to the guest.
//! - 256 clients at once that have not sent their `CONNECT` line, for 5 s each
//!   ([`vsock::Deadlines`]).
//! - 1,024 resets owed to a guest that takes none.
//! - The console log keeps its last 64 KiB.
//!
//! # Modules and errors
//!
//! [`virtio`]: transport and the traits at its edge; [`virtio::ActivateError`]. [`vsock`]: the
//! device, its pure parts and its host side; [`vsock::CreateError`], [`vsock::QueueError`].
//! [`serial`], [`console`] and [`pvpanic`] cannot fail. Nothing that a guest does is an error of
//! the monitor's: at worst the device asks for a reset.
//!
//! # Features
//!
//! `testing`: a module of the same name with the driver's side, for tests of other crates.
//! `negative-control`: see CONTRIBUTING.

pub mod console;
pub mod pvpanic;
pub mod serial;
mod sparse;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod virtio;
pub mod vsock;
