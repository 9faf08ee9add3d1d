//! The driver's side of a virtio-mmio transport, version 2, by register.
#![allow(dead_code, reason = "each guest uses its own part")]

use crate::machine::{load, number, option, store};

/// Register offsets (virtio 1.2, section 4.2.2).
#[rustfmt::skip]
pub mod register {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_NUM_MAX: u64 = 0x34;
    pub const QUEUE_NUM: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC_LOW: u64 = 0x80;
    pub const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub const CONFIG: u64 = 0x100;
}

/// Device status bits.
#[rustfmt::skip]
pub mod status {
    pub const ACKNOWLEDGE: u32 = 1;
    pub const DRIVER: u32 = 2;
    pub const DRIVER_OK: u32 = 4;
    pub const FEATURES_OK: u32 = 8;
    pub const NEEDS_RESET: u32 = 64;
}

/// One transport.
pub struct Device {
    /// Guest physical address of its registers.
    pub base: u64,
}

impl Device {
    /// The first one of the command line (`virtio_mmio.device=4K@0xd0000000:5`), else at 3 GiB.
    pub fn find(command_line: &[u8]) -> Self {
        let named = option(command_line, b"virtio_mmio.device")
            .and_then(|text| text.split(|byte| *byte == b'@').nth(1))
            .map(number);
        Self {
            base: named.unwrap_or(0xc000_0000),
        }
    }

    pub fn read(&self, offset: u64) -> u32 {
        load(self.base + offset)
    }

    pub fn write(&self, offset: u64, value: u32) {
        store(self.base + offset, value);
    }

    /// Writes both words of the driver's features.
    pub fn accept(&self, features: u64) {
        for word in 0..2 {
            self.write(register::DRIVER_FEATURES_SELECT, word);
            self.write(register::DRIVER_FEATURES, (features >> (32 * word)) as u32);
        }
    }

    /// From reset to FEATURES_OK.
    pub fn begin(&self, features: u64) {
        self.write(register::STATUS, 0);
        self.write(register::STATUS, status::ACKNOWLEDGE);
        self.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER);
        self.accept(features);
        self.write(
            register::STATUS,
            status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK,
        );
    }

    /// Sets one queue up.
    pub fn queue(&self, index: u32, size: u32, descriptors: u64, available: u64, used: u64) {
        self.write(register::QUEUE_SELECT, index);
        self.write(register::QUEUE_NUM, size);
        for (offset, address) in [
            (register::QUEUE_DESC_LOW, descriptors),
            (register::QUEUE_DRIVER_LOW, available),
            (register::QUEUE_DEVICE_LOW, used),
        ] {
            self.write(offset, address as u32);
            self.write(offset + 4, (address >> 32) as u32);
        }
        self.write(register::QUEUE_READY, 1);
    }

    /// DRIVER_OK.
    pub fn finish(&self) {
        self.write(
            register::STATUS,
            status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK,
        );
    }

    /// The largest size of a queue, 0 where there is none.
    pub fn largest(&self, index: u32) -> u16 {
        self.write(register::QUEUE_SELECT, index);
        self.read(register::QUEUE_NUM_MAX) as u16
    }

    /// From reset to live, with three queues of up to 64 in scratch memory.
    pub fn start(&self, features: u64) {
        const SCRATCH: u64 = 0x0200_0000;
        self.begin(features);
        for index in 0..3 {
            let queue = SCRATCH + u64::from(index) * 0x4000;
            let size = u32::from(self.largest(index).min(64));
            self.queue(index, size, queue, queue + 0x1000, queue + 0x2000);
        }
        self.finish();
    }

    /// Rings a queue's doorbell.
    pub fn notify(&self, queue: u32) {
        self.write(register::QUEUE_NOTIFY, queue);
    }
}
