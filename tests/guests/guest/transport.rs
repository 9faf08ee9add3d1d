//! Abuses the virtio-mmio transport of one device and says what came of each abuse.
//!
//! One line a check, `ok NAME` or `bad NAME: what was read`, then `transport: N ok, M bad`.
//! The device is the first of the command line's `virtio_mmio.device=`, else the one at 3 GiB.
#![no_std]
#![no_main]

mod machine;
mod mmio;

use machine::{load, store};
use mmio::{Device, register, status};

#[unsafe(no_mangle)]
fn guest(command_line: &'static [u8]) {
    let device = Device::find(command_line);
    let mut tally = Tally { good: 0, bad: 0 };
    identity(&device, &mut tally);
    order(&device, &mut tally);
    queues(&device, &mut tally);
    wild(&device, &mut tally);
    reset(&device, &mut tally);
    say!("transport: {} ok, {} bad", tally.good, tally.bad);
}

struct Tally {
    good: u32,
    bad: u32,
}

impl Tally {
    fn check(&mut self, name: &str, got: u32, want: u32) {
        if got == want {
            self.good += 1;
            say!("ok {name}");
        } else {
            self.bad += 1;
            say!("bad {name}: {got:#x}, not {want:#x}");
        }
    }
}

fn identity(device: &Device, tally: &mut Tally) {
    tally.check("magic", device.read(register::MAGIC), 0x7472_6976);
    tally.check("version", device.read(register::VERSION), 2);
    tally.check("device id is vsock", device.read(register::DEVICE_ID), 19);
    device.write(register::STATUS, 0);
    tally.check("reset status is zero", device.read(register::STATUS), 0);
    device.write(register::DEVICE_FEATURES_SELECT, 1);
    tally.check(
        "version 1 offered",
        device.read(register::DEVICE_FEATURES) & 1,
        1,
    );
    device.write(register::DEVICE_FEATURES_SELECT, 7);
    tally.check(
        "no feature of word 7",
        device.read(register::DEVICE_FEATURES),
        0,
    );
    device.write(register::QUEUE_SELECT, 3);
    tally.check(
        "queue 3 does not exist",
        device.read(register::QUEUE_NUM_MAX),
        0,
    );
    device.write(register::QUEUE_SELECT, u32::MAX);
    tally.check(
        "queue 2^32-1 does not exist",
        device.read(register::QUEUE_NUM_MAX),
        0,
    );
}

fn order(device: &Device, tally: &mut Tally) {
    device.write(register::STATUS, 0);
    device.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER);
    device.accept(1 << 32);
    device.write(
        register::STATUS,
        status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK,
    );
    let features_ok = device.read(register::STATUS) & status::FEATURES_OK;
    tally.check("version 1 accepted", features_ok, status::FEATURES_OK);
    // A feature that was never offered.
    device.write(register::STATUS, 0);
    device.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER);
    device.accept(1 << 32 | 1 << 63);
    device.write(
        register::STATUS,
        status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK,
    );
    tally.check(
        "unoffered feature refused",
        device.read(register::STATUS) & status::FEATURES_OK,
        0,
    );
    // Legacy: version 1 not accepted.
    device.write(register::STATUS, 0);
    device.write(register::STATUS, status::ACKNOWLEDGE | status::DRIVER);
    device.accept(0);
    device.write(
        register::STATUS,
        status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK,
    );
    tally.check(
        "legacy driver refused",
        device.read(register::STATUS) & status::FEATURES_OK,
        0,
    );
    // Straight to the end.
    device.write(register::STATUS, 0);
    device.write(register::STATUS, status::DRIVER_OK);
    tally.check(
        "driver_ok out of order refused",
        device.read(register::STATUS) & status::DRIVER_OK,
        0,
    );
}

fn queues(device: &Device, tally: &mut Tally) {
    device.start(1 << 32);
    device.write(register::QUEUE_SELECT, 0);
    tally.check("queue 0 is ready", device.read(register::QUEUE_READY), 1);
    tally.check(
        "live",
        device.read(register::STATUS) & status::DRIVER_OK,
        status::DRIVER_OK,
    );
    // Everything about a live queue, aimed at memory that does not exist.
    device.write(register::QUEUE_NUM, 3);
    for half in [
        register::QUEUE_DESC_LOW,
        register::QUEUE_DRIVER_LOW,
        register::QUEUE_DEVICE_LOW,
    ] {
        device.write(half, 0xdead_b000);
        device.write(half + 4, 0x7fff);
    }
    device.write(register::QUEUE_READY, 0);
    tally.check(
        "live queue stays ready",
        device.read(register::QUEUE_READY),
        1,
    );
    device.write(register::QUEUE_NOTIFY, 0);
    device.write(register::QUEUE_NOTIFY, 0xffff);
    tally.check(
        "a live device is still live after queue writes",
        device.read(register::STATUS) & (status::DRIVER_OK | status::NEEDS_RESET),
        status::DRIVER_OK,
    );
}

/// Registers in other widths, at other offsets, beyond the end.
fn wild(device: &Device, tally: &mut Tally) {
    let before = device.read(register::STATUS);
    for offset in 0..0x100 {
        let _: u8 = load(device.base + offset);
        if offset % 2 == 0 {
            let _: u16 = load(device.base + offset);
        }
        if offset % 8 == 0 {
            let _: u64 = load(device.base + offset);
        }
    }
    for offset in (0..0x100u64).step_by(2) {
        store(device.base + offset + 1, 0xffu8);
        store(device.base + offset, 0xffffu16);
    }
    for offset in (0x100..0x1000u64).step_by(64) {
        store(device.base + offset, u32::MAX);
        let _: u64 = load(device.base + offset);
    }
    for offset in [
        register::MAGIC,
        register::VERSION,
        register::DEVICE_ID,
        register::INTERRUPT_STATUS,
    ] {
        device.write(offset, u32::MAX);
    }
    device.write(register::INTERRUPT_ACK, u32::MAX);
    tally.check(
        "narrow and unknown writes change nothing",
        device.read(register::STATUS),
        before,
    );
    tally.check(
        "magic is read only",
        device.read(register::MAGIC),
        0x7472_6976,
    );
}

fn reset(device: &Device, tally: &mut Tally) {
    device.write(register::STATUS, 0);
    tally.check("status after reset", device.read(register::STATUS), 0);
    device.write(register::QUEUE_SELECT, 0);
    tally.check("queue 0 after reset", device.read(register::QUEUE_READY), 0);
    device.write(register::QUEUE_NOTIFY, 1);
    tally.check(
        "interrupt status after reset",
        device.read(register::INTERRUPT_STATUS),
        0,
    );
    for _ in 0..100 {
        device.start(1 << 32);
        device.write(register::QUEUE_NOTIFY, 0);
        device.write(register::QUEUE_NOTIFY, 1);
        device.write(register::STATUS, 0);
    }
    device.start(1 << 32);
    tally.check(
        "live after 100 resets",
        device.read(register::STATUS) & status::DRIVER_OK,
        status::DRIVER_OK,
    );
    // A queue outside memory: never a crash of the monitor.
    device.write(register::STATUS, 0);
    device.begin(1 << 32);
    for queue in 0..3 {
        device.queue(
            queue,
            64,
            0x7fff_ffff_f000,
            0x7fff_ffff_e000,
            0x7fff_ffff_d000,
        );
    }
    device.finish();
    device.write(register::QUEUE_NOTIFY, 1);
    device.write(register::QUEUE_NOTIFY, 0);
    device.write(register::STATUS, 0);
    tally.check(
        "reset after queues outside memory",
        device.read(register::STATUS),
        0,
    );
}
