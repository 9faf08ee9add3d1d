//! A virtio driver: split rings and the register dance.

use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::virtio::MmioDevice;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;

/// One descriptor's worth of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Guest physical address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Whether the device writes it.
    pub writable: bool,
}

/// The driver's side of a split queue (virtio 1.2, section 2.7). All of it lies within 64 KiB at
/// its base.
#[derive(Debug)]
pub struct DriverQueue {
    memory: GuestMemoryMmap,
    base: u64,
    size: u16,
    free: Vec<u16>,
    chains: HashMap<u16, Vec<u16>>,
    available: u16,
    used: u16,
    kicked_at: u16,
    event_idx: bool,
}

impl DriverQueue {
    /// A queue of `size` entries at `base`.
    pub fn new(memory: &GuestMemoryMmap, base: u64, size: u16, event_idx: bool) -> Self {
        let zeros = vec![0; 0x4000];
        memory.write_slice(&zeros, GuestAddress(base)).unwrap();
        Self {
            memory: memory.clone(),
            base,
            size,
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
            available: 0,
            used: 0,
            kicked_at: 0,
            event_idx,
        }
    }

    /// Address of the descriptor table.
    pub fn descriptors(&self) -> u64 {
        self.base
    }

    /// Address of the ring that the driver writes.
    pub fn available_ring(&self) -> u64 {
        self.base + 0x1000
    }

    /// Address of the ring that the device writes.
    pub fn used_ring(&self) -> u64 {
        self.base + 0x2000
    }

    /// Its size in entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// How many descriptors are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes a buffer of `parts` available, one descriptor each.
    pub fn add(&mut self, parts: &[Part]) -> u16 {
        let indices: Vec<u16> = parts.iter().map(|_| self.free.pop().unwrap()).collect();
        for (position, part) in parts.iter().enumerate() {
            let next = indices.get(position + 1).copied();
            let flags = flags(part, next.is_some());
            self.write_descriptor(
                indices[position],
                part.address,
                part.length,
                flags,
                next.unwrap_or(0),
            );
        }
        let head = indices[0];
        self.chains.insert(head, indices);
        self.publish(head);
        head
    }

    /// The same with a table of its own at `table`.
    pub fn add_indirect(&mut self, table: u64, parts: &[Part]) -> u16 {
        for (position, part) in parts.iter().enumerate() {
            let last = position + 1 == parts.len();
            let entry = descriptor(
                part.address,
                part.length,
                flags(part, !last),
                if last { 0 } else { position as u16 + 1 },
            );
            self.memory
                .write_slice(&entry, GuestAddress(table + 16 * position as u64))
                .unwrap();
        }
        let head = self.free.pop().unwrap();
        self.write_descriptor(head, table, 16 * parts.len() as u32, DESC_INDIRECT, 0);
        self.chains.insert(head, vec![head]);
        self.publish(head);
        head
    }

    /// Writes any descriptor, sensible or not.
    pub fn write_descriptor(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let entry = descriptor(address, length, flags, next);
        self.memory
            .write_slice(&entry, GuestAddress(self.base + 16 * u64::from(index)))
            .unwrap();
    }

    /// Makes a chain available by its head, free or not.
    pub fn publish(&mut self, head: u16) {
        let slot = self.available_ring() + 4 + 2 * u64::from(self.available % self.size);
        self.memory
            .write_obj(head.to_le(), GuestAddress(slot))
            .unwrap();
        self.available = self.available.wrapping_add(1);
        self.write_index(self.available);
    }

    /// Writes any index to the available ring, sensible or not.
    pub fn write_index(&self, index: u16) {
        self.memory
            .store(
                index.to_le(),
                GuestAddress(self.available_ring() + 2),
                Ordering::SeqCst,
            )
            .unwrap();
    }

