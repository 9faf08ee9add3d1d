//! Frames on their way to a nonblocking socket, with output data left where it is: in the exec's
//! store.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::cause::Stream;
use crate::exec::Exec;
use crate::message::{AgentMessage, TooLarge, output_head};

use super::agent::Execs;

/// The most slices that one write gets.
const MAX_SLICES: usize = 64;

/// An exec that a session still sends from is gone: a mistake of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request {id} is gone while its output is being sent")]
pub struct MissingExec {
    /// The request.
    pub id: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Segment {
    /// This many of the outbox's own bytes.
    Own(usize),
    /// Bytes of a store.
    Store {
        id: u64,
        stream: Stream,
        offset: u64,
        length: usize,
    },
    /// All frames of this request have been written.
    End { id: u64 },
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    own: Vec<u8>,
    head: usize,
    segments: VecDeque<Segment>,
    queued: usize,
    sequence: u64,
    finished: Vec<u64>,
}

impl Outbox {
    /// Appends a message of the agent's own.
    pub(super) fn push(&mut self, id: u64, message: &AgentMessage<'_>) -> Result<(), TooLarge> {
        let before = self.own.len();
        message.encode(id, self.sequence + 1, &mut self.own)?;
        self.sequence += 1;
        self.extend(self.own.len() - before);
        Ok(())
    }

    /// Appends an output frame whose data is in a store.
    pub(super) fn output(&mut self, id: u64, stream: Stream, offset: u64, length: usize) {
        self.sequence += 1;
        let head = output_head(id, self.sequence, stream, offset, length as u32);
        self.own.extend_from_slice(&head);
        self.extend(head.len());
        self.segments.push_back(Segment::Store {
            id,
            stream,
            offset,
            length,
        });
        self.queued += length;
    }

    /// Everything of this request is queued.
    pub(super) fn end(&mut self, id: u64) {
        self.segments.push_back(Segment::End { id });
    }

    fn extend(&mut self, count: usize) {
        self.queued += count;
        match self.segments.back_mut() {
            Some(Segment::Own(length)) => *length += count,
            _ => self.segments.push_back(Segment::Own(count)),
        }
    }

    /// Bytes that are still to be written.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Bytes of them that take memory here.
    pub(super) fn held(&self) -> usize {
        self.own.len() - self.head
    }

    /// The pieces of the next write, in order.
    pub(super) fn gather<'a>(
        &'a self,
        execs: &'a impl Execs,
    ) -> Result<Vec<IoSlice<'a>>, MissingExec> {
        let mut slices = Vec::with_capacity(self.segments.len().min(MAX_SLICES));
        let mut own = &self.own[self.head..];
        for segment in &self.segments {
            if slices.len() == MAX_SLICES {
                break;
            }
            match *segment {
                Segment::Own(length) => {
                    let (piece, rest) = own.split_at(length);
                    own = rest;
                    slices.push(IoSlice::new(piece));
                }
                Segment::Store {
                    id,
                    stream,
                    offset,
                    length,
                } => {
                    let exec: &Exec = execs.exec(id).ok_or(MissingExec { id })?;
                    let piece = exec.bytes(stream, offset, length);
                    // Queued pieces lie together in one block, and stay until they are
                    // acknowledged.
                    if piece.len() != length {
                        return Err(MissingExec { id });
                    }
                    slices.push(IoSlice::new(piece));
                }
                Segment::End { .. } => {}
            }
        }
        Ok(slices)
    }

    /// The first `count` bytes were written.
    pub(super) fn wrote(&mut self, mut count: usize) {
        self.queued -= count.min(self.queued);
        while let Some(segment) = self.segments.front_mut() {
            let done = match segment {
                Segment::Own(length) => {
                    let taken = count.min(*length);
                    self.head += taken;
                    *length -= taken;
                    count -= taken;
                    *length == 0
                }
                Segment::Store { offset, length, .. } => {
                    let taken = count.min(*length);
                    *offset += taken as u64;
                    *length -= taken;
                    count -= taken;
                    *length == 0
                }
                Segment::End { id } => {
                    self.finished.push(*id);
                    true
                }
            };
            if !done {
                break;
            }
            self.segments.pop_front();
        }
        if self.head == self.own.len() {
            self.own.clear();
            self.own.shrink_to(16 << 10);
            self.head = 0;
        } else if self.head > 32 << 10 {
            self.own.drain(..self.head);
            self.head = 0;
        }
    }

    /// Requests whose last frame has been written since the last call.
    pub(super) fn finished(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.finished)
    }
}
