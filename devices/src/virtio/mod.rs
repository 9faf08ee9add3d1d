//! What a virtio device is to its transport, and the transport itself.
//!
//! A device has two faces. The vCPU side, [`VirtioDevice`], is called with the transport's lock
//! held and answers at once. The loop side (for vsock [`crate::vsock::VsockHost`]) owns the file
//! descriptors and moves the data. They meet at the queues only: [`VirtioDevice::activate`] hands
//! them over, [`VirtioDevice::reset`] takes them away and returns only when nobody touches guest
//! memory any more.

mod interrupt;
mod kick;
mod registers;
mod transport;

pub use interrupt::Interrupt;
pub use kick::Kick;
pub use transport::{MMIO_WINDOW, MmioDevice, NOTIFY_OFFSET, VirtioMmio};

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

/// Why a device cannot run with what the driver has set up; the transport answers with
/// `DEVICE_NEEDS_RESET`.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The device cannot work without this queue.
    #[error("queue {index} is not ready")]
    QueueNotReady {
        /// Index of the queue.
        index: usize,
    },
    /// A ring is misaligned, has a size that is no power of two, or lies outside of guest memory.
    #[error("queue {index} is not valid")]
    QueueNotValid {
        /// Index of the queue.
        index: usize,
    },
    /// The device could not wake its loop.
    #[error("could not wake the device's loop")]
    Wake(#[source] std::io::Error),
}

/// Everything a device needs to run, handed over when the driver sets `DRIVER_OK`.
#[derive(Debug)]
pub struct Activation {
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// One entry a queue, in index order; `None` where the driver left it unused. The rings of the
    /// others are valid: aligned, sized and inside guest memory.
    pub queues: Vec<Option<Queue>>,
    /// The feature bits that both sides have accepted.
    pub features: u64,
    /// The way to the guest.
    pub interrupt: Interrupt,
}

/// A virtio device as its transport sees it.
pub trait VirtioDevice: Send {
    /// Device type (virtio 1.2, section 5).
    fn device_id(&self) -> u32;

    /// Maximum size of each queue: a power of two, at most 32,768.
    fn queue_sizes(&self) -> &[u16];

    /// Feature bits offered. `VIRTIO_F_VERSION_1` is added by the transport, which takes no driver
    /// without it.
    fn features(&self) -> u64;

    /// The doorbells, one a queue; a plain write to `QueueNotify` rings them too.
    fn kicks(&self) -> &[Kick];

    /// Reads device configuration at `offset`. Bytes that do not exist are left as they are
    /// (all-ones).
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes device configuration; most devices have none that can be written.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    /// Starts the device.
    ///
    /// # Errors
    /// [`ActivateError`] where the set-up is not enough; the device stays inactive and the
    /// transport asks the driver for a reset.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops the device. On return nobody reads or writes guest memory on its behalf.
    fn reset(&mut self);
}

#[cfg(test)]
mod tests;
