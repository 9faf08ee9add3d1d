//! The incoming half of a connection: frames in sequence, each whole within its deadline.

use crate::frame::{Decoder, Frame, Header};
use crate::limits::HELLO_DEADLINE_NS;

use super::{Violation, demand};

#[derive(Debug)]
pub(crate) struct Inbound {
    decoder: Decoder,
    sequence: u64,
    last: Option<Header>,
    /// When the frame that is arriving began.
    since: Option<u64>,
    /// When bytes came last.
    seen: u64,
}

impl Inbound {
    pub(crate) fn new(decoder: Decoder) -> Self {
        Self {
            decoder,
            sequence: 0,
            last: None,
            since: None,
            seen: 0,
        }
    }

    pub(crate) fn space(&mut self) -> &mut [u8] {
        self.decoder.space()
    }

    pub(crate) fn filled(&mut self, count: usize, now: u64) {
        if count > 0 {
            self.decoder.filled(count);
            self.seen = now;
            self.since.get_or_insert(now);
        }
    }

    /// Takes the next frame, if it is whole and in sequence; [`frame`](Self::frame) is then that
    /// frame.
    pub(crate) fn take(&mut self) -> Result<bool, Violation> {
        let Some(header) = self.decoder.take()? else {
            return Ok(false);
        };
        let expected = self.sequence + 1;
        demand(header.sequence == expected, || Violation::Sequence {
            expected,
            found: header.sequence,
        })?;
        self.sequence = expected;
        self.last = Some(header);
        self.since = self.decoder.partial().then_some(self.seen);
        Ok(true)
    }

    pub(crate) fn frame(&self) -> Option<Frame<'_>> {
        self.last.map(|header| Frame {
            header,
            payload: self.decoder.payload(),
        })
    }

    /// Bytes were not read for a reason of ours: the other side is not to blame for the time.
    pub(crate) fn excuse(&mut self, now: u64) {
        self.since = self.decoder.partial().then_some(now);
    }

    /// When the frame that is arriving must be whole.
    pub(crate) fn deadline(&self) -> Option<u64> {
        self.since
            .map(|since| since.saturating_add(HELLO_DEADLINE_NS))
    }
}
