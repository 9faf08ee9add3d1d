//! Where the vCPU side and the loop side meet: the queues, under one lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use crate::virtio::Interrupt;

/// The queues of a device that runs.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) memory: GuestMemoryMmap,
    pub(super) rx: Queue,
    pub(super) tx: Queue,
    pub(super) interrupt: Interrupt,
}

/// The loop holds the lock while it works on the queues, for a bounded number of packets; vCPUs
/// take it only to start and to reset the device, so interrupt handlers never wait for it.
#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<Slot>);

#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Counts resets: connections of an earlier epoch are over, even if the device runs again by
    /// the time that the loop looks.
    pub(super) epoch: u64,
    pub(super) active: Option<Active>,
}

impl Shared {
    pub(super) fn start(&self, active: Active) {
        self.lock().active = Some(active);
    }

    pub(super) fn stop(&self) {
        let mut slot = self.lock();
        slot.active = None;
        slot.epoch += 1;
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slot> {
        // Poisoned only by a panic of the loop, which ends the process; resets must not panic on
        // top.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
