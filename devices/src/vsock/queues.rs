//! Descriptor chains as lists of guest memory slices.
//!
//! Whatever the driver puts in a chain ends in one of three ways: slices that lie in guest memory;
//! a packet that is too short, which its user drops; or a [`QueueError`], after which the device
//! asks for a reset. A chain is walked once and for at most as many steps as its table has entries,
//! so a loop ends too (HO01).

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestMemory, GuestMemoryMmap, Permissions, VolatileSlice};

use super::header::{HEADER_LEN, Header};
use super::io::MAX_SLICES;

/// `VRING_AVAIL_F_NO_INTERRUPT`: the driver wants no interrupts, if `EVENT_IDX` is not in use.
const NO_INTERRUPT: u16 = 1;

/// The driver has broken a queue; the device needs a reset.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The rings themselves: an index that runs ahead, or memory that is gone.
    #[error("broken ring")]
    Ring(#[source] virtio_queue::Error),
    /// The chain loops, leaves its table, or is too long.
    #[error("chain {head} has no end")]
    Endless {
        /// Its head.
        head: u16,
    },
    /// The chain points outside of guest memory.
    #[error("chain {head} lies outside of guest memory")]
    Outside {
        /// Its head.
        head: u16,
        /// What guest memory said.
        #[source]
        source: vm_memory::GuestMemoryError,
    },
    /// A receive buffer without room for a header and a byte.
    #[error("receive buffer {head} has {length} bytes")]
    TooSmall {
        /// Its head.
        head: u16,
        /// Its length in bytes.
        length: usize,
    },
}

impl From<virtio_queue::Error> for QueueError {
    fn from(error: virtio_queue::Error) -> Self {
        Self::Ring(error)
    }
}

/// Appends one direction of a chain to `slices` and returns its length in bytes.
fn collect<'m>(
    chain: DescriptorChain<&'m GuestMemoryMmap>,
    memory: &'m GuestMemoryMmap,
    writable: bool,
    slices: &mut Vec<VolatileSlice<'m>>,
) -> Result<usize, QueueError> {
    let head = chain.head_index();
    let start = slices.len();
    let access = if writable {
        Permissions::Write
    } else {
        Permissions::Read
    };
    let mut length = 0;
    // The iterator just stops at a bad index, at a table's end and after as many steps as the table
    // has entries; whether the chain has really ended, only its last descriptor says.
    let mut ended = false;
    for descriptor in chain {
        ended = !descriptor.has_next();
        if descriptor.is_write_only() != writable {
            continue;
        }
        let outside = |source| QueueError::Outside { head, source };
        let parts =
            GuestMemory::get_slices(memory, descriptor.addr(), descriptor.len() as usize, access)
                .map_err(outside)?;
        for part in parts {
            let part = part.map_err(outside)?;
            length += part.len();
            slices.push(part);
        }
        if slices.len() - start > MAX_SLICES {
            return Err(QueueError::Endless { head });
        }
    }
    if ended {
        Ok(length)
    } else {
        Err(QueueError::Endless { head })
    }
}

/// A packet of the guest.
#[derive(Debug)]
pub(super) struct TxPacket<'m, 's> {
    /// The chain's head, for the used ring.
    pub(super) head: u16,
    /// The header, copied out of guest memory once. `None` if the chain is shorter than one.
    pub(super) header: Option<Header>,
    /// What follows the header, still in guest memory.
    pub(super) payload: &'s mut Vec<VolatileSlice<'m>>,
    /// Its length in bytes.
    pub(super) length: usize,
}

/// Takes the next packet off a TX queue; `payload` is scratch space.
pub(super) fn next_tx<'m, 's>(
    queue: &mut Queue,
    memory: &'m GuestMemoryMmap,
    payload: &'s mut Vec<VolatileSlice<'m>>,
) -> Result<Option<TxPacket<'m, 's>>, QueueError> {
    payload.clear();
    let Some(chain) = queue.iter(memory)?.next() else {
        return Ok(None);
    };
    let head = chain.head_index();
    let total = collect(chain, memory, false, payload)?;
    let mut header = [0; HEADER_LEN];
    let mut filled = 0;
    let header = (total >= HEADER_LEN).then(|| {
        split_front(payload, 0, HEADER_LEN, |part| {
            part.copy_to(&mut header[filled..]);
            filled += part.len();
        });
        Header::from_bytes(&header)
    });
    Ok(Some(TxPacket {
        head,
        header,
        payload,
        length: total.saturating_sub(HEADER_LEN),
    }))
}

/// Receive buffers taken off the queue together, to be filled by one read.
#[derive(Debug, Default)]
pub(super) struct RxBatch<'m> {
    chains: Vec<RxChain>,
    headers: Vec<VolatileSlice<'m>>,
    payload: Vec<VolatileSlice<'m>>,
    room: usize,
}

#[derive(Debug)]
struct RxChain {
    head: u16,
    header_slices: usize,
    room: usize,
}

