//! A device's interrupt line with the registers behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use vmm_sys_util::eventfd::EventFd;

/// `InterruptStatus` bit 0: the device has used a buffer.
const USED_BUFFER: u32 = 1;
/// `InterruptStatus` bit 1: device status or configuration has changed.
const CONFIGURATION: u32 = 2;

/// The way from a device to the guest: `InterruptStatus`, `ConfigGeneration`, the device's own
/// status bit and the line itself. Shared by the transport, which the vCPUs read, and the device's
/// loop, which writes: all of it is atomic, so that an interrupt handler never waits for a lock
/// that the loop holds.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<Line>);

#[derive(Debug)]
struct Line {
    event: EventFd,
    status: AtomicU32,
    generation: AtomicU32,
    needs_reset: AtomicBool,
    signals: AtomicU64,
}

impl Interrupt {
    /// A line that writes `event`, which the monitor has registered as an irqfd (edge triggered).
    #[must_use]
    pub fn new(event: EventFd) -> Self {
        Self(Arc::new(Line {
            event,
            status: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            needs_reset: AtomicBool::new(false),
            signals: AtomicU64::new(0),
        }))
    }

    /// Tells the driver that buffers were used.
    pub fn signal_used(&self) {
        self.raise(USED_BUFFER);
    }

    /// Tells the driver that the configuration space has changed.
    pub fn signal_configuration(&self) {
        self.0.generation.fetch_add(1, Ordering::SeqCst);
        self.raise(CONFIGURATION);
    }

    /// Sets `DEVICE_NEEDS_RESET` and tells the driver (virtio 1.2, section 2.1.2). Until it resets
    /// the device, nothing of it works.
    pub fn signal_needs_reset(&self) {
        if !self.0.needs_reset.swap(true, Ordering::SeqCst) {
            self.raise(CONFIGURATION);
        }
    }

    /// How often the line was written; for tests and metrics.
    #[must_use]
    pub fn signals(&self) -> u64 {
        self.0.signals.load(Ordering::Relaxed)
    }

    /// True once the device has asked for a reset.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.0.needs_reset.load(Ordering::SeqCst)
    }

    pub(super) fn status(&self) -> u32 {
        self.0.status.load(Ordering::SeqCst)
    }

    pub(super) fn acknowledge(&self, bits: u32) {
        self.0.status.fetch_and(!bits, Ordering::SeqCst);
    }

    pub(super) fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::SeqCst)
    }

    pub(super) fn reset(&self) {
        self.0.status.store(0, Ordering::SeqCst);
        self.0.needs_reset.store(false, Ordering::SeqCst);
    }

    fn raise(&self, bits: u32) {
        // The bit first: the handler that the line starts must find it.
        self.0.status.fetch_or(bits, Ordering::SeqCst);
        self.0.signals.fetch_add(1, Ordering::Relaxed);
        // Fails only when the counter would overflow, and then an interrupt is outstanding anyhow.
        let _ = self.0.event.write(1);
    }
}
