//! The 16550 serial port: vm-superio's registers in front of a sink.

use std::io::{self, Write};

use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;

/// Registers of a 16550 port.
pub const REGISTERS: u16 = 8;

/// A serial port whose output goes to `W`: a [`crate::console::ConsoleLog`], a terminal, or both by
/// [`Tee`].
///
/// ```
/// use vmm_devices::console::ConsoleLog;
/// use vmm_devices::serial::SerialPort;
/// use vmm_sys_util::eventfd::EventFd;
///
/// let log = ConsoleLog::default();
/// let mut port = SerialPort::new(EventFd::new(0)?, log.clone());
/// for byte in b"hello\n" {
///     port.write(0, &[*byte]);
/// }
/// assert_eq!(log.last_lines(1), "hello");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct SerialPort<W: Write> {
    serial: Serial<Line, vm_superio::serial::NoEvents, Quiet<W>>,
}

impl<W: Write> SerialPort<W> {
    /// A port whose interrupt line is `line` (an irqfd, edge triggered).
    pub fn new(line: EventFd, sink: W) -> Self {
        Self {
            serial: Serial::new(Line(line), Quiet(sink)),
        }
    }

    /// A port read at `offset` from its base. Wider accesses than a byte read as all-ones.
    pub fn read(&mut self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let ([byte], Some(offset)) = (data, register(offset)) {
            *byte = self.serial.read(offset);
        }
    }

    /// A port write at `offset` from its base. Wider accesses than a byte are ignored.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        if let (&[byte], Some(offset)) = (data, register(offset)) {
            // Only the sink and the line can fail; the one is quiet and the other a counter that is
            // full.
            let _ = self.serial.write(offset, byte);
        }
    }

    /// Feeds input to the guest; how many bytes its FIFO took (none in loopback mode).
    pub fn feed(&mut self, input: &[u8]) -> usize {
        self.serial.enqueue_raw_bytes(input).unwrap_or(0)
    }
}

impl<W: Write + std::fmt::Debug> std::fmt::Debug for SerialPort<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SerialPort")
            .field("sink", self.serial.writer())
            .finish_non_exhaustive()
    }
}

fn register(offset: u16) -> Option<u8> {
    (offset < REGISTERS).then_some(offset as u8)
}

/// Writes to two sinks, so that a console can be logged and shown.
#[derive(Clone, Debug)]
pub struct Tee<A, B>(pub A, pub B);

impl<A: Write, B: Write> Write for Tee<A, B> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // Either may fail without the other losing anything.
        let first = self.0.write_all(data);
        self.1.write_all(data)?;
        first.map(|()| data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let first = self.0.flush();
        self.1.flush()?;
        first
    }
}

struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// A sink whose failure is not the guest's business: a closed terminal must not stop its console.
#[derive(Debug)]
struct Quiet<W>(W);

impl<W: Write> Write for Quiet<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let _ = self.0.write_all(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::ConsoleLog;

    #[test]
    fn ho07_every_offset_and_width_is_survived() {
        let mut port = SerialPort::new(EventFd::new(0).unwrap(), ConsoleLog::new(16));
        for offset in 0..=u16::MAX {
            for width in [1, 2, 4, 8] {
                let mut data = [0u8; 8];
                port.write(offset, &data[..width]);
                port.read(offset, &mut data[..width]);
                if offset >= REGISTERS || width > 1 {
                    assert!(data[..width].iter().all(|byte| *byte == 0xff));
                }
            }
        }
    }

    #[test]
    fn failing_sink_does_not_disturb_the_guest_or_the_log() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let log = ConsoleLog::new(16);
        let mut port = SerialPort::new(EventFd::new(0).unwrap(), Tee(Broken, log.clone()));
        port.write(0, b"x");
        port.write(0, b"y");
        assert_eq!(log.bytes(), b"xy");
    }

    #[test]
    fn input_is_read_back_and_raises_the_line() {
        let line = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap();
        let mut port = SerialPort::new(line.try_clone().unwrap(), io::sink());
        port.write(1, &[1]); // received-data interrupt on
        assert_eq!(port.feed(b"a"), 1);
        assert!(line.read().is_ok());
        let mut data = [0];
        port.read(0, &mut data);
        assert_eq!(&data, b"a");
    }
}
