//! Port and memory-mapped I/O of the guest: who owns which address.
//!
//! A port access wider than a byte reaches consecutive ports byte by byte, as on an ISA bus. What nobody
//! owns reads as all ones and takes writes without effect; it is counted, and the first few are logged.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vmm_devices::pvpanic::{self, PanicEvent};
use vmm_devices::serial::SerialPort;
use vmm_devices::virtio::MmioDevice;
use vmm_sys_util::eventfd::EventFd;

use crate::acpi::{self, RESET_VALUE};
use crate::exits::{ExitReason, lock};
use crate::layout::{
    KEYBOARD_COMMAND, PANIC, RESET, SERIAL, SLEEP_CONTROL, SLEEP_STATUS, VIRTIO_MMIO,
    VIRTIO_MMIO_SIZE,
};

/// Keyboard controller command that pulses the CPU's reset line.
const KEYBOARD_RESET: u8 = 0xfe;
const SERIAL_LAST: u16 = SERIAL + 7;
/// Unclaimed accesses that are logged; the rest is only counted.
const LOGGED: u64 = 16;

/// A device shared by the vCPUs and the device loop.
pub type SharedDevice = Arc<Mutex<dyn MmioDevice + Send>>;
/// Where the serial port's bytes go. It must not block for longer than a stop of the machine may take.
pub type Console = Box<dyn Write + Send>;

/// All that a guest can reach outside its memory.
pub struct Bus {
    serial: Mutex<SerialPort<Console>>,
    devices: OnceLock<Vec<SharedDevice>>,
    unclaimed: AtomicU64,
}

impl Bus {
    /// A bus with a serial port that raises `interrupt`, and no other device yet.
    #[must_use]
    pub fn new(console: Console, interrupt: EventFd) -> Self {
        Self {
            serial: Mutex::new(SerialPort::new(interrupt, console)),
            devices: OnceLock::new(),
            unclaimed: AtomicU64::new(0),
        }
    }

    /// Puts the virtio-mmio devices at their addresses, in order. Once, before the first vCPU runs; later calls
    /// change nothing.
    pub fn attach(&self, devices: Vec<SharedDevice>) {
        let _ = self.devices.set(devices);
    }

