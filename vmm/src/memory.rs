//! Guest memory: one or two anonymous mappings around the 32-bit gap.
//!
//! Memory is reserved, not touched: the host backs a page at the guest's first use of it, so a large
//! guest costs nothing at start. Every access of ours goes through `vm_memory`, which checks bounds and
//! uses volatile copies, because the guest may write the same bytes at the same time.

use vm_memory::mmap::{FromRangesError, MmapRegionError};
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::layout::{GAP_END, GAP_START};

/// Smallest guest memory: below it not even a fast guest has room.
pub const MIN: u64 = 2 << 20;
/// Largest guest memory: what 40 physical address bits hold, less the gap.
pub const MAX: u64 = (1 << 40) - (4 << 30);
/// Sizes are multiples of this.
pub const PAGE: u64 = 4096;

/// Why guest memory could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The size is out of range or not whole pages.
    #[error(
        "memory of {0} bytes: use {MIN} to {MAX} bytes in steps of {PAGE}, for instance --memory 256M"
    )]
    Size(u64),
    /// The host refused the mapping.
    #[error("cannot map {size} bytes of guest memory: use a smaller --memory")]
    Map {
        /// Bytes asked for.
        size: u64,
        /// What the host said.
        #[source]
        source: FromRangesError,
    },
}

/// Splits `size` bytes of RAM around the gap: `(start, length)` of one or two regions.
///
/// ```
/// assert_eq!(vmm::memory::regions(128 << 20), [(0, 128 << 20)]);
/// assert_eq!(vmm::memory::regions(4 << 30), [(0, 3 << 30), (4 << 30, 1 << 30)]);
/// ```
#[must_use]
pub fn regions(size: u64) -> Vec<(u64, u64)> {
    if size <= GAP_START {
        vec![(0, size)]
    } else {
        vec![(0, GAP_START), (GAP_END, size - GAP_START)]
    }
}

/// Checks a memory size.
///
/// # Errors
/// [`Error::Size`] outside [`MIN`]..=[`MAX`] or when it is not whole pages.
pub fn check(size: u64) -> Result<(), Error> {
    if (MIN..=MAX).contains(&size) && size.is_multiple_of(PAGE) {
        Ok(())
    } else {
        Err(Error::Size(size))
    }
}

/// Maps guest memory of `size` bytes.
///
/// # Errors
/// [`Error::Size`] as for [`check`], [`Error::Map`] when the host has no room.
pub fn create(size: u64) -> Result<GuestMemoryMmap, Error> {
    check(size)?;
    let map = |source| Error::Map { size, source };
    let mut parts = Vec::new();
    for (start, length) in regions(size) {
        let region =
            aligned(length as usize).map_err(|error| map(FromRangesError::MmapRegion(error)))?;
        let region = GuestRegionMmap::new(region, GuestAddress(start))
            .ok_or(map(FromRangesError::InvalidGuestRegion))?;
        parts.push(region);
    }
    GuestMemoryMmap::from_regions(parts).map_err(|error| map(error.into()))
}

/// Size and alignment of x86's large pages.
const HUGE: usize = 2 << 20;

/// A mapping that starts at a multiple of [`HUGE`], if it can be had.
///
/// KVM maps a large page of the host's as one only where guest and host address have the same offset in it
/// (Linux `arch/x86/kvm/mmu/mmu.c`, `disallow_lpage`); kernels before 6.7 align no anonymous mapping by themselves.
/// The kernel allots addresses downwards, so a filler above moves the mapping to its place.
fn aligned(length: usize) -> Result<MmapRegion, MmapRegionError> {
    let mut fillers = Vec::new();
    loop {
        let region = MmapRegion::new(length)?;
        let excess = region.as_ptr() as usize % HUGE;
        // A filler may land in some other hole; a few of them fill those that there are.
        if excess == 0 || fillers.len() == 4 {
            return Ok(region);
        }
        drop(region);
        fillers.push(MmapRegion::<()>::new(excess)?);
    }
}

/// Bytes of RAM below the gap: what the kernel, the initramfs and all boot data must fit in.
#[must_use]
pub fn low_end(memory: &GuestMemoryMmap) -> u64 {
    memory.iter().next().map_or(0, GuestMemoryRegion::len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn memory_at_the_gap_boundary_is_one_region() {
        assert_eq!(regions(GAP_START), [(0, GAP_START)]);
        assert_eq!(regions(GAP_START + PAGE), [(0, GAP_START), (GAP_END, PAGE)]);
    }

    #[test]
    fn sizes_out_of_range_or_not_whole_pages_are_refused() {
        for size in [0, 1, MIN - PAGE, MIN + 1, MAX + PAGE, u64::MAX] {
            let error = create(size).unwrap_err().to_string();
            assert!(error.contains(&size.to_string()), "{error}");
        }
        create(MIN).unwrap();
    }

    #[test]
    fn regions_start_at_large_pages() {
        for size in [MIN, 128 << 20, 5 << 30] {
            for region in create(size).unwrap().iter() {
                assert_eq!(region.as_ptr() as usize % HUGE, 0, "{size:#x}");
            }
        }
    }

    #[test]
    fn five_gib_has_bytes_on_both_sides_of_the_gap_and_none_in_it() {
        let memory = create(5 << 30).unwrap();
        memory.write_obj(1u8, GuestAddress(GAP_START - 1)).unwrap();
        memory.write_obj(2u8, GuestAddress(GAP_END)).unwrap();
        memory
            .write_obj(3u8, GuestAddress(GAP_END + (2 << 30) - 1))
            .unwrap();
        memory.write_obj(4u8, GuestAddress(GAP_START)).unwrap_err();
        memory
            .write_obj(5u8, GuestAddress(GAP_END - 1))
            .unwrap_err();
        memory
            .write_obj(6u8, GuestAddress(GAP_END + (2 << 30)))
            .unwrap_err();
        assert_eq!(low_end(&memory), GAP_START);
    }
}
