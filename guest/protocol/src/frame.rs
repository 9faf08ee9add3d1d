//! Frames: a fixed header and a payload, and the incremental decoder that finds them in a byte
//! stream.

use std::ops::Range;

use crate::message::{FrameKind, max_payload};

/// Bytes of a frame's header.
pub const HEADER_LEN: usize = 24;

/// The header of a frame, checked.
///
/// On the wire, little endian: payload length `u32`, kind `u8`, flags `u8` (zero), reserved `u16`
/// (zero), id `u64`, sequence `u64`.
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

    /// Checks everything that a header says by itself: reserved bits, the kind, and the length for
    /// that kind.
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
/// The reader of a socket reads into [`space`](Self::space), says how much it got by
/// [`filled`](Self::filled) and takes frames until there is none. Payloads are never copied out.
/// Memory is bounded by what was asked for at the start, and by one frame of the largest kind
/// ([`limits::MAX_EXEC_PAYLOAD`]) while such a frame arrives.
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

    /// Where the next bytes of the stream go. Never empty after [`next`](Self::next) has said that
    /// there is no frame.
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

    /// The next complete frame, if the stream has one by now. The frame is taken: the next call
    /// gives the one after it. An error is final.
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

    /// The payload of the frame that was taken last. Empty once there was more
    /// [`space`](Self::space).
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::{MAX_DATA, MAX_EXEC_PAYLOAD, MAX_PAYLOAD};
    use crate::message::{ClientMessage, ExecRequest};

    fn header(kind: FrameKind, length: usize) -> [u8; HEADER_LEN] {
        Header {
            length: length as u32,
            kind,
            id: 1,
            sequence: 1,
        }
        .encode()
    }

    #[test]
    fn ho03_lengths_at_zero_max_and_one_more_of_every_kind() {
        for kind in FrameKind::ALL.iter().copied() {
            let limit = max_payload(kind);
            for length in [0, limit] {
                assert!(
                    Header::decode(&header(kind, length)).is_ok(),
                    "{kind:?} {length}"
                );
            }
            for length in [limit + 1, u32::MAX as usize] {
                let error = Header::decode(&header(kind, length)).unwrap_err();
                assert_eq!(
                    error,
                    FrameError::Length {
                        kind,
                        length: length as u32,
                        limit
                    }
                );
            }
        }
    }

    #[test]
    fn ho03_every_kind_has_one_byte_and_no_other_byte_is_one() {
        let known: Vec<u8> = FrameKind::ALL.iter().map(|kind| *kind as u8).collect();
        for kind in 0..=255 {
            let mut bytes = header(FrameKind::Ping, 0);
            bytes[4] = kind;
            assert_eq!(
                Header::decode(&bytes).is_ok(),
                known.contains(&kind),
                "{kind:#x}"
            );
        }
    }

    #[test]
    fn se01_every_reserved_bit_is_refused() {
        for bit in 0..24 {
            let mut bytes = header(FrameKind::Ping, 0);
            bytes[5 + bit / 8] |= 1 << (bit % 8);
            assert_eq!(
                Header::decode(&bytes),
                Err(FrameError::Reserved { bits: 1 << bit })
            );
        }
    }

    #[test]
    fn ho03_memory_of_a_decoder_is_one_frame_while_it_arrives() {
        let mut decoder = Decoder::new();
        for (kind, length) in [
            (FrameKind::Exec, MAX_EXEC_PAYLOAD),
            (FrameKind::Stdin, MAX_PAYLOAD),
        ] {
            let mut sent = header(kind, length).to_vec();
            sent.resize(HEADER_LEN + length, 7);
            let mut rest = sent.as_slice();
            while !rest.is_empty() {
                assert!(matches!(decoder.next(), Ok(None)));
                let space = decoder.space();
                let count = space.len().min(rest.len()).min(1000);
                space[..count].copy_from_slice(&rest[..count]);
                decoder.filled(count);
                rest = &rest[count..];
                assert!(
                    decoder.buffer.len() <= HEADER_LEN + length,
                    "{}",
                    decoder.buffer.len()
                );
            }
            assert_eq!(
                decoder.next().unwrap().map(|frame| frame.payload.len()),
                Some(length)
            );
            decoder.space();
            assert_eq!(decoder.buffer.len(), 4096, "given back");
        }
    }

    #[test]
    fn refused_header_stays_refused() {
        let mut decoder = Decoder::new();
        decoder.space()[..HEADER_LEN].copy_from_slice(&[0xff; HEADER_LEN]);
        decoder.filled(HEADER_LEN);
        for _ in 0..3 {
            assert!(decoder.next().is_err());
            assert!(!decoder.space().is_empty());
        }
    }

    proptest! {
        #![proptest_config(crate::cases(128))]

        #[test]
        fn frames_come_out_as_they_went_in_however_they_are_cut(
            sizes in proptest::collection::vec(prop_oneof![0..100_usize, Just(MAX_DATA), Just(70_000_usize)], 1..12),
            cuts in proptest::collection::vec(1..90_000_usize, 1..20),
            capacity in prop_oneof![Just(0_usize), Just(4096_usize), Just(256_usize << 10)],
        ) {
            let mut stream = Vec::new();
            for (at, size) in sizes.iter().enumerate() {
                let data = vec![at as u8; *size];
                let message = match *size > MAX_DATA {
                    true => ClientMessage::Exec(Box::new(ExecRequest::new([data]))),
                    false => ClientMessage::Stdin(&data),
                };
                prop_assert!(message.encode(9, at as u64, &mut stream).is_ok());
            }
            let mut decoder = Decoder::with_capacity(capacity);
            let (mut rest, mut cuts, mut seen) = (stream.as_slice(), cuts.iter().cycle(), 0);
            loop {
                while let Some(frame) = decoder.next().unwrap_or_else(|error| unreachable!("{error}")) {
                    prop_assert_eq!(frame.header.sequence, seen as u64);
                    match ClientMessage::decode(&frame) {
                        Ok(ClientMessage::Stdin(data)) => prop_assert_eq!(data, vec![seen as u8; sizes[seen]]),
                        Ok(ClientMessage::Exec(exec)) => prop_assert_eq!(exec.argv[0].len(), sizes[seen]),
                        other => prop_assert!(false, "{:?}", other),
                    }
                    seen += 1;
                }
                if rest.is_empty() {
                    break;
                }
                let space = decoder.space();
                prop_assert!(!space.is_empty());
                let count = space.len().min(rest.len()).min(*cuts.next().unwrap_or(&1));
                space[..count].copy_from_slice(&rest[..count]);
                decoder.filled(count);
                rest = &rest[count..];
            }
            prop_assert_eq!(seen, sizes.len());
            prop_assert!(!decoder.partial());
        }

        #[test]
        fn ho03_any_bytes_are_frames_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::with_capacity(bytes.len());
            decoder.space()[..bytes.len()].copy_from_slice(&bytes);
            decoder.filled(bytes.len());
            let end = loop {
                match decoder.next() {
                    Ok(Some(_)) => {}
                    Ok(None) => break true,
                    Err(_) => break false,
                }
            };
            prop_assert!(!end || !decoder.space().is_empty());
        }
    }
}