    /// Takes the next buffer that the device has used: its head and how many bytes were written.
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        let index = self.load(self.used_ring() + 2);
        if index == self.used {
            return None;
        }
        let slot = self.used_ring() + 4 + 8 * u64::from(self.used % self.size);
        let head: u32 = self.memory.read_obj(GuestAddress(slot)).unwrap();
        let length: u32 = self.memory.read_obj(GuestAddress(slot + 4)).unwrap();
        self.used = self.used.wrapping_add(1);
        let head = u16::try_from(head).unwrap();
        if let Some(indices) = self.chains.remove(&head) {
            self.free.extend(indices.into_iter().rev());
        }
        Some((head, length))
    }

    /// Asks for an interrupt at the next used buffer (`EVENT_IDX`).
    pub fn enable_interrupts(&self) {
        let address = self.available_ring() + 4 + 2 * u64::from(self.size);
        self.memory
            .store(self.used.to_le(), GuestAddress(address), Ordering::SeqCst)
            .unwrap();
    }

    /// Whether the device wants to be told of what was made available since the last call.
    pub fn needs_kick(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let old = std::mem::replace(&mut self.kicked_at, self.available);
        if self.event_idx {
            let event = self.load(self.used_ring() + 4 + 8 * u64::from(self.size));
            let passed = self.available.wrapping_sub(event).wrapping_sub(1);
            return passed < self.available.wrapping_sub(old);
        }
        old != self.available && self.load(self.used_ring()) & 1 == 0
    }

    fn load(&self, address: u64) -> u16 {
        let value: u16 = self
            .memory
            .load(GuestAddress(address), Ordering::SeqCst)
            .unwrap();
        u16::from_le(value)
    }
}

fn flags(part: &Part, has_next: bool) -> u16 {
    let next = if has_next { DESC_NEXT } else { 0 };
    let write = if part.writable { DESC_WRITE } else { 0 };
    next | write
}

fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut entry = [0; 16];
    entry[0..8].copy_from_slice(&address.to_le_bytes());
    entry[8..12].copy_from_slice(&length.to_le_bytes());
    entry[12..14].copy_from_slice(&flags.to_le_bytes());
    entry[14..16].copy_from_slice(&next.to_le_bytes());
    entry
}

/// Registers of a virtio-mmio device, by name.
#[derive(Debug)]
pub struct Driver<D>(pub D);

impl<D: MmioDevice> Driver<D> {
    /// Reads a register.
    pub fn read(&mut self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.0.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, value: u32) {
        self.0.write(offset, &value.to_le_bytes());
    }

    /// Device status.
    pub fn status(&mut self) -> u32 {
        self.read(0x70)
    }

    /// Adds a bit to the status, as Linux does it; what the device makes of it.
    pub fn add_status(&mut self, bit: u32) -> u32 {
        let status = self.status();
        self.write(0x70, status | bit);
        self.status()
    }

    /// Resets the device.
    pub fn reset(&mut self) {
        self.write(0x70, 0);
    }

    /// All features that the device offers.
    pub fn offered(&mut self) -> u64 {
        self.write(0x14, 0);
        let low = self.read(0x10);
        self.write(0x14, 1);
        u64::from(self.read(0x10)) << 32 | u64::from(low)
    }

    /// Chooses features.
    pub fn choose(&mut self, features: u64) {
        self.write(0x24, 0);
        self.write(0x20, features as u32);
        self.write(0x24, 1);
        self.write(0x20, (features >> 32) as u32);
    }

    /// From reset to FEATURES_OK; the status then.
    pub fn negotiate(&mut self, features: u64) -> u32 {
        self.reset();
        self.add_status(1);
        self.add_status(2);
        self.choose(features);
        self.add_status(8)
    }

    /// Tells the device where a queue lies, and that it is ready.
    pub fn set_up(&mut self, index: u32, queue: &DriverQueue) {
        self.write(0x30, index);
        self.write(0x38, u32::from(queue.size()));
        for (register, address) in [
            (0x80, queue.descriptors()),
            (0x90, queue.available_ring()),
            (0xa0, queue.used_ring()),
        ] {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(0x44, 1);
    }

    /// Acknowledges what is pending, as an interrupt handler does; what it was.
    pub fn take_interrupt(&mut self) -> u32 {
        let pending = self.read(0x60);
        self.write(0x64, pending);
        pending
    }
}
