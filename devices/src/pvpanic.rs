//! The panic device: one port, by which a guest says that its kernel has panicked (QEMU's `pvpanic`
//! interface, `docs/specs/pvpanic` there; driver `pvpanic` in Linux, ACPI id `QEMU0001`).

/// The port, as the ACPI node declares it.
pub const PORT: u16 = 0x505;

/// Events that the device understands; what the guest reads at the port.
const CAPABILITIES: u8 = PANICKED | CRASH_LOADED;
/// The kernel has panicked and will do no more.
const PANICKED: u8 = 1;
/// It has panicked and a crash kernel takes over.
const CRASH_LOADED: u8 = 2;

/// What the guest has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanicEvent {
    /// The kernel has panicked; nothing more will come of it.
    Panicked,
    /// The kernel has panicked and its crash kernel runs now: not the end yet.
    CrashLoaded,
}

/// The port's read.
///
/// ```
/// use vmm_devices::pvpanic;
/// let mut data = [0];
/// pvpanic::read(&mut data);
/// assert_eq!(data, [3]);
/// ```
pub fn read(data: &mut [u8]) {
    data.fill(0xff);
    if let [byte] = data {
        *byte = CAPABILITIES;
    }
}

/// The port's write; `None` for what the device does not know.
///
/// ```
/// use vmm_devices::pvpanic::{self, PanicEvent};
/// assert_eq!(pvpanic::write(&[1]), Some(PanicEvent::Panicked));
/// assert_eq!(pvpanic::write(&[0x80]), None);
/// assert_eq!(pvpanic::write(&[1, 0]), None);
/// ```
#[must_use]
pub fn write(data: &[u8]) -> Option<PanicEvent> {
    match data {
        [byte] if byte & PANICKED != 0 => Some(PanicEvent::Panicked),
        [byte] if byte & CRASH_LOADED != 0 => Some(PanicEvent::CrashLoaded),
        _ => None,
    }
}
