//! Why an agent does not take a request, for people and for programs.

use crate::cause::wire_enum;
use crate::limits::{MAX_NUMBERS, MAX_TEXT};
use crate::wire::{Reader, WireError, Writer};

wire_enum! {
    /// Why a request was not taken.
    RefusedCode, "refused code",
    /// The request is invalid.
    Invalid = 1 => "invalid",
    /// The session, or the guest, has as many execs as it may have. Numbers: those that were not released.
    TooManyExecs = 2 => "too_many_execs",
    /// Its store does not fit into the budget. Numbers: the execs that hold it.
    NoBudget = 3 => "no_budget",
    /// The guest goes down.
    GoingDown = 4 => "going_down",
    /// The agent of this version or guest cannot do it.
    Unsupported = 5 => "unsupported",
    /// There is no such exec: it never was, or is kept no longer.
    UnknownExec = 6 => "unknown_exec",
    /// Bytes from this offset on are kept no longer. Numbers: the earliest offsets of stdout and stderr.
    BelowStart = 7 => "below_start",
    /// The exec has not ended.
    NotEnded = 8 => "not_ended",
    /// The exec has ended.
    HasEnded = 9 => "has_ended",
    /// Arguments and environment are too large, together or one of them.
    TooLarge = 10 => "too_large",
}

/// A request that was not taken; nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Why.
    pub code: RefusedCode,
    /// In plain words: at most [`MAX_TEXT`] bytes.
    pub message: String,
    /// What the code says that they are; at most [`MAX_NUMBERS`].
    pub numbers: Vec<u64>,
}

impl Refusal {
    /// A refusal without numbers.
    pub fn new(code: RefusedCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            numbers: Vec::new(),
        }
    }

    pub(crate) fn write(&self, writer: &mut Writer<'_>) {
        let numbers = &self.numbers[..self.numbers.len().min(MAX_NUMBERS)];
        writer
            .u8(self.code as u8)
            .text(&self.message, MAX_TEXT)
            .u32(numbers.len() as u32);
        for number in numbers {
            writer.u64(*number);
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let code = RefusedCode::from_wire(reader.u8("refused code")?)?;
        let message = reader.text(MAX_TEXT, "message")?;
        let count = reader.count(8, "numbers")?;
        if count > MAX_NUMBERS {
            return Err(WireError::Long {
                field: "numbers",
                length: count as u64,
                limit: MAX_NUMBERS as u64,
            });
        }
        let numbers = (0..count)
            .map(|_| reader.u64("numbers"))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            code,
            message,
            numbers,
        })
    }
}
