//! The fields of a payload: fixed integers in little endian, and bytes behind a `u32` length.
//!
//! A payload is read to its last byte or not at all: what is left over is an error, so that two
//! readers never disagree about what a frame said.

use crate::limits::MAX_STRINGS;

/// Why a payload could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The payload ends inside a field.
    #[error("payload ends inside field {field}")]
    Short {
        /// The field that was being read.
        field: &'static str,
    },
    /// Bytes are left over after the last field.
    #[error("{left} bytes are left over after the last field")]
    LeftOver {
        /// How many.
        left: usize,
    },
    /// A field has a value that no version of the protocol gives a meaning to.
    #[error("field {field} has the value {value}, which means nothing")]
    Value {
        /// The field.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// A list or string is longer than its own limit.
    #[error("field {field} has {length} elements, at most {limit} are allowed")]
    Long {
        /// The field.
        field: &'static str,
        /// Its length.
        length: u64,
        /// Its limit.
        limit: u64,
    },
    /// Text is not UTF-8.
    #[error("field {field} is not UTF-8")]
    Text {
        /// The field.
        field: &'static str,
    },
}

/// Reads the fields of one payload in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    /// The payload has been read whole.
    pub(crate) fn finish(self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(WireError::LeftOver { left }),
        }
    }

    fn take(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self
            .rest
            .split_at_checked(count)
            .ok_or(WireError::Short { field })?;
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(WireError::Short { field })?;
        self.rest = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn i32(&mut self, field: &'static str) -> Result<i32, WireError> {
        Ok(i32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Value {
                field,
                value: value.into(),
            }),
        }
    }

    /// Bits outside `known` are reserved and must be zero.
    pub(crate) fn flags(&mut self, known: u8, field: &'static str) -> Result<u8, WireError> {
        let value = self.u8(field)?;
        if value & !known != 0 {
            return Err(WireError::Value {
                field,
                value: value.into(),
            });
        }
        Ok(value)
    }

    pub(crate) fn bytes(
        &mut self,
        limit: usize,
        field: &'static str,
    ) -> Result<&'a [u8], WireError> {
        let length = self.u32(field)?;
        if length as usize > limit {
            return Err(WireError::Long {
                field,
                length: length.into(),
                limit: limit as u64,
            });
        }
        self.take(length as usize, field)
    }

    pub(crate) fn text(&mut self, limit: usize, field: &'static str) -> Result<String, WireError> {
        let bytes = self.bytes(limit, field)?;
        let text = std::str::from_utf8(bytes).map_err(|_| WireError::Text { field })?;
        Ok(text.to_owned())
    }

    /// A `u32` count of elements, each at least `element` bytes long: a count that cannot be true
    /// of what is left is refused before anything is allocated for it.
    pub(crate) fn count(
        &mut self,
        element: usize,
        field: &'static str,
    ) -> Result<usize, WireError> {
        let count = self.u32(field)? as usize;
        if count > MAX_STRINGS {
            return Err(WireError::Long {
                field,
                length: count as u64,
                limit: MAX_STRINGS as u64,
            });
        }
        if count.saturating_mul(element) > self.rest.len() {
            return Err(WireError::Short { field });
        }
        Ok(count)
    }

    pub(crate) fn list(
        &mut self,
        limit: usize,
        field: &'static str,
    ) -> Result<Vec<Vec<u8>>, WireError> {
        let count = self.count(4, field)?;
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(self.bytes(limit, field)?.to_vec());
        }
        Ok(list)
    }
}

/// Appends the fields of one payload in order.
///
/// A field that is too long for its `u32` length cannot be written by this crate: every caller's
/// message is checked against its kind's limit afterwards (`message::seal`), which is far below.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    pub(crate) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(&mut self, value: u8) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn i32(&mut self, value: i32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(crate) fn bool(&mut self, value: bool) -> &mut Self {
        self.u8(value.into())
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(bytes.len() as u32).raw(bytes)
    }

    /// Text, cut at a character boundary so that it keeps within `limit` bytes.
    pub(crate) fn text(&mut self, text: &str, limit: usize) -> &mut Self {
        self.bytes(&text.as_bytes()[..text.floor_char_boundary(limit)])
    }

    pub(crate) fn list(&mut self, list: &[Vec<u8>]) -> &mut Self {
        self.u32(list.len() as u32);
        for bytes in list {
            self.bytes(bytes);
        }
        self
    }
}
