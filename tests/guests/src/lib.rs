//! Fast guests: machines of our own in a few KiB, which any KVM runs at real speed.
//!
//! A KVM without hardware support emulates supervisor code at about a million instructions a second and
//! cannot boot a stock kernel; user-mode code runs natively. These guests spend a dozen instructions in
//! supervisor mode, leave it for good and poll. They boot in any monitor that loads an ELF by the Linux
//! 64-bit protocol.
//!
//! ```text
//!   monitor ── 64-bit entry, boot_params in RSI ──> own page tables ── SYSEXIT, IOPL 3 ──> guest()
//! ```
//!
//! ```
//! assert_eq!(&vmm_guests::SERIAL[..4], b"\x7fELF");
//! assert!(vmm_guests::SERIAL.len() < 64 * 1024);
//! ```
//!
//! Limits: one processor is used, memory of the first GiB only, no interrupt, no floating point.
//! Nothing here returns an error: a guest that does not build fails this crate's build.

macro_rules! guest {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".elf"))
    };
}

/// Writes `!` to the first serial port and powers off.
pub const SERIAL: &[u8] = guest!("serial");

/// Ends as `end=` on its command line says: `poweroff`, `reset`, `triple`, `panic`, `spin`; `say=` is printed before.
pub const ENDS: &[u8] = guest!("ends");

/// Accesses every unclaimed address in every width, then says how many answers were not all-ones.
pub const NOISE: &[u8] = guest!("noise");

/// Abuses the virtio-mmio transport of the first device and says what it got, a line a check.
pub const TRANSPORT: &[u8] = guest!("transport");

/// A polling virtio-vsock driver with services for every behaviour of a peer: see [`ports`]. It takes 128 MiB and has
/// room for 1,024 connections.
pub const VSOCK: &[u8] = guest!("vsock");

/// Every guest by the name of its file.
pub const ALL: &[(&str, &[u8])] = &[
    ("serial", SERIAL),
    ("ends", ENDS),
    ("noise", NOISE),
    ("transport", TRANSPORT),
    ("vsock", VSOCK),
];

/// The ports that [`VSOCK`] listens on.
pub mod ports {
    /// Sends back what it gets; ends when the host has ended and all is sent.
    pub const ECHO: u32 = 7;
    /// Takes all until the host half-closes, then answers count and hash (two u64 LE) and ends.
    pub const SINK: u32 = 9;
    /// Takes a count (u64 LE), sends that many bytes of the pattern, then half-closes.
    pub const SOURCE: u32 = 19;
    /// Sends `hello`, half-closes, takes all until the host ends and says `half: COUNT HASH` on the console.
    pub const HALF: u32 = 21;
    /// Never answers a connection request.
    pub const SILENT: u32 = 23;
    /// Takes a port (u32 LE), connects to it on the host and joins both as one echo; a reset there is `refused`.
    pub const DIAL: u32 = 25;
    /// Powers off on the first byte.
    pub const POWER: u32 = 27;
    /// Resets the connection on the first byte.
    pub const RESET: u32 = 29;
    /// From its first byte on posts no RX buffer for `hold=` cycles, then is a sink.
    pub const STARVE: u32 = 33;
    /// Takes all without a look at it until the host half-closes, then answers its count (u64 LE) and ends.
    pub const DRAIN: u32 = 37;
    /// Takes a count (u64 LE), sends that many bytes that are all the same, then half-closes.
    pub const FLOOD: u32 = 39;
    /// As [`HALF`] but says nothing to the host.
    pub const COUNT: u32 = 35;
    /// Sends a packet from a wrong CID and resets for a stream that does not exist, then echoes.
    pub const FORGE: u32 = 31;
}

/// The hash that [`ports::SINK`] answers with: FNV-1a over the stream.
///
/// ```
/// assert_eq!(vmm_guests::hash(vmm_guests::HASH_START, b""), 0xcbf2_9ce4_8422_2325);
/// ```
pub fn hash(start: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(start, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Where [`hash`] starts.
pub const HASH_START: u64 = 0xcbf2_9ce4_8422_2325;

/// Bytes `start` to `start + length` of the pattern that [`ports::SOURCE`] sends.
///
/// ```
/// assert_eq!(vmm_guests::pattern(3, 9), vmm_guests::pattern(0, 12)[3..]);
/// ```
pub fn pattern(start: u64, length: usize) -> Vec<u8> {
    (start..start + length as u64)
        .map(|offset| {
            let word = (offset / 8)
                .wrapping_add(1)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (word >> (offset % 8 * 8)) as u8
        })
        .collect()
}
