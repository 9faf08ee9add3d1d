//! The 44-byte header of a vsock packet (virtio 1.2, section 5.10.6).
//!
//! It is copied out of guest memory exactly once, as bytes, and decoded from the copy: what was
//! checked is what is used (HO02).

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 44;

/// The largest payload that a packet may carry, in bytes (Linux: `VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
pub const MAX_PAYLOAD: u32 = 64 * 1024;

/// The host's address (virtio 1.2, section 5.10.4).
pub const HOST_CID: u64 = 2;

/// Socket type: stream, the only one offered.
pub const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_RCV`: the sender of the packet will not receive any more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// `VIRTIO_VSOCK_SHUTDOWN_SEND`: the sender of the packet will not send any more.
pub const SHUTDOWN_SEND: u32 = 2;

/// What a packet does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Asks for a connection.
    Request,
    /// Accepts one.
    Response,
    /// Ends or refuses one.
    Reset,
    /// Ends one or both directions, for good.
    Shutdown,
    /// Carries data.
    ReadWrite,
    /// Tells how much more may be sent.
    CreditUpdate,
    /// Asks for a credit update.
    CreditRequest,
}

impl Op {
    /// The operation with this number; `None` for 0 (invalid) and unknown ones.
    #[must_use]
    pub fn from_wire(number: u16) -> Option<Self> {
        Some(match number {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::ReadWrite,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }

    /// Its number.
    #[must_use]
    pub fn to_wire(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::ReadWrite => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A packet's header, decoded and not yet believed.
///
/// ```
/// use vmm_devices::vsock::header::{Header, Op, TYPE_STREAM};
/// let header = Header { dst_port: 1000, kind: TYPE_STREAM, op: Op::Request.to_wire(), ..Header::default() };
/// assert_eq!(Header::from_bytes(&header.to_bytes()), header);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Address of the sender.
    pub src_cid: u64,
    /// Address of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Payload length in bytes.
    pub len: u32,
    /// Socket type.
    pub kind: u16,
    /// What the packet does: see [`Op`].
    pub op: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// The sender's receive buffer in bytes.
    pub buf_alloc: u32,
    /// Bytes that the sender has taken out of that buffer, wrapping.
    pub fwd_cnt: u32,
}

impl Header {
    /// Decodes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut fields = Fields(bytes);
        Self {
            src_cid: u64::from_le_bytes(fields.take()),
            dst_cid: u64::from_le_bytes(fields.take()),
            src_port: u32::from_le_bytes(fields.take()),
            dst_port: u32::from_le_bytes(fields.take()),
            len: u32::from_le_bytes(fields.take()),
            kind: u16::from_le_bytes(fields.take()),
            op: u16::from_le_bytes(fields.take()),
            flags: u32::from_le_bytes(fields.take()),
            buf_alloc: u32::from_le_bytes(fields.take()),
            fwd_cnt: u32::from_le_bytes(fields.take()),
        }
    }

    /// Encodes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// Takes fixed fields off the front of a header. The fields of [`Header::from_bytes`] add up to its
/// length.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_first_chunk().unwrap_or((&[0; N], &[]));
        self.0 = rest;
        *field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_that_of_the_specification() {
        let header = Header {
            src_cid: 0x0807_0605_0403_0201,
            dst_cid: 0x100f_0e0d_0c0b_0a09,
            src_port: 0x1413_1211,
            dst_port: 0x1817_1615,
            len: 0x1c1b_1a19,
            kind: 0x1e1d,
            op: 0x201f,
            flags: 0x2423_2221,
            buf_alloc: 0x2827_2625,
            fwd_cnt: 0x2c2b_2a29,
        };
        let expected: [u8; HEADER_LEN] = std::array::from_fn(|index| index as u8 + 1);
        assert_eq!(header.to_bytes(), expected);
        assert_eq!(Header::from_bytes(&expected), header);
    }

    #[test]
    fn ho03_op_numbers_at_0_1_max_and_max_plus_1() {
        assert_eq!(Op::from_wire(0), None);
        assert_eq!(Op::from_wire(1), Some(Op::Request));
        assert_eq!(Op::from_wire(7), Some(Op::CreditRequest));
        assert_eq!(Op::from_wire(8), None);
        assert_eq!(Op::from_wire(u16::MAX), None);
        for number in 1..=7 {
            assert_eq!(Op::from_wire(number).unwrap().to_wire(), number);
        }
    }
}
