//! A split virtqueue from the driver's side (virtio 1.2, section 2.7), without interrupts.

use core::sync::atomic::{Ordering, fence};

use crate::machine::{load, store};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

/// One queue.
pub struct Ring {
    base: u64,
    size: u16,
    event_idx: bool,
    available: u16,
    /// Where `available` was when the doorbell was last considered.
    kicked: u16,
    used: u16,
}

impl Ring {
    /// An empty ring in zeroed memory at `base`.
    pub fn new(base: u64, size: u16, event_idx: bool) -> Self {
        let ring = Self {
            base,
            size,
            event_idx,
            available: 0,
            kicked: 0,
            used: 0,
        };
        let (_, available, _) = ring.addresses();
        store(available, NO_INTERRUPT);
        ring
    }

    /// Descriptor table, available ring, used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        (self.base, self.base + 0x4000, self.base + 0x8000)
    }

    /// Writes one descriptor.
    pub fn describe(&self, index: u16, address: u64, length: u32, write: bool, next: Option<u16>) {
        let at = self.base + u64::from(index) * 16;
        let flags = if write { WRITE } else { 0 } | if next.is_some() { NEXT } else { 0 };
        store(at, address);
        store(at + 8, length);
        store(at + 12, flags);
        store(at + 14, next.unwrap_or(0));
    }

    /// Makes a chain available.
    pub fn offer(&mut self, head: u16) {
        let (_, ring, _) = self.addresses();
        store(ring + 4 + u64::from(self.available % self.size) * 2, head);
        self.available = self.available.wrapping_add(1);
        // The entry before the index: x86 keeps stores in order, the compiler must too.
        fence(Ordering::Release);
        store(ring + 2, self.available);
    }

    /// Whether the device wants to be told of what was offered since the last call.
    pub fn must_kick(&mut self) -> bool {
        // The index before the device's wish: a store before a load is what x86 does reorder.
        fence(Ordering::SeqCst);
        let (_, _, ring) = self.addresses();
        let (old, new) = (self.kicked, self.available);
        self.kicked = new;
        if self.event_idx {
            let event: u16 = load(ring + 4 + u64::from(self.size) * 8);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            load::<u16>(ring) & NO_NOTIFY == 0
        }
    }

    /// The next returned chain: its head and the bytes written.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let (_, _, ring) = self.addresses();
        if load::<u16>(ring + 2) == self.used {
            return None;
        }
        fence(Ordering::Acquire);
        let entry = ring + 4 + u64::from(self.used % self.size) * 8;
        self.used = self.used.wrapping_add(1);
        Some((load::<u32>(entry) as u16, load(entry + 4)))
    }
}
