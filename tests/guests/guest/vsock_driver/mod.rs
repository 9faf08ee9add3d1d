//! A polling driver of a virtio-vsock device: three split rings and the 44-byte packet header.
//!
//! Memory is laid out by hand above the image: rings, RX buffers, TX slots. Nothing blocks: a packet that
//! finds no free slot is not sent and its owner asks again on the next round.

mod ring;

use crate::machine::{load, number, option};
use crate::mmio::{Device, register};
pub use ring::Ring;

/// Packet operations (virtio 1.2, section 5.10.6).
#[rustfmt::skip]
pub mod op {
    pub const REQUEST: u16 = 1;
    pub const RESPONSE: u16 = 2;
    pub const RST: u16 = 3;
    pub const SHUTDOWN: u16 = 4;
    pub const RW: u16 = 5;
    pub const CREDIT_UPDATE: u16 = 6;
    pub const CREDIT_REQUEST: u16 = 7;
}

/// The host's CID.
pub const HOST: u64 = 2;
/// Bytes of a packet header.
pub const HEADER: usize = 44;
/// Most data in one packet.
pub const PACKET_MAX: usize = 64 * 1024;

const RINGS: u64 = 0x0200_0000;
const RX_BUFFERS: u64 = 0x0210_0000;
const RX_STRIDE: u64 = 0x2_0000;
const TX_SLOTS: u64 = 0x0310_0000;
const TX_STRIDE: u64 = 0x2_0000;
/// Data of a slot starts here, so that pages of data are whole descriptors.
const TX_DATA: u64 = 0x1000;
/// A header and 16 pages.
const TX_DESCRIPTORS: u16 = 17;
const TX_COUNT: u16 = 15;
const QUEUE_SIZE: u16 = 256;
const PAGE: u64 = 4096;

const FEATURE_VERSION_1: u64 = 1 << 32;
const FEATURE_EVENT_IDX: u64 = 1 << 29;

/// What a prepared packet is full of.
const PREPARED: u8 = 0x5a;

/// A packet header, as on the wire.
#[repr(C, packed)]
#[derive(Clone, Copy)]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

/// How the driver lays packets out, by the command line.
struct Layout {
    /// `tx=one`: header and data in one descriptor, else a header and pages.
    tx_one: bool,
    /// `rx=split`: header and data in two descriptors, else one.
    rx_split: bool,
    /// `rxsize=N`: data bytes of an RX buffer.
    rx_size: u32,
}

/// The device, live.
pub struct Vsock {
    device: Device,
    rx: Ring,
    tx: Ring,
    layout: Layout,
    free: u16,
    /// TX slots that hold [`PREPARED`] bytes, a bit each.
    prepared: u16,
    /// Whether RX buffers were given back since the last doorbell.
    returned: bool,
    /// Whether packets were sent since.
    sent: bool,
    /// Our own CID.
    pub cid: u64,
}

impl Vsock {
    /// Sets the device up and posts `rxbufs=N` buffers (32).
    pub fn start(device: Device, command_line: &[u8]) -> Self {
        let event_idx = option(command_line, b"event_idx") == Some(b"1");
        let features = FEATURE_VERSION_1 | if event_idx { FEATURE_EVENT_IDX } else { 0 };
        device.begin(features);
        let rings = [0, 1, 2].map(|index| {
            let size = device.largest(index).min(QUEUE_SIZE);
            let ring = Ring::new(RINGS + u64::from(index) * 0x1_0000, size, event_idx);
            let (descriptors, available, used) = ring.addresses();
            device.queue(index, u32::from(size), descriptors, available, used);
            ring
        });
        device.finish();
        let cid = u64::from(load::<u32>(device.base + register::CONFIG));
        let [rx, tx, _event] = rings;
        let size = option(command_line, b"rxsize").map_or(4096, number) as u32;
        let layout = Layout {
            tx_one: option(command_line, b"tx") == Some(b"one"),
            rx_split: option(command_line, b"rx") == Some(b"split"),
            rx_size: size.min(PACKET_MAX as u32),
        };
        let mut vsock = Self {
            device,
            rx,
            tx,
            layout,
            free: (1 << TX_COUNT) - 1,
            prepared: 0,
            returned: false,
            sent: false,
            cid,
        };
        let buffers = option(command_line, b"rxbufs").map_or(32, number).min(64);
        for index in 0..buffers as u16 {
            vsock.give_back(index);
        }
        vsock.flush();
        vsock
    }