impl<'m> RxBatch<'m> {
    /// Takes buffers until there is room for `want` bytes of payload or no buffer is left. Those
    /// that stay unused must be given back with [`RxBatch::give_back`].
    pub(super) fn take(
        &mut self,
        queue: &mut Queue,
        memory: &'m GuestMemoryMmap,
        want: usize,
    ) -> Result<(), QueueError> {
        self.clear();
        let mut chains = queue.iter(memory)?;
        while self.room < want && self.payload.len() < MAX_SLICES / 2 {
            let Some(chain) = chains.next() else { break };
            let head = chain.head_index();
            let start = self.payload.len();
            let length = collect(chain, memory, true, &mut self.payload)?;
            if length <= HEADER_LEN {
                return Err(QueueError::TooSmall { head, length });
            }
            let before = self.headers.len();
            split_front(&mut self.payload, start, HEADER_LEN, |part| {
                self.headers.push(part);
            });
            let room = length - HEADER_LEN;
            self.room += room;
            self.chains.push(RxChain {
                head,
                header_slices: self.headers.len() - before,
                room,
            });
        }
        if self.room > want {
            truncate(&mut self.payload, want);
            self.room = want;
        }
        Ok(())
    }

    /// The room for payload in bytes: what was asked for or less.
    pub(super) fn room(&self) -> usize {
        self.room
    }

    /// True if there was no buffer.
    pub(super) fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// That room itself.
    pub(super) fn payload(&self) -> &[VolatileSlice<'m>] {
        &self.payload
    }

    /// Hands the filled buffers to the guest, `length` bytes of payload in all, each as a packet
    /// whose header `header` makes for its share, and gives back the rest. Returns how many buffers
    /// were used. A length of 0 is one packet without data.
    pub(super) fn complete(
        &mut self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        mut length: usize,
        mut header: impl FnMut(u32) -> Option<Header>,
    ) -> Result<usize, QueueError> {
        let mut used = 0;
        let mut headers = self.headers.as_slice();
        for chain in &self.chains {
            let share = chain.room.min(length);
            if used > 0 && share == 0 {
                break;
            }
            // Shares are at most the muxer's credit, which is a u32.
            let Some(header) = header(share as u32) else {
                break;
            };
            let bytes = header.to_bytes();
            let mut written = 0;
            let (own, rest) = headers.split_at(chain.header_slices);
            headers = rest;
            for slice in own {
                slice.copy_from(&bytes[written..]);
                written += slice.len();
            }
            queue.add_used(memory, chain.head, (HEADER_LEN + share) as u32)?;
            used += 1;
            length -= share;
        }
        self.give_back_after(queue, used);
        Ok(used)
    }

    /// Gives all buffers back.
    pub(super) fn give_back(&mut self, queue: &mut Queue) {
        self.give_back_after(queue, 0);
    }

    fn give_back_after(&mut self, queue: &mut Queue, used: usize) {
        // Not more than were taken, which is not more than the queue has.
        let unused = (self.chains.len() - used) as u16;
        queue.set_next_avail(queue.next_avail().wrapping_sub(unused));
        self.clear();
    }

    fn clear(&mut self) {
        self.chains.clear();
        self.headers.clear();
        self.payload.clear();
        self.room = 0;
    }
}

/// True if the driver is to be interrupted for the buffers used since the last call.
pub(super) fn wants_interrupt(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
) -> Result<bool, QueueError> {
    use vm_memory::{Bytes, GuestAddress};

    if queue.event_idx_enabled() {
        return Ok(queue.needs_notification(memory)?);
    }
    // needs_notification does not look at this flag.
    let flags: u16 = memory
        .load(
            GuestAddress(queue.avail_ring()),
            std::sync::atomic::Ordering::SeqCst,
        )
        .map_err(virtio_queue::Error::GuestMemory)?;
    Ok(u16::from_le(flags) & NO_INTERRUPT == 0)
}

/// Shortens a list of slices to `length` bytes.
pub(super) fn truncate(slices: &mut Vec<VolatileSlice<'_>>, length: usize) {
    let mut left = length;
    let mut kept = 0;
    for slice in slices.iter_mut() {
        if left == 0 {
            break;
        }
        if slice.len() > left {
            *slice = part(slice, 0, left);
        }
        left -= slice.len();
        kept += 1;
    }
    slices.truncate(kept);
}

/// Drops the first `length` bytes of a list of slices.
pub(super) fn advance(slices: &mut Vec<VolatileSlice<'_>>, length: usize) {
    split_front(slices, 0, length, |_| ());
}

/// Takes `length` bytes out of the slices from index `start` on, giving each part to `take`.
fn split_front<'m>(
    slices: &mut Vec<VolatileSlice<'m>>,
    start: usize,
    length: usize,
    mut take: impl FnMut(VolatileSlice<'m>),
) {
    let mut left = length;
    let mut whole = start;
    while left > 0 {
        let Some(slice) = slices.get_mut(whole) else {
            break;
        };
        if slice.len() > left {
            take(part(slice, 0, left));
            *slice = part(slice, left, slice.len() - left);
            break;
        }
        left -= slice.len();
        take(*slice);
        whole += 1;
    }
    slices.drain(start..whole);
}

/// A part of a slice; both callers have checked that it lies within.
fn part<'m>(slice: &VolatileSlice<'m>, offset: usize, length: usize) -> VolatileSlice<'m> {
    slice.subslice(offset, length).unwrap_or(*slice)
}
