//! Frames: a fixed header and a payload, and the incremental decoder that finds them in a byte stream.

use std::ops::Range;

use crate::message::{FrameKind, max_payload};

/// Bytes of a frame's header.
pub const HEADER_LEN: usize = 24;

/// The header of a frame, checked.
///
/// On the wire, little endian: payload length `u32`, kind `u8`, flags `u8` (zero), reserved `u16` (zero), id
/// `u64`, sequence `u64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload after the header.
    pub length: u32,
    /// What the payload is.
    pub kind: FrameKind,
    /// The request that it belongs to; 0 for the connection itself.
    pub id: u64,
    /// Counts the frames of one direction from 1.
    pub sequence: u64,
}

impl Header {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..4].copy_from_slice(&self.length.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// Checks everything that a header says by itself: reserved bits, the kind, and the length for that kind.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let [l0, l1, l2, l3, kind, flags, r0, r1, rest @ ..] = *bytes;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let reserved = u32::from_le_bytes([flags, r0, r1, 0]);
        if reserved != 0 && !crate::negative_control("SE01") {
            return Err(FrameError::Reserved { bits: reserved });
        }
        let kind = FrameKind::from_wire(kind).ok_or(FrameError::Kind { kind })?;
        let limit = max_payload(kind);
        if length as usize > limit {
            return Err(FrameError::Length {
                kind,
                length,
                limit,
            });
        }
        let (id, sequence) = rest.split_at(8);
        let word = |bytes: &[u8]| {
            bytes
                .iter()
                .rev()
                .fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
        };
        Ok(Self {
            length,
            kind,
            id: word(id),
            sequence: word(sequence),
        })
    }
}

/// What is wrong with a frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A bit that no version gives a meaning to is set.
    #[error("reserved bits {bits:#x} are set in the header")]
    Reserved {
        /// Flags in the low byte, the reserved field above.
        bits: u32,
    },
    /// No version has this kind.
    #[error("unknown kind {kind:#x}")]
    Kind {
        /// The kind.
        kind: u8,
    },
    /// The payload is longer than any of its kind may be.
    #[error("payload of {length} bytes, a {kind:?} has at most {limit}")]
    Length {
        /// The kind.
        kind: FrameKind,
        /// What the header says.
        length: u32,
        /// What is allowed.
        limit: usize,
    },
}

/// A frame whose payload lies in the decoder's buffer.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// The checked header.
    pub header: Header,
    /// Exactly `header.length` bytes.
    pub payload: &'a [u8],
}

/// Finds frames in a byte stream that arrives in pieces of any size.
///
/// The reader of a socket reads into [`space`](Self::space), says how much it got by [`filled`](Self::filled)
/// and takes frames until there is none. Payloads are never copied out. Memory is bounded by what was asked
/// for at the start, and by one frame of the largest kind ([`limits::MAX_EXEC_PAYLOAD`]) while such a frame arrives.
///
/// ```
/// use vmm_protocol::{ClientMessage, Decoder};
///
/// let mut bytes = Vec::new();
/// ClientMessage::Ping.encode(5, 1, &mut bytes)?;
///
/// let mut decoder = Decoder::new();
/// for byte in bytes {
///     assert!(decoder.next()?.is_none());
///     decoder.space()[0] = byte;
///     decoder.filled(1);
/// }
/// let frame = decoder.next()?.expect("the frame is complete");
/// assert_eq!((frame.header.id, frame.header.sequence), (5, 1));
/// assert_eq!(ClientMessage::decode(&frame)?, ClientMessage::Ping);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`limits::MAX_EXEC_PAYLOAD`]: crate::limits::MAX_EXEC_PAYLOAD
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    payload: Range<usize>,
    base: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// The smallest decoder: 4 KiB while frames are small.
    pub fn new() -> Self {
        Self::with_capacity(4096)
    }

    /// A decoder whose reads may be this large, for a side that gets bulk data.
    pub fn with_capacity(capacity: usize) -> Self {
        let base = capacity.max(HEADER_LEN);
        Self {
            buffer: vec![0; base],
            start: 0,
            end: 0,
            payload: 0..0,
            base,
        }
    }

    /// Where the next bytes of the stream go. Never empty after [`next`](Self::next) has said that there is no
    /// frame.
    pub fn space(&mut self) -> &mut [u8] {
        self.make_room();
        &mut self.buffer[self.end..]
    }

    /// `count` bytes were written to the front of [`space`](Self::space).
    pub fn filled(&mut self, count: usize) {
        self.end = self.buffer.len().min(self.end + count);
    }

    /// The stream has ended or paused inside a frame.
    pub fn partial(&self) -> bool {
        self.start != self.end
    }

    /// The next complete frame, if the stream has one by now. The frame is taken: the next call gives the one
    /// after it. An error is final.
    #[expect(
        clippy::should_implement_trait,
        reason = "lends from the decoder, which an Iterator cannot"
    )]
    pub fn next(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        let header = self.take()?;
        Ok(header.map(|header| Frame {
            header,
            payload: self.payload(),
        }))
    }

    /// Takes the next complete frame; its payload is then [`payload`](Self::payload).
    pub(crate) fn take(&mut self) -> Result<Option<Header>, FrameError> {
        let Some(header) = self.header()? else {
            return Ok(None);
        };
        let whole = HEADER_LEN + header.length as usize;
        if self.end - self.start < whole {
            return Ok(None);
        }
        self.payload = self.start + HEADER_LEN..self.start + whole;
        self.start += whole;
        Ok(Some(header))
    }

    /// The payload of the frame that was taken last. Empty once there was more [`space`](Self::space).
    pub(crate) fn payload(&self) -> &[u8] {
        &self.buffer[self.payload.clone()]
    }

    fn header(&self) -> Result<Option<Header>, FrameError> {
        self.buffer[self.start..self.end]
            .first_chunk()
            .map(Header::decode)
            .transpose()
    }

    fn make_room(&mut self) {
        self.payload = 0..0;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > self.base {
                self.buffer.truncate(self.base);
                self.buffer.shrink_to_fit();
            }
            return;
        }
        // A header that does not decode needs no room: `next` reports it.
        let length = self
            .header()
            .ok()
            .flatten()
            .map_or(0, |header| header.length as usize);
        let whole = HEADER_LEN + length;
        if self.start + whole > self.buffer.len() || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if whole > self.buffer.len() {
            self.buffer.resize(whole, 0);
        }
    }
}