    /// The next packet: the buffer's index, its header and its data. The buffer must be given back.
    pub fn receive(&mut self) -> Option<(u16, Header, &'static [u8])> {
        let (id, length) = self.rx.take_used()?;
        let index = id / 2;
        let address = RX_BUFFERS + u64::from(index) * RX_STRIDE;
        let header: Header = load(address);
        let data = (length as usize)
            .saturating_sub(HEADER)
            .min(header.len as usize);
        // SAFETY: the buffer is ours until it is given back; nothing else writes to it.
        let bytes =
            unsafe { core::slice::from_raw_parts((address + HEADER as u64) as *const u8, data) };
        Some((index, header, bytes))
    }

    /// Posts RX buffer `index` (again).
    pub fn give_back(&mut self, index: u16) {
        let address = RX_BUFFERS + u64::from(index) * RX_STRIDE;
        let head = index * 2;
        let (header, data) = (HEADER as u32, self.layout.rx_size);
        if self.layout.rx_split {
            self.rx
                .describe(head, address, header, true, Some(head + 1));
            self.rx
                .describe(head + 1, address + u64::from(header), data, true, None);
        } else {
            self.rx.describe(head, address, header + data, true, None);
        }
        self.rx.offer(head);
        self.returned = true;
    }

    /// Rings the doorbells of what was given back and sent since: once for all of it, as Linux does.
    pub fn flush(&mut self) {
        if core::mem::take(&mut self.returned) && self.rx.must_kick() {
            self.device.notify(0);
        }
        if core::mem::take(&mut self.sent) && self.tx.must_kick() {
            self.device.notify(1);
        }
    }

    /// Whether a packet could be sent now.
    pub fn can_send(&mut self) -> bool {
        while let Some((id, _)) = self.tx.take_used() {
            self.free |= 1 << (id / TX_DESCRIPTORS);
        }
        self.free != 0
    }

    /// Offers a packet whose `header.len` bytes of data are written by `fill`. Call only if [`Self::can_send`].
    pub fn send(&mut self, header: Header, fill: impl FnOnce(&mut [u8])) {
        let slot = self.free.trailing_zeros() as u16;
        if header.len > 0 {
            self.prepared &= !(1 << slot);
            fill(self.data(slot, header.len as usize));
        }
        self.offer(slot, header);
    }

    /// The same with data that a slot has from its last use, so that sending costs no more than describing it.
    pub fn send_prepared(&mut self, header: Header) {
        let slot = self.free.trailing_zeros() as u16;
        if self.prepared & 1 << slot == 0 {
            self.prepared |= 1 << slot;
            self.data(slot, PACKET_MAX).fill(PREPARED);
        }
        self.offer(slot, header);
    }

    /// The first bytes of a slot's data.
    fn data(&mut self, slot: u16, length: usize) -> &mut [u8] {
        let at = TX_SLOTS + u64::from(slot) * TX_STRIDE + TX_DATA;
        // SAFETY: the slot is ours until it is offered, and `length` is at most a packet.
        unsafe { core::slice::from_raw_parts_mut(at as *mut u8, length) }
    }

    /// Hands a slot with its data to the device.
    fn offer(&mut self, slot: u16, header: Header) {
        self.free &= !(1 << slot);
        let base = TX_SLOTS + u64::from(slot) * TX_STRIDE;
        let head = slot * TX_DESCRIPTORS;
        let length = header.len;
        let data = base + TX_DATA;
        let at = if self.layout.tx_one {
            data - HEADER as u64
        } else {
            base
        };
        crate::machine::store(at, header);
        if self.layout.tx_one {
            self.tx
                .describe(head, at, HEADER as u32 + length, false, None);
        } else {
            let pages = u64::from(length).div_ceil(PAGE);
            self.tx.describe(
                head,
                at,
                HEADER as u32,
                false,
                (pages > 0).then_some(head + 1),
            );
            for page in 0..pages {
                let index = head + 1 + page as u16;
                let rest = (u64::from(length) - page * PAGE).min(PAGE) as u32;
                let next = (page + 1 < pages).then_some(index + 1);
                self.tx
                    .describe(index, data + page * PAGE, rest, false, next);
            }
        }
        self.tx.offer(head);
        self.sent = true;
    }
}