    /// Accesses so far that nobody owned.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed.load(Ordering::Relaxed)
    }

    /// `OUT` of one or more (`REP`) values of `width` bytes; a reason if it ends the machine.
    pub fn port_out(&self, port: u16, width: usize, data: &[u8]) -> Option<ExitReason> {
        if width == 1 && (SERIAL..=SERIAL_LAST).contains(&port) {
            let mut serial = lock(&self.serial);
            for &byte in data {
                serial.write(port - SERIAL, &[byte]);
            }
            return None;
        }
        for value in data.chunks(width.max(1)) {
            let mut claimed = false;
            for (index, &byte) in value.iter().enumerate() {
                match self.byte_out(port.wrapping_add(index as u16), byte) {
                    Claim::No => {}
                    Claim::Yes => claimed = true,
                    Claim::End(reason) => return Some(reason),
                }
            }
            if !claimed {
                self.note("port write", u64::from(port), value.len());
            }
        }
        None
    }

    /// `IN` of one or more values of `width` bytes.
    pub fn port_in(&self, port: u16, width: usize, data: &mut [u8]) {
        for value in data.chunks_mut(width.max(1)) {
            let mut claimed = false;
            for (index, byte) in value.iter_mut().enumerate() {
                let read = self.byte_in(port.wrapping_add(index as u16));
                claimed |= read.is_some();
                *byte = read.unwrap_or(0xff);
            }
            if !claimed {
                self.note("port read", u64::from(port), value.len());
            }
        }
    }

    /// A read of guest physical memory that no RAM backs.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.device(address, data.len()) {
            Some((device, offset)) => lock(device).read(offset, data),
            None => {
                data.fill(0xff);
                self.note("read", address, data.len());
            }
        }
    }

    /// A write to guest physical memory that no RAM backs.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        match self.device(address, data.len()) {
            Some((device, offset)) => lock(device).write(offset, data),
            None => self.note("write", address, data.len()),
        }
    }

    /// The device whose window holds all of the access.
    fn device(&self, address: u64, length: usize) -> Option<(&SharedDevice, u64)> {
        let offset = address.checked_sub(VIRTIO_MMIO)?;
        let device = self
            .devices
            .get()?
            .get(usize::try_from(offset / VIRTIO_MMIO_SIZE).ok()?)?;
        let offset = offset % VIRTIO_MMIO_SIZE;
        (offset + length as u64 <= VIRTIO_MMIO_SIZE).then_some((device, offset))
    }

    fn byte_out(&self, port: u16, byte: u8) -> Claim {
        match port {
            SERIAL..=SERIAL_LAST => {
                lock(&self.serial).write(port - SERIAL, &[byte]);
                Claim::Yes
            }
            SLEEP_CONTROL if acpi::turns_off(byte) => Claim::End(ExitReason::Shutdown),
            RESET if byte == RESET_VALUE => Claim::End(ExitReason::Reset),
            KEYBOARD_COMMAND if byte == KEYBOARD_RESET => Claim::End(ExitReason::Reset),
            PANIC if pvpanic::write(&[byte]) == Some(PanicEvent::Panicked) => {
                Claim::End(ExitReason::Panic(None))
            }
            SLEEP_CONTROL | SLEEP_STATUS | RESET | KEYBOARD_COMMAND | PANIC => Claim::Yes,
            _ => Claim::No,
        }
    }

    fn byte_in(&self, port: u16) -> Option<u8> {
        let mut byte = [0];
        match port {
            SERIAL..=SERIAL_LAST => lock(&self.serial).read(port - SERIAL, &mut byte),
            PANIC => pvpanic::read(&mut byte),
            // 0x64: input buffer empty, so that a reset through it is not waited for.
            SLEEP_CONTROL | SLEEP_STATUS | RESET | KEYBOARD_COMMAND => {}
            _ => return None,
        }
        Some(byte[0])
    }

    fn note(&self, what: &str, address: u64, length: usize) {
        let before = self.unclaimed.fetch_add(1, Ordering::Relaxed);
        if before < LOGGED {
            tracing::debug!("guest {what} of {length} bytes at {address:#x}, which nothing owns");
        }
    }
}

enum Claim {
    No,
    Yes,
    End(ExitReason),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[derive(Default)]
    struct Device(Vec<(u64, Vec<u8>)>);

    impl MmioDevice for Device {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }

        fn write(&mut self, offset: u64, data: &[u8]) {
            self.0.push((offset, data.to_vec()));
        }
    }

    fn bus() -> (Bus, Shared, Arc<Mutex<Device>>) {
        let console = Shared::default();
        let device = Arc::new(Mutex::new(Device::default()));
        let devices: Vec<SharedDevice> = vec![device.clone()];
        let bus = Bus::new(Box::new(console.clone()), EventFd::new(0).unwrap());
        bus.attach(devices);
        (bus, console, device)
    }

    #[test]
    fn ho07_unclaimed_addresses_of_every_width_read_all_ones_and_ignore_writes() {
        let (bus, console, device) = bus();
        let mut expected = 0;
        for width in [1usize, 2, 4] {
            for port in (0..=u16::MAX).filter(|port| !owned(*port, width)) {
                let mut data = [0; 4];
                bus.port_in(port, width, &mut data[..width]);
                assert_eq!(data[..width], [0xff; 4][..width], "{port:#x}");
                assert_eq!(bus.port_out(port, width, &[0xff; 4][..width]), None);
                expected += 2;
            }
        }
        for width in [1usize, 2, 3, 4, 8] {
            let last = VIRTIO_MMIO + VIRTIO_MMIO_SIZE;
            for address in [
                0,
                last,
                last - 1 + u64::from(width == 1),
                0xfec0_0100,
                u64::MAX - 8,
                u64::MAX,
            ] {
                let mut data = [0; 8];
                bus.mmio_read(address, &mut data[..width]);
                assert_eq!(data[..width], [0xff; 8][..width], "{address:#x}");
                bus.mmio_write(address, &[1; 8][..width]);
                expected += 2;
            }
        }
        assert_eq!(bus.unclaimed(), expected);
        assert!(lock(&console.0).is_empty());
        assert!(lock(&device).0.is_empty());
    }

    fn owned(port: u16, width: usize) -> bool {
        (0..width as u16).any(|index| {
            let port = port.wrapping_add(index);
            (SERIAL..=SERIAL_LAST).contains(&port)
                || [KEYBOARD_COMMAND, PANIC, SLEEP_CONTROL, SLEEP_STATUS, RESET].contains(&port)
        })
    }

    #[test]
    fn serial_takes_single_bytes_strings_and_the_low_byte_of_wider_writes() {
        let (bus, console, _) = bus();
        assert_eq!(bus.port_out(SERIAL, 1, b"a"), None);
        assert_eq!(bus.port_out(SERIAL, 1, b"bcd"), None);
        assert_eq!(bus.port_out(SERIAL, 2, &[b'e', 0]), None);
        assert_eq!(*lock(&console.0), b"abcde");
        let mut status = [0];
        bus.port_in(SERIAL + 5, 1, &mut status);
        assert_eq!(status[0] & 0x60, 0x60, "transmitter is always empty");
    }

    #[test]
    fn ways_to_end_are_told_apart() {
        let (bus, ..) = bus();
        let out = |port, value| bus.port_out(port, 1, &[value]);
        assert_eq!(
            out(SLEEP_CONTROL, (5 << 2) | 0x20),
            Some(ExitReason::Shutdown)
        );
        assert_eq!(out(RESET, 1), Some(ExitReason::Reset));
        assert_eq!(out(KEYBOARD_COMMAND, 0xfe), Some(ExitReason::Reset));
        assert_eq!(out(PANIC, 1), Some(ExitReason::Panic(None)));
        // A 16-bit write whose high byte lands on the reset register is one, too.
        assert_eq!(bus.port_out(RESET - 1, 2, &[0, 1]), Some(ExitReason::Reset));
    }

    #[test]
    fn values_that_mean_nothing_end_nothing() {
        let (bus, ..) = bus();
        for (port, value) in [
            (SLEEP_CONTROL, 0x20),
            (RESET, 0),
            (KEYBOARD_COMMAND, 0xd1),
            (PANIC, 2),
            (SLEEP_STATUS, 0x80),
        ] {
            assert_eq!(bus.port_out(port, 1, &[value]), None, "{port:#x}");
        }
        assert_eq!(bus.unclaimed(), 0);
        let mut byte = [0xff];
        bus.port_in(KEYBOARD_COMMAND, 1, &mut byte);
        assert_eq!(
            byte[0] & 2,
            0,
            "a kernel may write its reset command at once"
        );
    }

    #[test]
    fn device_sees_offsets_within_its_window() {
        let (bus, _, device) = bus();
        bus.mmio_write(VIRTIO_MMIO + 0x70, &[1, 2, 3, 4]);
        assert_eq!(lock(&device).0, [(0x70, vec![1, 2, 3, 4])]);
        let mut data = [0; 4];
        bus.mmio_read(VIRTIO_MMIO + 0xffc, &mut data);
        assert_eq!(data, [0xfc; 4]);
    }

    /// Counts events, whatever they say.
    struct Counting(Arc<AtomicU64>);

    impl tracing::Subscriber for Counting {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn ho07_log_is_bounded_at_volume() {
        let (bus, ..) = bus();
        let logged = Arc::new(AtomicU64::new(0));
        tracing::subscriber::with_default(Counting(logged.clone()), || {
            for _ in 0..100_000 {
                bus.mmio_write(0xd000_0000, &[0; 4]);
            }
        });
        assert_eq!(bus.unclaimed(), 100_000);
        assert_eq!(logged.load(Ordering::Relaxed), LOGGED);
    }
}
