//! Exit statuses (the numbers of a workload's causes live in the protocol).

/// All went well.
pub const OK: u8 = 0;
/// What was asked for failed, for verbs other than `run`.
pub const FAILED: u8 = 1;
/// The command line was wrong, for verbs other than `run`.
pub const USAGE: u8 = 2;
/// There is no sandbox of that name.
pub const MISSING: u8 = 3;
/// The sandbox is not in a state for this.
pub const STATE: u8 = 4;
/// This tool failed before the workload started, or lost it.
pub const TOOL: u8 = 125;
/// Added to the number of the signal that ended us.
const SIGNALED: u8 = 128;

/// The status of a process that a signal ended, as shells have it.
pub const fn signaled(signal: i32) -> u8 {
    SIGNALED.wrapping_add(signal as u8)
}
